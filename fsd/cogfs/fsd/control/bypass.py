"""Who can change a mounted workspace's files past the mount: processes that were in the directory before it.

The shell in which the mount was made is the usual one: its working directory is the bare directory, and what it and its
children write by relative paths never reaches the worker. A descriptor of a bare directory leads past the mount too,
and so does one of a bare file that is open for writing; children inherit them. While there is any, and once after the
last one has gone, a boundary looks at all files.

Asks /proc and the kernel alone, never the mount.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from cogfs.fsd.control.errors import BusyBy
from cogfs.fsd.control.mounts import is_within, of_workspace
from cogfs.fsd.control.users import holder, mount_id_at

_FLAGS = re.compile(rb"^flags:\s+([0-7]+)$", re.MULTILINE)
_MOUNT_ID = re.compile(rb"^mnt_id:\s+(\d+)$", re.MULTILINE)


class Bypass:
    """The ways past one workspace's mount, as far as they can be seen."""

    def __init__(self, workspace_id: str, root: bytes, mountpoint: bytes, worker_pid: int) -> None:
        """Looks at every process's open files once; nobody can open a bare file later by the root's path, in place."""
        self._workspace_id = workspace_id
        self._root = root
        #: Mounted elsewhere, the bare directory is there for everybody.
        self.open_to_all = mountpoint != root
        self._own = frozenset((os.getpid(), worker_pid))
        mounts = self._mounts()
        self._held = self._all_held(mounts)

    def _all_held(self, mounts: frozenset[int]) -> list[tuple[int, int, bytes, str]]:
        return [one for pid in self._processes() for one in self._descriptors(pid, mounts)]

    def present(self) -> list[BusyBy]:
        """The processes that are past the mount now: in the bare directory, or with a directory of it open, or a file
        of it for writing."""
        found = []
        mounts: frozenset[int] | None = None
        for pid in self._processes():
            for link in (f"/proc/{pid}/cwd", f"/proc/{pid}/root"):
                where = _target(link)
                if where is None or not is_within(where, self._root):
                    continue
                mounts = self._mounts() if mounts is None else mounts
                if mount_id_at(link) not in mounts:
                    found.append(holder("WORKING_DIRECTORY", pid, where, self._root, "READ"))
        held = [one for one in self._held if _target(f"/proc/{one[0]}/fd/{one[1]}") == one[2]]
        if len(held) < len(self._held):
            # A child may have it still. Looked at twice, as it may be handed down while the processes are listed.
            mounts = self._mounts()
            held = self._all_held(mounts) or self._all_held(mounts)
        self._held = held
        found += [holder("HANDLE", pid, path, self._root, access) for pid, _, path, access in held]
        return found

    def _processes(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self._own:
                yield int(name)

    def _mounts(self) -> frozenset[int]:
        return frozenset(entry.mount_id for entry in of_workspace(self._workspace_id))

    def _descriptors(self, pid: int, mounts: frozenset[int]) -> Iterator[tuple[int, int, bytes, str]]:
        """Those of a process that lead past the mount: process, number, path and access."""
        try:
            descriptors = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            return
        for fd in descriptors:
            path = _target(f"/proc/{pid}/fd/{fd}")
            if path is None or not is_within(path, self._root):
                continue
            try:
                with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
                    info = file.read()
            except OSError:
                continue
            flags, mount = _FLAGS.search(info), _MOUNT_ID.search(info)
            if flags is None or mount is None or int(mount.group(1)) in mounts:
                continue
            if int(flags.group(1), 8) & os.O_ACCMODE != os.O_RDONLY:
                yield pid, fd, path, "WRITE"
            elif _is_directory(f"/proc/{pid}/fd/{fd}"):
                yield pid, fd, path, "READ"


def _is_directory(link: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(link).st_mode)
    except OSError:
        return False


def _target(link: str) -> bytes | None:
    try:
        return os.readlink(os.fsencode(link))
    except OSError:
        return None
