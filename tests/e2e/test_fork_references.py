"""Which checkpoint is whose is the daemon's to say: none can be forged, and all stay right through forks of forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cogfs.client import Client, NotFound, Thread, ValidationError, Workspace
from cogfs.v1 import thread_pb2
from tests.support.tree import describe, differences


@pytest.fixture
def ws(cog: Client, project: Path) -> Workspace:
    return cog.mount(project)


def _chat(cog: Client, ws: Workspace, project: Path) -> Thread:
    thread = cog.create_thread("chat", workspace=ws)
    for number in range(4):
        thread.user_message(f"turn {number}", id=f"m{number}")
        (project / "README").write_text(f"after {number}\n")
        thread.append("assistant", "done", id=f"a{number}")
    return thread


@pytest.mark.parametrize("key", ["file_checkpoint", "file_checkpoint_at", "fileCheckpoint", "fileCheckpointAt"])
def test_metadata_names_no_checkpoint(cog: Client, ws: Workspace, project: Path, key: str) -> None:
    thread = _chat(cog, ws, project)
    snapshot = ws.checkpoint()
    forged = {key: {"snapshot_id": snapshot.id, "workspace_id": ws.id, "root": str(project)}}
    for kind in ("user", "note"):
        with pytest.raises(ValidationError, match="daemon alone"):
            thread.append(kind, "x", metadata=forged)
    # Below another key it means nothing.
    entry = thread.append("note", "x", metadata={"mine": forged})
    assert not entry.HasField("file_checkpoint") and not entry.HasField("file_checkpoint_at")
    assert thread.rewind(entry.id, files=True, dry_run=True).files.entry_id == "m3"
    assert not thread.fork(entry.id).entry(entry.id).HasField("file_checkpoint_at")


def test_a_request_has_no_field_for_one() -> None:
    fields = {field.name for field in thread_pb2.AppendEntryRequest.DESCRIPTOR.fields}
    assert not fields & {"file_checkpoint", "file_checkpoint_at", "copied_from", "files_follow"}
    assert "forked_from" not in {field.name for field in thread_pb2.CreateThreadRequest.DESCRIPTOR.fields}


def test_a_workspace_that_the_thread_did_not_run_in(cog: Client, ws: Workspace, project: Path) -> None:
    thread = _chat(cog, ws, project)
    other = project.parent / "other"
    other.mkdir()
    (other / "mine").touch()
    foreign = cog.mount(other)
    before = describe(other)
    for dry_run in (True, False):
        with pytest.raises(ValidationError, match="did not run in"):
            thread.rewind("a1", files=True, workspace=foreign, dry_run=dry_run)
        with pytest.raises(ValidationError, match="did not run in"):
            thread.fork("a1", files=True, source=foreign, dry_run=dry_run)
    assert not differences(describe(other), before)
    assert thread.refresh().message.leaf_id == "a3"
    # It ran in this one.
    thread.rewind("a1", files=True, workspace=ws)
    assert (project / "README").read_text() == "after 1\n"


def test_entries_belong_to_their_thread(cog: Client, ws: Workspace, project: Path) -> None:
    thread = _chat(cog, ws, project)
    other = cog.create_thread("other", workspace=ws)
    other.user_message("x", id="o1")
    for call in (lambda: other.rewind("m1", files=True), lambda: other.fork("m1"), lambda: thread.rewind("o1")):
        with pytest.raises(NotFound):
            call()
    # In a fork, the copies are its own.
    fork = thread.fork("a1")
    with pytest.raises(NotFound):
        fork.rewind("m2", files=True)


def test_forks_of_forks_from_place_to_place(cog: Client, ws: Workspace, project: Path) -> None:
    """Into another workspace, on from there into a third, and back into the first."""
    thread = _chat(cog, ws, project)
    second, third = project.parent / "second", project.parent / "third"
    fork = thread.fork("a2", files=True, into=second)
    (second / "README").write_text("in the second\n")
    fork.user_message("later", id="m4")
    fork.append("assistant", "done", id="a4")
    again = fork.fork("a2", files=True, into=third)
    # The message that was written in the fork says what the files were after a2 there.
    assert (third / "README").read_text() == "in the second\n"
    back = again.fork("a1", files=True, workspace=ws)
    assert (project / "README").read_text() == "after 1\n"
    places = {"chat": ws.id, fork.id: cog.workspace(second).id, again.id: cog.workspace(third).id, back.id: ws.id}
    for one in (fork, again, back):
        for entry in one.entries():
            if entry.HasField("file_checkpoint"):
                assert entry.file_checkpoint.workspace_id == places[one.id]
                assert not entry.file_checkpoint.pruned
    # The source is forgotten, and its workspace prunes what it can.
    thread.delete()
    fork.delete()
    ws.prune({"count": 1})
    for one, root in ((again, third), (back, project)):
        if one is again:
            for point, text in (("a1", "after 1\n"), ("a0", "after 0\n"), ("m0", "read me\n")):
                one.rewind(point, files=True)
                assert (root / "README").read_text() == text
        assert one.refresh().message.forked_from.entry_id in ("a2", "a1")


def test_pages_in_both_directions(cog: Client) -> None:
    thread = cog.create_thread("long")
    for number in range(60):
        thread.append("note", str(number), id=f"n{number}")
    thread.rewind("n29")
    for number in range(60, 75):
        thread.append("note", str(number), id=f"n{number}")
    calls = cog._connection

    def listed(size: int, **fields: bool) -> list[str]:
        found: list[str] = []
        request = thread_pb2.ListEntriesRequest(thread_id="long", page_size=size, **fields)  # type: ignore[arg-type]
        while True:
            answer = calls.call(calls.threads.ListEntries, request)
            assert 0 < len(answer.entries) <= size
            for entry in answer.entries:
                assert entry.active == (entry.id in branch)
            found += [entry.id for entry in answer.entries]
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    branch = [f"n{number}" for number in (*range(30), *range(60, 75))]
    everything = [f"n{number}" for number in range(75)]
    for size in (1, 7, 45, 46, 1000):
        assert listed(size) == branch
        assert listed(size, newest_first=True) == branch[::-1]
        assert listed(size, all_branches=True) == everything
        assert listed(size, all_branches=True, newest_first=True) == everything[::-1]
    assert [entry.id for entry in thread.entries(newest_first=True)] == branch[::-1]
    assert thread.entry("n40").active is False and thread.entry("n74").active is True
    # A listing goes on where it was, also when the leaf has moved meanwhile.
    first = calls.call(calls.threads.ListEntries, thread_pb2.ListEntriesRequest(thread_id="long", page_size=40))
    thread.rewind("n35" if thread.entry("n35").active else "n60")
    rest = thread_pb2.ListEntriesRequest(thread_id="long", page_size=40, page_token=first.next_page_token)
    assert list(calls.call(calls.threads.ListEntries, rest).entries) == []
    branch = [f"n{number}" for number in (*range(30), 60)]
    assert listed(10) == branch
    for token in ("x", "-1", "9" * 20):
        with pytest.raises(ValidationError):
            calls.call(calls.threads.ListEntries, thread_pb2.ListEntriesRequest(thread_id="long", page_token=token))
    # A thread that was made in the place of another one has its own branch.
    thread.delete()
    assert list(cog.create_thread("long").entries()) == []
