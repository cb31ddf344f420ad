"""Where a large file is cut into pieces. Knows bytes only, not where they come from or go.

The cuts follow the content (FastCDC, with two-byte steps and the gear table of its authors), so that what is put in or
taken out of a file moves no cut but those beside it. Nothing but the space that later versions take rests on that: a
list of pieces says where they end. So the numbers here are no part of the format; but a change of any of them, or of
what the library makes of them, stores each large file once more, and a test holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from pyfastcdc import FastCDC

#: A file of at most so many bytes is one blob.
CHUNK_THRESHOLD = 4 * 1024 * 1024

#: Bytes of a piece; the last one may have fewer. Most have about the sum of the first two.
MIN_PIECE = 128 * 1024
_AVERAGE_PIECE = 512 * 1024
MAX_PIECE = 1536 * 1024
#: How much the lengths are drawn to the middle.
_NORMALIZATION: Final = 2
#: Bytes that are cut at a time, and read.
_BUFFER = 8 * 1024 * 1024
_PART = 1024 * 1024


def cut(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The pieces of what ``read`` gives, in order; none is empty.

    ``read(n)`` gives the next n bytes, fewer only at the end.
    """
    cutter = FastCDC(_AVERAGE_PIECE, min_size=MIN_PIECE, max_size=MAX_PIECE, normalized_chunking=_NORMALIZATION, seed=0)
    buffer = memoryview(bytearray(_BUFFER))
    start = end = 0
    ended = False
    while not ended:
        buffer[: end - start] = bytes(buffer[start:end])
        start, end = 0, end - start
        while not ended and end < _BUFFER:
            wanted = min(_PART, _BUFFER - end)
            data = read(wanted)
            buffer[end : end + len(data)] = data
            end += len(data)
            ended = len(data) < wanted
        for chunk in cutter.cut_buf(buffer[:end]):
            # A cut is known once nothing that follows could come before it.
            if not ended and end - start < MAX_PIECE:
                break
            yield bytes(buffer[start : start + chunk.length])
            start += chunk.length
