"""Whether the holders of runs are there: their streams, and the time that each has left.

That is in memory alone; what becomes of a run without a holder is written into its row. Everything is within the lock
of ``holds``. Must not know how a run begins.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import msgspec
import structlog

from cogfs.fsd.control.holds import Holds, stopping
from cogfs.fsd.control.patience import Patience
from cogfs.fsd.control.runstates import OVER, forget_oldest, over
from cogfs.store.errors import NotFound, StoreError
from cogfs.store.schema import RunKind, RunRow, RunState
from cogfs.store.store import Store

_log = structlog.get_logger(__name__)

#: Seconds between two looks for holders that are late, at the least and at the most.
_SOON, _LOOK = 0.05, 60.0
#: Seconds after which what could not be written is tried again.
_AGAIN = 1.0

_GONE = "the connection of its holder ended"


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
        """Its reader looks whether its caller, and the daemon, are still there."""
        self._queue.put(None)

    def next(self, timeout: float) -> Told | None:
        """What comes next; None when that is nothing, or the reader is to look."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None


@dataclass(slots=True)
class _Holder:
    """The holder of one run."""

    watches: list[Watch] = field(default_factory=list)
    #: When it has to have shown itself (a stream, a renewal), on the monotonic clock; None: there is no such time.
    deadline: float | None = None

    def give(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def tell(self, told: Told) -> None:
        for watch in self.watches:
            watch.tell(told)


class Holders:
    """The holders of all runs. Safe from any thread."""

    def __init__(self, store: Store, holds: Holds, patience: Patience) -> None:
        """Those of the daemon before have the grace to come back, and a lease runs for as long as it is."""
        self._store = store
        self._holds = holds
        self._lock = holds.changed
        self._patience = patience
        self._holders: dict[str, _Holder] = {}
        with store.read() as reader:
            busy = {call.run_id for call in reader.tool_calls()}
            for row in reader.runs():
                if row.state is RunState.GOING or row.id in busy:
                    lease = row.lease_ns / 1e9 if row.kind is RunKind.DURABLE else 0
                    self._holders.setdefault(row.id, _Holder()).give(max(patience.grace, lease))
        self._thread = threading.Thread(target=self._look_for_late, name="holders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The daemon stops, and holders are to come to the next one. ``holds`` is closed already."""
        with self._lock:
            for holder in self._holders.values():
                for watch in holder.watches:
                    watch.wake()
            self._lock.notify_all()
        self._thread.join()

    # --- who is there -------------------------------------------------------------------------------------------------

    def expect(self, row: RunRow) -> None:
        """The run begins, or its lease does: its holder has its time from now on."""
        with self._lock:
            holder = self._holders.setdefault(row.id, _Holder())
            if row.kind is RunKind.DURABLE:
                holder.give(row.lease_ns / 1e9)
            elif not holder.watches:
                holder.give(self._patience.grace)
            self._lock.notify_all()

    def need_none(self, run_id: str) -> None:
        """The run is paused, and nothing of it goes on that would end with its holder."""
        with self._lock:
            holder = self._holders.get(run_id)
            if holder is not None:
                holder.deadline = None

    def leased(self, run_id: str) -> bool:
        """Whether a lease of it runs."""
        return self.lease_until_ns(run_id) > 0

    def lease_until_ns(self, run_id: str) -> int:
        """When its holder's time is over, nanoseconds since the epoch; 0 when there is none that runs."""
        with self._lock:
            holder = self._holders.get(run_id)
            if holder is None or holder.deadline is None or holder.late:
                return 0
            return time.time_ns() + int((holder.deadline - time.monotonic()) * 1e9)

    def watch(self, run_id: str) -> Watch:
        """A stream of the holder, to be given to ``unwatch``. NotFound; UNAVAILABLE when the daemon stops."""
        with self._lock:
            self.refuse_stopping()
            with self._store.read() as reader:
                row = reader.run(run_id)
            watch = Watch(run_id)
            holder = self._holders.setdefault(run_id, _Holder())
            holder.watches.append(watch)
            if row.kind is RunKind.PLAIN:
                holder.deadline = None
            if row.state in OVER or row.stopping:
                self.tell(row)
            return watch

    def refuse_stopping(self) -> None:
        """UNAVAILABLE when the daemon stops: the holder is to open a stream of the next one."""
        if self._holds.closed:
            raise stopping()

    def unwatch(self, watch: Watch) -> None:
        """The stream ended. A PLAIN run is over with its last one, unless the daemon itself stops."""
        with self._lock:
            holder = self._holders.get(watch.run_id)
            if holder is None or watch not in holder.watches or self._holds.closed:
                return
            holder.watches.remove(watch)
            if not holder.watches and (holder.deadline is None or holder.late):
                self._late(watch.run_id, holder)

    # --- telling ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Tell holders what the rows say: somebody else may have written them."""
        with self._lock:
            with self._store.read() as reader:
                rows = [reader.run(run_id) for run_id in self._holders if reader.has_run(run_id)]
            for row in rows:
                if row.state in OVER or row.stopping:
                    self.tell(row)
            self._lock.notify_all()

    def tell(self, row: RunRow) -> None:
        """Its holder is told that the run is over, or has to stop."""
        with self._lock:
            holder = self._holders.get(row.id)
            if holder is None:
                return
            with self._store.read() as reader:
                going = row.state not in OVER or bool(reader.tool_calls(row.id))
            # While tool calls go on its holder stays, so that they are known to.
            holder.tell(Told(row.why, over=not going))
            if not going:
                del self._holders[row.id]
            self._lock.notify_all()

    # --- being late ---------------------------------------------------------------------------------------------------

    def _look_for_late(self) -> None:
        with self._lock:
            while not self._holds.closed:
                for run_id, holder in list(self._holders.items()):
                    if holder.late:
                        self._late(run_id, holder)
                deadlines = [one.deadline for one in self._holders.values() if one.deadline is not None]
                left = min(deadlines) - time.monotonic() if deadlines else _LOOK
                self._lock.wait(min(max(left, _SOON), _LOOK))

    def _late(self, run_id: str, holder: _Holder) -> None:
        """Its time is over, and nothing or streams alone are left of the holder."""
        try:
            row = self._written(run_id, calls_too=not holder.watches)
        except StoreError as error:
            _log.warning("the end of a run cannot be written down", run=run_id, error=str(error))
            holder.give(_AGAIN)
            return
        holder.deadline = None
        if not holder.watches:
            self._holders.pop(run_id, None)
        elif row is not None and row.state in OVER:
            self.tell(row)
        self._lock.notify_all()

    def _written(self, run_id: str, *, calls_too: bool) -> RunRow | None:
        """The row of a run that has lost its holder. With a stream its process is there, and tool calls may be, too."""
        found: RunRow | None = None
        with self._store.write(objects=False) as writer:
            with suppress(NotFound):
                found = row = writer.run(run_id)
                if row.state is RunState.GOING and row.kind is RunKind.DURABLE and not row.stopping:
                    found = msgspec.structs.replace(row, state=RunState.LAPSED)
                elif row.state is RunState.GOING:
                    found = over(row, RunState.INTERRUPTED, row.why or _GONE)
                if found != row:
                    writer.put_run(found)
                    _log.info("a run has lost its holder", run=run_id, thread=row.thread_id, state=found.state.name)
            if calls_too:
                for call in writer.tool_calls(run_id):
                    writer.delete_tool_call(run_id, call.id)
            forget_oldest(writer)
        return found
