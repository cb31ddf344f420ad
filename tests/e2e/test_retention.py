"""Old snapshots go after each new one and on request, and what is still needed never does."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from cogfs.client import Client, NotFound, Snapshot, ValidationError, Workspace
from cogfs.v1 import snapshot_pb2, thread_pb2, workspace_pb2
from tests.e2e.ctl import Ctl


def _ids(workspace: Workspace) -> list[str]:
    return [snapshot.id for snapshot in workspace.snapshots()]


def _take(workspace: Workspace, path: Path, text: str) -> Snapshot:
    path.write_text(text)
    return workspace.checkpoint(text, wait_for="sealed")


def test_the_newest_remain_after_each_message(daemon: Ctl, project: Path, cog: Client) -> None:
    made = daemon.json("mount", project, "--retain-count", "3", "--retain-age", "2w")
    assert made["options"]["retain"] == {"count": 3, "max_age": "1209600s"}
    assert "the 3 newest, none older than 14 days" in daemon("status", project)
    daemon("thread", "new", "chat", "--workspace", project)
    entries = []
    for number in range(5):
        (project / "README").write_text(f"{number}\n")
        entries.append(daemon.json("message", "chat", f"turn {number}", "--wait"))
    kept = [entry["file_checkpoint"]["snapshot_id"] for entry in entries[2:]]
    assert [snapshot["id"] for snapshot in daemon.json("snapshots", project)["snapshots"]] == kept[::-1]

    listed = daemon.json("log", "chat")["entries"]
    assert [entry["file_checkpoint"]["pruned"] for entry in listed] == [True, True, False, False, False]
    assert listed[0]["file_checkpoint"]["snapshot_id"] == entries[0]["file_checkpoint"]["snapshot_id"]
    for command in ("log", "rewind"):
        shown = daemon(command, "chat")
        assert (shown.count("[files pruned]"), shown.count("[files]")) == (2, 3)
    assert cog.thread("chat").entry(entries[0]["id"]).file_checkpoint.pruned
    assert not cog.thread("chat").entry(entries[4]["id"]).file_checkpoint.pruned

    error = daemon.fails("VALIDATION_ERROR", 10, "rewind", "chat", entries[0]["id"], "--files", "--yes")
    assert "was pruned" in error["message"]
    assert (project / "README").read_text() == "4\n"
    daemon("rewind", "chat", entries[1]["id"], "--files", "--yes")
    assert (project / "README").read_text() == "2\n"


def test_what_undo_needs_remains(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project, retain={"count": 2})
    readme = project / "README"
    first = _take(workspace, readme, "first")
    _take(workspace, readme, "second")
    report = workspace.restore(first.id)
    for number in range(4):
        last = _take(workspace, readme, f"later {number}")
    assert {first.id, report.safety_snapshot_id, last.id} <= set(_ids(workspace))
    assert len(_ids(workspace)) == 4
    for needed in (first.id, report.safety_snapshot_id):
        with pytest.raises(ValidationError, match="undo"):
            cog.snapshot(needed).delete()
    with pytest.raises(ValidationError, match="newest"):
        last.delete()
    workspace.undo()
    assert readme.read_text() == "second"


def test_old_ones_go_by_their_age(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project, retain={"max_age": timedelta(seconds=1)})
    assert workspace.message.options.retain.max_age.seconds == 1
    first = _take(workspace, project / "README", "first")
    time.sleep(1.1)
    # The newest stays whatever its age, until there is a newer one.
    assert _ids(workspace) == [first.id]
    second = _take(workspace, project / "README", "second")
    assert _ids(workspace) == [second.id]
    with pytest.raises(NotFound):
        first.refresh()


def test_one_that_is_not_captured_when_it_is_past_its_time(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project, retain={"count": 1})
    taken = [workspace.checkpoint().id for _ in range(8)]
    cog.snapshot(taken[-1])
    workspace.restore(taken[-1], dry_run=True)
    assert _ids(workspace) == [taken[-1]]


def test_prune(daemon: Ctl, mounted: Path, cog: Client) -> None:
    error = daemon.fails("VALIDATION_ERROR", 10, "prune", mounted)
    assert "count" in error["message"]
    workspace = cog.workspace(mounted)
    taken = [_take(workspace, mounted / "README", str(number)).id for number in range(5)]
    plan = daemon.json("prune", mounted / "src", "--count", "3", "--dry-run")
    assert plan == {"deleted": taken[1::-1], "dry_run": True, "remaining": 3}
    assert "2 snapshots would be deleted, 3 would remain" in daemon("prune", mounted, "--count", "3", "--dry-run")
    assert len(_ids(workspace)) == 5
    assert daemon.json("prune", mounted, "--count", "3") == {**plan, "dry_run": False}
    assert _ids(workspace) == taken[:1:-1]
    assert daemon.json("prune", mounted, "--max-age", "1h")["deleted"] == []
    assert "0 snapshots deleted, 3 remain" in daemon("prune", mounted, "--max-age", "2w")
    cog.snapshot(taken[2]).delete()
    time.sleep(0.01)
    assert list(workspace.prune({"max_age": 0.001}).deleted) == [taken[3]]
    assert _ids(workspace) == taken[4:]
    daemon.fails("NOT_FOUND", 11, "show", taken[2])


@pytest.mark.parametrize("age", ["14", "1y", "-1d", "soon", "", "99999999w"])
def test_ages_that_are_none(daemon: Ctl, mounted: Path, age: str) -> None:
    for command, option in (("prune", "--max-age"), ("mount", "--retain-age")):
        assert "is no age" in daemon.fails("USAGE", 2, command, mounted, f"{option}={age}")["message"]


def test_retention_that_cannot_be(daemon: Ctl, project: Path, cog: Client) -> None:
    for retain in ({"count": -1}, {"max_age": -5.0}, {"max_age": 4e9}):
        with pytest.raises(ValidationError, match="retention"):
            cog.create_workspace(project, retain=retain)
    assert cog.workspaces() == []
    workspace = cog.mount(project)
    for wrong in ({"count": -1}, {"max_age": timedelta(days=-1)}, {"count": "many"}, {"max_age": float("nan")}):
        with pytest.raises(ValidationError, match=r"retention|length of time"):
            workspace.prune(wrong)
    connection = cog._connection
    strange = workspace_pb2.Retention(count=1)
    strange.max_age.seconds, strange.max_age.nanos = 5, -7
    for request in (
        snapshot_pb2.PruneSnapshotsRequest(),
        snapshot_pb2.PruneSnapshotsRequest(workspace_id="no/id"),
        snapshot_pb2.PruneSnapshotsRequest(workspace_id=workspace.id),
        snapshot_pb2.PruneSnapshotsRequest(workspace_id=workspace.id, retain=workspace_pb2.Retention()),
        snapshot_pb2.PruneSnapshotsRequest(workspace_id=workspace.id, retain=strange),
    ):
        with pytest.raises(ValidationError):
            connection.call(connection.snapshots.PruneSnapshots, request)
    with pytest.raises(NotFound):
        connection.call(connection.snapshots.PruneSnapshots, snapshot_pb2.PruneSnapshotsRequest(workspace_id="ws_no"))
    with pytest.raises(ValidationError):
        connection.call(connection.snapshots.DeleteSnapshot, snapshot_pb2.DeleteSnapshotRequest())
    with pytest.raises(NotFound):
        connection.call(connection.snapshots.DeleteSnapshot, snapshot_pb2.DeleteSnapshotRequest(snapshot_id="snap_no"))


def test_options_are_replaced_together(daemon: Ctl, project: Path, cog: Client) -> None:
    first = ["--exclude", "*.log", "--retain-count", "7", "--refuse-hard-links"]
    options = daemon.json("mount", project, *first)["options"]
    assert options == {
        "exclude": ["*.log"],
        "max_file_bytes": 10 << 20,
        "retain": {"count": 7, "max_age": None},
        "refuse_hard_links": True,
    }
    daemon("unmount", project)
    assert daemon.json("mount", project)["options"] == options
    daemon("unmount", project)
    options = daemon.json("mount", project, "--retain-age", "90m")["options"]
    assert options == {
        "exclude": [],
        "max_file_bytes": 10 << 20,
        "retain": {"count": 0, "max_age": "5400s"},
        "refuse_hard_links": False,
    }


def test_a_message_without_a_checkpoint_is_no_pruned_one(cog: Client, project: Path) -> None:
    """A message that was saved without a checkpoint is not one whose checkpoint was pruned."""
    thread = cog.create_thread("talk")
    entry = thread.user_message("hello")
    assert not entry.HasField("file_checkpoint")
    (listed,) = thread.entries()
    assert listed.kind == thread_pb2.Entry.USER and not listed.HasField("file_checkpoint")
