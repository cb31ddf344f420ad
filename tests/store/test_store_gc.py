"""Collections: what is needed stays and the rest goes, whatever happens meanwhile and wherever they are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cogfs.store import chunking, steps
from cogfs.store.database import Change
from cogfs.store.errors import NotFound, StoreError
from cogfs.store.gc import Collected
from cogfs.store.hashing import hash_object
from cogfs.store.naming import Root
from cogfs.store.records import PACK_HEADER_SIZE
from cogfs.store.schema import (
    BoundaryRow,
    DirectoryRow,
    Kind,
    ObjectKind,
    RecordState,
    StatRow,
    Sums,
    TreeEntry,
)
from cogfs.store.store import Store
from tests.store import collect_program
from tests.store.collect_program import check, fill, open_store, thin_out
from tests.store.rows import snapshot_row

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str, crash_at: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-m", collect_program.__name__, *arguments],
        env=dict(os.environ, COGFS_CRASH_AT=crash_at),
        cwd=REPOSITORY,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr.decode()
    return done.returncode


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def tree_of(store: Store, **blobs: bytes) -> bytes:
    return store.put_tree(
        [TreeEntry(key.encode(), Kind.FILE, size=len(data), hash=store.put_blob(data)) for key, data in blobs.items()]
    )


def snapshot(store: Store, name: str, tree: bytes) -> None:
    with store.write() as rows:
        rows.put_snapshot(snapshot_row(name, tree))


def delete(store: Store, name: str) -> None:
    with store.write() as rows:
        rows.delete_snapshot(name)


def nothing_is_left_over(store: Store) -> None:
    """The packs hold what the index has, and nothing else; no file is there that is not of the format."""
    located = store._objects.located(b"", 1_000_000)
    size = sum(where.end - where.offset for _, where in located)
    files = list((store.path / "packs").iterdir())
    assert all(path.suffix == ".pack" for path in files)
    assert sum(path.stat().st_size for path in files) == size + len(files) * PACK_HEADER_SIZE
    assert sorted(path.name for path in store.path.iterdir()) == ["format", "index", "lock", "packs"]


# --- killed


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("filled") / "store"
    assert run("fill", str(place), "40") == 0
    return place


@pytest.mark.parametrize("passing", [1, 2, 6])
@pytest.mark.parametrize(
    "label",
    [
        "gc.marked", "gc.loosened", "gc.copied", "pack.create", "pack.header", "pack.append", "pack.appended",
        "pack.sync", "pack.directory", "index.write", "index.commit", "index.committed", "gc.given-up", "pack.remove",
        "pack.removed", "gc.forget",
    ],
)  # fmt: skip
def test_killed_at_each_step(filled: Path, tmp_path: Path, label: str, passing: int) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    status = run("collect", str(place), crash_at=f"{label}:{passing}")
    assert status == -signal.SIGKILL or passing > 1, "the step is never passed"
    with open_store(place) as store:
        thin_out(store)
        assert check(store) == 10
        fill(store, 100, 1)
        assert check(store) == 11
    with open_store(place) as store:
        assert check(store) == 11
        done = store.collect(grace=0, thorough=True)
        assert not done.deferred
        assert check(store) == 11
        nothing_is_left_over(store)
    with open_store(place) as store:
        assert check(store) == 11
        nothing_is_left_over(store)


def test_killed_again_and_again(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    chance = random.Random(3)
    for _ in range(12):
        run(
            "collect",
            str(place),
            crash_at=f"{chance.choice(steps.STORE_STEPS[3:] + steps.COLLECTION_STEPS)}:{chance.randrange(1, 5)}",
        )
        with open_store(place) as store:
            check(store)
    assert run("collect", str(place)) == 0
    with open_store(place) as store:
        assert check(store) == 10
        nothing_is_left_over(store)


def test_a_full_disk_with_one_pack_of_room(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    program = f"{sys.executable} -m {collect_program.__name__} small {mount}"
    script = f"mount -t tmpfs -o size=64m none {mount} && exec {program}"
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*own, "sh", "-c", script], cwd=REPOSITORY, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"well\n"


# --- what is needed


def test_all_that_rows_name_is_needed(store: Store) -> None:
    datas = {name: noise(index, 500) for index, name in enumerate("abcdef")}
    names = {name: store.put_blob(data) for name, data in datas.items()}
    tree = store.put_tree([TreeEntry(b"a", Kind.FILE, size=500, hash=names["a"])])
    inner = store.put_tree([TreeEntry(b"b", Kind.FILE, size=500, hash=names["b"])])
    state = store.put_tree([TreeEntry(b"inner", Kind.DIRECTORY, hash=inner)])
    listed = store.put_tree([TreeEntry(b"c", Kind.FILE, size=500, hash=names["c"])])
    row = StatRow(TreeEntry(b"d", Kind.FILE, size=500, hash=names["d"]), 1, 500, 0, 0, 0o100644, 1)
    with store.write() as rows:
        rows.put_snapshot(snapshot_row("s", tree))
        rows.put_snapshot(snapshot_row("frozen", None))
        rows.put_boundary(BoundaryRow("frozen", "w", 1, 0, 0, "", False, b""))
        rows.put_record_state("w", RecordState(TreeEntry(b"", Kind.DIRECTORY, hash=state), 2, (), -1))
        rows.put_directory("w", 2, DirectoryRow(listed, (row,), 0, 2, b"", Sums()))
    done = store.collect(lambda: [Root(names["e"], "", "w")], grace=0, thorough=True)
    assert (done.objects, done.live, done.deferred) == (1, 9, "")
    assert all(store.read_blob(names[name]) == datas[name] for name in "abcde")
    with pytest.raises(NotFound):
        store.read_blob(names["f"])
    assert not store.has(names["f"])
    assert store.put_blob(datas["f"]) == names["f"]
    assert store.read_blob(names["f"]) == datas["f"]


def test_the_pieces_of_a_large_file(store: Store, tmp_path: Path) -> None:
    data = noise(1, chunking.CHUNK_THRESHOLD + 10)
    (tmp_path / "large").write_bytes(data)
    fd = os.open(tmp_path / "large", os.O_RDONLY)
    try:
        name, size = store.put_file(fd, 0)
        snapshot(store, "s", store.put_tree([TreeEntry(b"large", Kind.FILE, size=size, hash=name)]))
        pieces = len(store._read_chunks(name).pieces)
        assert pieces > 4
        assert store.collect(grace=0, thorough=True).live == 2 + pieces
        assert b"".join(store.read_file(name)) == data
        assert store.keep_file(name)
        delete(store, "s")
        assert store.collect(grace=0).objects == 2 + pieces
        assert not store.keep_file(name)
        # A list whose pieces a collection has dropped, before it was interrupted, is not kept for the file.
        assert store.put_file(fd, 0) == (name, size)
        store.sync()
        piece = store._read_chunks(name).pieces[3][0]
        where = store._objects.locate(piece)

        def drop(change: Change) -> None:
            assert store._objects.drop([(piece, where)], change) == 1

        store._edit(drop)
        assert store.has(name)
        assert not store.keep_file(name)
    finally:
        os.close(fd)


def test_what_is_new_is_kept_for_the_time_of_grace(place: Path) -> None:
    with Store.open(place) as store:
        new = store.put_blob(b"new" * 100)
        again = store.put_blob(b"again" * 100)
        assert store.collect().objects == 0
        assert store.has(new)
    with Store.open(place) as store:
        # What nobody has named is nobody's in the next process, unless it is put or kept again.
        assert store.put_blob(b"again" * 100) == again
        assert store.collect(thorough=True).objects == 1
        assert not store.has(new)
        assert store.has(again)
    with Store.open(place) as store:
        assert store.keep_file(again)
        assert store.collect(thorough=True).objects == 0
        assert store.read_blob(again) == b"again" * 100
        # It was touched before this collection began.
        assert store.collect(grace=0).objects == 1
        assert not store.keep_file(again)


def test_what_a_start_finds_uncommitted_is_new(place: Path) -> None:
    with Store.open(place) as store:
        name = store.put_blob(b"pending" * 100)
    with Store.open(place) as store:
        assert store.recovered.objects == 1
        assert store.collect(thorough=True).objects == 0
        assert store.read_blob(name) == b"pending" * 100
        assert store.collect(grace=0, thorough=True).objects == 1


def test_an_operation_that_began_before_is_waited_for(store: Store) -> None:
    data = noise(1, 500)
    name = store.put_blob(data)
    snapshot(store, "old", store.put_tree([TreeEntry(b"a", Kind.FILE, size=500, hash=name)]))
    marked = threading.Event()
    go_on = threading.Event()

    def hook(label: str) -> None:
        if label == "gc.marked":
            marked.set()

    def operate() -> None:
        with store.operation():
            with store.read() as reader:
                row = reader.snapshot("old")
            go_on.wait(60)
            assert row.root is not None
            # By now no row names it, and the collection has marked what they name.
            tree = store.put_tree([TreeEntry(b"b", Kind.DIRECTORY, hash=row.root.hash)])
            snapshot(store, "new", tree)

    with ThreadPoolExecutor(2) as pool, steps.on_step(hook):
        operation = pool.submit(operate)
        while not store._objects.recent._operations:
            pass
        delete(store, "old")
        collection = pool.submit(store.collect, grace=0, thorough=True)
        assert marked.wait(60)
        go_on.set()
        operation.result()
        assert collection.result().deferred == ""
    assert store.read_blob(name) == data
    with store.operation():
        done = store.collect(grace=0, patience=0.01)
        assert "takes long" in done.deferred
        assert done.objects == 0


# --- at the same time


def test_what_is_put_while_it_is_swept_is_there(store: Store) -> None:
    """Something that is about to be dropped is put at each step of the sweep, and named by a row."""
    datas = [noise(index, 400) for index in range(30)]
    tree_of(store, **{f"f{index:02}": data for index, data in enumerate(datas)})
    store.sync()
    named: list[int] = []
    busy = False

    def hook(label: str) -> None:
        nonlocal busy
        if busy or len(named) == 30 or store._objects._sweep is None:
            return
        if store._objects._lock.locked() or store._writer_thread:
            return
        busy = True
        number = len(named)
        named.append(number)
        with store.operation():
            snapshot(store, f"s{number}", tree_of(store, a=datas[number]))
        busy = False

    for _ in range(3):
        with steps.on_step(hook):
            assert not store.collect(grace=0, thorough=True).deferred
    assert len(named) > 3
    assert all(store.read_blob(hash_object(ObjectKind.BLOB, datas[number])) == datas[number] for number in named)


def test_many_at_a_time(place: Path) -> None:
    """Threads take snapshots of contents that come again and again, delete them and read them, while a collection
    follows another."""
    ended = threading.Event()
    with Store.open(place, pack_limit=20_000, map_size=256 * 1024) as store:

        def work(seed: int) -> int:
            chance = random.Random(seed)
            mine: dict[str, dict[str, bytes]] = {}
            rounds = 0
            while not ended.is_set():
                rounds += 1
                files = {f"f{index}": noise(chance.randrange(60), 600) for index in range(5)}
                name = f"s{seed}-{rounds}"
                with store.operation():
                    tree = tree_of(store, **files)
                    if chance.random() < 0.8:
                        snapshot(store, name, tree)
                        mine[name] = files
                for known in chance.sample(sorted(mine), min(2, len(mine))):
                    with store.read() as reader:
                        row = reader.snapshot(known)
                    assert row.root is not None
                    entries = store.read_tree(row.root.hash).entries
                    assert [store.read_blob(one.hash) for one in entries] == list(mine[known].values())
                while len(mine) > 4:
                    gone = chance.choice(sorted(mine))
                    del mine[gone]
                    delete(store, gone)
            return rounds

        with ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(work, seed) for seed in range(3)]
            done: list[Collected] = []
            try:
                while len(done) < 25 and not any(worker.done() for worker in workers):
                    done.append(store.collect(grace=0, thorough=True))
            finally:
                ended.set()
            assert all(worker.result() > 0 for worker in workers)
        assert [one for one in done if one.deferred or one.unreadable] == []
        assert sum(one.objects for one in done) > 50
        store.collect(grace=0, thorough=True)
        nothing_is_left_over(store)


def test_a_reader_finds_what_was_moved(place: Path) -> None:
    with Store.open(place, pack_limit=5000) as store:
        datas = [noise(index, 900) for index in range(20)]
        for index, data in enumerate(datas):
            snapshot(store, f"s{index}", tree_of(store, a=data))
        for index in range(0, 20, 2):
            delete(store, f"s{index}")
        wanted = [hash_object(ObjectKind.BLOB, data) for data in datas[1::2]]
        places = {name: store._objects.locate(name) for name in wanted}
        find = store._objects.find
        store.collect(grace=0, thorough=True)
        assert any(find(name) != places[name] for name in wanted)
        for name, data in zip(wanted, datas[1::2], strict=True):
            # Where it was is no more, and that is what a reader has looked up.
            first = [places[name]]
            store._objects.find = lambda name, first=first: first.pop() if first else find(name)  # type: ignore[method-assign, misc]
            assert store.read_blob(name) == data


# --- what cannot be read


def damage(store: Store, name: bytes) -> None:
    where = store._objects.locate(name)
    path = store.path / "packs" / f"{where.pack:08x}.pack"
    with path.open("r+b") as file:
        file.seek(where.end - 1)
        last = file.read(1)
        file.seek(where.end - 1)
        file.write(bytes([last[0] ^ 1]))


def test_nothing_is_dropped_while_a_tree_cannot_be_read(store: Store) -> None:
    blob = store.put_blob(b"below the damaged tree" * 9)
    inner = store.put_tree([TreeEntry(b"a", Kind.FILE, size=198, hash=blob)])
    snapshot(store, "bad", store.put_tree([TreeEntry(b"inner", Kind.DIRECTORY, hash=inner)]))
    snapshot(store, "good", tree_of(store, b=b"good"))
    garbage = store.put_blob(b"garbage" * 100)
    store.sync()
    damage(store, inner)
    done = store.collect(grace=0, thorough=True)
    assert "cannot be read" in done.deferred
    assert [one.snapshot_id for one in done.unreadable] == ["bad"]
    assert store.read_blob(blob)
    assert store.has(garbage)
    # Without that snapshot nobody needs it.
    delete(store, "bad")
    done = store.collect(grace=0, thorough=True)
    assert (done.deferred, done.unreadable, done.live) == ("", (), 2)
    assert not store.has(garbage)


def test_a_pack_with_a_damaged_file_stays(store: Store) -> None:
    blob = store.put_blob(b"damaged" * 99)
    snapshot(store, "s", store.put_tree([TreeEntry(b"a", Kind.FILE, size=693, hash=blob)]))
    store.put_blob(noise(1, 3000))
    store.sync()
    damage(store, blob)
    done = store.collect(grace=0, thorough=True)
    assert (done.objects, done.packs, done.deferred) == (1, 0, "")
    assert done.unreadable
    with pytest.raises(StoreError):
        store.read_blob(blob)
    # Put again, it is put anew, and the pack can go.
    assert store.put_blob(b"damaged" * 99) == blob
    store.sync()
    assert store.read_blob(blob) == b"damaged" * 99
    assert store.collect(grace=0, thorough=True).packs == 1
    assert store.read_blob(blob) == b"damaged" * 99


def test_it_can_be_interrupted(filled: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(filled, place)
    with open_store(place) as store:
        thin_out(store)
        for passing in range(0, 30, 3):
            left = iter(range(passing))
            done = store.collect(grace=0, thorough=True, goes_on=lambda left=left: next(left, None) is not None)  # type: ignore[misc]
            assert check(store) == 10
        assert store.collect(grace=0, thorough=True).deferred == ""
        assert done.deferred in {"", "it was told to stop"}
        nothing_is_left_over(store)
