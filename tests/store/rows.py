"""Rows for tests of the store."""

from __future__ import annotations

from cogfs.store.schema import Kind, SnapshotOrigin, SnapshotRow, SnapshotState, SnapshotStats, TreeEntry


def snapshot_row(name: str, tree: bytes | None, workspace: str = "w") -> SnapshotRow:
    """A snapshot of a tree; FROZEN without one."""
    root = None if tree is None else TreeEntry(b"", Kind.DIRECTORY, 0o755, hash=tree)
    state = SnapshotState.FROZEN if tree is None else SnapshotState.SEALED
    return SnapshotRow(
        name, workspace, root, "", "{}", state, "", (), -1, (), SnapshotStats(), 0, SnapshotOrigin.MANUAL
    )
