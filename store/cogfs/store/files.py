"""Calls on files that several parts of the store need."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(path: Path, size: int) -> int:
    """Makes the file, if need be, for its owner only and with ``size`` bytes on disk; returns its length."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        if size:
            os.posix_fallocate(fd, 0, size)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
