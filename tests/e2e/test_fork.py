"""Forks: the conversation with its memory, and the files of it, in the same workspace or in another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cogfs.client import (
    AlreadyExists,
    Client,
    Denied,
    Fork,
    NotFound,
    Thread,
    ValidationError,
    Workspace,
    WorkspaceBusy,
)
from cogfs.v1 import common_pb2, thread_pb2, workspace_pb2
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Aside
from tests.support.tree import Tree, describe, differences, of_snapshot


@dataclass
class Story:
    """A conversation about a project, with what the files were before each message."""

    thread: Thread
    workspace: Workspace
    project: Path
    files: dict[str, Tree] = field(default_factory=dict)

    def say(self, name: str) -> None:
        self.files[name] = describe(self.project)
        self.thread.user_message(name, id=name)

    def answer(self, name: str) -> None:
        self.thread.append("assistant", name, id=name)


def tell(cog: Client, project: Path, *, scan: bool = False) -> Story:
    """m1 a1 m2 a2 m3 a3, with work after each message."""
    workspace = cog.mount(project, exclude=["*.log"], scan=scan)
    story = Story(cog.create_thread("chat", workspace=workspace, agent="coder"), workspace, project)
    main = project / "src" / "main.py"
    story.say("m1")
    main.write_text("after m1\n")
    (project / "made-by-1").mkdir()
    (project / "made-by-1" / "inside").write_text("x\n")
    (project / "build.log").write_text("left out\n")
    story.answer("a1")
    story.say("m2")
    main.unlink()
    main.mkdir()
    (project / "tool").chmod(0o700)
    (project / "link").unlink()
    (project / "link").symlink_to("nowhere")
    os.link(project / "README", project / "README.too")
    story.answer("a2")
    story.say("m3")
    (project / "README").write_text("after m3\n")
    story.answer("a3")
    story.files["now"] = describe(project)
    return story


@pytest.fixture
def story(cog: Client, project: Path) -> Story:
    return tell(cog, project)


@pytest.fixture
def second(cog: Client, story: Story) -> Iterator[Workspace]:
    """A workspace with files of its own, mounted."""
    root = story.project.parent / "second"
    root.mkdir()
    (root / "README").write_text("of the second\n")
    (root / "own").write_text("own\n")
    yield cog.mount(root)


def standing(cog: Client) -> object:
    """All that a refused fork must leave as it was, but for the files."""
    return (
        {thread.id: thread.message.SerializeToString(deterministic=True) for thread in cog.threads()},
        {thread.id: [entry.id for entry in thread.entries(all_branches=True)] for thread in cog.threads()},
        {
            one.id: [snapshot.id for snapshot in one.snapshots() if not snapshot.message.label.startswith("before ")]
            for one in cog.workspaces()
        },
        {one.id: (one.root, one.message.state) for one in cog.workspaces()},
    )


def comparable(report: common_pb2.RestoreReport) -> common_pb2.RestoreReport:
    """A plan or a report without what tells them apart."""
    copy = common_pb2.RestoreReport()
    copy.CopyFrom(report)
    copy.dry_run = False
    copy.safety_snapshot_id = copy.snapshot_id = ""
    return copy


def check_plan(plan: object, fork: Fork) -> None:
    """The dry run said what came of it."""
    assert isinstance(plan, thread_pb2.ForkThreadReport) and plan.dry_run
    done = fork.report
    assert comparable(plan.files.restore) == comparable(done.files.restore)
    assert (plan.snapshots_copied, plan.entries_copied, plan.memories_copied) == (
        done.snapshots_copied,
        done.entries_copied,
        done.memories_copied,
    )
    assert (plan.files.entry_id, plan.files.exact) == (done.files.entry_id, done.files.exact)
    assert plan.workspace_made == done.workspace_made


# --- conversation and memory ------------------------------------------------------------------------------------------


def test_a_fork_is_the_branch_up_to_the_point(cog: Client, story: Story) -> None:
    story.thread.append("note", "with metadata", id="n", metadata={"k": [1, 2]})
    story.thread.rewind("a2")
    story.thread.append("note", "other branch", id="other")
    before = describe(story.project)
    fork = story.thread.fork("n", id="branch")
    assert fork.id == "branch"
    assert fork.workspace_id == story.workspace.id
    assert fork.message.agent == "coder"
    assert (fork.message.forked_from.thread_id, fork.message.forked_from.entry_id) == ("chat", "n")
    assert fork.files is None and fork.snapshots_copied == 0 and fork.report.entries_copied == 7
    ours = list(fork.entries(all_branches=True))
    theirs = {entry.id: entry for entry in story.thread.entries(all_branches=True)}
    assert [entry.id for entry in ours] == ["m1", "a1", "m2", "a2", "m3", "a3", "n"]
    for entry in ours:
        was = theirs[entry.id]
        assert (entry.copied_from.thread_id, entry.copied_from.entry_id) == ("chat", entry.id)
        for name in ("kind", "content", "metadata", "created_at", "parent_id", "file_checkpoint", "files_follow"):
            assert getattr(entry, name) == getattr(was, name), name
        assert entry.active
    assert not differences(describe(story.project), before)
    # The two go on by themselves.
    fork.append("note", "only here", id="here")
    assert [entry.id for entry in story.thread.entries()] == ["m1", "a1", "m2", "a2", "other"]
    (link,) = story.thread.refresh().message.forks
    assert (link.thread_id, link.entry_id) == ("branch", "n")
    assert [list(one.message.forks) for one in cog.threads() if one.id == "chat"] == [[link]]
    fork.delete()
    assert not story.thread.refresh().message.forks


def test_a_fork_remembers_what_stands_on_what_it_copies(story: Story) -> None:
    thread = story.thread
    thread.put_memory("early", ["m1"], id="early")
    thread.put_memory("both", ["a1", "a3"], id="both")
    thread.put_memory("late", ["a3"], id="late")
    thread.put_memory("always", id="always")
    thread.put_memory("v1", "a1", kind="file", name="notes", id="v1")
    thread.put_memory("v2", "m2", kind="file", name="notes", id="v2")
    thread.put_memory("v3", "a3", kind="file", name="notes", id="v3")
    thread.put_memory("s", "a2", kind="summary", id="s")
    plan = thread.fork("a2", dry_run=True)
    fork = thread.fork("a2", id="branch")
    assert isinstance(plan, thread_pb2.ForkThreadReport)
    assert plan.memories_copied == fork.report.memories_copied == 6
    found = {memory.id: memory for memory in fork.memory(all_branches=True)}
    assert set(found) == {"early", "both", "always", "v1", "v2", "s"}
    assert list(found["both"].entry_ids) == ["a1"]
    assert {memory.id for memory in fork.memory(active_only=True)} == {"early", "both", "always", "v2", "s"}
    assert found["v1"].stale_because.reason == "replaced"
    fork.rewind("a1")
    assert {memory.id for memory in fork.memory(active_only=True)} == {"early", "both", "always", "v1"}
    assert {memory.id for memory in thread.memory(active_only=True)} == {"early", "both", "late", "always", "v3", "s"}


def test_a_dry_run_of_a_conversation_leaves_nothing(cog: Client, story: Story) -> None:
    before = standing(cog)
    plan = story.thread.fork("a2", id="branch", dry_run=True)
    assert isinstance(plan, thread_pb2.ForkThreadReport)
    assert (plan.thread.id, plan.thread.leaf_id, plan.entries_copied, plan.dry_run) == ("branch", "a2", 4, True)
    assert not plan.HasField("files")
    assert standing(cog) == before
    chosen = story.thread.fork("a2")
    assert chosen.id.startswith("thread_")


def test_what_the_message_after_the_point_says_is_kept_in_the_copy(story: Story) -> None:
    """The checkpoint that is exact for the point is of a message that is not copied."""
    fork = story.thread.fork("a1")
    *_, point = fork.entries()
    checkpoint = story.thread.entry("m2").file_checkpoint
    assert point.file_checkpoint_at == checkpoint
    assert not any(entry.HasField("file_checkpoint_at") for entry in list(fork.entries())[:-1])
    report = fork.rewind("a1", files=True)
    assert (report.files.exact, report.files.entry_id) == (True, "a1")
    assert not differences(describe(story.project), story.files["m2"])
    # Also of a fork of the fork, and with a note in between that is none of them.
    again = fork.fork("a1").fork("a1", files=True)
    assert again.report.files.exact
    assert [entry.file_checkpoint_at for entry in again.entries()][-1] == checkpoint
    # A message that was written in the fork since is later, and says what the files were before it.
    (story.project / "README").write_text("by hand\n")
    after = describe(story.project)
    again.user_message("again", id="again")
    (story.project / "README").write_text("later\n")
    report = again.rewind("a1", files=True)
    assert (report.files.exact, report.files.entry_id) == (True, "again")
    assert not differences(describe(story.project), after)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_in_the_same_workspace(cog: Client, story: Story) -> None:
    before = standing(cog)
    plan = story.thread.fork("a1", files=True, dry_run=True)
    assert standing(cog) == before
    assert not differences(describe(story.project), story.files["now"])
    fork = story.thread.fork("a1", files=True)
    check_plan(plan, fork)
    assert not differences(describe(story.project), story.files["m2"])
    assert (story.project / "build.log").read_text() == "left out\n"
    assert fork.snapshots_copied == 0 and fork.workspace_id == story.workspace.id
    assert fork.files is not None and fork.files.exact
    safety = cog.snapshot(fork.files.safety_snapshot_id)
    assert not differences(of_snapshot(safety), story.files["now"], [b"", b"build.log"])
    # The conversation that was forked stands where it stood, and the files can be had back.
    assert story.thread.refresh().message.leaf_id == "a3"
    undone = story.workspace.undo()
    assert undone.thread_id == "" and not undone.files_only_reason
    assert not differences(describe(story.project), story.files["now"])
    assert [entry.id for entry in fork.entries()] == ["m1", "a1"]


def test_the_nearest_checkpoint_before(story: Story) -> None:
    """After the last message nothing is exact."""
    fork = story.thread.fork("a3", files=True)
    assert fork.files is not None
    assert (fork.files.exact, fork.files.entry_id) == (False, "m3")
    assert not differences(describe(story.project), story.files["m3"])
    assert not fork.entry("a3").HasField("file_checkpoint_at")


@pytest.mark.parametrize("scan", [False, True], ids=["mounted", "scanned"])
@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
def test_into_a_new_directory(cog: Client, project: Path, scan: bool, there: bool) -> None:
    story = tell(cog, project, scan=scan)
    into = project.parent / "project-fork"
    if there:
        into.mkdir(mode=0o700)
    before = standing(cog)
    plan = story.thread.fork("a2", files=True, into=into, dry_run=True)
    assert standing(cog) == before
    assert list(into.iterdir()) == [] if there else not into.exists()
    fork = story.thread.fork("a2", id="branch", files=True, into=into)
    check_plan(plan, fork)
    assert not differences(describe(into), story.files["m3"], [b"build.log"])
    assert not (into / "build.log").exists()
    assert not differences(describe(project), story.files["now"])
    workspace = cog.workspace(into)
    assert (workspace.id, workspace.root) == (fork.workspace_id, bytes(into))
    assert fork.report.workspace_made == bytes(into)
    assert workspace.message.state == workspace_pb2.Workspace.ACTIVE
    assert workspace.message.mode == story.workspace.status().mode
    assert list(workspace.message.options.exclude) == ["*.log"]
    # m1, m2, and m3, which is named by the point.
    assert fork.snapshots_copied == 3
    check_the_copies(cog, story, fork)
    # It is worked in like any other, and each later rewind restores there.
    (into / "news").write_text("from the fork\n")
    entry = fork.user_message("m4", id="m4")
    assert entry.file_checkpoint.workspace_id == workspace.id
    for point, message in (("a2", "m4"), ("a1", "m2"), ("m1", "m1")):
        report = fork.rewind(point, files=True)
        assert (report.files.workspace_id, report.files.entry_id) == (workspace.id, message)
        if message in story.files:
            assert not differences(describe(into), story.files[message], [b"build.log"])
    assert not differences(describe(project), story.files["now"])


def check_the_copies(cog: Client, story: Story, fork: Thread) -> None:
    """Each checkpoint of the branch is one of the fork's own workspace, with the same content."""
    theirs = {entry.id: entry for entry in story.thread.entries()}
    for entry in fork.entries():
        if not entry.HasField("file_checkpoint"):
            continue
        was = cog.snapshot(theirs[entry.id].file_checkpoint.snapshot_id).message
        now = cog.snapshot(entry.file_checkpoint.snapshot_id).message
        assert entry.file_checkpoint.workspace_id == now.workspace_id == fork.workspace_id
        assert now.copied_from == was.id
        for name in ("label", "root_hash", "created_at", "origin", "exclude", "stats", "state", "skipped"):
            assert getattr(now, name) == getattr(was, name), name


