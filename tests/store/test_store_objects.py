"""Objects: what is put comes back, once, from any number of threads."""

from __future__ import annotations

import array
import io
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cogfs.store import codec
from cogfs.store.chunking import CHUNK_THRESHOLD, MAX_PIECE, MIN_PIECE, cut
from cogfs.store.errors import Corrupt, NotFound, StoreError
from cogfs.store.schema import Kind, ObjectKind, ThreadRow, Tree, TreeEntry
from cogfs.store.store import Store


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def scratch() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def fill(fd: int, data: bytes) -> None:
    os.ftruncate(fd, 0)
    assert os.pwrite(fd, data, 0) == len(data)


@pytest.mark.parametrize("data", [b"", b"x", b"y" * 47, b"z" * 48, noise(1, 5000), b"text " * 100_000])
def test_blobs_come_back(place: Path, data: bytes) -> None:
    with Store.open(place) as store:
        assert not store.has(bytes(32))
        name = store.put_blob(data)
        assert store.put_blob(memoryview(data)) == name
        assert store.has(name)
        assert store.kind(name) == ObjectKind.BLOB
        assert store.read_blob(name) == data
        assert b"".join(store.read_file(name)) == data
        store.sync()
        assert store.stats().objects == 1
    with Store.open(place) as store:
        assert store.read_blob(name) == data
        assert store.put_blob(data) == name
        assert store.stats().objects == 1
        store.verify_file(name)


def test_a_view_of_larger_items_is_put_byte_by_byte(store: Store) -> None:
    numbers = array.array("Q", range(100))
    assert store.read_blob(store.put_blob(memoryview(numbers))) == numbers.tobytes()


def test_what_is_not_there_is_not_found(store: Store) -> None:
    absent = bytes(range(32))
    for call in (store.kind, store.read_blob, store.read_tree, store.read_file, store.verify_file):
        with pytest.raises(NotFound, match=absent.hex()):
            call(absent)


def test_an_object_of_another_kind_is_not_taken(store: Store) -> None:
    tree = store.put_tree([])
    blob = store.put_blob(b"\x91\x90")
    assert tree != blob
    for call in (store.read_blob, store.read_file, store.verify_file):
        with pytest.raises(Corrupt):
            call(tree)
    with pytest.raises(Corrupt):
        store.read_tree(blob)


def test_trees_come_back(place: Path) -> None:
    entries = [
        TreeEntry(name, Kind.SYMLINK, target=b"to " + name)
        for name in sorted([b" ", b"\xff\xfe", b"\n", "目录".encode(), b"a", b"A", b"..."])
    ]
    with Store.open(place) as store:
        name = store.put_tree(entries)
        assert store.read_tree(name) == Tree(tuple(entries))
        assert store.read_tree(name) is store.read_tree(name)
        assert store.kind(name) == ObjectKind.TREE
        store.sync()
    with Store.open(place) as store:
        assert store.read_tree(name) == Tree(tuple(entries))


