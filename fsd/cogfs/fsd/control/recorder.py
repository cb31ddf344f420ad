"""Recording: what the files of a workspace are, now or as of a boundary, as a tree in the store.

Two ways lead to the same result. A scan looks at everything and reads what its stat says has changed. An update looks
only at what a worker saw change (``worklist``). Both read through descriptors of the backing directory, never through
the mount, and see it as it was at a boundary (``asof``) while others go on changing it.

What is looked at has to be protected, that is, of the boundary in the worker's sense (see ``channel``): of a name that
the worker handed over, the inode that has it is, too. What stands above is taken from the records.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.asof import AsOf
from cogfs.fsd.control.before import Lost, put_content
from cogfs.fsd.control.beneath import join, split
from cogfs.fsd.control.capture import (
    ATTEMPTS,
    UNREADABLE,
    Vanished,
    Xattrs,
    capture_file,
    is_recorded_xattr,
    open_inode,
    read_xattrs,
)
from cogfs.fsd.control.hardlinks import HardLinks
from cogfs.fsd.control.recordbook import RecordBook, sum_of
from cogfs.fsd.control.rules import Rules, is_temporary
from cogfs.fsd.control.syscalls import open_within, syncfs
from cogfs.fsd.control.worklist import Work, Worklist
from cogfs.fsd.undolog import LOST, EntryWas, Status, Was
from cogfs.store.errors import StoreError
from cogfs.store.schema import NO_HASH, DirectoryRow, Hash, Kind, OpaqueReason, Skipped, StatRow, Sums, TreeEntry
from cogfs.store.store import Store

#: A file changed within this time before it was recorded may change again without a trace in its stat.
RACY_NS = 2_000_000_000

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 16
_UNREADABLE = OpaqueReason.UNREADABLE.encode()


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording found."""

    root: TreeEntry
    root_inode: int
    sums: Sums
    #: Files that were read, and their bytes.
    hashed: int
    hashed_bytes: int
    #: What could not be found as it was at the boundary; with any of it the recording is worth nothing.
    failed: tuple[Skipped, ...]
    #: Files that were changed since, by inode, of which some was read from the files themselves.
    in_place: dict[int, bytes]


class _CannotList(OSError):
    """A directory whose names cannot be read."""


class _Frame:
    """A directory that is being recorded. ``fd`` is -1 when it is no more."""

    __slots__ = (
        "batches",
        "fd",
        "former",
        "inode",
        "looked",
        "looks",
        "name",
        "old",
        "old_recorded_ns",
        "others",
        "parent",
        "path",
        "pending",
        "rows",
        "started_ns",
        "status",
        "subdirectories",
        "tree",
    )

    def __init__(self, path: bytes, name: bytes, fd: int, inode: int, parent: int, old: DirectoryRow | None) -> None:
        self.path = path
        self.name = name
        self.fd = fd
        self.inode = inode
        self.parent = parent
        self.old = {row.entry.name: row for row in old.rows} if old is not None else {}
        self.old_recorded_ns = old.recorded_ns if old is not None else 0
        #: Its tree as it was recorded, and what was in one that it has come in the place of: by these, little more is
        #: stored than what differs.
        self.tree = old.tree_hash if old is not None else NO_HASH
        self.former: dict[bytes, Hash] = {}
        self.rows: dict[bytes, StatRow] = {}
        #: Names that were looked at, with the inode that each is known to be of; 0: that is not known.
        self.looked: dict[bytes, int] = {}
        #: Files to be read, each with what is known to be like it.
        self.pending: list[tuple[bytes, Status, Hash]] = []
        self.batches: list[Future[list[tuple[bytes, StatRow | None]]]] = []
        self.subdirectories: list[tuple[bytes, Status]] = []
        self.started_ns = time.time_ns()
        #: Names that have become something else since they were looked at, and how often such were looked at again.
        self.others: list[bytes] = []
        self.looks = 0
        #: Its own, when it is recorded on the way down.
        self.status: Status | None = None

    def hash_of(self, name: bytes) -> Hash:
        """What was recorded under a name, here or in the directory that was here before."""
        row = self.old.get(name)
        return row.entry.hash if row is not None else self.former.get(name, NO_HASH)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _status(entry: TreeEntry, status: Status, sums: Sums | None = None) -> StatRow:
    return StatRow(
        entry,
        status.inode,
        status.size,
        status.mtime_ns,
        status.ctime_ns,
        status.mode,
        status.nlink,
        sums,
    )


def _opaque(name: bytes, status: Status, reason: OpaqueReason, group: int = 0) -> StatRow:
    entry = TreeEntry(name, Kind.OPAQUE, stat.S_IFMT(status.mode), target=reason.encode(), link_group=group)
    return _status(entry, status)


def same_stat(row: StatRow, status: os.stat_result) -> bool:
    """Whether a file has the stat that was recorded."""
    return _same(row, Status.of(status))


