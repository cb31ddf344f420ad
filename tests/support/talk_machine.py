"""A state machine: random conversations with memory and runs about two workspaces and those that are made for forks;
rewound, restored, forked, undone and pruned, past runs that are in the way and by daemons that are killed in between,
against the model of what each of that means (``talks``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cogfs.client import (
    AlreadyExists,
    Busy,
    CogfsError,
    Fork,
    NotFound,
    RunInterrupted,
    Thread,
    ThreadBusy,
    ValidationError,
    Workspace,
    WorkspaceBusy,
)
from cogfs.v1 import common_pb2, run_pb2, thread_pb2
from tests.e2e.support.site import wait_for
from tests.support.accounts import Asked, disagreements, learn, of_world, undos_of_world
from tests.support.installation import remove
from tests.support.state_machine import Session
from tests.support.talks import KINDS, OVER, InTheWay, Kept, Talk, Work, World

#: Of files in one directory: their contents by their names.
Files = dict[str, str]
_Item = TypeVar("_Item")

_NAMES = ("a", "b", "c")
#: Longer than any example.
_LEASE = 3000.0
#: What may be done with a run; more often what leaves it there.
_WORK = (
    *("begin", "begin", "begin", "pause", "pause", "resume", "renew", "end", "end", "call", "end call", "end call"),
    *("say", "say", "lapse", "begin elsewhere"),
)

#: What is said, one after the other, and the files that are written before each, with what is remembered by it.
Turn = list[tuple[str, str, str, str]]
_turns: st.SearchStrategy[Turn] = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(_NAMES),
        st.sampled_from(("x", "y", "z", "")),
        st.sampled_from(("", "", "item", "summary", "file")),
    ),
    min_size=1,
    max_size=5,
)
#: For what takes long, or leaves little to go on with.
_rarely = st.sampled_from((False, False, True))


class TalkMachine(RuleBasedStateMachine):
    """``session`` is set by who runs it."""

    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.session.runs += 1
        self.prefix = f"r{self.session.runs}-"
        self.place = self.session.installation.directory / f"talk{self.session.runs}"
        self.roots = [self.place / "one", self.place / "two"]
        self.world: World[Files] = World([{"a": "begin"}, {"b": "other"}])
        self.scanned: list[bool] = []
        for root, files in zip(self.roots, self.world.files, strict=True):
            root.mkdir(parents=True)
            for name, content in files.items():
                (root / name).write_text(content)
        self.made = 0

    @initialize(scanned=st.tuples(st.booleans(), st.booleans()), turns=st.lists(_turns, min_size=3, max_size=6))
    def mount(self, scanned: tuple[bool, bool], turns: list[Turn]) -> None:
        self.scanned = list(scanned)
        for root, scan in zip(self.roots, scanned, strict=True):
            self.session.cog.mount(root, scan=scan)
        self._begin(0)
        self._begin(1)
        for turn in turns:
            self._turn(self._talk(0), turn)

    def teardown(self) -> None:
        try:
            if self.scanned:
                self._check_all()
        finally:
            self._remove()

    def _remove(self) -> None:
        cog = self.session.cog
        for run in list(cog.runs(ended=True)):
            if run.id.startswith(self.prefix):
                for call in run.open_tool_calls:
                    self._end_call(run.id, call.id)
                if run.state not in (run_pb2.Run.ENDED, run_pb2.Run.INTERRUPTED):
                    cog.run(run.id).end()
        for thread in list(cog.threads()):
            if thread.id.startswith(self.prefix):
                thread.delete()
        for workspace in cog.workspaces():
            if Path(workspace.root.decode()).is_relative_to(self.place):
                workspace.unmount(force=True)
                workspace.delete()
        remove(self.place)

    # --- what there is ------------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        self.made += 1
        return f"{self.prefix}{what}{self.made}"

    def _thread(self, talk: Talk[Files]) -> Thread:
        return self.session.cog.thread(talk.id)

    def _workspace(self, place: int) -> Workspace:
        return self.session.cog.workspace(self.roots[place])

    def _one(self, items: list[_Item], number: int) -> _Item:
        return items[number % len(items)]

    def _talk(self, number: int) -> Talk[Files]:
        """One with entries, if there is one; the last ones more often."""
        talks = list(self.world.talks.values())
        talks = [talk for talk in talks if talk.said] or talks
        return self._one([*talks, *talks[-3:]], number)

    def _begin(self, place: int) -> None:
        workspace = self._workspace(place) if place >= 0 else None
        thread = self.session.cog.create_thread(self._name("t"), workspace=workspace)
        self.world.begin(thread.id, place)

    def _check(self, *talks: Talk[Files]) -> None:
        """The daemon says of threads and their runs what the model says; the files are those of the model."""
        asked = Asked(self.session.cog, self.prefix, self.place, self.world)
        ids = [talk.id for talk in talks]
        wrong = disagreements(of_world(self.world, self.roots, ids), asked.account(ids))
        assert not wrong, "\n".join(wrong)
        self._check_files()

    def _check_files(self) -> None:
        for root, files in zip(self.roots, self.world.files, strict=True):
            assert {path.name: path.read_text() for path in root.iterdir()} == files, root

    def _check_all(self) -> None:
        """Everything that can be asked for."""
        asked = Asked(self.session.cog, self.prefix, self.place, self.world)
        wrong = disagreements(of_world(self.world, self.roots), asked.account())
        wrong += disagreements(undos_of_world(self.world, self.roots), asked.undos())
        assert not wrong, "\n".join(wrong)
        self._check_files()
        for talk in self.world.talks.values():
            thread = self._thread(talk)
            assert [entry.id for entry in thread.entries(newest_first=True)] == talk.ids()[::-1]
            self._check_memory(thread, talk)
        for kept in self.world.kept:
            if kept.pruned:
                with pytest.raises(NotFound):
                    self.session.cog.snapshot(kept.id)
            else:
                snapshot = self.session.cog.snapshot(kept.id)
                held = {entry.path.decode(): b"".join(snapshot.cat(entry.path)).decode() for entry in snapshot.ls()}
                assert held == kept.files, kept
        check = self.session.cog.check()
        assert check.ok, check

    def _check_memory(self, thread: Thread, talk: Talk[Files]) -> None:
        counting = talk.counting(talk.leaf)
        items = {memo.id for memo in talk.memos.values() if memo.kind == "item"}
        assert {memory.id for memory in thread.memory(active_only=True)} == counting
        assert {memory.id for memory in thread.memory()} == counting | items

    def _check_shift(self, report: thread_pb2.MemoryReport, talk: Talk[Files], before: str, after: str) -> None:
        was, now = talk.counting(before), talk.counting(after)
        items = {memo.id for memo in talk.memos.values() if memo.kind == "item"}
        assert set(report.stale) == (was - now) & items
        assert set(report.hidden) == was - now - items
        assert set(report.active) == now - was

    def _check_runs(
        self, report: thread_pb2.RunsReport, first: InTheWay, stopped: tuple[str, ...], talk: Talk[Files], cut: bool
    ) -> None:
        """``first``: what was in the way. Called before the model has dropped any."""
        paused, lapsed = self.world.idle(talk.id) if cut else ((), ())
        durable = {one for one in stopped if self.world.works[one].durable and one in first.here}
        assert set(report.going) == {*first.here, *first.elsewhere}
        assert set(report.interrupted) == set(stopped)
        assert set(report.paused) == set(paused)
        assert set(report.durable) == durable | set(lapsed)

    @staticmethod
    def _check_plan(plan: common_pb2.RestoreReport, done: common_pb2.RestoreReport) -> None:
        """The dry run said what was done then."""
        for part in ("restored", "deleted", "unchanged", "insertions", "deletions", "files", "kept"):
            assert getattr(plan, part) == getattr(done, part), part
        assert bool(done.safety_snapshot_id) == bool(done.restored or done.deleted)

    def _refused(self, error: type[CogfsError], *calls: Callable[[], object]) -> None:
        self._count("refused", error.__name__)
        for call in calls:
            with pytest.raises(error):
                call()

    def _count(self, *words: str) -> None:
        self.session.counts[" ".join(words)] += 1

    # --- what is said and remembered ----------------------------------------------------------------------------------

    @rule(place=st.integers(0, 2), name=st.sampled_from(_NAMES), content=st.sampled_from(("x", "y", "z", "")))
    def write(self, place: int, name: str, content: str) -> None:
        self._write(place % len(self.roots), name, content)

    def _write(self, place: int, name: str, content: str) -> None:
        path, files = self.roots[place] / name, dict(self.world.files[place])
        if content:
            path.write_text(content)
            files[name] = content
        elif files.pop(name, None) is not None:
            path.unlink()
        self.world.files[place] = files

    @rule(place=st.integers(-1, 2), turn=_turns)
    @precondition(lambda self: len(self.world.talks) < 4)
    def begin(self, place: int, turn: Turn) -> None:
        self._begin(place if place < len(self.roots) else 0)
        self._turn(list(self.world.talks.values())[-1], turn)

    @rule(number=st.integers(0, 9), turn=_turns)
    def turn(self, number: int, turn: Turn) -> None:
        self._turn(self._talk(number), turn)

    def _turn(self, talk: Talk[Files], turn: Turn) -> None:
        for kind, name, content, memory in turn:
            if talk.place >= 0:
                self._write(talk.place, name, content)
            self._say(talk, kind)
            if memory:
                # On the entry that was just said and one before it.
                last = len(talk.said) - 1
                self._remember(talk, memory, [last, last // 2], again=False)
        self._check(talk)

    def _say(self, talk: Talk[Files], kind: str, work: Work | None = None) -> None:
        """``work``: by a run, in whose workspace the checkpoint is taken."""
        place = work.place if work is not None and work.place >= 0 else talk.place
        run = work.id if work is not None else None
        entry = self._thread(talk).append(kind, "said", id=self._name("e"), run=run)
        kept = None
        if kind == "user" and place >= 0:
            kept = self.world.keep(entry.file_checkpoint.snapshot_id, place)
        assert entry.HasField("file_checkpoint") == (kept is not None)
        said = self.world.say(talk.id, entry.id, kind, kept)
        assert (entry.parent_id, entry.files_follow) == (said.parent, said.follows)

    @rule(
        number=st.integers(0, 9),
        kind=st.sampled_from(("item", "item", "summary", "file")),
        on=st.lists(st.integers(0, 99), max_size=3),
        again=st.booleans(),
    )
    def remember(self, number: int, kind: str, on: list[int], again: bool) -> None:
        self._remember(self._talk(number), kind, on, again=again)

    def _remember(self, talk: Talk[Files], kind: str, on: list[int], *, again: bool) -> None:
        entries = tuple(dict.fromkeys(self._one(list(talk.said), one) for one in on)) if talk.said else ()
        known = [memo for memo in talk.memos.values() if memo.kind == kind]
        memory_id = known[0].id if again and known else self._name("m")
        if kind != "item":
            entries = entries[:1]
        if kind != "item" and not (entries or talk.leaf):
            name = "n" if kind == "file" else None
            self._refused(ValidationError, lambda: self._thread(talk).put_memory("x", kind=kind, name=name))
            return
        name = f"n{len(on) % 2}" if kind == "file" else ""
        put = self._thread(talk).put_memory("x", entries, kind=kind, name=name, id=memory_id)
        self.world.remember(talk.id, memory_id, kind, name, entries)
        assert put.HasField("stale_because") == (memory_id not in talk.counting(talk.leaf))
        self._check_memory(self._thread(talk), talk)

    @rule(place=st.integers(0, 2), number=st.integers(0, 99), copy=st.booleans())
    def checkpoint(self, place: int, number: int, copy: bool) -> None:
        """A snapshot by hand, or one of another workspace."""
        place %= len(self.roots)
        others = [kept for kept in self.world.kept if not kept.pruned and kept.place != place]
        if copy and others:
            kept = self._one(others, number)
            made = self._workspace(place).copy_snapshot(kept.id)
            self.world.kept.append(Kept(made.id, place, kept.files, copy_of=kept))
        else:
            self.world.keep(self._workspace(place).checkpoint().id, place)

    # --- work that goes on --------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(_WORK), number=st.integers(0, 99), durable=st.booleans())
    def work(self, what: str, number: int, durable: bool) -> None:
        works = [work for work in self.world.works.values() if work.talk in self.world.talks]
        if what.startswith("begin") or not works:
            place = number % len(self.roots) if what == "begin elsewhere" else -1
            self._begin_work(self._talk(number), durable, place)
            return
        if what == "lapse":
            # Rarely: it takes a second.
            if number % 4 == 0:
                self._lapse(self._talk(number))
            return
        work = self._one(works, number)
        if what == "say":
            works = [one for one in works if one.state not in OVER] or works
            work = self._one(works, number)
        self._go_on(work, what)
        self._check(self.world.talks[work.talk])

    def _begin_work(self, talk: Talk[Files], durable: bool, place: int) -> None:
        workspace = self._workspace(place) if place >= 0 else None
        lease = _LEASE if durable else None
        run = self._thread(talk).run(id=self._name("r"), durable=durable, lease=lease, workspace=workspace)
        self._count("run")
        self.world.works[run.id] = Work(run.id, talk.id, place if place >= 0 else talk.place, durable)

    def _lapse(self, talk: Talk[Files]) -> None:
        run = self._thread(talk).run(id=self._name("r"), durable=True, lease=1.0)
        wait_for("the lease runs out", lambda: run.refresh().state == "lapsed")
        self.world.works[run.id] = Work(run.id, talk.id, talk.place, durable=True, state="lapsed")

    def _go_on(self, work: Work, what: str) -> None:
        cog, talk = self.session.cog, self.world.talks[work.talk]
        call = self._calls.get(work.id, "")
        error: type[CogfsError] | None = None
        if work.state == "ended":
            error = ValidationError
        elif work.state in ("interrupted", "lapsed") or work.stopping:
            error = RunInterrupted
        if what == "end":
            cog.run(work.id).end()
            if work.state not in OVER:
                work.state, work.stopping = "interrupted" if work.stopping else "ended", False
            return
        if what == "end call":
            if call in work.calls:
                self._end_call(work.id, call)
                work.calls.remove(call)
            else:
                self._refused(NotFound, lambda: self._end_call(work.id, "none"))
            return
        if what == "renew":
            error = ValidationError if not work.durable else None if work.state == "lapsed" else error
        if what == "call" and error is None and work.state == "paused":
            error = ValidationError
        name = self._name("c")
        acts: dict[str, Callable[[], object]] = {
            "pause": lambda: cog.run(work.id).pause(),
            "resume": lambda: cog.run(work.id).resume(),
            "renew": lambda: cog.run(work.id).renew(),
            "call": lambda: self._begin_call(work.id, name),
            "say": lambda: self._say(talk, "user", work),
        }
        act = acts[what]
        if error is not None:
            self._refused(error, act)
            return
        act()
        self._count("run,", what)
        if what == "pause":
            work.state = "paused"
        elif what == "resume" or (what == "renew" and work.state == "lapsed"):
            work.state = "going"
        elif what == "call":
            work.calls.add(name)

    @property
    def _calls(self) -> dict[str, str]:
        """A tool call of each run that has one."""
        return {work.id: min(work.calls) for work in self.world.works.values() if work.calls}

    def _begin_call(self, run_id: str, call_id: str) -> None:
        request = run_pb2.BeginToolCallRequest(run_id=run_id, tool_call_id=call_id, name="shell")
        self.session.connection.call(self.session.connection.runs.BeginToolCall, request)

    def _end_call(self, run_id: str, call_id: str) -> None:
        request = run_pb2.EndToolCallRequest(run_id=run_id, tool_call_id=call_id)
        self.session.connection.call(self.session.connection.runs.EndToolCall, request)

    # --- ways back ----------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 9), to=st.integers(0, 99), force=st.booleans())
    def rewind_all(self, number: int, to: int, force: bool) -> None:
        self._rewind(self._talk(number), to, force=force)

    @rule(
        number=st.integers(0, 9),
        to=st.integers(0, 99),
        files=st.booleans(),
        memory=st.sampled_from((True, True, True, False)),
        before=st.sampled_from((False, False, False, True)),
        force=st.booleans(),
    )
    def rewind(self, number: int, to: int, files: bool, memory: bool, before: bool, force: bool) -> None:
        self._rewind(self._talk(number), to, files=files, memory=memory, before=before, force=force)

    def _rewind(
        self,
        talk: Talk[Files],
        to: int,
        *,
        files: bool = True,
        memory: bool = True,
        before: bool = False,
        force: bool = False,
    ) -> None:
        if not talk.said:
            return
        thread, branch = self._thread(talk), talk.ids()
        # One that is not on the branch now and then.
        point = self._one(list(talk.said) if to % 9 == 0 or not branch else branch, to)

        def go(*, dry_run: bool = False, force: bool = False) -> thread_pb2.RewindReport:
            return thread.rewind(point, files=files, memory=memory, before=before, dry_run=dry_run, force=force)

        wrong = not (files or memory) or point not in branch or (before and talk.said[point].kind != "user")
        found = self.world.found(talk, point, before=before) if files and not wrong else None
        if wrong or (files and (found is None or found[0].pruned)):
            self._refused(ValidationError, lambda: go(dry_run=True), go)
            self._check(talk)
            return
        place = found[0].place if found is not None else -1
        first = self.world.in_the_way(talk.id, place)
        plan = go(dry_run=True)
        assert set(plan.runs.going) == {*first.here, *first.elsewhere}
        assert plan.files.restore.busy == (found is not None and first.anything)
        self._check(talk)
        stopped = self._make_way(talk.id, place, go, force, (ThreadBusy, WorkspaceBusy))
        if stopped is None:
            self._check(talk)
            return
        report = go(force=force)
        self._count("rewind", "past runs" if stopped else "with files" if files else "of the conversation")
        end = branch.index(point) + (0 if before else 1)
        cut = branch[end:] if memory else []
        self._check_runs(report.runs, first, stopped, talk, bool(cut))
        assert list(plan.conversation.cut) == list(report.conversation.cut) == cut
        assert plan.memory == report.memory
        leaf = (branch[end - 1] if end else "") if memory else talk.leaf
        self._check_shift(report.memory, talk, talk.leaf, leaf)
        if found is not None:
            assert (report.files.exact, report.files.entry_id) == (found[1], found[2])
            self._check_plan(plan.files.restore, report.files.restore)
        self.world.rewind(talk.id, point, files=files, memory=memory, before=before)
        self._check(talk)

    def _make_way(
        self,
        talk_id: str,
        place: int,
        go: Callable[..., object],
        force: bool,
        errors: tuple[type[CogfsError], type[CogfsError]],
        *,
        of_runs: bool = True,
    ) -> tuple[str, ...] | None:
        """What has to be refused is. Then the runs that ``force`` is going to stop; None: it cannot be done.

        ``errors``: for runs of the thread, and for what is in the workspace.
        """

        def refused(*, force: bool = False) -> None:
            self._count("refused", "with force" if force else "for runs")
            found = self.world.in_the_way(talk_id, place, of_runs=of_runs)
            with pytest.raises(errors[0] if found.here else errors[1]):
                go(force=force)

        if not self.world.in_the_way(talk_id, place, of_runs=of_runs).anything:
            return ()
        refused()
        if not force:
            return None
        # Nobody is waited for. What is left refuses it also then, and what was stopped stays so.
        stopped = self.world.clear(talk_id, place, of_runs=of_runs)
        if self.world.in_the_way(talk_id, place, of_runs=of_runs).anything:
            refused(force=True)
            return None
        return stopped

    @rule(number=st.integers(0, 99), force=st.booleans())
    @precondition(lambda self: self.world.kept)
    def restore(self, number: int, force: bool) -> None:
        kept = self._one(self.world.kept, number)
        if kept.pruned:
            self._refused(NotFound, lambda: self.session.cog.snapshot(kept.id))
            return
        snapshot = self.session.cog.snapshot(kept.id)

        def go(*, force: bool = False) -> common_pb2.RestoreReport:
            return snapshot.restore(force=force)

        plan = snapshot.restore(dry_run=True)
        assert plan.busy == self.world.in_the_way("", kept.place, of_runs=False).anything
        if self._make_way("", kept.place, go, force, (Busy, Busy), of_runs=False) is None:
            self._check_files()
            return
        self._check_plan(plan, go(force=force))
        self._count("restore")
        self.world.restore(kept)
        self._check_files()

    @rule(place=st.integers(0, 2), force=st.booleans())
    def undo(self, place: int, force: bool) -> None:
        place %= len(self.roots)
        workspace, way = self._workspace(place), self.world.ways[place]

        def go(*, dry_run: bool = False, force: bool = False) -> thread_pb2.UndoReport:
            return workspace.undo(dry_run=dry_run, force=force)

        if way is None:
            self._refused(ValidationError, lambda: go(dry_run=True), go)
            return
        talk = self.world.to_undo(place)
        talk_id = talk.id if talk is not None else ""
        plan = go(dry_run=True)
        self._check_files()
        if self._make_way(talk_id, place, go, force, (Busy, Busy), of_runs=bool(talk_id)) is None:
            self._check(*self.world.talks.values())
            return
        report = go(force=force)
        self._count("undo", "of a rewind" if talk_id else "of the files")
        self._check_plan(plan.files, report.files)
        assert plan.conversation == report.conversation and plan.memory == report.memory
        assert report.thread_id == talk_id
        assert bool(report.files_only_reason) == (bool(way.talk) and talk is None)
        if talk is not None:
            self._check_shift(report.memory, talk, talk.leaf, way.previous)
            kept = {one.id for one in talk.branch(way.previous)}
            assert list(report.conversation.cut) == [entry for entry in talk.ids() if entry not in kept]
        self.world.undo(place)
        self._check(*([talk] if talk is not None else []))

    # --- forks --------------------------------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, 9),
        at=st.integers(0, 99),
        where=st.sampled_from(("without", "same", "first", "second", "new")),
        force=st.booleans(),
    )
    @precondition(lambda self: len(self.world.talks) < 6)
    def fork(self, number: int, at: int, where: str, force: bool) -> None:
        """``where``: without files, or into the workspace of the checkpoint, one of the two, or a directory."""
        talk = self._talk(number)
        if not talk.said:
            return
        thread, point, files = self._thread(talk), self._one(list(talk.said), at), where != "without"
        found, new_id = talk.at(point), self._name("t")
        if where == "new" and len(self.roots) > 2:
            where = "same"
        into = self.place / self._name("d") if where == "new" else None
        chosen = {"first": 0, "second": 1}.get(where)
        workspace = self._workspace(chosen) if chosen is not None else None

        def go(*, dry_run: bool = False, force: bool = False) -> Fork | thread_pb2.ForkThreadReport:
            return thread.fork(
                point, id=new_id, files=files, workspace=workspace, into=into, dry_run=dry_run, force=force
            )

        def check_nothing() -> None:
            self._refused(NotFound, lambda: self.session.cog.thread(new_id))
            assert into is None or not into.exists()
            self._check(talk)

        if files and (found is None or found[0].pruned):
            self._refused(ValidationError, lambda: go(dry_run=True), go)
            check_nothing()
            return
        place = -1
        if files and into is None:
            assert found is not None
            place = chosen if chosen is not None else found[0].place
        plan = go(dry_run=True)
        check_nothing()
        first = self.world.in_the_way(talk.id, place)
        stopped = self._make_way(talk.id, place, go, force, (ThreadBusy, WorkspaceBusy))
        if stopped is None:
            check_nothing()
            return
        fork = go(force=force)
        self._count("fork", where)
        assert isinstance(fork, Fork) and isinstance(plan, thread_pb2.ForkThreadReport)
        self._check_runs(fork.report.runs, first, stopped, talk, cut=False)
        assert (plan.snapshots_copied, plan.memories_copied) == (fork.snapshots_copied, fork.report.memories_copied)
        assert fork.report.memories_copied == len(self.world.taken_along(talk.id, point))
        if files:
            assert found is not None
            if into is not None:
                place = self.world.add_place({})
                self.roots.append(into)
                self.scanned.append(self.scanned[found[0].place])
            assert fork.snapshots_copied == len(self.world.copied(talk.id, point, place))
            assert (fork.report.files.exact, fork.report.files.entry_id) == found[1:]
            self._check_plan(plan.files.restore, fork.report.files.restore)
        self.world.fork(talk.id, point, new_id, place if files else None)
        learn(self.session.cog, self.world)
        self._check(talk, self.world.talks[new_id])

    # --- what goes ----------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 99), by_count=st.booleans(), really=_rarely)
    @precondition(lambda self: any(not kept.pruned for kept in self.world.kept))
    def prune(self, number: int, by_count: bool, really: bool) -> None:
        if not really:
            return
        if by_count and number % 3 == 0:
            place = number % len(self.roots)
            deleted = list(self._workspace(place).prune({"count": 3 + number % 5}).deleted)
        else:
            kept = self._one([kept for kept in self.world.kept if not kept.pruned], number)
            deleted = [kept.id]
            try:
                self.session.cog.snapshot(kept.id).delete()
            except CogfsError as error:
                # The workspace needs it: what it says is the model's business no further.
                note(str(error))
                return
        needed = [kept for way in self.world.ways if way is not None for kept in (way.target, way.safety)]
        assert not {kept.id for kept in needed if kept is not None and kept.id} & set(deleted)
        self._count("pruned by count" if len(deleted) > 1 else "pruned")
        self.world.pruned(deleted)

    @rule(number=st.integers(0, 9), really=_rarely)
    @precondition(lambda self: len(self.world.talks) > 3)
    def delete(self, number: int, really: bool) -> None:
        if not really:
            return
        talk = self._talk(number)
        if self.world.in_the_way(talk.id, -1).anything:
            self._refused(ThreadBusy, self._thread(talk).delete)
            self._check(talk)
            return
        self._count("delete")
        self._thread(talk).delete()
        self.world.delete(talk.id)
        self._refused(NotFound, lambda: self._thread(talk))

    @rule(what=st.sampled_from(("kill", "kill", "stop", "worker", "unmount")), really=_rarely)
    def restart(self, what: str, really: bool) -> None:
        """Of the daemon, or of a mount."""
        if not really:
            return
        self._count("restart", what)
        if what == "kill":
            self.session.kill_daemon()
        elif what == "stop":
            self.session.stop_daemon()
        else:
            workspace = self._workspace(0)
            if what == "unmount" or self.scanned[0]:
                workspace.unmount()
            else:
                self.session.installation.kill(workspace.message.worker_pid)
            try:
                workspace.mount(scan=self.scanned[0])
            except AlreadyExists:
                # A dead worker is replaced by itself, too.
                wait_for("it is served", lambda: workspace.status().worker_pid)
        self._check(*self.world.talks.values())
