"""Records that hold many objects: how their payload is laid out, made, and read again.

A *group* has objects of one kind that are like each other. Its first frame, the *head*, has those that are wanted most
often; every other frame is compressed with the bytes of the head as its dictionary. So an object takes two frames to
read at most, however many there are, and needs nothing outside of its record. The names stand at the end of the
payload.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import zstandard

from cogfs.store import codec
from cogfs.store.hashing import HASH_SIZE, hash_object
from cogfs.store.location import Location
from cogfs.store.packs import Packs
from cogfs.store.records import RECORD_HEADER_SIZE
from cogfs.store.schema import Hash, ObjectKind

#: Bytes of the objects in one frame, at most, and in all of a group. A single object may be as large as a frame.
FRAME_LIMIT = 1024 * 1024
GROUP_LIMIT = 16 * 1024 * 1024
#: Bytes of the objects in the head where there are several.
HEAD_LIMIT = 256 * 1024
#: A reader takes more frames and members for damage.
MAX_FRAMES = 64
MAX_MEMBERS = 1 << 16
#: Frames that were read of late are kept decoded, so many bytes of them.
_CACHED = 8 * 1024 * 1024
#: Higher ones take much longer for next to nothing.
_LEVEL = 15

#: Number of members, number of frames.
_COUNTS = struct.Struct("<II")
#: Of a frame: bytes of it, bytes of the objects in it.
_FRAME = struct.Struct("<II")
#: Name of a member and its length.
_MEMBER = struct.Struct(f"<{HASH_SIZE}sI")
#: As much of a payload as has the lengths of all frames.
_DIRECTORY = _COUNTS.size + MAX_FRAMES * _FRAME.size


class Member(NamedTuple):
    """An object of a group."""

    name: Hash
    #: Where its bytes begin in those of all members.
    start: int
    raw: int


class _Frame(NamedTuple):
    #: Of its bytes in the payload.
    offset: int
    stored: int
    #: Of the first byte of its objects in those of all members.
    start: int
    raw: int


def encode(frames: Sequence[Sequence[tuple[Hash, bytes]]]) -> bytes:
    """The payload for the objects of each frame, the head first. Releases the GIL."""
    directory = bytearray(_COUNTS.pack(sum(map(len, frames)), len(frames)))
    parts: list[bytes] = []
    head = b""
    for objects in frames:
        raw = b"".join(data for _, data in objects)
        part = _compress(raw, head)
        head = head or raw
        directory += _FRAME.pack(len(part), len(raw))
        parts.append(part)
    names = (_MEMBER.pack(name, len(data)) for objects in frames for name, data in objects)
    return b"".join([bytes(directory), *parts, *names])


def _compress(data: bytes, head: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=len(data),
        dict_size=len(head),
        # Over both.
        window_log=max(zstandard.WINDOWLOG_MIN, (len(data) + len(head)).bit_length()),
        write_checksum=False,
        write_content_size=False,
        write_dict_id=False,
    )
    dictionary = codec.dictionary(head) if head else None
    return zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters).compress(data)


def _frames(payload: bytes, size: int) -> tuple[list[_Frame], int]:
    """The frames, and where the names begin, out of the first bytes of a payload of ``size`` bytes. ValueError."""
    if len(payload) < _COUNTS.size:
        raise ValueError("a group is cut off")
    names, count = _COUNTS.unpack_from(payload)
    offset = _COUNTS.size + count * _FRAME.size
    if not 1 <= count <= MAX_FRAMES or not 1 <= names <= MAX_MEMBERS or len(payload) < offset:
        raise ValueError("a group has an unknown form")
    found = []
    start = 0
    for stored, raw in itertools.islice(_FRAME.iter_unpack(payload[_COUNTS.size : offset]), count):
        found.append(_Frame(offset, stored, start, raw))
        offset += stored
        start += raw
    if offset + names * _MEMBER.size != size or start > GROUP_LIMIT + FRAME_LIMIT:
        raise ValueError("a group has an unknown form")
    return found, offset


def members(payload: bytes) -> list[Member]:
    """The objects of a group, in order. ValueError."""
    frames, names = _frames(payload, len(payload))
    return _members(frames, payload[names:])


def _members(frames: list[_Frame], names: bytes) -> list[Member]:
    found = []
    start = 0
    ends = iter([frame.start + frame.raw for frame in frames])
    end = next(ends)
    for name, raw in _MEMBER.iter_unpack(names):
        while start == end and end < frames[-1].start + frames[-1].raw:
            end = next(ends)
        if start + raw > end:
            raise ValueError("an object of a group lies in two frames")
        found.append(Member(name, start, raw))
        start += raw
    if start != frames[-1].start + frames[-1].raw:
        raise ValueError("the objects of a group are not as long as it is")
    return found


def decode(payload: bytes) -> bytes:
    """The bytes of all members, one after another. ValueError."""
    frames, _ = _frames(payload, len(payload))
    head = b""
    parts = []
    for frame in frames:
        part = _decompress(payload[frame.offset : frame.offset + frame.stored], frame.raw, head)
        head = head or part
        parts.append(part)
    return b"".join(parts)


def _decompress(part: bytes, raw: int, head: bytes) -> bytes:
    return codec.decode(codec.Codec.ZSTD_DELTA if head else codec.Codec.ZSTD, part, raw, head)


class Groups:
    """Reads objects out of groups. Its methods may be called by many threads."""

    def __init__(self, packs: Packs) -> None:
        self.packs = packs
        self._lock = threading.Lock()
        #: By pack, offset of the record, and number of the frame.
        self._decoded: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._size = 0

    def read(self, where: Location) -> bytes:
        """The bytes of an object, not verified. ValueError, Corrupt, StoreIO."""
        frames, _ = self._directory(where)
        for number, frame in enumerate(frames):
            if frame.start <= where.start and where.start + where.raw <= frame.start + frame.raw:
                data = self._frame(where, frames, number)
                return data[where.start - frame.start : where.start - frame.start + where.raw]
        raise ValueError("a group does not have it")

    def table(self, where: Location) -> dict[Hash, Location]:
        """All objects of the group in which ``where`` is, in order. ValueError, Corrupt, StoreIO."""
        frames, names = self._directory(where)
        data = self.packs.read(where.pack, where.offset + RECORD_HEADER_SIZE + names, where.stored - names)
        return dict(_places(where.kind, where.pack, where.offset, where.stored, _members(frames, data)))

    def _directory(self, where: Location) -> tuple[list[_Frame], int]:
        offset = where.offset + RECORD_HEADER_SIZE
        return _frames(self.packs.read(where.pack, offset, min(_DIRECTORY, where.stored)), where.stored)

    def _frame(self, where: Location, frames: list[_Frame], number: int) -> bytes:
        key = (where.pack, where.offset, number)
        with self._lock:
            data = self._decoded.get(key)
            if data is not None:
                self._decoded.move_to_end(key)
                return data
        head = self._frame(where, frames, 0) if number else b""
        frame = frames[number]
        part = self.packs.read(where.pack, where.offset + RECORD_HEADER_SIZE + frame.offset, frame.stored)
        data = _decompress(part, frame.raw, head)
        with self._lock:
            if key not in self._decoded:
                self._decoded[key] = data
                self._size += len(data)
                while self._size > _CACHED:
                    _, old = self._decoded.popitem(last=False)
                    self._size -= len(old)
        return data

    def forget(self) -> None:
        """Reads everything from the packs again: something was not what it should be."""
        with self._lock:
            self._decoded.clear()
            self._size = 0


def places(kind: ObjectKind, pack: int, offset: int, payload: bytes) -> list[tuple[Hash, Location]]:
    """Where the objects of a group are, whose record is at ``offset`` of ``pack``. ValueError."""
    return _places(kind, pack, offset, len(payload), members(payload))


def _places(kind: ObjectKind, pack: int, offset: int, stored: int, found: list[Member]) -> list[tuple[Hash, Location]]:
    total = max(1, found[-1].start + found[-1].raw)
    rest = RECORD_HEADER_SIZE + stored - len(found) * _MEMBER.size
    return [
        (
            one.name,
            Location(
                pack,
                offset,
                stored,
                one.raw,
                kind,
                codec.Codec.GROUP,
                start=one.start,
                share=_MEMBER.size + rest * (one.start + one.raw) // total - rest * one.start // total,
            ),
        )
        for one in found
    ]


def wrong(kind: ObjectKind, payload: bytes) -> str:
    """What is wrong with a group, every byte of which is looked at; empty: nothing."""
    try:
        data = decode(payload)
        for one in members(payload):
            if hash_object(kind, memoryview(data)[one.start : one.start + one.raw]) != one.name:
                return "the content of an object in a group does not match its hash"
    except ValueError as error:
        return str(error)
    return ""