@pytest.mark.parametrize("scan", [False, True], ids=["mounted", "scanned"])
def test_into_a_workspace_that_there_is(cog: Client, story: Story, scan: bool) -> None:
    root = story.project.parent / "second"
    root.mkdir()
    (root / "README").write_text("of the second\n")
    (root / "own").write_text("own\n")
    (root / "kept.log").write_text("kept\n")
    second = cog.mount(root, scan=scan)
    was = describe(root)
    before = standing(cog)
    plan = story.thread.fork("a1", files=True, workspace=second, dry_run=True)
    assert standing(cog) == before
    assert not differences(describe(root), was)
    fork = story.thread.fork("a1", files=True, into=root)
    check_plan(plan, fork)
    assert not differences(describe(root), story.files["m2"], [b"kept.log", b"build.log"])
    assert (root / "kept.log").read_text() == "kept\n"
    assert fork.workspace_id == second.id and not fork.report.workspace_made
    assert fork.snapshots_copied == 2
    check_the_copies(cog, story, fork)
    assert fork.files is not None
    safety = cog.snapshot(fork.files.safety_snapshot_id)
    assert safety.workspace_id == second.id
    assert b"".join(safety.cat("own")) == b"own\n"
    second.undo()
    assert not differences(describe(root), was)
    assert not differences(describe(story.project), story.files["now"])


