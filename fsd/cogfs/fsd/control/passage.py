"""The way that a rewind or a restore makes for itself: which runs, tool calls and commands are in it, and their end.

Owns the order of it: new ones are kept out first, then those that are there are looked at, and with ``force`` they are
stopped only after a dry run has shown that the rest can be done. No lock of a thread or a workspace is held meanwhile,
as a tool call that ends may need them. Knows what is carried out as a function alone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from cogfs.fsd.control import processes
from cogfs.fsd.control.commands import Commands, Running
from cogfs.fsd.control.errors import BusyBy, CogfsError, busy, invalid
from cogfs.fsd.control.holds import Holds, overlap
from cogfs.fsd.control.patience import Patience
from cogfs.fsd.control.runs import Runs, Standing
from cogfs.fsd.control.runstates import OVER
from cogfs.store.errors import NotFound
from cogfs.store.schema import RunKind, RunState, ToolCallRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds in which a process ends that was sent SIGKILL, unless the kernel has it.
_KILLED = 5.0
#: Seconds between two looks at what is ending: a process that ends tells nobody.
_LOOK = 0.05

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class RunsReport:
    """What a rewind found of runs, and did to them: ids."""

    going: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    durable: tuple[str, ...] = ()


NO_RUNS = RunsReport()


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the way, or would be dropped."""

    #: Runs that go on in the thread, and those of other threads in the workspace.
    here: tuple[Standing, ...] = ()
    elsewhere: tuple[Standing, ...] = ()
    tool_calls: tuple[ToolCallRow, ...] = ()
    commands: tuple[Running, ...] = ()
    #: Runs of the thread that nobody works on.
    paused: tuple[str, ...] = ()
    lapsed: tuple[str, ...] = ()

    @property
    def going(self) -> tuple[Standing, ...]:
        return self.here + self.elsewhere

    @property
    def anything(self) -> bool:
        return bool(self.here or self.elsewhere or self.tool_calls or self.commands)

    def busy_by(self) -> list[BusyBy]:
        return [
            *(_of_run(one) for one in self.going),
            *(_of_call(call) for call in self.tool_calls),
            *(_of_process(one, process.pid) for one in self.commands for process in one.processes),
        ]


def _item(kind: str, id: str, pid: int, command: str, since_ns: int) -> BusyBy:
    return BusyBy(kind=kind, path="", pid=pid, command=command, access="ACCESS_UNSPECIFIED", since_ns=since_ns, id=id)


def _of_run(one: Standing) -> BusyBy:
    row = one.row
    return _item("RUN", row.id, 0, row.agent or row.holder, row.started_ns)


def _of_call(call: ToolCallRow) -> BusyBy:
    return _item("TOOL_CALL", call.run_id, 0, call.name or call.id, call.begun_ns)


def _of_process(one: Running, pid: int) -> BusyBy:
    registered = one.row.processes[0].pid == pid
    return _item("COMMAND", one.row.id, pid, one.row.command if registered else processes.name(pid), one.row.since_ns)


class _MustClear(Exception):
    """Something is in the way that ``force`` may stop, once a dry run has shown that it makes sense."""


