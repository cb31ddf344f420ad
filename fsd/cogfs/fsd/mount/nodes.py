"""The node table: what the kernel knows, by backing inode, with names, lookup counts and directory descriptors.

A node is one backing inode, however many names it has. Its id is the backing inode number (1 for the root), so that
numbers stay over a remount; when the kernel still holds that number for something else, the node has an id with the top
bit set instead.

A node stays in the table while the kernel counts lookups of it, a handle is open, a child of it is in the table, or
something that changed in it has not been committed. A directory's descriptor may be closed at any time and is opened
again through its parent; a node whose last known name was removed keeps a descriptor (its pin) until it is forgotten,
so that it can still be served and its inode number is not given to another file.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from stat import S_IFMT, S_ISDIR
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cogfs.fsd.mount.closer import Closer
    from cogfs.fsd.mount.dirty import Change
    from cogfs.fsd.mount.handles import Handle

ROOT_ID = 1

#: Ids from here up are no backing inode numbers.
ALTERNATIVE = 1 << 63

OPEN_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Node:
    """One backing inode."""

    __slots__ = (
        "capability_free",
        "change",
        "children",
        "deleted",
        "dev",
        "epoch",
        "fd",
        "handles",
        "held",
        "id",
        "ino",
        "kind",
        "large",
        "links",
        "lookups",
        "made",
        "name",
        "parent",
        "recent",
    )

    def __init__(self, node_id: int, dev: int, ino: int, kind: int) -> None:
        self.id = node_id
        self.dev = dev
        self.ino = ino
        #: File type bits of the mode.
        self.kind = kind
        #: First known name; the others are in ``links``.
        self.parent: Node | None = None
        self.name = b""
        self.links: list[tuple[Node, bytes]] | None = None
        #: Known entries of a directory.
        self.children: dict[bytes, Node] | None = {} if S_ISDIR(kind) else None
        self.lookups = 0
        #: ``O_PATH`` descriptor, or -1: a directory's, or the pin of a node without a name.
        self.fd = -1
        #: Used since the last eviction of descriptors.
        self.recent = False
        #: Open handles, or None.
        self.handles: list[Handle] | None = None
        #: Its inode has no name any more, known or not.
        self.deleted = False
        #: It was removed, and much is to be done when its last descriptor is closed.
        self.large = False
        #: What changed in the present generation.
        self.change: Change | None = None
        #: In how many generations, not yet committed, something changed.
        self.held = 0
        #: Generation in which it was made through the mount, or 0.
        self.made = 0
        #: Epoch of the dirty table in which it was found to lie in an excluded place only.
        self.epoch = -1
        #: Known to have no ``security.capability``, which the kernel asks for before every write.
        self.capability_free = False

    def names(self) -> list[tuple[Node, bytes]]:
        """Every known (parent, name)."""
        if self.parent is None:
            return []
        return [(self.parent, self.name), *(self.links or ())]

    def matches(self, stat: os.stat_result) -> bool:
        """Whether ``stat`` is of this inode. A number may have been given to a file of another kind meanwhile."""
        return stat.st_ino == self.ino and stat.st_dev == self.dev and S_IFMT(stat.st_mode) == self.kind

    def path(self) -> bytes:
        """Relative to the root, by the first known name."""
        return path_of(self.parent, self.name)


def path_of(parent: Node | None, name: bytes) -> bytes:
    """Path relative to the root of the entry ``name`` in ``parent``."""
    parts = [name]
    while parent is not None and parent.id != ROOT_ID:
        parts.append(parent.name)
        parent = parent.parent
    parts.reverse()
    return b"/".join(parts)


class NodeTable:
    """All nodes. Not safe for more than one thread."""

    def __init__(self, root_fd: int, max_descriptors: int, closer: Closer) -> None:
        """Takes over ``root_fd``, an ``O_PATH`` descriptor of the backing root."""
        self._closer = closer
        stat = os.fstat(root_fd)
        self.root = Node(ROOT_ID, stat.st_dev, stat.st_ino, S_IFMT(stat.st_mode))
        self.root.fd = root_fd
        self.root.lookups = 1
        self._by_id: dict[int, Node] = {ROOT_ID: self.root}
        self._alternative: dict[tuple[int, int], Node] = {}
        self._next_alternative = ALTERNATIVE
        #: Directories with a descriptor that may be closed, in the order in which they were opened.
        self._directories: OrderedDict[Node, None] = OrderedDict()
        self._max_descriptors = max_descriptors
        self._pins = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def descriptors(self) -> int:
        """Descriptors that the table keeps open."""
        return len(self._directories) + self._pins + 1

    def get(self, node_id: int) -> Node:
        """The node with this id. OSError ESTALE."""
        node = self._by_id.get(node_id)
        if node is None:
            raise OSError(errno.ESTALE, f"no node {node_id}")
        return node

    def find(self, dev: int, ino: int) -> Node | None:
        """The node of a backing inode that exists."""
        node = self._by_id.get(ino)
        if node is not None and node.ino == ino and node.dev == dev and not node.deleted:
            return node
        return self._alternative.get((dev, ino)) if self._alternative else None

    def locate(self, ino: int) -> bytes | None:
        """A path to the inode of the root's filesystem that has this number, or None."""
        if ino == self.root.ino:
            return b""
        above = node = self.find(self.root.dev, ino)
        while above is not None and above is not self.root:
            above = above.parent
        return None if node is None or above is None else path_of(node.parent, node.name)

    def entry(self, parent: Node, name: bytes, stat: os.stat_result) -> Node:
        """The node of ``name`` in ``parent``, which ``stat`` was just read from. Does not count a lookup."""
        ino = stat.st_ino
        node = self._by_id.get(ino)
        if node is None or node.ino != ino or node.dev != stat.st_dev or node.deleted:
            node = self._alternative.get((stat.st_dev, ino)) if self._alternative else None
        if node is None or node.kind != S_IFMT(stat.st_mode):
            node = self._new(stat)
        if node.parent is not parent or node.name != name:
            self.add_name(node, parent, name)
        return node

    def _new(self, stat: os.stat_result) -> Node:
        ino = stat.st_ino
        stale = self.find(stat.st_dev, ino)
        if stale is not None:  # replaced behind the mount by something of another kind
            self._alternative.pop((stale.dev, stale.ino), None)
            stale.deleted = True
        if stat.st_dev == self.root.dev and ino not in self._by_id and ino < ALTERNATIVE:
            node = Node(ino, stat.st_dev, ino, S_IFMT(stat.st_mode))
        else:
            node = Node(self._next_alternative, stat.st_dev, ino, S_IFMT(stat.st_mode))
            self._next_alternative += 1
            self._alternative[stat.st_dev, ino] = node
        self._by_id[node.id] = node
        return node

    # Names

    def add_name(self, node: Node, parent: Node, name: bytes) -> None:
        """``name`` in ``parent`` is ``node`` from now on."""
        assert parent.children is not None
        present = parent.children.get(name)
        if present is node:
            return
        if present is not None:
            self.remove_name(present, parent, name)
        parent.children[name] = node
        if node.parent is None:
            node.parent, node.name = parent, name
            if node.fd >= 0 and node not in self._directories:
                self._unpin(node)
        elif node.children is not None:  # a directory has one name: it was moved behind the mount
            assert node.parent.children is not None
            node.parent.children.pop(node.name, None)
            former, node.parent, node.name = node.parent, parent, name
            self.drop_unused(former)
        elif node.links is None:
            node.links = [(parent, name)]
        else:
            node.links.append((parent, name))

    def remove_name(self, node: Node, parent: Node, name: bytes) -> None:
        """``name`` in ``parent`` is not ``node`` any more."""
        assert parent.children is not None
        if parent.children.get(name) is node:
            del parent.children[name]
        if node.parent is parent and node.name == name:
            if node.links:
                node.parent, node.name = node.links[0]
                node.links = node.links[1:] or None
            else:
                node.parent, node.name = None, b""
        elif node.links:
            node.links = [link for link in node.links if link != (parent, name)] or None

    def pin(self, node: Node, fd: int, removed: bool) -> None:
        """Give a node that has lost its last known name the descriptor ``fd``, or close that when it has no use.

        ``removed`` says that its inode has no name at all any more.
        """
        node.deleted = removed
        if removed:
            self._alternative.pop((node.dev, node.ino), None)
        if node.fd >= 0:
            if node in self._directories:
                del self._directories[node]
                self._pins += 1
            if fd >= 0:
                os.close(fd)
        elif fd >= 0:
            node.fd = fd
            self._pins += 1

    @property
    def may_pin(self) -> bool:
        """Whether there is room for one more pin. A node that gets none is served through its open handles only."""
        return self._pins < self._max_descriptors

    def _unpin(self, node: Node) -> None:
        self._pins -= 1
        if node.children is None:
            os.close(node.fd)
            node.fd = -1
        else:
            self._directories[node] = None

    # Life

    def forget(self, node_id: int, count: int) -> None:
        """The kernel gives back ``count`` lookups."""
        node = self._by_id.get(node_id)
        if node is None or node is self.root:
            return
        node.lookups -= count
        if node.lookups <= 0:
            self.drop_unused(node)

    def drop_unused(self, node: Node | None) -> None:
        """Take ``node`` out of the table when nothing needs it, and then its parents."""
        while node is not None and node is not self.root:
            if node.lookups > 0 or node.handles or ((node.children or node.held) and not node.deleted):
                return
            if self._by_id.get(node.id) is not node:
                return
            del self._by_id[node.id]
            if self._alternative.get((node.dev, node.ino)) is node:
                del self._alternative[node.dev, node.ino]
            if node.fd >= 0:
                if node in self._directories:
                    del self._directories[node]
                else:
                    self._pins -= 1
                if node.large:
                    self._closer.close(node.fd)
                else:
                    os.close(node.fd)
                node.fd = -1
            former = [parent for parent, _ in node.names()]
            for parent, name in node.names():
                assert parent.children is not None
                if parent.children.get(name) is node:
                    del parent.children[name]
            for parent in former[1:]:
                self.drop_unused(parent)
            node = former[0] if former else None

    # Descriptors

    def fd(self, directory: Node) -> int:
        """An ``O_PATH`` descriptor of ``directory``, valid until about ``max_descriptors / 8`` others were opened.
        OSError ESTALE when it is not where it was."""
        fd = directory.fd
        if fd >= 0:
            directory.recent = True
            return fd
        return self._open(directory)

    def _open(self, directory: Node) -> int:
        chain = []
        node = directory
        while node.fd < 0:
            chain.append(node)
            if node.parent is None or node.children is None:
                raise OSError(errno.ESTALE if node.children is not None else errno.ENOTDIR, "no way to the directory")
            node = node.parent
        if len(self._directories) + len(chain) > self._max_descriptors:
            self.close_descriptors(max(self._max_descriptors // 8, len(chain)), keep=node)
        fd = node.fd
        for node in reversed(chain):
            fd = self._open_one(node, fd)
        return fd

    def _open_one(self, node: Node, parent_fd: int) -> int:
        try:
            fd = os.open(node.name, OPEN_DIRECTORY, dir_fd=parent_fd)
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, "the directory is gone") from error
        stat = os.fstat(fd)
        if not node.matches(stat):
            os.close(fd)
            raise OSError(errno.ESTALE, "another directory is in its place")
        node.fd = fd
        node.recent = True
        self._directories[node] = None
        return fd

    def close_descriptors(self, count: int, keep: Node | None = None) -> None:
        """Close about ``count`` descriptors of directories, those first that were not used of late."""
        directories = self._directories
        for _ in range(2 * len(directories)):
            if count <= 0 or not directories:
                return
            node, _ = directories.popitem(last=False)
            if node.recent or node is keep:
                node.recent = False
                directories[node] = None
                continue
            os.close(node.fd)
            node.fd = -1
            count -= 1

    # Reading a node

    def stat(self, node: Node) -> os.stat_result:
        """Attributes of ``node``, by whatever way leads to it. OSError ESTALE when none does."""
        if node.handles:
            return os.fstat(node.handles[-1].fd)
        if node.fd >= 0:
            return os.fstat(node.fd)
        for parent, name in node.names():
            try:
                stat = os.stat(name, dir_fd=self.fd(parent), follow_symlinks=False)
            except FileNotFoundError:
                continue
            if node.matches(stat):
                return stat
        raise OSError(errno.ESTALE, "no known name leads to the node")

    def open(self, node: Node, flags: int) -> int:
        """A descriptor of ``node`` itself, never of what a link points to. OSError ESTALE when no way leads to it."""
        descriptor = node.handles[-1].fd if node.handles and node.parent is None else node.fd
        if descriptor >= 0:
            if flags & os.O_PATH:
                return os.dup(descriptor)
            return os.open(b"/proc/self/fd/%d" % descriptor, (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC)
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        for parent, name in ((node.parent, node.name), *(node.links or ())):
            if parent is None:
                break
            try:
                fd = os.open(name, flags, dir_fd=self.fd(parent))
            except FileNotFoundError:
                continue
            stat = os.fstat(fd)
            if node.matches(stat):
                return fd
            os.close(fd)
        raise OSError(errno.ESTALE, "no known name leads to the node")
