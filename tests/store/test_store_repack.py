"""Repacks: what they put together stays what it is, whatever happens meanwhile and wherever they are killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cogfs.store import groups, steps
from cogfs.store.codec import Codec
from cogfs.store.database import Table
from cogfs.store.errors import Corrupt, NotFound
from cogfs.store.hashing import hash_object
from cogfs.store.records import PACK_HEADER_SIZE, RECORD_HEADER_SIZE
from cogfs.store.schema import Kind, ObjectKind, TreeEntry
from cogfs.store.store import Store
from tests.store import collect_program
from tests.store.collect_program import VERSIONED, open_store, thin_out
from tests.store.rows import snapshot_row
from tests.store.test_store_deltas import make_old, where
from tests.store.versions import Versions, check_versions, version

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str, crash_at: str = "") -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", collect_program.__name__, *arguments],
        env=dict(os.environ, COGFS_CRASH_AT=crash_at),
        cwd=REPOSITORY,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr.decode()
    return done.returncode, done.stdout


def is_whole(store: Store, versions: Versions) -> None:
    """All versions are there, and all snapshots."""
    assert all(store.read_blob(name) == data for name, data in versions.blobs.items())
    check_versions(store)


def records(store: Store) -> dict[tuple[int, int], int]:
    """The records that the index knows, and their sizes."""
    return {one.record: one.end - one.offset for _, one in store._objects.located(b"", 1_000_000)}


def nothing_is_left_over(store: Store) -> None:
    files = list((store.path / "packs").iterdir())
    assert sum(path.stat().st_size for path in files) == sum(records(store).values()) + len(files) * PACK_HEADER_SIZE
    assert sorted(path.name for path in (store.path / "index").iterdir()) == ["data.mdb", "lock.mdb"]


# --- what it does


def test_versions_take_less_and_come_back(place: Path) -> None:
    with Store.open(place) as store:
        history = Versions(store)
        history.go_on(60)
        before = store.stats()
        done = store.repack(grace=0)
        assert not done.deferred
        assert not done.damaged
        assert (done.groups, done.objects) == (2, before.objects) == (2, 360)
        assert done.before == before.pack_bytes - PACK_HEADER_SIZE + 32 * deltas(place.with_name("again"), history)
        after = store.stats()
        assert after.objects == before.objects
        assert after.pack_bytes < 0.7 * before.pack_bytes
        assert done.freed == before.pack_bytes - after.pack_bytes + PACK_HEADER_SIZE
        assert after.index_bytes < before.index_bytes
        assert len(records(store)) == 2
        assert store.usage().stored == store.usage().needed == sum(records(store).values())
        nothing_is_left_over(store)
        is_whole(store, history)
        # There is nothing to do any more.
        assert store.repack(grace=0).groups == 0
        assert store.stats() == after
    with Store.open(place) as store:
        is_whole(store, history)
        assert store.recovered.objects == 0


def deltas(place: Path, history: Versions) -> int:
    """How many objects of a history had a base when they were put."""
    with Store.open(place) as store:
        again = Versions(store, history.files)
        again.go_on(history.count)
        return sum(location.is_delta for _, location in store._objects.with_base())


def test_the_newest_come_first(store: Store) -> None:
    history = Versions(store)
    history.go_on(40)
    store.repack(grace=0)
    newest = [where(store, name) for name in history.newest.values()]
    starts = sorted(one.start for name in history.blobs if (one := where(store, name)))
    assert sorted(one.start for one in newest) == starts[: len(newest)]


def test_what_came_since_joins_the_group(store: Store) -> None:
    history = Versions(store)
    history.go_on(40)
    assert store.repack(grace=0).groups == 2
    # A version needs no more than the one before, wherever that is.
    history.go_on(1)
    assert all(where(store, name).is_delta for name in history.newest.values())
    is_whole(store, history)
    history.go_on(40)
    done = store.repack(grace=0)
    assert done.groups == 2
    assert len(records(store)) == 2
    is_whole(store, history)
    nothing_is_left_over(store)


def test_what_does_not_pay_is_left_and_not_tried_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [store.put_blob(random.Random(seed).randbytes(20_000)) for seed in range(5)]
    entries = [TreeEntry(b"%d" % index, Kind.FILE, size=20_000, hash=name) for index, name in enumerate(names)]
    tree = store.put_tree(entries)
    with store.write() as rows:
        rows.put_snapshot(snapshot_row("s", tree))
    made: list[int] = []
    encode = groups.encode

    def counted(frames: list[list[tuple[bytes, bytes]]]) -> bytes:
        made.append(len(frames))
        return encode(frames)

    monkeypatch.setattr(groups, "encode", counted)
    before = store.stats()
    assert store.repack(grace=0).groups == 0
    assert made
    assert store.stats() == before
    made.clear()
    assert store.repack(grace=0).groups == 0
    assert not made


def test_a_group_of_which_much_is_dropped_is_made_anew(store: Store) -> None:
    history = Versions(store, files=2)
    history.go_on(60)
    store.repack(grace=0)
    size = store.stats().pack_bytes
    with store.write() as rows:
        for number in range(50):
            rows.delete_snapshot(f"s{number:05}")
    assert store.collect(grace=0, thorough=True).objects == 200
    # All that is needed is in the groups, which go as a whole or not at all.
    assert store.stats().pack_bytes == size
    done = store.repack(grace=0)
    assert done.groups == 2
    assert store.stats().pack_bytes < 0.9 * size
    kept = {name: data for name, data in history.blobs.items() if store.has(name)}
    assert len(kept) == 20
    history.blobs = kept
    is_whole(store, history)
    nothing_is_left_over(store)


def test_large_contents_and_many_paths_are_cut(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_LIMIT", 800_000)
    monkeypatch.setattr(groups, "FRAME_LIMIT", 50_000)
    monkeypatch.setattr(groups, "HEAD_LIMIT", 20_000)
    history = Versions(store, files=7)
    history.go_on(30)
    done = store.repack(grace=0)
    assert done.groups == 5
    is_whole(store, history)
    assert {len(store._objects.group(where(store, name))) for name in history.newest.values()} == {60, 30}
    assert store.repack(grace=0).groups == 0


# --- damage


def spoil(store: Store, pack: int, offset: int, length: int = 4) -> None:
    with (store.path / "packs" / f"{pack:08x}.pack").open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in old))


def test_what_is_damaged_stays_and_is_told(store: Store) -> None:
    history = Versions(store)
    history.go_on(20)
    loner = store.put_blob(b"".join(random.Random(5).randbytes(30).hex().encode() for _ in range(40)))
    tree = store.put_tree([TreeEntry(b"loner", Kind.FILE, size=2400, hash=loner)])
    with store.write() as rows:
        rows.put_snapshot(snapshot_row("a-loner", tree))
    at = where(store, loner)
    spoil(store, at.pack, at.offset + RECORD_HEADER_SIZE + 20)
    done = store.repack(grace=0)
    assert len(done.damaged) == 1
    assert loner.hex() in done.damaged[0]
    assert done.groups == 2
    assert not where(store, loner).is_grouped
    assert all(where(store, name).is_grouped for name in history.blobs)
    with pytest.raises(Corrupt):
        store.read_blob(loner)
    assert {one.name for one in store.check(data=True).problems} == {loner}
    # A record that is needed and damaged keeps its pack, as repairs may want it.
    assert (store.path / "packs" / f"{where(store, loner).pack:08x}.pack").exists()


def grouped_frames(store: Store, name: bytes) -> list[tuple[int, int]]:
    """Where the frames of a group begin in the pack, and their lengths."""
    at = where(store, name)
    frames, _ = store._objects._groups._directory(at)
    return [(at.offset + RECORD_HEADER_SIZE + frame.offset, frame.stored) for frame in frames]


def test_repair_brings_back_what_is_intact_of_a_damaged_group(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FRAME_LIMIT", 100_000)
    history = Versions(store)
    history.go_on(40)
    store.repack(grace=0)
    name = next(iter(history.blobs))
    frames = grouped_frames(store, name)
    assert len(frames) > 5
    start, length = frames[3]
    spoil(store, where(store, name).pack, start + length // 2)
    store._objects._groups.forget()
    bad = set()
    for one, data in history.blobs.items():
        try:
            assert store.read_blob(one) == data
        except Corrupt as error:
            assert error.object_hash == one
            bad.add(one)
    assert 0 < len(bad) <= 12
    assert {one.name for one in store.check(data=True).problems} == bad
    # What is damaged and comes again is put anew.
    again = bad.pop()
    assert store.put_blob(history.blobs[again]) == again
    assert store.read_blob(again) == history.blobs[again]
    done = store.repair()
    assert done.lost == len(bad)
    for one in bad:
        assert not store.has(one)
        store.put_blob(history.blobs[one])
    store.sync()
    is_whole(store, history)
    assert not any(where(store, one).is_grouped for one in history.blobs)
    assert store.collect(grace=0, thorough=True).deferred == ""
    store.repack(grace=0)
    is_whole(store, history)
    nothing_is_left_over(store)


@pytest.mark.parametrize("seed", range(30))
def test_no_damage_of_a_group_gives_wrong_bytes(place: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Store.open(place) as store:
        history = Versions(store, files=2)
        history.go_on(12)
        store.repack(grace=0)
        # Of the contents.
        at = where(store, next(iter(history.blobs)))
        spoil(store, at.pack, chance.randrange(at.offset, at.end - 4), chance.randrange(1, 4))
        store._objects._groups.forget()
        bad = set()
        for name, data in history.blobs.items():
            try:
                assert store.read_blob(name) == data
            except Corrupt:
                bad.add(name)
        found = store.check(data=True)
        assert bad <= {problem.name for problem in found.problems}
    # In the directory of the group or its names, or in the header, it is found without reading the contents.
    with Store.open(place) as store:
        lost = store.repair().lost
        assert lost == len(bad)
        for name, data in history.blobs.items():
            assert store.put_blob(data) == name
        store.sync()
        is_whole(store, history)


def test_an_index_that_has_an_object_in_another_place_of_its_group(store: Store) -> None:
    history = Versions(store)
    history.go_on(20)
    store.repack(grace=0)
    first, second, *_ = history.blobs
    wrong = where(store, first)._replace(start=where(store, second).start)
    store._edit(lambda change: store._objects.place(first, wrong, change))
    assert {one.name for one in store.check().problems} == {first}
    assert store.repair().lost == 0
    is_whole(store, history)


def test_an_index_that_is_lost_is_rebuilt_out_of_groups(store: Store) -> None:
    history = Versions(store)
    history.go_on(20)
    store.repack(grace=0)

    def forget(change: object) -> None:
        for name, _ in store._objects.located(b"", 1000):
            store._objects.place(name, None, change)  # type: ignore[arg-type]

    store._edit(forget)
    store._trees.__init__()  # type: ignore[misc]
    assert store.repair().lost == 0
    is_whole(store, history)


# --- while others work


def test_while_others_put_and_read_and_collect(place: Path) -> None:
    stop = threading.Event()
    rounds = [0, 0]

    def work(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        known: dict[bytes, int] = {store.put_blob(version(0, seed)): 0}
        while not stop.is_set():
            with store.operation():
                number = chance.randrange(60)
                name = store.put_blob(version(number, seed), chance.choice(list(known)))
                known[name] = number
                tree = store.put_tree([TreeEntry(b"f%d" % seed, Kind.FILE, size=1, hash=name)])
                with store.write() as rows:
                    rows.put_snapshot(snapshot_row(f"s{seed}-{number:03}", tree))
                one = chance.choice([each for each in known if store.keep_file(each)])
                assert store.read_blob(one) == version(known[one], seed)
                if chance.random() < 0.2:
                    gone = chance.randrange(60)
                    with store.write() as rows, suppress(NotFound):
                        rows.delete_snapshot(f"s{seed}-{gone:03}")
                    known = {each: of for each, of in known.items() if of != gone} or known
            rounds[seed] += 1

    with Store.open(place, pack_limit=60_000, map_size=64 * 1024) as store, ThreadPoolExecutor(3) as pool:
        Versions(store)
        running = [pool.submit(work, store, seed) for seed in range(2)]
        made = 0
        try:
            turn = 0
            while turn < 8 or (min(rounds) < 6 and not any(one.done() for one in running)):
                turn += 1
                done = store.repack(grace=0)
                assert done.deferred in ("", "other work that began before takes long")
                assert not done.damaged
                made += done.groups
                store.collect(grace=0, thorough=True)
        finally:
            stop.set()
        for one in running:
            one.result()
        assert made > 2
        assert store.check(data=True).problems == []


def test_an_index_that_is_written_to_meanwhile_is_not_replaced(store: Store) -> None:
    history = Versions(store)
    history.go_on(60)
    number = store._database.copy(lambda: True)
    assert number is not None
    history.go_on(1)
    with store._writing():
        assert store._database.take_copy(number) == 0
    is_whole(store, history)
    nothing = store._database.copy(lambda: False)
    assert nothing is None
    assert not (store.path / "index" / "data.mdb.new").exists()
    assert store._compact(lambda: True) > 0
    is_whole(store, history)
    history.go_on(20)
    is_whole(store, history)


def test_it_can_be_interrupted(place: Path) -> None:
    with Store.open(place) as store:
        history = Versions(store)
        history.go_on(30)
        asked = 0

        def goes_on(limit: int) -> Callable[[], bool]:
            def ask() -> bool:
                nonlocal asked
                asked += 1
                return asked < limit

            return ask

        deferred = 0
        for limit in range(1, 40, 5):
            asked = 0
            done = store.repack(grace=0, goes_on=goes_on(limit))
            deferred += bool(done.deferred)
            is_whole(store, history)
        assert deferred
        store.repack(grace=0)
        assert all(where(store, name).is_grouped for name in history.blobs)
        store.collect(grace=0, thorough=True)
        nothing_is_left_over(store)


# --- killed, and disks


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filled") / "store"
    assert run("versions", str(place), "24")[0] == 0
    return place


def test_every_step_is_passed(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path / "store")
    passed: set[str] = set()
    with open_store(tmp_path / "store") as store, steps.on_step(passed.add):
        store.repack(grace=0)
    assert passed >= {*steps.REPACK_STEPS, *steps.COLLECTION_STEPS} - {"gc.loosened"}
    assert {label for label in passed if label.startswith(("repack.", "compact."))} == set(steps.REPACK_STEPS)


@pytest.mark.parametrize(
    ("label", "passing"),
    [
        *((label, 1) for label in steps.REPACK_STEPS),
        *((label, 2) for label in steps.REPACK_STEPS[:3]),
        ("pack.append", 1),
        ("pack.appended", 1),
        ("pack.appended", 2),
        ("pack.sync", 1),
        ("index.write", 1),
        ("index.commit", 1),
        ("index.committed", 1),
        ("index.committed", 2),
        ("gc.copied", 1),
        ("pack.removed", 1),
    ],
)
def test_killed_at_each_step(filled: Path, tmp_path: Path, label: str, passing: int) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    assert run("repack", str(place), crash_at=f"{label}:{passing}")[0] == -signal.SIGKILL, "the step is never passed"
    with open_store(place) as store:
        assert check_versions(store) == 24
        Versions(store, VERSIONED, 24).go_on(1)
    with open_store(place) as store:
        assert check_versions(store) == 25
        done = store.repack(grace=0)
        assert not done.deferred
        assert not store.collect(grace=0, thorough=True).deferred
        assert check_versions(store) == 25
        # Of the pack that grows less than a quarter may be of no use.
        files = list((store.path / "packs").iterdir())
        assert 3 * sum(path.stat().st_size for path in files) < 4 * sum(records(store).values()) + 3 * len(files) * 20
        assert sorted(path.name for path in (store.path / "index").iterdir()) == ["data.mdb", "lock.mdb"]
    with open_store(place) as store:
        thin_out(store)
        store.collect(grace=0, thorough=True)
        store.repack(grace=0)
        assert check_versions(store) == 7


def test_killed_again_and_again(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    chance = random.Random(9)
    labels = (*steps.STORE_STEPS[3:], *steps.COLLECTION_STEPS, *steps.REPACK_STEPS)
    for number in range(10):
        run("repack", str(place), crash_at=f"{chance.choice(labels)}:{chance.randrange(1, 4)}")
        with open_store(place) as store:
            assert check_versions(store) == 24 + 3 * number
            Versions(store, VERSIONED, 24 + 3 * number).go_on(3)
    with open_store(place) as store:
        assert check_versions(store) == 54
        assert not store.repack(grace=0).deferred
        assert check_versions(store) == 54


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    "label",
    ["pack.append", "pack.sync", "index.write", "index.commit", "compact.copied", "compact.renamed", "compact.sync"],
)
def test_a_step_that_fails(place: Path, label: str, number: int) -> None:
    with Store.open(place) as store:
        history = Versions(store)
        history.go_on(60)

        def hook(passed: str) -> None:
            if passed == label:
                raise OSError(number, os.strerror(number))

        with steps.on_step(hook):
            try:
                done = store.repack(grace=0)
            except Exception as error:
                assert label.startswith("compact.")
                assert getattr(error, "__cause__", None) is not None
            else:
                assert done.deferred
                assert done.full == (number == errno.ENOSPC)
        is_whole(store, history)
        history.go_on(1)
    with Store.open(place) as store:
        is_whole(store, history)
        assert not store.repack(grace=0).deferred
        is_whole(store, history)


def test_a_full_disk_with_two_packs_of_room(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    program = f"{sys.executable} -m {collect_program.__name__} tight {mount}"
    script = f"mount -t tmpfs -o size=15m none {mount} && exec {program}"
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*own, "sh", "-c", script], cwd=REPOSITORY, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"well\n"


# --- formats


def test_a_store_that_cannot_get_the_new_format_has_no_groups(place: Path) -> None:
    with Store.open(place) as store:
        history = Versions(store)
        history.go_on(10)
        store._edit(lambda change: change.put(Table.META, b"format", (2).to_bytes(4)))
    (place / "format").write_text("cogfs store 2\n")

    def hook(label: str) -> None:
        if label == "store.upgrade":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with steps.on_step(hook), Store.open(place) as store:
        done = store.repack(grace=0)
        assert (done.groups, done.deferred) == (0, "the store has an older format")
        # But what the second format has.
        history = Versions(store)
        history.go_on(12)
        assert all(where(store, name).is_delta for name in history.newest.values())
    with Store.open(place) as store:
        assert store.repack(grace=0).groups
        is_whole(store, history)
        assert (place / "format").read_text() == "cogfs store 3\n"


def test_a_store_of_the_first_format_can_be_repacked(place: Path) -> None:
    names = make_old(place)
    with Store.open(place) as store:
        assert store.repack(grace=0).groups
        assert [store.read_blob(name) for name in names] == [version(number) for number in range(3)]
        assert where(store, names[0]).codec == Codec.GROUP


def test_a_group_that_was_written_and_not_committed(place: Path) -> None:
    """A start takes out of it what the index has not."""
    with Store.open(place) as store:
        datas = [version(number) for number in range(3)]
        names = [hash_object(ObjectKind.BLOB, data) for data in datas]
        there = store.put_blob(datas[1])
        store.sync()
        store._objects.regroup(
            ObjectKind.BLOB,
            groups.encode([[(names[0], datas[0])], [(names[1], datas[1]), (names[2], datas[2])]]),
        )
    with Store.open(place) as store:
        assert store.recovered.objects == 2
        assert not where(store, there).is_grouped
        assert [store.read_blob(name) for name in names] == datas
        store.sync()
        assert store.check(data=True).problems == []
