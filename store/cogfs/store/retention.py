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


def why_needed(
    row: SnapshotRow,
    workspace: WorkspaceRow,
    journal: JournalRow | None,
    newest_sealed: str,
    restoring: AbstractSet[str] = frozenset(),
) -> tuple[str, bool]:
    """Why a snapshot must not be deleted, as the rest of a sentence about it, and whether that passes by itself.

    Empty: it may be. ``restoring``: those that a restore works with which is not journalled yet.
    """
    if row.state == SnapshotState.FROZEN:
        return "is not captured yet", True
    if row.id in restoring or (journal is not None and row.id in _of_restore(journal)):
        return "is needed by a restore that is not finished", True
    if row.id in (newest_sealed, workspace.last_snapshot_id):
        return "is the newest of its workspace", False
    if row.id in in_use(workspace, journal):
        return "is needed to undo the last restore", False
    if row.protected:
        return "is protected", False
    return "", False


def _of_restore(journal: JournalRow) -> set[str]:
    return {journal.target_snapshot_id, journal.safety_snapshot_id}


def in_use(workspace: WorkspaceRow, journal: JournalRow | None) -> set[str]:
    """The ids of the snapshots that a workspace needs by itself: for ``keep`` of ``expired``.

    They are its last one, both of the restore that can be undone, and both of a restore that has begun.
    """
    ids = {workspace.last_snapshot_id}
    if journal is not None:
        ids |= _of_restore(journal)
    for undo in (workspace.undo, journal and journal.undo):
        if undo is not None:
            ids |= {undo.target_snapshot_id, undo.safety_snapshot_id}
    return ids - {""}
