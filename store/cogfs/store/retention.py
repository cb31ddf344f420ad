"""Which snapshots of a workspace are past their time: pure functions of rows, without a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from cogfs.store.schema import JournalRow, SnapshotRow, SnapshotState, WorkspaceOptions, WorkspaceRow


def expired(
    snapshots_newest_first: Sequence[SnapshotRow], options: WorkspaceOptions, now_ns: int, keep: AbstractSet[str]
) -> list[str]:
    """The ids of the snapshots to delete, newest first. ``snapshots_newest_first`` are all of one workspace.

    A snapshot is kept whatever the options say when it is FROZEN, the newest SEALED one, protected, or in ``keep``.
    Any other expires when it is older than ``retain_max_age_ns``, or when ``retain_count`` newer ones remain. All that
    remain count, the kept ones too; but a kept one makes no newer one expire, so with old ones that are kept there may
    be more than ``retain_count`` in all.

    Without an option of retention nothing expires. What is given again without those that expired has none that do.
    """
    most, oldest_ns = options.retain_count, now_ns - options.retain_max_age_ns
    newest_sealed = next((row.id for row in snapshots_newest_first if row.state == SnapshotState.SEALED), "")
    found: list[str] = []
    remaining = 0
    for row in snapshots_newest_first:
        kept = row.state == SnapshotState.FROZEN or row.id == newest_sealed or row.protected or row.id in keep
        too_many = 0 < most <= remaining
        too_old = options.retain_max_age_ns > 0 and row.created_ns < oldest_ns
        if (too_many or too_old) and not kept:
            found.append(row.id)
        else:
            remaining += 1
    return found


def in_use(workspace: WorkspaceRow, journal: JournalRow | None) -> set[str]:
    """The ids of the snapshots that a workspace needs by itself: for ``keep`` of ``expired``.

    They are its last one, both of the restore that can be undone, and both of a restore that has begun.
    """
    ids = {workspace.last_snapshot_id}
    if journal is not None:
        ids |= {journal.target_snapshot_id, journal.safety_snapshot_id}
    for undo in (workspace.undo, journal and journal.undo):
        if undo is not None:
            ids |= {undo.target_snapshot_id, undo.safety_snapshot_id}
    return ids - {""}
