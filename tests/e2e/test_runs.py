"""Runs by themselves: what they say of their messages, and who holds them until when."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cogfs.client import (
    AlreadyExists,
    Busy,
    Client,
    CogfsError,
    NotFound,
    RunInterrupted,
    Thread,
    ThreadBusy,
    ValidationError,
    connect,
)
from cogfs.v1 import run_pb2, run_pb2_grpc, thread_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.support.agents import agent, program, run_of, wait_for_state
from tests.e2e.support.site import Site, site, wait_for

Run = run_pb2.Run


def chat(here: Site, cog: Client, name: str = "chat", **more: Any) -> Thread:
    return cog.create_thread(name, workspace=here.workspace(cog), **more)


@pytest.fixture(scope="module")
def usual() -> Iterator[Site]:
    """A daemon that lives on, with a mounted workspace."""
    with site() as place:
        place.mount()
        yield place


@pytest.fixture
def cog(usual: Site) -> Iterator[Client]:
    """Its client; no run goes on when a test is over."""
    with usual.client() as client:
        yield client
        assert not list(client.runs())


@pytest.fixture
def thread(usual: Site, cog: Client) -> Thread:
    """A conversation of the test's own."""
    return chat(usual, cog, f"chat{len(list(cog.threads()))}")


# --- what a run is, and what it says of its messages ------------------------------------------------------------------


def test_a_run_is_listed_and_counts_its_tool_calls(here: Site) -> None:
    here.mount()
    with here.client() as cog:
        thread = chat(here, cog, agent="coder")
        with thread.run(id="r1", holder="me", strategy="reject", checkpoints={"exclude": ["*.o"]}) as run:
            assert [one.id for one in cog.runs()] == ["r1"]
            assert (run.message.thread_id, run.message.workspace_id) == ("chat", here.workspace(cog).id)
            assert (run.message.agent, run.message.holder) == ("coder", "me")
            assert (run.message.kind, run.message.strategy, run.message.state) == (Run.PLAIN, Run.REJECT, Run.GOING)
            assert list(run.message.checkpoints.exclude) == ["*.o"]
            with run.tool_call("shell") as first, run.tool_call("edit", id="c2") as second:
                assert [call.id for call in run.refresh().message.open_tool_calls] == sorted([first.id, second.id])
                with pytest.raises(AlreadyExists), run.tool_call(id="c2"):
                    pass
            with run.tool_call():
                pass
            assert run.refresh().message.tool_calls == 3
            assert not run.message.open_tool_calls
            with pytest.raises(AlreadyExists):
                thread.run(id="r1")
        assert run.state == "ended"
        assert not list(cog.runs())
        assert [(one.id, one.state) for one in cog.runs(thread=thread, ended=True)] == [("r1", Run.ENDED)]
        with pytest.raises(ValidationError, match="has ended"):
            run.user_message("too late")
        with pytest.raises(ValidationError, match="has ended"), run.tool_call():
            pass
        assert run.end().state == "ended"


def test_runs_come_in_pages(here: Site) -> None:
    here.mount()
    with here.client() as cog:
        thread = chat(here, cog)
        other = cog.create_thread("other")
        ids = [thread.run(id=f"r{number}").id for number in range(5)] + [other.run(id="o").id]
        assert [one.id for one in cog.runs()] == ids[::-1]
        assert [one.id for one in cog.runs(thread=other)] == ["o"]
        assert [one.id for one in cog.runs(workspace=here.workspace(cog))] == ids[4::-1]
        seen = []
        token = ""
        with grpc.insecure_channel(f"unix://{here.runtime}/cogfsd.sock") as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            while True:
                page = stub.ListRuns(run_pb2.ListRunsRequest(page_size=2, page_token=token))
                assert len(page.runs) <= 2
                seen += [one.id for one in page.runs]
                token = page.next_page_token
                if not token:
                    break
        assert seen == ids[::-1]


