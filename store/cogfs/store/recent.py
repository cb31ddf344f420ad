"""Which objects somebody may be about to name in a row, though no row names them yet.

A collection must not drop what a caller got the name of a moment ago: by a put, by a put that found the object there
already, or out of a row that was replaced since. Three things tell which objects that may be:

- *Where an object lies.* Packs only grow, so what was put since a moment lies behind the place where they ended then.
- *Touched names*: objects that were there when they were put, or asked for, again.
- *Operations* under way, which may hold any name that they met since they began.

All of it is in memory. What a process had put and not named in a row by its end is nobody's.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cogfs.store.schema import Hash

#: Seconds for which an object that nothing needs is kept, if nothing else is said.
GRACE = 3600.0
#: Seconds between two moments of which it is remembered where the packs ended.
_INTERVAL = 60.0
#: Names that are touched before those that are old are looked for.
_MANY = 10_000

#: Number of a pack, and an offset in it. What is put later has a greater one.
Position = tuple[int, int]


class Fresh(NamedTuple):
    """What is kept for being new."""

    #: Objects here and behind.
    since: Position
    names: set[Hash]


class Recent:
    """What was put, touched and begun of late. Its methods may be called by many threads."""

    def __init__(self, end: Callable[[], Position]) -> None:
        """``end`` says where the next record will be, or before that."""
        self._end = end
        self._condition = threading.Condition(threading.Lock())
        self._ids = itertools.count(1)
        #: By number: when it began, and where the packs ended then.
        self._operations: dict[int, tuple[float, Position]] = {}
        self._moments: deque[tuple[float, Position]] = deque([(time.monotonic(), end())])
        self._touched: dict[Hash, float] = {}
        self._many = _MANY

    def touch(self, name: Hash) -> None:
        """Somebody has the name of an object that was there."""
        self._touched[name] = time.monotonic()
        if len(self._touched) > self._many:
            with self._condition:
                self._forget(time.monotonic() - GRACE)

    def untouch(self, name: Hash) -> None:
        """It was put, which tells as much."""
        self._touched.pop(name, None)

    def pass_by(self) -> None:
        """Something is about to be put."""
        now = time.monotonic()
        if now - self._moments[-1][0] > _INTERVAL:
            with self._condition:
                self._remember(now)

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Names that are met within the block stay those of objects until it ends."""
        with self._condition:
            number = next(self._ids)
            self._operations[number] = (time.monotonic(), self._end())
        try:
            yield
        finally:
            with self._condition:
                del self._operations[number]
                self._condition.notify_all()

    def wait(self, patience: float, goes_on: Callable[[], bool]) -> bool:
        """Wait until all operations that are under way now have ended, ``patience`` seconds at most. Whether they
        have."""
        deadline = time.monotonic() + patience
        with self._condition:
            begun = set(self._operations)
            while begun & self._operations.keys():
                left = deadline - time.monotonic()
                if left <= 0 or not goes_on():
                    return False
                self._condition.wait(min(left, 0.5))
        return True

    def now(self) -> float:
        """This moment, which is remembered."""
        with self._condition:
            now = time.monotonic()
            self._remember(now)
            return now

    def fresh(self, grace: float, also_since: float) -> Fresh:
        """What is kept: all that was put or touched within ``grace`` seconds, since the oldest operation under way
        began, or since ``also_since`` on the monotonic clock."""
        with self._condition:
            now = time.monotonic()
            self._remember(now)
            limit = min([now - grace, also_since, *(began for began, _ in self._operations.values())])
            since = self._moments[0][1]
            for moment, position in self._moments:
                if moment > limit:
                    break
                since = position
            since = min([since, *(position for _, position in self._operations.values())])
            # Others may touch meanwhile; a copy is made in one step.
            touched = list(self._touched.items())
        return Fresh(since, {name for name, moment in touched if moment >= limit})

    def _remember(self, now: float) -> None:
        self._moments.append((now, self._end()))
        # All but the last of those that are past every grace.
        while len(self._moments) > 2 and self._moments[1][0] < now - GRACE:
            self._moments.popleft()

    def _forget(self, limit: float) -> None:
        limit = min([limit, *(began for began, _ in self._operations.values())])
        for name, moment in list(self._touched.items()):
            if moment < limit and self._touched.get(name) == moment:
                self._touched.pop(name, None)
        self._many = max(_MANY, 2 * len(self._touched))
