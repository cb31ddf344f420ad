"""What a thread remembers goes back, and comes back, with its conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cogfs.client import Client, CogfsError, NotFound, Thread, Unavailable, ValidationError
from cogfs.v1 import thread_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Aside, Site


def counting(thread: Thread) -> set[str]:
    return {memory.id for memory in thread.memory(active_only=True)}


def seen(thread: Thread) -> dict[str, str]:
    """What ``memory`` tells: the ids, with why a memory does not count."""
    return {memory.id: memory.stale_because.reason for memory in thread.memory()}


def told(report: thread_pb2.MemoryReport) -> tuple[list[str], list[str], list[str]]:
    return list(report.stale), list(report.hidden), list(report.active)


@pytest.fixture
def talk(cog: Client) -> Thread:
    """a, b and c, and memories of each kind."""
    thread = cog.create_thread("talk")
    for name in "abc":
        thread.append("note", name, id=name)
    thread.put_memory("on a", ["a"], id="on-a")
    thread.put_memory("on b and c", ["b", "c"], id="on-bc")
    thread.put_memory("on a and c", ["a", "c"], id="on-ac")
    thread.put_memory("on nothing", id="on-nothing", metadata={"weight": 3})
    thread.put_memory("the story so far", "c", kind="summary", id="sum")
    thread.put_memory("one\n", "a", kind="file", name="notes.md", id="notes-1")
    thread.put_memory("one\ntwo\n", "c", kind="file", name="notes.md", id="notes-2")
    return thread


def test_items_are_written_and_listed(talk: Thread) -> None:
    everything = {memory.id: memory for memory in talk.memory(all_branches=True)}
    assert list(everything) == sorted(everything)
    assert list(everything["on-bc"].entry_ids) == ["b", "c"]
    assert everything["on-nothing"].metadata["weight"] == 3
    assert everything["notes-2"].name == "notes.md"
    assert everything["notes-1"].stale_because.reason == "replaced"
    assert everything["sum"].kind == thread_pb2.Memory.SUMMARY
    assert counting(talk) == set(everything) - {"notes-1"} == set(seen(talk))
    assert [memory.id for memory in talk.memory(kind="file")] == ["notes-2"]
    chosen = talk.put_memory("of an id that the daemon chooses", "b")
    assert chosen.id.startswith("mem_") and chosen.state == thread_pb2.Memory.ACTIVE
    leaf = talk.put_memory("about all of it", kind="summary")
    assert list(leaf.entry_ids) == ["c"]


def test_an_item_is_replaced_by_its_id(talk: Thread) -> None:
    before = next(memory for memory in talk.memory() if memory.id == "on-a")
    after = talk.put_memory("on a, and better", ["a", "b", "a"], id="on-a")
    assert (after.content, list(after.entry_ids)) == ("on a, and better", ["a", "b"])
    assert after.created_at == before.created_at
    assert after.updated_at.ToNanoseconds() > before.updated_at.ToNanoseconds()
    # Of a file under another name, the version that it replaced counts again.
    talk.put_memory("x", "c", kind="file", name="other.md", id="notes-2")
    assert {"notes-1", "notes-2"} <= counting(talk)


def test_a_rewind_makes_stale_what_stood_only_on_what_is_cut(talk: Thread) -> None:
    expected = (["on-bc"], ["notes-2", "sum"], ["notes-1"])
    plan = talk.rewind("a", dry_run=True)
    assert told(plan.memory) == expected
    assert counting(talk) == {"on-a", "on-bc", "on-ac", "on-nothing", "sum", "notes-2"}
    assert told(talk.rewind("a").memory) == expected
    assert counting(talk) == {"on-a", "on-ac", "on-nothing", "notes-1"}
    # Stale items are told, summaries and files of the branch left behind are not.
    assert seen(talk) == {"on-a": "", "on-ac": "", "on-bc": "rewound", "on-nothing": "", "notes-1": ""}
    stale = {memory.id: memory for memory in talk.memory(all_branches=True) if memory.HasField("stale_because")}
    assert {name: memory.stale_because.reason for name, memory in stale.items()} == {
        "on-bc": "rewound",
        "sum": "branch",
        "notes-2": "branch",
    }
    assert all(memory.stale_because.leaf_id == "a" for memory in stale.values())
    assert all(memory.state == thread_pb2.Memory.STALE for memory in stale.values())


def test_step_by_step_as_at_once(talk: Thread) -> None:
    """An item on two entries, each of which is cut by a rewind of its own, stands on nothing after the second."""
    assert told(talk.rewind("b").memory) == ([], ["notes-2", "sum"], ["notes-1"])
    assert told(talk.rewind("a").memory) == (["on-bc"], [], [])
    assert seen(talk)["on-bc"] == "rewound"


def test_a_rewind_of_the_files_alone_leaves_memory(cog: Client, project: Path) -> None:
    thread = cog.create_thread("chat", workspace=cog.mount(project))
    first = thread.user_message("one")
    (project / "README").write_text("changed\n")
    last = thread.append("assistant", "done")
    thread.put_memory("x", [last.id], id="x")
    report = thread.rewind(first.id, files=True, memory=False)
    assert told(report.memory) == ([], [], [])
    assert counting(thread) == {"x"}


def test_what_is_put_on_another_branch_does_not_count(talk: Thread) -> None:
    talk.rewind("a")
    item = talk.put_memory("late", ["c"], id="late")
    assert (item.state, item.stale_because.reason) == (thread_pb2.Memory.STALE, "rewound")
    assert talk.put_memory("late, too", "b", kind="summary", id="late-sum").stale_because.reason == "branch"
    talk.append("note", "d", id="d")
    talk.put_memory("another way", "d", kind="file", name="notes.md", id="notes-d")
    assert {"notes-d"} < counting(talk)
    assert "notes-1" not in counting(talk)


def test_undo_brings_memory_back_with_the_conversation(cog: Client, project: Path) -> None:
    workspace = cog.mount(project)
    thread = cog.create_thread("chat", workspace=workspace)
    first = thread.user_message("one").id
    (project / "README").write_text("changed\n")
    last = thread.append("assistant", "done").id
    thread.put_memory("x", [last], id="x")
    thread.put_memory("s", last, kind="summary", id="s")
    report = thread.rewind(first, files=True)
    assert told(report.memory) == (["x"], ["s"], [])
    assert counting(thread) == set()
    for dry_run in (True, False):
        undone = workspace.undo(dry_run=dry_run)
        assert told(undone.memory) == ([], [], ["s", "x"])
    assert counting(thread) == {"s", "x"}
    # The undo of the undo.
    assert told(workspace.undo().memory) == (["x"], ["s"], [])
    assert counting(thread) == set()
    # A rewind that has nothing to change in the files is undone as well.
    second = thread.user_message("two").id
    thread.put_memory("y", [second], id="y")
    thread.rewind(first, files=True)
    assert counting(thread) == set()
    assert told(workspace.undo().memory) == ([], [], ["y"])
    # After something was added, the files alone are taken back.
    thread.rewind(first, files=True)
    thread.append("note", "more")
    assert told(workspace.undo().memory) == ([], [], [])
    assert counting(thread) == set()


def test_the_command_line_tells_of_memory(daemon: Ctl, cog: Client, talk: Thread) -> None:
    shown = daemon("rewind", "talk", "a", "--dry-run")
    assert "memory that would be stale: 1\n  on-bc\n" in shown
    assert daemon.json("rewind", "talk", "b", "--dry-run")["memory"] == {
        "stale": [],
        "hidden": ["notes-2", "sum"],
        "active": ["notes-1"],
    }
    assert "memory that is now stale: 1\n" in daemon("rewind", "talk", "a", "--yes")


def test_a_deleted_thread_is_gone_with_all_it_holds(cog: Client, project: Path) -> None:
    workspace = cog.mount(project)
    thread = cog.create_thread("chat", workspace=workspace)
    first = thread.user_message("one", id="first")
    (project / "README").write_text("changed\n")
    thread.user_message("two", id="second")
    thread.put_memory("x", ["second"], id="x")
    thread.rewind("first", files=True)
    thread.delete()
    for call in (thread.refresh, thread.delete, lambda: thread.entry("first"), lambda: list(thread.memory())):
        with pytest.raises(NotFound):
            call()
    assert list(cog.threads()) == []
    # The snapshots stay, and the restore can be undone, alone.
    assert cog.snapshot(first.file_checkpoint.snapshot_id).message.label == "first"
    again = cog.create_thread("chat", workspace=workspace)
    assert list(again.entries(all_branches=True)) == list(again.memory(all_branches=True)) == []
    again.append("note", "other", id="first")
    assert "gone on" in workspace.undo().files_only_reason
    assert (project / "README").read_text() == "changed\n"
    assert [entry.content for entry in again.entries()] == ["other"]
    workspace.unmount()
    again.delete()
    workspace.delete()


def test_a_long_list_is_whole(cog: Client) -> None:
    thread = cog.create_thread("long")
    thread.append("note", "a", id="a")
    for number in range(230):
        thread.put_memory(str(number), ["a"], id=f"m{number:03}")
    assert [memory.content for memory in thread.memory()] == [str(number) for number in range(230)]
    calls = cog._connection
    request = thread_pb2.ListMemoryRequest(thread_id="long", page_size=7)
    found: list[str] = []
    while True:
        answer = calls.call(calls.threads.ListMemory, request)
        assert len(answer.memories) <= 7
        found += [memory.id for memory in answer.memories]
        if not answer.next_page_token:
            break
        request.page_token = answer.next_page_token
    assert found == [f"m{number:03}" for number in range(230)]


_WRONG: list[tuple[dict[str, Any], Reason]] = [
    ({"thread_id": ""}, Reason.VALIDATION_ERROR),
    ({"thread_id": "no/id"}, Reason.VALIDATION_ERROR),
    ({"thread_id": "nobody"}, Reason.NOT_FOUND),
    ({"memory_id": "a b"}, Reason.VALIDATION_ERROR),
    ({"kind": 0}, Reason.VALIDATION_ERROR),
    ({"kind": 99}, Reason.VALIDATION_ERROR),
    ({"entry_ids": ["nothing"]}, Reason.NOT_FOUND),
    ({"entry_ids": ["a", ""]}, Reason.VALIDATION_ERROR),
    ({"entry_ids": ["a\0"]}, Reason.VALIDATION_ERROR),
    ({"entry_ids": ["a"] * 1001}, Reason.VALIDATION_ERROR),
    ({"name": "notes"}, Reason.VALIDATION_ERROR),
    ({"kind": thread_pb2.Memory.FILE}, Reason.VALIDATION_ERROR),
    ({"kind": thread_pb2.Memory.FILE, "name": "n" * 1025}, Reason.VALIDATION_ERROR),
    ({"kind": thread_pb2.Memory.FILE, "name": "a\nb"}, Reason.VALIDATION_ERROR),
    ({"kind": thread_pb2.Memory.SUMMARY, "entry_ids": ["a", "b"]}, Reason.VALIDATION_ERROR),
    ({"kind": thread_pb2.Memory.SUMMARY, "memory_id": "on-a"}, Reason.VALIDATION_ERROR),
    ({"content": "x" * ((16 << 20) + 1)}, Reason.VALIDATION_ERROR),
    ({"thread_id": "empty", "kind": thread_pb2.Memory.SUMMARY, "entry_ids": []}, Reason.VALIDATION_ERROR),
]


def test_bad_input_changes_nothing(cog: Client, talk: Thread) -> None:
    cog.create_thread("empty")
    calls = cog._connection
    before = list(talk.memory(all_branches=True)), talk.refresh().message
    good: dict[str, Any] = {"thread_id": "talk", "kind": thread_pb2.Memory.ITEM, "content": "x", "entry_ids": ["a"]}
    wrong: list[tuple[Any, Any, Reason]] = [
        (calls.threads.PutMemory, thread_pb2.PutMemoryRequest(**{**good, **change}), reason)
        for change, reason in _WRONG
    ]
    for change, reason in (
        ({"thread_id": ""}, Reason.VALIDATION_ERROR),
        ({"thread_id": "nobody"}, Reason.NOT_FOUND),
        ({"page_size": -1}, Reason.VALIDATION_ERROR),
        ({"page_size": 1001}, Reason.VALIDATION_ERROR),
        ({"page_token": "a b"}, Reason.VALIDATION_ERROR),
        ({"kind": 99}, Reason.VALIDATION_ERROR),
    ):
        fields: dict[str, Any] = {"thread_id": "talk", **change}
        wrong.append((calls.threads.ListMemory, thread_pb2.ListMemoryRequest(**fields), reason))
    for thread_id, reason in (
        ("", Reason.VALIDATION_ERROR),
        ("a/b", Reason.VALIDATION_ERROR),
        ("nobody", Reason.NOT_FOUND),
    ):
        wrong.append((calls.threads.DeleteThread, thread_pb2.DeleteThreadRequest(thread_id=thread_id), reason))
    for method, request, reason in wrong:
        with pytest.raises(CogfsError) as caught:
            calls.call(method, request)
        assert caught.value.reason is reason, (str(request)[:200], caught.value)
        assert "\n" not in str(caught.value) and "internal" not in str(caught.value)
    assert (list(talk.memory(all_branches=True)), talk.refresh().message) == before
    for name in ("kind", "nonsense"):
        with pytest.raises(ValidationError):
            talk.put_memory("x", kind=name)


@pytest.mark.parametrize("step", ["restore.journalled", "restore.applied", "restore.synced", "restore.finished"])
def test_memory_follows_the_conversation_through_a_crash(here: Site, step: str) -> None:
    (here.project / "file").write_text("one\n")
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        first = thread.user_message("one").id
        (here.project / "file").write_text("two\n")
        last = thread.user_message("two").id
        thread.put_memory("x", [last], id="x")
        (here.project / "file").write_text("three\n")
    here.kill_daemon()
    assert here.start(step) is not None
    with here.client() as cog:
        rewind = Aside(lambda: cog.thread("chat").rewind(first, files=True))
        rewind.join()
        assert isinstance(rewind.error, Unavailable)
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        here.settled(cog)
        thread = cog.thread("chat")
        assert thread.message.leaf_id == first
        assert (here.project / "file").read_text() == "two\n"
        assert seen(thread) == {"x": "rewound"}