def test_copies_outlive_what_they_are_copies_of(cog: Client, story: Story, second: Workspace) -> None:
    """Pruning in one workspace is no concern of a fork in another; a fork of the fork still has all."""
    fork = story.thread.fork("a2", files=True, workspace=second)
    story.workspace.prune({"count": 1})
    with pytest.raises(ValidationError, match="pruned"):
        story.thread.rewind("m1", files=True)
    with pytest.raises(ValidationError, match="pruned"):
        story.thread.fork("m1", files=True)
    third = story.project.parent / "third"
    again = fork.fork("a2", files=True, into=third)
    assert again.report.files.exact
    assert not differences(describe(third), story.files["m3"], [b"build.log"])
    again.rewind("m1", files=True)
    assert not differences(describe(third), story.files["m1"])
    # Pruned in its own workspace, it is gone.
    kept = next(entry for entry in again.entries()).file_checkpoint.snapshot_id
    last = again.user_message("later", id="later")
    assert last.file_checkpoint.snapshot_id != kept
    cog.workspace(third).restore(last.file_checkpoint.snapshot_id)
    (third / "x").touch()
    cog.workspace(third).checkpoint()
    cog.workspace(third).restore(last.file_checkpoint.snapshot_id)
    cog.workspace(third).prune({"count": 1})
    pruned = again.entry("m1")
    assert pruned.file_checkpoint.pruned
    with pytest.raises(ValidationError, match="pruned"):
        again.rewind("m1", files=True, dry_run=True)


