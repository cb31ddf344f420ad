"""What changed, by node and by generation.

Changes are collected in the present generation. ``hand_over`` closes it, and it is retained until ``committed`` names
it or a later one; ``take_back`` merges what is retained into the present generation again. A node in which something
changed stays in the node table until then.

Changes below a directory with an excluded name are not collected, except those of a file with more than one link, which
may be reached by another path as well. Whether a place is excluded is found by walking up its parents, once for a node
in a generation when it is not, and once for an epoch (until a directory is renamed) when it is.
"""

from __future__ import annotations

from collections.abc import Collection

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.mount.nodes import ROOT_ID, Node, NodeTable


class Change:
    """What changed in one node."""

    __slots__ = ("attributes", "content", "made", "names", "subtree")

    def __init__(self) -> None:
        #: Of a directory: it is new, and nothing that is known of its inode number holds for it.
        self.made = False
        self.attributes = False
        #: Of a file.
        self.content = False
        #: Of a directory: entries that were made, removed or replaced.
        self.names: set[bytes] = set()
        #: Of a directory: anything below it may have changed unseen.
        self.subtree = False

    def merge(self, other: Change) -> None:
        """Add what ``other`` says."""
        self.attributes |= other.attributes
        self.content |= other.content
        self.made |= other.made
        self.names |= other.names
        self.subtree |= other.subtree


Generation = dict[Node, Change]


class DirtyTable:
    """All changes that are not committed."""

    def __init__(self, nodes: NodeTable, excluded: Collection[bytes]) -> None:
        self._nodes = nodes
        self._excluded = frozenset(excluded)
        self._epoch = 0
        self._changes: Generation = {}
        self._retained: list[tuple[int, Generation]] = []
        #: Number of the generation that is being collected.
        self.generation = 1
        #: Some generation was committed since the worker started.
        self.complete = False

    def counts(self) -> tuple[int, int]:
        """Files and directories with changes in the present generation."""
        directories = sum(1 for node in self._changes if node.children is not None)
        return len(self._changes) - directories, directories

    # Collecting

    def entry(self, directory: Node, name: bytes) -> None:
        """``name`` in ``directory`` was made, removed or replaced."""
        change = directory.change or self._begin(directory)
        if change is not None:
            change.names.add(name)

    def attributes(self, node: Node) -> None:
        """Mode, owner, times, link count or extended attributes of ``node`` changed."""
        change = node.change or self._begin(node)
        if change is not None:
            change.attributes = True

    def content(self, node: Node) -> None:
        """The content of a file changed."""
        change = node.change or self._begin(node)
        if change is not None:
            change.content = True
            change.attributes = True

    def made(self, node: Node) -> None:
        """``node`` is new."""
        node.made = self.generation
        if node.children is None:
            self.content(node)
        else:
            self.attributes(node)
            if node.change is not None:
                node.change.made = True

    def arrived(self, node: Node) -> None:
        """``node`` came from a place that is not watched to one that is."""
        if node.children is None:
            self.content(node)
            return
        change = node.change or self._begin(node)
        if change is not None:
            change.attributes = True
            change.subtree = True

    def removed(self, node: Node) -> None:
        """The inode of ``node`` has no name any more. What was made and removed within a generation is no change."""
        if node.made == self.generation and node.change is not None:
            del self._changes[node]
            node.change = None
            node.held -= 1

    def moved(self, node: Node) -> None:
        """What lies below ``node`` has other parents, or the file ``node`` other names or more of them."""
        if node.children is not None:
            self._epoch += 1
        else:
            node.epoch = -1

    def _begin(self, node: Node) -> Change | None:
        """A change of ``node`` in this generation, or None when it is not watched."""
        if node.epoch == self._epoch or node.deleted:
            return None
        parent = node.parent
        # A file in a directory that is watched is, too, and that is nearly always known.
        known = parent is not None and parent.change is not None and node.children is None
        if self._excluded and not known and not self.watched(node):
            node.epoch = self._epoch
            return None
        change = node.change = self._changes[node] = Change()
        node.held += 1
        return change

    # Excluded places

    def watched(self, node: Node) -> bool:
        """Whether changes of ``node`` count where it is now."""
        if node.children is not None:
            return self._watched_directory(node)
        names = node.names()
        if not names or any(self._watched_directory(parent) for parent, _ in names):
            return True
        return self._nodes.stat(node).st_nlink > 1

    def _watched_directory(self, directory: Node) -> bool:
        excluded = self._excluded
        node: Node | None = directory
        while node is not None and node.id != ROOT_ID:
            if node.name in excluded:
                return False
            node = node.parent
        return True

    # Handing over

    def hand_over(self) -> tuple[int, bool, list[DirtyDirectory], list[DirtyFile]]:
        """Close the generation: its number, whether changes before it are known, and what changed."""
        number, changes = self.generation, self._changes
        self._retained.append((number, changes))
        self.generation += 1
        self._changes = {}
        directories: list[DirtyDirectory] = []
        files: list[DirtyFile] = []
        paths: dict[Node, bytes] = {}
        for node, change in changes.items():
            node.change = None
            if node.children is not None:
                if node.deleted or (node.parent is None and node.id != ROOT_ID):
                    continue
                names = None if change.subtree or change.made else sorted(change.names)
                directories.append(
                    DirtyDirectory(node.ino, _path(node, paths), names, change.attributes, change.subtree)
                )
            elif not node.deleted or self._nodes.find(node.dev, node.ino) is None:
                files.append(DirtyFile(node.ino, _file_paths(node, paths), change.content))
        return number, self.complete, directories, files

    def committed(self, number: int) -> None:
        """Generation ``number`` and all before it need not be known any longer."""
        if number >= self.generation or number < 1:
            raise ValueError(f"generation {number} was not handed over")
        kept = []
        for generation, changes in self._retained:
            if generation > number:
                kept.append((generation, changes))
                continue
            for node in changes:
                node.held -= 1
                self._nodes.drop_unused(node)
        self._retained = kept
        self.complete = True

    def take_back(self) -> None:
        """What was handed over and not committed belongs to the present generation again."""
        for _, changes in self._retained:
            for node, change in changes.items():
                if node.change is None:
                    node.change = self._changes[node] = change
                else:
                    node.change.merge(change)
                    node.held -= 1
        self._retained = []


def _path(directory: Node, paths: dict[Node, bytes]) -> bytes:
    """Its path, remembering those of the directories above it."""
    chain = []
    node = directory
    while (path := paths.get(node)) is None:
        if node.parent is None:
            path = paths[node] = b""
            break
        chain.append(node)
        node = node.parent
    for node in reversed(chain):
        path = paths[node] = path + b"/" + node.name if path else node.name
    return path


def _file_paths(node: Node, paths: dict[Node, bytes]) -> list[bytes]:
    found = []
    for parent, name in node.names():
        above = _path(parent, paths)
        found.append(above + b"/" + name if above else name)
    return found
