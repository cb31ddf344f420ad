"""Commands: ``cogfsctl exec``, processes that are registered, and all that they leave in the background."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.client import Busy, Client, Thread, Workspace
from cogfs.fsd.control.processes import look
from cogfs.v1 import run_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.support.agents import agent, program, wait_for_state
from tests.e2e.support.site import CTL, PATIENCE, Aside, Site, kill, site, wait_for

Command = run_pb2.Command

#: Takes the control groups away from the daemon that it starts; nothing else has to be in its mounts.
_WITHOUT_GROUPS = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'for at in $(awk \'$3 == "cgroup2" {print $2}\' /proc/mounts); do umount -l $at || exit 1; done; exec "$@"',
    "sh",
)


def _has_groups() -> bool:
    return any(line.split()[2] == "cgroup2" for line in Path("/proc/mounts").read_text().splitlines())


@pytest.fixture(scope="module", params=[Command.CONTROL_GROUP, Command.PROCESSES], ids=["group", "processes"])
def tracked(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A daemon with a scanned workspace, which follows commands in either way, and the thread ``chat``."""
    if request.param == Command.CONTROL_GROUP and not _has_groups():
        pytest.skip("no control groups of version 2 are mounted here")
    with site() as place:
        if request.param == Command.PROCESSES:
            place.prefix = _WITHOUT_GROUPS
        place.environ["COGFS_TOOL_SETTLE"] = "1"
        place.start()
        place.ctl("mount", place.project, "--scan")
        with place.client() as cog:
            cog.create_thread("chat", workspace=place.workspace(cog)).user_message("x", id="m1")
            with program("sleep", "100") as process:
                assert cog.thread("chat").command(process.pid).tracking == request.param
        yield place


@pytest.fixture
def cog(tracked: Site) -> Iterator[Client]:
    with tracked.client() as client:
        wait_for("nothing is left", lambda: not client.commands())
        yield client


def pids(cog: Client) -> list[int]:
    return [pid for one in cog.commands() for pid in one.pids]


def restores(here: Site, cog: Client) -> bool:
    """Whether a restore is not refused; and a dry run says the same."""
    workspace = here.workspace(cog)
    snapshot = cog.thread("chat").entry("m1").file_checkpoint.snapshot_id
    busy = workspace.restore(snapshot, dry_run=True).busy
    try:
        workspace.restore(snapshot)
    except Busy:
        assert busy
        return False
    assert not busy
    return True


def left_by(here: Site, script: str) -> int:
    """The process that a command leaves, whose number it prints last."""
    done = here.ctl("exec", "chat", "--", "sh", "-c", script)
    return int(done.out.split()[-1])


# --- exec -------------------------------------------------------------------------------------------------------------


def test_the_exit_code_and_the_streams_pass_through(tracked: Site, cog: Client) -> None:
    done = tracked.ctl("exec", "chat", "--", "sh", "-c", "echo out; echo err >&2; exit 7", code=7)
    assert (done.out, done.err) == ("out\n", "err\n")
    assert tracked.ctl("exec", "chat", "--", "printf", "%s|", "-x", "--json", "a b").out == "-x|--json|a b|"
    assert tracked.ctl("exec", "chat", "--", "sh", "-c", "kill -TERM $$", code=143).out == ""
    missing = tracked.ctl("exec", "chat", "--", "no-such-command", code=127)
    assert "no-such-command" in missing.err and "Traceback" not in missing.err
    tracked.ctl("exec", "chat", "--", str(tracked.project), code=126)
    document = tracked.ctl("exec", "chat", "--json", "--", "sh", "-c", "echo out; exit 3", code=3).document
    assert (document["exit_code"], document["pids"], document["thread_id"]) == (3, [], "chat")
    wait_for("all have ended", lambda: not cog.commands())


def test_exec_names_what_is_wrong(tracked: Site, cog: Client) -> None:
    cog.create_thread("talk")
    marker = tracked.base / "marker"
    for thread, reason in (
        ("nobody", Reason.NOT_FOUND),
        ("talk", Reason.VALIDATION_ERROR),
        ("no id/", Reason.VALIDATION_ERROR),
    ):
        refused = tracked.ctl("exec", thread, "--", "touch", marker, code=reason.exit_code)
        assert refused.err.startswith("cogfsctl: ") and "Traceback" not in refused.err
        assert json.loads(tracked.ctl("exec", thread, "--json", "--", "touch", marker, code=None).out)["error"]
    tracked.ctl("exec", "chat", code=2)
    assert not marker.exists()


