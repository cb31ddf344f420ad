"""Runs, tool calls and commands in the way of rewinds and restores: refused by name, told of in a dry run, and stopped
by force, or not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from cogfs.client import (
    Busy,
    Client,
    CogfsError,
    Denied,
    RunInterrupted,
    Thread,
    ThreadBusy,
    Unavailable,
    ValidationError,
    Workspace,
    WorkspaceBusy,
)
from cogfs.fsd.control.holds import overlap
from cogfs.v1 import common_pb2, run_pb2, thread_pb2
from tests.e2e.support.agents import Agent, agent, program, run_of, wait_for_state
from tests.e2e.support.site import Aside, Site, State, kill, site, wait_for
from tests.support.tree import describe, differences

Run = run_pb2.Run
By = common_pb2.BusyBy


class Story:
    """A conversation: the first message, what it changed, and an answer after it."""

    def __init__(self, here: Site, cog: Client, name: str = "chat") -> None:
        self.here = here
        self.cog = cog
        self.file = here.project / "file"
        self.file.write_text("before\n")
        self.workspace: Workspace = here.workspace(cog)
        self.thread: Thread = cog.create_thread(name, workspace=self.workspace)
        self.other: Thread = cog.create_thread(f"{name}-other", workspace=self.workspace)
        first = self.thread.user_message("change it")
        self.first = first.id
        self.snapshot = first.file_checkpoint.snapshot_id
        self.file.write_text("after\n")
        self.last = self.thread.append("assistant", "done").id

    def state(self) -> tuple[object, str]:
        return describe(self.here.project), self.thread.refresh().message.leaf_id

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        files, leaf = describe(self.here.project), self.thread.refresh().message.leaf_id
        yield
        assert not differences(describe(self.here.project), files)
        assert self.thread.refresh().message.leaf_id == leaf
        assert self.file.read_text() == "after\n"

    def rewound(self) -> bool:
        done = self.thread.refresh().message.leaf_id == self.first
        assert self.file.read_text() == ("before\n" if done else "after\n")
        return done

    def agent(
        self, options: str = "{}", tool: str = "", manner: str = "deaf"
    ) -> contextlib.AbstractContextManager[Agent]:
        """A process that holds a run of the thread."""
        return agent(self.here, self.thread.id, options, tool, manner)

    def agent_beside(self, tool: str, manner: str = "deaf") -> contextlib.AbstractContextManager[Agent]:
        """One that holds a run of the other thread."""
        return agent(self.here, self.other.id, "{}", tool, manner)


def _site(settle: str) -> Iterator[Site]:
    with site() as place:
        place.environ["COGFS_TOOL_SETTLE"] = settle
        place.mount()
        yield place


def _story(place: Site) -> Iterator[Story]:
    """A story of its own; nothing that goes on is left of it."""
    with place.client() as cog:
        yield Story(place, cog, f"chat{len(list(cog.threads()))}")
        assert not [run for run in cog.runs() if run.state == Run.GOING]
        for run in cog.runs():
            cog.run(run.id).end()
        wait_for("no command is left", lambda: not cog.commands())


@pytest.fixture(scope="module")
def quick() -> Iterator[Site]:
    """A daemon that waits for tool calls for a second."""
    yield from _site("1")


@pytest.fixture(scope="module")
def slow() -> Iterator[Site]:
    """A daemon that waits for tool calls as long as a test takes."""
    yield from _site("300")


@pytest.fixture
def story(quick: Site) -> Iterator[Story]:
    yield from _story(quick)


@pytest.fixture
def patient(slow: Site) -> Iterator[Story]:
    """As ``story``, with time for tool calls."""
    yield from _story(slow)


@pytest.fixture
def own(here: Site) -> Iterator[Story]:
    """A story whose daemon is restarted."""
    here.environ["COGFS_TOOL_SETTLE"] = "1"
    here.mount()
    with here.client() as cog:
        yield Story(here, cog)


def elsewhere(story: Story) -> Workspace:
    """Another workspace, scanned: nothing is mounted for it."""
    place = story.here.base / "elsewhere"
    if place.exists():
        return story.cog.workspace(place)
    place.mkdir()
    return story.cog.mount(place, scan=True)


def held_by(error: CogfsError) -> list[tuple[str, str]]:
    return [(one["kind"], one["id"]) for one in json.loads(error.metadata["busy_by"])]


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [False, True])
def test_a_run_in_the_thread_refuses_a_rewind(story: Story, files: bool) -> None:
    with story.thread.run() as run:
        with story.unchanged():
            plan = story.thread.rewind(story.first, files=files, dry_run=True)
            assert list(plan.runs.going) == [run.id]
            assert not plan.runs.interrupted
            assert plan.files.restore.busy is files
            with pytest.raises(ThreadBusy, match=run.id) as refused:
                story.thread.rewind(story.first, files=files)
            assert held_by(refused.value) == [("RUN", run.id)]
            # The files alone, too: it may be about to change them.
            with pytest.raises(ThreadBusy):
                story.thread.rewind(story.first, files=True, memory=False)
        run.check()
    assert not story.thread.rewind(story.first, files=files).runs.going


def test_a_run_of_another_thread_refuses_a_rewind_with_files_alone(story: Story) -> None:
    with story.other.run() as run:
        with story.unchanged():
            plan = story.thread.rewind(story.first, files=True, dry_run=True)
            assert plan.files.restore.busy
            assert [(one.kind, one.id) for one in plan.files.restore.busy_by] == [(By.RUN, run.id)]
            with pytest.raises(WorkspaceBusy, match=story.other.id) as refused:
                story.thread.rewind(story.first, files=True)
            assert held_by(refused.value) == [("RUN", run.id)]
        assert not story.thread.rewind(story.first, dry_run=True).runs.going
        story.thread.rewind(story.first)
        assert story.thread.refresh().message.leaf_id == story.first


def test_a_run_in_another_workspace_is_in_nobody_s_way(story: Story) -> None:
    thread = story.cog.create_thread(workspace=elsewhere(story))
    with thread.run() as run, run.tool_call("shell"):
        story.thread.rewind(story.first, files=True)
        assert story.rewound()


def test_workspaces_overlap_when_one_root_holds_the_other() -> None:
    assert overlap(b"/project", b"/project/sub")
    assert overlap(b"/project/sub", b"/project")
    assert overlap(b"/project", b"/project")
    assert overlap(b"/", b"/project")
    assert not overlap(b"/project", b"/project2")
    assert not overlap(b"/a/project", b"/b/project")


def test_a_tool_call_refuses_a_restore_and_its_run_does_not(story: Story) -> None:
    with story.other.run() as run:
        with run.tool_call("shell") as call, story.unchanged():
            plan = story.workspace.restore(story.snapshot, dry_run=True)
            assert plan.busy
            assert [(one.kind, one.id, one.command) for one in plan.busy_by] == [(By.TOOL_CALL, run.id, "shell")]
            assert plan.busy_by[0].since == call.begun_at
            with pytest.raises(Busy, match="shell") as refused:
                story.workspace.restore(story.snapshot)
            assert held_by(refused.value) == [("TOOL_CALL", run.id)]
            # What it would change is already so: it may not be, when the call has ended.
            with pytest.raises(Busy):
                story.workspace.restore(story.workspace.checkpoint().id)
        assert not story.workspace.restore(story.snapshot, dry_run=True).busy
        story.workspace.restore(story.snapshot)
        assert story.file.read_text() == "before\n"
        with run.tool_call("shell"), pytest.raises(Busy):
            story.workspace.undo()
        story.workspace.undo()
        assert story.file.read_text() == "after\n"


def test_a_tool_call_goes_on_after_its_run_and_refuses(story: Story) -> None:
    with story.agent_beside("shell") as holder:
        story.cog.run(holder.run_id).end()
        assert run_of(story.cog, holder.run_id).state == Run.ENDED
        with story.unchanged(), pytest.raises(WorkspaceBusy, match="shell") as refused:
            story.thread.rewind(story.first, files=True)
        assert held_by(refused.value) == [("TOOL_CALL", holder.run_id)]
        holder.kill()
        wait_for("the call is over", lambda: not run_of(story.cog, holder.run_id).open_tool_calls)
        story.thread.rewind(story.first, files=True)


def test_a_command_refuses_restores_and_rewinds_with_files(story: Story) -> None:
    with program("sleep", "100") as process:
        command = story.thread.command(process.pid, "sleep 100")
        assert list(command.pids) == [process.pid]
        with story.unchanged():
            plan = story.workspace.restore(story.snapshot, dry_run=True)
            assert [(one.kind, one.pid, one.command) for one in plan.busy_by] == [
                (By.COMMAND, process.pid, "sleep 100")
            ]
            assert plan.busy
            with pytest.raises(Busy, match=f"sleep .pid {process.pid}"):
                story.workspace.restore(story.snapshot)
            with pytest.raises(WorkspaceBusy, match=f"sleep .pid {process.pid}"):
                story.thread.rewind(story.first, files=True)
            assert story.thread.rewind(story.first, files=True, dry_run=True).files.restore.busy
        kill(process.pid)
        story.thread.rewind(story.first, files=True)
        assert story.rewound()


def test_an_undo_that_takes_a_conversation_back_is_refused_for_its_runs(story: Story) -> None:
    story.thread.rewind(story.first, files=True)
    with story.thread.run():
        with pytest.raises(Busy, match="run"):
            story.workspace.undo()
        assert story.rewound()
        assert story.workspace.undo(dry_run=True).files.busy
    story.workspace.undo()
    assert story.thread.refresh().message.leaf_id == story.last


# --- what a run may not do --------------------------------------------------------------------------------------------


def test_a_run_cannot_rewind_its_own_thread_or_workspace(story: Story) -> None:
    outside = story.cog.create_thread(workspace=elsewhere(story))
    with story.thread.run() as run, run.tool_call("agent") as call, story.unchanged():
        for force in (False, True):
            with pytest.raises(ValidationError, match="thread"):
                story.thread.rewind(story.first, calling_run=run.id, force=force)
            with pytest.raises(ValidationError, match="thread"):
                story.thread.rewind(story.first, files=True, calling_run=run.id, force=force)
        with story.other.run() as beside, pytest.raises(ValidationError, match="workspace"):
            story.thread.rewind(story.first, files=True, calling_run=beside.id, force=True)
        with outside.run(parent=call) as child:
            with pytest.raises(ValidationError, match="waits for it"):
                story.thread.rewind(story.first, calling_run=child.id, force=True)
            with pytest.raises(ValidationError, match="waits for it"):
                story.thread.rewind(story.first, calling_run=child.id, dry_run=True)
        run.check()
    with outside.run() as run:
        story.thread.rewind(story.first, files=True, calling_run=run.id)
        assert story.rewound()
    with pytest.raises(CogfsError, match="no run"):
        story.thread.rewind(story.first, calling_run="nobody")


# --- force ------------------------------------------------------------------------------------------------------------


def test_force_stops_runs_and_waits_for_their_tool_calls(story: Story) -> None:
    with (
        story.agent(tool="shell", manner="obedient") as here,
        story.agent_beside("edit", "obedient") as there,
    ):
        report = story.thread.rewind(story.first, files=True, force=True)
        assert story.rewound()
        assert set(report.runs.going) == set(report.runs.interrupted) == {here.run_id, there.run_id}
        for holder in (here, there):
            assert holder.finish() == "interrupted"
            found = run_of(story.cog, holder.run_id)
            assert (found.state, bool(found.why)) == (Run.INTERRUPTED, True)
        assert not report.files.restore.forced


def test_what_a_stopped_run_asks_for_is_refused(story: Story) -> None:
    with pytest.raises(RunInterrupted, match="stopped") as caught, story.thread.run() as run:
        story.thread.rewind(story.first, force=True)
        assert story.thread.refresh().message.leaf_id == story.first
        wait_for("it is told", run.stopped.is_set)
        with pytest.raises(RunInterrupted):
            run.check()
        for ask in (
            lambda: run.user_message("x"),
            lambda: run.append("assistant", "x"),
            lambda: run.tool_call().__enter__(),
            run.pause,
            run.resume,
            lambda: run.command(os.getpid()),
        ):
            with pytest.raises(RunInterrupted):
                ask()
        with pytest.raises(RunInterrupted), story.cog.run(run.id):
            pytest.fail("it is over")
    assert caught.value.metadata["why"]
    assert [entry.id for entry in story.thread.entries()] == [story.first]


def test_force_stops_what_a_run_has_started_too(story: Story) -> None:
    outside = story.cog.create_thread()
    with story.agent(tool="agent") as parent:
        (call,) = run_of(story.cog, parent.run_id).open_tool_calls
        child = outside.run(parent=call)
        report = story.thread.rewind(story.first, force=True)
        assert list(report.runs.interrupted) == [parent.run_id]
        assert run_of(story.cog, child.id).state == Run.INTERRUPTED


def test_force_refuses_when_a_tool_call_does_not_end(story: Story) -> None:
    with story.agent(tool="shell") as deaf:
        with story.unchanged(), pytest.raises(WorkspaceBusy, match="not ended in time") as refused:
            story.thread.rewind(story.first, files=True, force=True)
        assert held_by(refused.value) == [("TOOL_CALL", deaf.run_id)]
        assert run_of(story.cog, deaf.run_id).state == Run.INTERRUPTED
        # The conversation alone waits for no tool call.
        story.thread.rewind(story.first, force=True)
        assert story.thread.refresh().message.leaf_id == story.first
        assert deaf.finish() == "interrupted"


def test_a_forced_restore_stops_no_run(story: Story) -> None:
    with story.agent(tool="shell") as deaf:
        with story.unchanged(), pytest.raises(Busy, match="shell"):
            story.workspace.restore(story.snapshot, force=True)
        assert deaf.finish() == "ended"
        story.workspace.restore(story.snapshot)
        assert story.file.read_text() == "before\n"


def test_force_ends_commands_with_all_that_they_left(story: Story) -> None:
    with program("sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000; sleep 1000") as stubborn:
        story.other.command(stubborn.pid)
        wait_for("it has started them", lambda: len(story.cog.commands()[0].pids) == 3)
        story.workspace.restore(story.snapshot, force=True)
        assert story.file.read_text() == "before\n"
        assert stubborn.wait(60) == -9
        assert not story.cog.commands()
    with program("sleep", "1000") as meek:
        story.other.command(meek.pid)
        story.workspace.undo(force=True)
        assert story.file.read_text() == "after\n"
        assert meek.wait(60) == -15
    with program("sleep", "1000") as meek:
        story.other.command(meek.pid)
        story.thread.rewind(story.first, files=True, force=True)
        assert story.rewound()


def test_force_stops_nothing_when_the_files_cannot_be_restored(here: Site) -> None:
    """A file with another name outside is not read, so it cannot be kept, so a rewind may not replace it."""
    outside = here.base / "outside"
    outside.write_text("of somebody else\n")
    with here.client() as cog:
        here.ctl("mount", here.project, "--refuse-hard-links")
        (here.project / "file").write_text("own\n")
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        first = thread.user_message("x")
        (here.project / "file").unlink()
        here.ctl("unmount", here.project)
        os.link(outside, here.project / "file")
        here.ctl("mount", here.project)
        with thread.run() as run, program("sleep", "1000") as process:
            command = thread.command(process.pid)
            with pytest.raises(Denied):
                thread.rewind(first.id, files=True, force=True)
            run.check()
            assert run.refresh().state == "going"
            assert [one.id for one in cog.commands()] == [command.id]
            assert process.poll() is None


# --- durable and paused runs ------------------------------------------------------------------------------------------


def _durable(story: Story, lease: int, manner: str) -> contextlib.AbstractContextManager[Agent]:
    return story.agent(options=json.dumps({"durable": True, "lease": lease}), manner=manner)


def test_a_durable_run_is_dropped_with_its_conversation(story: Story) -> None:
    with _durable(story, 600, "deaf") as holder:
        with pytest.raises(ThreadBusy):
            story.thread.rewind(story.first)
        report = story.thread.rewind(story.first, force=True)
        assert list(report.runs.durable) == list(report.runs.interrupted) == [holder.run_id]
        assert run_of(story.cog, holder.run_id).state == Run.INTERRUPTED
        with pytest.raises(RunInterrupted):
            story.cog.run(holder.run_id).renew()
        assert holder.finish() == "interrupted"


def test_no_lease_is_broken_while_files_are_restored(own: Story) -> None:
    story = own
    with _durable(story, 20, "deaf") as holder:
        with story.unchanged(), pytest.raises(ThreadBusy, match="lease") as refused:
            story.thread.rewind(story.first, files=True, force=True)
        assert held_by(refused.value) == [("RUN", holder.run_id)]
        found = run_of(story.cog, holder.run_id)
        assert (found.state, found.stopping) == (Run.GOING, True)
        with pytest.raises(RunInterrupted):
            story.cog.run(holder.run_id).renew()
        # Not renewed any more, it runs out, also past a restart.
        story.here.environ["COGFS_RUN_GRACE"] = "1"
        story.here.kill_daemon()
        story.here.start()
        with story.here.client() as cog:
            wait_for_state(cog, holder.run_id, Run.INTERRUPTED)
            cog.thread("chat").rewind(story.first, files=True)
        assert story.file.read_text() == "before\n"


def test_a_lease_is_given_back_when_its_holder_is_told(story: Story) -> None:
    with _durable(story, 600, "obedient") as holder:
        report = story.thread.rewind(story.first, files=True, force=True)
        assert list(report.runs.durable) == list(report.runs.interrupted) == [holder.run_id]
        assert story.rewound()
        assert holder.finish() == "interrupted"


def test_runs_that_nobody_works_on_are_dropped_with_what_is_cut(story: Story) -> None:
    paused = story.thread.run()
    paused.pause()
    lapsed = story.thread.run(durable=True, lease=1)
    beside = story.other.run()
    beside.pause()
    wait_for_state(story.cog, lapsed.id, Run.LAPSED)
    # Nothing is cut, so nothing is dropped.
    assert not story.thread.rewind(story.first, files=True, memory=False).runs.paused
    story.workspace.undo()
    plan = story.thread.rewind(story.first, files=True, dry_run=True)
    assert (list(plan.runs.paused), list(plan.runs.durable)) == ([paused.id], [lapsed.id])
    assert paused.refresh().state == "paused"
    report = story.thread.rewind(story.first, files=True)
    assert (report.runs, plan.files.restore.busy) == (plan.runs, False)
    assert story.rewound()
    for run in (paused, lapsed):
        assert run.refresh().state == "interrupted"
        with pytest.raises(RunInterrupted, match="rewound"):
            run.resume()
    assert beside.refresh().state == "paused"


def test_an_undo_that_cuts_entries_drops_runs(story: Story) -> None:
    """An undo of an undo cuts what the rewind did: a run that waits there has nothing to go on after."""
    story.thread.rewind(story.first, files=True)
    early = story.thread.run()
    early.pause()
    story.workspace.undo()
    # Nothing was cut by that.
    assert (early.refresh().state, story.rewound()) == ("paused", False)
    with pytest.raises(RunInterrupted, match="rewound"), story.thread.run() as late:
        late.pause()
        assert story.workspace.undo(dry_run=True).conversation.cut == [story.last]
        assert late.refresh().state == "paused"
        story.workspace.undo()
        assert story.rewound()
        wait_for("its holder is told", late.stopped.is_set)
        late.check()
    assert early.refresh().state == "interrupted"


def test_the_holder_of_a_paused_run_is_told_that_it_was_dropped(story: Story) -> None:
    with pytest.raises(RunInterrupted, match="rewound"), story.thread.run() as run:
        run.pause()
        story.thread.rewind(story.first, files=True)
        wait_for("it is told", run.stopped.is_set)
        with pytest.raises(RunInterrupted, match="rewound"):
            run.check()
    assert run.state == "interrupted"


def test_force_stops_a_run_that_waits_for_somebody_in_a_tool_call(story: Story) -> None:
    with story.agent(tool="ask", manner="obedient") as holder:
        story.cog.run(holder.run_id).pause()
        assert not story.thread.rewind(story.first, dry_run=True).runs.going
        with story.unchanged(), pytest.raises(WorkspaceBusy, match="ask"):
            story.thread.rewind(story.first, files=True)
        report = story.thread.rewind(story.first, files=True, force=True)
        assert list(report.runs.interrupted) == [holder.run_id]
        assert holder.finish() == "interrupted"


def test_a_rewind_of_the_conversation_alone_drops_them_too(story: Story) -> None:
    paused = story.thread.run()
    paused.pause()
    assert list(story.thread.rewind(story.first).runs.paused) == [paused.id]
    assert paused.refresh().state == "interrupted"


@pytest.mark.parametrize(
    "step", ["restore.safe", "restore.journalled", "restore.applied", "restore.synced", "restore.finished"]
)
def test_conversation_files_and_runs_commit_together(here: Site, step: str) -> None:
    here.mount()
    with here.client() as cog:
        story = Story(here, cog)
        story.thread.run(id="paused").pause()
        here.ctl("daemon", "stop")
        assert here.start(crash_at=step) is not None
    with here.client() as cog:
        here.settled(cog)
        with contextlib.suppress(CogfsError):
            cog.thread("chat").rewind(story.first, files=True)
            pytest.fail(f"it has not passed {step}")
    here.start()
    with here.client() as cog:
        here.settled(cog)
        done = cog.thread("chat").message.leaf_id == story.first
        assert done is (step != "restore.safe")
        assert story.file.read_text() == ("before\n" if done else "after\n")
        assert run_of(cog, "paused").state == (Run.INTERRUPTED if done else Run.PAUSED)


# --- what is asked for meanwhile --------------------------------------------------------------------------------------


@contextlib.contextmanager
def rewinding(story: Story) -> Iterator[Aside]:
    """A forced rewind that waits for a tool call until the block ends, and then goes on."""
    with story.agent(tool="shell", manner="deaf") as holder:
        going = Aside(lambda: story.thread.rewind(story.first, files=True, force=True))
        wait_for_state(story.cog, holder.run_id, Run.INTERRUPTED)
        yield going
        assert holder.finish() == "interrupted"
        going.join()
        assert going.error is None, going.error


@pytest.mark.parametrize("same", [True, False])
def test_a_run_waits_for_a_rewind_and_goes_on_after_the_new_point(patient: Story, same: bool) -> None:
    story = patient
    thread = story.thread.id if same else story.other.id
    late_id = f"{thread}-late"
    with rewinding(story):
        with pytest.raises(ThreadBusy, match="strategy"):
            story.cog.thread(thread).run(strategy="reject")
        waiting = Aside(lambda: story.cog.thread(thread).run(id=late_id).message)
        with pytest.raises(CogfsError, match="no run"):
            run_of(story.cog, late_id)
    waiting.join()
    assert waiting.error is None
    with story.cog.run(late_id) as late:
        entry = late.append("assistant", "on from here")
    assert entry.parent_id == (story.first if same else "")
    assert story.file.read_text() == "before\n"


def test_a_run_waits_while_the_files_are_changed(patient: Story) -> None:
    """When the rewind has its journal, which is no rewind that was interrupted."""
    story = patient
    for number in range(300):
        (story.here.project / f"made{number}").write_text("x")
    worker = story.here.worker_pid()
    rewinding = Aside(lambda: story.thread.rewind(story.first, files=True))
    try:
        wait_for("it has begun", lambda: story.workspace.status().state == State.RECOVERING or rewinding.result)
        os.kill(worker, signal.SIGSTOP)
        if story.workspace.status().state != State.RECOVERING:
            pytest.skip("it was over before it could be held up")
        with pytest.raises(ThreadBusy, match="strategy"):
            story.thread.run(strategy="reject")
        waiting = Aside(lambda: story.thread.run(id=f"{story.thread.id}-late"))
    finally:
        os.kill(worker, signal.SIGCONT)
    rewinding.join()
    waiting.join()
    assert (rewinding.error, waiting.error) == (None, None)
    assert story.rewound()
    story.cog.run(f"{story.thread.id}-late").end()


def test_paused_and_lapsed_runs_wait_as_new_ones_do(patient: Story) -> None:
    story = patient
    paused = story.other.run(strategy="reject")
    paused.pause()
    lapsed = story.other.run(durable=True, lease=1, strategy="reject")
    wait_for_state(story.cog, lapsed.id, Run.LAPSED)
    with rewinding(story):
        with pytest.raises(ThreadBusy):
            paused.resume()
        with pytest.raises(ThreadBusy):
            lapsed.renew()
    assert paused.resume().state == "going"
    assert lapsed.renew().state == "going"
    paused.end()
    lapsed.end()


def test_a_command_asked_for_meanwhile_is_refused(patient: Story) -> None:
    story = patient
    with program("sleep", "100") as process:
        with rewinding(story):
            with pytest.raises(Busy, match="restore"):
                story.other.command(process.pid)
            assert not story.cog.commands()
        assert story.other.command(process.pid).pids


def test_a_tool_call_asked_for_meanwhile_waits(patient: Story) -> None:
    story = patient
    with story.other.run() as run:
        first = run.tool_call("first")
        first.__enter__()
        restoring = Aside(lambda: story.workspace.restore(story.snapshot, force=True))

        def held() -> bool:
            try:
                story.other.run(strategy="reject").end()
            except ThreadBusy:
                return True
            return False

        wait_for("the restore holds the workspace", held)
        second = run.tool_call("second")
        beginning = Aside(second.__enter__)
        first.__exit__(None, None, None)
        restoring.join()
        beginning.join()
        assert restoring.error is None
        assert beginning.error is None
        assert story.file.read_text() == "before\n"
        second.__exit__(None, None, None)


def test_a_caller_that_goes_while_it_waits_begins_no_run(patient: Story) -> None:
    story = patient
    with rewinding(story):
        with story.here.client() as gone:
            thread = gone.thread(story.thread.id)
            waiting = Aside(lambda: thread.run(id="never"))
            time.sleep(1)  # most likely it waits by then
        waiting.join()
        assert isinstance(waiting.error, Unavailable)
    with pytest.raises(CogfsError, match="no run"):
        run_of(story.cog, "never")


# --- forks and ends of threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [False, True])
def test_a_run_in_the_thread_refuses_a_fork(story: Story, files: bool) -> None:
    threads = {thread.id for thread in story.cog.threads()}
    with story.thread.run() as run:
        with story.unchanged():
            plan = story.thread.fork(story.first, files=files, dry_run=True)
            assert isinstance(plan, thread_pb2.ForkThreadReport)
            assert list(plan.runs.going) == [run.id]
            assert plan.files.restore.busy is files
            with pytest.raises(ThreadBusy, match=run.id) as refused:
                story.thread.fork(story.first, files=files)
            assert held_by(refused.value) == [("RUN", run.id)]
        assert {thread.id for thread in story.cog.threads()} == threads
        run.check()
    assert story.thread.fork(story.first, files=files).message.forked_from.entry_id == story.first


def test_another_thread_s_tool_call_refuses_a_fork_into_its_workspace_alone(story: Story) -> None:
    with story.other.run() as run, run.tool_call("shell"):
        with story.unchanged(), pytest.raises(WorkspaceBusy, match=run.id):
            story.thread.fork(story.first, files=True)
        into = story.here.base / "of the fork"
        fork = story.thread.fork(story.first, files=True, into=into)
        assert (into / "file").read_text() == "before\n"
        story.cog.workspace(into).unmount()
        assert fork.report.files.restore.restored
        run.check()


def test_force_stops_the_runs_of_a_thread_for_its_fork(story: Story) -> None:
    with story.agent(manner="obedient") as holder:
        into = story.here.base / "forced fork"
        fork = story.thread.fork(story.first, files=True, into=into, force=True)
        assert list(fork.report.runs.interrupted) == [holder.run_id]
        assert holder.finish() == "interrupted"
        story.cog.workspace(into).unmount()


def test_nothing_is_stopped_for_a_fork_that_cannot_be_made(story: Story) -> None:
    with story.thread.run() as run:
        with story.unchanged(), pytest.raises(ValidationError, match="already"):
            story.thread.fork(story.first, id=story.other.id, files=True, force=True)
        run.check()


def test_a_thread_is_not_deleted_under_its_run(story: Story) -> None:
    thread = story.cog.create_thread("ends")
    with thread.run() as run, pytest.raises(ThreadBusy, match=run.id):
        thread.delete()
    paused = thread.run(durable=True)
    paused.__enter__()
    paused.pause()
    thread.delete()
    (left,) = [one for one in story.cog.runs(ended=True) if one.id == paused.id]
    assert (left.state, left.why) == (Run.INTERRUPTED, "its conversation was deleted")