def _same(row: StatRow, status: Status) -> bool:
    return (
        row.inode == status.inode
        and row.size == status.size
        and row.mtime_ns == status.mtime_ns
        and row.ctime_ns == status.ctime_ns
        and row.mode == status.mode
    )


class Recorder:
    """One recording of one workspace. Use it once, from one thread."""

    def __init__(
        self,
        store: Store,
        book: RecordBook,
        root_fd: int,
        rules: Rules,
        pool: ThreadPoolExecutor,
        asof: AsOf | None = None,
        believed_ns: int | None = None,
        ahead: Callable[[Status], Hash | None] = lambda _: None,
        unsure: frozenset[int] | None = None,
    ) -> None:
        """Without ``asof``: the files as they are, which nobody may change meanwhile, unless there is ``unsure``: files
        that are read whatever their stat says, while others go on changing all of them.

        ``believed_ns``: what was recorded later is not believed by its stat; None: all is. ``ahead``: the content of a
        file that has a stat, where it was captured already.
        """
        self._unsure = unsure or frozenset()
        self._moving = unsure is not None
        self._store = store
        self._book = book
        self._root_fd = root_fd
        self._rules = rules
        self._pool = pool
        self._asof = asof or AsOf(root_fd)
        self._own = asof is None
        self._believed_ns = believed_ns
        self._ahead = ahead
        self._owners = os.geteuid() == 0
        self._device = os.fstat(root_fd).st_dev
        self._hashed = 0
        self._hashed_bytes = 0
        self._failed: list[Skipped] = []
        #: Something that was looked at is there and cannot be read.
        self._unreadable = False
        self._removed: set[int] = set()
        self._arrived: set[int] = set()
        #: Content of files that the log has in part, by inode.
        self._before: dict[int, Hash | OpaqueReason] = {}
        #: Where those are of which the log does not have all.
        self._in_place: dict[int, bytes] = {}
        self._links = HardLinks(store, book, self._capture_link)
        #: The worker protects what it lists, and no more.
        self._listed = False
        #: What may have been removed before the boundary: these inodes are protected, so nothing else made them go.
        self._earlier: frozenset[int] = frozenset()
        #: What the worker saw, which is believed where ``_tracked`` says so: in an update, but not in what it scans.
        self._worklist = Worklist(book, rules)
        self._tracked = False

    # --- the two ways ------------------------------------------------------------------------------------------------

    def scan(self) -> Recorded:
        """Look at everything. OSError when the root cannot be read, store errors when the store fails."""
        try:
            fd = os.open(b".", _OPEN, dir_fd=self._root_fd)
            inode = os.fstat(fd).st_ino
            self._scan(b"", b"", fd, inode, inode)
            return self._finish(inode, None)
        finally:
            self._let_go()

    def update(
        self,
        directories: Sequence[DirtyDirectory],
        files: Sequence[DirtyFile],
        root: TreeEntry,
        earlier: Collection[int] = (),
    ) -> Recorded | None:
        """Look at what changed. ``root``: the directory at the root as it was recorded. ``earlier``: see
        ``boundaries.Listed``. None when nothing is recorded, and a scan is needed."""
        try:
            inode = os.fstat(self._root_fd).st_ino
            if self._book.directory(inode) is None:
                return None
            worklist = self._worklist
            worklist.collect(directories, files)
            self._earlier = frozenset(earlier)
            # With what came from where nothing is recorded, everything is protected.
            self._listed = not self._asof.present and not any(one.subtree for one in directories)
            self._tracked = True
            self._removed |= worklist.left_out
            for work in worklist.deepest_first():
                self._update_directory(work, inode)
            return self._finish(inode, None if worklist.root_changed else root)
        finally:
            self._let_go()

    def single(self, parent: bytes, name: bytes, fd: int) -> TreeEntry | None:
        """One name, in the directory that ``fd`` is of, with all below it; None when it has gone."""
        above = os.open(b".", _OPEN, dir_fd=fd)
        frame = _Frame(parent, b"", above, os.fstat(above).st_ino, 0, None)
        try:
            self._look(frame, {name: 0})
            self._complete(frame)
            self._close(frame)
        finally:
            frame.close()
            self._let_go()
        row = frame.rows.get(name)
        return row.entry if row is not None else None

    def _finish(self, root_inode: int, root: TreeEntry | None) -> Recorded:
        for inode in self._removed - self._arrived:
            self._book.drop_tree(inode, self._arrived)
        self._links.renew(self._worklist.linked, root_inode)
        self._check_disk()
        row = self._book.directory(root_inode)
        if row is None:
            raise OSError(errno.ESTALE, "the root of the workspace has changed")
        if root is not None:
            root = msgspec.structs.replace(root, hash=row.tree_hash)
        else:
            status = Status.of(os.fstat(self._root_fd))
            xattrs = read_xattrs(b".", self._root_fd)
            self._asof.refresh()
            was = self._asof.inode(root_inode)
            if was is not None:
                status, xattrs = was.status, _kept(was.xattrs)
            root = self._directory_entry(b"", status, row, xattrs)
        return Recorded(
            root, root_inode, row.sums, self._hashed, self._hashed_bytes, tuple(self._failed), self._in_place
        )

    def _let_go(self) -> None:
        if self._own:
            self._asof.close()

    # --- directories --------------------------------------------------------------------------------------------------

    def _update_directory(self, work: Work, root_inode: int) -> None:
        """Record one directory anew, and have the one that holds it look at it when it has become another."""
        inode, path = work.inode, work.path
        recorded = self._book.directory(inode)
        old = None if work.made else recorded
        parent = work.parent or (recorded.parent if recorded is not None else 0)
        name = work.name or (recorded.name if recorded is not None else b"")
        if inode == root_inode:
            parent, name = inode, b""
        elif not parent:
            # It is recorded nowhere: the one that holds it has it among its names, and scans it.
            return
        try:
            if inode in self._earlier and self._was_removed(inode, path):
                self._removed.add(inode)
                return
            if work.subtree or (old is None and not work.made) or (old is not None and self._other_rules(inode, path)):
                fd = self._asof.open(inode, path)
                if fd < 0 and self._asof.present:
                    return
                self._scan(path, name, fd, inode, parent)
                now = self._book.directory(inode)
            else:
                now = self._update_names(work, name, parent, old)
        except OSError as error:
            if error.errno not in UNREADABLE or inode == root_inode:
                raise
            # What is recorded of it is not what it is. The one that holds it finds that it cannot be read.
            self._book.drop_tree(inode, frozenset())
            self._worklist.at(parent, split(path)[0]).expected[name] = inode
            return
        if now is None or inode == root_inode:
            return
        if old is None or _seen_from_above(now) != _seen_from_above(old):
            if self._worklist.is_begun(parent):
                self._links.renew_above(inode, root_inode)
            else:
                self._worklist.at(parent, split(path)[0]).children[inode] = name

    def _was_removed(self, inode: int, path: bytes) -> bool:
        """Whether a directory that is protected was no more at the boundary. OSError when it cannot be read."""
        fd = self._asof.open(inode, path)
        if fd >= 0:
            os.close(fd)
            return False
        self._asof.refresh()
        return self._asof.inode(inode) is None

    def _update_names(self, work: Work, name: bytes, parent: int, old: DirectoryRow | None) -> DirectoryRow | None:
        names = {**dict.fromkeys(work.names, 0), **work.expected}
        fd = self._asof.open(work.inode, work.path) if names else -1
        if fd < 0 and names and self._asof.present:
            return None
        frame = _Frame(work.path, name, fd, work.inode, parent, old)
        if work.made:
            self._forget_former(work.inode)
            self._take_former(frame, None)
        try:
            for other, row in frame.old.items():
                if other not in names:
                    frame.rows[other] = row
            self._look(frame, names)
            self._complete(frame)
            for child, child_name in work.children.items():
                row_above = frame.rows.get(child_name)
                if row_above is not None and row_above.inode == child and child_name not in names:
                    frame.rows[child_name] = self._renewed(frame, row_above)
            return self._close(frame)
        finally:
            frame.close()

    def _forget_former(self, inode: int) -> None:
        """A new directory has an inode number under which another one is recorded, which is no more. What was in that
        is, elsewhere, or gone with it."""
        former = self._book.directory(inode)
        for row in former.rows if former is not None else ():
            if row.entry.kind is Kind.DIRECTORY:
                self._removed.add(row.inode)
            elif row.entry.link_group:
                self._book.remove_link(row.inode, inode)

    def _renewed(self, frame: _Frame, row: StatRow) -> StatRow:
        """The row of a subdirectory that was recorded anew, and is what it was in every other respect."""
        below = self._book.directory(row.inode)
        if below is None:
            raise OSError(errno.ESTALE, "a directory was replaced while it was recorded", row.entry.name)
        if below.parent != frame.inode or below.name != row.entry.name:
            below = msgspec.structs.replace(below, parent=frame.inode, name=row.entry.name)
            self._book.put_directory(row.inode, below)
        return msgspec.structs.replace(
            row, entry=msgspec.structs.replace(row.entry, hash=below.tree_hash), sums=below.sums
        )

    def _complete(self, frame: _Frame) -> None:
        """Find out all of what was looked at in a directory."""
        self._descend(frame)
        while self._collect(frame):
            self._descend(frame)

    def _watch_for_unreadable(self, frame: _Frame) -> None:
        looked = (frame.rows[name].entry for name in frame.looked if name in frame.rows)
        self._unreadable |= any(entry.kind is Kind.OPAQUE and entry.target == _UNREADABLE for entry in looked)

    def _check_disk(self) -> None:
        """A disk that has gone says of every file what a damaged one says of a single one, and files that were there at
        the boundary are not left out for that. OSError EIO."""
        if not self._unreadable:
            return
        try:
            syncfs(self._root_fd)
        except OSError as error:
            # Any other is not of a disk that has gone: it has become read-only, or is full.
            if error.errno == errno.EIO:
                raise OSError(errno.EIO, "files cannot be read, and the disk that they are on does not work") from error

    def _descend(self, frame: _Frame) -> None:
        """Record the subdirectories that were found in a directory and are not recorded."""
        while frame.subdirectories:
            child, status = frame.subdirectories.pop()
            child_fd = self._open_child(frame, child, status)
            if child_fd is not None:
                xattrs = _xattrs_of(child_fd)
                try:
                    self._scan(join(frame.path, child), child, child_fd, status.inode, frame.inode)
                except _CannotList:
                    frame.rows[child] = _opaque(child, status, OpaqueReason.UNREADABLE)
                    continue
                self._adopt_scanned(frame, child, status, xattrs)

    def _scan(self, path: bytes, name: bytes, fd: int, inode: int, parent: int) -> None:
        """Record a directory and everything below it by stat. Takes ``fd``."""
        tracked, self._tracked = self._tracked, False
        stack: list[_Frame] = []
        try:
            stack.append(self._open_frame(path, name, fd, inode, parent))
            while True:
                frame = stack[-1]
                if frame.subdirectories:
                    child, status = frame.subdirectories.pop()
                    child_fd = self._open_child(frame, child, status)
                    if child_fd is not None:
                        where = join(frame.path, child)
                        try:
                            below = self._open_frame(where, child, child_fd, status.inode, frame.inode, frame)
                        except _CannotList:
                            frame.rows[child] = _opaque(child, status, OpaqueReason.UNREADABLE)
                            continue
                        below.status = status
                        stack.append(below)
                    continue
                if self._collect(frame):
                    continue
                self._close(frame)
                xattrs = _xattrs_of(frame.fd)
                frame.close()
                stack.pop()
                if not stack:
                    return
                assert frame.status is not None
                self._adopt_scanned(stack[-1], frame.name, frame.status, xattrs)
        finally:
            self._tracked = tracked
            for frame in stack:
                frame.close()

    def _open_frame(
        self, path: bytes, name: bytes, fd: int, inode: int, parent: int, above: _Frame | None = None
    ) -> _Frame:
        frame = _Frame(path, name, fd, inode, parent, self._book.directory(inode))
        self._take_former(frame, above)
        try:
            names = self._names_in(fd)
            if not self._asof.present:
                mtime_ns = os.fstat(fd).st_mtime_ns if fd >= 0 else 0
                changed = mtime_ns > self._asof.frozen_ns
                self._asof.refresh()
                if self._asof.replaced(inode):
                    names, changed = {}, False
                logged = self._asof.names(inode)
                names.update(dict.fromkeys(logged, 0))
                # Of a directory that is not listed, the log has what later boundaries need.
                if changed and (self._listed or not logged):
                    self._failed.append(Skipped(path or b".", "names in it were changed past the mount"))
            self._look(frame, names)
        except BaseException:
            frame.close()
            raise
        return frame

    def _take_former(self, frame: _Frame, above: _Frame | None) -> None:
        """Of a directory that is not recorded: another one may be in its place. ``above`` is the one that holds it,
        where that is being recorded too."""
        if frame.tree != NO_HASH or frame.parent == frame.inode:
            return
        if above is not None:
            tree = above.hash_of(frame.name)
        else:
            row = self._book.row(frame.parent, frame.name)
            tree = row.entry.hash if row is not None else NO_HASH
        if tree == NO_HASH:
            return
        with suppress(StoreError):
            frame.former = {entry.name: entry.hash for entry in self._store.read_tree(tree).entries}
            frame.tree = tree

    def _names_in(self, fd: int) -> dict[bytes, int]:
        try:
            return dict.fromkeys(map(os.fsencode, os.listdir(fd)), 0) if fd >= 0 else {}
        except FileNotFoundError:
            return {}  # Removed since it was opened.
        except OSError as error:
            if error.errno in UNREADABLE:
                raise _CannotList(error.errno, f"the names in a directory cannot be read: {error.strerror}") from error
            raise

    def _open_child(self, frame: _Frame, name: bytes, status: Status) -> int | None:
        """A descriptor of a subdirectory, -1 when it is no more and the log has what was in it; None when it cannot be
        read, which is then recorded, or has gone."""
        fd = -1
        if frame.fd >= 0:
            try:
                fd = open_within(name, _OPEN, frame.fd)
            except OSError as error:
                if error.errno == errno.EXDEV:
                    frame.rows[name] = _opaque(name, status, OpaqueReason.SUBMOUNT)
                    return None
                if error.errno in UNREADABLE:
                    self._asof.check_readable(join(frame.path, name))
                    frame.rows[name] = _opaque(name, status, OpaqueReason.UNREADABLE)
                    return None
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
        if fd >= 0 and os.fstat(fd).st_ino == status.inode:
            # Another directory that has its name and number is told from it by what is in it, see ``_look``.
            return fd
        if fd >= 0:
            os.close(fd)
        if self._asof.present:
            frame.others.append(name)
            return None
        try:
            fd = self._asof.open(status.inode, join(frame.path, name))
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            frame.rows[name] = _opaque(name, status, OpaqueReason.UNREADABLE)
            return None
        if fd < 0:
            self._asof.refresh()
            if self._asof.inode(status.inode) is None:
                self._fail(frame, name, "it was removed past the mount")
        return fd

    def _reach(self, inode: int, path: bytes) -> int:
        """A descriptor of a directory that was at ``path``; -1 when there is none to be had."""
        try:
            return self._asof.open(inode, path)
        except OSError as error:
            if error.errno in UNREADABLE:
                return -1
            raise

    def _adopt_scanned(self, frame: _Frame, name: bytes, status: Status, xattrs: Xattrs) -> None:
        """``_adopt`` a subdirectory that was just scanned, unless it has gone meanwhile or something else has come in
        its place. As of a boundary it was there all the same."""
        if self._asof.present:
            try:
                found = os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
            except FileNotFoundError:
                return
            if found.st_ino != status.inode:
                frame.others.append(name)
                return
            status = Status.of(found)
        self._adopt(frame, name, status, xattrs)

    def _adopt(self, frame: _Frame, name: bytes, status: Status, xattrs: Xattrs) -> None:
        """Put a recorded subdirectory into the directory that holds it."""
        row = self._book.directory(status.inode)
        if row is None:
            raise OSError(errno.ESTALE, "a directory was replaced while it was recorded", name)
        if row.parent != frame.inode or row.name != name:
            row = msgspec.structs.replace(row, parent=frame.inode, name=name)
            self._book.put_directory(status.inode, row)
        frame.rows[name] = _status(self._directory_entry(name, status, row, xattrs), status, row.sums)

    def _directory_entry(self, name: bytes, status: Status, row: DirectoryRow, xattrs: Xattrs) -> TreeEntry:
        uid, gid = self._owner(status)
        mode = stat.S_IMODE(status.mode)
        return TreeEntry(name, Kind.DIRECTORY, mode, hash=row.tree_hash, xattrs=xattrs, uid=uid, gid=gid)

    def _close(self, frame: _Frame) -> DirectoryRow:
        """All of a directory is known: build its tree and remember its rows."""
        self._collect(frame)
        if not self._asof.present:
            if frame.fd >= 0:
                # Or what could not be seen any more would be missing, or be told of as unreadable.
                self._asof.check_still_readable(frame.fd, frame.path)
            self._take_back(frame)
        self._watch_for_unreadable(frame)
        rows = tuple(frame.rows[name] for name in sorted(frame.rows))
        self._links.follow(frame.inode, rows, frame.old.values(), frame.looked)
        before = {row.inode for row in frame.old.values() if row.entry.kind is Kind.DIRECTORY}
        now = {row.inode for row in rows if row.entry.kind is Kind.DIRECTORY}
        self._removed |= before - now
        self._arrived |= now - before
        tree_hash = self._store.put_tree([row.entry for row in rows], frame.tree)
        recorded = DirectoryRow(tree_hash, rows, frame.started_ns, frame.parent, frame.name, sum_of(rows))
        self._book.put_directory(frame.inode, recorded)
        return recorded

    def _collect(self, frame: _Frame) -> bool:
        """Take in what was read. Whether names had become something else by then, and were looked at again."""
        if frame.batches:
            self._submit(frame)
        elif frame.pending:
            # Another thread would be waited for, whose waking costs more than a small file.
            self._take_in(frame, self._read(frame.fd, frame.pending, self._groups(frame)))
            frame.pending = []
        for batch in frame.batches:
            self._take_in(frame, batch.result())
        frame.batches = []
        names, frame.others = frame.others, []
        # As of a boundary, the log has what they were.
        return bool(names) and self._asof.present and self._look_again(frame, names)

    def _take_in(self, frame: _Frame, found: Iterable[tuple[bytes, StatRow | None]]) -> None:
        for name, row in found:
            if row is not None:
                frame.rows[name] = row
                self._hashed += row.entry.kind is Kind.FILE
                self._hashed_bytes += row.entry.size
            else:
                frame.others.append(name)

    def _look_again(self, frame: _Frame, names: Sequence[bytes]) -> bool:
        """Whether it was done; what becomes something else again and again is left out as changing."""
        frame.looks += 1
        if frame.looks < ATTEMPTS:
            self._look(frame, dict.fromkeys(names, 0))
            return True
        for name in names:
            try:
                status = Status.of(os.stat(name, dir_fd=frame.fd, follow_symlinks=False))
            except FileNotFoundError:
                continue
            frame.rows[name] = _opaque(name, status, OpaqueReason.CHANGING)
        return False

    def _capture_link(self, directory: int, row: StatRow) -> StatRow:
        """What a file is of which a recorded name alone is known."""
        path = self._book.path_of(directory) or b""
        fd = self._reach(directory, path)
        frame = _Frame(path, b"", fd, directory, 0, None)
        try:
            self._look(frame, {row.entry.name: row.inode})
            self._complete(frame)
            if not self._asof.present:
                self._take_back(frame)
            self._watch_for_unreadable(frame)
        finally:
            frame.close()
        return frame.rows.get(row.entry.name, row)

    # --- names --------------------------------------------------------------------------------------------------------

    def _look(self, frame: _Frame, names: Mapping[bytes, int]) -> None:
        """Find out what each name is, of the inode that is given with it or, with 0, of any; what has to be read is
        read in the background until the frame closes.

        As of a boundary, a name that comes with its inode was of that, whatever the log says: the inode is protected
        and the name need not be, so what the log has of the name may be from a later boundary.
        """
        present = self._asof.present
        for name, expected in names.items():
            if is_temporary(name):
                continue
            frame.looked[name] = expected
            if not present and not expected and (was := self._asof.entry(frame.inode, name)) is not None:
                self._look_back(frame, name, was)
                continue
            try:
                found = os.stat(name, dir_fd=frame.fd, follow_symlinks=False) if frame.fd >= 0 else None
            except FileNotFoundError:
                found = None
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                self._asof.check_readable(frame.path)
                # A directory that may be listed and not entered, a damaged inode, a dead mount.
                entry = TreeEntry(name, Kind.OPAQUE, target=OpaqueReason.UNREADABLE.encode())
                frame.rows[name] = StatRow(entry, 0, 0, 0, 0, 0, 0)
                continue
            if not present:
                self._asof.refresh()
                if not expected and (was := self._asof.entry(frame.inode, name)) is not None:
                    self._look_back(frame, name, was)
                    continue
                if self._asof.replaced(frame.inode):
                    found = None
                if expected and (found is None or found.st_ino != expected):
                    self._look_for(frame, name, expected)
                    continue
            if found is not None:
                frame.looked[name] = found.st_ino
                self._look_at(frame, name, Status.of(found), found.st_dev)

    def _look_back(self, frame: _Frame, name: bytes, was: EntryWas) -> None:
        """A name, by what the log has of it."""
        if was.inode:
            self._look_for(frame, name, was.inode)

    def _look_for(self, frame: _Frame, name: bytes, inode: int) -> None:
        """A name that was of ``inode``, and may not be any more."""
        was = self._asof.inode(inode)
        if was is not None and not stat.S_ISDIR(was.status.mode):
            frame.rows[name] = self._row_of(frame, name, was)
            return
        fd = self._reach(inode, join(frame.path, name))
        if fd >= 0:
            try:
                found = os.fstat(fd)
            finally:
                os.close(fd)
            self._look_at(frame, name, was.status if was is not None else Status.of(found), found.st_dev)
        elif was is not None:
            self._look_at(frame, name, was.status, self._device)
        elif inode not in self._earlier or frame.fd >= 0:
            # It went with the directory, or not before the boundary.
            self._fail(frame, name, "it has gone")

    def _look_at(self, frame: _Frame, name: bytes, status: Status, device: int) -> None:
        mode = status.mode
        directory = stat.S_ISDIR(mode)
        path = join(frame.path, name)
        if self._rules.excludes(path, name, directory=directory):
            frame.rows[name] = _opaque(name, status, OpaqueReason.EXCLUDED)
        elif directory:
            self._look_at_directory(frame, name, status, path, device)
        elif stat.S_ISREG(mode):
            self._look_at_file(frame, name, status)
        elif stat.S_ISLNK(mode):
            self._look_at_link(frame, name, status)
        else:
            frame.rows[name] = _opaque(name, status, OpaqueReason.SPECIAL)

    def _look_at_directory(self, frame: _Frame, name: bytes, status: Status, path: bytes, device: int) -> None:
        if device != self._device:
            frame.rows[name] = _opaque(name, status, OpaqueReason.SUBMOUNT)
        elif (
            self._tracked
            and self._book.directory(status.inode) is not None
            and not self._other_rules(status.inode, path)
        ):
            fd = self._reach(status.inode, path)
            xattrs = _xattrs_of(fd)
            if fd >= 0:
                os.close(fd)
            self._adopt(frame, name, status, xattrs)
        else:
            frame.subdirectories.append((name, status))

    def _other_rules(self, inode: int, path: bytes) -> bool:
        """Whether what was recorded below a directory may have been left out, or not, because of where it stood."""
        return self._rules.by_place and self._book.path_of(inode) != path

    def _look_at_link(self, frame: _Frame, name: bytes, status: Status) -> None:
        try:
            target = os.readlink(name, dir_fd=frame.fd)
        except OSError:
            frame.others.append(name)
            return
        uid, gid = self._owner(status)
        frame.rows[name] = _status(TreeEntry(name, Kind.SYMLINK, target=target, uid=uid, gid=gid), status)

    def _look_at_file(self, frame: _Frame, name: bytes, status: Status) -> None:
        if self._rules.too_large(status.size):
            frame.rows[name] = _opaque(name, status, OpaqueReason.TOO_LARGE)
            return
        old = frame.old.get(name)
        group = self._group(status)
        if self._rules.refuses(status.nlink):
            # With its group: its other names are found when one of them goes, and this one may be kept again.
            frame.rows[name] = _opaque(name, status, OpaqueReason.HARD_LINK, group)
            return
        if old is not None and self._unchanged(frame, old, status):
            entry = old.entry
            if entry.link_group != group:
                entry = msgspec.structs.replace(entry, link_group=group)
            frame.rows[name] = _status(entry, status)
            return
        known = self._known_content(status, old) or self._ahead(status)
        if known is not None:
            frame.rows[name] = self._file_row(name, known, status, read_xattrs(name, frame.fd), group)
            return
        frame.pending.append((name, status, self._like(frame, name, status.inode)))
        if len(frame.pending) >= _BATCH:
            self._submit(frame)

    def _unchanged(self, frame: _Frame, old: StatRow, status: Status) -> bool:
        """Whether a name is what was recorded, as far as its stat and what the worker saw can tell."""
        if old.entry.kind is not Kind.FILE or not _same(old, status):
            return False
        if self._tracked:
            return status.inode not in self._worklist.touched
        if status.inode in self._unsure:
            return False
        if self._believed_ns is not None and frame.old_recorded_ns > self._believed_ns:
            return False
        return max(status.mtime_ns, status.ctime_ns) < frame.old_recorded_ns - RACY_NS

    def _known_content(self, status: Status, old: StatRow | None) -> Hash | None:
        """The content that a file still has though its stat moved: renamed, or given another mode or time."""
        seen = self._worklist
        if not self._tracked or status.inode in seen.written:
            return None
        if old is None or old.inode != status.inode:
            old = seen.moved.get(status.inode)
        if old is None or old.entry.kind is not Kind.FILE or old.size != status.size:
            return None
        if old.mtime_ns != status.mtime_ns and status.inode not in seen.touched:
            return None
        return old.entry.hash

    def _like(self, frame: _Frame, name: bytes, inode: int) -> Hash:
        """What was recorded of a file: under this name or, where it was moved here, under the one that it had."""
        old = frame.old.get(name)
        moved = self._worklist.moved.get(inode) if old is None or old.inode != inode else None
        return moved.entry.hash if moved is not None else frame.hash_of(name)

    def _group(self, status: Status) -> int:
        """Of a file that had several names it is kept where the last one is: who opened it by another may write on,
        and the worker knows no name then."""
        return self._book.group(status.inode) if status.nlink > 1 else 0

    def _file_row(self, name: bytes, content: Hash, status: Status, xattrs: Xattrs, group: int) -> StatRow:
        uid, gid = self._owner(status)
        entry = TreeEntry(
            name,
            Kind.FILE,
            stat.S_IMODE(status.mode),
            status.size,
            content,
            xattrs=xattrs,
            link_group=group,
            uid=uid,
            gid=gid,
        )
        return _status(entry, status)

    def _owner(self, status: Status) -> tuple[int, int]:
        return (status.uid, status.gid) if self._owners else (-1, -1)

    # --- as of a boundary ---------------------------------------------------------------------------------------------

    def _take_back(self, frame: _Frame) -> None:
        """What was seen, and changed before or while it was read, is taken from the log."""
        self._asof.refresh()
        for name, expected in frame.looked.items():
            was = None if expected else self._asof.entry(frame.inode, name)
            row = frame.rows.get(name)
            if was is not None and not was.inode:
                frame.rows.pop(name, None)
                continue
            inode = was.inode if was is not None else expected or (row.inode if row is not None else 0)
            known = self._asof.inode(inode) if inode else None
            if known is not None:
                if not stat.S_ISDIR(known.status.mode):
                    frame.rows[name] = self._row_of(frame, name, known)
                elif row is not None and row.entry.kind is Kind.DIRECTORY and row.inode == inode:
                    recorded = self._book.directory(inode)
                    assert recorded is not None
                    entry = self._directory_entry(name, known.status, recorded, _kept(known.xattrs))
                    frame.rows[name] = _status(entry, known.status, recorded.sums)
            elif row is None and inode in self._earlier and frame.fd < 0:
                continue
            elif inode and (row is None or row.inode not in (0, inode)):
                if not any(one.path == join(frame.path, name) for one in self._failed):
                    why = "it was removed past the mount" if row is None else "it was replaced past the mount"
                    self._fail(frame, name, why)
            elif row is not None and ((row.ctime_ns > self._asof.frozen_ns and _is_read(row)) or _is_changing(row)):
                self._fail(frame, name, "it was changed past the mount")

    def _row_of(self, frame: _Frame, name: bytes, was: Was) -> StatRow:
        """The row of anything but a directory, by what the log has of its inode."""
        status = was.status
        path = join(frame.path, name)
        if status.ctime_ns > self._asof.frozen_ns and not self._asof.has_seen(status.inode):
            # So it was later: at another boundary, or when there was a worker again.
            self._fail(frame, name, "it was changed before it was read")
        if self._rules.excludes(path, name, directory=False):
            return _opaque(name, status, OpaqueReason.EXCLUDED)
        if stat.S_ISLNK(status.mode):
            uid, gid = self._owner(status)
            return _status(TreeEntry(name, Kind.SYMLINK, target=was.target, uid=uid, gid=gid), status)
        if not stat.S_ISREG(status.mode):
            return _opaque(name, status, OpaqueReason.SPECIAL)
        if self._rules.too_large(status.size):
            return _opaque(name, status, OpaqueReason.TOO_LARGE)
        if self._rules.refuses(status.nlink):
            return _opaque(name, status, OpaqueReason.HARD_LINK, self._group(status))
        content = self._logged_content(frame, name, status.inode) if was.logged else was.hash
        if content == NO_HASH:
            if was.reason == LOST:
                self._fail(frame, name, "it was changed and could not be kept")
            reason = OpaqueReason.UNREADABLE if was.reason in ("", LOST) else OpaqueReason(was.reason)
            return _opaque(name, status, reason)
        if isinstance(content, OpaqueReason):
            return _opaque(name, status, content)
        if not self._store.keep_file(content):
            self._fail(frame, name, "what was captured of it is lost")
        group = self._group(status)
        return self._file_row(name, content, status, _kept(was.xattrs), group)

    def _logged_content(self, frame: _Frame, name: bytes, inode: int) -> Hash | OpaqueReason:
        """What a file was of which the log has part, or all."""
        known = self._before.get(inode)
        if known is None:
            self._hashed += 1
            try:
                found = put_content(
                    self._store,
                    self._asof.content(inode),
                    lambda: open_inode(frame.fd, name, inode),
                    self._like(frame, name, inode),
                )
                if found.in_place:
                    self._in_place[inode] = join(frame.path, name)
                known = found.content
            except Lost as error:
                self._fail(frame, name, str(error))
                known = OpaqueReason.UNREADABLE
            self._before[inode] = known
        return known

    def _fail(self, frame: _Frame, name: bytes, why: str) -> None:
        self._failed.append(Skipped(join(frame.path, name), why))

    # --- reading ------------------------------------------------------------------------------------------------------

    def _submit(self, frame: _Frame) -> None:
        if frame.pending:
            frame.batches.append(self._pool.submit(self._read, frame.fd, frame.pending, self._groups(frame)))
            frame.pending = []

    def _groups(self, frame: _Frame) -> dict[bytes, int]:
        return {name: self._book.group(status.inode) for name, status, _ in frame.pending if status.nlink > 1}

    def _read(
        self, fd: int, names: Sequence[tuple[bytes, Status, Hash]], groups: Mapping[bytes, int]
    ) -> list[tuple[bytes, StatRow | None]]:
        """Capture files; may run in the pool. None for one that has gone."""
        found: list[tuple[bytes, StatRow | None]] = []
        for name, status, base in names:
            try:
                # As of a boundary, what changes while it is read is in the log.
                attempts = ATTEMPTS if self._asof.present else 1
                content = capture_file(self._store, name, fd, moving=self._moving, attempts=attempts, base=base)
            except Vanished:
                found.append((name, None))
                continue
            if isinstance(content, OpaqueReason):
                found.append((name, _opaque(name, status, content)))
                continue
            now = Status.of(content.stat)
            # Another file may have come in its place.
            group = groups.get(name, 0) if now.inode == status.inode else 0
            found.append((name, self._file_row(name, content.hash, now, read_xattrs(name, fd), group)))
        return found


def _is_read(row: StatRow) -> bool:
    """Whether the row tells what was in a file or link."""
    return row.entry.kind in (Kind.FILE, Kind.SYMLINK)


def _is_changing(row: StatRow) -> bool:
    return row.entry.kind is Kind.OPAQUE and row.entry.target == OpaqueReason.CHANGING.encode()


def _kept(xattrs: Xattrs) -> Xattrs:
    """Those of the log that a snapshot keeps."""
    return tuple(sorted((name, value) for name, value in xattrs if is_recorded_xattr(name)))


def _xattrs_of(fd: int) -> Xattrs:
    """Those of an open directory; the log has them when it is no more."""
    return read_xattrs(b".", fd) if fd >= 0 else ()


def _seen_from_above(row: DirectoryRow) -> tuple[bytes, Sums, int, bytes]:
    return row.tree_hash, row.sums, row.parent, row.name
