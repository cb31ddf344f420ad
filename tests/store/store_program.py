"""A process of its own that works on a store, for tests that kill it or fill its disk.

``store_program.py work STORE COUNT``: writes COUNT rounds and prints ``done N`` after each commit. The crash
label comes from the environment.

``store_program.py full DIRECTORY``: DIRECTORY is a small filesystem that this process may fill up.

``store_program.py insist STORE``: writes rounds, each again until it succeeds, and prints the errors met. One call
of the system fails somewhere, by a library that is loaded before all others.

``store_program.py put STORE COUNT FIRST``: puts COUNT objects from number FIRST on, prints ``put N`` after each, and
commits nothing.

``store_program.py leave STORE FILE``: puts FILE and a directory that holds it, prints both names, and ends at once.

``store_program.py commit STORE``: opens the store and syncs it.

``store_program.py hold STORE``: opens the store, prints ``open``, and waits for its input to end.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from cogfs.store.errors import NoSpace, NotFound, StoreError
from cogfs.store.schema import EntryKind, EntryRow, Kind, ThreadRow, TreeEntry
from cogfs.store.store import Store

PACK_LIMIT = 100_000
MAP_SIZE = 256 * 1024
BLOBS = 6
#: Of these one that is like that of the round before, and is put against it.
VERSIONS = 5
LINES = tuple(random.Random(f"line {index}").randbytes(40).hex() for index in range(60))


def content(number: int, index: int) -> bytes:
    if index == VERSIONS:
        return versions(number)
    size = [0, 10, 3000, 40_000, 90_000][index]
    source = random.Random(f"{number} {index}")
    return source.randbytes(size) if index % 2 else source.randbytes(size // 20 + 1) * 20


def versions(number: int) -> bytes:
    """A text of which each version has a few lines that the one before has not."""
    lines = list(LINES)
    for version in range(max(0, number - 20), number + 1):
        lines[version % len(lines)] = f"changed in {version}"
    return "\n".join(lines).encode()


def open_store(path: Path) -> Store:
    return Store.open(path, pack_limit=PACK_LIMIT, map_size=MAP_SIZE)


def check(store: Store) -> int:
    """Everything that a committed row names is whole; returns how many rounds there are."""
    count = 0
    with store.read() as reader:
        rows = list(reader.entries("t"))
        assert reader.branch("t", rows[-1].id if rows else "") == rows
        assert not rows or reader.thread("t").leaf_id == rows[-1].id
    for count, row in enumerate(rows, 1):
        assert row.sequence == count - 1
        tree = store.read_tree(bytes.fromhex(row.content))
        for index, entry in enumerate(tree.entries):
            assert store.read_blob(entry.hash) == content(row.sequence, index)
    for number in store._packs.numbers():
        list(store._packs.scan(number))
    return count


def work(path: Path, count: int) -> None:
    with open_store(path) as store:
        start = check(store)
        last, last_tree = b"", b""
        if start:
            with store.read() as reader:
                last_tree = bytes.fromhex(list(reader.entries("t"))[-1].content)
            last = store.read_tree(last_tree).entries[VERSIONS].hash
        for number in range(start, start + count):
            names = [store.put_blob(content(number, index)) for index in range(VERSIONS)]
            names.append(store.put_blob(content(number, VERSIONS), last))
            last = names[-1]
            if number % 2:
                store.sync()
            tree = store.put_tree(
                [TreeEntry(b"%d" % index, Kind.FILE, 0o644, 0, name) for index, name in enumerate(names)],
                last_tree,
            )
            last_tree = tree
            with store.write() as rows:
                parent = f"e{number - 1}" if number else ""
                rows.put_entry(EntryRow(f"e{number}", "t", parent, EntryKind.USER, tree.hex(), "{}", 0, number))
                rows.put_thread(ThreadRow("t", "", f"e{number}", number + 1, 0, number))
            print("done", number, flush=True)
        store.put_blob(b"never committed" * 1000)


def fill_up(path: Path) -> None:
    """Leaves no byte free on the filesystem of ``path``."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 20, 4096, 512, 1):
        try:
            while True:
                os.write(fd, bytes(size))
        except OSError:
            pass
    os.close(fd)


def thread_row(number: int) -> ThreadRow:
    return ThreadRow("t", "w" * 3000, "", number, 0, 0)


