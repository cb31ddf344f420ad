"""A session as agent SDKs see it: a real daemon, a mounted project, an agent that works on it by shell and by tool."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cogfs.client import (
    AgentSession,
    AlreadyExists,
    CheckpointWarning,
    Client,
    CogfsError,
    NotFound,
    RewindScope,
    Unavailable,
    ValidationError,
    Workspace,
    WorkspaceBusy,
    connect,
)
from tests.client.published_types import misfits
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Aside, Site
from tests.support.tree import describe, differences

SCOPES: tuple[RewindScope, ...] = ("both", "conversation", "files")


@pytest.fixture
def ws(cog: Client, mounted: Path) -> Workspace:
    return cog.workspace(mounted)


@pytest.fixture
def session(cog: Client, ws: Workspace) -> AgentSession:
    return AgentSession.start(cog, ws, enable_file_checkpointing=True)


def shell(root: Path, script: str) -> None:
    """What an agent's shell does in the project."""
    subprocess.run(["sh", "-euc", script], cwd=root, check=True, timeout=60)


def branch(session: AgentSession) -> list[str]:
    """The ids of the conversation."""
    return [entry.id for entry in session.thread.entries()]


def checkpoints(ws: Workspace) -> int:
    return sum(1 for _ in ws.snapshots())


class Turns:
    """Three turns of an agent. Turn by turn: the message's id, and the files and the conversation before it."""

    def __init__(self, session: AgentSession, root: Path) -> None:
        self.ids = [str(uuid4()) for _ in range(3)]
        self.trees = []
        self.branches = []
        work: list[Callable[[], object]] = [
            lambda: (root / "src" / "main.py").write_text("one\n2\nthree\nfour\n"),
            lambda: shell(
                root,
                "rm README; mkdir -p new/deep new/empty; printf 'a\\nb\\n' > new/deep/file; mv src/main.py src/app.py;"
                "ln -sfn new link; chmod 600 tool",
            ),
            lambda: shell(root, "rm -r src; printf 'last\\n' >> new/deep/file; mkdir src; echo x > src/other"),
        ]
        for message_id, act in zip(self.ids, work, strict=True):
            self.trees.append(describe(root))
            self.branches.append(branch(session))
            assert session.user_message(f"turn {message_id}", uuid=message_id).id == message_id
            act()
            session.thread.append("tool", "did it")
            session.thread.append("assistant", "Done.")


@pytest.mark.parametrize("target", range(3))
@pytest.mark.parametrize("scope", SCOPES)
def test_each_scope_goes_back_to_before_a_message(
    session: AgentSession, mounted: Path, scope: RewindScope, target: int
) -> None:
    turns = Turns(session, mounted)
    files, conversation = describe(mounted), branch(session)
    planned = session.rewind(turns.ids[target], scope, dry_run=True)
    assert differences(files, describe(mounted)) == []
    assert branch(session) == conversation
    done = session.rewind(turns.ids[target], scope)
    assert planned["status"] == "ready"
    assert done == {**planned, "status": "success"}
    assert misfits(done, "RewindResult") == []
    assert done["targetUserMessageId"] == turns.ids[target]
    assert done["scope"] == scope
    assert "error" not in done
    assert "failedFiles" not in done
    left = turns.branches[target]
    if scope == "files":
        assert "retainedLeafId" not in done
        assert "removedMessageIds" not in done
        assert branch(session) == conversation
    else:
        assert done["retainedLeafId"] == (left[-1] if left else None)
        assert done["removedMessageIds"] == conversation[len(left) :]
        assert branch(session) == left
    if scope == "conversation":
        assert not {"filesChanged", "insertions", "deletions"} & set(done)
        assert differences(files, describe(mounted)) == []
    else:
        assert differences(turns.trees[target], describe(mounted)) == []
        wanted = {path for path in {*files, *turns.trees[target]} if files.get(path) != turns.trees[target].get(path)}
        assert {os.fsencode(name) for name in done["filesChanged"]} == {
            os.path.join(os.fsencode(mounted), path) for path in wanted
        }


