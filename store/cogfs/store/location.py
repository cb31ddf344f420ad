"""Where an object is, as the index has it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from cogfs.store.codec import Codec
from cogfs.store.hashing import HASH_SIZE
from cogfs.store.records import NO_BASE, RECORD_HEADER_SIZE
from cogfs.store.schema import Hash, ObjectKind

#: Pack, offset of the record's header, length of the payload, raw length, kind, codec; then the base, if there is one.
_ROW = struct.Struct("<IQQQBB")
#: Of a member of a group: pack, offset of the record's header, length of the payload, raw length, where it begins in
#: the group, its share of the record, kind. Groups are in packs of ordinary size, so that four bytes do for each.
_GROUPED = struct.Struct("<IIIIIIB")


class Location(NamedTuple):
    """Where an object is, and in what form."""

    pack: int
    offset: int
    stored: int
    raw: int
    kind: ObjectKind
    codec: int
    base: Hash = NO_BASE
    #: Of a member of a group: where its bytes begin in those of all members, and the bytes of the record that count as
    #: its own. The shares of all members add up to the record.
    start: int = 0
    share: int = 0

    def encode(self) -> bytes:
        """The row of the index."""
        if self.is_grouped:
            return _GROUPED.pack(self.pack, self.offset, self.stored, self.raw, self.start, self.share, self.kind)
        row = _ROW.pack(self.pack, self.offset, self.stored, self.raw, self.kind, self.codec)
        return row if self.base == NO_BASE else row + self.base

    @classmethod
    def decode(cls, row: bytes) -> Location:
        """ValueError when ``row`` is not one of the index."""
        if len(row) == _GROUPED.size:
            pack, offset, stored, raw, start, share, kind = _GROUPED.unpack(row)
            return cls(pack, offset, stored, raw, ObjectKind(kind), Codec.GROUP, NO_BASE, start, share)
        if len(row) not in {_ROW.size, _ROW.size + HASH_SIZE}:
            raise ValueError(f"a row of {len(row)} bytes")
        pack, offset, stored, raw, kind, codec_number = _ROW.unpack_from(row)
        return cls(pack, offset, stored, raw, ObjectKind(kind), codec_number, row[_ROW.size :] or NO_BASE)

    @property
    def end(self) -> int:
        """Offset of the first byte after the record."""
        return self.offset + RECORD_HEADER_SIZE + self.stored

    @property
    def is_delta(self) -> bool:
        """Whether it cannot be decoded without its base."""
        return self.codec == Codec.ZSTD_DELTA

    @property
    def is_grouped(self) -> bool:
        """Whether its record has other objects, too."""
        return self.codec == Codec.GROUP

    @property
    def record(self) -> tuple[int, int]:
        """Pack and offset of its record."""
        return self.pack, self.offset

    @property
    def size(self) -> int:
        """Bytes of the packs that it takes: its record, or its share of that."""
        return self.share if self.is_grouped else RECORD_HEADER_SIZE + self.stored


def has_base(row: bytes) -> bool:
    """Whether a row of the index names a base, without decoding it."""
    return len(row) > _ROW.size