def test_messages_of_a_run_have_its_policy_and_their_own_checkpoints(usual: Site, cog: Client, thread: Thread) -> None:
    cog.set_policy({"exclude": ["*.agent"]}, agent="coder")
    with thread.run(agent="coder", checkpoints={"exclude": ["*.run"]}) as run:
        snapshots = set()
        # The input, and what is queued while the run goes on, by whomever: each is one of its own.
        for number, writer in enumerate((run.user_message, run.user_message)):
            (usual.project / "file").write_text(f"{number}")
            entry = writer(f"message {number}")
            assert entry.run_id == run.id
            snapshot = cog.snapshot(entry.file_checkpoint.snapshot_id).message
            assert snapshot.label == entry.id
            assert list(snapshot.exclude) == ["*.agent", "*.run"]
            snapshots.add(snapshot.id)
        with usual.client() as other:
            steered = other.thread(thread.id).user_message("steer", run=run.id)
            assert steered.run_id == run.id
            snapshots.add(steered.file_checkpoint.snapshot_id)
        assert len(snapshots) == 3
        reply = run.append("assistant", "done")
        assert reply.run_id == run.id
        assert not reply.HasField("file_checkpoint")
        # After a handoff the run is on another agent.
        handed = run.user_message("x", agent="other")
        assert list(cog.snapshot(handed.file_checkpoint.snapshot_id).message.exclude) == ["*.run"]
    assert thread.entry(reply.id).run_id == run.id
    assert not thread.user_message("x").run_id
    with thread.run(checkpoints=False) as quiet:
        assert not quiet.user_message("x").HasField("file_checkpoint")


def test_a_run_within_a_run_takes_no_checkpoints(usual: Site, cog: Client, thread: Thread) -> None:
    below = chat(usual, cog, "below")
    with thread.run() as run, run.tool_call("agent") as call, below.run(parent=call, checkpoints=True) as child:
        assert (child.message.parent_run_id, child.message.parent_tool_call_id) == (run.id, call.id)
        assert not child.user_message("x", require_checkpoint=True).HasField("file_checkpoint")
        assert run.user_message("x").HasField("file_checkpoint")
    with pytest.raises(ValidationError, match="does not go on"):
        below.run(parent=call)
    with thread.run() as run, pytest.raises(NotFound, match="tool call"):
        below.run(parent=run_pb2.ToolCall(run_id=run.id, id=call.id))


def test_a_run_in_another_workspace_than_its_thread_s_takes_its_checkpoints_there(
    usual: Site, cog: Client, thread: Thread
) -> None:
    second = usual.base / "second"
    second.mkdir()
    (second / "there").write_text("x")
    other = cog.mount(second, scan=True)
    with thread.run(workspace=other) as run:
        entry = run.user_message("over there")
        assert entry.file_checkpoint.workspace_id == other.id
        assert entry.file_checkpoint.root == bytes(second)
    (second / "there").write_text("y")
    thread.rewind(entry.id, files=True)
    assert (second / "there").read_text() == "x"


def test_a_workspace_is_not_forgotten_under_a_run(usual: Site, cog: Client) -> None:
    place = usual.base / "forgotten"
    place.mkdir()
    workspace = cog.mount(place, scan=True)
    with cog.create_thread().run(workspace=workspace) as run:
        workspace.unmount()
        with pytest.raises(Busy, match=run.id):
            workspace.delete()
        with program("sleep", "1000") as process:
            run.command(process.pid)
            run.end()
            with pytest.raises(Busy, match="sleep"):
                workspace.delete()
    wait_for("the command has ended", lambda: not cog.commands())
    workspace.delete()


# --- who holds it -----------------------------------------------------------------------------------------------------


def test_a_plain_run_ends_with_its_holder_s_connection(usual: Site, cog: Client, thread: Thread) -> None:
    with agent(usual, thread.id, tool="shell") as holder:
        assert run_of(cog, holder.run_id).state == Run.GOING
        holder.kill()
        ended = wait_for_state(cog, holder.run_id, Run.INTERRUPTED)
        assert "connection" in ended.why
        assert not ended.open_tool_calls
        with pytest.raises(RunInterrupted, match="connection") as caught:
            thread.user_message("x", run=holder.run_id)
        assert caught.value.metadata["why"] == ended.why
    with agent(usual, thread.id) as holder:
        assert holder.finish() == "ended"


def test_a_plain_run_that_nobody_comes_to_hold_ends(here: Site) -> None:
    here.environ["COGFS_RUN_GRACE"] = "0.5"
    here.mount()
    with here.client() as cog:
        run = chat(here, cog).run()
        wait_for_state(cog, run.id, Run.INTERRUPTED)
        with pytest.raises(RunInterrupted), run:
            pass


def test_a_plain_run_may_be_held_by_several_streams(usual: Site, cog: Client, thread: Thread) -> None:
    run = thread.run()
    with usual.client() as second, second.run(run.id), cog.run(run.id) as again:
        with usual.client() as third:
            held = third.run(run.id)
            held.__enter__()
        # Its connection is closed without a word, and the others hold on.
        with again.tool_call():
            assert run.refresh().state == "going"


