"""Filesystems of one's own in a loop device: another kind than the machine's, and one that may lose its power."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE = 240.0
_MEMORY = Path("/dev/shm")
_libc = ctypes.CDLL(None, use_errno=True)
#: Lazy initialization would write in the background while a test measures and cuts.
_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}


def run(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command that has to end well, unless ``check`` is false."""
    done = subprocess.run(
        [os.fspath(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def missing() -> str:
    """Why there can be none here; empty when there can."""
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices"
    programs = ("losetup", "mkfs.ext4", "mkfs.xfs", "xfs_io", "unshare")
    lacking = [program for program in programs if shutil.which(program) is None]
    lacking += [f"a kernel with {kind}" for kind in _MAKE if not _known(kind)]
    return f"needs {', '.join(lacking)}" if lacking else ""


@functools.cache
def _known(kind: str) -> bool:
    """Whether the kernel has such a filesystem, perhaps in a module that it loads when it is asked for."""
    with tempfile.TemporaryDirectory(prefix="cogfs-image-") as place:
        if _libc.mount(b"none", os.fsencode(place), kind.encode(), 0, None) == 0:
            run("umount", place)
            return True
        return ctypes.get_errno() != errno.ENODEV


def let_go() -> None:
    """In a mount namespace of one's own: takes what came along of other tests away, which would be kept by it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, device, _, mountpoint, *_ = line.split(" ")
        if device.startswith("7:") and "/cogfs-" in mountpoint:
            run("umount", "-l", mountpoint, check=False)


class Image:
    """A filesystem in a file, mounted on a directory beside it."""

    def __init__(self, file: Path, mountpoint: Path, kind: str = "ext4") -> None:
        self.file = file
        self.mountpoint = mountpoint
        self.kind = kind
        mountpoint.mkdir(exist_ok=True)

    def make(self, size: int) -> None:
        with self.file.open("wb") as file:
            file.truncate(size)
        run(*_MAKE[self.kind], self.file)

    def mount(self, file: Path | None = None) -> None:
        """``file``: another one in its place, a copy of it, say."""
        run("mount", "-o", "loop", file or self.file, self.mountpoint)

    def shut_down(self) -> None:
        """As if the power was lost: what is not on the disk is gone, and every call fails from now on."""
        run("xfs_io", "-x", "-c", "shutdown", self.mountpoint)

    def unmount(self) -> None:
        """Also where something still has a file open in it; waits until the loop device is free."""
        deadline = time.monotonic() + _PATIENCE
        while run("umount", self.mountpoint, check=False).returncode != 0 and self._mounted:
            assert time.monotonic() < deadline, f"{self.mountpoint} is still used"
            time.sleep(0.1)

    @property
    def _mounted(self) -> bool:
        return os.path.ismount(self.mountpoint)


@contextlib.contextmanager
def filesystem(kind: str, size: int) -> Iterator[Path]:
    """A mounted filesystem in memory, where there is room, and gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="cogfs-image-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
    image = Image(directory / "image", directory / "mounted", kind)
    try:
        image.make(size)
        image.mount()
        try:
            yield image.mountpoint
        finally:
            run("umount", "-l", image.mountpoint, check=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