def test_busy_while_it_runs_and_until_what_it_left_has_ended(tracked: Site, cog: Client) -> None:
    with subprocess.Popen([CTL, "exec", "chat", "--", "cat"], env=tracked.environ, stdin=subprocess.PIPE) as running:
        wait_for("it runs", lambda: len(pids(cog)) == 2)
        assert not restores(tracked, cog)
        running.communicate(timeout=PATIENCE)
    wait_for("it has ended", lambda: not cog.commands())
    assert restores(tracked, cog)
    left = left_by(tracked, "sleep 1000 > /dev/null 2>&1 & echo $!")
    assert pids(cog) == [left]
    assert not restores(tracked, cog)
    kill(left)
    wait_for("it has ended", lambda: not cog.commands())
    assert restores(tracked, cog)


@pytest.mark.parametrize(
    "script",
    [
        "setsid sleep 1000 > /dev/null 2>&1 & echo $!",
        "(setsid sh -c 'sleep 1000 & echo $!' 2>/dev/null &) | head -1",
        "sh -c '(trap \"\" HUP; exec sleep 1000) > /dev/null 2>&1 & echo $!'",
    ],
)
def test_nothing_that_is_left_gets_away(tracked: Site, cog: Client, script: str) -> None:
    left = left_by(tracked, script.replace("& echo $!' 2", "> /dev/null & echo $!' 2"))
    assert pids(cog) == [left]
    assert not restores(tracked, cog)
    snapshot = cog.thread("chat").entry("m1").file_checkpoint.snapshot_id
    tracked.workspace(cog).restore(snapshot, force=True)
    assert not cog.commands()
    assert look(left) is None


def test_what_runs_on_when_exec_is_killed_is_known(tracked: Site, cog: Client) -> None:
    with subprocess.Popen(
        [CTL, "exec", "chat", "--", "sh", "-c", "sleep 1000 & wait"], env=tracked.environ, start_new_session=True
    ) as running:
        wait_for("it runs", lambda: len(pids(cog)) == 3)
        running.kill()
    left = pids(cog)
    assert len(left) == 2
    assert running.pid not in left
    assert not restores(tracked, cog)
    for pid in left:
        kill(pid)
    wait_for("all have ended", lambda: not cog.commands())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command(tracked: Site, cog: Client, number: signal.Signals) -> None:
    with subprocess.Popen([CTL, "exec", "chat", "--", "sleep", "1000"], env=tracked.environ) as running:
        wait_for("it runs", lambda: len(pids(cog)) == 2)
        running.send_signal(number)
        assert running.wait(PATIENCE) == 128 + number


def test_what_is_ignored_stays_ignored(tracked: Site, cog: Client) -> None:
    script = "echo ready; sleep 1; exit 3"
    with subprocess.Popen(
        ["nohup", CTL, "exec", "chat", "--", "sh", "-c", script], env=tracked.environ, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        for pid in (running.pid, *(one for one in pids(cog) if one != running.pid)):
            os.kill(pid, signal.SIGHUP)
        assert running.wait(PATIENCE) == 3


def test_an_interrupt_from_the_keyboard_is_for_the_command(tracked: Site, cog: Client) -> None:
    script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [CTL, "exec", "chat", "--", "sh", "-c", script],
        env=tracked.environ,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        os.killpg(running.pid, signal.SIGINT)
        assert running.communicate(timeout=PATIENCE)[0] == "caught\n"
        assert running.returncode == 5


# --- registered processes ---------------------------------------------------------------------------------------------


def test_a_registered_process_counts_with_what_it_had_started(tracked: Site, cog: Client) -> None:
    with program("sh", "-c", "sleep 1000 & sleep 1000 & wait") as process:
        wait_for("it has started them", lambda: len(_children(process.pid)) == 2)
        command = cog.register_command(process.pid, workspace=tracked.workspace(cog), command="build")
        assert command.command == "build"
        assert sorted(command.pids) == sorted([process.pid, *_children(process.pid)])
        kill(process.pid)
        process.wait(PATIENCE)
        assert len(pids(cog)) == 2
        assert not restores(tracked, cog)


def test_a_process_can_be_added_to_a_command(tracked: Site, cog: Client) -> None:
    with program("sleep", "1000") as first, program("sleep", "1000") as second:
        command = cog.thread("chat").command(first.pid)
        assert command.command == "sleep"
        for _ in range(2):
            again = cog.register_command(second.pid, command_id=command.id)
            assert (again.id, sorted(again.pids)) == (command.id, sorted([first.pid, second.pid]))
        kill(first.pid)
        first.wait(PATIENCE)
        assert pids(cog) == [second.pid]


def test_a_command_of_a_run_names_it(tracked: Site, cog: Client) -> None:
    with cog.thread("chat").run() as run, program("sleep", "1000") as process:
        run.command(process.pid, "make test")
        (found,) = cog.commands(tracked.workspace(cog))
        assert (found.run_id, found.thread_id, found.command) == (run.id, "chat", "make test")
        document = tracked.json("runs", tracked.project)
        assert [one["id"] for one in document["runs"]] == [run.id]
        assert document["commands"][0]["pids"] == [process.pid]
        listing = tracked.ctl("runs").out
        assert run.id in listing and "make test" in listing and str(process.pid) in listing
    # It goes on after its run.
    assert tracked.json("runs")["runs"] == []
    assert run.id in [one["id"] for one in tracked.json("runs", "--all")["runs"]]


def test_no_group_is_left_behind(tracked: Site, cog: Client) -> None:
    left = left_by(tracked, "setsid sleep 1000 > /dev/null 2>&1 & echo $!")
    names = {f"cogfs-{one.id}" for one in cog.commands()}
    assert names
    kill(left)
    wait_for("all have ended", lambda: not cog.commands())
    # Other daemons have theirs, and one that is killed leaves what it had.
    assert not [name for _, directories, _ in os.walk("/sys/fs/cgroup") for name in directories if name in names]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- restarts, and what is asked for meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), _WITHOUT_GROUPS], ids=["group", "processes"])
