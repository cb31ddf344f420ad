"""Conversations, from the command line and from the SDK."""

from __future__ import annotations

from pathlib import Path

import pytest

from cogfs.client import AlreadyExists, Client, NotFound, ValidationError
from cogfs.v1 import snapshot_pb2, thread_pb2
from tests.e2e.ctl import Ctl


@pytest.fixture
def chat(daemon: Ctl, mounted: Path) -> str:
    """A conversation about the project, with no entries yet."""
    made = daemon.json("thread", "new", "chat", "--workspace", mounted / "src")
    assert made["id"] == "chat"
    assert made["workspace_id"] == daemon.json("status", mounted)["id"]
    return "chat"


def test_message_names_the_files_before_it(daemon: Ctl, mounted: Path, chat: str) -> None:
    entry = daemon.json("message", chat, "Refactor the parser", "--wait")
    assert entry["kind"] == "user"
    assert entry["content"] == "Refactor the parser"
    assert entry["checkpoint_error"] == ""
    checkpoint = entry["file_checkpoint"]
    assert checkpoint["root"] == str(mounted)
    snapshot = daemon.json("show", checkpoint["snapshot_id"])
    assert (snapshot["label"], snapshot["origin"], snapshot["state"]) == (entry["id"], "message", "sealed")
    reply = daemon.json("message", chat, "Done.", "--kind", "assistant")
    assert reply["parent_id"] == entry["id"]
    assert reply["file_checkpoint"] is None
    assert daemon.json("threads")["threads"][0]["leaf_id"] == reply["id"]


def test_message_from_standard_input(daemon: Ctl, chat: str) -> None:
    entry = daemon.json("message", chat, stdin="两行\nof text\n".encode())
    assert entry["content"] == "两行\nof text"
    assert "    两行\n    of text\n" in daemon("log", chat)


def test_chosen_ids(daemon: Ctl, chat: str) -> None:
    assert daemon.json("message", chat, "x", "--id", "my-1")["id"] == "my-1"
    daemon.fails("ALREADY_EXISTS", 12, "message", chat, "x", "--id", "my-1")
    daemon.fails("VALIDATION_ERROR", 10, "message", chat, "x", "--id", "no/slash")
    daemon.fails("VALIDATION_ERROR", 10, "message", chat, "x", "--kind", "nonsense")
    daemon.fails("ALREADY_EXISTS", 12, "thread", "new", chat)
    daemon.fails("VALIDATION_ERROR", 10, "thread", "new", "no slash/")
    daemon.fails("NOT_FOUND", 11, "message", "nobody", "x")
    assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == ["my-1"]


def test_conversation_without_files(daemon: Ctl) -> None:
    daemon("thread", "new", "talk")
    entry = daemon.json("message", "talk", "hello")
    assert entry["file_checkpoint"] is None
    daemon.fails("VALIDATION_ERROR", 10, "rewind", "talk", entry["id"], "--files", "--yes")


def test_rewind_takes_files_and_conversation_back(daemon: Ctl, mounted: Path, chat: str) -> None:
    main = mounted / "src" / "main.py"
    first = daemon.json("message", chat, "first")["id"]
    main.write_text("after first\n")
    answer = daemon.json("message", chat, "did it", "--kind", "assistant")["id"]
    second = daemon.json("message", chat, "second")["id"]
    main.write_text("after second\n")
    (mounted / "extra").write_text("x\n")

    listing = daemon("rewind", chat).splitlines()
    assert [line.split()[0] for line in listing[1:]] == [first, answer, second]
    assert ["[files]" in line for line in listing[1:]] == [True, False, True]
    assert [entry["id"] for entry in daemon.json("rewind", chat)["entries"]] == [first, answer, second]

    plan = daemon.json("rewind", chat, answer, "--files", "--dry-run")
    assert plan["conversation"]["cut"] == [second]
    assert plan["files"]["exact"] is True
    assert plan["files"]["entry_id"] == second
    assert set(plan["files"]["restore"]["deleted"]) == {"extra"}
    assert main.read_text() == "after second\n"

    report = daemon.json("rewind", chat, answer, "--files", "--yes")
    assert report["conversation"] == {"rewound": True, "cut": [second], "previous_leaf_id": second}
    assert main.read_text() == "after first\n"
    assert not (mounted / "extra").exists()
    assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == [first, answer]
    everything = daemon.json("log", chat, "--all")["entries"]
    assert {entry["id"]: entry["active"] for entry in everything} == {first: True, answer: True, second: False}

    undone = daemon.json("undo", mounted, "--yes")
    assert undone["thread_id"] == chat
    assert undone["files_only_reason"] == ""
    assert main.read_text() == "after second\n"
    assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == [first, answer, second]


