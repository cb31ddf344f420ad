"""Runs and their tool calls: how they begin, are held, told to stop, and end.

The rows are the truth; in memory is only who is there to hold them (``presence``). Everything is within the lock of
``holds``. Knows neither files nor conversations, and not what a rewind does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.fsd.control.holds import Holds, stopping
from cogfs.fsd.control.patience import Patience
from cogfs.fsd.control.presence import Holder, Told, Watch
from cogfs.store.errors import NotFound, StoreError
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import PolicyRow, RunKind, RunRow, RunState, RunStrategy, ToolCallRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Runs that go on at the same time, and tool calls of one.
_MAX = 1000
#: Runs that are over and still known.
_REMEMBERED = 200
#: Seconds between two looks for holders that are late, at the most.
_LOOK = 60.0

OVER = frozenset({RunState.ENDED, RunState.INTERRUPTED})

_GONE = "the connection of its holder ended"
#: Why a rewind drops a run.
REWOUND = "the conversation was rewound"


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is asked for."""

    thread_id: str
    kind: RunKind
    workspace_id: str = ""
    run_id: str = ""
    agent: str = ""
    holder: str = ""
    strategy: RunStrategy = RunStrategy.WAIT
    checkpoints: PolicyRow | None = None
    parent_run_id: str = ""
    parent_tool_call_id: str = ""
    lease_ns: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """A run as it is now."""

    row: RunRow
    open_tool_calls: tuple[ToolCallRow, ...]
    #: Nanoseconds since the epoch; 0: no lease runs.
    lease_until_ns: int


def refuse_over(row: RunRow) -> None:
    """RUN_INTERRUPTED or VALIDATION_ERROR for a run that cannot go on."""
    if row.state is RunState.ENDED:
        raise invalid(f"the run {row.id} has ended")
    if row.state is RunState.INTERRUPTED or row.stopping:
        raise CogfsError(Reason.RUN_INTERRUPTED, f"the run {row.id} was stopped: {row.why}", why=row.why)
    if row.state is RunState.LAPSED:
        why = "its lease ran out"
        raise CogfsError(Reason.RUN_INTERRUPTED, f"the run {row.id} was stopped: {why}; renew it to go on", why=why)


def drop(writer: Writer, run_ids: Iterable[str], why: str) -> None:
    """Make runs INTERRUPTED, in a transaction with what that is for. Those that are over or unknown are left."""
    for run_id in run_ids:
        with suppress(NotFound):
            row = writer.run(run_id)
            if row.state not in OVER:
                writer.put_run(_over(row, RunState.INTERRUPTED, why))


def _over(row: RunRow, state: RunState, why: str) -> RunRow:
    return msgspec.structs.replace(row, state=state, why=why, stopping=False, ended_ns=time.time_ns())