def test_what_was_left_is_known_to_the_next_daemon(here: Site, prefix: tuple[str, ...]) -> None:
    here.prefix = prefix
    here.start()
    here.ctl("mount", here.project, "--scan")
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        thread.user_message("x", id="m1")
        left = left_by(here, "setsid sleep 1000 > /dev/null 2>&1 & echo $!")
        with program("sleep", "1000") as other:
            thread.command(other.pid)
            here.kill_daemon()
        here.start()
    with here.client() as cog:
        wait_for("the other is forgotten", lambda: len(cog.commands()) == 1)
        assert pids(cog) == [left]
        assert not restores(here, cog)
        kill(left)
        wait_for("all have ended", lambda: not cog.commands())
        assert restores(here, cog)


def test_exec_is_refused_while_a_restore_goes_on(here: Site) -> None:
    here.environ["COGFS_TOOL_SETTLE"] = "300"
    here.start()
    here.ctl("mount", here.project, "--scan")
    marker = here.base / "marker"
    with here.client() as cog:
        workspace: Workspace = here.workspace(cog)
        thread: Thread = cog.create_thread("chat", workspace=workspace)
        first = thread.user_message("x")
        with agent(here, tool="shell") as holder:
            rewinding = Aside(lambda: thread.rewind(first.id, files=True, force=True))
            wait_for_state(cog, holder.run_id, run_pb2.Run.INTERRUPTED)
            refused = here.ctl("exec", "chat", "--", "touch", marker, code=Reason.BUSY.exit_code)
            assert "restore" in refused.err
            holder.finish()
            rewinding.join()
        assert not marker.exists()
        here.ctl("exec", "chat", "--", "touch", marker)
        assert marker.exists()


def test_a_rewind_on_the_command_line_tells_who_is_in_the_way(here: Site) -> None:
    here.environ["COGFS_TOOL_SETTLE"] = "1"
    here.start()
    here.ctl("mount", here.project, "--scan")
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        first = thread.user_message("x").id
        (here.project / "made").write_text("x")
        thread.append("assistant", "done")
        with agent(here, manner="obedient", tool="shell") as holder, contextlib.ExitStack() as stack:
            process = stack.enter_context(program("sleep", "1000"))
            thread.command(process.pid)
            plan = here.ctl("rewind", "chat", first, "--files", "--dry-run")
            for word in (holder.run_id, "shell", "sleep", str(process.pid)):
                assert word in plan.out, plan
            refused = here.ctl("rewind", "chat", first, "--files", "--yes", code=Reason.THREAD_BUSY.exit_code)
            assert holder.run_id in refused.err
            assert "Traceback" not in refused.err
            done = here.json("rewind", "chat", first, "--files", "--yes", "--force")
            assert done["runs"]["interrupted"] == [holder.run_id]
            assert holder.finish() == "interrupted"
        assert not (here.project / "made").exists()