def full(place: Path) -> None:
    ballast = place / "ballast"
    path = place / "store"

    # A new store on a full disk: refused, and made once there is room.
    fill_up(ballast)
    for _ in range(2):
        try:
            Store.open(path)
        except NoSpace as error:
            assert "space" in str(error)
        else:
            raise AssertionError("a store was made on a full disk")
    ballast.unlink()

    reserve = place / "reserve"
    reserve.write_bytes(bytes(1 << 20))
    stored: dict[bytes, bytes] = {}
    with Store.open(path, pack_limit=1_000_000) as store:

        def put_until_full(size: int) -> None:
            while True:
                data = os.urandom(size)
                stored[store.put_blob(data)] = data

        def check_all() -> None:
            assert all(store.read_blob(name) == data for name, data in stored.items())

        # The pack runs full, with large and then ever smaller objects.
        for size in (300_000, 20_000, 700):
            try:
                put_until_full(size)
            except NoSpace:
                check_all()
        assert len(stored) > 10
        # With nothing left the index cannot name them; they can still be read.
        fill_up(ballast)
        refused = 0
        for _ in range(3):
            try:
                store.sync()
            except NoSpace:
                refused += 1
            try:
                with store.write() as rows:
                    rows.put_thread(thread_row(1))
            except NoSpace:
                refused += 1
            check_all()
        assert refused == 6, refused
        with store.read() as reader:
            assert reader.threads() == []
        # With a little room again everything goes on.
        reserve.unlink()
        with store.write() as rows:
            rows.put_thread(thread_row(2))
        check_all()
        committed = dict(stored)
        fill_up(ballast)
        try:
            with store.write() as rows:
                rows.put_thread(thread_row(3))
                for inode in range(2000):
                    rows.put_link("w", inode, inode, tuple(range(2**40, 2**40 + 60)))
        except NoSpace:
            pass
        else:
            raise AssertionError("rows were written to a full disk")
        with store.read() as reader:
            assert reader.thread("t") == thread_row(2)
            assert reader.link("w", 1) is None
    # A store on a full disk can be opened and read.
    with Store.open(path) as store:
        assert all(store.read_blob(name) == data for name, data in committed.items())
        with store.read() as reader:
            assert reader.thread("t") == thread_row(2)
        try:
            store.put_blob(os.urandom(100_000))
        except NoSpace:
            pass
        else:
            raise AssertionError("an object was written to a full disk")
        ballast.unlink()
        name = store.put_blob(b"after" * 1000)
        store.sync()
    with Store.open(path) as store:
        assert store.read_blob(name) == b"after" * 1000
        for number in store._packs.numbers():
            list(store._packs.scan(number))
        try:
            store.read_blob(bytes(32))
        except NotFound:
            print("well")


def insist(path: Path) -> None:
    errors: list[str] = []
    stored: dict[bytes, bytes] = {}
    expected: list[str] = []

    def check_all(store: Store) -> None:
        assert all(store.read_blob(name) == data for name, data in stored.items())
        with store.read() as reader:
            assert [row.id for row in reader.threads()] == expected[::-1]

    def once(store: Store, number: int) -> bool:
        try:
            data = os.urandom(3000)
            stored[store.put_blob(data)] = data
            with store.write() as rows:
                rows.put_thread(ThreadRow(f"t{number:02}", "", "", 0, 0, 0))
        except StoreError as error:
            errors.append(type(error).__name__)
            return False
        expected.append(f"t{number:02}")
        return True

    store = None
    while store is None:
        try:
            store = Store.open(path, map_size=MAP_SIZE, pack_limit=20_000)
        except StoreError as error:
            errors.append(type(error).__name__)
    with store:
        for number in range(10):
            while not once(store, number):
                check_all(store)
            check_all(store)
    with Store.open(path) as store:
        check_all(store)
    print(*errors)


def item(number: int) -> bytes:
    """Of any size: some are larger than what a page holds, some fill a pack by themselves."""
    source = random.Random(f"item {number}")
    size = source.choice([0, 20, 700, 5000, 30_000, 150_000])
    return b"%d " % number + (source.randbytes(size) if number % 3 else source.randbytes(size // 30 + 1) * 30)


def put(path: Path, count: int, first: int) -> None:
    with open_store(path) as store:
        for number in range(first, first + count):
            store.put_blob(item(number))
            print("put", number, flush=True)


def leave(path: Path, file: Path) -> None:
    store = open_store(path)
    name, size = store.put_file(os.open(file, os.O_RDONLY), 0)
    tree = store.put_tree([TreeEntry(b"large", Kind.FILE, size=size, hash=name)])
    print(name.hex(), tree.hex(), flush=True)
    os._exit(0)


def commit(path: Path) -> None:
    with open_store(path) as store:
        store.sync()


def hold(path: Path) -> None:
    with Store.open(path):
        print("open", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "work":
        work(where, int(sys.argv[3]))
    elif what == "full":
        full(where)
    elif what == "put":
        put(where, int(sys.argv[3]), int(sys.argv[4]))
    elif what == "leave":
        leave(where, Path(sys.argv[3]))
    elif what == "commit":
        commit(where)
    elif what == "insist":
        insist(where)
    else:
        hold(where)
