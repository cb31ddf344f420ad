"""Filesystems of a test's own: small ones, full ones, and such as break."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.support.site import as_root

#: Linux's FS_IOC_SHUTDOWN, and the flag by which nothing more is written, not even the journal.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = b"\2\0\0\0"


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Another filesystem at ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run([*as_root(), "mount", *arguments, str(place)], check=True, timeout=60)
    subprocess.run([*as_root(), "chown", f"{os.geteuid()}:{os.getegid()}", str(place)], check=True, timeout=60)
    try:
        yield place
    finally:
        subprocess.run([*as_root(), "umount", "-l", str(place)], check=True, timeout=60)


def fill(place: Path, leave: int = 0) -> Path:
    """A file that leaves ``leave`` bytes of a filesystem."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(b"\1" * 65536) == 65536:
                pass
        file.truncate(max(0, file.tell() - leave))
    return ballast


@contextlib.contextmanager
def ext4(image: Path, place: Path, megabytes: int = 64) -> Iterator[Path]:
    """An ext4 filesystem of its own at ``place``, made when the image is not there."""
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, timeout=60)
    with mounted(place, "-o", "loop,errors=continue", str(image)):
        yield place


@contextlib.contextmanager
def xfs(image: Path, place: Path) -> Iterator[Path]:
    """An XFS filesystem of its own at ``place``, made when the image is not there."""
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(320 << 20)
        subprocess.run(["mkfs.xfs", "-q", "-f", str(image)], check=True, timeout=60)
    with mounted(place, "-o", "loop", str(image)):
        yield place


def loop_of(image: Path) -> str:
    """What uses an image as a loop device; empty: nothing."""
    done = subprocess.run([*as_root(), "losetup", "-j", str(image)], capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


def make_read_only(place: Path) -> None:
    """The filesystem has met an error, and nothing may be written from now on. (The kernel refuses to remount one
    read-only in which somebody has a file open for writing, as a daemon always has.)"""
    subprocess.run([*as_root(), "mount", "-o", "remount,errors=remount-ro", str(place)], check=True, timeout=60)
    device = subprocess.run(
        ["findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", str(place)],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout.strip()
    trigger = f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error"
    subprocess.run([*as_root(), "tee", trigger], input=b"1", stdout=subprocess.DEVNULL, check=True, timeout=60)


def shut_down(place: Path) -> None:
    """The disk of a filesystem is gone from now on: every write fails."""
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
    finally:
        os.close(fd)
