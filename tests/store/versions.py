"""Files of which each version is like the one before, and snapshots of them, for tests of the store."""

from __future__ import annotations

import functools
import random

from cogfs.store.schema import Kind, TreeEntry, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from tests.store.rows import snapshot_row


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@functools.lru_cache
def _lines(seed: int) -> tuple[str, ...]:
    return tuple(noise(seed * 1000 + index, 20).hex() for index in range(200))


def version(number: int, seed: int = 0) -> bytes:
    """A text of 8,000 bytes; each version differs in one line from the one before."""
    lines = list(_lines(seed))
    for changed in range(number):
        lines[changed * 7 % 200] = f"changed in {changed}"
    return "\n".join(lines).encode()


class Versions:
    """Snapshots of some files in a directory, of which each changes from one to the next."""

    def __init__(self, store: Store, files: int = 4, count: int = 0) -> None:
        """``count``: snapshots that the store has already."""
        self.files = files
        self.count = count
        self.blobs: dict[bytes, bytes] = {}
        #: The newest version of each file.
        self.newest: dict[int, bytes] = {}
        self._tree = b""
        self._store = store
        with store.write() as rows:
            rows.put_workspace(WorkspaceRow("w", b"/nowhere", b"", WorkspaceOptions(), 0))

    def go_on(self, count: int) -> None:
        """Takes ``count`` more snapshots."""
        for _ in range(count):
            entries = []
            for seed in range(self.files):
                data = version(self.count, seed)
                name = self._store.put_blob(data, self.newest.get(seed, b""))
                self.blobs[name] = data
                self.newest[seed] = name
                entries.append(TreeEntry(b"%d" % seed, Kind.FILE, size=len(data), hash=name))
            self._tree = self._store.put_tree(sorted(entries, key=lambda entry: entry.name), self._tree)
            above = self._store.put_tree([TreeEntry(b"below", Kind.DIRECTORY, hash=self._tree)])
            with self._store.write() as rows:
                rows.put_snapshot(snapshot_row(f"s{self.count:05}", above))
            self.count += 1


def check_versions(store: Store) -> int:
    """The store is whole, and so are all snapshots of ``Versions``; returns how many there are."""
    assert store.check(data=True).problems == []
    with store.read() as reader:
        rows = [row for row in reader.snapshots("w") if row.id.startswith("s0")]
    for row in rows:
        assert row.root is not None
        below = store.read_tree(row.root.hash).entries[0]
        for entry in store.read_tree(below.hash).entries:
            assert store.read_blob(entry.hash) == version(int(row.id[1:]), int(entry.name))
    return len(rows)
