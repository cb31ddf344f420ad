"""Reading one file, link or set of attributes of the workspace into the store."""

from __future__ import annotations

import errno
import os
import stat
import time

from cogfs.fsd.control.syscalls import open_within
from cogfs.store.schema import NO_HASH, Hash, OpaqueReason
from cogfs.store.store import Store

#: How often a file that changes while it is read is read again.
ATTEMPTS = 5
#: Two changes within this time may leave the same times: the kernel's clock for files goes by its ticks.
_TICK_NS = 10_000_000

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
#: What the system says of something that is there and cannot be read: no permission, a bad disk, damaged metadata, a
#: mount whose server is gone. Such a thing is left out, and the rest is recorded.
UNREADABLE = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ESTALE,
        errno.EUCLEAN,
        errno.EBADMSG,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.ETIMEDOUT,
        errno.ENOKEY,
    }
)
_NO_XATTRS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM})

#: Recorded and restored. Others (selinux labels, for one) belong to the machine.
_XATTR_PREFIXES = (b"user.", b"trusted.")
_XATTR_NAMES = frozenset({b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"})

Xattrs = tuple[tuple[bytes, bytes], ...]


class Vanished(Exception):
    """The file is not there any more."""


class Captured:
    """A file's content in the store, with the stat of the moment at which it was that."""

    __slots__ = ("hash", "stat")

    def __init__(self, hash_: Hash, status: os.stat_result) -> None:
        self.hash = hash_
        self.stat = status


def open_for_reading(name: bytes, dir_fd: int) -> int:
    """Without moving the access time, where the file is ours."""
    try:
        return open_within(name, _OPEN | os.O_NOATIME, dir_fd)
    except PermissionError:
        return open_within(name, _OPEN, dir_fd)


def open_inode(dir_fd: int, name: bytes, inode: int) -> int:
    """A descriptor of a file that has not been moved; -1 when it has been. OSError when it cannot be read."""
    if dir_fd < 0:
        return -1
    try:
        fd = open_for_reading(name, dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EXDEV):
            return -1
        raise
    if os.fstat(fd).st_ino == inode:
        return fd
    os.close(fd)
    return -1


def same_content(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether a file that had these two stats was not written between them."""
    return (
        before.st_ino == after.st_ino
        and before.st_size == after.st_size
        and before.st_mtime_ns == after.st_mtime_ns
        and before.st_ctime_ns == after.st_ctime_ns
    )


def capture_file(
    store: Store,
    name: bytes,
    dir_fd: int,
    *,
    moving: bool = False,
    attempts: int = ATTEMPTS,
    base: Hash = NO_HASH,
) -> Captured | OpaqueReason:
    """The content of a regular file, a whole version of it, or why there is none. Vanished when it went away.

    ``moving``: it may be written at this very moment, so that a change right before it is read is waited out.
    ``base``: what is known to be like it, such as the content that was recorded of it.
    """
    for _ in range(attempts):
        try:
            fd = open_for_reading(name, dir_fd)
        except FileNotFoundError as error:
            raise Vanished from error
        except OSError as error:
            if error.errno in UNREADABLE:
                return OpaqueReason.UNREADABLE
            if error.errno == errno.EXDEV:
                return OpaqueReason.SUBMOUNT
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                raise Vanished from error
            raise
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise Vanished
            if moving and _wait_out(before) and not same_content(before, os.fstat(fd)):
                continue
            try:
                hash_, length = store.put_file(fd, before.st_size, base)
            except OSError as error:
                if error.errno in UNREADABLE:
                    return OpaqueReason.UNREADABLE
                raise
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if length == after.st_size and same_content(before, after):
            return Captured(hash_, after)
    return OpaqueReason.CHANGING


def _wait_out(status: os.stat_result) -> bool:
    """Wait until a change from now on would be seen in the times. Whether that took any time."""
    rest = status.st_ctime_ns + _TICK_NS - time.time_ns()
    # A clock that was set back is not waited for.
    if not 0 < rest <= _TICK_NS:
        return False
    time.sleep(rest / 1e9)
    return True


def read_xattrs(name: bytes, dir_fd: int) -> Xattrs:
    """The extended attributes that a snapshot keeps, sorted. ``name``: no symlink; ``b"."`` is the directory itself."""
    path = b"/proc/self/fd/%d/%s" % (dir_fd, name)
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_XATTRS or error.errno == errno.ENOENT:
            return ()
        raise
    found = []
    for text in names:
        attribute = os.fsencode(text)
        if not is_recorded_xattr(attribute):
            continue
        try:
            found.append((attribute, os.getxattr(path, attribute, follow_symlinks=False)))
        except OSError as error:
            if error.errno != errno.ENODATA and error.errno not in _NO_XATTRS:
                raise
    found.sort()
    return tuple(found)


def is_recorded_xattr(attribute: bytes) -> bool:
    return attribute.startswith(_XATTR_PREFIXES) or attribute in _XATTR_NAMES


def is_root_xattr(attribute: bytes) -> bool:
    """Whether root alone may set a recorded attribute, or take it away."""
    return attribute.startswith(b"trusted.") or attribute == b"security.capability"
