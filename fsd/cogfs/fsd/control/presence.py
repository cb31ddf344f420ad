"""Whether the holders of runs are there: their streams, and the time that each has left. In memory alone.

Used within the lock of ``holds``. Must not know rows, nor what becomes of a run without a holder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a holder is told; ``over``: nothing comes after it."""

    why: str
    over: bool = False


class Watch:
    """One stream of a holder."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._queue: SimpleQueue[Told | None] = SimpleQueue()
        self._last: Told | None = None

    def tell(self, told: Told) -> None:
        """Once, however often it is said."""
        if told != self._last:
            self._last = told
            self._queue.put(told)

    def wake(self) -> None:
        """Its reader looks whether its caller is still there."""
        self._queue.put(None)

    def next(self, timeout: float) -> Told | None:
        """What comes next; None when that is nothing, or the reader is to look."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None


@dataclass(slots=True)
class Holder:
    """The holder of one run."""

    watches: list[Watch] = field(default_factory=list)
    #: When it has to have shown itself (a stream, a renewal), on the monotonic clock; None: there is no such time.
    deadline: float | None = None

    def give(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def until_ns(self) -> int:
        """The deadline, nanoseconds since the epoch; 0 without one that is to come."""
        if self.deadline is None:
            return 0
        left = self.deadline - time.monotonic()
        return time.time_ns() + int(left * 1e9) if left > 0 else 0

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def tell(self, told: Told) -> None:
        for watch in self.watches:
            watch.tell(told)
