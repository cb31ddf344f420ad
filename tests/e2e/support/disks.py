"""Filesystems of a test's own: small ones, full ones, and such as break."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.support.site import as_root

#: Linux's FS_IOC_SHUTDOWN, and the flag by which nothing more is written, not even the journal.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = b"\2\0\0\0"
#: The major number of loop devices.
_LOOP = 7


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Another filesystem at ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run([*as_root(), "mount", *arguments, str(place)], check=True, timeout=180)
    subprocess.run([*as_root(), "chown", f"{os.geteuid()}:{os.getegid()}", str(place)], check=True, timeout=180)
    try:
        yield place
    finally:
        subprocess.run([*as_root(), "umount", "-l", str(place)], check=True, timeout=180)


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
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True, timeout=180)
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


def keepers(image: Path) -> list[str]:
    """The processes that have something open on the loop device of a file, or see it mounted, with their commands."""
    done = subprocess.run(
        [*as_root(), "losetup", "-j", str(image)], capture_output=True, text=True, timeout=180, check=True
    )
    devices = {int(number) for number in re.findall(r"^/dev/loop(\d+):", done.stdout, re.MULTILINE)}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            uses = {f"mounted in {os.readlink(process / 'ns' / 'mnt')}" for device in devices if _sees(process, device)}
            for link in (*process.glob("fd/*"), process / "cwd", process / "root"):
                with contextlib.suppress(OSError):
                    device_of = link.stat().st_dev
                    if os.major(device_of) == _LOOP and os.minor(device_of) in devices:
                        uses.add(os.readlink(link))
            if uses:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{process.name} {command}({', '.join(sorted(uses))})")
    return found


def _sees(process: Path, device: int) -> bool:
    return f" {_LOOP}:{device} " in (process / "mountinfo").read_text(errors="replace")
