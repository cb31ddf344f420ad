"""Retention: what it deletes, and above all what it never does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cogfs.store.retention import expired, in_use, why_needed
from cogfs.store.schema import (
    JournalRow,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
    UndoRow,
    WorkspaceOptions,
    WorkspaceRow,
)

NOW = 1000
LETTERS = {"s": SnapshotState.SEALED, "f": SnapshotState.FROZEN, "x": SnapshotState.FAILED, "p": SnapshotState.SEALED}


def snapshots(letters: str, step: int = 10) -> list[SnapshotRow]:
    """One for each letter, the newest first: s SEALED, p SEALED and protected, f FROZEN, x FAILED.

    Their ids count from 0, and each is ``step`` older than the one before; the first is of now.
    """
    return [
        SnapshotRow(
            str(index), "w", None, "", "{}", LETTERS[letter], "", (), -1, (), SnapshotStats(), NOW - index * step,
            SnapshotOrigin.MANUAL, protected=letter == "p",
        )
        for index, letter in enumerate(letters)
    ]  # fmt: skip


def options(count: int = 0, age: int = 0) -> WorkspaceOptions:
    return WorkspaceOptions(retain_count=count, retain_max_age_ns=age)


@pytest.mark.parametrize(
    ("letters", "count", "keep", "gone"),
    [
        ("", 1, "", ""),
        ("sssss", 0, "", ""),
        ("sssss", -1, "", ""),
        ("sssss", 5, "", ""),
        ("sssss", 9, "", ""),
        ("sssss", 2, "", "234"),
        ("sssss", 1, "", "1234"),
        # Those that are kept count where they stand, and take the place of none that is newer.
        ("ssspss", 2, "", "245"),
        ("spssss", 2, "", "2345"),
        ("sssss", 2, "3", "24"),
        ("sssss", 1, "1234", ""),
        ("pppppps", 2, "", "6"),
        ("sssss", 2, "unknown", "234"),
        # What is not captured yet stays, and the newest that is, too.
        ("fffff", 1, "", ""),
        ("ffsss", 1, "", "34"),
        ("ffsss", 3, "", "34"),
        ("ffsss", 4, "", "4"),
        ("sfsfs", 1, "", "24"),
        # FAILED ones have nothing of their own, and still count while they remain.
        ("xxsss", 1, "", "134"),
        ("xxsss", 2, "", "34"),
        ("xxxxx", 1, "", "1234"),
        ("xxxxx", 1, "4", "123"),
    ],
)
def test_by_count(letters: str, count: int, keep: str, gone: str) -> None:
    kept = {keep} if keep == "unknown" else set(keep)
    assert expired(snapshots(letters), options(count), NOW, kept) == list(gone)


@pytest.mark.parametrize(
    ("letters", "age", "keep", "gone"),
    [
        ("sssss", 0, "", ""),
        ("sssss", -1, "", ""),
        ("sssss", 40, "", ""),
        ("sssss", 39, "", "4"),
        ("sssss", 20, "", "34"),
        ("sssss", 1, "", "1234"),
        ("sspss", 15, "", "34"),
        ("sssss", 15, "4", "23"),
        ("ffsss", 1, "", "34"),
        ("xxsss", 1, "", "134"),
        ("xfxfx", 1, "", "24"),
    ],
)
def test_by_age(letters: str, age: int, keep: str, gone: str) -> None:
    assert expired(snapshots(letters), options(age=age), NOW, set(keep)) == list(gone)


def test_the_newest_that_is_sealed_stays_however_old() -> None:
    assert expired(snapshots("xxsss"), options(1, 1), NOW + 10**18, set()) == ["0", "1", "3", "4"]


def test_either_limit_is_enough() -> None:
    rows = snapshots("ssssss")
    assert expired(rows, options(4, 15), NOW, set()) == ["2", "3", "4", "5"]
    assert expired(rows, options(2, 35), NOW, set()) == ["2", "3", "4", "5"]
    # Those that expired by age do not count: here a clock was set back in between.
    rows[1] = msgspec.structs.replace(rows[1], created_ns=0)
    assert expired(rows, options(3, 100), NOW, set()) == ["1", "4", "5"]


def test_a_snapshot_of_the_future_is_not_old() -> None:
    assert expired(snapshots("sss"), options(age=5), NOW - 100, set()) == []


rows_of_any_sort = st.lists(
    st.builds(
        SnapshotRow,
        id=st.just(""),
        workspace_id=st.just("w"),
        root=st.none(),
        label=st.just(""),
        metadata=st.just("{}"),
        state=st.sampled_from(SnapshotState),
        reason=st.just(""),
        exclude=st.just(()),
        max_file_bytes=st.just(-1),
        skipped=st.just(()),
        stats=st.just(SnapshotStats()),
        created_ns=st.integers(0, 50),
        origin=st.sampled_from(SnapshotOrigin),
        protected=st.booleans(),
    ),
    max_size=12,
).map(lambda rows: [msgspec.structs.replace(row, id=str(index)) for index, row in enumerate(rows)])
any_options = st.builds(options, st.integers(-1, 8), st.integers(-1, 60))
any_keep = st.sets(st.integers(0, 12).map(str), max_size=5)


def must_stay(rows: list[SnapshotRow], keep: set[str]) -> set[str]:
    sealed = [row.id for row in rows if row.state == SnapshotState.SEALED]
    frozen = {row.id for row in rows if row.state == SnapshotState.FROZEN}
    return frozen | set(sealed[:1]) | keep | {row.id for row in rows if row.protected}


@given(rows_of_any_sort, any_options, st.integers(0, 100), any_keep)
def test_whatever_there_is(rows: list[SnapshotRow], chosen: WorkspaceOptions, now_ns: int, keep: set[str]) -> None:
    gone = expired(rows, chosen, now_ns, keep)
    stay = must_stay(rows, keep)
    left = [row for row in rows if row.id not in gone]
    # Each once, in order, and none that must stay.
    assert gone == [row.id for row in rows if row.id in set(gone)]
    assert not stay & set(gone)
    assert chosen.retain_count > 0 or chosen.retain_max_age_ns > 0 or not gone
    # Doing it again does nothing.
    assert expired(left, chosen, now_ns, keep) == []
    # Both limits hold for all that may be deleted, and nothing goes without being beyond one.
    young = [
        row for row in rows if chosen.retain_max_age_ns <= 0 or now_ns - row.created_ns <= chosen.retain_max_age_ns
    ]
    for position, row in enumerate(left):
        if row.id not in stay:
            assert row in young
            assert chosen.retain_count <= 0 or position < chosen.retain_count
    for row in rows:
        if row.id in gone and row in young:
            assert chosen.retain_count > 0
            newer = [other for other in left if int(other.id) < int(row.id)]
            assert len(newer) >= chosen.retain_count


@given(rows_of_any_sort, st.integers(1, 8), st.integers(0, 100), any_keep)
def test_the_newest_so_many_remain(rows: list[SnapshotRow], count: int, now_ns: int, keep: set[str]) -> None:
    gone = expired(rows, options(count), now_ns, keep)
    assert not {row.id for row in rows[:count]} & set(gone)
    assert len(rows) - len(gone) >= min(count, len(rows))
    assert {row.id for row in rows[count:]} - must_stay(rows, keep) == set(gone)


def test_what_a_workspace_needs_itself() -> None:
    workspace = WorkspaceRow("w", b"/r", b"", WorkspaceOptions(), 0)
    assert in_use(workspace, None) == set()
    workspace = msgspec.structs.replace(workspace, last_snapshot_id="last", undo=UndoRow("from", "back"))
    assert in_use(workspace, None) == {"last", "from", "back"}
    journal = JournalRow("r", "w", "target", "safety", (), 0)
    assert in_use(workspace, journal) == {"last", "from", "back", "target", "safety"}
    journal = msgspec.structs.replace(journal, undo=UndoRow("target", "other"))
    assert in_use(workspace, journal) == {"last", "from", "back", "target", "safety", "other"}


@pytest.mark.parametrize(
    ("letter", "said", "passes"),
    [("s", "", False), ("x", "", False), ("f", "not captured", True), ("p", "protected", False)],
)
def test_why_a_snapshot_by_itself_is_not_deleted(letter: str, said: str, passes: bool) -> None:
    (row,) = snapshots(letter)
    why, later = why_needed(row, WorkspaceRow("w", b"/r", b"", WorkspaceOptions(), 0), None, "other")
    assert said in why and bool(said) == bool(why)
    assert later is passes


def test_why_a_workspace_does_not_let_a_snapshot_go() -> None:
    (row,) = snapshots("s")
    workspace = WorkspaceRow("w", b"/r", b"", WorkspaceOptions(), 0)
    assert why_needed(row, workspace, None, row.id) == ("is the newest of its workspace", False)
    last = msgspec.structs.replace(workspace, last_snapshot_id=row.id)
    assert why_needed(row, last, None, "") == ("is the newest of its workspace", False)
    for undo in (UndoRow(row.id, "other"), UndoRow("other", row.id)):
        why, later = why_needed(row, msgspec.structs.replace(workspace, undo=undo), None, "")
        assert "undo" in why and not later
    for journal in (JournalRow("r", "w", row.id, "o", (), 0), JournalRow("r", "w", "o", row.id, (), 0)):
        why, later = why_needed(row, workspace, journal, "")
        assert "restore" in why and later
    why, later = why_needed(row, workspace, None, "", {row.id})
    assert "restore" in why and later
    assert why_needed(row, workspace, None, "", {"other"}) == ("", False)
