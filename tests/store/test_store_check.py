"""Check finds damage, and repair brings back what is intact: bytes are damaged for real."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cogfs.store.check import AffectedPath
from cogfs.store.database import Table
from cogfs.store.errors import StoreError
from cogfs.store.records import PACK_HEADER_SIZE
from cogfs.store.schema import (
    DirectoryRow,
    Kind,
    RecordState,
    StatRow,
    Sums,
    TreeEntry,
    WorkspaceOptions,
    WorkspaceRow,
)
from cogfs.store.store import Store
from tests.store.rows import snapshot_row

PACK_LIMIT = 30_000


LINES = tuple(random.Random(f"line {index}").randbytes(20).hex() for index in range(40))


def open_store(place: Path) -> Store:
    return Store.open(place, pack_limit=PACK_LIMIT, map_size=256 * 1024)


def content(snapshot: int, index: int) -> bytes:
    source = random.Random(f"{snapshot if index % 2 else 0} {index}")
    return source.randbytes(1500) if index % 3 else b"%d" % snapshot * 700 + source.randbytes(20)


def paths(snapshot: int) -> dict[bytes, bytes]:
    files = {b"below/%d" % index: content(snapshot, index) for index in range(8)}
    return files | {b"below/versions": version(snapshot), b"top": content(snapshot, 9)}


def version(number: int) -> bytes:
    """Each is like the one before."""
    lines = list(LINES)
    for changed in range(number + 1):
        lines[changed * 7 % len(lines)] = f"changed in {changed}"
    return "\n".join(lines).encode()


def fill(store: Store, count: int) -> None:
    with store.write() as rows:
        rows.put_workspace(WorkspaceRow("w", b"/nowhere", b"", WorkspaceOptions(), 0))
    like: dict[bytes, bytes] = {}
    for number in range(count):
        files = paths(number)
        below = [
            TreeEntry(path[6:], Kind.FILE, size=len(data), hash=store.put_blob(data, like.get(path[6:], b"")))
            for path, data in sorted(files.items())
            if path.startswith(b"below/")
        ]
        top = TreeEntry(b"top", Kind.FILE, size=len(files[b"top"]), hash=store.put_blob(files[b"top"]))
        inner = store.put_tree(below, like.get(b"", b""))
        like = {entry.name: entry.hash for entry in below} | {b"": inner}
        tree = store.put_tree([TreeEntry(b"below", Kind.DIRECTORY, hash=inner), top])
        with store.write() as rows:
            rows.put_snapshot(snapshot_row(f"s{number}", tree))


def readable(store: Store) -> dict[tuple[str, bytes], bool]:
    """Of each path of each snapshot whether it can be read. What is read is right."""
    found = {}
    with store.read() as reader:
        rows = reader.snapshots("w")
    for row in rows:
        assert row.root is not None
        files = paths(int(row.id[1:]))
        try:
            entries = {entry.name: entry for entry in store.read_tree(row.root.hash).entries}
        except StoreError:
            found[row.id, b""] = False
            continue
        try:
            below = {b"below/" + one.name: one for one in store.read_tree(entries[b"below"].hash).entries}
        except StoreError:
            found[row.id, b"below"] = False
            below = {}
        for path, entry in {b"top": entries[b"top"], **below}.items():
            try:
                assert b"".join(store.read_file(entry.hash)) == files[path]
                found[row.id, path] = True
            except StoreError:
                found[row.id, path] = False
    return found


def broken(store: Store) -> set[AffectedPath]:
    return {AffectedPath(snapshot, "w", path) for (snapshot, path), whole in readable(store).items() if not whole}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filled") / "store"
    with open_store(place) as store:
        fill(store, 6)
    return place


def test_a_whole_store(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    with open_store(place) as store:
        for data in (False, True):
            found = store.check(data=data)
            assert (found.problems, found.affected, found.unneeded) == ([], [], 0)
            assert found.snapshots == 6
            assert found.objects == store.stats().objects
            assert (found.bytes_read > 0) == data
        assert store.repair().lost == 0
        assert store.check(data=True).problems == []


def _flip(chance: random.Random, path: Path) -> None:
    with path.open("r+b") as file:
        offset = chance.randrange(path.stat().st_size)
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def _truncate(chance: random.Random, path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))


def _zero(chance: random.Random, path: Path) -> None:
    offset = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(min(chance.randrange(1, 5000), path.stat().st_size - offset)))


def _remove(chance: random.Random, path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_flip, _truncate, _zero, _remove])
def test_every_damage_of_a_pack_is_found_and_repaired(
    filled: Path, tmp_path: Path, damage: Callable[[random.Random, Path], None]
) -> None:
    for seed in range(3 if damage is _remove else 40):
        chance = random.Random(seed)
        place = tmp_path / "store"
        shutil.copytree(filled, place)
        files = sorted((place / "packs").iterdir())
        if damage is _remove and seed == len(files):
            break
        damage(chance, files[seed] if damage is _remove else chance.choice(files))
        with open_store(place) as store:
            found = store.check(data=True)
            assert found.problems, f"seed {seed}"
            before = broken(store)
            assert before == set(found.affected)
            done = store.repair()
            # Nothing more is lost than what was damaged, and all of it is named.
            assert broken(store) == before == set(done.affected)
            assert (done.lost > 0) == bool(before)
            again = store.check(data=True)
            assert {one.check for one in again.problems} <= {"reach"}
            assert (again.problems == []) == (not before)
            # Collections go on, and what comes again is whole again.
            assert store.collect(grace=0, thorough=True).deferred == ""
            assert broken(store) == before
            with store.operation():
                fill(store, 6)
            assert broken(store) == set()
            assert store.collect(grace=0, thorough=True).deferred == ""
        with open_store(place) as store:
            assert store.check(data=True).problems == []
            assert broken(store) == set()
        shutil.rmtree(place)


def test_a_quick_check_finds_what_the_index_says_wrong(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    with open_store(place) as store:
        (first, one), (second, other) = store._objects.located(b"", 2)
        store._edit(lambda change: store._objects.place(first, one._replace(offset=one.offset + 1), change))
        assert [problem.name for problem in store.check().problems] == [first]
        store._edit(lambda change: change.put(Table.OBJECTS, second, b"nonsense"))
        assert {problem.name for problem in store.check().problems} >= {first, second}
        done = store.repair()
        assert (done.found, done.lost) == (2, 0)
        assert store.check(data=True).problems == []
        # Without a row: only what needs it tells of it.
        store._edit(lambda change: store._objects.place(first, None, change))
        assert {problem.check for problem in store.check().problems} == {"reach"}
        assert store.collect(grace=0).deferred
        assert store.repair().found == 1
        assert store._objects.indexed(second) == other
        assert store.check(data=True).problems == []


def test_rows_that_cannot_be_read(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    with open_store(place) as store:
        with store.write() as rows:
            rows.put_record_state("w", RecordState(None, 2, (), -1, worker_started_ns=7))
        store._edit(lambda change: change.put(Table.SNAPSHOTS, b"s2", b"\xc1"))
        store._edit(lambda change: change.put(Table.DIRECTORIES, b"w\0" + bytes(8), b"\xc1"))
        assert {one.check for one in store.check().problems} == {"rows"}
        assert store.collect(grace=0).deferred
        done = store.repair()
        assert done.rows_dropped == 2
        assert any("s2" in text for text in done.dropped)
        assert store.check(data=True).problems == []
        with store.read() as reader:
            assert [row.id for row in reader.snapshots("w")] == ["s5", "s4", "s3", "s1", "s0"]
            state = reader.record_state("w")
        assert state is not None
        assert state.worker_started_ns == 0
        assert store.collect(grace=0).deferred == ""


def test_what_is_recorded_brings_trees_back_and_files_are_taken_again(store: Store) -> None:
    data = b"content of the file" * 50
    entry = TreeEntry(b"file", Kind.FILE, size=len(data), hash=store.put_blob(data))
    tree = store.put_tree([entry])
    row = StatRow(entry, 5, len(data), 0, 0, 0o100644, 1)
    with store.write() as rows:
        rows.put_workspace(WorkspaceRow("w", b"/nowhere", b"", WorkspaceOptions(), 0))
        rows.put_snapshot(snapshot_row("s", tree))
        rows.put_directory("w", 2, DirectoryRow(tree, (row,), 0, 2, b"", Sums()))
        rows.put_record_state("w", RecordState(TreeEntry(b"", Kind.DIRECTORY, hash=tree), 2, (), -1, 7))
    path = next((store.path / "packs").iterdir())

    def damage() -> None:
        with path.open("r+b") as file:
            file.seek(PACK_HEADER_SIZE)
            file.write(bytes(path.stat().st_size - PACK_HEADER_SIZE))

    damage()
    taken: list[AffectedPath] = []

    def retake(affected: list[AffectedPath]) -> None:
        taken.extend(affected)
        store.put_blob(data)

    done = store.repair(retake=retake)
    assert taken == [AffectedPath("s", "w", b"file")]
    assert (done.remade, done.lost, done.affected) == (2, 0, [])
    assert store.check(data=True).problems == []
    assert store.read_blob(entry.hash) == data
    # Nobody has the content: what is recorded of it goes, so that the next checkpoint reads the files.
    path = max((store.path / "packs").iterdir())
    damage()
    done = store.repair()
    assert (done.remade, done.lost) == (1, 1)
    assert AffectedPath("s", "w", b"file") in done.affected
    with store.read() as reader:
        assert reader.directory("w", 2) is None
        state = reader.record_state("w")
    assert state is not None
    assert state.worker_started_ns == 0
