"""When messages take checkpoints, and of what, as runtime, agent, thread and run say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cogfs.client import Client, NotFound, Thread, ValidationError, Workspace
from cogfs.v1 import snapshot_pb2, thread_pb2
from tests.e2e.ctl import Ctl
from tests.support.tree import describe, differences, of_snapshot


@pytest.fixture
def ws(cog: Client, mounted: Path) -> Workspace:
    return cog.workspace(mounted)


@pytest.fixture
def coder(cog: Client, ws: Workspace) -> Thread:
    return cog.create_thread("chat", workspace=ws, agent="coder")


def _taken(cog: Client, entry: thread_pb2.Entry) -> snapshot_pb2.Snapshot:
    assert entry.HasField("file_checkpoint")
    snapshot = cog.snapshot(entry.file_checkpoint.snapshot_id)
    assert snapshot.message.label == entry.id
    return snapshot.message


def test_each_level_overrules_the_one_above_it(cog: Client, coder: Thread) -> None:
    def takes(**run: Any) -> bool:
        return coder.user_message("x", **run).HasField("file_checkpoint")

    assert takes()
    assert not takes(checkpoints=False)
    cog.set_policy(False)
    assert not takes()
    assert takes(checkpoints=True)
    assert takes(checkpoints={"exclude": ["*.o"]})
    cog.set_policy(True, agent="coder")
    assert takes()
    assert not takes(agent="other")
    coder.set_policy(False)
    assert not takes()
    assert takes(checkpoints=True)
    coder.set_policy(None)
    cog.set_policy({"enabled": False, "exclude": ["*.o"]}, agent="coder")
    assert not takes()
    cog.set_policy(None, agent="coder")
    cog.set_policy(None)
    assert takes()


def test_a_run_within_a_run_takes_none(cog: Client, coder: Thread) -> None:
    entry = coder.user_message("x", checkpoints=True, parent_tool_call_id="call_1", require_checkpoint=True)
    assert not entry.HasField("file_checkpoint")
    with pytest.raises(ValidationError, match="parent_tool_call_id"):
        coder.user_message("x", parent_tool_call_id="no id")


def test_excludes_add_up_and_the_snapshot_names_them(cog: Client, project: Path, daemon: Ctl) -> None:
    ws = cog.mount(project, exclude=["*.log"])
    thread = cog.create_thread("chat", workspace=ws, agent="coder")
    for name in ("a.log", "a.o", "a.tmp", "a.bak", "a.txt"):
        (project / name).write_text(name)
    cog.set_policy({"exclude": ["*.o", "*.log"]})
    cog.set_policy({"enabled": False, "exclude": ["*.tmp"], "max_file_bytes": 100}, agent="coder")
    assert not thread.user_message("off").HasField("file_checkpoint")
    entry = thread.user_message("on", checkpoints={"exclude": "*.bak"}, wait_for="sealed")
    snapshot = _taken(cog, entry)
    assert list(snapshot.exclude) == ["*.log", "*.o", "*.tmp", "*.bak"]
    assert snapshot.max_file_bytes == 100
    recorded = {one.path for one in cog.snapshot(snapshot.id).ls() if one.kind != snapshot_pb2.TreeEntry.OPAQUE}
    assert {name for name in recorded if name.startswith(b"a.")} == {b"a.txt"}
    assert "*.log, *.o, *.tmp, *.bak" in daemon("show", snapshot.id)
    # A snapshot that no message takes has the workspace's own rules.
    assert list(ws.checkpoint(wait_for="sealed").message.exclude) == ["*.log"]


def test_what_a_message_left_out_is_left_alone(cog: Client, project: Path) -> None:
    thread = cog.create_thread("chat", workspace=cog.mount(project))
    (project / "dist").mkdir()
    (project / "dist" / "out").write_text("one")
    (project / "big").write_bytes(b"x" * 101)
    rules = {"exclude": ["dist/"], "max_file_bytes": 100}
    entry = thread.user_message("go", checkpoints=rules, wait_for="sealed")
    (project / "dist" / "out").write_text("two")
    (project / "dist" / "more").write_text("more")
    (project / "big").write_bytes(b"y" * 102)
    (project / "README").write_text("changed\n")
    report = thread.rewind(entry.id, files=True)
    assert list(report.files.restore.restored) == [b"README"]
    assert (project / "dist" / "out").read_text() == "two"
    assert (project / "dist" / "more").read_text() == "more"
    assert (project / "big").read_bytes() == b"y" * 102
    kept = {one.path: one.reason for one in report.files.restore.kept}
    assert kept[b"big"] == "too-large"


def test_rules_that_alternate_keep_every_snapshot_right(cog: Client, project: Path) -> None:
    """Each boundary is of other rules than the one before, and some are not captured when the next one is taken."""
    ws = cog.mount(project)
    thread = cog.create_thread("chat", workspace=ws)
    for name in ("dist", "src/deep"):
        (project / name).mkdir(exist_ok=True)
    policies: list[dict[str, Any] | None] = [
        None,
        {"exclude": ["dist/"]},
        {"max_file_bytes": 50},
        {"exclude": ["src/deep/"], "max_file_bytes": -1},
    ]
    wanted = []
    for number in range(16):
        policy = policies[number % 4 if number % 3 else (number * 7) % 4]
        for place in ("dist", "src", "src/deep"):
            (project / place / f"f{number % 5}").write_text("x" * (number * 13 % 90) + str(number))
            (project / place / f"f{(number + 1) % 5}").unlink(missing_ok=True)
        tree = describe(project)
        del tree[b""]
        skipped = set()
        if policy is not None:
            limit = policy.get("max_file_bytes", -1)
            for path, node in list(tree.items()):
                gone = any(path.startswith(os.fsencode(glob)) for glob in policy.get("exclude", ()))
                if gone or path + b"/" in map(os.fsencode, policy.get("exclude", ())):
                    del tree[path]
                elif node.kind == "file" and 0 <= limit < (node.size or 0):
                    skipped.add(path)
                    del tree[path]
        entry = thread.user_message(str(number), checkpoints=policy)
        wanted.append((entry.file_checkpoint.snapshot_id, tree, skipped))
        # What is large for one snapshot and not for the next is kept as it was for that one.
        (project / "src" / f"f{number % 5}").write_text("written after")
    for number, (snapshot_id, tree, skipped) in enumerate(wanted):
        snapshot = cog.snapshot(snapshot_id)
        found = of_snapshot(snapshot)
        found.pop(b"", None)
        left_out = {one.path for one in snapshot.ls(recursive=True) if one.kind == snapshot_pb2.TreeEntry.OPAQUE}
        for path in left_out:
            found.pop(path, None)
        assert not differences(found, tree), number
        assert {one.path for one in snapshot.refresh().message.skipped} == skipped, number


def test_messages_that_wait_for_a_run_take_their_own(cog: Client, coder: Thread, mounted: Path) -> None:
    """Those that steer a run, follow it up or are put into it are users' messages like any other."""
    main = mounted / "src" / "main.py"
    sent: list[tuple[thread_pb2.Entry, str]] = []
    for queued in ("", "steer", "follow_up", "inject"):
        text = main.read_text()
        metadata = {"queued": queued} if queued else None
        sent.append((coder.user_message(f"message {queued}", metadata=metadata), text))
        coder.append("assistant", "working")
        main.write_text(f"after {queued or 'the first'}\n")
        coder.append("tool", "wrote")
    snapshots = [_taken(cog, entry) for entry, _ in sent]
    assert len({snapshot.id for snapshot in snapshots}) == 4
    assert [entry.metadata["queued"] for entry, _ in sent[1:]] == ["steer", "follow_up", "inject"]
    for entry, text in reversed(sent):
        report = coder.rewind(entry.parent_id or entry.id, files=True)
        assert report.files.exact is bool(entry.parent_id)
        assert report.files.entry_id == entry.id
        assert main.read_text() == text


