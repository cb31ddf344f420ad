"""Recording: what the files of a workspace are now, as a tree in the store.

Two ways lead to the same result. A scan looks at everything and reads what its stat says has changed. An update looks
only at what a worker saw change (``worklist``). Both read through a descriptor of the backing directory, never through
the mount, so they can run while the worker parks mutating calls.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.beneath import Beneath, beneath, join, split
from cogfs.fsd.control.capture import ATTEMPTS, Vanished, Xattrs, capture_file, read_xattrs
from cogfs.fsd.control.recordbook import RecordBook, is_reported
from cogfs.fsd.control.rules import Rules, is_temporary
from cogfs.fsd.control.worklist import Work, Worklist
from cogfs.store.schema import DirectoryRow, Kind, OpaqueReason, StatRow, Sums, TreeEntry
from cogfs.store.store import Store

#: A file changed within this time before it was recorded may change again without a trace in its stat.
RACY_NS = 2_000_000_000

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 16


class Recorded:
    """What a recording found. ``hashed``: files that were read."""

    __slots__ = ("hashed", "root", "root_inode", "sums")

    def __init__(self, root: TreeEntry, root_inode: int, sums: Sums, hashed: int) -> None:
        self.root = root
        self.root_inode = root_inode
        self.sums = sums
        self.hashed = hashed


class _Frame:
    """A directory that is being recorded."""

    __slots__ = (
        "batches",
        "fd",
        "inode",
        "looks",
        "name",
        "old",
        "old_recorded_ns",
        "parent",
        "path",
        "pending",
        "rows",
        "started_ns",
        "subdirectories",
    )

    def __init__(self, path: bytes, name: bytes, fd: int, inode: int, parent: int, old: DirectoryRow | None) -> None:
        self.path = path
        self.name = name
        self.fd = fd
        self.inode = inode
        self.parent = parent
        self.old = {row.entry.name: row for row in old.rows} if old is not None else {}
        self.old_recorded_ns = old.recorded_ns if old is not None else 0
        self.rows: dict[bytes, StatRow] = {}
        self.pending: list[tuple[bytes, os.stat_result]] = []
        self.batches: list[Future[list[tuple[bytes, StatRow | None]]]] = []
        self.subdirectories: list[tuple[bytes, os.stat_result]] = []
        self.started_ns = time.time_ns()
        #: How often names were looked at again, as they had become something else meanwhile.
        self.looks = 0


def _status(entry: TreeEntry, status: os.stat_result, sums: Sums | None = None) -> StatRow:
    return StatRow(
        entry,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_mode,
        status.st_nlink,
        sums,
    )


def _opaque(name: bytes, status: os.stat_result, reason: OpaqueReason) -> StatRow:
    return _status(TreeEntry(name, Kind.OPAQUE, stat.S_IFMT(status.st_mode), target=reason.encode()), status)


def same_stat(row: StatRow, status: os.stat_result) -> bool:
    """Whether a file has the stat that was recorded."""
    return (
        row.inode == status.st_ino
        and row.size == status.st_size
        and row.mtime_ns == status.st_mtime_ns
        and row.ctime_ns == status.st_ctime_ns
        and row.mode == status.st_mode
    )


def _sum(rows: Iterable[StatRow]) -> Sums:
    files = total = directories = symlinks = skipped = 0
    for row in rows:
        kind = row.entry.kind
        if kind is Kind.FILE:
            files += 1
            total += row.entry.size
        elif kind is Kind.DIRECTORY:
            directories += 1
            if row.sums is not None:
                files += row.sums.files
                total += row.sums.bytes
                directories += row.sums.directories
                symlinks += row.sums.symlinks
                skipped += row.sums.skipped
        elif kind is Kind.SYMLINK:
            symlinks += 1
        elif is_reported(row):
            skipped += 1
    return Sums(files, total, directories, symlinks, skipped)


class Recorder:
    """One recording of one workspace. Use it once, from one thread."""

    def __init__(
        self,
        store: Store,
        book: RecordBook,
        root_fd: int,
        rules: Rules,
        pool: ThreadPoolExecutor,
        unsure: frozenset[int] | None = None,
    ) -> None:
        """``unsure``: files that are read whatever their stat says; None when nothing changes while this goes on."""
        self._unsure = unsure or frozenset()
        self._moving = unsure is not None
        self._store = store
        self._book = book
        self._root_fd = root_fd
        self._rules = rules
        self._pool = pool
        self._owners = os.geteuid() == 0
        self._device = os.fstat(root_fd).st_dev
        self._hashed = 0
        self._removed: set[int] = set()
        self._arrived: set[int] = set()
        #: What the worker saw, which is believed where ``_tracked`` says so: in an update, but not in what it scans.
        self._worklist = Worklist(book, root_fd, rules)
        self._tracked = False

    # --- the two ways ------------------------------------------------------------------------------------------------

    def scan(self) -> Recorded:
        """Look at everything. OSError when the root cannot be read, store errors when the store fails."""
        fd = os.open(b".", _OPEN, dir_fd=self._root_fd)
        inode = os.fstat(fd).st_ino
        self._scan(b"", b"", fd, inode)
        return self._finish(inode)

    def update(self, directories: Sequence[DirtyDirectory], files: Sequence[DirtyFile]) -> Recorded | None:
        """Look at what changed. None when what is recorded does not suffice, and a scan is needed."""
        inode = os.fstat(self._root_fd).st_ino
        if self._book.directory(inode) is None:
            return None
        worklist = self._worklist
        if not worklist.collect(directories, files):
            return None
        self._tracked = True
        self._removed |= worklist.left_out
        with beneath(self._root_fd) as reach:
            worklist.gather_moved(reach)
            for path, work in worklist.deepest_first():
                if self._update_directory(path, work, reach) and path:
                    worklist.add(path)
        return self._finish(inode)

    def single(self, parent: bytes, name: bytes, fd: int) -> TreeEntry | None:
        """One name, in the directory that ``fd`` is of, with all below it; None when it has gone."""
        above = os.open(b".", _OPEN, dir_fd=fd)
        frame = _Frame(parent, b"", above, os.fstat(above).st_ino, 0, None)
        try:
            self._look(frame, (name,))
            for child, status in frame.subdirectories:
                child_fd = self._open_child(frame, child, status)
                if child_fd is not None:
                    self._scan(join(parent, child), child, child_fd, frame.inode)
                    self._adopt(frame, child, status)
            self._close(frame)
        finally:
            os.close(above)
        row = frame.rows.get(name)
        return row.entry if row is not None else None

    def _finish(self, root_inode: int) -> Recorded:
        for inode in self._removed - self._arrived:
            self._book.drop_tree(inode, self._arrived)
        row = self._book.directory(root_inode)
        if row is None:
            raise OSError(errno.ESTALE, "the root of the workspace has changed")
        status = os.fstat(self._root_fd)
        root = self._directory_entry(b"", status, row, read_xattrs(b".", self._root_fd))
        return Recorded(root, root_inode, row.sums, self._hashed)

    # --- directories --------------------------------------------------------------------------------------------------

    def _update_directory(self, path: bytes, work: Work, reach: Beneath) -> bool:
        """Record one directory anew. Whether the directory that holds it has to look at it."""
        try:
            there = reach.directory(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EXDEV, errno.EACCES, errno.ELOOP):
                return error.errno in (errno.EXDEV, errno.EACCES)
            raise
        status = os.fstat(there)
        old = self._book.directory(status.st_ino)
        parent_path, name = split(path)
        parent = os.fstat(reach.directory(parent_path)).st_ino if path else status.st_ino
        there = reach.directory(path)
        fd = os.open(b".", _OPEN, dir_fd=there)
        if work.subtree or (old is not None and self._other_rules(status.st_ino, path)):
            self._scan(path, name, fd, parent)
            return True
        frame = _Frame(path, name, fd, status.st_ino, parent, old)
        try:
            if work.names is None or old is None:
                names: Iterable[bytes] = [os.fsencode(entry) for entry in os.listdir(fd)]
            else:
                names = work.names
                for other, row in frame.old.items():
                    if other not in work.names:
                        frame.rows[other] = row
            self._look(frame, names)
            for child, child_status in frame.subdirectories:
                child_fd = self._open_child(frame, child, child_status)
                if child_fd is not None:
                    self._scan(join(path, child), child, child_fd, frame.inode)
                    self._adopt(frame, child, child_status)
            now = self._close(frame)
        finally:
            os.close(fd)
        return old is None or _seen_from_above(now) != _seen_from_above(old)

    def _scan(self, path: bytes, name: bytes, fd: int, parent: int) -> None:
        """Record a directory and everything below it by stat. Takes ``fd``."""
        tracked, self._tracked = self._tracked, False
        stack: list[_Frame] = []
        try:
            stack.append(self._open_frame(path, name, fd, parent))
            while True:
                frame = stack[-1]
                if frame.subdirectories:
                    child, status = frame.subdirectories.pop()
                    child_fd = self._open_child(frame, child, status)
                    if child_fd is not None:
                        stack.append(self._open_frame(join(frame.path, child), child, child_fd, frame.inode))
                    continue
                if self._collect(frame):
                    continue
                self._close(frame)
                os.close(frame.fd)
                stack.pop()
                if not stack:
                    return
                self._adopt_scanned(stack[-1], frame)
        finally:
            self._tracked = tracked
            for frame in stack:
                os.close(frame.fd)

    def _open_frame(self, path: bytes, name: bytes, fd: int, parent: int) -> _Frame:
        try:
            inode = os.fstat(fd).st_ino
            frame = _Frame(path, name, fd, inode, parent, self._book.directory(inode))
            try:
                names = [os.fsencode(entry) for entry in os.listdir(fd)]
            except FileNotFoundError:
                names = []  # Removed since it was opened.
            self._look(frame, names)
        except BaseException:
            os.close(fd)
            raise
        return frame

    def _open_child(self, frame: _Frame, name: bytes, status: os.stat_result) -> int | None:
        """A descriptor of a subdirectory; None when it cannot be read, which is then recorded, or has gone."""
        try:
            return os.open(name, _OPEN, dir_fd=frame.fd)
        except PermissionError:
            frame.rows[name] = _opaque(name, status, OpaqueReason.UNREADABLE)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        return None

    def _adopt_scanned(self, above: _Frame, frame: _Frame) -> None:
        """``_adopt``, unless the directory has gone meanwhile or another one has come in its place."""
        try:
            status = os.stat(frame.name, dir_fd=above.fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if status.st_ino == frame.inode:
            self._adopt(above, frame.name, status)
        else:
            self._look_again(above, [frame.name])

    def _adopt(self, frame: _Frame, name: bytes, status: os.stat_result) -> None:
        """Put a recorded subdirectory into the directory that holds it."""
        row = self._book.directory(status.st_ino)
        if row is None:
            raise OSError(errno.ESTALE, "a directory was replaced while it was recorded", name)
        if row.parent != frame.inode or row.name != name:
            row = msgspec.structs.replace(row, parent=frame.inode, name=name)
            self._book.put_directory(status.st_ino, row)
        xattrs = read_xattrs(name, frame.fd)
        frame.rows[name] = _status(self._directory_entry(name, status, row, xattrs), status, row.sums)

    def _directory_entry(self, name: bytes, status: os.stat_result, row: DirectoryRow, xattrs: Xattrs) -> TreeEntry:
        uid, gid = self._owner(status)
        mode = stat.S_IMODE(status.st_mode)
        return TreeEntry(name, Kind.DIRECTORY, mode, hash=row.tree_hash, xattrs=xattrs, uid=uid, gid=gid)

    def _close(self, frame: _Frame) -> DirectoryRow:
        """All of a directory is known: build its tree and remember its rows."""
        self._collect(frame)
        rows = tuple(frame.rows[name] for name in sorted(frame.rows))
        self._follow_links(frame, rows)
        before = {row.inode for row in frame.old.values() if row.entry.kind is Kind.DIRECTORY}
        now = {row.inode for row in rows if row.entry.kind is Kind.DIRECTORY}
        self._removed |= before - now
        self._arrived |= now - before
        tree_hash = self._store.put_tree([row.entry for row in rows])
        recorded = DirectoryRow(tree_hash, rows, frame.started_ns, frame.parent, frame.name, _sum(rows))
        self._book.put_directory(frame.inode, recorded)
        return recorded

    def _collect(self, frame: _Frame) -> bool:
        """Take in what was read. Whether names had become something else by then, and were looked at again."""
        self._submit(frame)
        others = []
        for batch in frame.batches:
            for name, row in batch.result():
                if row is not None:
                    frame.rows[name] = row
                    self._hashed += row.entry.kind is Kind.FILE
                else:
                    others.append(name)
        frame.batches = []
        return self._look_again(frame, others)

    def _look_again(self, frame: _Frame, names: Sequence[bytes]) -> bool:
        """Whether it was done; what becomes something else again and again is left out as changing."""
        if not names:
            return False
        frame.looks += 1
        if frame.looks < ATTEMPTS:
            self._look(frame, names)
            return True
        for name in names:
            try:
                status = os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            frame.rows[name] = _opaque(name, status, OpaqueReason.CHANGING)
        return False

    def _follow_links(self, frame: _Frame, rows: Sequence[StatRow]) -> None:
        now = set()
        for row in rows:
            if row.entry.link_group:
                now.add(row.inode)
                self._book.add_link(row.inode, row.entry.link_group, frame.inode)
        for row in frame.old.values():
            if row.entry.link_group and row.inode not in now:
                self._book.remove_link(row.inode, frame.inode)

    # --- names --------------------------------------------------------------------------------------------------------

    def _look(self, frame: _Frame, names: Iterable[bytes]) -> None:
        """Find out what each name is now; what has to be read is read in the background until the frame closes."""
        for name in names:
            if is_temporary(name):
                continue
            try:
                status = os.stat(name, dir_fd=frame.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except PermissionError:
                # A directory that may be listed and not entered.
                entry = TreeEntry(name, Kind.OPAQUE, target=OpaqueReason.UNREADABLE.encode())
                frame.rows[name] = StatRow(entry, 0, 0, 0, 0, 0, 0)
                continue
            self._look_at(frame, name, status)

    def _look_at(self, frame: _Frame, name: bytes, status: os.stat_result) -> None:
        mode = status.st_mode
        directory = stat.S_ISDIR(mode)
        path = join(frame.path, name)
        if self._rules.excludes(path, name, directory=directory):
            frame.rows[name] = _opaque(name, status, OpaqueReason.EXCLUDED)
        elif directory:
            self._look_at_directory(frame, name, status, path)
        elif stat.S_ISREG(mode):
            self._look_at_file(frame, name, status, path)
        elif stat.S_ISLNK(mode):
            self._look_at_link(frame, name, status)
        else:
            frame.rows[name] = _opaque(name, status, OpaqueReason.SPECIAL)

    def _look_at_directory(self, frame: _Frame, name: bytes, status: os.stat_result, path: bytes) -> None:
        if status.st_dev != self._device:
            frame.rows[name] = _opaque(name, status, OpaqueReason.SUBMOUNT)
        elif (
            self._tracked
            and self._book.directory(status.st_ino) is not None
            and not self._other_rules(status.st_ino, path)
        ):
            self._adopt(frame, name, status)
        else:
            frame.subdirectories.append((name, status))

    def _other_rules(self, inode: int, path: bytes) -> bool:
        """Whether what was recorded below a directory may have been left out, or not, because of where it stood."""
        return self._rules.by_place and self._book.path_of(inode) != path

    def _look_at_link(self, frame: _Frame, name: bytes, status: os.stat_result) -> None:
        try:
            target = os.readlink(name, dir_fd=frame.fd)
        except OSError:
            return
        uid, gid = self._owner(status)
        frame.rows[name] = _status(TreeEntry(name, Kind.SYMLINK, target=target, uid=uid, gid=gid), status)

    def _look_at_file(self, frame: _Frame, name: bytes, status: os.stat_result, path: bytes) -> None:
        if self._rules.too_large(status.st_size):
            frame.rows[name] = _opaque(name, status, OpaqueReason.TOO_LARGE)
            return
        old = frame.old.get(name)
        group = self._group(status, old)
        if old is not None and self._unchanged(frame, old, status):
            entry = old.entry
            if entry.link_group != group:
                entry = msgspec.structs.replace(entry, link_group=group)
            frame.rows[name] = _status(entry, status)
            return
        known = self._known_content(status, old)
        if known is not None:
            frame.rows[name] = self._file_row(name, known, status, frame.fd, group)
            return
        frame.pending.append((name, status))
        if len(frame.pending) >= _BATCH:
            self._submit(frame)

    def _unchanged(self, frame: _Frame, old: StatRow, status: os.stat_result) -> bool:
        """Whether a name is what was recorded, as far as its stat and what the worker saw can tell."""
        if old.entry.kind is not Kind.FILE or not same_stat(old, status):
            return False
        if self._tracked:
            return status.st_ino not in self._worklist.touched
        if status.st_ino in self._unsure:
            return False
        return max(status.st_mtime_ns, status.st_ctime_ns) < frame.old_recorded_ns - RACY_NS

    def _known_content(self, status: os.stat_result, old: StatRow | None) -> TreeEntry | None:
        """The entry whose content a file still has though its stat moved: renamed, or given another mode or time."""
        seen = self._worklist
        if not self._tracked or status.st_ino in seen.written:
            return None
        if old is None or old.inode != status.st_ino:
            old = seen.moved.get(status.st_ino)
        if old is None or old.entry.kind is not Kind.FILE or old.size != status.st_size:
            return None
        if old.mtime_ns != status.st_mtime_ns and status.st_ino not in seen.touched:
            return None
        return old.entry

    def _group(self, status: os.stat_result, old: StatRow | None) -> int:
        if status.st_nlink < 2:
            if old is not None and old.entry.link_group and old.inode == status.st_ino:
                self._book.drop_link(status.st_ino)
            return 0
        return self._book.group(status.st_ino)

    def _file_row(self, name: bytes, content: TreeEntry, status: os.stat_result, fd: int, group: int) -> StatRow:
        uid, gid = self._owner(status)
        entry = TreeEntry(
            name,
            Kind.FILE,
            stat.S_IMODE(status.st_mode),
            status.st_size,
            content.hash,
            xattrs=read_xattrs(name, fd),
            link_group=group,
            uid=uid,
            gid=gid,
        )
        return _status(entry, status)

    def _owner(self, status: os.stat_result) -> tuple[int, int]:
        return (status.st_uid, status.st_gid) if self._owners else (-1, -1)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _submit(self, frame: _Frame) -> None:
        if frame.pending:
            groups = {name: self._book.group(status.st_ino) for name, status in frame.pending if status.st_nlink > 1}
            frame.batches.append(self._pool.submit(self._read, frame.fd, frame.pending, groups))
            frame.pending = []

    def _read(
        self, fd: int, names: Sequence[tuple[bytes, os.stat_result]], groups: Mapping[bytes, int]
    ) -> list[tuple[bytes, StatRow | None]]:
        """Capture files; runs in the pool. None for one that has gone."""
        found: list[tuple[bytes, StatRow | None]] = []
        for name, status in names:
            try:
                content = capture_file(self._store, name, fd, moving=self._moving)
            except Vanished:
                found.append((name, None))
                continue
            if isinstance(content, OpaqueReason):
                found.append((name, _opaque(name, status, content)))
                continue
            entry = TreeEntry(name, Kind.FILE, hash=content.hash)
            # Another file may have come in its place.
            group = groups.get(name, 0) if content.stat.st_ino == status.st_ino else 0
            found.append((name, self._file_row(name, entry, content.stat, fd, group)))
        return found


def _seen_from_above(row: DirectoryRow) -> tuple[bytes, Sums, int, bytes]:
    return row.tree_hash, row.sums, row.parent, row.name
