"""A file that is read from its beginning, one part after another."""

from __future__ import annotations

from collections.abc import Callable

_PROBE = 16 * 1024
#: Bytes that are asked for at a time.
_PART = 1024 * 1024


class Source:
    """Reads a file from its beginning."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._offset = 0
        self._head = b""

    def read_up_to(self, limit: int, hint: int) -> bytes:
        """Up to ``limit`` bytes, fewer only at the end; asks for a little more than ``hint`` first."""
        wanted = min(limit, max(hint, 0) + 1)
        parts = []
        got = 0
        while got < limit and (data := self._read(wanted, self._offset)):
            parts.append(data)
            got += len(data)
            self._offset += len(data)
            # After a short read most likely nothing comes, and a large buffer would be made for it.
            wanted = min(limit - got, _PROBE if len(data) < wanted else _PART)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def push_back(self, data: bytes) -> None:
        """Lets ``data`` come first in what ``read`` gives."""
        self._head = data

    def read(self, length: int) -> bytes:
        """The next ``length`` bytes, fewer only at the end."""
        if len(self._head) >= length:
            data, self._head = self._head[:length], self._head[length:]
            return data
        head, self._head = self._head, b""
        return head + self.read_up_to(length - len(head), length)
