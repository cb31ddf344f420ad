"""What rewinds and restores have for themselves: threads, and directories in which files change.

Owns the lock of everything about runs: who begins something and who begins to hold exclude each other by it, so that a
holder, once it holds, sees all that had begun. Within it rows are written; no other lock is taken within it, and it is
never taken within a transaction that writes. Must not know what begins.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.mounts import is_within
from cogfs.v1.reasons import Reason

_Key = TypeVar("_Key")

#: Seconds after which one that waits looks whether it is still wanted.
_LOOK = 0.5


def overlap(one: bytes, other: bytes) -> bool:
    """One of two roots holds the other, or is it."""
    return is_within(one, other) or is_within(other, one)


class Holds:
    """Safe from any thread. ``changed`` is notified when a hold ends, and when what others wait for may have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._threads: Counter[str] = Counter()
        self._roots: Counter[bytes] = Counter()
        self._closed = False

    @contextmanager
    def thread(self, thread_id: str) -> Iterator[None]:
        """No run begins in the thread until the block ends. Several may hold one thread; they have its lock in turn."""
        yield from self._held(self._threads, thread_id)

    @contextmanager
    def root(self, root: bytes) -> Iterator[None]:
        """Nothing begins in workspaces that overlap ``root`` until the block ends."""
        yield from self._held(self._roots, root)

    def _held(self, table: Counter[_Key], key: _Key) -> Iterator[None]:
        with self.changed:
            table[key] += 1
        try:
            yield
        finally:
            with self.changed:
                table[key] -= 1
                if not table[key]:
                    del table[key]
                self.changed.notify_all()

    def holds(self, thread_id: str, root: bytes | None) -> bool:
        """Whether somebody has the thread, or what overlaps ``root``, for itself. Used within ``changed``."""
        return thread_id in self._threads or (root is not None and any(overlap(root, one) for one in self._roots))

    @contextmanager
    def admitted(
        self, thread_id: str, root: bytes | None, wait: Callable[[], None], refusal: CogfsError | None = None
    ) -> Iterator[None]:
        """The block begins when nobody holds, and nobody begins to hold in it.

        ``wait`` is called before each wait, and raises when that makes no sense any more. ``refusal`` is raised
        instead of waiting. UNAVAILABLE when the daemon stops.
        """
        with self.changed:
            while True:
                if self._closed:
                    raise stopping()
                if not self.holds(thread_id, root):
                    break
                if refusal is not None:
                    raise refusal
                wait()
                self.changed.wait(_LOOK)
            yield

    def close(self) -> None:
        """The daemon stops: nothing begins any more."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


def stopping() -> CogfsError:
    return CogfsError(Reason.UNAVAILABLE, "the daemon is stopping; try again when it is back")