def test_rewind_of_the_conversation_or_the_files_alone(daemon: Ctl, mounted: Path, chat: str) -> None:
    main = mounted / "src" / "main.py"
    first = daemon.json("message", chat, "first")["id"]
    main.write_text("changed\n")
    second = daemon.json("message", chat, "second")["id"]
    main.write_text("changed again\n")
    report = daemon.json("rewind", chat, second, "--files", "--no-memory", "--yes")
    assert report["conversation"]["rewound"] is False
    assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == [first, second]
    main.write_text("changed again\n")
    report = daemon.json("rewind", chat, first, "--yes")
    assert report["files"] is None
    assert main.read_text() == "changed again\n"
    assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == [first]
    daemon.fails("VALIDATION_ERROR", 10, "rewind", chat, second, "--yes")
    daemon.fails("NOT_FOUND", 11, "rewind", chat, "never", "--yes")


def test_undo_of_a_rewind_that_changed_no_files(daemon: Ctl, mounted: Path, chat: str) -> None:
    """It takes the conversation back, and not the restore before it."""
    main = mounted / "src" / "main.py"
    first = daemon.json("message", chat, "first")
    main.write_text("work that was undone long ago\n")
    daemon("restore", first["file_checkpoint"]["snapshot_id"], "--yes")
    second = daemon.json("message", chat, "second")["id"]
    report = daemon.json("rewind", chat, first["id"], "--files", "--yes")
    assert report["files"]["restore"]["files"] == []
    for branch in ([first["id"], second], [first["id"]], [first["id"], second]):
        undone = daemon.json("undo", mounted, "--yes")
        assert (undone["thread_id"], undone["files_only_reason"], undone["files"]["files"]) == (chat, "", [])
        assert main.read_text() == "one\ntwo\nthree\n"
        assert [entry["id"] for entry in daemon.json("log", chat)["entries"]] == branch


def test_required_checkpoint_that_cannot_be_taken(daemon: Ctl, mounted: Path, chat: str) -> None:
    daemon("unmount", mounted)
    mounted.rename(mounted.parent / "moved")
    done = daemon.run("message", chat, "x", "--require-checkpoint", "--json")
    assert done.returncode not in (0, 1, 2)
    assert daemon.json("log", chat)["entries"] == []
    done = daemon.run("message", chat, "x", "--json")
    assert done.returncode == 0
    assert b"without a checkpoint" in done.stderr
    (mounted.parent / "moved").rename(mounted)


def test_sdk_as_the_readme_shows_it(cog: Client, project: Path) -> None:
    ws = cog.mount(project)
    thread = cog.create_thread("chat", workspace=ws)
    entry = thread.user_message("Refactor the parser", metadata={"tokens": 12})
    (project / "src" / "main.py").write_text("refactored\n")
    last = thread.append("assistant", "Done.")
    plan = thread.rewind(entry.id, files=True, dry_run=True)
    assert list(plan.files.restore.restored) == [b"src/main.py"]
    assert list(plan.conversation.cut) == [last.id]
    report = thread.rewind(entry.id, files=True)
    assert (project / "src" / "main.py").read_text() == "one\ntwo\nthree\n"
    assert report.files.safety_snapshot_id
    assert thread.entry(entry.id).metadata["tokens"] == 12
    assert ws.undo().thread_id == "chat"
    assert (project / "src" / "main.py").read_text() == "refactored\n"
    assert thread.refresh().message.leaf_id == last.id


def test_a_rewind_of_files_that_are_right_changes_nothing(cog: Client, project: Path) -> None:
    ws = cog.mount(project)
    thread = cog.create_thread("chat", workspace=ws)
    thread.user_message("one")
    (project / "README").write_text("changed\n")
    second = thread.user_message("two")
    before = thread.refresh().message
    for dry_run in (True, False):
        report = thread.rewind(second.id, files=True, memory=False, dry_run=dry_run)
        assert not report.files.restore.files and not report.files.safety_snapshot_id
        assert thread.refresh().message == before
    # The files still follow from where the conversation is.
    assert thread.user_message("three").files_follow
    with pytest.raises(ValidationError, match="there was none"):
        ws.undo()


