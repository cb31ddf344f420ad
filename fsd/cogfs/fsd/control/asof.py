"""The files of a workspace as they were at a boundary: the backing directory, with the undo log in front of it.

Whoever asks looks at a file first and at the log afterwards: what was changed meanwhile is in the log, see ``undolog``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from cogfs.fsd.control.beneath import Beneath
from cogfs.fsd.control.capture import UNREADABLE
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.undolog import Content, EntryWas, UndoLog, Was
from cogfs.v1.reasons import Reason

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REACH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: How often a directory that is moved while it is opened is looked for.
_ATTEMPTS = 5

Locate = Callable[[int], bytes | None]


def nowhere(_inode: int) -> bytes | None:
    """A ``Locate`` that knows no inode."""
    return None


class Stopped(Exception):
    """The daemon ends; what was begun is begun anew by the next one."""


class AsOf:
    """One workspace at one boundary, or as it is. Use it from one thread."""

    def __init__(
        self,
        root_fd: int,
        *,
        log: UndoLog | None = None,
        boundary: int = 0,
        frozen_ns: int = 0,
        locate: Locate = nowhere,
        stopped: Callable[[], bool] = lambda: False,
        seen: Sequence[Was] = (),
    ) -> None:
        """Without a ``log``: the present. ``locate`` tells where an inode is now, as far as anybody knows; ``stopped``
        whether there is no more time to look; ``seen`` are files that were read at the boundary."""
        self._log = log
        self._boundary = boundary
        self._locate = locate
        self._stopped = stopped
        self._seen = {was.status.inode: was for was in seen}
        self._root_fd = root_fd
        self._reach = Beneath(root_fd)
        #: Of the boundary; a file that was changed later, and is not in the log, was changed past the mount.
        self.frozen_ns = frozen_ns

    @property
    def present(self) -> bool:
        """Whether this is the files as they are."""
        return self._log is None

    def refresh(self) -> None:
        """Take in what was logged until now. Stopped."""
        if self._stopped():
            raise Stopped
        if self._log is not None:
            self._log.refresh()

    def entry(self, directory: int, name: bytes) -> EntryWas | None:
        """What the log has of a name, as of the last ``refresh``."""
        return None if self._log is None else self._log.entry(directory, name, self._boundary)

    def names(self, directory: int) -> list[bytes]:
        """The names in a directory of which the log has anything, as of the last ``refresh``."""
        return [] if self._log is None else self._log.names(directory, self._boundary)

    def replaced(self, directory: int) -> bool:
        """Whether the number of a directory has been given to another one since, as of the last ``refresh``. What was
        seen in that before the ``refresh`` is not of the boundary."""
        return self._log is not None and self._log.replaced(directory, self._boundary)

    def inode(self, inode: int) -> Was | None:
        """What the log has of an inode, as of the last ``refresh``, or what was seen of it at the boundary: the log may
        have it from after a change by a name elsewhere."""
        was = self._seen.get(inode)
        return was if was is not None or self._log is None else self._log.inode(inode, self._boundary)

    def has_seen(self, inode: int) -> bool:
        """Whether a file was read at the boundary."""
        return inode in self._seen

    def content(self, inode: int) -> Content:
        """What the content of a file was of which ``inode`` tells that it is logged."""
        assert self._log is not None
        return self._log.content(inode, self._boundary)

    def open(self, inode: int, hint: bytes) -> int:
        """A descriptor of directory ``inode``, which was at ``hint``; -1 when it is nowhere any more. OSError, one of
        ``UNREADABLE``, when it is there and cannot be opened."""
        path: bytes | None = hint
        refused: OSError | None = None
        for _ in range(_ATTEMPTS):
            if path is None:
                break
            refused = None
            try:
                fd = os.open(b".", _OPEN, dir_fd=self._reach.directory(path))
            except OSError as error:
                if isinstance(error, PermissionError):
                    self.check_readable(path)
                fd = -1
                refused = error if error.errno in UNREADABLE else None
            if fd >= 0:
                if os.fstat(fd).st_ino == inode:
                    if self._log is None:
                        return fd
                    self._log.refresh()
                    if not self.replaced(inode):
                        return fd
                    os.close(fd)
                    return -1
                os.close(fd)
            self._reach.forget()
            path = self._locate(inode)
        if refused is not None and (path is not None or self.present):
            raise refused
        return -1

    def check_readable(self, path: bytes) -> None:
        """CogfsError IO when a directory on the ``path`` of one that cannot be read has been made so since the
        boundary: then it is not known what is in it. (Nobody waits to change a directory's mode.)"""
        if self._log is None:
            return
        above = os.dup(self._root_fd)
        try:
            for name in (b".", *path.split(b"/")):
                below = os.open(name or b".", _REACH, dir_fd=above)
                os.close(above)
                above = below
                self.check_still_readable(above, path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # it is looked for elsewhere
        finally:
            os.close(above)

    def check_still_readable(self, fd: int, path: bytes) -> None:
        """The same for the directory that ``fd`` is of, which was at ``path``."""
        if self._log is None or os.fstat(fd).st_ctime_ns <= self.frozen_ns:
            return
        if not os.access(f"/proc/self/fd/{fd}", os.R_OK | os.X_OK, effective_ids=True):
            raise CogfsError(Reason.IO, f"the directory {show(path)} was made unreadable before it was captured")

    def close(self) -> None:
        """Give the descriptors back; the log is the caller's."""
        self._reach.close()
