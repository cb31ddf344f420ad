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


class Location(NamedTuple):
    """Where an object is, and in what form."""

    pack: int
    offset: int
    stored: int
    raw: int
    kind: ObjectKind
    codec: int
    base: Hash = NO_BASE

    def encode(self) -> bytes:
        """The row of the index."""
        row = _ROW.pack(self.pack, self.offset, self.stored, self.raw, self.kind, self.codec)
        return row if self.base == NO_BASE else row + self.base

    @classmethod
    def decode(cls, row: bytes) -> Location:
        """ValueError when ``row`` is not one of the index."""
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


def has_base(row: bytes) -> bool:
    """Whether a row of the index names a base, without decoding it."""
    return len(row) > _ROW.size
