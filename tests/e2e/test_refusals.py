"""Every refusal of restores, rewinds, forks and undos, of memories, runs and snapshots: its reason, its sentence, the
same from the dry run, and nothing at all that changed.

A refusal is a call that says itself all about it (``_REFUSALS``), or one for which somebody has to be in the way first
(``in_the_way``). What is not here needs a daemon of its own: a rewind that a crash left unfinished is THREAD_BUSY
(``test_crash_fork``), a full or broken disk is NO_SPACE or IO (``test_bad_input``, ``test_bad_disks``), a snapshot that
could not be captured is no target (``test_bypass``), and what of a root, a value or a socket is refused is in
``test_bad_input`` and ``client/test_errors``.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest

from cogfs.client import (
    AlreadyExists,
    Busy,
    CogfsError,
    Corrupt,
    Denied,
    NotFound,
    RunInterrupted,
    Thread,
    ThreadBusy,
    Unavailable,
    ValidationError,
    Workspace,
    WorkspaceBusy,
)
from cogfs.v1 import run_pb2, snapshot_pb2, thread_pb2
from tests.e2e.support.agents import program
from tests.e2e.support.refusals import Refusal, busy, busy_before, refused_too, says_no
from tests.e2e.support.refused_world import LONG, ClosedWorld, World
from tests.e2e.support.site import site, wait_for

#: A call, told whether it is a dry run.
Call = Callable[[bool], object]
#: What is in the way for as long as the block lasts, and the refusal.
Builder = Callable[[World], AbstractContextManager[Refusal]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with site() as here:
        # What does not end at once is in the way.
        here.environ["COGFS_TOOL_SETTLE"] = "0"
        here.start()
        with here.client() as cog:
            world = World(here, cog)
            undos = _undos(world)
            yield world
            assert _undos(world) == undos


def _undos(world: World) -> list[tuple[str, str, str]]:
    """What an undo would take back, in each workspace in which something can be."""
    plans = [one.undo(dry_run=True) for one in (world.workspace, world.undone, world.vault)]
    return [(plan.undone_snapshot_id, plan.thread_id, plan.files_only_reason) for plan in plans]


# --- calls, and how they are made ------------------------------------------------------------------------------------


def rewind(thread: Thread, entry: str, **options: Any) -> Call:
    return lambda dry: thread.rewind(entry, dry_run=dry, **options)


def fork(thread: Thread, entry: str, **options: Any) -> Call:
    return lambda dry: thread.fork(entry, dry_run=dry, **options)


def restore(workspace: Workspace, snapshot: str, paths: Sequence[str] = (), **options: Any) -> Call:
    return lambda dry: workspace.restore(snapshot, paths, dry_run=dry, **options)


def undo(workspace: Workspace, **options: Any) -> Call:
    return lambda dry: workspace.undo(dry_run=dry, **options)


def prune(workspace: Workspace) -> Call:
    return lambda dry: workspace.prune(dry_run=dry)


def nobody(world: World) -> Thread:
    """A thread that there is not."""
    return Thread(world.cog._connection, thread_pb2.Thread(id="nobody"))


def _restore(world: World, path: bytes, dry_run: bool) -> object:
    """What the client would not ask for."""
    request = snapshot_pb2.RestoreSnapshotRequest(snapshot_id=world.m1, paths=[path], dry_run=dry_run)
    connection = world.cog._connection
    return list(connection.stream(connection.snapshots.RestoreSnapshot, request))


# --- refused by themselves --------------------------------------------------------------------------------------------

_REFUSALS: dict[str, tuple[type[CogfsError], str, Callable[[World], Call]]] = {
    # A restore.
    "restore of no snapshot": (NotFound, "snap_none", lambda w: restore(w.workspace, "snap_none")),
    "restore of a snapshot that was deleted": (NotFound, "snap_", lambda w: restore(w.pruned, w.gone)),
    "restore of another workspace's snapshot": (
        ValidationError,
        "is of workspace",
        lambda w: restore(w.fresh, w.m1),
    ),
    "restore of a path that nobody has": (
        NotFound,
        "neither the snapshot nor the workspace",
        lambda w: restore(w.workspace, w.m1, ["nothing"]),
    ),
    "restore of what leaves the root": (
        ValidationError,
        "leave the workspace's root",
        lambda w: partial(_restore, w, b"made/../../file"),
    ),
    "restore of an absolute path": (
        ValidationError,
        "relative to the workspace's root",
        lambda w: partial(_restore, w, b"/file"),
    ),
    "restore of a path in what is a directory on one side": (
        ValidationError,
        "a directory on one side only",
        lambda w: partial(_restore, w, b"turned/x"),
    ),
    "restore where nothing is mounted": (
        Unavailable,
        "not mounted",
        lambda w: restore(w.away, w.away_snapshot),
    ),
    "restore of what no snapshot could keep": (
        Denied,
        "every name of file",
        lambda w: restore(w.linked, w.linked_snapshot),
    ),
    # An undo.
    "undo where nothing was restored": (ValidationError, "there was none", lambda w: undo(w.fresh)),
    "undo where nothing is mounted": (Unavailable, "not mounted", lambda w: undo(w.away)),
    # A rewind.
    "rewind of no thread": (
        NotFound,
        "nobody",
        lambda w: rewind(nobody(w), "m1"),
    ),
    "rewind to no entry": (NotFound, "nothing", lambda w: rewind(w.chat, "nothing", files=True)),
    "rewind to another thread's entry": (NotFound, "t1", lambda w: rewind(w.chat, "t1")),
    "rewind to an entry off the branch": (
        ValidationError,
        "not on the thread's active branch",
        lambda w: rewind(w.talk, "t3"),
    ),
    "rewind of neither": (
        ValidationError,
        "neither conversation nor files",
        lambda w: rewind(w.chat, "a1", files=False, memory=False),
    ),
    "rewind of files that there are not": (
        ValidationError,
        "no checkpoint",
        lambda w: rewind(w.talk, "t1", files=True),
    ),
    "rewind to a checkpoint that was pruned": (
        ValidationError,
        "pruned",
        lambda w: rewind(w.pruned_thread, "p1", files=True),
    ),
    "rewind to before a message whose checkpoint was pruned": (
        ValidationError,
        "pruned",
        lambda w: rewind(w.pruned_thread, "p1", files=True, before=True),
    ),
    "rewind in a workspace in which it did not run": (
        ValidationError,
        "did not run in workspace",
        lambda w: rewind(w.chat, "m1", files=True, workspace=w.fresh),
    ),
    "rewind in no workspace": (
        ValidationError,
        "did not run in workspace",
        lambda w: rewind(w.chat, "m1", files=True, workspace="ws_none"),
    ),
    "rewind of the files of nobody": (
        ValidationError,
        "no run of reviewer",
        lambda w: rewind(w.chat, "m1", files=True, agents=["reviewer"]),
    ),
    "rewind to before what is no message": (
        ValidationError,
        "no user message",
        lambda w: rewind(w.chat, "a1", before=True),
    ),
    "rewind to before a message without files": (
        ValidationError,
        "no checkpoint of the files",
        lambda w: rewind(w.talk, "t1", files=True, before=True),
    ),
    "rewind for no run": (NotFound, "no run nobody", lambda w: rewind(w.chat, "a1", calling_run="nobody")),
    "rewind where nothing is mounted": (
        Unavailable,
        "not mounted",
        lambda w: rewind(w.away_thread, "w1", files=True),
    ),
    "rewind of what could not be undone": (
        Denied,
        r"file.*hard-link",
        lambda w: rewind(w.linked_thread, "l1", files=True),
    ),
    "force does not help what could not be undone": (
        Denied,
        r"file.*hard-link",
        lambda w: rewind(w.linked_thread, "l1", files=True, force=True),
    ),
    # A fork.
    "fork of no thread": (
        NotFound,
        "nobody",
        lambda w: fork(nobody(w), "m1"),
    ),
    "fork at no entry": (NotFound, "nothing", lambda w: fork(w.chat, "nothing")),
    "fork at another thread's entry": (NotFound, "t1", lambda w: fork(w.chat, "t1")),
    "fork of a taken id": (ValidationError, "talk already", lambda w: fork(w.chat, "a1", id="talk")),
    "fork of its own id": (ValidationError, "chat already", lambda w: fork(w.chat, "a1", id="chat")),
    "fork of a taken id with files": (
        ValidationError,
        "talk already",
        lambda w: fork(w.chat, "a1", id="talk", files=True, into=w.base / "new"),
    ),
    "fork of an id that cannot be one": (
        ValidationError,
        "malformed",
        lambda w: fork(w.chat, "a1", id="a b"),
    ),
    "fork without files into a directory": (
        ValidationError,
        "is for its files",
        lambda w: fork(w.chat, "a1", into=w.base / "new"),
    ),
    "fork without files into a workspace": (
        ValidationError,
        "is for its files",
        lambda w: fork(w.chat, "a1", workspace=w.fresh),
    ),
    "fork without files from a workspace": (
        ValidationError,
        "is for its files",
        lambda w: fork(w.chat, "a1", source=w.workspace),
    ),
    "fork without files for an agent": (
        ValidationError,
        "is for its files",
        lambda w: fork(w.chat, "a1", agents=["coder"]),
    ),
    "fork into a workspace and a directory": (
        ValidationError,
        "one of them only",
        lambda w: fork(w.chat, "a1", files=True, workspace=w.fresh, into=w.base / "new"),
    ),
    "fork into no workspace": (
        NotFound,
        "ws_none",
        lambda w: fork(w.chat, "a1", files=True, workspace="ws_none"),
    ),
    "fork from a workspace in which it did not run": (
        ValidationError,
        "did not run in workspace",
        lambda w: fork(w.chat, "a1", files=True, source=w.fresh),
    ),
    "fork of the files of nobody": (
        ValidationError,
        "no run of reviewer",
        lambda w: fork(w.chat, "a1", files=True, agents=["reviewer"]),
    ),
    "fork of files that there are not": (
        ValidationError,
        "no checkpoint",
        lambda w: fork(w.talk, "t1", files=True, into=w.base / "new"),
    ),
    "fork at a checkpoint that was pruned": (
        ValidationError,
        "pruned",
        lambda w: fork(w.pruned_thread, "p1", files=True, into=w.base / "new"),
    ),
    "fork into a directory that is not empty": (
        ValidationError,
        "not empty",
        lambda w: fork(w.chat, "a1", files=True, into=w.base / "full"),
    ),
    "fork into a file": (
        ValidationError,
        "not a directory",
        lambda w: fork(w.chat, "a1", files=True, into=w.base / "full" / "x"),
    ),
    "fork below what there is not": (
        ValidationError,
        "does not exist",
        lambda w: fork(w.chat, "a1", files=True, into=w.base / "no" / "where"),
    ),
    "fork into a workspace's files": (
        ValidationError,
        "mount of cogfs",
        lambda w: fork(w.chat, "a1", files=True, into=w.root / "new"),
    ),
    "fork around a workspace": (
        ValidationError,
        "holds the workspace",
        lambda w: fork(w.chat, "a1", files=True, into=w.base),
    ),
    "fork into the daemon's files": (
        ValidationError,
        "own files",
        lambda w: fork(w.chat, "a1", files=True, into=w.here.state / "new"),
    ),
    "fork into a workspace where nothing is mounted": (
        Unavailable,
        "not mounted",
        lambda w: fork(w.chat, "a1", files=True, workspace=w.away),
    ),
    "fork over what could not be undone": (
        Denied,
        r"file.*hard-link",
        lambda w: fork(w.chat, "a1", files=True, workspace=w.linked),
    ),
    # Snapshots.
    "prune by nothing": (ValidationError, "nothing says what to keep", lambda w: prune(w.workspace)),
    # A session of an agent SDK.
    "session without checkpoints": (
        ValidationError,
        "not enabled",
        lambda w: partial(w.unchecked.rewind_files, w.not_enabled),
    ),
    "session's id that is none": (
        ValidationError,
        "not the id of a user message",
        lambda w: partial(w.session.rewind_files, str(uuid.UUID(int=1))),
    ),
    "session's id of another one": (
        ValidationError,
        "belongs to session",
        lambda w: partial(w.session.rewind_files, w.not_enabled),
    ),
    "session's message without a snapshot": (
        ValidationError,
        "no snapshot of the files",
        lambda w: partial(w.session.rewind_files, w.subagents),
    ),
}


@pytest.mark.parametrize("name", _REFUSALS)
def test_a_refusal_is_the_same_in_its_dry_run(world: World, name: str) -> None:
    kind, says, call = _REFUSALS[name]
    agrees = says_no if name.startswith("session") else refused_too
    world.guard.check(Refusal(kind, says, call(world), agrees), anew=False)


# --- calls that have no dry run ---------------------------------------------------------------------------------------

_SINGLE: dict[str, tuple[type[CogfsError], str, Callable[[World], object]]] = {
    # Entries.
    "entry of a taken id": (AlreadyExists, "m1 already", lambda w: w.chat.append("note", "x", id="m1")),
    "entry with a checkpoint that is forged": (
        ValidationError,
        "set by the daemon alone",
        lambda w: w.chat.append("user", "x", metadata={"file_checkpoint": {"snapshot_id": w.m1}}),
    ),
    "entry with a checkpoint at it that is forged": (
        ValidationError,
        "set by the daemon alone",
        lambda w: w.chat.append("note", "x", metadata={"file_checkpoint_at": {"snapshot_id": w.m1}}),
    ),
    "message whose checkpoint is required": (
        Unavailable,
        "not mounted",
        lambda w: w.away_thread.user_message("x", require_checkpoint=True),
    ),
    "entry of another thread's run": (
        ValidationError,
        "is in the thread talk",
        lambda w: w.chat.append("note", "x", run="stopped"),
    ),
    "entry of a run that was stopped": (RunInterrupted, "stopped", lambda w: w.talk.append("note", "x", run="stopped")),
    "entry of a run that has ended": (ValidationError, "has ended", lambda w: w.talk.append("note", "x", run="ended")),
    "thread of a taken id": (AlreadyExists, "chat already", lambda w: w.cog.create_thread("chat")),
    # Memories.
    "memory of no entry": (NotFound, "nothing", lambda w: w.chat.put_memory("x", ["nothing"])),
    "memory of another thread's entry": (NotFound, "t1", lambda w: w.chat.put_memory("x", ["t1"])),
    "memory of another kind": (
        ValidationError,
        "of another kind",
        lambda w: w.chat.put_memory("x", "a1", kind="summary", id="item"),
    ),
    "file of the memory without a name": (
        ValidationError,
        "needs a name",
        lambda w: w.chat.put_memory("x", "a1", kind="file"),
    ),
    "memory with a name that is no file": (ValidationError, "needs a name", lambda w: w.chat.put_memory("x", name="n")),
    "summary of nothing": (ValidationError, "has none yet", lambda w: w.empty.put_memory("x", kind="summary")),
    "summary of two entries": (
        ValidationError,
        "belongs to one entry",
        lambda w: w.chat.put_memory("x", ["m1", "a1"], kind="summary"),
    ),
    # Runs.
    "run of a taken id": (AlreadyExists, "ended already", lambda w: w.talk.run(id="ended")),
    "run in no workspace": (NotFound, "ws_none", lambda w: w.talk.run(workspace="ws_none")),
    "plain run with a lease": (ValidationError, "no lease", lambda w: w.talk.run(lease=10)),
    "lease that is too short": (ValidationError, "1 second", lambda w: w.talk.run(durable=True, lease=0.5)),
    "lease that is too long": (ValidationError, "1 hour", lambda w: w.talk.run(durable=True, lease=4000)),
    "run of no run's tool call": (
        NotFound,
        "nobody",
        lambda w: w.talk.run(parent=run_pb2.ToolCall(id="call", run_id="nobody")),
    ),
    "run of the tool call of one that has ended": (
        ValidationError,
        "does not go on",
        lambda w: w.talk.run(parent=run_pb2.ToolCall(id="call", run_id="ended")),
    ),
    "renewal of no run": (NotFound, "nobody", lambda w: w.cog.run("nobody").renew()),
    "renewal of a plain run": (ValidationError, "is plain", lambda w: w.cog.run("ended").renew()),
    "pause of a run that was stopped": (RunInterrupted, "stopped", lambda w: w.cog.run("stopped").pause()),
    "pause of a run that has ended": (ValidationError, "has ended", lambda w: w.cog.run("ended").pause()),
    "resumption of a run that was stopped": (RunInterrupted, "stopped", lambda w: w.cog.run("stopped").resume()),
    "resumption of a run that has ended": (ValidationError, "has ended", lambda w: w.cog.run("ended").resume()),
    "tool call of a run that was stopped": (
        RunInterrupted,
        "stopped",
        lambda w: w.cog.run("stopped").tool_call("x").__enter__(),
    ),
    "tool call of a run that has ended": (
        ValidationError,
        "has ended",
        lambda w: w.cog.run("ended").tool_call("x").__enter__(),
    ),
    "holding of a run that was stopped": (RunInterrupted, "stopped", lambda w: w.cog.run("stopped").__enter__()),
    "command of a run that was stopped": (
        RunInterrupted,
        "stopped",
        lambda w: w.cog.run("stopped").command(os.getpid()),
    ),
    "command that is no process": (NotFound, "no process", lambda w: w.chat.command(2**22)),
    "command that is the daemon": (ValidationError, "of cogfs itself", lambda w: w.chat.command(w.here.daemon_pid())),
    "command where there are no files": (ValidationError, "no workspace", lambda w: w.talk.command(os.getpid())),
    "command of no command": (
        NotFound,
        "nothing",
        lambda w: w.cog.register_command(os.getpid(), command_id="nothing"),
    ),
    # Snapshots and workspaces.
    "copy of no snapshot": (NotFound, "snap_none", lambda w: w.fresh.copy_snapshot("snap_none")),
    "copy into its own workspace": (ValidationError, "already", lambda w: w.workspace.copy_snapshot(w.m1)),
    "deletion of no snapshot": (NotFound, "snap_", lambda w: w.cog.snapshot(w.gone).delete()),
    "deletion of the newest snapshot": (
        ValidationError,
        "newest of its workspace",
        lambda w: next(iter(w.workspace.snapshots())).delete(),
    ),
    "deletion of what an undo needs": (
        ValidationError,
        "undo the last restore",
        lambda w: w.cog.snapshot(w.m1).delete(),
    ),
    "deletion of a workspace that is mounted": (Busy, "unmount it first", lambda w: w.workspace.delete()),
    "deletion of a workspace of a thread": (Busy, "away works in", lambda w: w.away.delete()),
}


@pytest.mark.parametrize("name", _SINGLE)
def test_a_refusal_changes_nothing(world: World, name: str) -> None:
    kind, says, call = _SINGLE[name]
    world.guard.check(Refusal(kind, says, lambda _: call(world), None), anew=False)


# --- somebody is in the way -------------------------------------------------------------------------------------------

_IN_THE_WAY: dict[str, Builder] = {}


def in_the_way(build: Callable[[World], Iterator[Refusal]]) -> Builder:
    """A refusal that lasts as long as a block."""
    made = contextlib.contextmanager(build)
    _IN_THE_WAY[build.__name__] = made
    return made


@in_the_way
def a_run_of_the_thread_and_its_conversation(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1"), busy)


@in_the_way
def a_run_of_the_thread_and_its_files(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_the_thread_and_the_files_alone(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1", files=True, memory=False), busy)


@in_the_way
def a_durable_run_of_the_thread(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1"), busy)
    run.end()


@in_the_way
def a_lease_when_a_rewind_is_forced(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    call = rewind(world.chat, "a1", files=True, force=True)
    yield Refusal(ThreadBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_lease_when_a_fork_is_forced(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    call = fork(world.chat, "a1", files=True, force=True)
    yield Refusal(ThreadBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_lease_of_another_thread_when_a_rewind_is_forced(world: World) -> Iterator[Refusal]:
    run = world.beside.run(durable=True, lease=600)
    call = rewind(world.chat, "a1", files=True, force=True)
    yield Refusal(WorkspaceBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_run_of_the_thread_for_its_fork(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1"), busy)


@in_the_way
def a_run_of_the_thread_for_its_fork_with_files(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_the_thread_for_a_fork_into_a_new_directory(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1", files=True, into=world.base / "new"), busy)


@in_the_way
def a_run_of_the_thread_for_an_undo_of_its_rewind(world: World) -> Iterator[Refusal]:
    with world.undone_thread.run() as run:
        yield Refusal(Busy, run.id, undo(world.undone), busy)


@in_the_way
def a_run_of_another_thread(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(WorkspaceBusy, f"{run.id} of thread beside", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_another_thread_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(WorkspaceBusy, f"{run.id} of thread beside", fork(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_in_the_workspace_that_a_fork_is_to_get(world: World) -> Iterator[Refusal]:
    with world.talk.run(workspace=world.fresh) as run:
        yield Refusal(WorkspaceBusy, run.id, fork(world.chat, "a1", files=True, workspace=world.fresh), busy)


@in_the_way
def a_tool_call_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_tool_call_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", restore(world.workspace, world.m1), busy)


@in_the_way
def a_tool_call_when_a_restore_is_forced(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", restore(world.workspace, world.m1, force=True), busy)


@in_the_way
def a_tool_call_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", undo(world.workspace), busy)


@in_the_way
def a_tool_call_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.talk, workspace=world.fresh):
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, "tool call shell", call, busy)


@in_the_way
def a_tool_call_of_a_run_that_waits_for_somebody(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call:
        world.cog.run(call.run_id).pause()
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_tool_call_that_does_not_end_by_force(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call:
        forced = rewind(world.chat, "a1", files=True, force=True)
        yield Refusal(WorkspaceBusy, "not ended in time", forced, busy_before, stops=[call.run_id])


@in_the_way
def a_tool_call_that_goes_on_after_its_run(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside) as call:
        world.cog.run(call.run_id).end()
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(Busy, f"sleep .pid {pid}. of the command 'make test'", restore(world.workspace, world.m1), busy)


@in_the_way
def a_command_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(Busy, f"pid {pid}", undo(world.workspace), busy)


@in_the_way
def a_command_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.command(world.fresh) as pid:
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, f"pid {pid}", call, busy)


@in_the_way
def what_a_command_left(world: World) -> Iterator[Refusal]:
    with world.left_behind() as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_that_takes_its_time_to_stop(world: World) -> Iterator[Refusal]:
    with world.ignoring_sigterm() as process:
        yield Refusal(Busy, f"pid {process.pid}", restore(world.workspace, world.m1), busy)


@in_the_way
def a_writer_for_a_restore(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", restore(world.workspace, world.m1), busy)


@in_the_way
def a_writer_for_a_rewind(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_writer_for_an_undo(world: World) -> Iterator[Refusal]:
    with (world.root / "other").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", undo(world.workspace), busy)


@in_the_way
def a_writer_for_a_fork(world: World) -> Iterator[Refusal]:
    with (world.base / "fresh" / "file").open("a"):
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", call, busy)


@in_the_way
def a_writer_for_a_session(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        call = partial(world.session.rewind_files, world.asked)
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", call, says_no)


@in_the_way
def a_map_that_can_be_written(world: World) -> Iterator[Refusal]:
    with world.mapped(world.root / "file"):
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def whoever_works_in_a_directory_that_goes(world: World) -> Iterator[Refusal]:
    with world.working_in(world.root / "made") as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "m1", files=True, before=True), busy)


@in_the_way
def a_writer_of_something_else_when_it_is_strict(world: World) -> Iterator[Refusal]:
    with (world.root / "aside").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", restore(world.workspace, world.m1, strict=True), busy)


@in_the_way
def the_run_that_asks_in_its_own_thread(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ValidationError, "thread of itself", rewind(world.chat, "a1", calling_run=run.id), refused_too)


@in_the_way
def the_run_that_asks_by_force(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        call = rewind(world.chat, "a1", files=True, force=True, calling_run=run.id)
        yield Refusal(ValidationError, "thread of itself", call, refused_too)


@in_the_way
def the_run_that_asks_in_its_own_workspace(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        call = rewind(world.chat, "a1", files=True, calling_run=run.id)
        yield Refusal(ValidationError, "workspace of itself", call, refused_too)


@in_the_way
def a_run_that_waits_for_the_run_that_asks(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call, world.talk.run(parent=call) as run:
        asked = rewind(world.chat, "a1", calling_run=run.id)
        yield Refusal(ValidationError, "waits for it", asked, refused_too)


@in_the_way
def a_damaged_content_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(Corrupt, "object", restore(world.vault, world.vault_snapshot), refused_too)


@in_the_way
def a_damaged_content_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(Corrupt, "object", rewind(world.vault_thread, "v1", files=True), refused_too)


@in_the_way
def a_damaged_content_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(Corrupt, "object", undo(world.vault), refused_too)


@in_the_way
def a_damaged_content_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.damaged():
        call = fork(world.vault_thread, "v1", files=True, workspace=world.fresh)
        yield Refusal(Corrupt, "object", call, refused_too)


@in_the_way
def a_damaged_content_for_a_fork_into_a_new_directory(world: World) -> Iterator[Refusal]:
    with world.damaged():
        call = fork(world.vault_thread, "v1", files=True, into=world.base / "new")
        yield Refusal(Corrupt, "object", call, refused_too)


# --- without a dry run ---


@in_the_way
def a_run_of_a_thread_that_is_to_be_deleted(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(ThreadBusy, run.id, lambda _: world.beside.delete(), None)


@in_the_way
def another_holder_of_a_lease(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=600, holder="first")
    yield Refusal(ThreadBusy, "first holds the run", lambda _: world.cog.run(run.id).renew("second"), None)
    run.end()


@in_the_way
def a_lease_that_ran_out(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=1)
    wait_for("it has run out", lambda: run.refresh().state == "lapsed")
    yield Refusal(RunInterrupted, "its lease ran out", lambda _: run.append("note", "x"), None)
    run.end()


@in_the_way
def the_renewal_of_a_run_that_was_stopped(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=600)
    world.talk.rewind("t2", force=True)
    yield Refusal(RunInterrupted, "was stopped", lambda _: run.renew(), None)


@in_the_way
def a_tool_call_of_a_paused_run(world: World) -> Iterator[Refusal]:
    run = world.talk.run()
    run.pause()
    yield Refusal(ValidationError, "is paused", lambda _: run.tool_call("x").__enter__(), None)
    run.end()


@in_the_way
def a_tool_call_of_a_taken_id(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.talk) as call:
        again = world.cog.run(call.run_id).tool_call("x", id=call.id)
        yield Refusal(AlreadyExists, "already", lambda _: again.__enter__(), None)


@in_the_way
def a_run_that_rejects_while_a_restore_goes_on(world: World) -> Iterator[Refusal]:
    yield Refusal(ThreadBusy, "strategy", partial(_meanwhile, world, lambda: world.chat.run(strategy="reject")), None)


@in_the_way
def a_paused_run_that_rejects_meanwhile(world: World) -> Iterator[Refusal]:
    run = world.beside.run(strategy="reject")
    run.pause()
    yield Refusal(ThreadBusy, "strategy", partial(_meanwhile, world, run.resume), None)
    run.end()


@in_the_way
def a_command_that_is_asked_for_meanwhile(world: World) -> Iterator[Refusal]:
    with program("sleep", LONG) as process:
        call = partial(_meanwhile, world, lambda: world.chat.command(process.pid))
        yield Refusal(Busy, "a restore changes the files", call, None)


def _meanwhile(world: World, call: Callable[[], object], _: bool) -> object:
    """While a restore holds the workspace."""
    with world.held():
        return call()


@pytest.mark.parametrize("name", _IN_THE_WAY)
def test_who_is_in_the_way_refuses_and_nothing_changes(world: World, name: str) -> None:
    with _IN_THE_WAY[name](world) as refusal:
        world.guard.check(refusal)


# --- what a user may not do -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed() -> Iterator[ClosedWorld]:
    if os.geteuid() != 0:
        pytest.skip("root alone has files of two users")
    with site() as here:
        world = ClosedWorld(here)
        with here.client() as cog:
            world.fill(cog)
            yield world


_CLOSED = {
    "foreign": "part: the directory belongs to another user",
    "shut": "part: the directory cannot be read",
    "hidden": "part/file, which no snapshot could keep .unreadable.",
    "capable": "part/file: root alone may set its security.capability",
}


@pytest.mark.parametrize("what", ["restore", "rewind", "fork"])
@pytest.mark.parametrize("name", _CLOSED)
def test_what_a_user_may_not_change(closed: ClosedWorld, name: str, what: str) -> None:
    thread = closed.cog.thread(name)
    calls = {
        "restore": restore(closed.workspace(name), closed.snapshots[name]),
        "rewind": rewind(thread, "m1", files=True),
        "fork": fork(thread, "m1", files=True),
    }
    closed.guard.check(Refusal(Denied, _CLOSED[name], calls[what], refused_too), anew=False)


def test_where_a_user_may_make_no_directory(closed: ClosedWorld) -> None:
    call = fork(closed.cog.thread("foreign"), "m1", files=True, into=closed.base / "new")
    closed.guard.check(Refusal(Denied, "may make no directory", call, refused_too), anew=False)
