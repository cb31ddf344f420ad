"""Deleting snapshots by their rows: what goes, and what never does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.pruning import delete, prune
from cogfs.fsd.control.sealer import delete_expired
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.database import Table
from cogfs.store.errors import NotFound
from cogfs.store.schema import (
    JournalRow,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
    UndoRow,
    WorkspaceOptions,
)
from cogfs.v1.reasons import Reason
from tests.control.files import Directory


@pytest.fixture
def workspace(place: Directory, tmp_path: Path) -> Iterator[Workspace]:
    with ThreadPoolExecutor(1) as pool:
        yield Workspace(place.store, pool, pool, place.id, tmp_path / "undo.log", lambda: None)


def _take(workspace: Workspace, *names: str, state: SnapshotState = SnapshotState.SEALED, last: bool = True) -> None:
    """Snapshots with these ids, which have to ascend."""
    with workspace.store.write() as writer:
        for name in names:
            row = SnapshotRow(
                name, workspace.id, None, "", "{}", state, "", (), -1, (), SnapshotStats(), 1, SnapshotOrigin.MANUAL
            )
            writer.put_snapshot(row)
            if last:
                changed = msgspec.structs.replace(writer.workspace(workspace.id), last_snapshot_id=name)
                writer.put_workspace(changed)


def _left(workspace: Workspace) -> list[str]:
    with workspace.store.read() as reader:
        return [row.id for row in reader.snapshots(workspace.id)][::-1]


def _refused(workspace: Workspace, snapshot_id: str) -> tuple[Reason, str]:
    with pytest.raises(CogfsError) as caught:
        delete(workspace, snapshot_id)
    assert snapshot_id in _left(workspace)
    return caught.value.reason, str(caught.value)


def test_one_is_deleted(workspace: Workspace) -> None:
    _take(workspace, "s1", "s2", "s3")
    delete(workspace, "s2")
    assert _left(workspace) == ["s1", "s3"]
    with pytest.raises(NotFound):
        delete(workspace, "s2")


def test_what_is_needed_is_not_deleted(workspace: Workspace) -> None:
    _take(workspace, "s1", "s2", "s3", "s4", "s5", "s6")
    _take(workspace, "s7", state=SnapshotState.FROZEN)
    with workspace.store.write() as writer:
        row = writer.workspace(workspace.id)
        writer.put_workspace(msgspec.structs.replace(row, undo=UndoRow("s1", "s2")))
        writer.put_journal(JournalRow("r", workspace.id, "s3", "s4", (), 0))
        protected = msgspec.structs.replace(writer.snapshot("s5"), protected=True)
        writer.put_snapshot(protected)
    for name, reason, said in (
        ("s1", Reason.VALIDATION_ERROR, "undo"),
        ("s2", Reason.VALIDATION_ERROR, "undo"),
        ("s3", Reason.BUSY, "restore"),
        ("s4", Reason.BUSY, "restore"),
        ("s5", Reason.VALIDATION_ERROR, "protected"),
        ("s6", Reason.VALIDATION_ERROR, "newest"),
        ("s7", Reason.BUSY, "not captured"),
    ):
        refusal = _refused(workspace, name)
        assert refusal[0] is reason and said in refusal[1]
    assert prune(workspace, (1, 0), dry_run=False) == ([], 7)
    assert prune(workspace, (0, 1), dry_run=False) == ([], 7)


def test_what_is_being_restored_is_not_deleted(workspace: Workspace) -> None:
    """Also before its restore is journalled."""
    _take(workspace, "s1", "s2", "s3")
    with workspace.sealer.keeping("s1"):
        assert _refused(workspace, "s1")[0] is Reason.BUSY
        assert prune(workspace, (1, 0), dry_run=False) == (["s2"], 2)
        _set_options(workspace, WorkspaceOptions(retain_count=1))
        with workspace.store.write() as writer:
            delete_expired(writer, workspace.id, workspace.sealer.restoring)
        assert _left(workspace) == ["s1", "s3"]
    with workspace.store.write() as writer:
        delete_expired(writer, workspace.id, workspace.sealer.restoring)
    assert _left(workspace) == ["s3"]


def _set_options(workspace: Workspace, options: WorkspaceOptions) -> None:
    with workspace.store.write() as writer:
        writer.put_workspace(msgspec.structs.replace(writer.workspace(workspace.id), options=options))


def test_many_are_deleted(workspace: Workspace) -> None:
    _take(workspace, "s1", "s2", "s3", "s4")
    assert prune(workspace, (2, 0), dry_run=True) == (["s2", "s1"], 2)
    assert len(_left(workspace)) == 4
    assert prune(workspace, (3, 0), dry_run=False) == (["s1"], 3)
    with pytest.raises(CogfsError, match="nothing says what to keep") as caught:
        prune(workspace, None, dry_run=False)
    assert caught.value.reason is Reason.VALIDATION_ERROR
    _set_options(workspace, WorkspaceOptions(retain_count=1))
    assert prune(workspace, None, dry_run=False) == (["s3", "s2"], 1)


def test_a_retention_that_cannot_be_told_fails_nothing(workspace: Workspace) -> None:
    _take(workspace, "s1", "s2", "s3")
    _set_options(workspace, WorkspaceOptions(retain_count=1))
    with workspace.store.write() as writer:
        writer._change.put(Table.SNAPSHOTS, b"s2", b"no row")
        delete_expired(writer, workspace.id, frozenset())
    with workspace.store.read() as reader:
        assert reader.has_snapshot("s1")