def test_rewind_files_leaves_the_conversation(session: AgentSession, mounted: Path) -> None:
    turns = Turns(session, mounted)
    files, conversation = describe(mounted), branch(session)
    preview = session.rewind_files(turns.ids[1], dry_run=True)
    assert differences(files, describe(mounted)) == []
    done = session.rewind_files(turns.ids[1])
    assert done == preview
    assert misfits(done, "RewindFilesResult") == []
    assert done["canRewind"] is True
    assert "error" not in done
    assert all(os.path.isabs(name) for name in done["filesChanged"])
    assert differences(turns.trees[1], describe(mounted)) == []
    assert branch(session) == conversation
    # Any message of the conversation can be next, a later one too.
    for target in (2, 0):
        session.rewind_files(turns.ids[target])
        assert differences(turns.trees[target], describe(mounted)) == []
    again = session.rewind_files(turns.ids[0])
    assert again == {"canRewind": True, "filesChanged": [], "insertions": 0, "deletions": 0}


def test_lines_are_counted_over_all_files(session: AgentSession, mounted: Path) -> None:
    (mounted / "gone").write_text("1\n2\n3\n4\n")
    (mounted / "data").write_bytes(b"\0\1\n\2\n")
    message = session.user_message("count")
    # Two lines added and one deleted; three added in a new file; four deleted with a file; none in a binary one.
    shell(
        mounted, "printf 'one\\nthree\\nfour\\nfive\\n' > src/main.py; printf 'x\\ny\\nz\\n' > new; rm gone; : > data"
    )
    (mounted / "data").write_bytes(b"\0\1\2\n\3\n\4\n")
    preview = session.rewind_files(message.id, dry_run=True)
    assert preview == {
        "canRewind": True,
        "filesChanged": [str(mounted / name) for name in ("data", "gone", "new", "src/main.py")],
        "insertions": 2 + 3,
        "deletions": 1 + 4,
    }
    assert session.rewind_files(message.id) == preview


def test_files_changed_names_what_the_filesystem_has(cog: Client, session: AgentSession, mounted: Path) -> None:
    message = session.user_message("names")
    odd = os.fsencode(mounted) + b"/na\xffme\n"
    with open(odd, "wb") as file:
        file.write(b"x\n")
    changed = session.rewind_files(message.id)["filesChanged"]
    assert [os.fsencode(name) for name in changed] == [odd]
    assert not os.path.exists(odd)


def test_paths_are_where_the_project_is_mounted(cog: Client, ctl: Ctl, project: Path) -> None:
    seen = ctl.base / "seen"
    seen.mkdir()
    session = AgentSession.start(cog, cog.mount(project, seen), enable_file_checkpointing=True)
    message = session.user_message("go")
    (seen / "README").write_text("changed\n")
    assert session.rewind_files(message.id)["filesChanged"] == [str(seen / "README")]
    assert (seen / "README").read_text() == "read me\n"


def test_a_scanned_project_is_the_same(cog: Client, project: Path) -> None:
    session = AgentSession.start(cog, cog.mount(project, scan=True), enable_file_checkpointing=True)
    turns = Turns(session, project)
    planned = session.rewind(turns.ids[0], dry_run=True)
    assert session.rewind(turns.ids[0]) == {**planned, "status": "success"}
    assert differences(turns.trees[0], describe(project)) == []
    assert branch(session) == []


