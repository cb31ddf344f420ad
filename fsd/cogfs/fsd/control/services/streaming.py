"""Work that goes on when its client goes away, and what it tells meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from cogfs.fsd.control.completion import Progress
from cogfs.v1 import snapshot_pb2

Result = TypeVar("Result")


class Apart(Generic[Result]):
    """One piece of work in a thread of its own. ``result`` is there once ``progress`` has come to its end."""

    def __init__(self, name: str, work: Callable[[Progress], Result]) -> None:
        self._events: queue.SimpleQueue[snapshot_pb2.RestoreProgress | None] = queue.SimpleQueue()
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._shown = (-1, -1)
        threading.Thread(target=self._run, name=name).start()

    def _run(self) -> None:
        try:
            self._results.append(self._work(self._told))
        except BaseException as error:
            self._error = error
        self._events.put(None)

    def _told(self, phase: snapshot_pb2.RestoreProgress.Phase.ValueType, done: int, total: int) -> None:
        # At most a hundred or so for each phase.
        share = done * 100 // total if total else 0
        if self._shown != (phase, share):
            self._shown = (phase, share)
            self._events.put(snapshot_pb2.RestoreProgress(phase=phase, done=done, total=total))

    def progress(self) -> Iterator[snapshot_pb2.RestoreProgress]:
        """What it tells, until it has ended. Raises what it raised."""
        while (event := self._events.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> Result:
        return self._results[0]
