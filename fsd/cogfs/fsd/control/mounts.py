"""The mount table, and taking mounts of cogfs away.

Owns ``/proc/self/mountinfo`` and umount. Must not know workers or workspaces beyond the source name ``cogfs:<id>``.
No call here waits for the process that serves a mount for longer than it says.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

FSTYPE = "fuse.cogfs"
_SOURCE_PREFIX = b"cogfs:"

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
#: Longest wait for an umount or a fusermount3.
_PATIENCE = 15.0

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


class TimedOut(Exception):
    """A call into a mount did not come back in time; its thread stays behind."""


@dataclass(frozen=True)
class MountEntry:
    """One line of the mount table."""

    mount_id: int
    parent_id: int
    #: ``st_dev`` of what is in it.
    device: int
    mountpoint: bytes
    fstype: str
    source: bytes

    @property
    def workspace_id(self) -> str:
        """The workspace that a mount of cogfs is of; empty for any other mount."""
        if self.fstype != FSTYPE or not self.source.startswith(_SOURCE_PREFIX):
            return ""
        return self.source.removeprefix(_SOURCE_PREFIX).decode("ascii", "replace")


def table() -> list[MountEntry]:
    """All mounts of this mount namespace, a later one over an earlier one."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [_parse(line) for line in file.read().splitlines()]


def of_workspace(workspace_id: str) -> list[MountEntry]:
    return [entry for entry in table() if entry.workspace_id == workspace_id]


def top_at(path: bytes, mounts: list[MountEntry]) -> MountEntry | None:
    """The mount that is visible at exactly ``path``."""
    found = [entry for entry in mounts if entry.mountpoint == path]
    return found[-1] if found else None


def covering(path: bytes, mounts: list[MountEntry]) -> MountEntry | None:
    """The mount that ``path`` lies in."""
    best: MountEntry | None = None
    for entry in mounts:
        if is_within(path, entry.mountpoint) and (best is None or len(entry.mountpoint) >= len(best.mountpoint)):
            best = entry
    return best


def is_within(path: bytes, directory: bytes) -> bool:
    """``path`` is ``directory`` or below it; both absolute and normal."""
    return directory in (path, b"/") or path.startswith(directory + b"/")


def is_dead(mountpoint: bytes, patience: float = 2.0) -> bool:
    """Nobody serves the mount any more. A mount that does not answer in time is not dead."""
    try:
        # Not stat, which the kernel may answer from its caches for a mount that is long dead.
        bounded(lambda: os.statvfs(mountpoint), patience, "statvfs")
    except TimedOut:
        return False
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def unmount(mountpoint: bytes, *, lazy: bool) -> None:
    """Take the topmost mount at ``mountpoint`` away; ``lazy``: out of the tree at once, from its users when they end.

    OSError: EBUSY when it is used, EINVAL when nothing is mounted there, ETIMEDOUT.
    """
    try:
        if os.geteuid() == 0:
            bounded(lambda: _umount2(mountpoint, lazy), _PATIENCE, "umount")
        else:
            _fusermount(mountpoint, lazy)
    except (TimedOut, subprocess.TimeoutExpired) as error:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), mountpoint) from error


def wait_until_gone(mount_id: int, patience: float) -> bool:
    """Wait for the mount to leave the table. False when it is still there."""
    deadline = time.monotonic() + patience
    while any(entry.mount_id == mount_id for entry in table()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def bounded(call: Callable[[], T], patience: float, name: str) -> T:
    """The result of ``call`` from a thread that is left behind when it takes longer. TimedOut then."""
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name=f"bounded-{name}", daemon=True).start()
    if not done.wait(patience):
        raise TimedOut(f"{name} took longer than {patience:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _umount2(mountpoint: bytes, lazy: bool) -> None:
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if _libc.umount2(ctypes.c_char_p(mountpoint), ctypes.c_int(flags)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def _fusermount(mountpoint: bytes, lazy: bool) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is missing", mountpoint)
    if top_at(mountpoint, table()) is None:
        raise OSError(errno.EINVAL, "not mounted", mountpoint)
    done = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", mountpoint],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PATIENCE,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode == 0:
        return
    if b"busy" in done.stderr:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), mountpoint)
    raise OSError(errno.EPERM, done.stderr.decode("utf-8", "replace").strip() or "fusermount3 failed", mountpoint)


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def _unescape(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match.group(1), 8)]), field)


def _parse(line: bytes) -> MountEntry:
    before, _, after = line.partition(b" - ")
    mount_id, parent_id, device, _root, mountpoint = before.split(b" ")[:5]
    fstype, source = after.split(b" ")[:2]
    major, minor = device.split(b":")
    return MountEntry(
        mount_id=int(mount_id),
        parent_id=int(parent_id),
        device=os.makedev(int(major), int(minor)),
        mountpoint=_unescape(mountpoint),
        fstype=fstype.decode("ascii", "replace"),
        source=_unescape(source),
    )
