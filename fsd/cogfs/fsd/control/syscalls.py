"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

#: Of ``sched_setattr``.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}.get(platform.machine())

#: Of ``openat2``; the same on every machine.
_OPENAT2 = 437
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_WITHIN = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]


def syncfs(fd: int) -> None:
    """Make everything on the filesystem of ``fd`` durable. OSError when the kernel could not."""
    _check(_libc.syncfs(fd))


class _How(ctypes.Structure):
    """``struct open_how``."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _has_openat2() -> bool:
    fd = _openat2(b"/", os.O_PATH | os.O_CLOEXEC, 0, 0)
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def _openat2(name: bytes, flags: int, dir_fd: int, resolve: int) -> int:
    how = _How(flags, 0, resolve)
    number, size = ctypes.c_long(_OPENAT2), ctypes.c_size_t(ctypes.sizeof(how))
    return int(_libc.syscall(number, ctypes.c_int(dir_fd), ctypes.c_char_p(name), ctypes.byref(how), size))


_OPENS_WITHIN = _has_openat2()


def open_within(name: bytes, flags: int, dir_fd: int) -> int:
    """Open ``name``, one name and no symlink, in a directory and in its mount: not what is mounted over it, not even of
    the same filesystem (a bind mount). Nothing is created. OSError: EXDEV when something is mounted there.

    A kernel before 5.6 cannot tell; there, another filesystem alone is found.
    """
    if _OPENS_WITHIN:
        while (fd := _openat2(name, flags, dir_fd, _WITHIN)) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), name)
        return fd
    fd = os.open(name, flags, dir_fd=dir_fd)
    if os.fstat(fd).st_dev != os.fstat(dir_fd).st_dev:
        os.close(fd)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    return fd


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _SchedulingAttributes(ctypes.Structure):
    """``struct sched_attr``, as it was first."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def set_scheduling(thread: int, nice: int, slice_ns: int) -> None:
    """Give a thread of the usual policy this priority and length of its slices of time. OSError."""
    if _SCHED_SETATTR is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    attributes = _SchedulingAttributes(size=ctypes.sizeof(_SchedulingAttributes), nice=nice, runtime=slice_ns)
    _check(
        _libc.syscall(ctypes.c_long(_SCHED_SETATTR), ctypes.c_int(thread), ctypes.byref(attributes), ctypes.c_uint(0))
    )
