"""Objects that are stored against others: when they are, what they need, and what becomes of them when that is gone."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cogfs.store import chains, codec, steps
from cogfs.store.check import AffectedPath
from cogfs.store.chunking import CHUNK_THRESHOLD
from cogfs.store.codec import Codec
from cogfs.store.database import Table
from cogfs.store.errors import Corrupt, NotFound
from cogfs.store.location import Location
from cogfs.store.records import RECORD_HEADER_SIZE
from cogfs.store.schema import Kind, TreeEntry, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from tests.store.rows import snapshot_row
from tests.store.versions import noise, version


def put_versions(store: Store, count: int, seed: int = 0) -> list[bytes]:
    names = [store.put_blob(version(0, seed))]
    for number in range(1, count):
        names.append(store.put_blob(version(number, seed), names[-1]))
    return names


def where(store: Store, name: bytes) -> Location:
    return store._objects.locate(name)


def depth(store: Store, name: bytes) -> int:
    return chains.follow(store._objects.find, name, where(store, name)).depth


def damage(store: Store, name: bytes) -> None:
    """Spoils the payload of an object."""
    at = where(store, name)
    with (store.path / "packs" / f"{at.pack:08x}.pack").open("r+b") as file:
        file.seek(at.offset + RECORD_HEADER_SIZE)
        file.write(b"\xaa" * at.stored)


def snapshot(store: Store, name: str, *blobs: bytes) -> bytes:
    entries = [TreeEntry(b"%02d" % index, Kind.FILE, size=1, hash=blob) for index, blob in enumerate(blobs)]
    tree = store.put_tree(entries)
    with store.write() as rows:
        rows.put_workspace(WorkspaceRow("w", b"/nowhere", b"", WorkspaceOptions(), 0))
        rows.put_snapshot(snapshot_row(name, tree))
    return tree


def delete(store: Store, name: str) -> None:
    with store.write() as rows:
        rows.delete_snapshot(name)


# --- when


def test_versions_of_a_file_take_little_and_come_back(place: Path) -> None:
    with Store.open(place) as store:
        names = put_versions(store, 30)
        store.sync()
    with Store.open(place) as store:
        for number, name in enumerate(names):
            assert store.read_blob(name) == version(number)
            assert depth(store, name) <= chains.MAX_DEPTH
        assert max(depth(store, name) for name in names) == chains.MAX_DEPTH
        assert [where(store, name).is_delta for name in names] == [False] + [True] * 29
        assert sum(where(store, name).stored for name in names[1:9]) < 1000
        assert store.stats().pack_bytes < 3 * len(version(0))
        assert store.check(data=True).problems == []
        # One that is there is not stored again, whatever it is put against.
        before = store.stats()
        assert store.put_blob(version(3), names[20]) == names[3]
        assert store.stats() == before


def test_at_the_bound_the_end_of_the_chain_is_the_base(store: Store) -> None:
    names = put_versions(store, 20)
    assert [depth(store, name) for name in names] == [*range(9), *range(1, 9), *range(1, 4)]
    assert where(store, names[9]).base == where(store, names[17]).base == names[0]


def test_directories_and_lists_of_pieces(store: Store) -> None:
    entries = [TreeEntry(b"%04d" % index, Kind.FILE, size=5, hash=noise(index, 32)) for index in range(1000)]
    first = store.put_tree(entries)
    entries[500] = TreeEntry(b"0500", Kind.FILE, size=6, hash=noise(5000, 32))
    second = store.put_tree(entries, first)
    assert where(store, second).stored < 100
    assert where(store, first).stored > 30_000
    assert store.read_tree(second).entries == tuple(entries)

    data = noise(1, CHUNK_THRESHOLD + 500_000)
    large, size = store.put_content(reader(data), len(data))
    changed = data[:3_000_000] + b"changed" + data[3_000_007:]
    other, _ = store.put_content(reader(changed), size, large)
    assert b"".join(store.read_file(other)) == changed
    pieces = [where(store, name) for name, _ in store._read_chunks(other).pieces]
    assert [one.is_delta for one in pieces].count(True) == 1
    assert min(one.stored for one in pieces) < 3000
    assert where(store, other).kind == where(store, large).kind


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda length, offset: data[offset : offset + length]


@pytest.mark.parametrize(
    ("base", "data"),
    [
        (noise(1, 5000), noise(2, 5000)),
        (noise(1, 300_000), noise(2, 300_000)),
        (b"x" * 100_000, b"x" * 90_000),
        (b"abc", b"abcd"),
        (b"", version(1)),
        (version(1), b""),
        (version(0), version(0, 1)),
    ],
)
def test_what_does_not_pay_is_stored_by_itself(store: Store, base: bytes, data: bytes) -> None:
    name = store.put_blob(data, store.put_blob(base))
    assert not where(store, name).is_delta
    assert store.read_blob(name) == data


def test_a_base_that_cannot_be_one(store: Store) -> None:
    tree = store.put_tree([])
    for seed, base in enumerate((bytes(32), noise(1, 32), tree), 10):
        assert not where(store, store.put_blob(version(1, seed), base)).is_delta
    first = store.put_blob(version(0))
    damage(store, first)
    second = store.put_blob(version(1), first)
    assert not where(store, second).is_delta
    assert store.read_blob(second) == version(1)
    # It was found damaged by that.
    assert store.put_blob(version(0), second) == first
    assert not where(store, first).is_delta
    assert store.read_blob(first) == version(0)


def test_payloads_against_a_base_round_trip() -> None:
    chance = random.Random(7)
    for size in (100, 5000, 200_000, 1_500_000, 5_000_000):
        base = noise(size, size)
        for _ in range(3):
            cut, length = chance.randrange(size), chance.randrange(60)
            data = base[:cut] + noise(cut, length) + base[cut + chance.randrange(60) :]
            used, payload = codec.encode_against(data, base)
            assert codec.decode(used, bytes(payload), len(data), base) == data
            assert len(payload) < (10_000 if size > 100 else len(data) + 1)
            if used == Codec.ZSTD_DELTA:
                for wrong in (b"", base[1:], bytes(len(base))):
                    try:
                        assert codec.decode(used, bytes(payload), len(data), wrong) != data
                    except ValueError:
                        pass


# --- damage


def test_what_is_stored_against_something_damaged_is_damaged(store: Store) -> None:
    names = put_versions(store, 5)
    other = store.put_blob(b"another" * 50)
    snapshot(store, "s", *names, other)
    damage(store, names[2])
    for name in names[2:]:
        with pytest.raises(Corrupt) as caught:
            store.read_blob(name)
        assert caught.value.object_hash == name
        assert caught.value.source == names[2]
        assert names[2].hex() in str(caught.value)
    assert store.read_blob(names[1]) == version(1)
    assert store.read_blob(other) == b"another" * 50
    found = store.check(data=True)
    assert {problem.name for problem in found.problems} == set(names[2:])
    assert set(found.affected) == {AffectedPath("s", "w", b"%02d" % index) for index in (2, 3, 4)}
    # What comes again is stored by itself, and all that needs it is whole again.
    assert store.put_blob(version(2), names[1]) == names[2]
    assert not where(store, names[2]).is_delta
    assert [store.read_blob(name) for name in names] == [version(number) for number in range(5)]
    assert store.check(data=True).problems == []


def test_a_missing_base_is_found_without_reading(store: Store) -> None:
    names = put_versions(store, 4)
    snapshot(store, "s", names[3])
    store._edit(lambda change: store._objects.place(names[1], None, change))
    found = store.check()
    assert {names[2], names[3]} <= {problem.name for problem in found.problems}
    assert found.affected == [AffectedPath("s", "w", b"00")]
    assert store.collect(grace=0).deferred
    # Its record is still in the pack.
    assert store.repair().lost == 0
    assert store.check(data=True).problems == []
    assert store.read_blob(names[3]) == version(3)


def test_repair_drops_what_cannot_be_decoded_and_takes_it_again(store: Store) -> None:
    names = put_versions(store, 4)
    snapshot(store, "s", *names)
    damage(store, names[1])
    taken: list[AffectedPath] = []

    def retake(affected: list[AffectedPath]) -> None:
        taken.extend(affected)
        store.put_blob(version(1))

    done = store.repair(retake=retake)
    assert [one.path for one in taken] == [b"01", b"02", b"03"]
    # With the base that was taken again, all that was stored against it is there again.
    assert (done.lost, done.affected) == (0, [])
    assert [store.read_blob(name) for name in names] == [version(number) for number in range(4)]
    assert store.check(data=True).problems == []


def test_repair_drops_what_cannot_be_decoded(store: Store) -> None:
    names = put_versions(store, 4)
    snapshot(store, "s", *names)
    damage(store, names[2])
    done = store.repair()
    assert done.lost == 2
    assert [one.path for one in done.affected] == [b"02", b"03"]
    assert store.read_blob(names[1]) == version(1)
    assert store.collect(grace=0, thorough=True).deferred == ""
    with store.operation():
        names = put_versions(store, 4)
        assert [store.read_blob(name) for name in names] == [version(number) for number in range(4)]
        store.sync()
    assert store.check(data=True).problems == []


def test_what_needs_no_damaged_byte_of_its_base_is_kept(store: Store) -> None:
    """The base is lost, and what is stored against it is not."""
    base, data = noise(1, 9000), noise(1, 9000)[:4000] + b"and on"
    first = store.put_blob(base)
    second = store.put_blob(data, first)
    assert where(store, second).is_delta
    snapshot(store, "s", second)
    at = where(store, first)
    with (store.path / "packs" / f"{at.pack:08x}.pack").open("r+b") as file:
        file.seek(at.offset + RECORD_HEADER_SIZE + 8000)
        file.write(b"damage")
    assert store.read_blob(second) == data
    assert {problem.name for problem in store.check(data=True).problems} == {first}
    assert store.repair().lost == 0
    assert store.read_blob(second) == data
    assert not where(store, second).is_delta
    assert store.check(data=True).problems == []


def test_a_ring_in_the_index_is_no_endless_loop(store: Store) -> None:
    names = put_versions(store, 3)
    snapshot(store, "s", names[2])
    ring = where(store, names[1])._replace(base=names[2])
    store._edit(lambda change: store._objects.place(names[1], ring, change))
    for name in names[1:]:
        with pytest.raises(Corrupt):
            store.read_blob(name)
    assert store.check(data=True).problems
    assert store.repair().lost == 0
    assert store.read_blob(names[2]) == version(2)
    assert store.check(data=True).problems == []


# --- collections


def test_a_base_stays_as_long_as_it_is_needed(store: Store) -> None:
    names = put_versions(store, 6)
    snapshot(store, "old", *names[:5])
    snapshot(store, "new", names[5])
    delete(store, "old")
    done = store.collect(grace=0, thorough=True)
    # The tree of the old one is all that goes.
    assert (done.objects, done.deferred) == (1, "")
    assert store.read_blob(names[5]) == version(5)
    assert store.check(data=True).problems == []
    delete(store, "new")
    assert store.collect(grace=0, thorough=True).objects == 7
    assert store.stats().objects == 0


def test_a_directory_that_is_a_base_keeps_its_bytes_and_not_its_files(store: Store) -> None:
    def put(number: int, base: bytes) -> bytes:
        entries = [TreeEntry(b"%02d" % index, Kind.FILE, size=9, hash=noise(index, 32)) for index in range(40)]
        entries = [
            TreeEntry(one.name, Kind.FILE, size=9, hash=store.put_blob(b"%d %s" % (number * (index == 5), one.name)))
            for index, one in enumerate(entries)
        ]
        return store.put_tree(entries, base)

    first = put(1, b"")
    second = put(2, first)
    third = put(3, second)
    assert where(store, third).base == second
    with store.write() as rows:
        rows.put_workspace(WorkspaceRow("w", b"/nowhere", b"", WorkspaceOptions(), 0))
        for number, tree in enumerate((first, second, third)):
            rows.put_snapshot(snapshot_row(f"s{number}", tree))
    for number in range(2):
        delete(store, f"s{number}")
    usage = store.usage()
    assert store.collect(grace=0, thorough=True).objects == 2
    assert usage.needed == usage.workspaces["w"].unique == store.usage().needed == store.usage().stored
    assert len(store.read_tree(third).entries) == 40
    assert store.check(data=True).problems == []
    # Taken again, it has all its files.
    assert put(1, third) == first
    with store.write() as rows:
        rows.put_snapshot(snapshot_row("again", first))
    assert store.collect(grace=0, thorough=True).objects == 0
    for entry in store.read_tree(first).entries:
        store.verify_file(entry.hash)
    assert store.check(data=True).problems == []


def test_what_is_dropped_and_was_stored_against_what_is_gone_is_put_anew(place: Path) -> None:
    """A collection that is killed between the two never leaves one without the other."""
    with Store.open(place, pack_limit=9000) as store:
        names = put_versions(store, 4)
        store.sync()
        snapshot(store, "s", store.put_blob(noise(1, 3000)))

        def hook(label: str) -> None:
            if label == "gc.copied":
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with steps.on_step(hook), pytest.raises(OSError, match=r"."):
            store.collect(grace=0, thorough=True)
        assert store.check(data=True).problems == []
        assert put_versions(store, 4) == names
        assert [store.read_blob(name) for name in names] == [version(number) for number in range(4)]


def test_what_is_new_keeps_its_base(store: Store) -> None:
    """It is in no row yet, and its base was put long before."""
    old = store.put_blob(version(0))
    snapshot(store, "s", old)
    new: list[bytes] = []

    def hook(label: str) -> None:
        if label == "gc.marked" and not new:
            new.append(store.put_blob(version(1), old))

    delete(store, "s")
    with steps.on_step(hook):
        assert store.collect(grace=0, thorough=True).deferred == ""
    assert store.read_blob(new[0]) == version(1)
    assert store.check(data=True).problems == []
    # What is going to be dropped is no base any more.
    late: list[bytes] = []

    def late_hook(label: str) -> None:
        if label == "gc.loosened" and not late:
            late.append(store.put_blob(version(2), new[0]))

    with steps.on_step(late_hook):
        assert store.collect(grace=0, thorough=True).deferred == ""
    assert not where(store, late[0]).is_delta
    assert store.read_blob(late[0]) == version(2)
    with pytest.raises(NotFound):
        store.read_blob(old)


def test_collections_while_others_put_against_others(place: Path) -> None:
    stop = threading.Event()

    def work(store: Store, seed: int) -> int:
        chance = random.Random(seed)
        known = [store.put_blob(version(0, seed))]
        count = 0
        while not stop.is_set():
            with store.operation():
                number = chance.randrange(40)
                name = store.put_blob(version(number, seed), chance.choice(known))
                assert store.read_blob(name) == version(number, seed)
                known = [*known[-5:], name]
                snapshot(store, f"s{seed}", name)
                assert store.read_blob(name) == version(number, seed)
            count += 1
        return count

    with Store.open(place, pack_limit=30_000) as store, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work, store, seed) for seed in range(3)]
        try:
            for _ in range(12):
                done = store.collect(grace=0, thorough=True)
                assert done.deferred in ("", "other work that began before takes long")
                assert not done.unreadable
                found = store.check(data=True)
                assert [one for one in found.problems if one.check in {"contents", "reach"}] == []
        finally:
            stop.set()
        assert all(one.result() > 5 for one in running)
        assert store.check(data=True).problems == []


# --- restarts


def test_what_was_put_and_not_committed_is_there_with_its_base(place: Path) -> None:
    with Store.open(place, pack_limit=10_000) as store:
        names = put_versions(store, 4)
        store.sync()
        names += [store.put_blob(version(4), names[-1])]
        names += [store.put_blob(version(5), names[-1])]
    for _ in range(2):
        with Store.open(place) as store:
            assert store.recovered.objects == 2
            assert [store.read_blob(name) for name in names] == [version(number) for number in range(6)]
    with Store.open(place) as store:
        store.sync()
        assert store.check(data=True).problems == []


def test_one_whose_base_is_lost_does_not_end_what_counts_of_a_pack(place: Path) -> None:
    with Store.open(place) as store:
        names = put_versions(store, 2)
        store.sync()
        names += [store.put_blob(version(2), names[-1])]
        after = store.put_blob(b"after" * 20)
        damage(store, names[1])
    with Store.open(place) as store:
        assert store.recovered.objects == 1
        assert not store.has(names[2])
        assert store.read_blob(after) == b"after" * 20
        assert store.put_blob(version(2)) == names[2]
        assert store.read_blob(names[2]) == version(2)


# --- formats


def make_old(place: Path) -> list[bytes]:
    """A store as the first format had it."""
    with Store.open(place) as store:
        store._objects.deltas = False
        names = put_versions(store, 3)
        assert not any(where(store, name).is_delta for name in names)
        snapshot(store, "s", *names)
        store._edit(lambda change: change.put(*_OLD))
    (place / "format").write_text("cogfs store 1\n")
    return names


_OLD = (Table.META, b"format", (1).to_bytes(4))


def test_a_store_of_the_first_format_goes_on(place: Path) -> None:
    names = make_old(place)
    with Store.open(place) as store:
        assert (place / "format").read_text() == "cogfs store 3\n"
        assert [store.read_blob(name) for name in names] == [version(number) for number in range(3)]
        new = store.put_blob(version(3), names[2])
        assert where(store, new).is_delta
        assert store._check_format() == 3
        assert store.check(data=True).problems == []
    with Store.open(place) as store:
        assert store.read_blob(new) == version(3)


@pytest.mark.parametrize("label", ["store.upgrade", "store.format", "index.upgrade", "index.commit"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_new_format_that_cannot_be_written(place: Path, label: str, killed: bool, copies: Path) -> None:
    names = make_old(place)

    def hook(passed: str) -> None:
        if passed != label:
            return
        if killed:
            shutil.copytree(place, copies / "killed", dirs_exist_ok=True)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with steps.on_step(hook), Store.open(place) as store:
        if not killed:
            # All goes on as before.
            new = store.put_blob(version(3), names[2])
            assert not where(store, new).is_delta
            assert store.read_blob(new) == version(3)
    for path in (copies / "killed", place) if killed else (place,):
        with Store.open(path) as store:
            assert (path / "format").read_text() == "cogfs store 3\n"
            assert not list(path.glob("*.new"))
            assert where(store, store.put_blob(version(4), names[2])).is_delta
            assert store.check(data=True).problems == []


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Path]:
    where_to = tmp_path / "copies"
    where_to.mkdir()
    yield where_to
    shutil.rmtree(where_to)