def test_a_pruned_checkpoint_on_the_branch_is_named_and_not_copied(
    cog: Client, story: Story, second: Workspace
) -> None:
    gone = story.thread.entry("m1").file_checkpoint
    cog.snapshot(gone.snapshot_id).delete()
    fork = story.thread.fork("a2", files=True, workspace=second)
    assert fork.snapshots_copied == 2
    copied = fork.entry("m1").file_checkpoint
    assert (copied.snapshot_id, copied.pruned) == (gone.snapshot_id, True)
    with pytest.raises(ValidationError, match="pruned"):
        fork.rewind("m1", files=True)


def test_copies_of_snapshots(cog: Client, story: Story, second: Workspace) -> None:
    snapshot = story.workspace.checkpoint("by hand", metadata={"n": 1})
    copy = second.copy_snapshot(snapshot)
    assert copy.workspace_id == second.id
    assert (copy.message.label, copy.message.metadata["n"]) == ("by hand", 1)
    assert copy.message.copied_from == snapshot.id
    assert copy.message.root_hash == cog.snapshot(snapshot.id).message.root_hash
    assert copy.id in [one.id for one in second.snapshots()]
    bytes_before = cog.daemon().store_bytes
    second.copy_snapshot(snapshot.id)
    assert cog.daemon().store_bytes == bytes_before
    second.restore(copy.id)
    assert not differences(describe(bytes(second.root)), describe(story.project), [b"build.log"])
    with pytest.raises(ValidationError, match="already"):
        second.copy_snapshot(copy)
    with pytest.raises(NotFound):
        second.copy_snapshot("snap_nothing")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_forked(cog: Client, story: Story, second: Workspace) -> None:
    talk = cog.create_thread("talk")
    talk.user_message("no files", id="t1")
    project, parent = story.project, story.project.parent
    full = parent / "full"
    full.mkdir()
    (full / "x").touch()
    (parent / "file").touch()
    (parent / "dangling").symlink_to("nothing")
    before = standing(cog)
    chat = story.thread
    calls: list[tuple[str, type[Exception], object]] = [
        ("taken", ValidationError, lambda: chat.fork("a1", id="talk")),
        ("itself", ValidationError, lambda: chat.fork("a1", id="chat")),
        ("taken with files", ValidationError, lambda: chat.fork("a1", id="talk", files=True, into=parent / "new")),
        ("no id", ValidationError, lambda: chat.fork("a1", id="a b")),
        ("no entry", ValidationError, lambda: chat.fork("")),
        ("unknown entry", NotFound, lambda: chat.fork("nothing")),
        ("another thread's entry", NotFound, lambda: chat.fork("t1")),
        ("no checkpoint", ValidationError, lambda: talk.fork("t1", files=True)),
        ("no checkpoint, into", ValidationError, lambda: talk.fork("t1", files=True, into=parent / "new")),
        ("into without files", ValidationError, lambda: chat.fork("a1", into=parent / "new")),
        ("workspace without files", ValidationError, lambda: chat.fork("a1", workspace=second)),
        ("source without files", ValidationError, lambda: chat.fork("a1", source=second)),
        ("both", ValidationError, lambda: chat.fork("a1", files=True, workspace=second, into=parent / "new")),
        ("unknown workspace", NotFound, lambda: chat.fork("a1", files=True, workspace="ws_nothing")),
        ("another source", ValidationError, lambda: chat.fork("a1", files=True, source=second)),
        ("unknown source", ValidationError, lambda: chat.fork("a1", files=True, source="ws_nothing")),
        ("not empty", ValidationError, lambda: chat.fork("a1", files=True, into=full)),
        ("a file", ValidationError, lambda: chat.fork("a1", files=True, into=parent / "file")),
        ("below a file", ValidationError, lambda: chat.fork("a1", files=True, into=parent / "file" / "x")),
        ("no parent", ValidationError, lambda: chat.fork("a1", files=True, into=parent / "no" / "x")),
        ("in a mount", ValidationError, lambda: chat.fork("a1", files=True, into=project / "inside")),
        ("around", ValidationError, lambda: chat.fork("a1", files=True, into=parent)),
        ("long name", ValidationError, lambda: chat.fork("a1", files=True, into=parent / ("n" * 256))),
        ("too long", ValidationError, lambda: chat.fork("a1", files=True, into=b"/" + b"n" * 5000)),
        ("the root", ValidationError, lambda: chat.fork("a1", files=True, into="/")),
        ("own files", ValidationError, lambda: chat.fork("a1", files=True, into=parent / "state" / "x")),
        ("proc", ValidationError, lambda: chat.fork("a1", files=True, into="/proc/x")),
    ]
    for name, kind, call in calls:
        assert callable(call)
        with pytest.raises(kind) as caught:
            call()
        said = str(caught.value)
        assert said and "\n" not in said and "internal" not in said and "Traceback" not in said, (name, said)
        assert standing(cog) == before, name
    raw = cog._connection
    for request in (
        thread_pb2.ForkThreadRequest(at_entry_id="a1"),
        thread_pb2.ForkThreadRequest(thread_id="chat", at_entry_id="a/b"),
        thread_pb2.ForkThreadRequest(thread_id="chat", at_entry_id="a1", files=True, into=b"relative"),
        thread_pb2.ForkThreadRequest(thread_id="chat", at_entry_id="a1", files=True, into=b"/tmp/\0"),
        thread_pb2.ForkThreadRequest(thread_id="chat", at_entry_id="a1", files=True, source_workspace_id="a b"),
    ):
        with pytest.raises(ValidationError):
            raw.call(raw.threads.ForkThread, request)
    assert standing(cog) == before
    assert not (parent / "new").exists() and sorted(path.name for path in full.iterdir()) == ["x"]
    assert not differences(describe(project), story.files["now"])
    assert (Path(os.fsdecode(second.root)) / "own").exists()


