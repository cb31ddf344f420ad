"""Repair of a store whose packs or index are damaged, while all else goes on.

1. All records of all packs are read and verified, also those behind damaged ones; what is stored against another object
   once that is. Where the index says of an object
   that it is where it is not, or has no row of it though something needs it, it gets the place of a good copy. What is
   in a pack that is cut off or has lost its header is moved to another one.
2. What has no good copy is made again: a directory out of what is recorded of the workspace, and the content of a file
   by ``retake``, which reads the file that has it now.
3. What is still not whole is dropped from the index and written down as lost, so that it is put anew when it comes
   again and collections need not spare everything for its sake. Rows that cannot be read are dropped when they name
   objects. What is recorded of directories and names a lost content is dropped too, and the next checkpoint looks at
   all files.

Each change is one commit, in which what is wrong is looked at again. Snapshots stay, and are named with the paths that
are lost in them. A disk that refuses to be read ends the repair: nothing is dropped for that, it may be over later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from cogfs.store import chains, codec, groups, trees
from cogfs.store.check import AffectedPath, Check, record_trouble
from cogfs.store.database import Change, Database, Table
from cogfs.store.errors import Corrupt, NotFound
from cogfs.store.gc import Edit
from cogfs.store.hashing import hash_object
from cogfs.store.location import Location
from cogfs.store.naming import Root, names_in, roots
from cogfs.store.objects import Objects
from cogfs.store.packs import Packs, Record
from cogfs.store.reach import Reach
from cogfs.store.rows import decodes
from cogfs.store.schema import DirectoryRow, Hash, ObjectKind, RecordState
from cogfs.store.steps import step

_ROWS = 1000
_encoder = msgspec.msgpack.Encoder()
_directory = msgspec.msgpack.Decoder(DirectoryRow)
_state = msgspec.msgpack.Decoder(RecordState)
#: Tables whose rows name objects. What cannot be read of them keeps collections from knowing what is needed.
_NAMING = (Table.SNAPSHOTS, Table.RECORD_STATES, Table.DIRECTORIES)

#: Takes contents that are lost from files that may have them: gets where they are needed.
Retake = Callable[[list[AffectedPath]], None]


@dataclass
class Repaired:
    """What a repair did."""

    #: Objects that were verified.
    intact: int = 0
    #: Objects that got the place of another copy, or a row again.
    found: int = 0
    #: Objects that were made again from what is recorded, or taken again from files.
    remade: int = 0
    #: Objects that are lost, and rows that could not be read and were dropped.
    lost: int = 0
    rows_dropped: int = 0
    dropped: list[str] = field(default_factory=list)
    #: What is lost in snapshots.
    affected: list[AffectedPath] = field(default_factory=list)


class Repair:
    """One repair."""

    def __init__(self, database: Database, objects: Objects, packs: Packs, edit: Edit) -> None:
        """``edit`` as for a collection."""
        self._database = database
        self._objects = objects
        self._packs = packs
        self._edit = edit
        self._groups = groups.Groups(packs)
        self._report = Repaired()
        #: Objects that are where the index says, and good copies in other places.
        self._good: set[Hash] = set()
        self._others: dict[Hash, Location] = {}
        #: Copies that cannot be decoded yet, since their base is damaged or missing: it may come again.
        self._unproved: list[tuple[Hash, Location]] = []

    def run(self, more_roots: Callable[[], Iterable[Root]], retake: Retake) -> Repaired:
        """The whole of it. Store errors leave everything as it was, or better."""
        # What is pending is in the index then.
        self._edit(lambda change: None)
        self._drop_unreadable_rows()
        self._correct_index()
        self._leave_damaged_packs()
        bad = self._needed_and_bad(more_roots)
        if bad:
            ever = set(bad)
            self._remake_trees(bad)
            # A directory that is there again tells what it needs.
            bad = self._needed_and_bad(more_roots)
            ever |= bad.keys()
            affected = self._affected(bad)
            if bad:
                retake([one for one in affected if one.snapshot_id])
                self._edit(lambda change: None)
                bad = self._needed_and_bad(more_roots)
            self._report.remade = len(ever - bad.keys())
            self._report.affected = self._affected(bad)
        self._lose(bad)
        return self._report

    # --- rows

    def _drop_unreadable_rows(self) -> None:
        for table in _NAMING:
            decode = decodes()[table]
            for key, value in self._pairs(table):
                try:
                    decode(value)
                except (msgspec.MsgspecError, ValueError):
                    self._drop_row(table, key, value)

    def _drop_row(self, table: Table, key: bytes, value: bytes) -> None:
        def edit(change: Change) -> None:
            if change.get(table, key) != value:
                return
            change.delete(table, key)
            if table is Table.SNAPSHOTS:
                for listed in change.keys(Table.WORKSPACE_SNAPSHOTS):
                    if listed.endswith(b"\0" + key):
                        change.delete(Table.WORKSPACE_SNAPSHOTS, listed)
            else:
                _look_anew(change, key.partition(b"\0")[0])

        self._edit(edit)
        self._report.rows_dropped += 1
        self._report.dropped.append(f"{table.value}: {key.decode(errors='replace')}")

    # --- index

    def _correct_index(self) -> None:
        """Gives each object whose place in the index is wrong that of a good copy, and drops it where there is none."""
        for number, end in sorted(self._objects.ends().items()):
            for record in self._packs.salvage(number, end):
                header = record.header
                if header.codec == codec.Codec.GROUP:
                    if not groups.wrong(header.kind, record.payload):
                        for name, location in groups.places(header.kind, number, record.offset, record.payload):
                            self._sort(name, location)
                    continue
                location = Location(
                    number, record.offset, header.stored, header.raw, header.kind, header.codec, header.base
                )
                if location.is_delta:
                    self._unproved.append((header.hash, location))
                elif _is_whole(record):
                    self._sort(header.hash, location)
        bases = {location.base for location in self._prove()}
        self._report.intact = len(self._good)
        for name, row in list(self._pairs(Table.OBJECTS)):
            if name not in self._good:
                self._correct(name, row)
        for name in bases:
            if self._objects.find(name) is None and name in self._others:
                self._put_back(name, self._others[name])

    def _sort(self, name: Hash, location: Location) -> None:
        """There is a good copy of an object at ``location``."""
        if self._objects.indexed(name) == location:
            self._good.add(name)
        else:
            self._others[name] = location

    def _prove(self) -> list[Location]:
        """Finds out which of the unproved copies are good: bases first, and what is stored against them then. What can
        be decoded though its base is not whole is put anew without it. Gives the places of those that were proved."""
        proved = []
        strictly = True
        while self._unproved:
            left = []
            for name, location in self._unproved:
                data = None
                if not strictly or location.base in self._good or location.base in self._others:
                    data = self._decoded(name, location)
                if data is None:
                    left.append((name, location))
                elif strictly:
                    proved.append(location)
                    self._sort(name, location)
                elif name not in self._good:
                    self._objects.renew(name, location.kind, data)
                    self._good.add(name)
                    self._report.found += 1
            if len(left) < len(self._unproved):
                strictly = True
            elif strictly:
                strictly = False
            else:
                break
            self._unproved = left
        return proved

    def _decoded(self, name: Hash, location: Location) -> bytes | None:
        try:
            return chains.read(self._groups, chains.follow(self._copy_of, name, location))
        except Corrupt:
            return None

    def _copy_of(self, name: Hash) -> Location | None:
        return self._others.get(name) or self._objects.find(name)

    def _put_back(self, name: Hash, location: Location) -> None:
        """Gives an object that has no row one again."""
        self._edit(lambda change: self._objects.place(name, location, change))
        self._report.found += 1

    def _correct(self, name: Hash, row: bytes) -> None:
        try:
            location = Location.decode(row)
            # It may have been moved, or put, since the packs were looked through.
            data = self._objects.read(name, location.kind)
            if not location.is_grouped and not record_trouble(self._objects, self._packs, name, location):
                return
            # Its bytes are right, and the record does not say so, or something else in its group is damaged: a
            # collection could not move it.
            self._objects.renew(name, location.kind, data)
            self._report.found += 1
            return
        except (Corrupt, NotFound, ValueError):
            pass
        other = self._others.get(name)

        def edit(change: Change) -> None:
            # Put anew meanwhile, it has another place.
            if change.get(Table.OBJECTS, name) == row:
                self._objects.place(name, other, change)

        step("repair.place")
        self._edit(edit)
        self._report.found += other is not None

    def _leave_damaged_packs(self) -> None:
        for number, end in sorted(self._objects.ends().items()):
            if not self._packs.trouble(number, end):
                continue
            self._packs.leave(number)
            self._edit(lambda change: None)
            start = b""
            records: dict[int, list[tuple[Hash, Location]]] = {}
            while part := self._objects.located(start, _ROWS):
                start = part[-1][0] + b"\0"
                for name, location in part:
                    if location.pack == number:
                        records.setdefault(location.offset, []).append((name, location))
            for members in records.values():
                self._objects.move(members)
            self._edit(lambda change, number=number: self._objects.give_up(number, change))  # type: ignore[misc]
            self._objects.remove(number)

    # --- what is needed

    def _needed_and_bad(self, more_roots: Callable[[], Iterable[Root]]) -> dict[Hash, str]:
        """What is needed and not there, once all that has a copy in some pack has its row again."""
        self._prove()
        while True:
            reach = Reach(self._objects)
            reach.mark(root.name for root in roots(self._database))
            reach.mark(root.name for root in more_roots())
            again = {name: self._others[name] for name in reach.bad if name in self._others}
            again = {name: where for name, where in again.items() if self._objects.find(name) is None}
            if not again:
                return reach.bad
            for name, where in again.items():
                self._put_back(name, where)

    def _remake_trees(self, bad: dict[Hash, str]) -> None:
        """Directories that are recorded are put again."""
        for _, value in self._pairs(Table.DIRECTORIES):
            row = _directory.decode(value)
            if row.tree_hash in bad:
                data = trees.encode_tree([one.entry for one in row.rows])
                if hash_object(ObjectKind.TREE, data) == row.tree_hash:
                    self._objects.put(ObjectKind.TREE, data)
        self._edit(lambda change: None)

    def _affected(self, bad: dict[Hash, str]) -> list[AffectedPath]:
        check = Check(self._database, self._objects, self._packs)
        check.bad = bad
        check.name_affected()
        return check.report.affected

    def _lose(self, bad: dict[Hash, str]) -> None:
        """Writes down what is lost."""

        def edit(change: Change) -> None:
            for name in bad:
                # Something may have put it meanwhile.
                if change.get(Table.OBJECTS, name) is None:
                    change.put(Table.LOST, name, b"")
            for name in change.keys(Table.LOST):
                if name not in bad:
                    change.delete(Table.LOST, name)

        step("repair.lost")
        self._edit(edit)
        self._report.lost = len(bad)
        for key, value in list(self._pairs(Table.DIRECTORIES)):
            row = _directory.decode(value)
            if any(name in bad for name in names_in(row)):
                self._forget_directory(key, value)

    def _forget_directory(self, key: bytes, value: bytes) -> None:
        def edit(change: Change) -> None:
            if change.get(Table.DIRECTORIES, key) == value:
                change.delete(Table.DIRECTORIES, key)
                _look_anew(change, key.partition(b"\0")[0])

        self._edit(edit)

    def _pairs(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        start = b""
        while True:
            part = []
            with self._database.view() as view:
                for pair in view.scan(table, start=start):
                    part.append(pair)
                    if len(part) == _ROWS:
                        break
            yield from part
            if len(part) < _ROWS:
                return
            start = part[-1][0] + b"\0"


def _is_whole(record: Record) -> bool:
    header = record.header
    try:
        return hash_object(header.kind, codec.decode(header.codec, record.payload, header.raw)) == header.hash
    except ValueError:
        return False


def _look_anew(change: Change, workspace: bytes) -> None:
    """Nothing recorded of the workspace is believed to have been watched: its next checkpoint looks at all files."""
    value = change.get(Table.RECORD_STATES, workspace)
    if value is None:
        return
    try:
        state = _state.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return  # dropped by itself
    change.put(Table.RECORD_STATES, workspace, _encoder.encode(msgspec.structs.replace(state, worker_started_ns=0)))
