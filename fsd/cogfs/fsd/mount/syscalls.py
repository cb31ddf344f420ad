"""System calls that the standard library does not offer, as functions that raise ``OSError``."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

#: For ``utimens``: leave this time alone, or take the kernel's own clock.
UTIME_OMIT = (1 << 30) - 2
UTIME_NOW = (1 << 30) - 1

AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000

_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}.get(platform.machine())

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_libc.utimensat.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Timespec), ctypes.c_int)
_libc.getdents64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.getdents64.restype = ctypes.c_ssize_t
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.setfsuid.argtypes = (ctypes.c_uint,)
_libc.setfsgid.argtypes = (ctypes.c_uint,)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def rename(old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
    """``renameat2``."""
    _check(_libc.renameat2(old_fd, old, new_fd, new, flags))


def utimens(dir_fd: int, name: bytes, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """``utimensat`` of ``name`` itself, or of ``dir_fd`` itself when ``name`` is empty. Times are (seconds, ns)."""
    times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
    _check(_libc.utimensat(dir_fd, name, times, AT_SYMLINK_NOFOLLOW if name else AT_EMPTY_PATH))


def umount(mountpoint: bytes) -> None:
    """``umount2`` without flags."""
    _check(_libc.umount2(mountpoint, 0))


def read_in_memory(fd: int, length: int, offset: int) -> bytes:
    """What a file has in memory of a range, all up to its end. OSError EAGAIN when the disk would have to be read."""
    data = bytearray(length)
    view = memoryview(data)
    got = 0
    flags = os.RWF_NOWAIT
    while got < length:
        try:
            count = os.preadv(fd, [view[got:]], offset + got, flags)
        except OSError as error:
            # Of a filesystem that cannot tell, that in memory among them, it is read however long that takes.
            if error.errno != errno.EOPNOTSUPP or not flags:
                raise
            flags = 0
            continue
        if not count:
            break
        got += count
    return bytes(view[:got])


def set_filesystem_ids(uid: int, gid: int) -> None:
    """Whom the calling thread is, for the filesystem, from now on.

    These calls are per thread and cannot report failure; one that has no right to change them leaves them as they are.
    """
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)


def set_thread_groups(groups: list[int]) -> None:
    """Supplementary groups of the calling thread alone (libc's own function changes every thread)."""
    if _SETGROUPS is None:
        return
    array = (ctypes.c_uint * len(groups))(*groups)
    _check(_libc.syscall(ctypes.c_long(_SETGROUPS), ctypes.c_int(len(groups)), array))


class DirectoryReader:
    """Entries of an open directory with the filesystem's own positions, which stay right when it changes meanwhile."""

    __slots__ = ("_buffer", "_fd")

    def __init__(self, fd: int, size: int = 32768) -> None:
        self._fd = fd
        self._buffer = ctypes.create_string_buffer(size)

    def seek(self, position: int) -> None:
        """0 starts anew; anything else must be a position that was given out."""
        os.lseek(self._fd, position, os.SEEK_SET)

    def read(self) -> list[tuple[bytes, int, int, int]]:
        """The next entries as (name, position behind it, inode, type), empty at the end."""
        count = _check(_libc.getdents64(self._fd, self._buffer, len(self._buffer)))
        return list(_entries(self._buffer.raw[:count]))


def _entries(raw: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    start = 0
    while start < len(raw):
        inode = int.from_bytes(raw[start : start + 8], "little")
        position = int.from_bytes(raw[start + 8 : start + 16], "little", signed=True)
        length = raw[start + 16] | raw[start + 17] << 8
        name = raw[start + 19 : raw.index(b"\0", start + 19)]
        yield name, position, inode, raw[start + 18]
        start += length
