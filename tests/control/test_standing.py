"""What of a thread's memory counts on a branch: against the rule, said again in the simplest words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cogfs.fsd.control.standing import BRANCH, REPLACED, REWOUND, Shift, move_leaf, reasons, settle, shift, shifted
from cogfs.store.schema import EntryKind, EntryRow, MemoryKind, MemoryRow, ThreadRow
from cogfs.store.store import Store


def memory(name: str, kind: MemoryKind, *entries: str, file: str = "", updated: int = 1) -> MemoryRow:
    return MemoryRow(name, "t", kind, file, "said", "{}", entries, 1, updated)


def test_an_item_counts_as_long_as_one_of_its_entries_is_there() -> None:
    rows = [
        memory("one", MemoryKind.ITEM, "a"),
        memory("both", MemoryKind.ITEM, "a", "b"),
        memory("cut", MemoryKind.ITEM, "b"),
        memory("cut-twice", MemoryKind.ITEM, "b", "c"),
        memory("nothing", MemoryKind.ITEM),
    ]
    assert reasons(rows, {"a": 1}) == {"one": "", "both": "", "cut": REWOUND, "cut-twice": REWOUND, "nothing": ""}
    assert set(reasons(rows, {"a": 1, "b": 2, "c": 3}).values()) == {""}


def test_summaries_and_files_belong_to_their_branch() -> None:
    rows = [
        memory("s", MemoryKind.SUMMARY, "b"),
        memory("f1", MemoryKind.FILE, "a", file="notes"),
        memory("f2", MemoryKind.FILE, "b", file="notes"),
        memory("g", MemoryKind.FILE, "a", file="other"),
    ]
    assert reasons(rows, {"a": 1, "b": 2}) == {"s": "", "f1": REPLACED, "f2": "", "g": ""}
    assert reasons(rows, {"a": 1}) == {"s": BRANCH, "f1": "", "f2": BRANCH, "g": ""}


def test_of_two_versions_at_one_entry_the_one_that_was_written_last_counts() -> None:
    rows = [memory("x", MemoryKind.FILE, "a", file="n", updated=3), memory("y", MemoryKind.FILE, "a", file="n")]
    assert reasons(rows, {"a": 1}) == {"x": "", "y": REPLACED}


kinds = st.sampled_from(MemoryKind)
entry_names = st.sampled_from("abcdef")


@st.composite
def memories(draw: st.DrawFn) -> list[MemoryRow]:
    rows = []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(kinds)
        least, most = (0, 4) if kind is MemoryKind.ITEM else (1, 1)
        on = draw(st.lists(entry_names, min_size=least, max_size=most, unique=True))
        name = draw(st.sampled_from(("n", "m"))) if kind is MemoryKind.FILE else ""
        rows.append(memory(f"m{number}", kind, *on, file=name, updated=draw(st.integers(1, 3))))
    return rows


@given(memories(), st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.sampled_from("abcdef"), unique=True))
def test_what_counts_follows_from_the_branch_alone(rows: list[MemoryRow], first: list[str], second: list[str]) -> None:
    """From branch to branch and back again all is as it was, and each move tells what it changed."""

    def counting(found: list[MemoryRow]) -> set[str]:
        return {row.id for row in found if row.stale is None}

    now = {row.id: row for row in rows}
    seen = []
    for branch in (first, second, first):
        places = {entry: place for place, entry in enumerate(branch, 1)}
        before = counting(list(now.values()))
        done, changed = shifted(now.values(), places, "leaf")
        now.update((row.id, row) for row in changed)
        after = counting(list(now.values()))
        seen.append(after)
        assert set(done.active) == after - before
        assert set(done.stale) | set(done.hidden) == before - after
        for row in now.values():
            on = [entry for entry in row.entry_ids if entry in places]
            if row.kind is MemoryKind.ITEM:
                assert (row.stale is None) == (not row.entry_ids or bool(on))
            elif row.kind is MemoryKind.SUMMARY:
                assert (row.stale is None) == bool(on)
            elif row.stale is None:
                rivals = [one for one in now.values() if one.kind is row.kind and one.name == row.name]
                assert max(places.get(one.entry_ids[0], 0) for one in rivals) == places[row.entry_ids[0]]
    assert seen[0] == seen[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as made:
        yield made


def test_a_move_of_the_leaf_and_its_memory_are_one_transaction(store: Store) -> None:
    thread = ThreadRow("t", "", "e3", 3, 1, 1)
    with store.write() as writer:
        writer.put_thread(thread)
        for number in range(1, 4):
            above = f"e{number - 1}" if number > 1 else ""
            writer.put_entry(EntryRow(f"e{number}", "t", above, EntryKind.NOTE, "", "{}", 1, number))
        writer.put_memory(memory("m", MemoryKind.ITEM, "e2", "e3"))
        writer.put_memory(memory("s", MemoryKind.SUMMARY, "e3"))
        assert settle(writer, "t", "e3", writer.memories("t")) == Shift()
    back = msgspec.structs.replace(thread, leaf_id="e1")
    with pytest.raises(ZeroDivisionError), store.write() as writer:
        move_leaf(writer, back)
        raise ZeroDivisionError
    with store.read() as reader:
        assert all(row.stale is None for row in reader.memories("t"))
        assert shift(reader, "t", "e2") == Shift(hidden=("s",))
        assert shift(reader, "t", "e1") == Shift(stale=("m",), hidden=("s",))
    with store.write() as writer:
        move_leaf(writer, back)
    with store.read() as reader:
        found = {row.id: row.stale for row in reader.memories("t")}
        assert [(one.reason, one.leaf_id) for one in found.values() if one is not None] == [
            (REWOUND, "e1"),
            (BRANCH, "e1"),
        ]
        assert shift(reader, "t", "e3") == Shift(active=("m", "s"))
    with store.write() as writer:
        move_leaf(writer, thread)
    with store.read() as reader:
        assert all(row.stale is None for row in reader.memories("t"))