def test_a_lease_runs_out_and_is_taken_up_again(usual: Site, cog: Client, thread: Thread) -> None:
    with agent(
        usual, thread.id, options=json.dumps({"durable": True, "lease": 9, "holder": "first"}), tool="t"
    ) as holder:
        # Longer than the lease: it is renewed.
        first = run_of(cog, holder.run_id).lease_until.ToNanoseconds()
        wait_for("renewed", lambda: run_of(cog, holder.run_id).lease_until.ToNanoseconds() > first + 10**9)
        with pytest.raises(ThreadBusy, match="first"):
            cog.run(holder.run_id).renew("second")
        holder.kill()
        lapsed = wait_for_state(cog, holder.run_id, Run.LAPSED)
        assert not lapsed.open_tool_calls
        assert not lapsed.HasField("lease_until")
        with pytest.raises(RunInterrupted, match="lease ran out"):
            thread.user_message("x", run=lapsed.id)
        with cog.run(lapsed.id) as taken:
            assert taken.state == "going"
            assert taken.user_message("on we go").run_id == lapsed.id
        assert taken.state == "ended"
    with pytest.raises(ValidationError, match="ended"):
        taken.renew()


def test_who_names_a_run_that_is_held_takes_nothing(usual: Site, cog: Client, thread: Thread) -> None:
    run = thread.run(durable=True, lease=600, holder="first")
    again = cog.run(run.id, holder="second")
    assert again.resume().message.holder == "first"
    with pytest.raises(ThreadBusy, match="first"), again:
        pass
    run.pause()
    with pytest.raises(ThreadBusy, match="first"):
        again.renew()
    assert run.renew().state == "paused"
    with cog.run(run.id, holder="third") as taken:
        assert (taken.state, taken.message.holder) == ("going", "third")


def test_a_paused_run_needs_no_holder(here: Site) -> None:
    here.environ["COGFS_RUN_GRACE"] = "1"
    here.mount()
    with here.client() as cog:
        thread = chat(here, cog)
        with thread.run() as run:
            run.pause()
            with pytest.raises(ValidationError, match="paused"), run.tool_call():
                pass
        here.kill_daemon()
        here.start()
    with here.client() as cog:
        assert run_of(cog, run.id).state == Run.PAUSED
        assert cog.thread("chat").user_message("queued", run=run.id).run_id == run.id
        with cog.run(run.id) as resumed, resumed.tool_call():
            assert resumed.refresh().state == "going"
        assert resumed.state == "ended"
        with pytest.raises(ValidationError, match="ended"):
            resumed.pause()


# --- restarts of the daemon -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("options", ["{}", '{"durable": true, "lease": 60}'])
def test_runs_survive_a_restart_of_the_daemon(here: Site, how: str, options: str) -> None:
    here.mount()
    with here.client() as cog:
        chat(here, cog)
        with agent(here, options=options, tool="shell") as holder:
            if how == "killed":
                here.kill_daemon()
            else:
                here.ctl("daemon", "stop")
            here.start()
            found = run_of(cog, holder.run_id)
            assert found.state == Run.GOING
            assert [call.name for call in found.open_tool_calls] == ["shell"]
            with pytest.raises(ThreadBusy):
                cog.thread("chat").rewind(cog.thread("chat").append("note", "x").id)
            assert holder.finish() == "ended"
            assert run_of(cog, holder.run_id).state == Run.ENDED


def test_a_run_whose_holder_died_with_the_daemon_ends_after_the_grace(here: Site) -> None:
    here.environ["COGFS_RUN_GRACE"] = "20"
    here.mount()
    with here.client() as cog:
        chat(here, cog)
        with agent(here, tool="shell") as killed, agent(here) as alive:
            here.kill_daemon()
            killed.kill()
            here.start()
            # Until then it is in the way.
            assert run_of(cog, killed.run_id).state == Run.GOING
            ended = wait_for_state(cog, killed.run_id, Run.INTERRUPTED)
            assert not ended.open_tool_calls
            assert run_of(cog, alive.run_id).state == Run.GOING
            assert alive.finish() == "ended"


# --- bad input --------------------------------------------------------------------------------------------------------

Stub = run_pb2_grpc.RunServiceStub


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    """A daemon with a mounted workspace, the thread ``chat`` in it, ``talk`` without, a plain and a durable run."""
    with site() as place:
        place.environ["COGFS_RUN_GRACE"] = "600"
        place.mount()
        with place.client() as cog:
            thread = cog.create_thread("chat", workspace=place.workspace(cog))
            talk = cog.create_thread("talk")
            thread.run(id="plain")
            thread.run(id="durable", durable=True, lease=600)
            thread.run(id="over").end()
            talk.run(id="talking")
        yield place