def test_who_is_in_the_way_refuses(cog: Client, story: Story, second: Workspace) -> None:
    root = Path(os.fsdecode(second.root))
    before = standing(cog)
    with (root / "README").open("a") as held:
        held.write("held")
        held.flush()
        was = describe(root)
        plan = story.thread.fork("a1", files=True, workspace=second, dry_run=True)
        assert isinstance(plan, thread_pb2.ForkThreadReport)
        assert plan.files.restore.busy
        assert [holder.path for holder in plan.files.restore.busy_by] == [b"README"]
        with pytest.raises(WorkspaceBusy, match="the restore is refused"):
            story.thread.fork("a1", id="branch", files=True, workspace=second)
        assert standing(cog) == before
        assert not differences(describe(root), was)
        fork = story.thread.fork("a1", id="branch", files=True, workspace=second, force=True)
        assert [holder.path for holder in fork.report.files.restore.forced] == [b"README"]
    assert not differences(describe(root), story.files["m2"], [b"build.log"])


def test_what_no_snapshot_could_keep_refuses(cog: Client, story: Story) -> None:
    """The safety snapshot comes before anything is made."""
    root = story.project.parent / "second"
    root.mkdir()
    (root / "README").write_text("x\n")
    (root / "twice").hardlink_to(root / "README")
    second = cog.mount(root, refuse_hard_links=True)
    before, was = standing(cog), describe(root)
    for dry_run in (True, False):
        with pytest.raises(Denied, match="README"):
            story.thread.fork("a1", files=True, workspace=second, dry_run=dry_run)
        assert standing(cog) == before
        assert not differences(describe(root), was)


