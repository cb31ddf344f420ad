"""Where a large file is cut into pieces. Knows bytes only, not where they come from or go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

#: A file of at most so many bytes is one blob.
CHUNK_THRESHOLD = 4 * 1024 * 1024

PIECE_SIZE = 1024 * 1024


def cut(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The pieces of what ``read`` gives, in order; none is empty.

    ``read(n)`` gives the next n bytes, fewer only at the end.
    """
    while piece := read(PIECE_SIZE):
        yield piece
