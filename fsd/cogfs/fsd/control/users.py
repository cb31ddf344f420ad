"""Who uses a mount: open files as its worker knows them, and what ``/proc`` tells of everybody else.

Asks the kernel nothing that it would have to ask the worker: no path inside a mount is looked up here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import structlog

from cogfs.fsd.channel import Handles, ListHandles, OpenHandle
from cogfs.fsd.control.errors import BusyBy, CogfsError
from cogfs.fsd.control.mounts import MountEntry, TimedOut, bounded, is_within
from cogfs.fsd.control.ports import Link

_log = structlog.get_logger(__name__)

_TGID = re.compile(rb"^Tgid:\s+(\d+)$", re.MULTILINE)
_MOUNT_ID = re.compile(rb"^mnt_id:\s+(\d+)$", re.MULTILINE)
#: Seconds that a look at /proc may take.
_PATIENCE = 5.0


def open_handles(link: Link) -> list[OpenHandle]:
    """What the worker knows as open, each with the pid of its process (not of its thread) and that one's command where
    it still runs. Raises as ``Link.call``."""
    answer = link.call(ListHandles())
    assert isinstance(answer, Handles)
    try:
        return bounded(lambda: [_named(handle) for handle in answer.handles], _PATIENCE, "proc")
    except TimedOut:
        _log.warning("processes of open handles not looked up in time")
        return answer.handles


def who(entry: MountEntry, link: Link | None) -> list[BusyBy]:
    """Everything known to use the mount ``entry``, ``link`` being its worker's if there is one."""
    found: list[BusyBy] = []
    if link is not None:
        try:
            found += [as_busy(handle) for handle in open_handles(link)]
        except CogfsError as error:
            _log.warning("open handles not known", mountpoint=os.fsdecode(entry.mountpoint), error=str(error))
    holders = {item["pid"] for item in found}
    try:
        others = bounded(lambda: list(_from_proc(entry)), _PATIENCE, "proc")
    except TimedOut:
        others = []
    # A descriptor that the worker told of already is not told again.
    found += [item for item in others if item["kind"] == "WORKING_DIRECTORY" or item["pid"] not in holders]
    return found


def as_busy(handle: OpenHandle) -> BusyBy:
    return BusyBy(
        kind="HANDLE",
        path=os.fsdecode(handle.path),
        pid=handle.pid,
        command=handle.command,
        access="WRITE" if handle.writable else "READ",
        since_ns=handle.since_ns,
    )


def names(found: list[BusyBy]) -> str:
    """The users in a few words: ``python3 (pid 7), tar (pid 9), sh (pid 11) and 3 more``."""
    processes = list(dict.fromkeys(f"{item['command'] or 'a process'} (pid {item['pid']})" for item in found))
    if not processes:
        return "something that cannot be named"
    shown, rest = processes[:3], len(processes) - 3
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _named(handle: OpenHandle) -> OpenHandle:
    pid = _process_of(handle.pid)
    if pid == 0:
        return handle
    return OpenHandle(
        inode=handle.inode,
        path=handle.path,
        pid=pid,
        command=_command(pid) or handle.command,
        writable=handle.writable,
        since_ns=handle.since_ns,
        deleted=handle.deleted,
        directory=handle.directory,
    )


def _process_of(thread: int) -> int:
    """The process of a thread; 0 when it has ended."""
    if thread <= 0:
        return 0
    match = _TGID.search(_read(f"/proc/{thread}/status"))
    return int(match.group(1)) if match else 0


def _command(pid: int) -> str:
    """The name of a process's program; empty when it has ended."""
    return _read(f"/proc/{pid}/comm").decode("utf-8", "replace").rstrip("\n")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _from_proc(entry: MountEntry) -> Iterator[BusyBy]:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        pid = int(name)
        for link in ("cwd", "root"):
            path = f"/proc/{pid}/{link}"
            if mount_id_at(path) == entry.mount_id:
                yield _item("WORKING_DIRECTORY", entry, pid, path)
                break
        for descriptor in _descriptors(pid):
            match = _MOUNT_ID.search(_read(f"/proc/{pid}/fdinfo/{descriptor}"))
            if match and int(match.group(1)) == entry.mount_id:
                yield _item("HANDLE", entry, pid, f"/proc/{pid}/fd/{descriptor}")
                break


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return []


def mount_id_at(path: str) -> int:
    """The mount that a link of /proc leads into; 0 when it cannot be told. The path alone would not tell an old working
    directory below a mount from one in it."""
    try:
        # O_PATH through such a link asks nothing of the filesystem.
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        match = _MOUNT_ID.search(_read(f"/proc/self/fdinfo/{descriptor}"))
        return int(match.group(1)) if match else 0
    finally:
        os.close(descriptor)


def _item(kind: str, entry: MountEntry, pid: int, link: str) -> BusyBy:
    try:
        path = os.readlink(os.fsencode(link))
    except OSError:
        path = b""
    return holder(kind, pid, path, entry.mountpoint, "READ")


def holder(kind: str, pid: int, path: bytes, root: bytes, access: str) -> BusyBy:
    """A process that holds ``path``, told relative to ``root`` where it is in it."""
    inside = os.path.relpath(path, root) if is_within(path, root) else path
    return BusyBy(
        kind=kind,
        path="" if inside == b"." else os.fsdecode(inside),
        pid=pid,
        command=_command(pid),
        access=access,
        since_ns=0,
    )
