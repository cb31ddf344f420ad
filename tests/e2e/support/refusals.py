"""What a refusal has to be: for its reason, in one sentence, said by the dry run too, with nothing changed at all.

Owns what counts as a change, how a dry run may say the same, and the calls that have dry runs. Knows no refusal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from cogfs.client import Client, CogfsError, Thread, Workspace
from cogfs.v1 import common_pb2, run_pb2, thread_pb2, workspace_pb2
from tests.support.tree import describe, differences

Run = run_pb2.Run
By = common_pb2.BusyBy

#: Who is in the way: the kind, the id of a run or a command, the process, the path.
Who = tuple[str, str, int, str]


#: A call, told whether it is a dry run.
Call = Callable[[bool], object]


@dataclass(frozen=True)
class Refusal:
    """One call that is refused, and how."""

    kind: type[CogfsError]
    #: A pattern for telling words of the sentence.
    says: str
    call: Call
    #: That what the dry run came to says the same as the error; None: the call has no dry run.
    agrees: Callable[[CogfsError, object], None] | None
    #: Runs that ``force`` stops before it turns out that this was not enough.
    stops: Collection[str] = ()


class Guard:
    """Sees that nothing changes in the directories ``places``, nor in anything that the daemon keeps."""

    def __init__(self, cog: Client, places: Sequence[Path]) -> None:
        self._cog = cog
        self._places = places
        self._known: dict[str, Any] | None = None

    def check(self, refusal: Refusal, *, anew: bool = True) -> None:
        """The call is refused as it should be, by its dry run too, and neither changes anything. Without ``anew``
        nothing has changed since the last time, either."""
        before, self._known = self._known, None
        if anew or before is None:
            before = _standing(self._cog, self._places)
        plan = _outcome(refusal.call, dry_run=True) if refusal.agrees is not None else None
        said = _outcome(refusal.call, dry_run=False)
        now = _standing(self._cog, self._places)
        _check_still(before, now, refusal.stops)
        self._known = now
        assert isinstance(said, CogfsError), f"it was not refused: {said}"
        assert type(said) is refusal.kind, f"{type(said).__name__}: {said}"
        _check_sentence(said.message)
        assert re.search(refusal.says, said.message), said.message
        if refusal.agrees is not None:
            refusal.agrees(said, plan)


def _outcome(call: Call, *, dry_run: bool) -> object:
    """What is answered, or the error."""
    try:
        return call(dry_run)
    except CogfsError as error:
        return error


def _check_sentence(said: str) -> None:
    assert said and said == said.strip() and said.isprintable(), said
    for word in ("Traceback", "internal error", "Errno", "Error("):
        assert word not in said, said


# --- calls ------------------------------------------------------------------------------------------------------------


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


# --- what a dry run says ----------------------------------------------------------------------------------------------


def refused_too(said: CogfsError, plan: object) -> None:
    """The same error."""
    assert isinstance(plan, CogfsError), plan
    assert (type(plan), plan.message) == (type(said), said.message)


def busy(said: CogfsError, plan: object) -> None:
    """A plan that is busy, by those whom the error names."""
    named = [(one["kind"], one.get("id", ""), one["pid"], one["path"]) for one in json.loads(said.metadata["busy_by"])]
    assert named
    if isinstance(plan, thread_pb2.RewindReport | thread_pb2.ForkThreadReport) and not plan.HasField("files"):
        assert [("RUN", run_id, 0, "") for run_id in plan.runs.going] == named
        return
    restore = _restore_of(plan)
    assert restore.dry_run and restore.busy, plan
    assert [who for one in restore.busy_by if (who := _in_the_way(one)) is not None] == named


def busy_before(said: CogfsError, plan: object) -> None:
    """A plan that is busy by those whom the error names, and by what ``force`` could stop."""
    named = [(one["kind"], one.get("id", ""), one["pid"], one["path"]) for one in json.loads(said.metadata["busy_by"])]
    restore = _restore_of(plan)
    told = [_in_the_way(one) for one in restore.busy_by]
    assert restore.busy and named and set(named) < set(told), (named, told)


def says_no(said: CogfsError, plan: Any) -> None:
    """What ``AgentSession.rewind_files`` answers."""
    assert (plan["canRewind"], plan["error"]) == (False, said.message)


def _restore_of(plan: object) -> common_pb2.RestoreReport:
    if isinstance(plan, common_pb2.RestoreReport):
        return plan
    if isinstance(plan, thread_pb2.UndoReport):
        return plan.files
    assert isinstance(plan, thread_pb2.RewindReport | thread_pb2.ForkThreadReport), plan
    return plan.files.restore


def _in_the_way(one: common_pb2.BusyBy) -> Who | None:
    """None: a reader, of whom is told."""
    kind = By.Kind.Name(one.kind)
    if kind == "HANDLE" and one.access == By.READ:
        return None
    return kind, one.id, one.pid, os.fsdecode(one.path)


# --- what stands ------------------------------------------------------------------------------------------------------


def _standing(cog: Client, places: Sequence[Path]) -> dict[str, Any]:
    """All that a refused call leaves as it was."""
    threads = {thread.id: thread for thread in cog.threads()}
    workspaces = cog.workspaces()
    return {
        "files": {place: describe(place) for place in places},
        "stats": {place: _stats(place) for place in places},
        "names": {place: sorted(os.listdir(place.parent)) for place in places},
        "threads": {id: _bytes(thread.message) for id, thread in threads.items()},
        "entries": {id: [_bytes(one) for one in thread.entries(all_branches=True)] for id, thread in threads.items()},
        "memory": {id: [_bytes(one) for one in thread.memory(all_branches=True)] for id, thread in threads.items()},
        "workspaces": {one.id: _of_workspace(one.message) for one in workspaces},
        "snapshots": {one.id: [_bytes(snapshot.message) for snapshot in one.snapshots()] for one in workspaces},
        "commands": [(one.id, list(one.pids)) for one in cog.commands()],
        "runs": {run.id: _of_run(run) for run in cog.runs(ended=True)},
    }


def _stats(place: Path) -> dict[str, tuple[int, ...]]:
    """Inode and times of each name, by which one shows that it was written or made again."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (place, *sorted(place.rglob("*"))):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return found


def _of_workspace(message: workspace_pb2.Workspace) -> bytes:
    copy = workspace_pb2.Workspace()
    copy.CopyFrom(message)
    # What is looked at for a plan is known from then on.
    copy.dirty_files = copy.dirty_directories = 0
    return _bytes(copy)


def _of_run(run: run_pb2.Run) -> tuple[str, bool, str, int, tuple[str, ...]]:
    calls = tuple(call.id for call in run.open_tool_calls)
    return Run.State.Name(run.state), run.stopping, run.why, run.tool_calls, calls


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _check_still(before: dict[str, Any], now: dict[str, Any], stopped: Collection[str] = ()) -> None:
    """``stopped``: runs that were told to stop meanwhile."""
    for place, tree in before["files"].items():
        assert not differences(now["files"][place], tree)
    for name, was in before.items():
        if name == "runs":
            assert {id: one for id, one in now["runs"].items() if id not in stopped} == {
                id: one for id, one in was.items() if id not in stopped
            }
        else:
            assert now[name] == was, name
    for id in stopped:
        state, stopping, *_ = now["runs"][id]
        assert state == "INTERRUPTED" or stopping, now["runs"][id]