@pytest.mark.parametrize(
    "size", [0, 1, 4095, CHUNK_THRESHOLD - 1, CHUNK_THRESHOLD, CHUNK_THRESHOLD + 1, 5 * MAX_PIECE, 9_000_000]
)
def test_files_come_back_whatever_the_hint(store: Store, scratch: int, size: int) -> None:
    data = noise(size, size)
    fill(scratch, data)
    os.lseek(scratch, 17, os.SEEK_SET)
    found = {store.put_file(scratch, hint) for hint in (size, 0, -5, size // 2, size + 1, 100 * 1024 * 1024)}
    assert len(found) == 1
    ((name, read),) = found
    assert read == size
    assert store.kind(name) == (ObjectKind.BLOB if size <= CHUNK_THRESHOLD else ObjectKind.CHUNKS)
    pieces = list(store.read_file(name))
    assert b"".join(pieces) == data
    assert all(len(piece) <= CHUNK_THRESHOLD for piece in pieces)
    store.verify_file(name)
    assert os.lseek(scratch, 0, os.SEEK_CUR) == 17


def test_the_pieces_of_a_changed_large_file_are_shared(store: Store, scratch: int) -> None:
    data = bytearray(noise(5, 8_000_000))
    fill(scratch, bytes(data))
    store.put_file(scratch, len(data))
    before = store.stats()
    data[3_000_000] ^= 1
    fill(scratch, bytes(data))
    name, _ = store.put_file(scratch, len(data))
    after = store.stats()
    assert after.objects == before.objects + 2
    assert after.pack_bytes - before.pack_bytes < MAX_PIECE + 4096
    assert b"".join(store.read_file(name)) == data


def pieces_of(data: bytes) -> list[int]:
    return [len(piece) for piece in cut(io.BytesIO(data).read)]


def test_where_files_are_cut() -> None:
    """Held, since each large file would be stored once more if they were cut elsewhere."""
    data = noise(1, 6_000_000)
    assert pieces_of(data) == [876678, 645098, 582614, 1247151, 518824, 899174, 530460, 358303, 307533, 34165]
    # What is put in moves no cut but the next.
    inserted = data[:3_000_000] + b"inserted" + data[3_000_000:]
    assert pieces_of(inserted) == [
        876678, 645098, 582614, 1247159, 518824, 899174, 530460, 358303, 307533, 34165,
    ]  # fmt: skip
    assert pieces_of(bytes(3_500_000)) == [MAX_PIECE, MAX_PIECE, 3_500_000 - 2 * MAX_PIECE]
    assert pieces_of(b"") == []
    assert pieces_of(b"x") == [1]


@pytest.mark.parametrize("size", [MIN_PIECE, MAX_PIECE, 8 * 1024 * 1024 - 1, 8 * 1024 * 1024, 20_000_001])
def test_pieces_do_not_depend_on_how_they_are_read(size: int) -> None:
    data = noise(size, size)
    pieces = list(cut(io.BytesIO(data).read))
    assert b"".join(pieces) == data
    assert all(MIN_PIECE <= len(piece) <= MAX_PIECE for piece in pieces[:-1])
    # From any cut on, they are the same.
    rest = data[len(pieces[0]) :]
    assert list(cut(io.BytesIO(rest).read)) == pieces[1:]


def test_a_large_file_that_is_appended_to(store: Store) -> None:
    part = noise(7, 1 << 20)
    size = 1 << 28

    def reader(length: int) -> Callable[[int, int], bytes]:
        def read(count: int, offset: int) -> bytes:
            count = min(count, length - offset)
            if count <= 0:
                return b""
            number, start = divmod(offset, len(part))
            # Each part of it is another one, and cheap to make.
            return (number.to_bytes(8) + part[8:])[start : start + count]

        return read

    first, read = store.put_content(reader(size), size)
    assert read == size
    before = store.stats().pack_bytes
    second, read = store.put_content(reader(size + 1024), size, first)
    assert read == size + 1024
    assert store.stats().pack_bytes - before < 100_000
    # Also without being told what it is like.
    third, _ = store.put_content(reader(size + 2048), size)
    assert store.stats().pack_bytes - before < 2 << 20
    assert len({first, second, third}) == 3


def test_a_file_that_cannot_be_read_is_an_error_of_the_system(store: Store, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            store.put_file(fd, 0)
    finally:
        os.close(fd)
    assert store.stats().objects == 0


def test_incompressible_data_is_stored_as_it_is_and_text_is_not(store: Store) -> None:
    random_name, text_name = store.put_blob(noise(2, 10_000)), store.put_blob(b"text " * 2000)
    assert store._objects.locate(random_name).codec == codec.Codec.RAW
    assert store._objects.locate(text_name).codec == codec.Codec.ZSTD
    assert store._objects.locate(text_name).stored < 500


def test_packs_are_bounded_and_a_larger_object_gets_its_own(place: Path) -> None:
    limit = 20_000
    datas = [noise(index, 6000) for index in range(20)] + [noise(99, 50_000)] + [noise(100, 100)]
    with Store.open(place, pack_limit=limit) as store:
        names = [store.put_blob(data) for data in datas]
        store.sync()
        sizes = {path.name: path.stat().st_size for path in (place / "packs").iterdir()}
        assert len(sizes) == store.stats().packs == 9
        assert sum(sizes.values()) == store.stats().pack_bytes
        assert sum(size > limit for size in sizes.values()) == 1
    with Store.open(place, pack_limit=limit) as store:
        assert [store.read_blob(name) for name in names] == datas


def test_more_packs_than_kept_open(place: Path) -> None:
    datas = [noise(index, 500) for index in range(150)]
    with Store.open(place, pack_limit=600) as store:
        names = [store.put_blob(data) for data in datas]
        store.sync()
        assert store.stats().packs == 150
        open_before = len(os.listdir("/proc/self/fd"))
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(store.read_blob, names * 3)) == datas * 3
        assert len(os.listdir("/proc/self/fd")) <= open_before + 1


def test_eight_threads_put_sync_write_and_read(place: Path) -> None:
    datas = [noise(index % 60, 200 + index % 60 * 50) for index in range(600)]
    barrier = threading.Barrier(8)

    def work(worker: int) -> list[bytes]:
        barrier.wait()
        order = list(range(len(datas)))
        random.Random(worker).shuffle(order)
        names = [b""] * len(datas)
        for count, index in enumerate(order):
            names[index] = store.put_blob(datas[index])
            assert store.read_blob(names[index]) == datas[index]
            if count % 50 == worker:
                store.sync()
            if count % 50 == 25 + worker:
                with store.write() as rows:
                    rows.put_thread(ThreadRow(f"t{worker}", "", "", count, 1, count))
                with store.read() as reader:
                    assert reader.thread(f"t{worker}").entry_count == count
        return names

    with Store.open(place, pack_limit=100_000, map_size=1 << 20) as store:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(8)))
        assert all(names == results[0] for names in results)
        store.sync()
        assert store.stats().objects == 60
    with Store.open(place) as store:
        assert [store.read_blob(name) for name in results[0]] == datas
        assert store.stats().objects == 60
        # Every record of every pack is whole, and what the index names is among them.
        found = {(number, offset) for number in store._packs.numbers() for offset, _ in store._packs.scan(number)}
        assert {store._objects.locate(name)[:2] for name in results[0]} <= found


def test_the_same_object_from_many_threads_is_stored_once(store: Store) -> None:
    data = noise(7, 300_000)
    barrier = threading.Barrier(8)

    def put(_: int) -> bytes:
        barrier.wait()
        return store.put_blob(data)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(put, range(8)))) == 1
    assert store.stats().pack_bytes < 2 * len(data)


def test_a_closed_store_says_so(place: Path) -> None:
    store = Store.open(place)
    name = store.put_blob(b"pending")
    store.close()
    store.close()
    for call in (lambda: store.read_blob(name), lambda: store.put_blob(b"new"), store.sync, store.stats):
        with pytest.raises(StoreError, match="closed"):
            call()
    with pytest.raises(StoreError, match="closed"), store.read():
        pass
    with pytest.raises(StoreError, match="closed"), store.write():
        pass