def _start(**fields: Any) -> run_pb2.StartRunRequest:
    return run_pb2.StartRunRequest(**{"thread_id": "chat", "kind": Run.PLAIN, **fields})


def _lease(seconds: int, nanos: int = 0) -> Any:
    request = run_pb2.StartRunRequest()
    request.lease.seconds, request.lease.nanos = seconds, nanos
    return request.lease


_WRONG, _NONE = Reason.VALIDATION_ERROR, Reason.NOT_FOUND
_LONG = "x" * 129
#: One that can be seen here, in a container none can: then what is no process either.
_KERNEL_THREAD = 2 if Path("/proc/2/comm").exists() and not Path("/proc/2/cmdline").read_bytes() else -2


@pytest.mark.parametrize(
    ("call", "request_", "reason"),
    [
        ("StartRun", run_pb2.StartRunRequest(), _WRONG),
        ("StartRun", _start(thread_id=""), _WRONG),
        ("StartRun", _start(thread_id="nobody"), _NONE),
        ("StartRun", _start(thread_id="no id/"), _WRONG),
        ("StartRun", _start(kind=Run.KIND_UNSPECIFIED), _WRONG),
        ("StartRun", _start(kind=7), _WRONG),
        ("StartRun", _start(strategy=7), _WRONG),
        ("StartRun", _start(workspace_id="ws_none"), _NONE),
        ("StartRun", _start(run_id="no id/"), _WRONG),
        ("StartRun", _start(run_id=_LONG), _WRONG),
        ("StartRun", _start(run_id="plain"), Reason.ALREADY_EXISTS),
        ("StartRun", _start(agent=_LONG), _WRONG),
        ("StartRun", _start(holder="a\nb"), _WRONG),
        ("StartRun", _start(holder=_LONG), _WRONG),
        ("StartRun", _start(lease=_lease(30)), _WRONG),
        ("StartRun", _start(kind=Run.DURABLE, lease=_lease(0)), _WRONG),
        ("StartRun", _start(kind=Run.DURABLE, lease=_lease(-5)), _WRONG),
        ("StartRun", _start(kind=Run.DURABLE, lease=_lease(3601)), _WRONG),
        ("StartRun", _start(kind=Run.DURABLE, lease=_lease(1 << 62)), _WRONG),
        ("StartRun", _start(kind=Run.DURABLE, lease=_lease(5, -1)), _WRONG),
        ("StartRun", _start(parent_run_id="plain"), _WRONG),
        ("StartRun", _start(parent_tool_call_id="call"), _WRONG),
        ("StartRun", _start(parent_run_id="none", parent_tool_call_id="call"), _NONE),
        ("StartRun", _start(parent_run_id="plain", parent_tool_call_id="call"), _NONE),
        ("StartRun", _start(parent_run_id="over", parent_tool_call_id="call"), _WRONG),
        ("StartRun", _start(checkpoints=thread_pb2.CheckpointPolicy(rewind_files=True)), _WRONG),
        ("StartRun", _start(checkpoints=thread_pb2.CheckpointPolicy(exclude=["\n"])), _WRONG),
        ("RenewRun", run_pb2.RenewRunRequest(), _WRONG),
        ("RenewRun", run_pb2.RenewRunRequest(run_id="none"), _NONE),
        ("RenewRun", run_pb2.RenewRunRequest(run_id="plain"), _WRONG),
        ("RenewRun", run_pb2.RenewRunRequest(run_id="durable", holder="\0"), _WRONG),
        ("EndRun", run_pb2.EndRunRequest(), _WRONG),
        ("EndRun", run_pb2.EndRunRequest(run_id="none"), _NONE),
        ("PauseRun", run_pb2.PauseRunRequest(), _WRONG),
        ("PauseRun", run_pb2.PauseRunRequest(run_id="none"), _NONE),
        ("PauseRun", run_pb2.PauseRunRequest(run_id="over"), _WRONG),
        ("ResumeRun", run_pb2.ResumeRunRequest(), _WRONG),
        ("ResumeRun", run_pb2.ResumeRunRequest(run_id="none"), _NONE),
        ("ResumeRun", run_pb2.ResumeRunRequest(run_id="over"), _WRONG),
        ("GetRun", run_pb2.GetRunRequest(), _WRONG),
        ("GetRun", run_pb2.GetRunRequest(run_id="none"), _NONE),
        ("ListRuns", run_pb2.ListRunsRequest(thread_id="nobody"), _NONE),
        ("ListRuns", run_pb2.ListRunsRequest(workspace_id="ws_none"), _NONE),
        ("ListRuns", run_pb2.ListRunsRequest(page_size=-1), _WRONG),
        ("ListRuns", run_pb2.ListRunsRequest(page_size=1001), _WRONG),
        ("ListRuns", run_pb2.ListRunsRequest(page_token="nonsense"), _WRONG),
        ("BeginToolCall", run_pb2.BeginToolCallRequest(), _WRONG),
        ("BeginToolCall", run_pb2.BeginToolCallRequest(run_id="none"), _NONE),
        ("BeginToolCall", run_pb2.BeginToolCallRequest(run_id="over"), _WRONG),
        ("BeginToolCall", run_pb2.BeginToolCallRequest(run_id="plain", tool_call_id="no id/"), _WRONG),
        ("BeginToolCall", run_pb2.BeginToolCallRequest(run_id="plain", name=_LONG), _WRONG),
        ("EndToolCall", run_pb2.EndToolCallRequest(), _WRONG),
        ("EndToolCall", run_pb2.EndToolCallRequest(run_id="plain"), _WRONG),
        ("EndToolCall", run_pb2.EndToolCallRequest(run_id="none", tool_call_id="c"), _NONE),
        ("EndToolCall", run_pb2.EndToolCallRequest(run_id="plain", tool_call_id="c"), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(pid=os.getpid()), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", run_id="plain", pid=os.getpid()), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat"), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", pid=-1), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", pid=1), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", pid=_KERNEL_THREAD), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", pid=(1 << 31) - 1), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="nobody", pid=os.getpid()), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="talk", pid=os.getpid()), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(workspace_id="ws_none", pid=os.getpid()), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(run_id="none", pid=os.getpid()), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(run_id="over", pid=os.getpid()), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(run_id="talking", pid=os.getpid()), _WRONG),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(command_id="none", pid=os.getpid()), _NONE),
        ("RegisterCommand", run_pb2.RegisterCommandRequest(thread_id="chat", pid=1, command="x" * 4097), _WRONG),
        ("ListCommands", run_pb2.ListCommandsRequest(workspace_id="ws_none"), _NONE),
        ("WatchRun", run_pb2.WatchRunRequest(), _WRONG),
        ("WatchRun", run_pb2.WatchRunRequest(run_id="none"), _NONE),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(shared: Site, call: str, request_: Any, reason: Reason) -> None:
    with connect(f"unix://{shared.runtime}/cogfsd.sock") as cog:
        before = [one.SerializeToString() for one in _listed(cog)]
        method: Any = getattr(cog._connection.runs, call)
        with pytest.raises(CogfsError) as caught:
            if call == "WatchRun":
                list(cog._connection.stream(method, request_))
            else:
                cog._connection.call(method, request_)
        error = caught.value
        assert error.reason == reason, error.message
        assert error.message and "\n" not in error.message
        assert "Traceback" not in error.message and "internal error" not in error.message
        assert [one.SerializeToString() for one in _listed(cog)] == before