def test_sdk_snapshots(cog: Client, project: Path) -> None:
    ws = cog.mount(os_bytes(project), exclude=["*.log"], max_file_bytes=-1)
    assert ws.message.options.max_file_bytes == -1
    first = ws.checkpoint("first", metadata={"by": "test"}, wait_for="durable")
    assert first.message.metadata["by"] == "test"
    (project / "README").write_text("other\n")
    assert [change.path for change in first.diff(unified=True)] == [b"README"]
    assert b"".join(first.cat("README")) == b"read me\n"
    assert [entry.path for entry in first.ls("src")] == [b"src/main.py"]
    seen: list[int] = []
    report = ws.restore(first.id, progress=lambda step: seen.append(step.phase))
    assert list(report.restored) == [b"README"]
    assert cog.snapshot(first.id).refresh().message == first.refresh().message
    assert [snapshot.id for snapshot in ws.snapshots()] == [report.safety_snapshot_id, first.id]
    assert cog.workspace(project / "src").id == ws.id
    assert cog.workspace(id=ws.id).status().snapshot_count == 2
    ws.unmount()
    ws.mount()
    ws.unmount()
    ws.delete()
    with pytest.raises(NotFound):
        cog.workspace(id=ws.id)
    with pytest.raises(NotFound):
        cog.snapshot(first.id)


def test_sdk_is_told_how_far_a_restore_is(cog: Client, project: Path) -> None:
    ws = cog.mount(project)
    files = [project / f"f{number}" for number in range(7)]
    for file in files:
        file.write_text(f"before {file.name}\n")
    first = ws.checkpoint(wait_for="sealed")
    for file in files:
        file.write_text("after\n")
    phase = snapshot_pb2.RestoreProgress
    told: list[tuple[int, int, int]] = []
    # Before it changes anything, the content that goes is read, too, which is the same in all of them.
    for dry_run, phases in ((True, [(phase.VERIFYING, 7)]), (False, [(phase.VERIFYING, 8), (phase.APPLYING, 7)])):
        told.clear()
        first.restore(dry_run=dry_run, progress=lambda step: told.append((step.phase, step.done, step.total)))
        steps = [(one, number, total) for one, total in phases for number in range(1, total + 1)]
        assert told == [(phase.PLANNING, 0, 0), *steps]


def test_sdk_restores_a_snapshot_in_its_own_workspace_alone(cog: Client, project: Path) -> None:
    other = project.parent / "other"
    other.mkdir()
    first, second = cog.mount(project), cog.mount(other)
    snapshot = second.checkpoint()
    (other / "new").touch()
    with pytest.raises(ValidationError, match=second.id):
        first.restore(snapshot.id)
    assert (other / "new").exists()
    second.restore(snapshot.id)
    assert not (other / "new").exists()


def test_sdk_lists_are_whole(cog: Client) -> None:
    thread = cog.create_thread()
    assert thread.id
    for number in range(230):
        thread.append("note", str(number))
    assert [entry.content for entry in thread.entries()] == [str(number) for number in range(230)]
    for _ in range(120):
        cog.create_thread()
    assert len({thread.id for thread in cog.threads()}) == 121


def test_sdk_errors(cog: Client) -> None:
    cog.create_thread("taken")
    with pytest.raises(AlreadyExists):
        cog.create_thread("taken")
    with pytest.raises(NotFound):
        cog.thread("nobody")
    with pytest.raises(ValidationError):
        cog.create_thread("x" * 129)
    with pytest.raises(ValidationError):
        cog.thread("taken").append("user", "x" * (16 << 20) + "y")


@pytest.mark.parametrize("token", ["x", "²", "9" * 5000, ":"])
def test_page_tokens_of_others(cog: Client, token: str) -> None:
    cog.create_thread("some")
    connection = cog._connection
    with pytest.raises(ValidationError):
        connection.call(connection.threads.ListThreads, thread_pb2.ListThreadsRequest(page_token=token))
    request = thread_pb2.ListEntriesRequest(thread_id="some", page_token=token)
    with pytest.raises(ValidationError):
        connection.call(connection.threads.ListEntries, request)


def os_bytes(path: Path) -> bytes:
    return bytes(path)
