"""The content of a file as it was, where the undo log has part of it: into the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cogfs.fsd.control.capture import ATTEMPTS, UNREADABLE
from cogfs.fsd.undolog import LOST, Content
from cogfs.store.schema import NO_HASH, Hash, OpaqueReason
from cogfs.store.store import Store


class Lost(Exception):
    """It cannot be had any more; says why."""


class Found(NamedTuple):
    """What a file held."""

    #: Its hash, or why a snapshot does not have it.
    content: Hash | OpaqueReason
    #: Part of it was read from the file itself, where no log tells of changes past the mount.
    in_place: bool = False


def put_content(store: Store, content: Content, open_file: Callable[[], int], like: Hash = NO_HASH) -> Found:
    """Put what the file held. ``open_file`` opens the file itself for reading, wherever it is; -1: it is nowhere.
    ``like``: what is known to be like it. Lost, OSError, store errors."""
    for _ in range(ATTEMPTS):
        content.update()
        base = content.base
        if content.complete:
            # Whatever the file was found to be later, or was not.
            return Found(_put(store, content, _empty, like))
        if base is not None and base.hash != NO_HASH:
            return Found(_put(store, content, _Whole(store, base.hash).read, like or base.hash))
        if base is not None:
            if base.reason == LOST:
                raise Lost("it was changed and could not be kept")
            return Found(OpaqueReason(base.reason or OpaqueReason.UNREADABLE))
        fd = open_file()
        if fd < 0:
            content.update()
            if content.base is None and not content.complete:
                raise Lost("it has gone")
            continue
        try:
            hash_ = _put(store, content, lambda length, offset, fd=fd: os.pread(fd, length, offset), like)  # type: ignore[misc]
        except OSError as error:
            if error.errno in UNREADABLE:
                return Found(OpaqueReason.UNREADABLE)
            raise
        finally:
            os.close(fd)
        content.update()
        # Once the whole of it is in the log, the file is changed without more ado.
        if content.base is None:
            return Found(hash_, in_place=True)
    raise Lost("it changed again and again while it was read")


def _put(store: Store, content: Content, base: Callable[[int, int], bytes], like: Hash) -> Hash:
    size = content.was.status.size

    def read(length: int, offset: int) -> bytes:
        length = min(length, size - offset)
        if length <= 0:
            return b""
        data = base(length, offset)
        # What is changed from now on was not read, and what was changed before is in the log.
        content.update()
        if len(data) < length:
            if not content.has(offset + len(data), offset + length):
                raise Lost("it has become shorter past the mount")
            data += bytes(length - len(data))
        return content.over(offset, data)

    return store.put_content(read, size, like)[0]


def _empty(_length: int, _offset: int) -> bytes:
    return b""


class _Whole:
    """Reads a file of the store, one part after another."""

    def __init__(self, store: Store, name: Hash) -> None:
        self._pieces: Iterator[bytes] = store.read_file(name)
        self._start = 0
        self._piece = b""

    def read(self, length: int, offset: int) -> bytes:
        """Fewer bytes only at the end; ``offset`` never goes back."""
        parts = []
        while length:
            begin = offset - self._start
            if begin >= len(self._piece):
                self._start += len(self._piece)
                piece = next(self._pieces, None)
                if piece is None:
                    self._piece = b""
                    break
                self._piece = piece
                continue
            part = self._piece[begin : begin + length]
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)