def test_an_edited_message_follows_a_rewind(session: AgentSession, mounted: Path, ws: Workspace) -> None:
    """Also at the very beginning, again and again; and each message stands for its own files."""
    trees = {}
    for number in range(3):
        (mounted / "README").write_text(f"before {number}\n")
        trees[number] = describe(mounted)
        message = session.user_message(f"try {number}")
        assert message.parent_id == ""
        (mounted / "README").write_text(f"after {number}\n")
        session.thread.append("assistant", "Done.")
        assert session.rewind(message.id)["retainedLeafId"] is None
        assert differences(trees[number], describe(mounted)) == []
        assert session.thread.refresh().message.leaf_id == ""
        assert list(session.user_messages()) == []
    ws.undo()
    assert (mounted / "README").read_text() == "after 2\n"
    assert [entry.content for entry in session.user_messages()] == ["try 2"]
    assert session.rewind(message.id)["status"] == "success"
    assert differences(trees[2], describe(mounted)) == []


def test_a_message_is_its_own_checkpoint_where_the_files_did_not_follow(session: AgentSession, mounted: Path) -> None:
    """After a rewind of the conversation alone the files are others than those that stood at the entry before."""
    session.user_message("first")
    session.thread.append("assistant", "Done.")
    second = session.user_message("second")
    (mounted / "README").write_text("second\n")
    session.rewind(second.id, "conversation")
    third = session.user_message("third")
    assert third.parent_id == second.parent_id
    (mounted / "README").write_text("third\n")
    session.rewind(third.id, "both")
    assert (mounted / "README").read_text() == "second\n"
    # What was said of the entry before stays true: the files that stood there are those before the second message.
    report = session.thread.rewind(third.parent_id, files=True)
    assert (report.files.entry_id, report.files.exact) == (second.id, True)
    assert (mounted / "README").read_text() == "read me\n"


def test_the_four_failures(cog: Client, ws: Workspace, session: AgentSession, mounted: Path) -> None:
    off = AgentSession.start(cog, ws)
    unchecked = off.user_message("off")
    assert not unchecked.HasField("file_checkpoint")
    other = AgentSession.start(cog, ws, enable_file_checkpointing=True).user_message("elsewhere")
    first = session.user_message("go")
    answer = session.thread.append("assistant", "Done.")
    silent = session.user_message("a subagent's", parent_tool_use_id="toolu_01")
    pruned = session.user_message("pruned", wait_for="sealed")
    session.user_message("later", wait_for="sealed")
    cog.snapshot(pruned.file_checkpoint.snapshot_id).delete()
    (mounted / "README").write_text("changed\n")
    cases: list[tuple[AgentSession, Any, str]] = [
        (off, unchecked.id, f"file checkpointing is not enabled in session {off.session_id}: "),
        (session, answer.id, f"{answer.id!r} is not the id of a user message"),
        (session, session.session_id, f"{session.session_id!r} is not the id of a user message"),
        (session, str(uuid4()), "is not the id of a user message"),
        (session, "no id at all", "'no id at all' is not the id of a user message"),
        (session, other.id, f"the message {other.id} belongs to session {other.thread_id}"),
        (session, silent.id, f"the message {silent.id} has no snapshot of the files: none was taken"),
        (session, pruned.id, f"the message {pruned.id} has no snapshot of the files: it was pruned"),
    ]
    files, conversation = describe(mounted), branch(session)
    for who, message_id, words in cases:
        preview = who.rewind_files(message_id, dry_run=True)
        assert set(preview) == {"canRewind", "error"}
        assert preview["canRewind"] is False
        assert words in preview["error"]
        with pytest.raises(ValidationError) as refused:
            who.rewind_files(message_id)
        assert str(refused.value) == preview["error"]
        for dry_run in (True, False):
            assert who.rewind(message_id, "both", dry_run) == {
                "status": "rejected",
                "targetUserMessageId": message_id,
                "scope": "both",
                "error": preview["error"],
            }
    assert differences(files, describe(mounted)) == []
    assert branch(session) == conversation
    # A conversation needs no files.
    assert off.rewind(unchecked.id, "conversation")["status"] == "success"
    assert session.rewind(pruned.id, "conversation")["status"] == "success"
    assert session.rewind_files(pruned.id, dry_run=True)["error"].endswith("is not in the conversation any more")
    assert session.rewind_files(first.id)["canRewind"] is True
    assert (mounted / "README").read_text() == "read me\n"


