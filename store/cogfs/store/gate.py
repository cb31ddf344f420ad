"""A lock that many hold together or one alone. Those who wait to be alone come first; a thread may enter again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    value = 0


class Gate:
    """Shared by transactions that read; held alone while the map under them moves."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False
        self._depth = _Depth()

    def enter(self) -> None:
        """Enters together with others; waits while one is, or waits to be, alone."""
        depth = self._depth
        if not depth.value:
            with self._condition:
                while self._alone:
                    self._condition.wait()
                self._inside += 1
        depth.value += 1

    def leave(self) -> None:
        """Undoes one ``enter`` of this thread."""
        depth = self._depth
        depth.value -= 1
        if not depth.value:
            with self._condition:
                self._inside -= 1
                if self._alone:
                    self._condition.notify_all()

    @property
    def entered(self) -> bool:
        """This thread is inside."""
        return self._depth.value > 0

    @property
    def wanted(self) -> bool:
        """Somebody is, or waits to be, alone."""
        return self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody is inside, and keeps everybody out. RuntimeError when this thread is inside itself."""
        if self.entered:
            raise RuntimeError("a thread that reads cannot wait for all readers to end")
        with self._condition:
            while self._alone:
                self._condition.wait()
            self._alone = True
            while self._inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()