def test_what_a_rewind_does_when_it_is_not_told(cog: Client, daemon: Ctl, coder: Thread, mounted: Path) -> None:
    main = mounted / "src" / "main.py"
    text = main.read_text()
    entry = coder.user_message("x")

    def change() -> None:
        main.write_text("changed\n")
        coder.append("assistant", "done")

    change()
    assert not coder.rewind(entry.id).HasField("files")
    assert main.read_text() == "changed\n"
    assert cog.set_policy({"rewind_files": True}).effective.rewind_files
    change()
    assert not coder.rewind(entry.id, files=False).HasField("files")
    assert main.read_text() == "changed\n"
    change()
    assert list(coder.rewind(entry.id).files.restore.restored) == [b"src/main.py"]
    assert main.read_text() == text
    change()
    assert daemon.json("rewind", "chat", entry.id, "--no-files", "--yes")["files"] is None
    assert main.read_text() == "changed\n"
    assert daemon.json("rewind", "chat", entry.id, "--dry-run")["files"]["restore"]["restored"] == ["src/main.py"]
    daemon("rewind", "chat", entry.id, "--yes")
    assert main.read_text() == text
    # A conversation without files has none to take back.
    talk = cog.create_thread("talk")
    said = talk.user_message("hello")
    assert not talk.rewind(said.id).HasField("files")