def test_bad_input(cog: Client, ws: Workspace, session: AgentSession) -> None:
    wrong: list[Any] = ["", "\0", "a\nb", "x" * 100_000, "\udcff", None, 7, b"bytes", ["a"], "../..", "{}", "🦊"]
    for message_id in wrong:
        preview = session.rewind_files(message_id, dry_run=True)
        assert preview["canRewind"] is False
        assert "is not the id of a user message" in preview["error"]
        with pytest.raises(ValidationError):
            session.rewind_files(message_id)
        assert session.rewind(message_id)["status"] == "rejected"
    scopes: list[Any] = ["all", "", None, ["both"], "BOTH"]
    message = session.user_message("go")
    for scope in scopes:
        for dry_run in (True, False):
            with pytest.raises(ValidationError, match="is no scope: give one of conversation, files, both"):
                session.rewind(message.id, scope, dry_run)
    ids: list[Any] = ["", "entry_1", message.id[:-1], message.id.replace("-", ""), f"{{{message.id}}}", 5]
    for uuid in ids:
        with pytest.raises(ValidationError, match="is no UUID"):
            session.user_message("x", uuid=uuid)
    with pytest.raises(ValidationError, match="parent_tool_call_id"):
        session.user_message("x", parent_tool_use_id="no id")
    assert branch(session) == [message.id]
    with pytest.raises(AlreadyExists):
        AgentSession.start(cog, ws, session_id=session.session_id)
    with pytest.raises(ValidationError):
        AgentSession.start(cog, ws, session_id="no id")
    with pytest.raises(NotFound):
        AgentSession.start(cog, "ws_nowhere", enable_file_checkpointing=True)
    with pytest.raises(ValidationError, match="needs a workspace"):
        AgentSession.start(cog, "", enable_file_checkpointing=True)
    with pytest.raises(NotFound):
        AgentSession.resume(cog, "nobody")
    # A conversation without files has none to take back.
    talk = AgentSession.resume(cog, cog.create_thread("talk").id, enable_file_checkpointing=True)
    said = talk.user_message("hello")
    assert "not enabled" in talk.rewind_files(said.id, dry_run=True)["error"]
    assert talk.rewind(said.id, "conversation")["status"] == "success"


def test_only_a_user_message_has_a_before(cog: Client, session: AgentSession) -> None:
    session.user_message("go")
    answer = session.thread.append("assistant", "Done.")
    for files in (True, False):
        for dry_run in (True, False):
            with pytest.raises(ValidationError, match="is no user message"):
                session.thread.rewind(answer.id, files=files, before=True, dry_run=dry_run)
    quiet = session.user_message("x", parent_tool_use_id="toolu_01")
    with pytest.raises(ValidationError, match="has no checkpoint of the files"):
        session.thread.rewind(quiet.id, files=True, before=True)
    assert len(branch(session)) == 3


def test_a_replayed_message_takes_no_second_checkpoint(session: AgentSession, ws: Workspace, mounted: Path) -> None:
    message_id = str(uuid4()).upper()
    first = session.user_message("go", uuid=message_id)
    assert first.id == message_id.lower()
    (mounted / "README").write_text("changed\n")
    session.thread.append("assistant", "Done.")
    taken, conversation = checkpoints(ws), branch(session)
    for again in (message_id, message_id.lower()):
        known = session.user_message("go", uuid=again)
        assert known.id == first.id
        assert known.file_checkpoint.snapshot_id == first.file_checkpoint.snapshot_id
    assert (checkpoints(ws), branch(session)) == (taken, conversation)
    with pytest.raises(AlreadyExists, match="another message has the id"):
        session.user_message("something else", uuid=message_id)
    assert session.rewind(message_id)["status"] == "success"
    assert (mounted / "README").read_text() == "read me\n"
    with pytest.raises(AlreadyExists, match="was rewound: send it again under a new id"):
        session.user_message("go", uuid=message_id)
    assert (checkpoints(ws), branch(session)) == (taken + 1, [])
    # An answer has its id as well.
    answer = session.thread.append("assistant", "Done.", id=str(uuid4()))
    with pytest.raises(AlreadyExists, match="another message has the id"):
        session.user_message("Done.", uuid=answer.id)


