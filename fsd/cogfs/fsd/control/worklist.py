"""What an update has to look at: names in directories, found from what a worker saw change.

Directories go by their inodes: where they are now is another question. Knows what was recorded and what the worker
says, and looks at no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.beneath import split
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.rules import Rules
from cogfs.store.schema import Kind, StatRow


class Work:
    """What is to be looked at in one directory."""

    __slots__ = ("children", "expected", "inode", "made", "name", "names", "parent", "path", "subtree")

    def __init__(self, inode: int, path: bytes) -> None:
        self.inode = inode
        #: Where it was at the boundary.
        self.path = path
        #: The directory that held it and its name there, when the worker said so; 0: as it is recorded.
        self.parent = 0
        self.name = b""
        #: Names of which anything may be said.
        self.names: set[bytes] = set()
        #: Names of which the worker says what inode they were of.
        self.expected: dict[bytes, int] = {}
        #: Directories in it that were recorded anew, and are what they were in every other respect: names by inode.
        self.children: dict[int, bytes] = {}
        #: It is new, and has no other names than these.
        self.made = False
        #: Everything below it too, whatever is recorded.
        self.subtree = False


class Worklist:
    """The directories to look at, and what is known of files by their inodes."""

    def __init__(self, book: RecordBook, rules: Rules) -> None:
        self._book = book
        self._rules = rules
        self._work: dict[int, Work] = {}
        self._depths: dict[int, dict[int, Work]] = {}
        self._begun: set[int] = set()
        #: Directories that are not recorded where they are now.
        self.left_out: set[int] = set()
        #: Files of which anything changed, and those whose content did.
        self.touched: set[int] = set()
        self.written: set[int] = set()
        #: Of these there are names that the worker may not know.
        self.linked: set[int] = set()
        #: What was recorded under the names that changed: a file that was only renamed is not read again.
        self.moved: dict[int, StatRow] = {}
        #: The root's own attributes changed.
        self.root_changed = False

    def collect(self, directories: Sequence[DirtyDirectory], files: Sequence[DirtyFile]) -> None:
        """Take in what a worker handed over."""
        for directory in directories:
            self._collect_directory(directory)
        for file in files:
            self.touched.add(file.inode)
            if file.content:
                self.written.add(file.inode)
            for path, parent in zip(file.paths, file.parents, strict=True):
                above, name = split(path)
                if not self._rules.excludes_beneath(above):
                    self.at(parent, above).expected[name] = file.inode
            if self._book.link(file.inode) is not None:
                self.linked.add(file.inode)
        self._gather_moved()

    def _collect_directory(self, directory: DirtyDirectory) -> None:
        if self._rules.excludes_beneath(directory.path):
            self.left_out.add(directory.inode)
            return
        here = self.at(directory.inode, directory.path)
        if directory.names is None:
            here.subtree = True
        else:
            here.names.update(directory.names)
        here.subtree = here.subtree or directory.subtree
        here.made = directory.made
        if not directory.path:
            self.root_changed = self.root_changed or directory.attributes
            return
        above, name = split(directory.path)
        here.parent, here.name = directory.parent, name
        if directory.attributes or directory.made:
            self.at(directory.parent, above).expected[name] = directory.inode

    def _gather_moved(self) -> None:
        for work in self._work.values():
            row = self._book.directory(work.inode) if work.names or work.expected else None
            if row is None:
                continue
            for child in row.rows:
                name = child.entry.name
                if child.entry.kind is Kind.FILE and (name in work.names or name in work.expected):
                    self.moved[child.inode] = child

    def at(self, inode: int, path: bytes) -> Work:
        """What there is to do in a directory."""
        work = self._work.get(inode)
        if work is None:
            work = self._work[inode] = Work(inode, path)
            self._depths.setdefault(_depth(path), {})[inode] = work
        return work

    def deepest_first(self) -> Iterator[Work]:
        """All directories. What is added meanwhile comes in its turn; it has to lie above the one that came last."""
        for depth in range(max(self._depths, default=-1), -1, -1):
            for work in sorted(self._depths.get(depth, {}).values(), key=lambda work: work.path):
                self._begun.add(work.inode)
                yield work

    def is_begun(self, inode: int) -> bool:
        """Whether a directory came already: one that was listed twice may stand deeper than its path says."""
        return inode in self._begun


def _depth(path: bytes) -> int:
    return path.count(b"/") + 1 if path else 0
