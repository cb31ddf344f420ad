"""Runs and their tool calls: how they begin, are held, told to stop, and end.

The rows are the truth; in memory is only who is there to hold them (``holders``). Everything is within the lock of
``holds``. Knows neither files nor conversations, and not what a rewind does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.fsd.control.holders import Holders
from cogfs.fsd.control.holds import Holds
from cogfs.fsd.control.runstates import OVER, drop, forget_oldest, over, refuse_over
from cogfs.store.errors import NotFound
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader
from cogfs.store.schema import PolicyRow, RunKind, RunRow, RunState, RunStrategy, ToolCallRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

#: Runs that go on at the same time, and tool calls of one.
_MAX = 1000


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


class Runs:
    """All runs of the store. Safe from any thread."""

    def __init__(self, store: Store, holds: Holds, holders: Holders) -> None:
        """Those that went on when the daemon before ended go on."""
        self._store = store
        self._holds = holds
        self._lock = holds.changed
        self._holders = holders

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
                _refuse_unfinished(writer, thread.id)
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
            self._holders.expect(row)
            return self._standing(row, ())

    def _check_new(self, reader: Reader, new: NewRun) -> None:
        thread = reader.thread(new.thread_id)
        workspace_id = new.workspace_id or thread.workspace_id
        if workspace_id:
            reader.workspace(workspace_id)
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

    def renew(self, run_id: str, holder: str, wanted: Callable[[], bool]) -> Standing:
        """Begin the lease anew; take the run up again when it has run out. The errors are those of RenewRun."""

        def check(reader: Reader) -> RunRow:
            row = reader.run(run_id)
            if row.kind is not RunKind.DURABLE:
                raise invalid(f"the run {run_id} is plain, and has no lease: its holder's connection holds it")
            if row.state is not RunState.LAPSED:
                refuse_over(row)
                if holder and holder != row.holder and self._holders.leased(run_id):
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
                self._holders.expect(row)
                return self._standing(row)
        return self._go_on(row, check, holder, wanted, RunState.GOING if row.state is RunState.LAPSED else row.state)

    def resume(self, run_id: str, holder: str, wanted: Callable[[], bool]) -> Standing:
        """Let a paused run go on. The errors are those of ResumeRun."""

        def check(reader: Reader) -> RunRow:
            row = reader.run(run_id)
            refuse_over(row)
            return row

        with self._lock:
            with self._store.read() as reader:
                row = check(reader)
            if row.state is RunState.GOING:
                return self._standing(row)
        return self._go_on(row, check, holder, wanted, RunState.GOING)

    def _go_on(
        self,
        row: RunRow,
        check: Callable[[Reader], RunRow],
        holder: str,
        wanted: Callable[[], bool],
        state: RunState,
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
                _refuse_unfinished(writer, row.thread_id)
                row = msgspec.structs.replace(before, state=state, holder=holder or before.holder)
                if row != before:
                    writer.put_run(row)
            self._holders.expect(row)
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
            if row.kind is RunKind.PLAIN and not calls:
                self._holders.need_none(run_id)
            return self._standing(row)

    def end(self, run_id: str) -> Standing:
        """The run is over; INTERRUPTED when it had been told to stop."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                row = writer.run(run_id)
                if row.state not in OVER:
                    row = over(row, RunState.INTERRUPTED if row.stopping else RunState.ENDED, row.why)
                    writer.put_run(row)
                    forget_oldest(writer)
            self._holders.tell(row)
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
                forget_oldest(writer)
            self._holders.refresh()

    def ask_to_stop(self, run_ids: Iterable[str], why: str) -> None:
        """Holders of leases are told to stop. No lease is renewed any more, and none is broken."""
        with self._lock:
            with self._store.write(objects=False) as writer:
                for run_id in run_ids:
                    row = writer.run(run_id)
                    if row.state is RunState.GOING and not row.stopping:
                        writer.put_run(msgspec.structs.replace(row, stopping=True, why=why))
            self._holders.refresh()

    def refresh(self) -> None:
        """Tell holders what the rows say, after somebody else has written them."""
        self._holders.refresh()

    def is_over(self, run_id: str) -> bool:
        """It has ended, was stopped, or is not known any more."""
        with self._store.read() as reader:
            return not reader.has_run(run_id) or reader.run(run_id).state in OVER

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
                self._holders.tell(row)
            self._lock.notify_all()

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
        leased = row.kind is RunKind.DURABLE and row.state not in OVER
        return Standing(row, calls, self._holders.lease_until_ns(row.id) if leased else 0)


def _refuse_unfinished(reader: Reader, thread_id: str) -> None:
    """Of a rewind that is under way, and so holds the thread, this says nothing: that is waited for."""
    for journal in reader.journals():
        if journal.thread is not None and journal.thread.id == thread_id:
            raise CogfsError(
                Reason.THREAD_BUSY,
                "a rewind of the thread was interrupted and is not finished: run cogfsctl mount to finish it",
            )


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