def test_a_message_that_is_sent_by_many_at_once_is_one(session: AgentSession, ws: Workspace) -> None:
    message_id = str(uuid4())
    taken = checkpoints(ws)
    senders = [Aside(lambda: session.user_message("go", uuid=message_id).file_checkpoint.snapshot_id) for _ in range(8)]
    for sender in senders:
        sender.join()
        assert sender.error is None
    assert len({sender.result for sender in senders}) == 1
    assert (checkpoints(ws), branch(session)) == (taken + 1, [message_id])


def test_the_same_id_in_two_sessions_is_two_messages(cog: Client, ws: Workspace, mounted: Path) -> None:
    message_id = str(uuid4())
    sessions = [AgentSession.start(cog, ws, enable_file_checkpointing=True) for _ in range(2)]
    trees = []
    for number, session in enumerate(sessions):
        (mounted / "README").write_text(f"{number}\n")
        trees.append(describe(mounted))
        session.user_message("go", uuid=message_id)
    for session, tree in zip(sessions, trees, strict=True):
        session.rewind_files(message_id)
        assert differences(tree, describe(mounted)) == []


def test_every_user_message_is_told_again(session: AgentSession) -> None:
    """What a user interface needs after a restart: the ids to which it can go back."""
    ids = [session.user_message(f"m{number}").id for number in range(3)]
    session.thread.append("assistant", "Done.")
    assert [(entry.id, entry.content) for entry in session.user_messages()] == [
        (message_id, f"m{number}") for number, message_id in enumerate(ids)
    ]
    session.rewind(ids[1], "conversation")
    assert [entry.id for entry in session.user_messages()] == ids[:1]


def test_a_session_is_resumed_after_a_restart(here: Site) -> None:
    here.mount()
    (here.project / "file").write_text("one\n")
    with here.client() as cog:
        session = AgentSession.start(
            cog, here.workspace(cog), session_id="chat", enable_file_checkpointing=True, settings={"theme": "dark"}
        )
        turns = ShortTurns(session, here.project)
    here.kill_daemon()
    here.start()
    with here.client() as cog:
        here.settled(cog)
        resumed = AgentSession.resume(cog, "chat")
        assert resumed.file_checkpointing()
        assert [entry.id for entry in resumed.user_messages()] == turns.ids
        planned = resumed.rewind(turns.ids[1], dry_run=True)
        assert resumed.rewind(turns.ids[1]) == {**planned, "status": "success"}
        assert differences(turns.trees[1], describe(here.project)) == []
        # A replay by the resumed one is known as well.
        assert resumed.user_message("turn 0", uuid=turns.ids[0]).id == turns.ids[0]
        with pytest.raises(AlreadyExists, match="was rewound"):
            resumed.user_message("turn 1", uuid=turns.ids[1])
        resumed.rewind(turns.ids[0])
        assert differences(turns.trees[0], describe(here.project)) == []
        # It can be turned off, and on again.
        off = AgentSession.resume(cog, "chat", enable_file_checkpointing=False)
        assert not off.user_message("off").HasField("file_checkpoint")
        assert not AgentSession.resume(cog, "chat").file_checkpointing()
        on = AgentSession.resume(cog, "chat", settings={"general": {"fileCheckpointing": {"enabled": True}}})
        assert on.user_message("on").HasField("file_checkpoint")


class ShortTurns:
    """Two short turns, as ``Turns``."""

    def __init__(self, session: AgentSession, root: Path) -> None:
        self.ids = [str(uuid4()) for _ in range(2)]
        self.trees = []
        for number, message_id in enumerate(self.ids):
            self.trees.append(describe(root))
            session.user_message(f"turn {number}", uuid=message_id)
            shell(root, f"mkdir -p d{number}/e; echo {number} > d{number}/e/f; echo {number} >> file")
            session.thread.append("assistant", "Done.")


