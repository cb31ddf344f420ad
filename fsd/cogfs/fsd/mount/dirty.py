"""What changed, by node and by generation.

Changes are collected in the present generation. ``hand_over`` closes it, and it is retained until ``commit`` names it;
``take_back`` merges what is retained into the present generation again. A node in which something changed stays in the
node table until its generation is ``released``.

Changes below a directory with an excluded name are not collected, except those of a file with more than one link, which
may be reached by another path as well. Whether a place is excluded is found by walking up its parents, once for a node
in a generation when it is not, and once for an epoch (until a directory is renamed) when it is.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from typing import NamedTuple

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.mount.nodes import ROOT_ID, Node, NodeTable


class Change:
    """What changed in one node."""

    __slots__ = ("attributes", "content", "made", "names", "subtree")

    def __init__(self) -> None:
        #: Of a directory: it is new, nothing that is known of its inode number holds for it, and ``names`` are all that
        #: it has or had.
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


class Retained(NamedTuple):
    """A generation that was handed over."""

    number: int
    changes: Generation
    #: Not all that changed is in ``changes``.
    unlisted: bool
    #: See ``DirtyTable.quiet``.
    closed: dict[Node, float]


class DirtyTable:
    """All changes that are not committed."""

    def __init__(self, nodes: NodeTable, excluded: Collection[bytes], generation: int = 1) -> None:
        self._nodes = nodes
        self._excluded = frozenset(excluded)
        self._epoch = 0
        self._changes: Generation = {}
        #: Files with changed content, by when they were closed, the oldest first.
        self._closed: dict[Node, float] = {}
        #: What was handed over, and neither committed nor taken back.
        self.retained: Retained | None = None
        self._committed = generation - 1
        #: Number of the generation that is being collected.
        self.generation = generation
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

    # Quiet files

    def closed(self, node: Node) -> None:
        """Nobody is about to write to the file ``node`` any more."""
        change = node.change
        if change is not None and change.content:
            self._closed.pop(node, None)  # to stand last
            self._closed[node] = monotonic()

    def quiet(self, seconds: float, limit: int) -> list[tuple[int, bytes]]:
        """Inode and path of files with changed content that were closed ``seconds`` ago and not opened for writing
        since; each is told once after it was closed."""
        found: list[tuple[int, bytes]] = []
        paths: dict[Node, bytes] = {}
        until = monotonic() - seconds
        while self._closed and len(found) < limit:
            node, since = next(iter(self._closed.items()))
            if since > until:
                break
            del self._closed[node]
            change = node.change
            if change is None or not change.content or node.parent is None:
                continue
            if any(handle.writable for handle in node.handles or ()):
                continue  # comes again when that is closed
            found.append((node.ino, path_below(node.parent, node.name, paths)))
        return found

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

    def leaves(self, directory: Node, parent: Node, name: bytes) -> bool:
        """Whether ``directory``, whose changes count, would be where they do not, as ``name`` in ``parent``."""
        if not self._excluded or not self._watched_directory(directory):
            return False
        return name in self._excluded or not self._watched_directory(parent)

    # Handing over

    def hand_over(self, unlisted: bool = False) -> tuple[int, bool, list[DirtyDirectory], list[DirtyFile]]:
        """Close the generation: its number, whether changes before it are known, and what changed.

        What was handed over before must have been committed or taken back. With ``unlisted`` the caller knows of more
        changes than these.
        """
        assert self.retained is None
        number, changes = self.generation, self._changes
        self.generation += 1
        self._changes = {}
        directories: list[DirtyDirectory] = []
        files: list[DirtyFile] = []
        unlisted = unlisted or not self.complete
        paths: dict[Node, bytes] = {self._nodes.root: b""}
        find = self._nodes.find
        for node, change in changes.items():
            node.change = None
            parent = node.parent
            if node.children is None:
                if parent is not None and node.links is None:
                    # Nearly all files have one name, and most of them stand in a directory that came before.
                    above = paths.get(parent)
                    if above is None:
                        above = directory_path(parent, paths)
                    name = node.name
                    path = above + b"/" + name if above else name
                    files.append(DirtyFile(node.ino, [path], [parent.ino], change.content))
                elif not node.deleted or find(node.dev, node.ino) is None:
                    parents = [directory.ino for directory, _ in node.names()]
                    files.append(DirtyFile(node.ino, file_paths(node, paths), parents, change.content))
                continue
            if node.deleted or (parent is None and node.id != ROOT_ID):
                continue
            if change.subtree:
                unlisted = True
            directories.append(
                DirtyDirectory(
                    node.ino,
                    node.ino if parent is None else parent.ino,
                    directory_path(node, paths),
                    None if change.subtree else sorted(change.names),
                    change.made,
                    change.attributes,
                    change.subtree,
                )
            )
        self.retained = Retained(number, changes, unlisted, self._closed)
        self._closed = {}
        return number, self.complete, directories, files

    def commit(self, number: int) -> Retained | None:
        """What was handed over as generation ``number`` need not be handed over again. It is the caller's now, who
        gives it back to ``release``; None when it was committed before. ValueError when it was not handed over, or
        taken back."""
        retained = self.retained
        if retained is not None and retained.number == number:
            self.retained = None
            self.acknowledge(number)
            return retained
        if 1 <= number <= self._committed:
            return None
        raise ValueError(f"generation {number} was not handed over, or was taken back")

    def acknowledge(self, number: int) -> None:
        """Generation ``number`` is committed."""
        self._committed = max(self._committed, number)
        self.complete = True

    def release(self, changes: Generation) -> None:
        """Nobody asks for these changes any more."""
        for node in changes:
            node.held -= 1
            self._nodes.drop_unused(node)

    def take_back(self) -> None:
        """What was handed over and not committed belongs to the present generation again."""
        retained, self.retained = self.retained, None
        if retained is not None:
            self.merge(retained)

    def merge(self, retained: Retained) -> None:
        """What was handed over and is not retained here belongs to the present generation again."""
        for node, change in retained.changes.items():
            if node.change is None:
                node.change = self._changes[node] = change
            else:
                node.change.merge(change)
                node.held -= 1
        self._closed = {**retained.closed, **self._closed}


def directory_path(directory: Node, paths: dict[Node, bytes]) -> bytes:
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


def path_below(parent: Node, name: bytes, paths: dict[Node, bytes]) -> bytes:
    """The path of ``name`` in ``parent``."""
    above = directory_path(parent, paths)
    return above + b"/" + name if above else name


def file_paths(node: Node, paths: dict[Node, bytes]) -> list[bytes]:
    """By every known name."""
    return [path_below(parent, name, paths) for parent, name in node.names()]
