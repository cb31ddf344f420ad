"""The undo log of a mounted workspace: what entries and inodes were at a boundary, before they were changed.

While a boundary is not sealed, the worker writes down what an entry or an inode was before it changes it for the first
time after the latest boundary, and the control process reads that instead of what the files have become. A record of
boundary ``b`` holds for ``b`` and for every earlier boundary that has no record of its own of the same thing.
What stands after ``DirectoryMade`` is of the new directory, and of none that had its inode number before.

The content of a regular file stands in the log as a whole (``Was.hash`` names it in the store), or in parts: its
``InodeWas`` says so (``logged``), and before a part of the file is overwritten for the first time, that is written down
as ``ContentWas``. What no such record has is still in the file itself, or in the whole that a later record names.

One process appends. Each record is written by one system call before the change is made, so a reader that looks at a
file first and at the log afterwards knows whether what it saw was of the boundary. Records survive the end of any
process, not the loss of power. A record that was cut off at the end of the file says nothing.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from cogfs.fsd.spans import Spans

_LENGTH = struct.Struct(">I")
#: No record is larger: extended attributes of 64 KiB and a name fit many times.
_MAX_RECORD = 16 << 20
_READ_SIZE = 1 << 20

Xattrs = tuple[tuple[bytes, bytes], ...]


class Status(msgspec.Struct, array_like=True, frozen=True):
    """The part of a ``stat`` that is recorded."""

    inode: int
    #: ``st_mode``, with the type.
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Status:
        """From what the system says."""
        return cls(
            status.st_ino,
            status.st_mode,
            status.st_uid,
            status.st_gid,
            status.st_nlink,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


class EntryWas(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """An entry of a directory. That of a regular file comes with or after an ``InodeWas`` of the file."""

    boundary: int
    #: Backing inode of the directory.
    directory: int
    name: bytes
    #: Backing inode that had the name; 0: none.
    inode: int
    #: Type bits of its mode; 0 when there was none.
    kind: int


class Was(msgspec.Struct, array_like=True, frozen=True):
    """All that a snapshot keeps of an inode."""

    status: Status
    #: Recorded or not: the reader of the log leaves out what snapshots do not keep.
    xattrs: Xattrs = ()
    #: Target of a symbolic link.
    target: bytes = b""
    #: Object in the store with the content of a regular file; empty for anything else, and when it was not kept.
    hash: bytes = b""
    #: Why the content of a regular file was not kept, as a snapshot tells it, or ``LOST``.
    reason: str = ""
    #: The content of a regular file is in ``ContentWas`` records and, for the rest, in the file or in what a later
    #: record says of it.
    logged: bool = False


class InodeWas(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """An inode."""

    boundary: int
    was: Was


class DirectoryMade(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A directory was made after ``boundary`` and before the next one. Written right after that and before anything is
    made in it. A directory that had the number at ``boundary`` is no more."""

    boundary: int
    inode: int


