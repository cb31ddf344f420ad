"""The bytes of a pack: its header, and the header of each record. Knows no files and no index.

All numbers are little-endian. A pack is a header and then records without gaps; a record is a header and its payload.
Both headers end in a CRC-32 of what comes before, and a record's header carries the CRC-32 of its payload, so that the
records of a pack can be found, and a torn one be told, without the index and without decoding.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from cogfs.store.hashing import HASH_SIZE
from cogfs.store.schema import Hash, ObjectKind

PACK_MAGIC = b"cogfs\0pk"
PACK_VERSION = 1
RECORD_MAGIC = b"cogR"

#: Magic, version, number of the pack, CRC-32.
_PACK_HEADER = struct.Struct("<8sIII")
PACK_HEADER_SIZE = _PACK_HEADER.size
#: Magic, kind, codec, flags, length of the payload, raw length, hash, hash of the base, CRC-32 of the payload.
_RECORD_HEADER = struct.Struct(f"<4sBBHQQ{HASH_SIZE}s{HASH_SIZE}sI")
_CRC = struct.Struct("<I")
RECORD_HEADER_SIZE = _RECORD_HEADER.size + _CRC.size

#: The base of a record that needs none.
NO_BASE = bytes(HASH_SIZE)
#: The name of a record that has many objects.
NO_NAME = bytes(HASH_SIZE)


class RecordHeader(NamedTuple):
    """What a record says of itself."""

    kind: ObjectKind
    codec: int
    #: Bytes of the payload.
    stored: int
    #: Bytes of the object.
    raw: int
    hash: Hash
    #: ``NO_BASE`` unless the codec needs another object to decode the payload.
    base: Hash
    #: CRC-32 of the payload.
    checksum: int


def pack_header(number: int) -> bytes:
    """The first bytes of pack ``number``."""
    head = _PACK_HEADER.pack(PACK_MAGIC, PACK_VERSION, number, 0)[: -_CRC.size]
    return head + _CRC.pack(zlib.crc32(head))


def check_pack_header(data: bytes, number: int) -> None:
    """ValueError unless ``data`` is the header of pack ``number``."""
    if data != pack_header(number):
        raise ValueError("its header is damaged")


def record_header(
    kind: ObjectKind, codec: int, name: Hash, raw: int, payload: bytes | memoryview, *, base: Hash = NO_BASE
) -> bytes:
    """The header of a record of ``payload``, which is to follow it."""
    head = _RECORD_HEADER.pack(RECORD_MAGIC, kind, codec, 0, len(payload), raw, name, base, zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head))


def parse_record_header(data: bytes) -> RecordHeader:
    """What the header ``data`` says. ValueError when it is not a whole, undamaged one."""
    if len(data) != RECORD_HEADER_SIZE:
        raise ValueError("the header of a record is cut off")
    (checksum,) = _CRC.unpack_from(data, _RECORD_HEADER.size)
    if zlib.crc32(data[: _RECORD_HEADER.size]) != checksum:
        raise ValueError("the header of a record is damaged")
    magic, kind, codec, flags, stored, raw, name, base, crc = _RECORD_HEADER.unpack_from(data)
    if magic != RECORD_MAGIC or flags:
        raise ValueError("the header of a record has an unknown form")
    return RecordHeader(ObjectKind(kind), codec, stored, raw, name, base, crc)
