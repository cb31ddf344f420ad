"""All that a daemon says of threads, memory, runs, snapshots and undos, and all that a model says, in the same words.

Files are looked at by whoever compares them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from cogfs.client import Client, ValidationError, Workspace
from cogfs.v1 import run_pb2, thread_pb2
from tests.support.talks import Kept, World

#: Statements by what they are about.
Account = dict[str, object]


def disagreements(meant: Account, told: Account) -> list[str]:
    """One sentence for each statement that is not in both."""
    return [
        f"{key}: {meant.get(key, 'nothing')!r} by the model, {told.get(key, 'nothing')!r} by the daemon"
        for key in sorted(meant.keys() | told.keys())
        if key not in meant or key not in told or meant[key] != told[key]
    ]


# --- the model --------------------------------------------------------------------------------------------------------


def of_world(world: World[Any], roots: Sequence[Path], talks: Collection[str] | None = None) -> Account:
    """What the model says, of all or of some threads and their runs. ``roots`` are the workspaces', by their numbers in
    the model."""
    found: Account = {}
    for talk in world.talks.values():
        if talks is not None and talk.id not in talks:
            continue
        root = str(roots[talk.place]) if talk.place >= 0 else ""
        active = set(talk.ids())
        found[f"thread {talk.id}"] = (talk.leaf, len(talk.said), root, talk.forked_from)
        found[f"forks of {talk.id}"] = sorted(talk.forks)
        found[f"branch of {talk.id}"] = talk.ids()
        for one in talk.said.values():
            checkpoints = [_meant(one.kept), _meant(one.kept_after)]
            found[f"entry {talk.id}/{one.id}"] = (one.parent, one.kind, one.id in active, one.follows, *checkpoints)
        counting = talk.counting(talk.leaf)
        for memo in talk.memos.values():
            found[f"memory {talk.id}/{memo.id}"] = (memo.kind, memo.name, list(memo.on), memo.id in counting)
    for work in world.works.values():
        if talks is None or work.talk in talks:
            found[f"run {work.id}"] = (work.talk, work.state, work.stopping, sorted(work.calls))
    if talks is not None:
        return found
    found["workspaces"] = sorted(map(str, roots[: len(world.files)]))
    for place in range(len(world.files)):
        names = (kept.name for kept in world.kept if kept.place == place and not kept.pruned)
        found[f"snapshots of {roots[place]}"] = sorted(names)
    return found


def undos_of_world(world: World[Any], roots: Sequence[Path]) -> Account:
    """What an undo of each workspace would take back: which snapshot, of which thread, whether the files alone, and
    whether that changes any."""
    found: Account = {}
    for place, way in enumerate(world.ways):
        found[f"undo of {roots[place]}"] = None
        if way is not None:
            talk = world.to_undo(place)
            found[f"undo of {roots[place]}"] = (
                way.target.name or "another",
                talk.id if talk is not None else "",
                bool(way.talk) and talk is None,
                way.before != world.files[place],
            )
    return found


def _meant(kept: Kept[Any] | None) -> object:
    return None if kept is None else (kept.name, kept.pruned)


# --- the daemon -------------------------------------------------------------------------------------------------------


class Asked:
    """One look at a daemon, at the threads and runs whose ids begin with ``prefix`` and the workspaces below ``base``.

    Snapshots that are not ``known`` are told by what they are copies of.
    """

    def __init__(self, cog: Client, prefix: str, base: Path, known: World[Any]) -> None:
        self._cog = cog
        self._prefix = prefix
        self._known = {kept.id for kept in known.kept if kept.id}
        self.workspaces = {
            os.fsdecode(workspace.root): workspace
            for workspace in cog.workspaces()
            if Path(os.fsdecode(workspace.root)).is_relative_to(base)
        }
        self._roots = {workspace.id: root for root, workspace in self.workspaces.items()}

    @functools.cached_property
    def _held(self) -> dict[str, dict[str, str]]:
        """What each snapshot of each workspace is a copy of."""
        return {
            root: {snapshot.id: snapshot.message.copied_from for snapshot in workspace.snapshots()}
            for root, workspace in self.workspaces.items()
        }

    def account(self, talks: Collection[str] | None = None) -> Account:
        """What the daemon says, as ``of_world``."""
        found: Account = {}
        for thread in self._cog.threads():
            if not thread.id.startswith(self._prefix) or (talks is not None and thread.id not in talks):
                continue
            message = thread.message
            origin = message.forked_from if message.HasField("forked_from") else None
            found[f"thread {thread.id}"] = (
                message.leaf_id,
                message.entry_count,
                self._roots.get(message.workspace_id, message.workspace_id),
                (origin.thread_id, origin.entry_id) if origin is not None else None,
            )
            found[f"forks of {thread.id}"] = sorted((link.thread_id, link.entry_id) for link in message.forks)
            found[f"branch of {thread.id}"] = [entry.id for entry in thread.entries()]
            for entry in thread.entries(all_branches=True):
                found[f"entry {thread.id}/{entry.id}"] = (
                    entry.parent_id,
                    thread_pb2.Entry.Kind.Name(entry.kind).lower(),
                    entry.active,
                    entry.files_follow,
                    self._told(entry.file_checkpoint),
                    self._told(entry.file_checkpoint_at),
                )
            for memory in thread.memory(all_branches=True):
                found[f"memory {thread.id}/{memory.id}"] = (
                    thread_pb2.Memory.Kind.Name(memory.kind).lower(),
                    memory.name,
                    list(memory.entry_ids),
                    not memory.HasField("stale_because"),
                )
        for run in self._cog.runs(ended=True):
            if run.id.startswith(self._prefix) and (talks is None or run.thread_id in talks):
                state = run_pb2.Run.State.Name(run.state).lower()
                calls = sorted(call.id for call in run.open_tool_calls)
                found[f"run {run.id}"] = (run.thread_id, state, run.stopping, calls)
        if talks is not None:
            return found
        found["workspaces"] = sorted(self.workspaces)
        for root, held in self._held.items():
            names = [self._name(one) for one in held]
            found[f"snapshots of {root}"] = sorted(name for name in names if name != "another")
        return found

    def undos(self) -> Account:
        """As ``undos_of_world``."""
        return {f"undo of {root}": self._undo(workspace) for root, workspace in self.workspaces.items()}

    def _undo(self, workspace: Workspace) -> object:
        try:
            report = workspace.undo(dry_run=True)
        except ValidationError:
            return None
        changes = bool(report.files.restored or report.files.deleted)
        return self._name(report.undone_snapshot_id), report.thread_id, bool(report.files_only_reason), changes

    def _name(self, snapshot_id: str) -> str:
        if snapshot_id in self._known:
            return snapshot_id
        origin = next((held[snapshot_id] for held in self._held.values() if snapshot_id in held), "")
        return f"copy of {self._name(origin)}" if origin else "another"

    def _told(self, checkpoint: thread_pb2.FileCheckpoint) -> object:
        if not checkpoint.snapshot_id:
            return None
        return self._name(checkpoint.snapshot_id), checkpoint.pruned


def learn(cog: Client, world: World[Any]) -> None:
    """The model learns the ids of copies from the entries that name them."""
    for talk in world.talks.values():
        unknown = [
            one for one in talk.said.values() if any(kept and not kept.id for kept in (one.kept, one.kept_after))
        ]
        for one in unknown:
            entry = cog.thread(talk.id).entry(one.id)
            for kept, checkpoint in ((one.kept, entry.file_checkpoint), (one.kept_after, entry.file_checkpoint_at)):
                if kept is not None and not kept.id:
                    kept.id = checkpoint.snapshot_id
