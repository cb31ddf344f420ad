"""Who makes a new file: its owner, group, and the permission to make it are the caller's, not the worker's.

Only a worker that runs as root needs this; another one serves nobody but itself. The identity is the thread's, for the
time of one system call, and is taken back before anything else runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from cogfs.fsd.mount import syscalls

T = TypeVar("T")


class Caller(Protocol):
    """What the kernel tells of the process that makes a request."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def pid(self) -> int: ...


class Identity:
    """The worker's own identity, and the change to a caller's."""

    def __init__(self) -> None:
        self._root = os.geteuid() == 0
        self._gid = os.getegid()
        if self._root:
            # What root's groups would allow is not what the caller's would.
            os.setgroups([])

    def foreign(self, caller: Caller) -> bool:
        """Whether ``make`` has something to change."""
        return self._root and (caller.uid != 0 or caller.gid != self._gid)

    def make(self, caller: Caller, call: Callable[[], T]) -> T:
        """The result of ``call``, made as ``caller``.

        The kernel has checked the caller's permission. Without the caller's supplementary groups the backing directory
        may refuse all the same: only then are they read, since that costs more than the call.
        """
        grouped = False
        try:
            syscalls.set_filesystem_ids(caller.uid, caller.gid)
            try:
                return call()
            except PermissionError:
                groups = supplementary_groups(caller.pid)
                if not groups:
                    raise
            syscalls.set_thread_groups(groups)
            grouped = True
            return call()
        finally:
            syscalls.set_filesystem_ids(0, self._gid)
            if grouped:
                syscalls.set_thread_groups([])


def supplementary_groups(pid: int) -> list[int]:
    """Those of thread ``pid``; empty when there is no such thread any more."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"Groups:"):
                    return [int(group) for group in line.split()[1:]]
    except OSError:
        pass
    return []
