"""Counts and latencies of operations, by name. Adding one costs a fraction of a microsecond."""

from __future__ import annotations

from cogfs.fsd.channel import OperationStats

#: The last bucket holds everything from 2**30 microseconds up.
BUCKETS = 32


class Counter:
    """One operation."""

    __slots__ = ("buckets", "count", "errors", "name", "total_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.errors = 0
        self.total_ns = 0
        self.buckets = [0] * BUCKETS

    def add(self, elapsed_ns: int) -> None:
        """Note one call."""
        self.count += 1
        self.total_ns += elapsed_ns
        bucket = (elapsed_ns // 1000).bit_length()
        self.buckets[bucket if bucket < BUCKETS else BUCKETS - 1] += 1

    def stats(self) -> OperationStats:
        """A copy for the control process."""
        return OperationStats(self.name, self.count, self.errors, self.total_ns, list(self.buckets))


class Counters(dict[str, Counter]):
    """All operations, by name; a counter is made when it is asked for."""

    def __missing__(self, name: str) -> Counter:
        counter = self[name] = Counter(name)
        return counter

    def stats(self) -> list[OperationStats]:
        """Every operation that was called, by name."""
        return [counter.stats() for _, counter in sorted(self.items()) if counter.count]
