"""How the bytes of an object become the bytes of a record, and back.

A compressor cannot be used by two threads at once and is dear to make, so each thread keeps its own. One that has a
base is made for one object only: what it costs is to take in the base.
"""

from __future__ import annotations

import enum
import threading

import zstandard

ZSTD_LEVEL = 3
#: Less than this is stored as it is: a frame could save next to nothing.
_SMALLEST = 48
#: Of more than that, samples are compressed first: most of what is large cannot be compressed at all.
_LARGE = 128 * 1024
_SAMPLE = 8 * 1024
_SAMPLES = 4

#: By the size of the larger of object and base: the level, and what differs from it. Without larger tables, the
#: beginning of a long base is forgotten before its end comes.
_DELTA_LEVELS: tuple[tuple[int, int, dict[str, int]], ...] = (
    (512 * 1024, 6, {}),
    (4 * 1024 * 1024, 3, {"hash_log": 22}),
    (16 * 1024 * 1024, 3, {"hash_log": 23}),
)
#: More than that is not compressed against a base.
DELTA_LIMIT = _DELTA_LEVELS[-1][0]
#: What a delta must save, of the bytes that the object takes without: a part of them, and the name of the base.
_DELTA_SHARE = 4
_DELTA_COST = 64
#: Of something large that cannot be compressed by itself, so many pieces of so many bytes are looked for in the base.
_PROBES = 8
_PROBE = 64


class Codec(enum.IntEnum):
    """How the payload of a record is encoded; part of the format."""

    RAW = 0
    #: One frame, without content size and checksum.
    ZSTD = 1
    #: One frame with the raw bytes of the base object as its dictionary, without content size and checksum.
    ZSTD_DELTA = 2
    #: Many objects in frames of their own (``groups``).
    GROUP = 3


class _Tools(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False, write_content_size=False)
        self.decompressor = zstandard.ZstdDecompressor()


_tools = _Tools()


def encode(data: bytes | memoryview) -> tuple[Codec, bytes | memoryview]:
    """The payload for ``data``: compressed, unless that saves less than a twentieth. Releases the GIL."""
    if len(data) >= _SMALLEST and not _looks_random(data):
        frame = _tools.compressor.compress(data)
        if len(frame) * 20 < len(data) * 19:
            return Codec.ZSTD, frame
    return Codec.RAW, data


def encode_against(data: bytes | memoryview, base: bytes) -> tuple[Codec, bytes | memoryview]:
    """The payload for ``data`` where ``base`` will be there to decode it: a delta if that pays, else as ``encode``."""
    plain = encode(data)
    most = len(plain[1]) - max(_DELTA_COST, len(plain[1]) // _DELTA_SHARE)
    larger = max(len(data), len(base))
    if most <= 0 or not base or larger > DELTA_LIMIT:
        return plain
    if plain[0] == Codec.RAW and len(data) >= _LARGE and not _has_parts_of(base, data):
        return plain
    level, other = next((level, other) for size, level, other in _DELTA_LEVELS if larger <= size)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        **other,
        source_size=len(data),
        dict_size=len(base),
        # Over both.
        window_log=max(zstandard.WINDOWLOG_MIN, (len(data) + len(base)).bit_length()),
        write_checksum=False,
        write_content_size=False,
        write_dict_id=False,
    )
    frame = zstandard.ZstdCompressor(dict_data=dictionary(base), compression_params=parameters).compress(data)
    return (Codec.ZSTD_DELTA, frame) if len(frame) <= most else plain


def dictionary(base: bytes) -> zstandard.ZstdCompressionDict:
    """``base`` as it is, for a compressor or a decompressor."""
    return zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _has_parts_of(base: bytes, data: bytes | memoryview) -> bool:
    """Whether any of a few pieces of ``data``, taken at even distances, is in ``base``."""
    view = memoryview(data)
    distance = (len(data) - _PROBE) // (_PROBES - 1)
    return any(bytes(view[start : start + _PROBE]) in base for start in range(0, _PROBES * distance, distance))


def _looks_random(data: bytes | memoryview) -> bool:
    """Whether compressing samples of something large, taken at even distances, saves next to nothing."""
    if len(data) < _LARGE:
        return False
    view = memoryview(data)
    distance = (len(data) - _SAMPLE) // (_SAMPLES - 1)
    samples = b"".join(view[start : start + _SAMPLE] for start in range(0, _SAMPLES * distance, distance))
    return len(_tools.compressor.compress(samples)) * 50 > len(samples) * 49


def decode(codec: int, payload: bytes, raw_length: int, base: bytes = b"") -> bytes:
    """The ``raw_length`` bytes that ``payload`` stands for; ``base``: those of the base, where the codec needs one.
    ValueError when it cannot be decoded to that length."""
    if codec == Codec.RAW:
        data = payload
    elif codec in (Codec.ZSTD, Codec.ZSTD_DELTA):
        try:
            if codec == Codec.ZSTD:
                decompressor = _tools.decompressor
            else:
                decompressor = zstandard.ZstdDecompressor(dict_data=dictionary(base))
            data = decompressor.decompress(payload, max_output_size=raw_length)
        except (zstandard.ZstdError, MemoryError, OverflowError) as error:
            raise ValueError(str(error)) from error
    else:
        raise ValueError(f"codec {codec} is not known")
    if len(data) != raw_length:
        raise ValueError(f"{len(data)} bytes instead of {raw_length}")
    return data
