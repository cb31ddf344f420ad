"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

#: Of ``sched_setattr``.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}.get(platform.machine())

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]


def syncfs(fd: int) -> None:
    """Make everything on the filesystem of ``fd`` durable. OSError when the kernel could not."""
    _check(_libc.syncfs(fd))


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
