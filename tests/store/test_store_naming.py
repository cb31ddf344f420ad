"""Which rows name objects, and what these take of the space."""

from __future__ import annotations

import random
import typing

import msgspec

from cogfs.store import schema
from cogfs.store.naming import names_in
from cogfs.store.rows import decodes
from cogfs.store.schema import DirectoryRow, Kind, RecordState, SnapshotRow, StatRow, Sums, TreeEntry
from cogfs.store.store import Store
from tests.store.rows import snapshot_row

KNOWN = {SnapshotRow, RecordState, DirectoryRow}


def _names_objects(kind: object) -> bool:
    """Whether a value of this type holds the hash of an object: an entry of a tree does, and what is called so."""
    if kind is TreeEntry:
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return any("hash" in name or _names_objects(hint) for name, hint in hints.items())
    return any(_names_objects(part) for part in typing.get_args(kind))


def test_every_row_that_names_objects_is_known_to_collections() -> None:
    rows = [
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__.endswith(("Row", "State"))
    ]
    assert len(rows) > 10
    # A StatRow is a part of a DirectoryRow.
    assert {kind for kind in rows if _names_objects(kind)} == KNOWN | {StatRow}
    assert len(decodes()) >= 10


def test_what_they_name() -> None:
    entry = TreeEntry(b"f", Kind.FILE, hash=b"f" * 32)
    rows = tuple(StatRow(one, 1, 0, 0, 0, 0, 1) for one in (entry, TreeEntry(b"l", Kind.SYMLINK, target=b"x")))
    assert list(names_in(DirectoryRow(b"t" * 32, rows, 0, 2, b"", Sums()))) == [b"t" * 32, b"f" * 32]
    assert list(names_in(snapshot_row("s", b"r" * 32))) == [b"r" * 32]
    assert list(names_in(snapshot_row("s", None))) == []
    assert list(names_in(RecordState(None, 2, (), -1))) == []


def test_use_of_space_against_a_count_of_each_object(store: Store) -> None:
    chance = random.Random(5)
    reached: dict[tuple[str, str], set[bytes]] = {}
    for number in range(30):
        workspace = f"w{number % 3}"
        below = []
        for index in range(4):
            names = [store.put_blob(b"%d" % chance.randrange(60) * 50) for _ in range(3)]
            tree = store.put_tree([TreeEntry(b"%d" % at, Kind.FILE, hash=name) for at, name in enumerate(names)])
            below.append((TreeEntry(b"%d" % index, Kind.DIRECTORY, hash=tree), {tree, *names}))
        root = store.put_tree([entry for entry, _ in below])
        with store.write() as rows:
            rows.put_snapshot(snapshot_row(f"s{number}", root, workspace))
        reached[workspace, f"s{number}"] = {root}.union(*(names for _, names in below))
    recorded = store.put_blob(b"recorded" * 9)
    with store.write() as rows:
        rows.put_directory("w1", 2, DirectoryRow(recorded, (), 0, 2, b"", Sums()))
    reached["w1", ""] = {recorded}
    garbage = store.put_blob(b"garbage" * 99)
    store.sync()

    def size(names: set[bytes]) -> int:
        places = [store._objects.locate(name) for name in names]
        return sum(where.end - where.offset for where in places)

    found = store.usage()
    everything = set().union(*reached.values())
    assert found.needed == size(everything)
    assert found.stored == size(everything | {garbage})
    for workspace, mine in found.workspaces.items():
        own = set().union(*(names for key, names in reached.items() if key[0] == workspace))
        others = set().union(*(names for key, names in reached.items() if key[0] != workspace))
        assert (mine.unique, mine.shared) == (size(own - others), size(own & others))
        for snapshot, its in mine.snapshots.items():
            own = reached[workspace, snapshot]
            others = set().union(*(names for key, names in reached.items() if key != (workspace, snapshot)))
            assert its.unique == size(own - others)
            assert its.shared >= size(own & others)

    # In whatever order they are to go: as few as possible, the first ones, whoever has the rest.
    order = [f"s{number}" for number in range(30) if number not in (4, 29)]
    chance.shuffle(order)
    for limit in (0, size(reached["w1", ""]), *(round(found.needed * share) for share in (0.4, 0.7, 0.9, 1)), 1 << 40):
        gone, needed = store.too_many(order, limit)
        assert gone == order[: len(gone)]
        assert needed == size(set().union(*(names for (_, name), names in reached.items() if name not in gone)))
        assert needed <= limit or gone == order
        if gone:
            with_one_more = [names for (_, name), names in reached.items() if name not in gone[:-1]]
            assert size(set().union(*with_one_more)) > limit
