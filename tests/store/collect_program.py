"""A process of its own that collects in a store, for tests that kill it or give it little room.

``collect_program.py fill STORE COUNT``: takes COUNT snapshots, of which most of what is in each is its own.

``collect_program.py collect STORE``: deletes all snapshots but each fourth and collects. The crash label comes from the
environment.

``collect_program.py versions STORE COUNT``: takes COUNT snapshots of which each is like the one before.

``collect_program.py repack STORE``: repacks. The crash label comes from the environment.

``collect_program.py small DIRECTORY``: DIRECTORY is a small filesystem, which is filled up but for one pack.

``collect_program.py tight DIRECTORY``: likewise, but for two packs and with versions of files, and
is repacked.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from cogfs.store import groups
from cogfs.store.errors import NoSpace
from cogfs.store.schema import Kind, TreeEntry
from cogfs.store.store import Store
from tests.store.rows import snapshot_row
from tests.store.versions import Versions

PACK_LIMIT = 60_000
MAP_SIZE = 256 * 1024
FILES = 7
#: One that is like that of the snapshot before, and is put against it.
VERSIONS = 6
#: Files of which there are versions only.
VERSIONED = 4
LINES = tuple(random.Random(f"line {line}").randbytes(20).hex() for line in range(40))


def content(snapshot: int, index: int) -> bytes:
    if index == VERSIONS:
        lines = list(LINES)
        for version in range(max(0, snapshot - 20), snapshot + 1):
            lines[version % len(lines)] = f"changed in {version}"
        return "\n".join(lines).encode()
    # The last two are those of some neighbours, too.
    source = random.Random(f"{snapshot // 5 if index > VERSIONS - 3 else snapshot} {index}")
    return source.randbytes([0, 300, 2500, 4000, 9000, 700][index])


def open_store(path: Path) -> Store:
    return Store.open(path, pack_limit=PACK_LIMIT, map_size=MAP_SIZE)


def fill(store: Store, first: int, count: int) -> None:
    like: list[bytes] = []
    above = b""
    for number in range(first, first + count):
        entries: list[TreeEntry] = []
        for index in range(FILES):
            data = content(number, index)
            entries.append(TreeEntry(b"%d" % index, Kind.FILE, size=len(data), hash=put(store, data, index, like)))
        below = store.put_tree(entries, like[-1] if like else b"")
        above = store.put_tree([TreeEntry(b"below", Kind.DIRECTORY, hash=below)], above)
        like = [*(entry.hash for entry in entries), below]
        tree = above
        with store.write() as rows:
            rows.put_snapshot(snapshot_row(f"s{number:04}", tree))


def put(store: Store, data: bytes, index: int, like: list[bytes]) -> bytes:
    return store.put_blob(data, like[index] if like else b"")


def thin_out(store: Store) -> None:
    with store.read() as reader:
        ids = [row.id for row in reader.snapshots("w")]
    with store.write() as rows:
        for name in ids:
            if int(name[1:]) % 4:
                rows.delete_snapshot(name)


def check(store: Store) -> int:
    """All snapshots are whole; returns how many there are."""
    with store.read() as reader:
        rows = reader.snapshots("w")
    for row in rows:
        assert row.root is not None
        below = store.read_tree(row.root.hash).entries[0]
        for index, entry in enumerate(store.read_tree(below.hash).entries):
            assert b"".join(store.read_file(entry.hash)) == content(int(row.id[1:]), index)
    return len(rows)


def collect(path: Path) -> None:
    with open_store(path) as store:
        thin_out(store)
        print("thinned", flush=True)
        assert not store.collect(grace=0, thorough=True).deferred


def repack(path: Path) -> None:
    with open_store(path) as store:
        done = store.repack(grace=0)
        assert not done.deferred, done
        print(done.groups, done.index, flush=True)


def tight(place: Path) -> None:
    limit = 1_000_000
    # A group takes as much less than a pack as it does otherwise.
    groups.GROUP_LIMIT = 1024 * 1024
    reserve = place / "reserve"
    # One pack for the groups, one for the collection, and the index.
    room = 5 * limit
    reserve.write_bytes(bytes(room))
    source = random.Random(1)
    lines = {name: [source.randbytes(60).hex() for _ in range(100)] for name in range(20)}
    blobs: dict[bytes, bytes] = {}
    with Store.open(place / "store", pack_limit=limit, map_size=MAP_SIZE) as store:
        names: dict[int, bytes] = {}
        count = 0
        try:
            while True:
                entries = []
                for name, text in lines.items():
                    for _ in range(8):
                        text[source.randrange(100)] = source.randbytes(60).hex()
                    data = "\n".join(text).encode()
                    names[name] = store.put_blob(data, names.get(name, b""))
                    blobs[names[name]] = data
                    entries.append(TreeEntry(b"%02d" % name, Kind.FILE, size=len(data), hash=names[name]))
                tree = store.put_tree(entries)
                with store.write() as rows:
                    rows.put_snapshot(snapshot_row(f"s{count:05}", tree))
                count += 1
        except NoSpace:
            pass
        assert count > 100, count
        reserve.unlink()
        before = store.usage().stored
        done = store.repack(grace=0)
        assert done.groups > 3, done
        assert {one.check for one in store.check(data=True).problems} == {"snapshots"}  # There is no workspace.
        assert store.usage().stored < 0.95 * before, (store.usage().stored, before, done)
        # It leaves room for a collection.
        assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize > 2 * limit
        assert not store.collect(grace=0, thorough=True).deferred
    with Store.open(place / "store", pack_limit=limit) as store, store.read() as reader:
        for row in reader.snapshots("w"):
            assert row.root is not None
            for entry in store.read_tree(row.root.hash).entries:
                assert store.read_blob(entry.hash) == blobs[entry.hash]
    print("well")


def small(place: Path) -> None:
    # As much as one pack.
    reserve = place / "reserve"
    reserve.write_bytes(bytes(8_000_000))
    with Store.open(place / "store", pack_limit=8_000_000) as store:
        count = 0
        try:
            while True:
                fill(store, count, 1)
                count += 1
        except NoSpace:
            pass
        assert count > 200, count
        reserve.unlink()
        thin_out(store)
        done = store.collect(grace=0, thorough=True)
        assert not done.deferred, done
        assert done.objects > 500, done
        kept = check(store)
        assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize > 2_000_000
        fill(store, 10_000, 50)
        assert check(store) == kept + 50
    with Store.open(place / "store", pack_limit=8_000_000) as store:
        assert check(store) == kept + 50
    print("well")


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "fill":
        with open_store(where) as opened:
            fill(opened, 0, int(sys.argv[3]))
    elif what == "collect":
        collect(where)
    elif what == "versions":
        with open_store(where) as opened:
            Versions(opened, VERSIONED).go_on(int(sys.argv[3]))
    elif what == "repack":
        repack(where)
    elif what == "tight":
        tight(where)
    else:
        small(where)
