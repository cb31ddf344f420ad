"""Control groups of version 2: one for each command, so that nothing it leaves behind is missed.

A group is made below the one in which the process is, so that what counts for that one counts on, and so that the end
of the daemon's own group ends no command. Must not know commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import structlog

_log = structlog.get_logger(__name__)


def _mountpoint() -> str | None:
    """Where the hierarchy of version 2 is mounted, whole."""
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields, _, rest = line.partition(b" - ")
            if rest.split()[0] == b"cgroup2":
                _, _, _, root, mountpoint = fields.split()[:5]
                if root == b"/":
                    return os.fsdecode(mountpoint)
    return None


def _of(pid: int) -> str | None:
    """The directory of the group in which a process is."""
    mountpoint = _mountpoint()
    if mountpoint is None:
        return None
    with open(f"/proc/{pid}/cgroup", "rb") as table:
        for line in table:
            if line.startswith(b"0::/"):
                path = os.fsdecode(line.rstrip(b"\n")[3:])
                # One that lies outside what this mount namespace shows cannot be named.
                return None if "/.." in path or path.endswith(" (deleted)") else mountpoint + path.rstrip("/")
    return None


def make(pid: int, name: str) -> str:
    """The directory of a new group with the process in it; empty when none can be made."""
    try:
        parent = _of(pid)
        if parent is None:
            return ""
        path = f"{parent}/{name}"
        os.mkdir(path)
    except OSError as error:
        _log.info("no control group for a command", error=str(error))
        return ""
    if join(path, pid):
        return path
    remove(path)
    return ""


def join(path: str, pid: int) -> bool:
    """Move a process into a group; False when it has ended, or may not be moved."""
    try:
        with open(f"{path}/cgroup.procs", "w") as file:
            file.write(str(pid))
    except OSError as error:
        _log.info("a process cannot be moved into a control group", pid=pid, error=str(error))
        return False
    return True


def pids(path: str) -> list[int]:
    """The processes of a group and of those below it."""
    found = []
    for directory in _directories(path):
        try:
            with open(f"{directory}/cgroup.procs", "rb") as file:
                # Those of an outer namespace have no number here.
                found += [int(line) for line in file.read().split() if line != b"0"]
        except OSError:
            continue
    return found


def remove(path: str) -> None:
    """Take an empty group away, with those below it. What is not empty stays."""
    for directory in reversed(list(_directories(path))):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.info("a control group stays", path=directory, error=str(error))
            return


def _directories(path: str) -> Iterator[str]:
    for directory, _, _ in os.walk(path):
        yield directory
