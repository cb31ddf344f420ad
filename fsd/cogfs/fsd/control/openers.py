"""Who has files below a directory open, as far as ``/proc`` tells: where there is no mount, no worker knows.

It tells of processes that the daemon may look at and that see the directory under its own name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from cogfs.fsd.channel import OpenHandle
from cogfs.fsd.control.mounts import TimedOut, bounded, is_within

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_FLAGS = re.compile(rb"^flags:\s+([0-7]+)$", re.MULTILINE)
#: A line of a process's maps that is of a shared, writable one of a file.
_SHARED_MAP = re.compile(rb"^\S+ .w.s \S+ \S+ \d+ +(/.*)$", re.MULTILINE)
_DELETED = b" (deleted)"
#: Seconds that a look at all processes may take.
_PATIENCE = 5.0


def opened(root: bytes) -> list[OpenHandle]:
    """The open files and directories in ``root``, by other processes, and their shared writable maps of files. Each
    process's command is left empty."""
    return _patiently(lambda: _opened(root))


def mapped(root: bytes) -> frozenset[int]:
    """The inodes of files in ``root`` that other processes have mapped, shared and writable. What they store there
    need not move the file's times."""
    return frozenset(status.st_ino for _, _, status in _patiently(lambda: _maps(root)))


def _patiently(look: Callable[[], Iterator[T]]) -> list[T]:
    """What ``look`` finds, or has found until it takes too long: a process's memory lock can be held by a stuck one."""
    found: list[T] = []
    try:
        bounded(lambda: found.extend(look()), _PATIENCE, "proc")
    except TimedOut:
        _log.warning("processes with open files not looked up in time")
    return list(found)


def _opened(root: bytes) -> Iterator[OpenHandle]:
    device = os.stat(root).st_dev
    for pid in _processes():
        for number in _descriptors(pid):
            link = f"/proc/{pid}/fd/{number}"
            path = _target(link)
            if path is None or not is_within(path, root):
                continue
            try:
                status = os.stat(link)
            except OSError:
                continue
            match = _FLAGS.search(_read(f"/proc/{pid}/fdinfo/{number}"))
            flags = int(match.group(1), 8) if match else os.O_RDONLY
            directory = stat.S_ISDIR(status.st_mode)
            if status.st_dev != device or flags & os.O_PATH or not (directory or stat.S_ISREG(status.st_mode)):
                continue
            yield _handle(root, path, pid, status, writable=flags & os.O_ACCMODE != os.O_RDONLY)
    for pid, path, status in _maps(root):
        yield _handle(root, path, pid, status, writable=True)


def _maps(root: bytes) -> Iterator[tuple[int, bytes, os.stat_result]]:
    device = os.stat(root).st_dev
    for pid in _processes():
        for written in _SHARED_MAP.findall(_read(f"/proc/{pid}/maps")):
            # The only byte that is written otherwise.
            path = written.replace(b"\\012", b"\n")
            if not is_within(path, root):
                continue
            try:
                status = os.lstat(path)
            except OSError:
                continue  # It has no name any more.
            if status.st_dev == device and stat.S_ISREG(status.st_mode):
                yield pid, path, status


def _handle(root: bytes, path: bytes, pid: int, status: os.stat_result, *, writable: bool) -> OpenHandle:
    deleted = status.st_nlink == 0
    inside = os.path.relpath(path.removesuffix(_DELETED) if deleted else path, root)
    return OpenHandle(
        inode=status.st_ino,
        path=b"" if inside == b"." else inside,
        pid=pid,
        command="",
        writable=writable,
        since_ns=0,
        deleted=deleted,
        directory=stat.S_ISDIR(status.st_mode),
    )


def _processes() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != own:
            yield int(name)


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


def _target(link: str) -> bytes | None:
    try:
        return os.readlink(os.fsencode(link))
    except OSError:
        return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