def _listed(cog: Client) -> list[Run]:
    found = list(cog.runs(ended=True))
    for one in found:
        # Reckoned anew each time.
        one.ClearField("lease_until")
    return found


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"run": "none"}, Reason.NOT_FOUND),
        ({"run": "over"}, Reason.VALIDATION_ERROR),
        ({"run": "talking"}, Reason.VALIDATION_ERROR),
        ({"run": "plain", "checkpoints": True}, Reason.VALIDATION_ERROR),
        ({"run": "plain", "parent_tool_call_id": "c"}, Reason.VALIDATION_ERROR),
        ({"run": "no id/"}, Reason.VALIDATION_ERROR),
    ],
)
def test_a_message_that_names_a_run_wrongly_is_refused(shared: Site, more: dict[str, Any], reason: Reason) -> None:
    with shared.client() as cog:
        thread = cog.thread("chat")
        with pytest.raises(CogfsError) as caught:
            thread.user_message("x", **more)
        assert caught.value.reason == reason
        assert not list(thread.entries())


def test_a_daemon_is_told_how_long_to_wait_or_refuses(here: Site) -> None:
    for name in ("COGFS_RUN_GRACE", "COGFS_TOOL_SETTLE"):
        for value in ("soon", "-1", "nan", "1e9"):
            refused = here.ctl("daemon", "start", code=Reason.VALIDATION_ERROR.exit_code, env={name: value})
            assert name in refused.err
            assert "Traceback" not in refused.err


def test_an_interrupted_program_ends_its_run(usual: Site, cog: Client, thread: Thread) -> None:
    chat(usual, cog)
    with agent(usual, thread.id) as holder:
        os.kill(holder.pid, signal.SIGINT)
        wait_for_state(cog, holder.run_id, Run.ENDED)
