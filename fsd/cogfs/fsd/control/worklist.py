"""What an update has to look at: names in directories, found from what a worker saw change.

Knows what was recorded and what the worker says, and looks at nothing but which directory stands at a path: the
looking is done by ``recorder``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.beneath import Beneath, beneath, split
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.rules import Rules
from cogfs.store.schema import Kind, StatRow


class Work:
    """What is to be looked at in one directory."""

    __slots__ = ("names", "subtree")

    def __init__(self) -> None:
        #: None for all of its names.
        self.names: set[bytes] | None = set()
        #: Everything below it too, whatever is recorded.
        self.subtree = False

    def add(self, name: bytes) -> None:
        if self.names is not None:
            self.names.add(name)


class Worklist:
    """The directories to look at, by their paths, and what is known of files by their inodes."""

    def __init__(self, book: RecordBook, root_fd: int, rules: Rules) -> None:
        self._book = book
        self._root_fd = root_fd
        self._rules = rules
        self._work: dict[bytes, Work] = {}
        self._depths: dict[int, set[bytes]] = {}
        #: Directories that are not recorded where they are now.
        self.left_out: set[int] = set()
        #: Files of which anything changed, and those whose content did.
        self.touched: set[int] = set()
        self.written: set[int] = set()
        #: What was recorded under the names that changed: a file that was only renamed is not read again.
        self.moved: dict[int, StatRow] = {}
        self._linked: dict[int, tuple[bytes | None, dict[int, list[bytes]]]] = {}

    def collect(self, directories: Sequence[DirtyDirectory], files: Sequence[DirtyFile]) -> bool:
        """Take in what a worker handed over. False when it cannot be told where to look, and a scan is needed."""
        for directory in directories:
            if self._rules.excludes_beneath(directory.path):
                self.left_out.add(directory.inode)
                continue
            here = self._at(directory.path)
            if directory.names is None:
                here.names = None
            else:
                for name in directory.names:
                    here.add(name)
            here.subtree = here.subtree or directory.subtree
            if directory.path and directory.attributes:
                self.add(directory.path)
        for file in files:
            self.touched.add(file.inode)
            if file.content:
                self.written.add(file.inode)
            for path in file.paths:
                if not self._rules.excludes_beneath(split(path)[0]):
                    self.add(path)
            if not self._collect_links(file.inode):
                return False
        return True

    def add(self, path: bytes) -> None:
        """Look at ``path``, in the directory that holds it."""
        parent, name = split(path)
        self._at(parent).add(name)

    def gather_moved(self, reach: Beneath) -> None:
        """Fill ``moved``, before anything is recorded anew."""
        for path in sorted(self._work):
            try:
                inode = os.fstat(reach.directory(path)).st_ino
            except OSError:
                continue
            row = self._book.directory(inode)
            names = self._work[path].names
            if row is None:
                continue
            for child in row.rows:
                if child.entry.kind is Kind.FILE and (names is None or child.entry.name in names):
                    self.moved[child.inode] = child

    def deepest_first(self) -> Iterator[tuple[bytes, Work]]:
        """All directories. What is added meanwhile comes in its turn; it has to lie above the one that came last."""
        for depth in range(max(self._depths, default=-1), -1, -1):
            for path in sorted(self._depths.get(depth, ())):
                yield path, self._work[path]

    def _at(self, directory: bytes) -> Work:
        work = self._work.get(directory)
        if work is None:
            work = self._work[directory] = Work()
            self._depths.setdefault(_depth(directory), set()).add(directory)
        return work

    def _collect_links(self, inode: int) -> bool:
        """Add the recorded names of a hard-linked file that the worker may not know of, also where it knows others.
        Whether that is possible."""
        link = self._book.link(inode)
        if link is None:
            return True
        for directory in link[1]:
            if directory not in self._linked:
                self._linked[directory] = self._linked_names(directory)
            path, names = self._linked[directory]
            if path is None:
                return False
            for name in names.get(inode, ()):
                self._at(path).add(name)
        return True

    def _linked_names(self, directory: int) -> tuple[bytes | None, dict[int, list[bytes]]]:
        """The path of a recorded directory, and its names of hard-linked files by inode. No path: it moved in this very
        generation, and where it is now is not worth finding out name by name."""
        path = self._book.path_of(directory)
        row = self._book.directory(directory)
        names: dict[int, list[bytes]] = {}
        if path is None or row is None:
            return b"", names
        try:
            with beneath(self._root_fd) as reach:
                if os.fstat(reach.directory(path)).st_ino != directory:
                    return None, names
        except OSError:
            return None, names
        for child in row.rows:
            if child.entry.link_group:
                names.setdefault(child.inode, []).append(child.entry.name)
        return path, names


def _depth(path: bytes) -> int:
    return path.count(b"/") + 1 if path else 0
