"""Deleting snapshots on request: one by its id, or those that a retention does not keep.

Rows alone: what only they held is collected later. What a workspace still needs is never deleted (``retention``).
"""

from __future__ import annotations

import time

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.workspace import Workspace
from cogfs.store import retention
from cogfs.store.schema import SnapshotRow, SnapshotState, WorkspaceOptions
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason


def delete(workspace: Workspace, snapshot_id: str) -> None:
    """Delete a snapshot of the workspace. NotFound; BUSY or VALIDATION_ERROR when it is needed.

    Without the workspace's lock, which a restore may hold for long: a restore looks for its snapshot again once nothing
    can take it away unseen.
    """
    with workspace.store.write() as writer:
        row = writer.snapshot(snapshot_id)
        newest = next((one.id for one in writer.snapshots(workspace.id) if one.state is SnapshotState.SEALED), "")
        why, passes = retention.why_needed(
            row, writer.workspace(workspace.id), writer.journal(workspace.id), newest, workspace.sealer.restoring
        )
        if why:
            raise CogfsError(
                Reason.BUSY if passes else Reason.VALIDATION_ERROR,
                f"the snapshot {snapshot_id} {why}, and is not deleted" + (": try again later" if passes else ""),
            )
        writer.delete_snapshot(snapshot_id)


def oldest(store: Store) -> list[SnapshotRow]:
    """The snapshots of all workspaces that nothing needs or protects, the oldest first."""
    found = []
    with store.read() as reader:
        for workspace in reader.workspaces():
            journal = reader.journal(workspace.id)
            rows = list(reader.snapshots(workspace.id))
            newest = next((one.id for one in rows if one.state is SnapshotState.SEALED), "")
            found += [row for row in rows if not retention.why_needed(row, workspace, journal, newest)[0]]
    return sorted(found, key=lambda row: (row.created_ns, row.id))


def prune(workspace: Workspace, limits: tuple[int, int] | None, *, dry_run: bool) -> tuple[list[str], int]:
    """Delete what ``limits`` (a count and an age in nanoseconds, 0: none) or the workspace's own do not keep.

    The ids, newest first, and how many snapshots remain. NotFound; VALIDATION_ERROR when nothing limits them.
    """
    with workspace.store.write() as writer:
        row = writer.workspace(workspace.id)
        options = row.options
        if limits is not None:
            options = WorkspaceOptions(retain_count=limits[0], retain_max_age_ns=limits[1])
        if not options.retain_count and not options.retain_max_age_ns:
            raise CogfsError(
                Reason.VALIDATION_ERROR,
                "nothing says what to keep: give a count or a greatest age, or set them for the workspace",
            )
        keep = retention.in_use(row, writer.journal(workspace.id)) | workspace.sealer.restoring
        rows = writer.snapshots(workspace.id)
        expired = retention.expired(rows, options, time.time_ns(), keep)
        if not dry_run:
            for snapshot_id in expired:
                writer.delete_snapshot(snapshot_id)
    return expired, len(rows) - len(expired)
