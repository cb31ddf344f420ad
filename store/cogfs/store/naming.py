"""Which rows name objects. **A new kind of row that has a hash in it belongs into ``names_in``**: what no row names is
collected.

The objects that a row needs are those that it names and all that these name in turn. Trees name what is in them, chunk
lists their pieces, and an object that is stored as a difference its base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from cogfs.store.database import Database, Table
from cogfs.store.errors import Corrupt
from cogfs.store.schema import NO_HASH, DirectoryRow, Hash, RecordState, SnapshotRow

#: Rows that are read in one transaction.
_ROWS = 200


class Root(NamedTuple):
    """Something that names an object."""

    name: Hash
    #: Empty when it is no snapshot.
    snapshot_id: str
    workspace_id: str


def names_in(row: object) -> Iterable[Hash]:
    """The objects that a row names.

    Snapshots: the tree at the root. The recorded state of a workspace: its root, and each directory's tree and all that
    is in it, since a later snapshot takes these over without putting them again. A boundary, a journal and an undo name
    snapshots only, and threads too.
    """
    if isinstance(row, SnapshotRow | RecordState):
        return (row.root.hash,) if row.root is not None else ()
    if isinstance(row, DirectoryRow):
        return (row.tree_hash, *(one.entry.hash for one in row.rows if one.entry.hash != NO_HASH))
    return ()


#: The tables of these rows, with how they are decoded.
_TABLES: dict[Table, Callable[[bytes], object]] = {
    Table.SNAPSHOTS: msgspec.msgpack.Decoder(SnapshotRow).decode,
    Table.RECORD_STATES: msgspec.msgpack.Decoder(RecordState).decode,
    Table.DIRECTORIES: msgspec.msgpack.Decoder(DirectoryRow).decode,
}


def roots(database: Database) -> Iterator[Root]:
    """All names in all rows, some rows at a time: each row as it is when its turn comes.

    Corrupt when a row cannot be read: then nothing is known of what it names.
    """
    for table, decode in _TABLES.items():
        start = b""
        while True:
            rows = []
            with database.view() as view:
                for pair in view.scan(table, start=start):
                    rows.append(pair)
                    if len(rows) == _ROWS:
                        break
            for key, value in rows:
                try:
                    row = decode(value)
                except (msgspec.MsgspecError, ValueError) as error:
                    raise Corrupt(f"the index has no valid row {key!r} of {table.value}: {error}") from error
                snapshot_id, workspace_id = "", key.partition(b"\0")[0].decode(errors="replace")
                if isinstance(row, SnapshotRow):
                    snapshot_id, workspace_id = row.id, row.workspace_id
                for name in names_in(row):
                    yield Root(name, snapshot_id, workspace_id)
            if len(rows) < _ROWS:
                break
            start = rows[-1][0] + b"\0"
