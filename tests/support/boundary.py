"""The part of a control process that has to do with boundaries, and what a boundary was as the undo log tells it."""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from cogfs.fsd import channel
from cogfs.fsd.undolog import Content, EntryWas, InodeWas, Status, UndoLog, Was
from tests.support.worker_client import WorkerClient

#: A directory's inode and a name in it.
Key = tuple[int, bytes]


def records(path: Path) -> tuple[list[EntryWas], list[InodeWas]]:
    """All records of an undo log, read as the control process reads it."""
    log = UndoLog(os.fsencode(path))
    log.refresh()
    names = [names for had in log._entries.values() for _, names in had]
    entries = [record for one in names for found in one.values() for record in found]
    inodes = [record for found in log._inodes.values() for _, record in found]
    log.close()
    return entries, inodes


def tells_of(path: Path, boundary: int) -> bool:
    """Whether an undo log has all that was changed since a boundary."""
    log = UndoLog(os.fsencode(path))
    log.refresh()
    told = log.tells_of(boundary)
    log.close()
    return told


def xattrs_of(path: str | Path | int) -> tuple[tuple[bytes, bytes], ...]:
    """All extended attributes, by name."""
    names = os.listxattr(path, follow_symlinks=False) if not isinstance(path, int) else os.listxattr(path)
    follow = isinstance(path, int)
    return tuple(sorted((os.fsencode(name), os.getxattr(path, name, follow_symlinks=follow)) for name in names))


def was_of(path: Path, content_hash: bytes = b"") -> Was:
    """What is there, read without the mount."""
    status = path.lstat()
    target = os.fsencode(os.readlink(path)) if stat.S_ISLNK(status.st_mode) else b""
    return Was(Status.of(status), xattrs_of(path), target, content_hash)


def content_of(content: Content, now: Callable[[], bytes], contents: dict[bytes, bytes]) -> bytes:
    """What a file was of which the log has part; ``now`` reads the file, ``contents`` what stands for a hash."""
    size = content.was.status.size
    if content.base is None and not content.complete:
        rest = now()
        content.update()
    else:
        rest = b"" if content.base is None or content.complete else contents[content.base.hash]
    assert content.has(len(rest), size)
    return content.over(0, rest[:size].ljust(size, b"\0"))


class Capturer:
    """Answers every ``Wanted`` with what the file was at the latest boundary, in a thread."""

    def __init__(self, client: WorkerClient, undo_log: Path) -> None:
        self._undo_log = undo_log
        #: Generation of the latest boundary.
        self.latest = 0
        #: Held by whoever uses the client.
        self.lock = threading.Lock()
        #: Contents by what stands for their hash.
        self.contents: dict[bytes, bytes] = {}
        self.asked: list[channel.Wanted] = []
        self._client = client
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended:
            select.select([self._client.socket], [], [], 0.005)
            with self.lock:
                while self._client.listen(0):
                    pass
                while self._client.wanted:
                    self._capture(self._client.wanted.pop(0))

    def _capture(self, wanted: channel.Wanted) -> None:
        self.asked.append(wanted)
        was = None
        for path in wanted.paths:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._client.root_fd)
            try:
                status = os.fstat(fd)
                if status.st_ino == wanted.inode:
                    number = b"%d" % len(self.contents)
                    was = Was(Status.of(status), xattrs_of(fd), b"", number)
                    data = os.pread(fd, status.st_size, 0)
                    self.contents[number] = data
                    if wanted.logged:
                        was = self._as_it_was(was, data)
                    break
            finally:
                os.close(fd)
        self._client.expect(channel.Preserve(wanted.ticket, was), channel.Done)

    def _as_it_was(self, now: Was, data: bytes) -> Was:
        log = UndoLog(os.fsencode(self._undo_log))
        log.refresh()
        was = log.inode(now.status.inode, self.latest)
        if was is not None and was.logged:
            content = log.content(now.status.inode, self.latest)
            self.contents[now.hash] = content_of(content, lambda: data, self.contents)
            now = msgspec.structs.replace(was, hash=now.hash, logged=False)
        log.close()
        return now

    def __enter__(self) -> Capturer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._thread.join(180)


@dataclass
class Inode:
    """What a snapshot keeps of it."""

    mode: int
    owner: tuple[int, int]
    xattrs: tuple[tuple[bytes, bytes], ...]
    #: Content of a file, target of a link.
    content: bytes


@dataclass
class State:
    """A directory and all below it, by inode."""

    root: int = 0
    entries: dict[Key, int] = field(default_factory=dict)
    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[int, list[bytes]] = field(default_factory=dict)


def state_of(root: Path) -> State:
    """What is below ``root`` now, not by way of a mount."""
    state = State(root.stat().st_ino)

    def look(path: Path) -> int:
        status = path.lstat()
        inode = status.st_ino
        content = b""
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.fsencode(os.readlink(path))
        state.inodes[inode] = Inode(status.st_mode, (status.st_uid, status.st_gid), xattrs_of(path), content)
        if stat.S_ISDIR(status.st_mode):
            state.names[inode] = names = []
            for name in sorted(os.listdir(os.fsencode(path))):
                names.append(name)
                state.entries[inode, name] = look(path / os.fsdecode(name))
        return inode

    look(root)
    return state


class Past:
    """What a boundary was: what is there now, but for what the log says."""

    def __init__(self, now: State, log: UndoLog, contents: dict[bytes, bytes], boundary: int) -> None:
        self._now = now
        self._log = log
        self._contents = contents
        self._boundary = boundary

    def entry(self, directory: int, name: bytes) -> int:
        """Inode that had the name, or 0."""
        record = self._log.entry(directory, name, self._boundary)
        if record is not None:
            return record.inode
        return 0 if self._log.replaced(directory, self._boundary) else self._now.entries.get((directory, name), 0)

    def inode(self, inode: int) -> Inode:
        """What the inode was."""
        was = self._log.inode(inode, self._boundary)
        if was is None:
            return self._now.inodes[inode]
        content = was.target
        if was.logged:
            logged = self._log.content(inode, self._boundary)
            content = content_of(logged, lambda: self._now.inodes[inode].content, self._contents)
        elif stat.S_ISREG(was.status.mode):
            content = self._contents[was.hash]
        return Inode(was.status.mode, (was.status.uid, was.status.gid), was.xattrs, content)

    def whole(self) -> State:
        """All of it."""
        state = State(self._now.root)

        def look(inode: int) -> None:
            state.inodes[inode] = found = self.inode(inode)
            if not stat.S_ISDIR(found.mode):
                return
            names = set(self._log.names(inode, self._boundary))
            if not self._log.replaced(inode, self._boundary):
                names.update(self._now.names.get(inode, ()))
            there = [name for name in sorted(names) if self.entry(inode, name)]
            state.names[inode] = there
            for name in there:
                state.entries[inode, name] = child = self.entry(inode, name)
                look(child)

        look(self._now.root)
        return state
