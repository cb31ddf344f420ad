"""How the bytes of an object become the bytes of a record, and back.

A compressor cannot be used by two threads at once and is dear to make, so each thread keeps its own.
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


class Codec(enum.IntEnum):
    """How the payload of a record is encoded; part of the format."""

    RAW = 0
    #: One frame, without content size and checksum.
    ZSTD = 1
    #: One frame with the raw bytes of the base object as its dictionary. Reserved.
    ZSTD_DELTA = 2


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


def _looks_random(data: bytes | memoryview) -> bool:
    """Whether compressing samples of something large, taken at even distances, saves next to nothing."""
    if len(data) < _LARGE:
        return False
    view = memoryview(data)
    distance = (len(data) - _SAMPLE) // (_SAMPLES - 1)
    samples = b"".join(view[start : start + _SAMPLE] for start in range(0, _SAMPLES * distance, distance))
    return len(_tools.compressor.compress(samples)) * 50 > len(samples) * 49


def decode(codec: int, payload: bytes, raw_length: int) -> bytes:
    """The ``raw_length`` bytes that ``payload`` stands for. ValueError when it cannot be decoded to that length."""
    if codec == Codec.RAW:
        data = payload
    elif codec == Codec.ZSTD:
        try:
            data = _tools.decompressor.decompress(payload, max_output_size=raw_length)
        except (zstandard.ZstdError, MemoryError, OverflowError) as error:
            raise ValueError(str(error)) from error
    else:
        raise ValueError(f"codec {codec} is not known")
    if len(data) != raw_length:
        raise ValueError(f"{len(data)} bytes instead of {raw_length}")
    return data