def test_policies_that_cannot_be(cog: Client, coder: Thread) -> None:
    for wrong in ({"exclude": [""]}, {"exclude": ["a\nb"]}, {"max_file_bytes": 1 << 62 | 1}, {"exclude": ["x"] * 1001}):
        for call in (cog.set_policy, coder.set_policy):
            with pytest.raises(ValidationError):
                call(wrong)
        with pytest.raises(ValidationError):
            coder.user_message("x", checkpoints=wrong)
    strange: list[Any] = [{"nonsense": 1}, {"enabled": "perhaps"}, "on", {"exclude": 5}]
    for other in strange:
        with pytest.raises(ValidationError):
            cog.set_policy(other)
    with pytest.raises(ValidationError, match="runtime alone"):
        coder.set_policy({"rewind_files": True})
    with pytest.raises(ValidationError, match="runtime alone"):
        cog.set_policy({"rewind_files": False}, agent="coder")
    with pytest.raises(ValidationError, match="runtime alone"):
        coder.user_message("x", checkpoints={"rewind_files": True})
    for agent in ("", "x" * 129, "a\nb", " coder", "\u202e"):
        with pytest.raises(ValidationError, match="agent"):
            cog.set_policy(True, agent=agent)
    with pytest.raises(ValidationError, match="agent"):
        cog.create_thread(agent="x" * 129)
    with pytest.raises(ValidationError, match="agent"):
        coder.user_message("x", agent="a\0b")
    connection = cog._connection
    for request in (thread_pb2.SetPolicyRequest(), thread_pb2.SetPolicyRequest(runtime=False)):
        with pytest.raises(ValidationError, match="whose policy"):
            connection.call(connection.threads.SetPolicy, request)
    with pytest.raises(ValidationError, match="whose policy"):
        connection.call(connection.threads.GetPolicy, thread_pb2.GetPolicyRequest())
    with pytest.raises(ValidationError):
        connection.call(connection.threads.GetPolicy, thread_pb2.GetPolicyRequest(thread_id=""))
    with pytest.raises(NotFound):
        connection.call(connection.threads.SetPolicy, thread_pb2.SetPolicyRequest(thread_id="nobody"))
    assert list(coder.entries()) == []
    assert not cog.policy().HasField("checkpoints")


def test_policies_outlive_the_daemon(cog: Client, daemon: Ctl, coder: Thread) -> None:
    cog.set_policy({"exclude": ["*.o"], "rewind_files": True})
    cog.set_policy({"max_file_bytes": 0}, agent="coder")
    coder.set_policy({"exclude": ["*.x"], "max_file_bytes": -7})
    before = coder.policy()
    assert before.thread_id == "chat"
    assert before.effective == thread_pb2.CheckpointPolicy(
        enabled=True, exclude=["*.o", "*.x"], max_file_bytes=-1, rewind_files=True
    )
    assert cog.policy(agent="coder").effective.max_file_bytes == 10 << 20
    assert coder.refresh().message.agent == "coder"
    daemon("daemon", "stop")
    daemon("daemon", "start")
    assert coder.policy() == before
    # A message leaves the policy as it is.
    coder.append("note", "x")
    assert coder.policy() == before


def test_from_the_command_line(daemon: Ctl, mounted: Path) -> None:
    daemon("thread", "new", "chat", "--workspace", mounted, "--agent", "coder")
    shown = daemon.json("policy")
    assert (shown["runtime"], shown["checkpoints"], shown["effective"]["enabled"]) == (True, None, True)
    assert "the runtime says: nothing" in daemon("policy")
    daemon("policy", "--off")
    assert daemon.json("message", "chat", "x")["file_checkpoint"] is None
    assert daemon.json("message", "chat", "x", "--checkpoints")["file_checkpoint"] is not None
    set_ = daemon.json("policy", "--agent", "coder", "--exclude", "*.o", "--exclude", "dist/", "--max-file-bytes", "-1")
    assert set_["checkpoints"] == {
        "enabled": True,
        "exclude": ["*.o", "dist/"],
        "max_file_bytes": -1,
        "rewind_files": None,
    }
    assert daemon.json("message", "chat", "x")["file_checkpoint"] is not None
    assert daemon.json("message", "chat", "x", "--no-checkpoints")["file_checkpoint"] is None
    text = daemon("policy", "--thread", "chat")
    assert "thread chat says: nothing" in text
    assert "checkpoints on, without *.o, dist/, files of any size" in text
    daemon("policy", "--agent", "coder", "--clear")
    assert "what holds: checkpoints off" in daemon("policy", "--thread", "chat")
    daemon.fails("NOT_FOUND", 11, "policy", "--thread", "nobody")
    daemon.fails("USAGE", 2, "policy", "--thread", "chat", "--agent", "coder")
    daemon.fails("USAGE", 2, "policy", "--clear", "--on")
    daemon.fails("VALIDATION_ERROR", 10, "policy", "--thread", "chat", "--rewind-files")