def test_a_workspace_that_is_not_mounted_refuses(cog: Client, story: Story, second: Workspace) -> None:
    second.unmount()
    before = standing(cog)
    for dry_run in (True, False):
        with pytest.raises(Exception, match="not mounted"):
            story.thread.fork("a1", files=True, workspace=second, dry_run=dry_run)
    assert standing(cog) == before


def test_many_at_once(cog: Client, story: Story) -> None:
    """Of the same id there is one, and each that was answered is whole; in the end the files are those of the point."""
    parent = story.project.parent

    def fork(name: str, into: str) -> Aside:
        return Aside(lambda: story.thread.fork("a1", id=name, files=True, into=parent / into))

    same = [fork("same", f"same{number}") for number in range(4)]
    place = [fork(f"place{number}", "place") for number in range(4)]
    plain = [Aside(lambda number=number: story.thread.fork("a2", id=f"plain{number}")) for number in range(4)]  # type: ignore[misc]
    for one in (*same, *place, *plain):
        one.join()
    assert all(isinstance(one.result, Fork) for one in plain)
    assert sum(isinstance(one.result, Fork) for one in same) == 1
    assert all(isinstance(one.error, ValidationError) for one in same if one.error is not None)
    made = [one.result for one in place if isinstance(one.result, Fork)]
    assert made and len({one.workspace_id for one in made}) == 1
    assert all(isinstance(one.error, AlreadyExists | WorkspaceBusy) for one in place if one.error is not None)
    for done in (*made, *(one.result for one in same if isinstance(one.result, Fork))):
        root = Path(os.fsdecode(cog.workspace(id=done.workspace_id).root))
        assert not differences(describe(root), story.files["m2"], [b"build.log"])
        check_the_copies(cog, story, done)
    assert len([path for path in parent.iterdir() if path.name.startswith("same")]) == 1
    assert {link.thread_id for link in story.thread.refresh().message.forks} == {
        *(f"plain{number}" for number in range(4)),
        "same",
        *(one.id for one in made),
    }
    assert not differences(describe(story.project), story.files["now"])


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line(daemon: Ctl, cog: Client, story: Story) -> None:
    parent = story.project.parent
    made = daemon.json("fork", "chat", "a1", "--thread", "plain")
    assert (made["thread"]["id"], made["entries_copied"], made["files"]) == ("plain", 2, None)
    assert daemon.json("fork", "chat", "a1", "--dry-run")["thread"]["id"] == ""
    into = parent / "fork"
    plan = daemon.json("fork", "chat", "a1", "--files", "--into", into, "--dry-run")
    assert plan["workspace_made"] == str(into) and not into.exists()
    shown = daemon("fork", "chat", "a1", "--files", "--into", into, "--dry-run")
    assert "would be made" in shown and "exactly as they were there" in shown
    assert "of an id that the daemon chooses" in shown
    report = daemon.json("fork", "chat", "a1", "--thread", "branch", "--files", "--into", into, "--yes")
    assert report["files"]["exact"] is True and report["snapshots_copied"] == 2
    assert not differences(describe(into), story.files["m2"], [b"build.log"])
    assert daemon.json("status", into)["id"] == report["thread"]["workspace_id"]
    assert "thread again: 2 entries" in daemon("fork", "branch", "a1", "--thread", "again", "--files", "--yes")
    # The end of the fork has files, which are those of a message that it does not have.
    assert ["[files]" in line for line in daemon("rewind", "plain").splitlines()[1:]] == [True, True]
    daemon.fails("VALIDATION_ERROR", 10, "fork", "chat", "a1", "--thread", "branch")
    daemon.fails("NOT_FOUND", 11, "fork", "chat", "nothing")
    daemon.fails("NOT_FOUND", 11, "fork", "nobody", "a1")
    daemon.fails("USAGE", 2, "fork", "chat", "a1", "--into", into)
    daemon.fails("USAGE", 2, "fork", "chat", "a1", "--force")
    daemon.fails("USAGE", 2, "fork", "chat", "a1", "--files")
    daemon.fails("USAGE", 2, "fork", "chat", "a1", "--dry-run", "--yes")
    daemon.fails("VALIDATION_ERROR", 10, "fork", "chat", "a1", "--files", "--into", parent, "--yes")
    with (story.project / "README").open("a"):
        daemon.fails("WORKSPACE_BUSY", 17, "fork", "chat", "a1", "--files", "--yes")
    assert sorted(thread.id for thread in cog.threads()) == ["again", "branch", "chat", "plain"]
