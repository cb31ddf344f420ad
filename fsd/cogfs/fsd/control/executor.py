"""Carrying out a plan by ordinary system calls beneath a root: through the mount when there is one.

Every step can be repeated: what is already done is left, so that an interrupted plan is simply carried out again. Knows
nothing of journals, snapshots or who may be in the way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence

from cogfs.fsd.control.beneath import Beneath, beneath, split
from cogfs.fsd.control.capture import Xattrs, is_recorded_xattr, is_root_xattr
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.control.planner import Action, Plan, Step
from cogfs.fsd.control.recheck import Recheck
from cogfs.fsd.control.rules import TEMPORARY_PREFIX, is_temporary
from cogfs.fsd.control.syscalls import open_within
from cogfs.store.schema import Kind, TreeEntry
from cogfs.store.steps import step as passing
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

Progress = Callable[[int, int], None]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes; of what is zeros alone in a file, so many at a time are not written.
_HOLE = 64 * 1024
_ZEROS = bytes(_HOLE)
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
#: Bits of a size that do not count where files are put in an order by it: those below a MiB.
_LARGE = 20


def by_descriptor(fd: int) -> bytes:
    """A path by which the calls that want one reach what ``fd`` (O_PATH or not) is of."""
    return b"/proc/self/fd/%d" % fd


def refuse_what_is_not_ours(root_fd: int, plan: Plan) -> None:
    """DENIED when a directory that the plan writes into is another user's and not writable, or when a file is to be
    given what root alone may give. Changes nothing."""
    if os.geteuid() == 0:
        return
    for step in plan.steps:
        _refuse_privileged(step)
    made = {step.path for step in plan.steps if step.before is None or step.before.kind is not Kind.DIRECTORY}
    with beneath(root_fd) as reach:
        for path in sorted({split(step.path)[0] for step in plan.steps if step.path} - made):
            try:
                fd = reach.directory(path)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                if error.errno == errno.EACCES:
                    raise CogfsError(Reason.DENIED, f"cannot restore in {show(path)}: it cannot be entered") from error
                raise
            if os.fstat(fd).st_uid == os.geteuid() or os.access(by_descriptor(fd), os.W_OK | os.X_OK):
                continue
            raise CogfsError(Reason.DENIED, f"cannot restore in {show(path)}: the directory belongs to another user")


def _refuse_privileged(step: Step) -> None:
    stays = step.before is not None and step.action is Action.METADATA
    before = _privileged(step.before) if stays else ()
    if _privileged(step.after) != before and step.after is not None:
        names = b", ".join(sorted({name for name, _ in (*before, *_privileged(step.after))}))
        raise CogfsError(Reason.DENIED, f"cannot restore {show(step.path)}: root alone may set its {show(names)}")


def _privileged(entry: TreeEntry | None) -> Xattrs:
    return tuple(one for one in entry.xattrs if is_root_xattr(one[0])) if entry is not None else ()


class Executor:
    """Carries out one plan once. Not for several threads."""

    def __init__(
        self,
        store: Store,
        root_fd: int,
        restore_id: str,
        plan: Plan,
        progress: Progress | None = None,
        recheck: Recheck | None = None,
    ) -> None:
        """``restore_id``: its 26 digits are in the names of this restore's temporary files. ``recheck`` is
        asked before what is at a path is replaced or removed, where nobody keeps others from changing it."""
        self._store = store
        self._root_fd = root_fd
        self._plan = plan
        self._prefix = _prefix(restore_id)
        self._serial = 0
        self._progress = progress
        self._recheck = recheck
        self._done = 0
        self._privileged = os.geteuid() == 0
        self._opened: dict[bytes, int] = {}
        #: The directory that was asked last whether it gives attributes to what is made in it, and its answer.
        self._inheriting: tuple[bytes | None, bool] = (None, False)
        #: The directory in which something is being done.
        self._here = b""
        self._reach: Beneath
        #: What is being done something with.
        self.at = b""
        #: Directories that were to go and still hold something made since.
        self.left: list[bytes] = []

    def run(self) -> None:
        """OSError, or a store error, when a step fails; then some steps are done and others are not."""
        steps = self._plan.steps
        with beneath(self._root_fd, watchful=self._recheck is not None) as reach:
            self._reach = reach
            for step in reversed(steps):
                if step.before is not None and self._goes_first(step):
                    self.at = step.path
                    self._remove(step)
                    if step.after is None:
                        self._advance()
            reach.forget()
            for step in steps:
                if step.after is not None and step.after.kind is Kind.DIRECTORY:
                    self.at = step.path
                    self._make_directory(step)
            grouped = {path for members in self._plan.groups.values() for path in members}
            for step, after in self._by_room():
                if step.path not in grouped or not after.link_group:
                    self.at = step.path
                    self._place(step, after)
                    self._advance()
            for group, members in self._plan.groups.items():
                self._link_group(group, members)
            reach.forget()
            for step in reversed(steps):
                if step.after is not None and step.after.kind is Kind.DIRECTORY:
                    self.at = step.path
                    self._finish_directory(step.path, step.after)
                    self._advance()
            self._close_opened({step.path for step in steps})

    # --- steps --------------------------------------------------------------------------------------------------------

    def _by_room(self) -> list[tuple[Step, TreeEntry]]:
        """What becomes a file or a link, in an order in which nothing needs room that something after it gives: first
        what gives back at least what it needs, the least needy before the others; then what gives back most.

        Small ones are all alike, and stay in the order of their directories.
        """

        def rank(pair: tuple[Step, TreeEntry]) -> tuple[bool, int]:
            step, after = pair
            needs = after.size >> _LARGE
            gives = step.before.size >> _LARGE if step.before is not None and not self._goes_first(step) else 0
            return (True, -gives) if needs > gives else (False, needs)

        steps = ((step, step.after) for step in self._plan.steps)
        placed = [(step, after) for step, after in steps if after is not None and after.kind is not Kind.DIRECTORY]
        return sorted(placed, key=rank)

    @staticmethod
    def _goes_first(step: Step) -> bool:
        """Whether what is there has to be gone before anything takes its place."""
        if step.after is None:
            return True
        assert step.before is not None
        directories = (step.before.kind is Kind.DIRECTORY, step.after.kind is Kind.DIRECTORY)
        return directories in ((True, False), (False, True))

    def _remove(self, step: Step) -> None:
        parent, name = split(step.path)
        fd = self._directory(parent)
        if fd is None:
            return
        passing("restore.delete")
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) != (step.before is not None and step.before.kind is Kind.DIRECTORY):
                return
            if stat.S_ISDIR(status.st_mode):
                self._in_writable(parent, lambda where: os.rmdir(name, dir_fd=where))
            else:
                if self._recheck is not None:
                    self._recheck(step.path, step.before, fd, name)
                self._in_writable(parent, lambda where: os.unlink(name, dir_fd=where))
        except OSError as error:
            if error.errno in _GONE:
                return
            if error.errno == errno.ENOTEMPTY and step.after is None:
                self.left.append(step.path)
                return
            raise

    def _make_directory(self, step: Step) -> None:
        if not step.path:
            return
        parent, name = split(step.path)
        passing("restore.mkdir")
        try:
            self._in_writable(parent, lambda where: os.mkdir(name, 0o700, dir_fd=where))
        except FileExistsError:
            status = os.stat(name, dir_fd=self._existing(parent), follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                raise

    def _place(self, step: Step, after: TreeEntry) -> None:
        """Bring one file or symlink to what it is to be."""
        parent, name = split(step.path)
        if step.before is not None and step.action is Action.METADATA:
            fd = open_within(name, _LOOK, self._existing(parent))
            try:
                status = os.fstat(fd)
                if after.kind is Kind.FILE and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    self._attributes(fd, after)
                    return
            finally:
                os.close(fd)
        self._in_writable(parent, lambda where: self._replace(where, name, after, step))

    def _replace(self, fd: int, name: bytes, after: TreeEntry, step: Step) -> None:
        """Make the new file beside the old one and rename it into place."""
        temporary = self._temporary()
        try:
            if after.kind is Kind.SYMLINK:
                os.symlink(after.target, temporary, dir_fd=fd)
                if self._privileged and after.uid >= 0:
                    os.chown(temporary, after.uid, after.gid, dir_fd=fd, follow_symlinks=False)
            else:
                self._write(fd, temporary, after)
            passing("restore.rename")
            self._look_again(step, fd, name)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            try:
                os.unlink(temporary, dir_fd=fd)
            except OSError:
                pass
            raise

    def _look_again(self, step: Step, fd: int, name: bytes) -> None:
        """Before something takes the place of what the plan found; what had to go first is gone by now."""
        if self._recheck is not None:
            if not self._reach.stands():
                raise self._recheck.moved(step.path)
            gone = step.before is None or self._goes_first(step)
            self._recheck(step.path, None if gone else step.before, fd, name)

    def _write(self, dir_fd: int, name: bytes, after: TreeEntry) -> None:
        ours = not self._privileged or (after.uid, after.gid) in ((-1, -1), (os.geteuid(), os.getegid()))
        fd = os.open(name, _CREATE, after.mode & 0o777 if ours else 0o600, dir_fd=dir_fd)
        try:
            # Each question to the mount is a round trip: what the creation has just told is not asked again.
            made = os.fstat(fd)
            passing("restore.write")
            self._fill(fd, self._store.read_file(after.hash))
            if after.xattrs or self._inherits(dir_fd):
                self._attributes(fd, after)
                return
            if self._privileged and after.uid >= 0 and (made.st_uid, made.st_gid) != (after.uid, after.gid):
                os.chown(fd, after.uid, after.gid)
                os.chmod(fd, after.mode)
            elif stat.S_IMODE(made.st_mode) != after.mode:
                os.chmod(fd, after.mode)
        finally:
            os.close(fd)

    @staticmethod
    def _fill(fd: int, pieces: Iterable[bytes]) -> None:
        """Writes content into an empty file, and nothing where it is zeros for long: one with holes takes no more room
        than it did."""
        offset = written = 0
        for piece in pieces:
            begin = 0
            view = memoryview(piece)
            for start in range(0, len(piece) - _HOLE + 1, _HOLE):
                if piece[start : start + _HOLE] == _ZEROS:
                    written = _write_at(fd, view[begin:start], offset + begin) or written
                    begin = start + _HOLE
            written = _write_at(fd, view[begin:], offset + begin) or written
            offset += len(piece)
        if written < offset:
            os.ftruncate(fd, offset)

    def _inherits(self, dir_fd: int) -> bool:
        """Whether what is made in a directory is given attributes by it."""
        if self._inheriting[0] != self._here:
            try:
                names = os.listxattr(by_descriptor(dir_fd))
            except OSError:
                names = ["?"]
            self._inheriting = (self._here, any(name in ("?", "system.posix_acl_default") for name in names))
        return self._inheriting[1]

    def _link_group(self, group: int, members: Sequence[bytes]) -> None:
        """Make the names of one file names of one file again, keeping an inode that is already right."""
        steps = {step.path: step for step in self._plan.steps}
        wanted = [path for path in members if path in steps]
        if not wanted:
            return
        self.at = wanted[0]
        after = next(steps[path].after for path in wanted)
        assert after is not None
        inodes: dict[bytes, tuple[int, int]] = {}
        for path in members:
            status = self._lstat(path)
            if status is not None and stat.S_ISREG(status.st_mode):
                inodes[path] = (status.st_ino, status.st_nlink)
        sharing: dict[int, list[bytes]] = {}
        for path, (inode, _) in inodes.items():
            sharing.setdefault(inode, []).append(path)
        anchor = None
        for path in members:
            step = steps.get(path)
            right = step is None or (step.before is not None and step.action is Action.METADATA)
            if path in inodes and right:
                inode, links = inodes[path]
                if links == len(sharing[inode]) and (
                    anchor is None or len(sharing[inode]) > len(sharing[inodes[anchor][0]])
                ):
                    anchor = path
        if anchor is None:
            anchor = wanted[0]
            parent, name = split(anchor)
            self._in_writable(parent, lambda where: self._replace(where, name, after, steps[wanted[0]]))
        elif anchor in steps:
            parent, name = split(anchor)
            fd = open_within(name, _LOOK, self._existing(parent))
            try:
                self._attributes(fd, after)
            finally:
                os.close(fd)
        status = self._lstat(anchor)
        if status is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), anchor)
        for path in wanted:
            self.at = path
            there = self._lstat(path)
            if there is None or there.st_ino != status.st_ino:
                self._link(anchor, path, steps[path])
            self._advance()

    def _link(self, anchor: bytes, path: bytes, step: Step) -> None:
        source_parent, source = split(anchor)
        parent, name = split(path)
        temporary = self._temporary()
        source_fd = os.dup(self._existing(source_parent))
        try:

            def place(where: int) -> None:
                os.link(source, temporary, src_dir_fd=source_fd, dst_dir_fd=where, follow_symlinks=False)
                passing("restore.link")
                try:
                    self._look_again(step, where, name)
                    os.rename(temporary, name, src_dir_fd=where, dst_dir_fd=where)
                except BaseException:
                    os.unlink(temporary, dir_fd=where)
                    raise

            self._in_writable(parent, place)
        finally:
            os.close(source_fd)

    def _finish_directory(self, path: bytes, after: TreeEntry) -> None:
        """A directory's attributes come last, as they may close it."""
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._existing(path))
        try:
            passing("restore.chmod")
            self._attributes(fd, after)
        finally:
            os.close(fd)
        self._opened.pop(path, None)

    def _attributes(self, fd: int, after: TreeEntry) -> None:
        """Owner, extended attributes and mode, in the order in which none undoes another."""
        path = by_descriptor(fd)
        status = os.fstat(fd)
        if self._privileged and after.uid >= 0 and (status.st_uid, status.st_gid) != (after.uid, after.gid):
            os.chown(path, after.uid, after.gid)
        self._xattrs(path, after)
        if stat.S_IMODE(os.fstat(fd).st_mode) != after.mode:
            os.chmod(path, after.mode)

    def _xattrs(self, path: bytes, after: TreeEntry) -> None:
        try:
            have = {name for name in map(os.fsencode, os.listxattr(path)) if is_recorded_xattr(name)}
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EACCES, errno.EPERM):
                raise
            have = set()
        for name, value in after.xattrs:
            if name not in have or os.getxattr(path, name) != value:
                os.setxattr(path, name, value)
        for name in have - {name for name, _ in after.xattrs}:
            os.removexattr(path, name)

    # --- directories --------------------------------------------------------------------------------------------------

    def _directory(self, path: bytes) -> int | None:
        try:
            return self._existing(path)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _existing(self, path: bytes) -> int:
        """A descriptor of a directory, which is opened to us when it is our own and closed to everybody."""
        try:
            return self._reach.directory(path)
        except PermissionError:
            if self._privileged:
                raise
        names = path.split(b"/")
        for depth in range(len(names) + 1):
            above = b"/".join(names[:depth])
            try:
                self._reach.directory(above)
            except PermissionError:
                self._open_up(above)
        return self._reach.directory(path)

    def _in_writable(self, path: bytes, act: Callable[[int], None]) -> None:
        """Do something in a directory, opening it for that when it is our own and read-only."""
        self._here = path
        try:
            act(self._existing(path))
        except PermissionError:
            if self._privileged or path in self._opened:
                raise
            self._open_up(path)
            act(self._existing(path))

    def _open_up(self, path: bytes) -> None:
        parent, name = split(path)
        fd = open_within(name, _LOOK, self._reach.directory(parent)) if path else os.dup(self._reach.root_fd)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            self._opened.setdefault(path, mode)
            passing("restore.open")
            os.chmod(by_descriptor(fd), mode | 0o700)
        finally:
            os.close(fd)

    def _close_opened(self, finished: set[bytes]) -> None:
        """Give directories that were opened for the restore their own mode back."""
        for path in sorted(self._opened, key=len, reverse=True):
            if path in finished:
                continue
            fd = self._directory(path)
            if fd is not None:
                os.chmod(by_descriptor(fd), self._opened[path])

    def _lstat(self, path: bytes) -> os.stat_result | None:
        parent, name = split(path)
        fd = self._directory(parent)
        if fd is None:
            return None
        try:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _temporary(self) -> bytes:
        self._serial += 1
        return self._prefix + b"%d" % self._serial

    def _advance(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._plan.steps))


def _write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes all of it. Where it ends; 0 when there is none."""
    end = offset + len(data) if data else 0
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
    return end


def _prefix(restore_id: str) -> bytes:
    return TEMPORARY_PREFIX + restore_id.rpartition("_")[2].encode() + b"."


def remove_temporaries(root_fd: int, directories: Sequence[bytes], restore_id: str) -> None:
    """Remove what that restore left half written in these directories, and nothing else that is named so."""
    prefix = _prefix(restore_id)
    with beneath(root_fd) as reach:
        for path in sorted(directories):
            try:
                fd = reach.directory(path)
            except OSError as error:
                if error.errno in (*_GONE, errno.EACCES):
                    continue
                raise
            for name in map(os.fsencode, os.listdir(fd)):
                if name.startswith(prefix) and is_temporary(name):
                    try:
                        os.unlink(name, dir_fd=fd)
                    except IsADirectoryError:
                        # Not ours, for all its name.
                        continue