@dataclass(slots=True)
class Passage:
    """One rewind or restore on its way. Made by ``Passages``."""

    _passages: Passages
    _stack: ExitStack
    dry_run: bool
    force: bool
    calling_run: str
    #: Reasons of a refusal: for runs of the thread, and for what is in the workspace.
    thread_reason: Reason
    workspace_reason: Reason
    #: Runs as such are in the way, not their tool calls and commands alone.
    of_runs: bool
    _planning: bool = False
    _cleared: bool = False
    _root: bytes | None = None
    _thread_id: str = ""
    _first: Found | None = None
    _found: Found = field(default_factory=Found)
    _interrupted: tuple[str, ...] = ()

    def enter(self, thread_id: str, workspace_id: str) -> tuple[BusyBy, ...]:
        """Called when it is known what is to change: the conversation of a thread, the files of a workspace, or both
        (an empty id: not that). What is in the way refuses it; a dry run gets it told.

        VALIDATION_ERROR when the calling run would have to be stopped for itself, NotFound when there is none.
        """
        self._thread_id = thread_id
        self._passages.check_caller(self.calling_run, thread_id, workspace_id)
        root = self._passages.root(workspace_id) if workspace_id else None
        if root is not None and self._root is None and not self.dry_run:
            self._stack.enter_context(self._passages.holds.root(root))
        self._root = root
        self._found = self._passages.look(thread_id, root, of_runs=self.of_runs)
        if self._first is None:
            self._first = self._found
        if self.dry_run:
            return tuple(self._found.busy_by())
        if self._planning or not self._found.anything:
            return ()
        if self.force and not self._cleared:
            raise _MustClear
        raise self._refusal()

    @property
    def probing(self) -> bool:
        """Whether this is the dry run that shows if the rest can be done, before anything is stopped for it."""
        return self._planning

    def _refusal(self) -> CogfsError:
        found = self._found
        what = _named(found)
        how = "it has not ended in time" if self._cleared else "end it, or force this"
        leased = [one for one in found.going if one.row.stopping]
        if self._cleared and leased:
            how = (
                f"its holder {leased[0].row.holder or ''} was told to stop, and its lease is not renewed any more: "
                "try again when that has run out"
            ).replace("  ", " ")
        reason = self.thread_reason if found.here else self.workspace_reason
        return busy(reason, f"something is in the way: {what}; {how}", found.busy_by())

    @property
    def drops(self) -> tuple[str, ...]:
        """Runs of the thread that go with the entries that are cut."""
        return self._found.paused + self._found.lapsed

    def report(self, *, dropping: bool) -> RunsReport:
        """``dropping``: entries are cut."""
        first = self._first or Found()
        stopped = [
            one.row.id for one in first.here if one.row.kind is RunKind.DURABLE and one.row.id in self._interrupted
        ]
        return RunsReport(
            tuple(one.row.id for one in first.going),
            self._interrupted,
            self._found.paused if dropping else (),
            tuple(dict.fromkeys((*stopped, *(self._found.lapsed if dropping else ())))),
        )

    def pass_through(self, attempt: Callable[[bool], Outcome]) -> Outcome:
        """Carry ``attempt`` out, which calls ``enter`` and is told whether it is to change nothing; a second and a
        third time where the way has to be made first."""
        if self.dry_run:
            return attempt(True)
        try:
            return attempt(False)
        except _MustClear:
            pass
        self._planning = True
        attempt(True)
        self._planning = False
        self._interrupted = self._passages.clear(self._found, self._thread_id, self._root, of_runs=self.of_runs)
        self._cleared = True
        return attempt(False)


