"""Every refusal of restores, rewinds, forks and undos, of memories, runs and snapshots: its reason, its sentence, the
same from the dry run, and nothing at all that changed.

A refusal is a call that says itself all about it, or one for which somebody has to be in the way first
(``support.in_the_way``). What is not here needs a disk or a kernel of its own: a full or broken disk is NO_SPACE or IO
(``test_bad_input``, ``test_bad_disks``), a snapshot that could not be captured is no target (``test_bypass``), and what
of a root, a value or a socket is refused is in ``test_bad_input`` and ``client/test_errors``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cogfs.client import (
    AlreadyExists,
    Busy,
    CogfsError,
    Denied,
    NotFound,
    RunInterrupted,
    Thread,
    ThreadBusy,
    Unavailable,
    ValidationError,
)
from cogfs.v1 import run_pb2, snapshot_pb2, thread_pb2
from tests.e2e.support.in_the_way import IN_THE_WAY
from tests.e2e.support.refusals import Call, Refusal, fork, prune, refused_too, restore, rewind, says_no, undo
from tests.e2e.support.refused_world import ClosedWorld, UnfinishedWorld, World
from tests.e2e.support.site import site


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


# --- refused by themselves --------------------------------------------------------------------------------------------


def nobody(world: World) -> Thread:
    """A thread that there is not."""
    return Thread(world.cog._connection, thread_pb2.Thread(id="nobody"))


def _restore(world: World, path: bytes, dry_run: bool) -> object:
    """What the client would not ask for."""
    request = snapshot_pb2.RestoreSnapshotRequest(snapshot_id=world.m1, paths=[path], dry_run=dry_run)
    connection = world.cog._connection
    return list(connection.stream(connection.snapshots.RestoreSnapshot, request))


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


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_who_is_in_the_way_refuses_and_nothing_changes(world: World, name: str) -> None:
    with IN_THE_WAY[name](world) as refusal:
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


# --- while a rewind is not finished -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unfinished() -> Iterator[UnfinishedWorld]:
    with site() as here:
        world = UnfinishedWorld(here)
        with here.client() as cog:
            world.look(cog)
            yield world


_UNFINISHED: dict[str, tuple[type[CogfsError], Callable[[UnfinishedWorld], Call]]] = {
    "rewind": (ThreadBusy, lambda w: rewind(w.thread, "m1")),
    "rewind by force": (ThreadBusy, lambda w: rewind(w.thread, "m1", force=True)),
    "rewind with files": (ThreadBusy, lambda w: rewind(w.thread, "m1", files=True)),
    "fork": (ThreadBusy, lambda w: fork(w.thread, "m1")),
    "fork with files": (ThreadBusy, lambda w: fork(w.thread, "m1", files=True)),
    "fork into a new directory": (ThreadBusy, lambda w: fork(w.thread, "m1", files=True, into=w.base / "new")),
    "restore": (Unavailable, lambda w: restore(w.workspace, w.snapshot)),
    "undo": (Unavailable, lambda w: undo(w.workspace)),
}
_UNFINISHED_SINGLE: dict[str, Callable[[UnfinishedWorld], object]] = {
    "entry": lambda w: w.thread.append("note", "x"),
    "memory": lambda w: w.thread.put_memory("x", ["m1"]),
    "policy": lambda w: w.thread.set_policy(False),
    "run": lambda w: w.thread.run(strategy="reject"),
    "run that would wait": lambda w: w.thread.run(),
    "deletion": lambda w: w.thread.delete(),
}


@pytest.mark.parametrize("name", _UNFINISHED)
def test_while_a_rewind_is_not_finished(unfinished: UnfinishedWorld, name: str) -> None:
    kind, call = _UNFINISHED[name]
    unfinished.guard.check(Refusal(kind, "cogfsctl mount", call(unfinished), refused_too), anew=False)


@pytest.mark.parametrize("name", _UNFINISHED_SINGLE)
def test_what_has_to_wait_for_the_end_of_a_rewind(unfinished: UnfinishedWorld, name: str) -> None:
    call = _UNFINISHED_SINGLE[name]
    refusal = Refusal(ThreadBusy, "not finished: run cogfsctl mount", lambda _: call(unfinished), None)
    unfinished.guard.check(refusal, anew=False)
