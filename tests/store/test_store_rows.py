"""Rows: what is written together is seen together, in the order that the interface promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import msgspec
import pytest

from cogfs.store.database import Table
from cogfs.store.errors import Corrupt, Exists, NotFound
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader
from cogfs.store.schema import (
    BoundaryRow,
    CommandRow,
    DirectoryRow,
    EntryKind,
    EntryOrigin,
    EntryRow,
    FileCheckpointRow,
    ForkLinkRow,
    ForkRow,
    JournalRow,
    Kind,
    MemoryKind,
    MemoryRow,
    NewPlaceRow,
    OpaqueReason,
    PolicyRow,
    ProcessRow,
    RecordState,
    RecoveryRow,
    RunKind,
    RunRow,
    RunState,
    RunStrategy,
    Skipped,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
    StaleRow,
    StatRow,
    Sums,
    ThreadRow,
    ToolCallRow,
    TreeEntry,
    UndoRow,
    WorkspaceOptions,
    WorkspaceRow,
)
from cogfs.store.store import Store

UNDO = UndoRow("snap_a", "snap_b", "thread", "e1", "e2", False, (b"a\xff", b"b"))


def workspace(name: str) -> WorkspaceRow:
    return WorkspaceRow(
        name,
        b"/root/\xff",
        b"",
        WorkspaceOptions(("*.o", "build/"), -1, 7, 2**61, True),
        123,
        "snap_x",
        "",
        True,
        RecoveryRow("forward", "snap_a", "snap_b", 5),
        UNDO,
        8,
    )


def snapshot(name: str, workspace_id: str) -> SnapshotRow:
    return SnapshotRow(
        name,
        workspace_id,
        TreeEntry(b"", Kind.DIRECTORY, 0o755, hash=bytes(32)),
        "label",
        "{}",
        SnapshotState.SEALED,
        "",
        ("*.o",),
        10,
        (Skipped(b"big\xff", OpaqueReason.TOO_LARGE.value),),
        SnapshotStats(1, 2, 3, 4, 5, 6, 7, 8),
        99,
        SnapshotOrigin.MESSAGE,
        "snap_parent",
        (Skipped(b"gone\xff", "changed"),),
        True,
    )


def boundary(workspace_id: str, generation: int, changes: bytes = b"\x90") -> BoundaryRow:
    return BoundaryRow(f"snap_{generation}", workspace_id, generation, 2**61, 2**61 + 1, "boot", True, changes, 12)


def thread(name: str, updated: int = 0) -> ThreadRow:
    return ThreadRow(name, "ws", "", 0, 1, updated)


def entry(thread_id: str, name: str, parent: str, sequence: int) -> EntryRow:
    return EntryRow(name, thread_id, parent, EntryKind.USER, "say ünïcode", '{"a":1}', 7, sequence)


def journal(workspace_id: str) -> JournalRow:
    return JournalRow("r1", workspace_id, "snap_a", "snap_b", (b"p\xff",), 3, thread("t"), UNDO)


STAT = StatRow(TreeEntry(b"f", Kind.FILE, 0o644, 3, bytes(32)), 12, 3, 2**61, 2**61 + 1, 0o100644, 1)
DIRECTORY = DirectoryRow(bytes(range(32)), (STAT,), 17, 1, b"d\xff", Sums(1, 3, 0, 0, 2))
STATE = RecordState(TreeEntry(b"", Kind.DIRECTORY, 0o755, hash=bytes(32)), 2, ("*.o",), 10, 4, "boot", 2**61)


def test_all_rows_come_back_after_a_restart(place: Path) -> None:
    checkpoint = EntryRow(
        "e", "t", "", EntryKind.TOOL, "", "{}", 1, 0, FileCheckpointRow("snap_a", "ws", b"/root"), True
    )
    with Store.open(place) as store, store.write() as rows:
        rows.put_workspace(workspace("ws"))
        rows.put_snapshot(snapshot("snap_a", "ws"))
        rows.put_thread(thread("t"))
        rows.put_entry(checkpoint)
        rows.put_journal(journal("ws"))
        rows.put_record_state("ws", STATE)
        rows.put_directory("ws", 2**63, DIRECTORY)
        rows.put_link("ws", 5, 9, (2**64 - 1, 2))
        rows.put_boundary(boundary("ws", 3))
    with Store.open(place) as store, store.read() as reader:
        assert reader.workspace("ws") == workspace("ws")
        assert reader.workspaces() == [workspace("ws")]
        assert reader.snapshot("snap_a") == snapshot("snap_a", "ws")
        assert reader.thread("t") == thread("t")
        assert reader.entry("t", "e") == checkpoint
        assert reader.journal("ws") == journal("ws")
        assert reader.journals() == [journal("ws")]
        assert reader.record_state("ws") == STATE
        assert reader.directory("ws", 2**63) == DIRECTORY
        assert reader.link("ws", 5) == (9, (2**64 - 1, 2))
        assert reader.boundaries("ws") == [reader.boundary("ws", 3)] == [boundary("ws", 3)]


def test_rows_of_an_older_build_are_read(place: Path) -> None:
    """It has no table of boundaries, and its rows lack what was added since."""
    with Store.open(place) as store, store.write() as rows:
        rows.put_workspace(workspace("ws"))
        rows.put_snapshot(snapshot("snap_a", "ws"))
        rows.put_record_state("ws", STATE)
    with lmdb.open(str(place / "index"), max_dbs=20) as environment:
        tables = {name: environment.open_db(name) for name in (b"workspaces", b"snapshots", b"record_states")}
        boundaries = environment.open_db(b"boundaries")
        with environment.begin(write=True) as transaction:
            transaction.drop(boundaries)
            for (name, key, length), options in {
                (b"workspaces", b"ws", 10): 2,
                (b"snapshots", b"snap_a", 14): None,
                (b"record_states", b"ws", 5): None,
            }.items():
                value = transaction.get(key, db=tables[name])
                assert value is not None
                row = msgspec.msgpack.decode(value)[:length]
                if options is not None:
                    row[3] = row[3][:options]
                transaction.put(key, msgspec.msgpack.encode(row), db=tables[name])
    with Store.open(place) as store:
        with store.read() as reader:
            old = msgspec.structs.replace(
                workspace("ws"), options=WorkspaceOptions(("*.o", "build/"), -1), next_generation=1
            )
            assert reader.workspace("ws") == old
            assert (old.options.retain_count, old.options.retain_max_age_ns, old.options.refuse_hard_links) == (
                0,
                0,
                False,
            )
            assert reader.snapshot("snap_a") == msgspec.structs.replace(
                snapshot("snap_a", "ws"), failed=(), protected=False
            )
            assert reader.record_state("ws") == msgspec.structs.replace(STATE, boot_id="", synced_ns=0)
            assert reader.unsealed_workspaces() == []
            assert reader.boundaries("ws") == []
        with store.write() as rows:
            rows.put_boundary(boundary("ws", 1))
    with Store.open(place) as store, store.read() as reader:
        assert reader.boundaries("ws") == [boundary("ws", 1)]


def test_boundaries_are_in_the_order_of_their_generations(store: Store) -> None:
    large = bytes(range(256)) * 20_000
    with store.write() as rows:
        for generation in (256, 2**64 - 1, 1, 255):
            rows.put_boundary(boundary("w", generation))
        rows.put_boundary(boundary("w", 255, large))
        for name in ("w2", "v", "ü", "w" * 128):
            rows.put_boundary(boundary(name, 5))
            rows.put_boundary(boundary(name, 2**63))
        assert rows.unsealed_workspaces() == ["v", "w", "w2", "w" * 128, "ü"]
        assert rows.generations("w") == [1, 255, 256, 2**64 - 1]
    with store.read() as reader:
        assert [row.generation for row in reader.boundaries("w")] == [1, 255, 256, 2**64 - 1]
        assert reader.generations("w") == [1, 255, 256, 2**64 - 1]
        assert reader.boundary("w", 255) == boundary("w", 255, large)
        assert reader.boundary("w", 2) is None
        assert reader.unsealed_workspaces() == ["v", "w", "w2", "w" * 128, "ü"]
    with store.write() as rows:
        rows.delete_boundary("w", 255)
        rows.delete_boundary("w", 255)
        rows.delete_boundary("absent", 1)
        for generation in (5, 2**63):
            rows.delete_boundary("v", generation)
        rows.delete_workspace("ü")
        assert rows.unsealed_workspaces() == ["w", "w2", "w" * 128]
    with store.read() as reader:
        assert [row.generation for row in reader.boundaries("w")] == [1, 256, 2**64 - 1]
        assert reader.unsealed_workspaces() == ["w", "w2", "w" * 128]
        assert [row.generation for row in reader.boundaries("w2")] == [5, 2**63]


def test_a_boundary_under_a_damaged_key_is_reported(store: Store) -> None:
    for key in (b"no end", b"\xff\0" + bytes(8)):
        with store.write() as rows:
            rows._change.put(Table.BOUNDARIES, key, b"")
        with store.read() as reader, pytest.raises(Corrupt, match="boundary"):
            reader.unsealed_workspaces()
        with store.write() as rows:
            rows._change.delete(Table.BOUNDARIES, key)
    with store.write() as rows:
        rows._change.put(Table.BOUNDARIES, b"w\0short", b"")
    with store.read() as reader, pytest.raises(Corrupt, match="generation"):
        reader.generations("w")


ABSENT = ["", "absent", "x" * 200, "nul\0", "\udcff", "é" * 64, "é" * 65]


@pytest.mark.parametrize("name", ABSENT)
def test_absent_rows(store: Store, name: str) -> None:
    with store.write() as rows:
        rows.put_thread(thread("t"))
    with store.read() as reader:
        for call in (reader.workspace, reader.snapshot, reader.thread):
            with pytest.raises(NotFound):
                call(name)
        with pytest.raises(NotFound):
            reader.entry("t", name)
        with pytest.raises(NotFound):
            reader.entry(name, "e")
        assert not reader.has_entry(name, "e")
        assert list(reader.entries(name)) == []
        assert reader.children(name, "") == []
        assert reader.children("t", name or "e") == []
        assert reader.snapshots(name) == []
        assert reader.snapshots("ws", before=name) == []
        assert reader.snapshot_count(name) == 0
        assert reader.journal(name) is None
        assert reader.record_state(name) is None
        assert reader.directory(name, 1) is None
        assert reader.link(name, 1) is None
        assert reader.boundaries(name) == []
        assert reader.boundary(name, 1) is None
        assert reader.generations(name) == []
        assert reader.branch("t", "") == []


@pytest.mark.parametrize("name", ["", "x" * 129, "nul\0", "\udcff"])
def test_impossible_ids_are_not_written(store: Store, name: str) -> None:
    with store.write() as rows:
        calls: list[Callable[[], None]] = [
            lambda: rows.put_workspace(workspace(name)),
            lambda: rows.put_snapshot(snapshot(name, "ws")),
            lambda: rows.put_snapshot(snapshot("snap", name)),
            lambda: rows.put_thread(thread(name)),
            lambda: rows.put_entry(entry(name, "e", "", 0)),
            lambda: rows.put_entry(entry("t", name, "", 0)),
            lambda: rows.put_journal(journal(name)),
            lambda: rows.put_record_state(name, STATE),
            lambda: rows.put_directory(name, 1, DIRECTORY),
            lambda: rows.put_link(name, 1, 1, ()),
            lambda: rows.put_boundary(boundary(name, 1)),
            lambda: rows.put_boundary(msgspec.structs.replace(boundary("w", 1), snapshot_id=name)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="id"):
                call()
    with store.read() as reader:
        assert not reader.workspaces()
        assert not reader.threads()
        assert not reader.journals()
        assert not reader.unsealed_workspaces()


def test_the_longest_ids(store: Store) -> None:
    long = "é" * 64
    with store.write() as rows:
        rows.put_snapshot(snapshot(long, long))
        rows.put_thread(thread(long))
        rows.put_entry(entry(long, long, "", 0))
        rows.put_entry(entry(long, "child", long, 1))
    with store.read() as reader:
        assert [row.id for row in reader.children(long, long)] == ["child"]
        assert [row.id for row in reader.branch(long, "child")] == [long, "child"]
        assert [row.id for row in reader.snapshots(long)] == [long]


def test_snapshots_are_listed_newest_first_and_by_page(store: Store) -> None:
    names = [new_id("snap") for _ in range(7)]
    with store.write() as rows:
        for index, name in enumerate(names):
            rows.put_snapshot(snapshot(name, "a"))
            rows.put_snapshot(snapshot(f"other{index}", "ab"))
        rows.put_snapshot(snapshot(names[2], "a"))
    newest = names[::-1]
    with store.read() as reader:
        assert [row.id for row in reader.snapshots("a")] == newest
        assert [row.id for row in reader.snapshots("a", limit=3)] == newest[:3]
        assert [row.id for row in reader.snapshots("a", before=newest[2], limit=3)] == newest[3:6]
        assert [row.id for row in reader.snapshots("a", before=newest[-1])] == []
        assert reader.snapshots("a", limit=0) == []
        assert reader.snapshot_count("a") == reader.snapshot_count("ab") == 7
    with store.write() as rows:
        rows.delete_snapshot(names[3])
        with pytest.raises(NotFound):
            rows.delete_snapshot(names[3])
    with store.read() as reader:
        assert reader.snapshot_count("a") == 6
        assert names[3] not in [row.id for row in reader.snapshots("a")]


def test_threads_are_listed_by_id(store: Store) -> None:
    with store.write() as rows:
        for name, updated in [("b", 30), ("a", 10), ("c", 20)]:
            rows.put_thread(thread(name, updated))
    with store.read() as reader:
        assert [row.id for row in reader.threads()] == ["c", "b", "a"]


def test_entries_make_a_tree(store: Store) -> None:
    with store.write() as rows:
        for name, parent, sequence in [("z", "", 0), ("b", "z", 1), ("a", "z", 2), ("y", "a", 300)]:
            rows.put_entry(entry("t", name, parent, sequence))
        rows.put_entry(entry("tt", "z", "", 0))
        with pytest.raises(Exists):
            rows.put_entry(entry("t", "b", "", 9))
        with pytest.raises(ValueError, match="number 2"):
            rows.put_entry(entry("t", "new", "", 2))
        assert [row.id for row in rows.entries("t")] == ["z", "b", "a", "y"]
    with store.read() as reader:
        assert [row.id for row in reader.entries("t")] == ["z", "b", "a", "y"]
        assert [row.id for row in reader.children("t", "")] == ["z"]
        assert [row.id for row in reader.children("t", "z")] == ["b", "a"]
        assert [row.id for row in reader.branch("t", "y")] == ["z", "a", "y"]
        assert reader.has_entry("t", "b")
        with pytest.raises(NotFound):
            reader.branch("t", "new")


def test_a_deleted_workspace_leaves_nothing_and_takes_nothing_else(store: Store) -> None:
    with store.write() as rows:
        for name in ("w", "w2"):
            rows.put_workspace(workspace(name))
            rows.put_snapshot(snapshot("snap_" + name, name))
            rows.put_journal(journal(name))
            rows.put_record_state(name, STATE)
            rows.put_directory(name, 1, DIRECTORY)
            rows.put_directory(name, 2, DIRECTORY)
            rows.put_link(name, 3, 3, ())
            rows.put_boundary(boundary(name, 4))
        rows.put_thread(thread("t"))
    with store.write() as rows:
        rows.delete_workspace("w")
        rows.delete_workspace("never")

    def found(reader: Reader, name: str) -> list[object]:
        return [
            reader.snapshots(name),
            reader.snapshot_count(name) or None,
            reader.journal(name),
            reader.record_state(name),
            reader.directory(name, 1),
            reader.directory(name, 2),
            reader.link(name, 3),
            reader.boundaries(name),
        ]

    with store.read() as reader:
        assert not any(found(reader, "w"))
        assert all(found(reader, "w2"))
        assert [row.id for row in reader.workspaces()] == ["w2"]
        with pytest.raises(NotFound):
            reader.snapshot("snap_w")
        assert reader.thread("t")


def test_recorded_directories_are_removed_and_cleared(store: Store) -> None:
    with store.write() as rows:
        for inode in (1, 256, 2**64 - 1):
            rows.put_directory("w", inode, DIRECTORY)
        rows.put_link("w", 1, 1, ())
        rows.put_link("w", 2, 1, ())
        rows.put_record_state("w", STATE)
        rows.put_directory("w2", 1, DIRECTORY)
    with store.write() as rows:
        rows.delete_directory("w", 256)
        rows.delete_directory("w", 4)
        rows.delete_link("w", 2)
        assert rows.directory("w", 256) is None
        assert rows.directory("w", 2**64 - 1) == DIRECTORY
        assert rows.link("w", 2) is None
        assert rows.link("w", 1) == (1, ())
    with store.write() as rows:
        rows.delete_directory("w", 1)
        rows.delete_journal("w")
    with store.read() as reader:
        assert reader.directory("w", 1) is None
        assert reader.journal("w") is None
        assert reader.record_state("w") == STATE
        assert reader.directory("w2", 1) == DIRECTORY


def test_an_exception_takes_all_rows_back_and_no_objects(store: Store) -> None:
    def fail() -> None:
        with store.write() as rows:
            rows.put_thread(thread("t"))
            assert rows.thread("t")
            store.put_blob(b"kept")
            raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        fail()
    with store.read() as reader:
        assert reader.threads() == []
    assert store.read_blob(store.put_blob(b"kept")) == b"kept"


def test_a_write_names_the_objects_put_until_its_end(place: Path) -> None:
    with Store.open(place) as store:
        before = store.put_blob(b"before")
        with store.write() as rows:
            inside = store.put_tree([TreeEntry(b"f", Kind.FILE, 0o644, 6, before)])
            rows.put_thread(thread("t"))
    with Store.open(place) as store:
        assert store.read_tree(inside).entries[0].hash == before
        assert store.read_blob(before) == b"before"


def test_a_reader_sees_one_state_and_a_read_within_a_write_sees_that(store: Store) -> None:
    with store.write() as rows:
        rows.put_thread(thread("a"))
    written = threading.Event()

    def write() -> None:
        with store.write() as rows:
            rows.put_thread(thread("b"))
            with store.read() as inner:
                assert [row.id for row in inner.threads()] == ["b", "a"]
        written.set()

    with store.read() as reader:
        assert len(reader.threads()) == 1
        other = threading.Thread(target=write)
        other.start()
        assert written.wait(180)
        other.join()
        assert len(reader.threads()) == 1
    with store.read() as reader:
        assert len(reader.threads()) == 2


def test_what_would_deadlock_is_refused(store: Store) -> None:
    with store.write(), pytest.raises(RuntimeError, match="writing"), store.write():
        pass
    with store.write(), pytest.raises(RuntimeError, match="writing"):
        store.sync()
    with store.read(), pytest.raises(RuntimeError, match="reads"), store.write():
        pass
    with store.read(), pytest.raises(RuntimeError, match="reads"):
        store.close()
    with store.read(), store.read():
        assert store.read_blob(store.put_blob(b"allowed")) == b"allowed"


def test_ids_ascend_and_have_their_form() -> None:
    found: list[list[str]] = []

    def make() -> None:
        found.append([new_id("snap") for _ in range(5000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for worker in threads:
        worker.start()
    for worker in threads:
        worker.join()
    assert all(made == sorted(made) for made in found)
    together = {name for made in found for name in made}
    assert len(together) == 20_000
    assert all(len(name) == 31 and name.startswith("snap_") for name in together)
    assert not set("".join(together).replace("snap_", "")) - set("0123456789abcdefghjkmnpqrstvwxyz")


def test_policies_of_the_runtime_and_of_agents(place: Path) -> None:
    said = PolicyRow(False, ("dist/**",), -1, True)
    with Store.open(place) as store:
        with store.write() as rows:
            assert rows.policy() is None
            rows.put_policy(PolicyRow())
            rows.put_policy(said, "runtime")
            rows.put_policy(said, "编码")
            rows.put_thread(msgspec.structs.replace(thread("t"), agent="编码", checkpoints=said))
            rows.delete_policy("nobody")
            rows.delete_policy("\0")
            with pytest.raises(ValueError, match="cannot be an id"):
                rows.put_policy(said, "x" * 129)
        with store.write() as rows:
            rows.delete_policy("runtime")
    with Store.open(place) as store, store.read() as reader:
        assert reader.policy() == PolicyRow()
        assert reader.policy("runtime") is None
        assert reader.policy("编码") == said
        assert reader.policy("x" * 129) is None
        assert reader.thread("t").checkpoints == said


def test_whether_a_snapshot_is_there(place: Path) -> None:
    with Store.open(place) as store, store.write() as rows:
        rows.put_snapshot(snapshot("snap_a", "ws"))
        assert rows.has_snapshot("snap_a")
        assert not rows.has_snapshot("snap_b")
        assert not rows.has_snapshot("")
        rows.delete_snapshot("snap_a")
        assert not rows.has_snapshot("snap_a")


def run(name: str) -> RunRow:
    return RunRow(
        name,
        "thread",
        "ws",
        "编码",
        RunKind.DURABLE,
        "me",
        RunStrategy.REJECT,
        RunState.LAPSED,
        5,
        30,
        7,
        "parent",
        "call",
        PolicyRow(False),
        True,
        "because",
        9,
    )


def test_runs_with_their_tool_calls_and_commands(place: Path) -> None:
    calls = [ToolCallRow("c1", "r1", "shell", 1), ToolCallRow("c2", "r1", "", 2), ToolCallRow("c1", "r11", "x", 3)]
    command = CommandRow("cmd", "ws", "thread", "r1", (ProcessRow(7, 8),), "make", 9, "boot", "/sys/fs/cgroup/x")
    with Store.open(place) as store, store.write() as rows:
        for name in ("r1", "r11"):
            rows.put_run(run(name))
        for call in calls:
            rows.put_tool_call(call)
        rows.put_command(command)
        with pytest.raises(ValueError, match="cannot be an id"):
            rows.put_run(run(""))
        with pytest.raises(ValueError, match="cannot be an id"):
            rows.put_tool_call(ToolCallRow("x" * 129, "r1", "", 0))
        # What is not there may be deleted.
        rows.delete_run("r2")
        rows.delete_tool_call("r1", "c9")
        rows.delete_command("none")
    with Store.open(place) as store, store.write() as rows:
        assert rows.runs() == [run("r1"), run("r11")]
        assert rows.run("r1") == run("r1")
        assert rows.has_run("r1") and not rows.has_run("r2") and not rows.has_run("")
        assert rows.tool_calls("r1") == calls[:2]
        assert rows.tool_calls() == calls
        assert rows.tool_call("r1", "c2") == calls[1]
        assert rows.tool_call("r1", "c9") is None and rows.tool_call("r1", "") is None
        assert (rows.commands(), rows.command("cmd")) == ([command], command)
        for missing in ("r2", "", "\0", "x" * 200):
            with pytest.raises(NotFound):
                rows.run(missing)
            with pytest.raises(NotFound):
                rows.command(missing)
        rows.delete_tool_call("r1", "c1")
        assert rows.tool_calls("r1") == calls[1:2]
        rows.delete_run("r1")
        rows.delete_command("cmd")
        assert rows.runs() == [run("r11")]
        assert rows.tool_calls() == calls[2:]
        assert rows.commands() == []


def memory(name: str, thread_id: str, *entries: str) -> MemoryRow:
    stale = StaleRow("rewound", "e1", 9) if entries else None
    return MemoryRow(name, thread_id, MemoryKind.ITEM, "", "say ünïcode", '{"a":1}', entries, 5, 6, stale)


def test_memories_of_a_thread(place: Path) -> None:
    with Store.open(place) as store, store.write() as rows:
        for name in ("b", "a", "a.b", "c"):
            rows.put_memory(memory(name, "t", "e1", "e2"))
        rows.put_memory(memory("other", "t2"))
        rows.put_memory(memory("b", "t"))
        with pytest.raises(ValueError, match="cannot be an id"):
            rows.put_memory(memory("", "t"))
        with pytest.raises(ValueError, match="cannot be an id"):
            rows.put_memory(memory("m", "\0"))
    with Store.open(place) as store, store.read() as reader:
        assert reader.memory("t", "a") == memory("a", "t", "e1", "e2")
        assert reader.memory("t", "b") == memory("b", "t")
        assert reader.memory("t", "other") is reader.memory("t", "x" * 129) is reader.memory("", "a") is None
        assert [row.id for row in reader.memories("t")] == ["a", "a.b", "b", "c"]
        assert [row.id for row in reader.memories("t", after="a")] == ["a.b", "b", "c"]
        assert [row.id for row in reader.memories("t", after="a.b")] == ["b", "c"]
        assert list(reader.memories("t", after="z")) == list(reader.memories("nobody")) == []


def test_a_thread_goes_with_all_that_is_its_own(place: Path) -> None:
    fork = msgspec.structs.replace(thread("fork"), forked_from=EntryOrigin("t", "e1"))
    with Store.open(place) as store, store.write() as rows:
        for one in (thread("t"), thread("t2"), fork):
            rows.put_thread(one)
            rows.put_memory(memory("m", one.id))
            for number in (1, 2):
                rows.put_entry(entry(one.id, f"e{number}", "e1" if number == 2 else "", number))
        rows.put_fork_link("t", ForkLinkRow("fork", "e1", 3))
        rows.put_fork_link("t", ForkLinkRow("again", "e2", 4))
        assert [row.thread_id for row in rows.fork_links("t")] == ["again", "fork"]
        rows.delete_thread("fork")
        assert [row.thread_id for row in rows.fork_links("t")] == ["again"]
        rows.delete_thread("t")
        with pytest.raises(NotFound):
            rows.delete_thread("t")
    with Store.open(place) as store, store.read() as reader:
        assert [row.id for row in reader.threads()] == ["t2"]
        assert not reader.has_thread("t") and reader.has_thread("t2") and not reader.has_thread("\0")
        for name in ("t", "fork"):
            assert not [*reader.entries(name), *reader.memories(name), *reader.fork_links(name)]
            assert reader.children(name, "") == reader.children(name, "e1") == []
            assert not reader.has_entry(name, "e1")
        assert [row.id for row in reader.branch("t2", "e2")] == ["e1", "e2"]
        assert len(list(reader.memories("t2"))) == 1


def test_entries_by_their_numbers(store: Store) -> None:
    with store.write() as rows:
        for name in ("t", "t2"):
            for number in range(1, 6):
                rows.put_entry(entry(name, f"e{number}", "", number))
    with store.read() as reader:
        assert [row.sequence for row in reader.entries("t", after=2)] == [3, 4, 5]
        assert [row.sequence for row in reader.entries_back("t")] == [5, 4, 3, 2, 1]
        assert [row.sequence for row in reader.entries_back("t", before=3)] == [2, 1]
        assert list(reader.entries("t", after=5)) == list(reader.entries_back("t", before=1)) == []
        assert reader.numbered_entry("t", 4).id == "e4"


def test_what_forks_are_made_of_comes_back(place: Path) -> None:
    made = msgspec.structs.replace(workspace("ws"), new_place=NewPlaceRow("fork", True))
    copy = msgspec.structs.replace(snapshot("snap_b", "ws"), copied_from="snap_a")
    begun = msgspec.structs.replace(journal("ws"), fork=ForkRow("fork", ("snap_b",)))
    copied = msgspec.structs.replace(
        entry("t", "e", "", 1),
        file_checkpoint_at=FileCheckpointRow("snap_b", "ws", b"/r"),
        copied_from=EntryOrigin("t0", "e"),
    )
    with Store.open(place) as store, store.write() as rows:
        rows.put_workspace(made)
        rows.put_snapshot(copy)
        rows.put_journal(begun)
        rows.put_entry(copied)
    with Store.open(place) as store, store.read() as reader:
        assert reader.workspace("ws") == made
        assert reader.snapshot("snap_b") == copy
        assert reader.journal("ws") == begun
        assert reader.entry("t", "e") == copied