class ContentWas(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Part of a regular file, whose ``InodeWas`` stands before it."""

    boundary: int
    inode: int
    offset: int
    #: The last field: a reader remembers where it is, and not what.
    data: bytes


class GivenUp(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Changes were made that are not in the log: it does not tell what ``boundary`` was, nor any before that."""

    boundary: int


Record = EntryWas | InodeWas | DirectoryMade | ContentWas | GivenUp

#: ``Was.reason`` of a file that is larger than any that a snapshot keeps.
TOO_LARGE = "too-large"
#: ``Was.reason`` of a file that was changed though what it was could not be kept: no snapshot can be made of it.
LOST = "lost"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(records: Iterable[Record]) -> bytes:
    """Records as they stand in the log, to be appended by one write."""
    parts: list[bytes] = []
    for record in records:
        body = _encoder.encode(record)
        parts += (_LENGTH.pack(len(body)), body)
    return b"".join(parts)


class UndoLogWriter:
    """Appends to a log, which is made when it is not there. Use it from one thread."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        """OSError. A record that was cut off at the end is taken away: what is appended must be found."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path = path
        self._fd = os.open(path, flags, 0o600)
        size = os.fstat(self._fd).st_size
        self._size = 0
        while len(header := os.pread(self._fd, _LENGTH.size, self._size)) == _LENGTH.size:
            end = self._size + _LENGTH.size + _LENGTH.unpack(header)[0]
            if end > size:
                break
            self._size = end
        if self._size < size:
            os.ftruncate(self._fd, self._size)

    def append(self, *records: Record) -> None:
        """One write for all of them. OSError, and the log is as it was: a change that cannot be undone must not be
        made."""
        data = encode(records)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    def clear(self) -> None:
        """No boundary needs it any more."""
        if self._size:
            os.ftruncate(self._fd, 0)
            self._size = 0

    def give_up(self, boundary: int) -> bool:
        """It tells nothing of ``boundary`` and those before any more. False where not even that can be written down:
        there is no log then, which says the same of all boundaries, and this one is to be closed."""
        try:
            self.clear()
            self.append(GivenUp(boundary))
        except OSError:
            with suppress(OSError):
                os.unlink(self._path)
            return False
        return True

    def close(self) -> None:
        """Give the descriptor back; the log stays."""
        os.close(self._fd)


class _Piece(NamedTuple):
    """Where a ``ContentWas`` is in the log."""

    #: Of the record.
    number: int
    boundary: int
    offset: int
    length: int
    position: int


class Content:
    """What a file held at a boundary, as far as the log has it. Whoever reads the file itself looks at a part of it
    first, updates this afterwards, and lays the log over what was read."""

    def __init__(self, log: UndoLog, inode: int, boundary: int) -> None:
        self._log = log
        self._inode = inode
        self._boundary = boundary
        self._taken = 0
        self._spans = Spans()
        #: Ascending by offset, none over another: offset, length, position in the log.
        self._parts: list[tuple[int, int, int]] = []
        #: What holds the rest: what the whole of the file was later; None: the file itself.
        self.base: Was | None = None
        was = log.inode(inode, boundary)
        assert was is not None and was.logged
        #: All but the content.
        self.was = was
        self.update()

    def update(self) -> None:
        """Take in what was logged since. OSError, ValueError."""
        self._log.refresh()
        whole = self._log.whole(self._inode, self._boundary)
        until = None
        if whole is not None:
            until, self.base = whole
        pieces = self._log.pieces(self._inode)
        while self._taken < len(pieces):
            piece = pieces[self._taken]
            # What stands after the whole tells of later changes.
            if until is not None and piece.number > until:
                return
            self._taken += 1
            if piece.boundary < self._boundary:
                continue
            # What was written first is what it was.
            end = min(piece.offset + piece.length, self.was.status.size)
            for start, stop in self._spans.missing(piece.offset, end):
                insort(self._parts, (start, stop - start, piece.position + start - piece.offset))
            self._spans.add(piece.offset, end)

    def has(self, start: int, end: int) -> bool:
        """Whether the log has all of the file between two offsets."""
        return not self._spans.missing(start, end)

    @property
    def complete(self) -> bool:
        """Whether the log has all of it."""
        return self.has(0, self.was.status.size)

    def over(self, offset: int, data: bytes) -> bytes:
        """``data``, which was read at ``offset``, with what the log has of that laid over it."""
        end = offset + len(data)
        index = max(0, bisect_right(self._parts, (offset,)) - 1)
        changed: bytearray | None = None
        while index < len(self._parts):
            start, length, position = self._parts[index]
            if start >= end:
                break
            index += 1
            first, last = max(start, offset), min(start + length, end)
            if first < last:
                changed = bytearray(data) if changed is None else changed
                changed[first - offset : last - offset] = self._log.read(position + first - start, last - first)
        return data if changed is None else bytes(changed)


class UndoLog:
    """Reads a log as it grows. Use it from one thread."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self._path = path
        self._fd = -1
        self._offset = 0
        self._rest = b""
        #: By the number of a directory, for each that had it in turn: the boundary after which it was made (-1 for the
        #: first, of which that is not known), and its names.
        self._entries: dict[int, list[tuple[int, dict[bytes, list[EntryWas]]]]] = {}
        #: By inode, with the number of the record.
        self._inodes: dict[int, list[tuple[int, InodeWas]]] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        self._count = 0
        self._given_up = 0

    def refresh(self) -> None:
        """Take in what was appended. OSError; ValueError when the log is damaged."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        while data := os.pread(self._fd, _READ_SIZE, self._offset):
            self._offset += len(data)
            self._take(data)

    def _take(self, data: bytes) -> None:
        data = self._rest + data
        begin = self._offset - len(data)
        start = 0
        while len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > _MAX_RECORD:
                raise ValueError(f"a record of {length} bytes in the undo log")
            end = start + _LENGTH.size + length
            if len(data) < end:
                break
            self._add(_decode(data[start + _LENGTH.size : end]), begin + end)
            start = end
        self._rest = data[start:]

    def _add(self, record: Record, end: int) -> None:
        self._count += 1
        if isinstance(record, EntryWas):
            names = self._entries.setdefault(record.directory, [(-1, {})])[-1][1]
            names.setdefault(record.name, []).append(record)
        elif isinstance(record, DirectoryMade):
            self._entries.setdefault(record.inode, [(-1, {})]).append((record.boundary, {}))
        elif isinstance(record, GivenUp):
            self._given_up = max(self._given_up, record.boundary)
        elif isinstance(record, ContentWas):
            length = len(record.data)
            piece = _Piece(self._count, record.boundary, record.offset, length, end - length)
            self._pieces.setdefault(record.inode, []).append(piece)
        else:
            self._inodes.setdefault(record.was.status.inode, []).append((self._count, record))

    def tells_of(self, boundary: int) -> bool:
        """Whether all that was changed since ``boundary`` is in the log, as of the last ``refresh``."""
        return self._fd >= 0 and boundary > self._given_up

    def stored(self) -> Iterator[bytes]:
        """The names of the objects in the store that records name."""
        for records in self._inodes.values():
            for _, record in records:
                if record.was.hash:
                    yield record.was.hash

    def entry(self, directory: int, name: bytes, boundary: int) -> EntryWas | None:
        """What ``name`` in ``directory`` was at ``boundary``; None: what it is."""
        for record in self._names(directory, boundary).get(name, ()):
            if record.boundary >= boundary:
                return record
        return None

    def names(self, directory: int, boundary: int) -> list[bytes]:
        """The names in ``directory``, as it was at ``boundary``, of which there is any record."""
        return list(self._names(directory, boundary))

    def _names(self, directory: int, boundary: int) -> dict[bytes, list[EntryWas]]:
        for made_after, names in reversed(self._entries.get(directory, ())):
            if made_after < boundary:
                return names
        return {}

    def replaced(self, directory: int, boundary: int) -> bool:
        """Whether the directory that has this number now was made after ``boundary``."""
        of_it = self._entries.get(directory)
        return of_it is not None and of_it[-1][0] >= boundary

    def inode(self, inode: int, boundary: int) -> Was | None:
        """What an inode was at ``boundary``; None: what it is."""
        for _, record in self._inodes.get(inode, ()):
            if record.boundary >= boundary:
                return record.was
        return None

    def content(self, inode: int, boundary: int) -> Content:
        """What the content of a file was of which ``inode`` tells that it is logged."""
        return Content(self, inode, boundary)

    def whole(self, inode: int, boundary: int) -> tuple[int, Was] | None:
        """The first record, with its number, that tells of the content of a file as a whole, at ``boundary`` or after
        that."""
        for number, record in self._inodes.get(inode, ()):
            if record.boundary >= boundary and not record.was.logged:
                return number, record.was
        return None

    def pieces(self, inode: int) -> list[_Piece]:
        """Of a file, in the order in which they were written."""
        return self._pieces.get(inode, [])

    def read(self, position: int, length: int) -> bytes:
        """Bytes of the log itself. OSError."""
        data = os.pread(self._fd, length, position)
        if len(data) < length:
            raise OSError(errno.EIO, "the undo log is shorter than it was")
        return data

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_file(entry: EntryWas) -> bool:
    """Whether it was the name of a regular file."""
    return stat.S_ISREG(entry.kind)


def _decode(body: bytes) -> Record:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the undo log is damaged: {error}") from error
