"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]


def syncfs(fd: int) -> None:
    """Make everything on the filesystem of ``fd`` durable. OSError when the kernel could not."""
    if _libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