class Passages:
    """Makes way for rewinds and restores of one daemon."""

    def __init__(self, store: Store, holds: Holds, runs: Runs, commands: Commands, patience: Patience) -> None:
        self._store = store
        self.holds = holds
        self._runs = runs
        self._commands = commands
        self._patience = patience

    def rewind(
        self,
        thread_id: str,
        attempt: Callable[[Passage, bool], Outcome],
        *,
        dry_run: bool,
        force: bool,
        calling_run: str = "",
    ) -> Outcome:
        """Carry out what moves or copies a thread, and maybe files: THREAD_BUSY and WORKSPACE_BUSY when it may not. No
        run begins in the thread meanwhile, nor, from ``Passage.enter`` on, in the workspace."""
        with ExitStack() as stack:
            if not dry_run:
                stack.enter_context(self.holds.thread(thread_id))
            passage = Passage(
                self, stack, dry_run, force, calling_run, Reason.THREAD_BUSY, Reason.WORKSPACE_BUSY, of_runs=True
            )
            done = passage.pass_through(lambda dry: attempt(passage, dry))
        # It may have dropped runs whose holders are there.
        self._runs.refresh()
        return done

    def undo(
        self, thread_id: str, attempt: Callable[[Passage, bool], Outcome], *, dry_run: bool, force: bool
    ) -> Outcome:
        """As ``rewind``, with BUSY for whatever is in the way; an empty thread: the files alone."""
        with ExitStack() as stack:
            if thread_id and not dry_run:
                stack.enter_context(self.holds.thread(thread_id))
            passage = Passage(self, stack, dry_run, force, "", Reason.BUSY, Reason.BUSY, of_runs=bool(thread_id))
            done = passage.pass_through(lambda dry: attempt(passage, dry))
        if thread_id:
            self._runs.refresh()
        return done

    def restore(self, attempt: Callable[[Passage, bool], Outcome], *, dry_run: bool, force: bool) -> Outcome:
        """Carry out what changes files alone: BUSY for tool calls and commands in the workspace."""
        return self.undo("", attempt, dry_run=dry_run, force=force)

    # --- looking ------------------------------------------------------------------------------------------------------

    def root(self, workspace_id: str) -> bytes:
        """NotFound."""
        with self._store.read() as reader:
            return reader.workspace(workspace_id).root

    def _overlapping(self, root: bytes | None) -> set[str]:
        if root is None:
            return set()
        with self._store.read() as reader:
            return {row.id for row in reader.workspaces() if overlap(row.root, root)}

    def look(self, thread_id: str, root: bytes | None, *, of_runs: bool) -> Found:
        """What is in the way of a thread and of the files below ``root``."""
        places = self._overlapping(root)
        standing = self._runs.all()
        by_id = {one.row.id: one.row for one in standing}
        going = [one for one in standing if one.row.state is RunState.GOING] if of_runs else []
        here = [one for one in standing if thread_id and one.row.thread_id == thread_id]
        return Found(
            here=tuple(one for one in going if thread_id and one.row.thread_id == thread_id),
            elsewhere=tuple(one for one in going if one.row.workspace_id in places and one.row.thread_id != thread_id),
            tool_calls=tuple(
                call for one in standing for call in one.open_tool_calls if by_id[call.run_id].workspace_id in places
            ),
            commands=tuple(self._commands.running(lambda row: row.workspace_id in places)) if places else (),
            paused=tuple(one.row.id for one in here if one.row.state is RunState.PAUSED),
            lapsed=tuple(one.row.id for one in here if one.row.state is RunState.LAPSED),
        )

    def check_caller(self, run_id: str, thread_id: str, workspace_id: str) -> None:
        """VALIDATION_ERROR when a run, or one that waits for it, would have to be stopped for what it asks for."""
        if not run_id:
            return
        root = self.root(workspace_id) if workspace_id else None
        places = self._overlapping(root)
        with self._store.read() as reader:
            row = reader.run(run_id)
            seen = set()
            while row.id not in seen:
                seen.add(row.id)
                if row.state not in OVER and (row.thread_id == thread_id or row.workspace_id in places):
                    where = "thread" if row.thread_id == thread_id else "workspace"
                    whom = "itself" if row.id == run_id else f"the run {row.id} that waits for it"
                    raise invalid(f"the run {run_id} cannot rewind the {where} of {whom}: ask for it from outside")
                if not row.parent_run_id:
                    break
                try:
                    row = reader.run(row.parent_run_id)
                except NotFound:
                    break

    # --- making way ---------------------------------------------------------------------------------------------------

    def clear(self, found: Found, thread_id: str, root: bytes | None, *, of_runs: bool) -> tuple[str, ...]:
        """Stop what is in the way, and wait for its end, or for so long as it has; the ids of the runs that were."""
        why = "a rewind makes way for itself"
        leased = [one.row.id for one in found.going if root is not None and one.row.kind is RunKind.DURABLE]
        others = [one.row.id for one in found.going if one.row.id not in leased]
        if of_runs:
            # Of a run that waits for somebody in the middle of a tool call.
            calling = dict.fromkeys(call.run_id for call in found.tool_calls)
            others += [one for one in calling if one not in (*others, *leased) and not self._runs.is_over(one)]
        _log.info("making way", thread=thread_id, runs=others, leased=leased, commands=len(found.commands))
        if others:
            self._runs.interrupt(others, why)
        if leased:
            self._runs.ask_to_stop(leased, why)
        self._commands.signal(found.commands, signal.SIGTERM)
        self._wait(lambda: self.look(thread_id, root, of_runs=of_runs).anything, self._patience.tool_settle)
        left = self.look(thread_id, root, of_runs=of_runs).commands
        if left:
            _log.warning("commands do not end by SIGTERM", commands=[one.row.command for one in left])
            self._commands.signal(left, signal.SIGKILL)
            self._wait(lambda: bool(self.look("", root, of_runs=False).commands), _KILLED)
        stopped = [*others, *(one for one in leased if self._runs.get(one).row.state is not RunState.GOING)]
        return tuple(stopped)

    def _wait(self, going: Callable[[], bool], patience: float) -> None:
        deadline = time.monotonic() + patience
        while going() and (left := deadline - time.monotonic()) > 0:
            with self.holds.changed:
                self.holds.changed.wait(min(left, _LOOK))


def _named(found: Found) -> str:
    """What is in the way, in a few words."""
    parts = [f"the run {one.row.id}" for one in found.here]
    parts += [f"the run {one.row.id} of thread {one.row.thread_id}" for one in found.elsewhere]
    parts += [f"the tool call {call.name or call.id} of run {call.run_id}" for call in found.tool_calls]
    parts += [
        f"{processes.name(process.pid) or 'a process'} (pid {process.pid}) of the command {one.row.command!r}"
        for one in found.commands
        for process in one.processes
    ]
    shown, rest = parts[:3], len(parts) - 3
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