class Runs:
    """All runs of the store. Safe from any thread."""

    def __init__(self, store: Store, holds: Holds, patience: Patience) -> None:
        """Those that went on when the daemon before ended go on, and their holders have the grace to come back."""
        self._store = store
        self._holds = holds
        self._lock = holds.changed
        self._patience = patience
        self._holders: dict[str, Holder] = {}
        with store.read() as reader:
            busy = {call.run_id for call in reader.tool_calls()}
            for row in reader.runs():
                if row.state is RunState.GOING or row.id in busy:
                    holder = self._holders.setdefault(row.id, Holder())
                    holder.give(max(patience.grace, row.lease_ns / 1e9 if row.kind is RunKind.DURABLE else 0))
        self._thread = threading.Thread(target=self._look_for_late, name="runs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The daemon stops, and holders are to come back to the next one. ``holds`` is closed already."""
        with self._lock:
            for holder in self._holders.values():
                for watch in holder.watches:
                    watch.wake()
            self._lock.notify_all()
        self._thread.join()

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def start(self, new: NewRun, wanted: Callable[[], bool]) -> Standing:
        """Register a run, once nobody holds its thread and workspace. The errors are those of StartRun.

        ``wanted`` says whether the caller is still there.
        """
        with self._store.read() as reader:
            thread = reader.thread(new.thread_id)
            workspace_id = new.workspace_id or thread.workspace_id
            root = reader.workspace(workspace_id).root if workspace_id else None
            self._check_new(reader, new)
        with self._holds.admitted(thread.id, root, _still(wanted), _rejection(new.strategy)):
            with self._store.write(objects=False) as writer:
                self._check_new(writer, new)
                row = RunRow(
                    id=new.run_id or new_id("run"),
                    thread_id=thread.id,
                    workspace_id=workspace_id,
                    agent=new.agent or writer.thread(thread.id).agent,
                    kind=new.kind,
                    holder=new.holder,
                    strategy=new.strategy,
                    state=RunState.GOING,
                    started_ns=time.time_ns(),
                    lease_ns=new.lease_ns,
                    parent_run_id=new.parent_run_id,
                    parent_tool_call_id=new.parent_tool_call_id,
                    checkpoints=new.checkpoints,
                )
                writer.put_run(row)
            self._expect(row)
            return self._standing(row, ())

    def _check_new(self, reader: Reader, new: NewRun) -> None:
        thread = reader.thread(new.thread_id)
        workspace_id = new.workspace_id or thread.workspace_id
        if workspace_id:
            reader.workspace(workspace_id)
        for journal in reader.journals():
            if journal.thread is not None and journal.thread.id == thread.id:
                raise CogfsError(
                    Reason.THREAD_BUSY,
                    "a rewind of the thread was interrupted and is not finished: run cogfsctl mount to finish it",
                )
        if new.run_id and reader.has_run(new.run_id):
            raise CogfsError(Reason.ALREADY_EXISTS, f"there is a run {new.run_id} already")
        if new.parent_run_id:
            parent = reader.run(new.parent_run_id)
            if parent.state is not RunState.GOING:
                raise invalid(f"the run {parent.id} does not go on, so no tool call of it starts another")
            if reader.tool_call(parent.id, new.parent_tool_call_id) is None:
                raise NotFound(f"no tool call {new.parent_tool_call_id} of run {parent.id} goes on")
        if sum(row.state not in OVER for row in reader.runs()) >= _MAX:
            raise CogfsError(Reason.UNAVAILABLE, f"{_MAX:,} runs go on already: end some of them")

    def _expect(self, row: RunRow) -> None:
        """The time of its holder begins."""
        holder = self._holders.setdefault(row.id, Holder())
        if row.kind is RunKind.DURABLE:
            holder.give(row.lease_ns / 1e9)
        elif not holder.watches:
            holder.give(self._patience.grace)
        self._lock.notify_all()

    def renew(self, run_id: str, holder: str, wanted: Callable[[], bool]) -> Standing:
        """Begin the lease anew; take the run up again when it has run out. The errors are those of RenewRun."""

        def check(reader: Reader) -> RunRow:
            row = reader.run(run_id)
            if row.kind is not RunKind.DURABLE:
                raise invalid(f"the run {run_id} is plain, and has no lease: its holder's connection holds it")
            if row.state is not RunState.LAPSED:
                refuse_over(row)
                if holder and holder != row.holder and self._leased(run_id):
                    raise CogfsError(
                        Reason.THREAD_BUSY,
                        f"{row.holder or 'another'} holds the run {run_id} until the lease ends",
                    )
            return row

        with self._lock:
            with self._store.read() as reader:
                row = check(reader)
            if row.state is not RunState.LAPSED and holder in ("", row.holder):
                # Nothing of it changes but the time, which is in memory.
                self._expect(row)
                return self._standing(row)
        return self._go_on(row, check, holder, wanted)

    def resume(self, run_id: str, holder: str, wanted: Callable[[], bool]) -> Standing:
        """Let a paused run go on. The errors are those of ResumeRun."""

        def check(reader: Reader) -> RunRow:
            row = reader.run(run_id)
            refuse_over(row)
            return row

        with self._store.read() as reader:
            row = check(reader)
        return self._go_on(row, check, holder, wanted)

    def _go_on(
        self, row: RunRow, check: Callable[[Reader], RunRow], holder: str, wanted: Callable[[], bool]
    ) -> Standing:
        with self._store.read() as reader:
            root = reader.workspace(row.workspace_id).root if row.workspace_id else None
        still = _still(wanted)

        def wait() -> None:
            still()
            with self._store.read() as reader:
                check(reader)

        with self._holds.admitted(row.thread_id, root, wait, _rejection(row.strategy)):
            with self._store.write(objects=False) as writer:
                before = check(writer)
                row = msgspec.structs.replace(before, state=RunState.GOING, holder=holder or before.holder)
                if row != before:
                    writer.put_run(row)
            self._expect(row)
            return self._standing(row)

    def pause(self, run_id: str) -> Standing:
        """The run needs no holder until it is resumed."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                row = writer.run(run_id)
                refuse_over(row)
                row = msgspec.structs.replace(row, state=RunState.PAUSED)
                writer.put_run(row)
                calls = writer.tool_calls(run_id)
            holder = self._holders.get(run_id)
            if holder is not None and row.kind is RunKind.PLAIN and not calls:
                holder.deadline = None
            return self._standing(row)

    def end(self, run_id: str) -> Standing:
        """The run is over; INTERRUPTED when it had been told to stop."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                row = writer.run(run_id)
                if row.state not in OVER:
                    row = _over(row, RunState.INTERRUPTED if row.stopping else RunState.ENDED, row.why)
                    writer.put_run(row)
                    _forget_oldest(writer)
            self._tell(row)
            return self._standing(row)

    # --- being told to stop -------------------------------------------------------------------------------------------

    def interrupt(self, run_ids: Iterable[str], why: str) -> None:
        """Runs are over at once, and those that they started from tool calls; their holders are told."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                rows = writer.runs()
                ids = set(run_ids)
                while True:
                    below = {row.id for row in rows if row.parent_run_id in ids and row.state not in OVER} - ids
                    if not below:
                        break
                    ids |= below
                drop(writer, sorted(ids), why)
                _forget_oldest(writer)
            self.refresh()

    def ask_to_stop(self, run_ids: Iterable[str], why: str) -> None:
        """Holders of leases are told to stop. No lease is renewed any more, and none is broken."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                for run_id in run_ids:
                    row = writer.run(run_id)
                    if row.state is RunState.GOING and not row.stopping:
                        writer.put_run(msgspec.structs.replace(row, stopping=True, why=why))
            self.refresh()

    def refresh(self) -> None:
        """Tell holders what the rows say: somebody else may have written them."""
        with self._lock:
            with self._store.read() as reader:
                rows = [reader.run(run_id) for run_id in self._holders if reader.has_run(run_id)]
            for row in rows:
                if row.state in OVER or row.stopping:
                    self._tell(row)
            self._lock.notify_all()

    def _tell(self, row: RunRow) -> None:
        holder = self._holders.get(row.id)
        if holder is None:
            return
        if row.state not in OVER:
            holder.tell(Told(row.why))
            return
        with self._store.read() as reader:
            going = bool(reader.tool_calls(row.id))
        if going:
            # Its holder stays, so that they are known to go on.
            holder.tell(Told(row.why))
        else:
            holder.tell(Told(row.why, over=True))
            del self._holders[row.id]
        self._lock.notify_all()

    # --- tool calls ---------------------------------------------------------------------------------------------------

    def begin_tool_call(self, run_id: str, tool_call_id: str, name: str, wanted: Callable[[], bool]) -> ToolCallRow:
        """The errors are those of BeginToolCall. Waits while a restore changes the files of the run's workspace."""
        still = _still(wanted)

        def check(reader: Reader) -> RunRow:
            row = reader.run(run_id)
            refuse_over(row)
            if row.state is RunState.PAUSED:
                raise invalid(f"the run {run_id} is paused: resume it first")
            return row

        def wait() -> None:
            still()
            with self._store.read() as reader:
                check(reader)

        with self._store.read() as reader:
            row = check(reader)
            root = reader.workspace(row.workspace_id).root if row.workspace_id else None
        with self._holds.admitted("", root, wait), self._store.write(objects=False) as writer:
            row = check(writer)
            if tool_call_id and writer.tool_call(run_id, tool_call_id) is not None:
                raise CogfsError(Reason.ALREADY_EXISTS, f"the run {run_id} has a tool call {tool_call_id} already")
            if len(writer.tool_calls(run_id)) >= _MAX:
                raise invalid(f"{_MAX:,} tool calls of the run {run_id} have not ended: end some of them")
            call = ToolCallRow(tool_call_id or new_id("call"), run_id, name, time.time_ns())
            writer.put_tool_call(call)
            writer.put_run(msgspec.structs.replace(row, tool_calls=row.tool_calls + 1))
        return call

    def end_tool_call(self, run_id: str, tool_call_id: str) -> None:
        """NotFound when no such call goes on."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                row = writer.run(run_id)
                if writer.tool_call(run_id, tool_call_id) is None:
                    raise NotFound(f"no tool call {tool_call_id} of run {run_id} goes on")
                writer.delete_tool_call(run_id, tool_call_id)
            if row.state in OVER:
                self._tell(row)
            self._lock.notify_all()

    # --- holders ------------------------------------------------------------------------------------------------------

    def watch(self, run_id: str) -> Watch:
        """A stream of the holder, to be given to ``unwatch``. NotFound."""
        with self._lock:
            self.refuse_stopping()
            with self._store.read() as reader:
                row = reader.run(run_id)
            watch = Watch(run_id)
            holder = self._holders.setdefault(run_id, Holder())
            holder.watches.append(watch)
            if row.kind is RunKind.PLAIN:
                holder.deadline = None
            if row.state in OVER or row.stopping:
                self._tell(row)
            return watch

    def refuse_stopping(self) -> None:
        """UNAVAILABLE when the daemon stops: the holder is to open a stream of the next one."""
        if self._holds.closed:
            raise stopping()

    def unwatch(self, watch: Watch) -> None:
        """The stream ended. A PLAIN run is over with its last one, unless the daemon itself stops."""
        with self._lock:
            holder = self._holders.get(watch.run_id)
            if holder is None or self._holds.closed:
                return
            holder.watches.remove(watch)
            if not holder.watches and (holder.deadline is None or holder.late):
                self._gone(watch.run_id)

    def _leased(self, run_id: str) -> bool:
        holder = self._holders.get(run_id)
        return holder is not None and holder.deadline is not None and not holder.late

    def _gone(self, run_id: str) -> None:
        """Nobody holds it any more: no stream is open, and no lease runs."""
        holder = self._holders.pop(run_id, None)
        over: RunRow | None = None
        with self._store.write(objects=False) as writer:
            with suppress(NotFound):
                row = writer.run(run_id)
                if row.state is RunState.GOING and row.kind is RunKind.DURABLE and not row.stopping:
                    over = msgspec.structs.replace(row, state=RunState.LAPSED)
                elif row.state is RunState.GOING:
                    over = _over(row, RunState.INTERRUPTED, row.why or _GONE)
                if over is not None:
                    writer.put_run(over)
                    _log.info("a run has lost its holder", run=run_id, thread=row.thread_id, state=over.state.name)
            for call in writer.tool_calls(run_id):
                writer.delete_tool_call(run_id, call.id)
            _forget_oldest(writer)
        if holder is not None and over is not None and over.state in OVER:
            holder.tell(Told(over.why, over=True))
        self._lock.notify_all()

    def _look_for_late(self) -> None:
        with self._lock:
            while not self._holds.closed:
                for run_id, holder in list(self._holders.items()):
                    if holder.late:
                        self._late(run_id, holder)
                deadlines = [one.deadline for one in self._holders.values() if one.deadline is not None]
                left = min(deadlines) - time.monotonic() if deadlines else _LOOK
                self._lock.wait(min(max(left, 0.05), _LOOK))

    def _late(self, run_id: str, holder: Holder) -> None:
        if holder.watches:
            # Its process is there, so a tool call of it may be too; but the lease has run out.
            with self._store.write(objects=False) as writer, suppress(NotFound):
                row = writer.run(run_id)
                if row.state is RunState.GOING:
                    lapsed = msgspec.structs.replace(row, state=RunState.LAPSED)
                    writer.put_run(_over(row, RunState.INTERRUPTED, row.why) if row.stopping else lapsed)
            holder.deadline = None
            self.refresh()
            return
        try:
            self._gone(run_id)
        except StoreError as error:
            _log.warning("the end of a run cannot be written down", run=run_id, error=str(error))
            self._holders[run_id] = holder
            holder.give(1.0)

    # --- looking ------------------------------------------------------------------------------------------------------

    def get(self, run_id: str) -> Standing:
        """NotFound."""
        with self._lock:
            with self._store.read() as reader:
                row = reader.run(run_id)
            return self._standing(row)

    def all(self) -> list[Standing]:
        """The newest first, also those that are over."""
        with self._lock:
            with self._store.read() as reader:
                rows = sorted(reader.runs(), key=lambda row: (-row.started_ns, row.id))
                calls: dict[str, list[ToolCallRow]] = {}
                for call in reader.tool_calls():
                    calls.setdefault(call.run_id, []).append(call)
            return [self._standing(row, tuple(calls.get(row.id, ()))) for row in rows]

    def _standing(self, row: RunRow, calls: tuple[ToolCallRow, ...] | None = None) -> Standing:
        if calls is None:
            with self._store.read() as reader:
                calls = tuple(reader.tool_calls(row.id))
        holder = self._holders.get(row.id)
        leased = row.kind is RunKind.DURABLE and row.state not in OVER and holder is not None
        return Standing(row, calls, holder.until_ns() if leased and holder is not None else 0)


def _still(wanted: Callable[[], bool]) -> Callable[[], None]:
    """What raises once the caller has gone."""

    def check() -> None:
        if not wanted():
            raise CogfsError(Reason.UNAVAILABLE, "nobody waits for the answer any more")

    return check


def _rejection(strategy: RunStrategy) -> CogfsError | None:
    if strategy is not RunStrategy.REJECT:
        return None
    return CogfsError(
        Reason.THREAD_BUSY, "a rewind or a restore is under way, and the run's strategy is not to wait for it"
    )


def _forget_oldest(writer: Writer) -> None:
    """Of the runs that are over only the last ones stay."""
    over = [row for row in writer.runs() if row.state in OVER]
    busy = {call.run_id for call in writer.tool_calls()}
    over.sort(key=lambda row: row.ended_ns)
    for row in over[: max(0, len(over) - _REMEMBERED)]:
        if row.id not in busy:
            writer.delete_run(row.id)
