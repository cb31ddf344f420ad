"""Ranges of offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Spans:
    """A set of offsets, kept as ranges that neither overlap nor touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Take in all from ``start`` up to, and without, ``end``."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges between ``start`` and ``end`` that are not in it, ascending."""
        found = []
        index = bisect_right(self._ends, start)
        while index < len(self._starts) and self._starts[index] < end:
            if start < self._starts[index]:
                found.append((start, self._starts[index]))
            start = self._ends[index]
            index += 1
        if start < end:
            found.append((start, end))
        return found
