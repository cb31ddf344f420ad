"""Snapshots of one workspace that another one gets as its own. A copy is a row: all content is shared in the store."""

from __future__ import annotations

import msgspec

from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.ids import new_id
from cogfs.store.schema import SnapshotRow


def copy_of(snapshot: SnapshotRow, workspace_id: str) -> SnapshotRow:
    """The row of a copy in another workspace. It tells when the files were so, not when it was copied."""
    return msgspec.structs.replace(
        snapshot, id=new_id("snap"), workspace_id=workspace_id, parent_id="", protected=False, copied_from=snapshot.id
    )


def copy(source: Workspace, snapshot_id: str, target: Workspace) -> SnapshotRow:
    """Give ``target`` a snapshot of ``source``, once it is captured. NotFound; VALIDATION_ERROR: it is of ``target``
    itself, or has failed; UNAVAILABLE: nobody can capture it now."""
    if source.id == target.id:
        raise invalid(f"the snapshot {snapshot_id} is of workspace {target.id} already")
    snapshot = source.sealed(snapshot_id)
    with target.store.write() as writer:
        writer.workspace(target.id)
        # It may have been deleted meanwhile, and what it held with it.
        writer.snapshot(snapshot.id)
        made = copy_of(snapshot, target.id)
        writer.put_snapshot(made)
    return made