@pytest.mark.parametrize("step", ["restore.journalled", "restore.applied", "restore.synced", "restore.finished"])
def test_a_rewind_to_the_beginning_is_whole_after_a_crash(here: Site, step: str) -> None:
    here.mount()
    (here.project / "file").write_text("one\n")
    with here.client() as cog:
        session = AgentSession.start(cog, here.workspace(cog), session_id="chat", enable_file_checkpointing=True)
        turns = ShortTurns(session, here.project)
        files, conversation = describe(here.project), branch(session)
    here.kill_daemon()
    assert here.start(step) is not None, here.log_tail()
    with here.client() as cog:
        here.settled(cog)
        session = AgentSession.resume(cog, "chat")
        with pytest.raises(Unavailable):
            session.rewind(turns.ids[0])
    here.start()
    with here.client() as cog:
        here.settled(cog)
        session = AgentSession.resume(cog, "chat")
        now = branch(session)
        assert now in ([], conversation)
        assert differences(files if now else turns.trees[0], describe(here.project)) == []
        if now:
            assert session.rewind(turns.ids[0])["status"] == "success"
        assert differences(turns.trees[0], describe(here.project)) == []
        # And the conversation begins anew.
        assert session.user_message("again").parent_id == ""


def test_a_writer_refuses_it(session: AgentSession, mounted: Path) -> None:
    message = session.user_message("go")
    (mounted / "README").write_text("changed\n")
    (mounted / "new").write_text("new\n")
    script = f"exec 3>>'{mounted}/README'; echo ready; read -r line || true"
    with subprocess.Popen(["sh", "-c", script], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        files, conversation = describe(mounted), branch(session)
        preview = session.rewind_files(message.id, dry_run=True)
        assert preview["canRewind"] is False
        assert f"sh (pid {process.pid})" in preview["error"]
        assert preview["filesChanged"] == [str(mounted / "README"), str(mounted / "new")]
        assert misfits(preview, "RewindFilesResult") == []
        with pytest.raises(WorkspaceBusy) as refused:
            session.rewind_files(message.id)
        assert str(refused.value) == preview["error"]
        assert str(process.pid) in refused.value.metadata["busy_by"]
        for dry_run in (True, False):
            result = session.rewind(message.id, "both", dry_run)
            assert (result["status"], result["error"]) == ("rejected", preview["error"])
            assert misfits(result, "RewindResult") == []
        assert differences(files, describe(mounted)) == []
        assert branch(session) == conversation
        # The conversation alone is in nobody's way.
        assert session.rewind(message.id, "conversation", dry_run=True)["status"] == "ready"
        process.communicate(timeout=60)
    # A reader is not in the way.
    with open(mounted / "README"):
        assert session.rewind_files(message.id)["canRewind"] is True
    assert (mounted / "README").read_text() == "read me\n"


def test_without_a_daemon(cog: Client, session: AgentSession, daemon: Ctl) -> None:
    message = session.user_message("go")
    daemon("daemon", "stop")
    preview = session.rewind_files(message.id, dry_run=True)
    assert preview["canRewind"] is False
    assert "no cogfs daemon answers" in preview["error"]
    assert session.rewind(message.id, dry_run=True)["status"] == "rejected"
    with pytest.raises(Unavailable):
        session.rewind_files(message.id)
    # Whether it was carried out is not known to whoever loses the connection.
    with pytest.raises(Unavailable):
        session.rewind(message.id)
    daemon("daemon", "start")
    with connect(cog.endpoint) as client:
        closed = AgentSession.resume(client, session.session_id)
    assert closed.rewind_files(message.id, dry_run=True)["canRewind"] is False


def test_a_message_without_its_checkpoint_is_told(session: AgentSession, daemon: Ctl, mounted: Path) -> None:
    daemon("unmount", mounted)
    with pytest.warns(CheckpointWarning, match="has no checkpoint"):
        message = session.user_message("go")
    with pytest.raises(CogfsError):
        session.user_message("needs one", require_checkpoint=True)
    assert branch(session) == [message.id]
    daemon("mount", mounted)
    assert "has no snapshot" in session.rewind_files(message.id, dry_run=True)["error"]


def test_the_switch_leaves_the_rest_of_the_policy(cog: Client, ws: Workspace, mounted: Path) -> None:
    thread = cog.create_thread("chat", workspace=ws)
    thread.set_policy({"enabled": False, "exclude": ["*.o"], "max_file_bytes": 100})
    session = AgentSession.resume(cog, "chat")
    assert not session.file_checkpointing()
    session = AgentSession.resume(cog, "chat", enable_file_checkpointing=True)
    said = thread.policy().checkpoints
    assert (said.enabled, list(said.exclude), said.max_file_bytes) == (True, ["*.o"], 100)
    message = session.user_message("go")
    (mounted / "a.o").write_text("x\n")
    (mounted / "b.c").write_text("x\n")
    assert session.rewind_files(message.id)["filesChanged"] == [str(mounted / "b.c")]
    assert (mounted / "a.o").exists()
    # Any thread is a session: it takes checkpoints unless it is told not to.
    plain = AgentSession.resume(cog, cog.create_thread("plain", workspace=ws).id)
    assert plain.settings is None
    assert plain.file_checkpointing()
    assert plain.rewind_files(plain.thread.user_message("x").id)["canRewind"] is True


def test_the_switch_overrules_what_is_less_specific(cog: Client, ws: Workspace) -> None:
    cog.set_policy(False)
    cog.set_policy(False, agent="coder")
    session = AgentSession.start(cog, ws, enable_file_checkpointing=True, agent="coder")
    assert session.rewind_files(session.user_message("go").id)["canRewind"] is True
    cog.set_policy(True)
    cog.set_policy(True, agent="coder")
    assert not AgentSession.start(cog, ws, agent="coder").file_checkpointing()


def test_each_file_has_its_diff(cog: Client, session: AgentSession, mounted: Path) -> None:
    """What a user interface shows before it asks: the totals, and each file's own changes."""
    message = session.user_message("go", wait_for="sealed")
    shell(mounted, "echo more >> README; sed -i s/two/2/ src/main.py")
    preview = session.rewind_files(message.id, dry_run=True)
    diffs = list(cog.snapshot(message.file_checkpoint.snapshot_id).diff(unified=True))
    assert [os.fsdecode(os.path.join(os.fsencode(mounted), one.path)) for one in diffs] == preview["filesChanged"]
    assert sum(one.insertions for one in diffs) == preview["insertions"] == 2
    assert sum(one.deletions for one in diffs) == preview["deletions"] == 1
    assert b"+more" in diffs[0].diff


def test_settings_turn_it_on(cog: Client, ws: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"general": {"fileCheckpointing": {"enabled": true}}}')
    on: list[Any] = [path, str(path), {"general": {"fileCheckpointing": {"enabled": True}}}]
    for settings in on:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session = AgentSession.start(cog, ws, settings=settings)
        assert session.user_message("go").HasField("file_checkpoint")
    off: list[Any] = [None, {}, {"theme": "dark"}, {"general": {"fileCheckpointing": {"enabled": False}}}]
    for settings in off:
        session = AgentSession.start(cog, ws, settings=settings)
        message = session.user_message("go")
        assert not message.HasField("file_checkpoint")
        assert "enable_file_checkpointing=True" in session.rewind_files(message.id, dry_run=True)["error"]
    path.write_text("{}")
    session = AgentSession.start(cog, ws, settings=path)
    error = session.rewind_files(session.user_message("go").id, dry_run=True)["error"]
    assert f"set general.fileCheckpointing.enabled to true in {path}" in error
