"""Open handles: what the kernel holds open, by whom and since when. A handle's number is its backing descriptor."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from cogfs.fsd.channel import OpenHandle
from cogfs.fsd.mount.closer import LARGE, Closer
from cogfs.fsd.mount.nodes import Node, path_of
from cogfs.fsd.mount.syscalls import DirectoryReader

#: For how long a thread's command is not read again, in nanoseconds; it changes with exec.
_COMMAND_LIFE = 1_000_000_000
_MAX_COMMANDS = 1024


class Handle:
    """One open file or directory description."""

    __slots__ = (
        "command",
        "fd",
        "listing",
        "node",
        "path",
        "pid",
        "privileged",
        "since_ns",
        "sync",
        "writable",
        "written",
    )

    def __init__(self, fd: int, node: Node, pid: int, writable: bool) -> None:
        self.fd = fd
        self.node = node
        #: As the kernel gave it: a thread id, or 0 when it is outside the worker's pid namespace.
        self.pid = pid
        self.writable = writable
        self.since_ns = time.time_ns()
        #: Name of the thread's program; empty until it is asked for.
        self.command = ""
        #: Last path, when the node has none any more.
        self.path = b""
        #: ``O_SYNC`` or ``O_DSYNC``, or 0: synced by the handle's user, outside the event loop.
        self.sync = 0
        #: Written by one who may not keep set-user-id and set-group-id bits.
        self.privileged = True
        self.listing: Listing | None = None
        #: Bytes.
        self.written = 0


class Listing:
    """Where the kernel is in a directory."""

    __slots__ = ("_entries", "_index", "_position", "_reader")

    def __init__(self, fd: int) -> None:
        self._reader = DirectoryReader(fd)
        self._entries: list[tuple[bytes, int, int, int]] = []
        self._index = 0
        self._position = -1

    def seek(self, position: int) -> None:
        """Go on behind ``position``, or start anew at 0."""
        if position == 0 or position != self._position:
            self._reader.seek(position)
            self._entries = []
            self._index = 0
            self._position = position

    def next(self) -> tuple[bytes, int, int, int] | None:
        """The next entry as (name, position behind it, inode, type); the same again until ``advance``."""
        if self._index >= len(self._entries):
            self._entries = self._reader.read()
            self._index = 0
            if not self._entries:
                return None
        return self._entries[self._index]

    def advance(self) -> None:
        """The entry was delivered."""
        self._position = self._entries[self._index][1]
        self._index += 1


class HandleTable:
    """All open handles."""

    def __init__(self, closer: Closer) -> None:
        self._closer = closer
        self._handles: dict[int, Handle] = {}
        self._commands: dict[int, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._handles.values())

    def get(self, fh: int) -> Handle:
        """OSError EBADF."""
        handle = self._handles.get(fh)
        if handle is None:
            raise OSError(errno.EBADF, f"no handle {fh}")
        return handle

    def add(self, fd: int, node: Node, pid: int, writable: bool) -> Handle:
        """Take over ``fd``."""
        handle = Handle(fd, node, pid, writable)
        if writable:
            handle.command = self._command(pid, handle.since_ns)
        self._handles[fd] = handle
        if node.handles is None:
            node.handles = [handle]
        else:
            node.handles.append(handle)
        return handle

    def remove(self, fh: int) -> Node:
        """Close it; its node."""
        handle = self._handles.pop(fh)
        node = handle.node
        assert node.handles is not None
        if len(node.handles) == 1:
            node.handles = None
        else:
            node.handles.remove(handle)
        if handle.written < LARGE and not node.large:
            os.close(fh)
        else:
            self._closer.close(fh)
        return node

    def unnamed(self, node: Node, parent: Node, name: bytes) -> None:
        """``node`` loses this name, which may be its last: keep it for the list."""
        if node.handles and not node.links:
            path = path_of(parent, name)
            for handle in node.handles:
                handle.path = path

    def list(self) -> list[OpenHandle]:
        """All of them, for the control process."""
        now = time.time_ns()
        return [
            OpenHandle(
                handle.node.ino,
                handle.path if handle.node.parent is None and handle.path else handle.node.path(),
                handle.pid,
                handle.command or self._command(handle.pid, now),
                handle.writable,
                handle.since_ns,
                handle.node.deleted,
                handle.node.children is not None,
            )
            for handle in self._handles.values()
        ]

    def _command(self, pid: int, now: int) -> str:
        """``comm`` only: other files of /proc take locks of the process, and could wait for this worker."""
        known = self._commands.get(pid)
        if known is not None and now < known[1]:
            return known[0]
        try:
            fd = os.open(b"/proc/%d/comm" % pid, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            command = os.read(fd, 64).rstrip(b"\n").decode("utf-8", "backslashreplace")
        except OSError:
            return ""
        finally:
            os.close(fd)
        if len(self._commands) >= _MAX_COMMANDS:
            self._commands.clear()
        self._commands[pid] = (command, now + _COMMAND_LIFE)
        return command
