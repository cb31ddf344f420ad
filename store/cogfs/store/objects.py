"""Objects by hash: put into packs, found through the index, read with every byte verified.

An object that was put is *pending* until a batch names it in the index: it can be read, and is lost with the power, but
not with the process. After a crash what was pending is found beyond the ends of the packs that the index knows, and is
pending again. The order is always the same: the bytes of a batch are synced, then one commit names them, then they are
no longer pending.

Hashing and compression run outside ``_lock``, which covers the table of what is pending and the append to a pack.

While a collection sweeps (``Sweep``), an object that it is going to drop counts as absent for those who put or keep it:
it is put anew, elsewhere. It can still be read until its pack is removed. An object that was copied to another pack is
pending like one that was put, so it is read from there at once, and the commit that names it there drops nothing else.
A reader that looked a place up before looks again when it fails.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from cogfs.store import codec
from cogfs.store.database import Change, Database, Table, View, check_number
from cogfs.store.errors import Corrupt, NotFound, StoreError, of_system, translated
from cogfs.store.hashing import HASH_SIZE, hash_object
from cogfs.store.packs import Packs, Record
from cogfs.store.recent import Position, Recent
from cogfs.store.records import (
    NO_BASE,
    PACK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RecordHeader,
    parse_record_header,
    record_header,
)
from cogfs.store.schema import Hash, ObjectKind
from cogfs.store.steps import step

#: Pack, offset of the record's header, length of the payload, raw length, kind, codec; then the base, if there is one.
_ROW = struct.Struct("<IQQQBB")
_PACK_KEY_SIZE = 4
_END_SIZE = 8
#: The end of a pack whose objects are elsewhere, and whose file is to be removed or is.
_REMOVED = 0
#: About what one object takes of the index.
_ROW_COST = 160


class Location(NamedTuple):
    """Where an object is, and in what form."""

    pack: int
    offset: int
    stored: int
    raw: int
    kind: ObjectKind
    codec: int
    base: Hash = NO_BASE

    def encode(self) -> bytes:
        """The row of the index."""
        row = _ROW.pack(self.pack, self.offset, self.stored, self.raw, self.kind, self.codec)
        return row if self.base == NO_BASE else row + self.base

    @classmethod
    def decode(cls, row: bytes) -> Location:
        """ValueError when ``row`` is not one of the index."""
        if len(row) not in {_ROW.size, _ROW.size + HASH_SIZE}:
            raise ValueError(f"a row of {len(row)} bytes")
        pack, offset, stored, raw, kind, codec_number = _ROW.unpack_from(row)
        return cls(pack, offset, stored, raw, ObjectKind(kind), codec_number, row[_ROW.size :] or NO_BASE)

    @property
    def end(self) -> int:
        """Offset of the first byte after the record."""
        return self.offset + RECORD_HEADER_SIZE + self.stored


@dataclass
class Batch:
    """What one commit is to name."""

    objects: dict[Hash, Location] = field(default_factory=dict)
    #: The packs to sync first, and up to where.
    unsynced: dict[int, int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """About what it takes of the index, in bytes."""
        return len(self.objects) * _ROW_COST


class Recovered(NamedTuple):
    """What a start found beyond the ends of the packs that the index knows."""

    #: Objects that were put and not committed, and the bytes of their records. They are pending.
    objects: int = 0
    bytes: int = 0
    #: Bytes that were of no use: torn, damaged, or of objects that are elsewhere.
    dropped: int = 0
    #: Packs of which something cannot be read.
    unreadable: tuple[int, ...] = ()


class Sweep:
    """What a collection keeps; all else is going to be dropped."""

    def __init__(self, live: set[Hash], since: Position) -> None:
        self.live = live
        self._since = since

    def keeps(self, name: Hash, location: Location) -> bool:
        """It stays, or is put or moved since the collection decided."""
        return name in self.live or (location.pack, location.offset) >= self._since


class Objects:
    """All objects of a store."""

    def __init__(self, database: Database, packs: Packs) -> None:
        self._database = database
        self._packs = packs
        self._lock = threading.Lock()
        self._pending: dict[Hash, Location] = {}
        #: Packs whose sync failed. The system may have dropped what it could not write, and would not say so again.
        self._suspect: set[int] = set()
        #: Objects of which a read has found that what is stored is not what was put.
        self._damaged: set[Hash] = set()
        self._sweep: Sweep | None = None
        self._ends: dict[int, int] = {}
        #: Packs that are to be removed, or were, and have a row that says so.
        self._removed: set[int] = set()
        with database.view() as view:
            for key, value in view.scan(Table.PACKS):
                number = check_number(key, _PACK_KEY_SIZE, "number of a pack")
                end = check_number(value, _END_SIZE, f"end of pack {number:08x}")
                if end == _REMOVED:
                    self._removed.add(number)
                else:
                    self._ends[number] = end
            self.recovered = self._recover(view)
        self.recent = Recent(packs.end)
        for name in self._pending:
            self.recent.touch(name)

    def _recover(self, view: View) -> Recovered:
        """Takes what was pending when the store was last open."""

        def take(record: Record) -> bool:
            header = record.header
            data = codec.decode(header.codec, record.payload, header.raw)
            if hash_object(header.kind, data) != header.hash:
                raise ValueError("the content of a record does not match its hash")
            if header.hash in self._pending or view.get(Table.OBJECTS, header.hash) is not None:
                return False
            self._pending[header.hash] = Location(
                record.pack, record.offset, header.stored, header.raw, header.kind, header.codec, header.base
            )
            return True

        met = self._packs.settle(self._ends, take, self._removed)
        self._suspect |= met.suspect
        size = sum(location.end - location.offset for location in self._pending.values())
        return Recovered(len(self._pending), size, met.dropped, tuple(sorted(met.unreadable)))

    # --- objects

    def put(self, kind: ObjectKind, data: bytes | memoryview) -> Hash:
        """Puts the object and returns its name. Nothing is written when it is there already."""
        name = hash_object(kind, data)
        if self.keep(name):
            return name
        used_codec, payload = codec.encode(data)
        header = record_header(kind, used_codec, name, len(data), payload)
        self.recent.pass_by()
        with self._lock:
            there = self._pending.get(name)
            if there is None or name in self._damaged or not self._stays(name, there):
                pack, offset = self._packs.append(header, payload)
                self._pending[name] = Location(pack, offset, len(payload), len(data), kind, used_codec)
                self._damaged.discard(name)
        # Where it is says that it is new.
        self.recent.untouch(name)
        return name

    def keep(self, name: Hash) -> bool:
        """Whether the object is there and not known to be damaged; then it stays until a row may have named it
        (``recent``). What it names is not looked at."""
        # First, so that a collection that decides right now either knows of it or is seen by the look at its sweep.
        self.recent.touch(name)
        try:
            location = self.find(name)
        except Corrupt:
            return False
        return location is not None and name not in self._damaged and self._stays(name, location)

    def _stays(self, name: Hash, location: Location) -> bool:
        sweep = self._sweep
        return sweep is None or sweep.keeps(name, location)

    def find(self, name: Hash) -> Location | None:
        """Where the object is, or None."""
        # Pending first: an object leaves that table only after the index has it.
        location = self._pending.get(name)
        if location is not None:
            return location
        row = self._database.get(Table.OBJECTS, name)
        if row is None:
            return None
        try:
            return Location.decode(row)
        except ValueError as error:
            raise Corrupt(f"the index has no valid row of object {name.hex()}: {error}", name) from error

    def locate(self, name: Hash, kind: ObjectKind | None = None) -> Location:
        """Where the object is. NotFound when there is none, Corrupt when it is not of ``kind``."""
        location = self.find(name)
        if location is None:
            raise NotFound(f"the store has no object {name.hex()}")
        if kind is not None and location.kind != kind:
            raise Corrupt(f"object {name.hex()} is a {location.kind.name}, not a {kind.name}", name)
        return location

    def read(self, name: Hash, kind: ObjectKind) -> bytes:
        """The raw bytes, verified. NotFound, or Corrupt naming the object."""
        location = self.locate(name, kind)
        while True:
            try:
                return self._load(name, location)
            except StoreError as error:
                # A collection may have moved it, and removed the pack, since its place was looked up.
                now = self.locate(name, kind)
                if now == location:
                    if isinstance(error, Corrupt):
                        self._damaged.add(name)
                    raise
                location = now

    def _load(self, name: Hash, location: Location) -> bytes:
        try:
            payload = self._packs.read(location.pack, location.offset + RECORD_HEADER_SIZE, location.stored)
            data = codec.decode(location.codec, payload, location.raw)
        except ValueError as error:
            raise Corrupt(f"object {name.hex()} is damaged: it cannot be decoded ({error})", name) from error
        except Corrupt as error:
            raise Corrupt(f"object {name.hex()} is damaged: {error}", name) from error
        if hash_object(location.kind, data) != name:
            raise Corrupt(f"object {name.hex()} is damaged: its content does not match its hash", name)
        return data

    # --- commits; one thread at a time

    def batch(self) -> Batch:
        """Everything that is pending now."""
        with self._lock:
            if self._suspect:
                self._move_suspects()
            objects = dict(self._pending)
        # After the table was copied, so that it covers the bytes of all that is in it.
        return Batch(objects, self._packs.unsynced())

    def sync(self, batch: Batch) -> None:
        """Makes the bytes of the batch durable."""
        for number, end in sorted(batch.unsynced.items()):
            try:
                self._packs.sync({number: end})
            except OSError as error:
                self._packs.leave(number)
                with self._lock:
                    self._suspect.add(number)
                raise of_system(error, "syncing a pack") from error

    def index(self, batch: Batch, change: Change) -> None:
        """Names the objects of the batch, whose bytes are durable, in ``change``."""
        if not batch.objects:
            return
        with translated("writing its index"):
            step("index.write")
        change.put_all(Table.OBJECTS, sorted((name, where.encode()) for name, where in batch.objects.items()))
        ends = _ends(batch)
        change.put_all(
            Table.PACKS,
            [
                (number.to_bytes(_PACK_KEY_SIZE), max(end, self._ends.get(number, 0)).to_bytes(_END_SIZE))
                for number, end in sorted(ends.items())
            ],
        )

    def committed(self, batch: Batch) -> None:
        """The change that names the batch is durable."""
        with self._lock:
            for number, end in _ends(batch).items():
                self._ends[number] = max(end, self._ends.get(number, 0))
            for name, location in batch.objects.items():
                if self._pending.get(name) is location:
                    del self._pending[name]

    def _move_suspects(self) -> None:
        """Writes what is pending in a suspect pack to another one, while its bytes can still be read."""
        for name, location in list(self._pending.items()):
            if location.pack not in self._suspect:
                continue
            try:
                data = self._load(name, location)
            except StoreError as error:
                raise Corrupt(
                    f"object {name.hex()} could not be written to disk and is lost; start the daemon again", name
                ) from error
            used_codec, payload = codec.encode(data)
            header = record_header(location.kind, used_codec, name, len(data), payload)
            pack, offset = self._packs.append(header, payload)
            self._pending[name] = Location(pack, offset, len(payload), len(data), location.kind, used_codec)
        for number in self._suspect:
            self._packs.forget(number)

    # --- collections; one at a time

    def sweep(self, sweep: Sweep | None) -> None:
        """From now on, what ``sweep`` does not keep counts as absent; None: nothing any more does."""
        self._sweep = sweep

    def move(self, name: Hash, location: Location) -> None:
        """Copies the record of an object to the pack that grows, from where the next commit names it. Corrupt when it
        is damaged; NoSpace and StoreIO leave everything as it was."""
        record = self._packs.read(location.pack, location.offset, location.end - location.offset)
        head, payload = record[:RECORD_HEADER_SIZE], record[RECORD_HEADER_SIZE:]
        try:
            header = parse_record_header(head)
            wanted = RecordHeader(
                location.kind, location.codec, location.stored, location.raw, name, location.base, zlib.crc32(payload)
            )
            if header != wanted:
                raise ValueError("its record is of something else")
        except ValueError as error:
            raise Corrupt(f"object {name.hex()} is damaged: {error}", name) from error
        with self._lock:
            if name not in self._pending:
                pack, offset = self._packs.append(head, payload, copy=True)
                self._pending[name] = location._replace(pack=pack, offset=offset)

    def drop(self, dead: Iterable[tuple[Hash, Location]], change: Change) -> int:
        """Takes objects out of the index that it still has at these places. How many."""
        count = 0
        for name, location in dead:
            if change.get(Table.OBJECTS, name) == location.encode():
                change.delete(Table.OBJECTS, name)
                count += 1
        return count

    def give_up(self, number: int, change: Change) -> None:
        """Says in ``change`` that nothing is in pack ``number`` any more; once that is durable, ``remove`` it."""
        with self._lock:
            if any(location.pack == number for location in self._pending.values()):
                raise RuntimeError(f"pack {number:08x} is not empty")
        change.put(Table.PACKS, number.to_bytes(_PACK_KEY_SIZE), _REMOVED.to_bytes(_END_SIZE))

    def remove(self, number: int) -> int:
        """Removes a pack that was given up. How many bytes it had."""
        with self._lock:
            self._removed.add(number)
            size = self._ends.pop(number, 0)
        self._packs.remove(number)
        return size

    def forget_removed(self, change: Change) -> set[int]:
        """Takes the rows of the packs out of the index that are removed for good; when that is durable, ``forgotten``
        tells."""
        removed = set(self._removed)
        for number in removed:
            change.delete(Table.PACKS, number.to_bytes(_PACK_KEY_SIZE))
        return removed

    def forgotten(self, removed: set[int]) -> None:
        """The rows of these packs are gone."""
        self._removed -= removed

    def ends(self) -> dict[int, int]:
        """The ends of the packs that the index knows."""
        with self._lock:
            return dict(self._ends)

    def indexed(self, name: Hash) -> Location | None:
        """Where the index says that an object is, whatever is pending; None when it has no valid row."""
        row = self._database.get(Table.OBJECTS, name)
        try:
            return None if row is None else Location.decode(row)
        except ValueError:
            return None

    def renew(self, name: Hash, kind: ObjectKind, data: bytes) -> None:
        """Puts an object anew, whatever there is of it."""
        self._damaged.add(name)
        self.put(kind, data)

    def place(self, name: Hash, location: Location | None, change: Change) -> None:
        """Says in ``change`` that an object is there, or with None nowhere: the index was wrong."""
        if location is None:
            change.delete(Table.OBJECTS, name)
        else:
            change.put(Table.OBJECTS, name, location.encode())
        self._damaged.discard(name)

    def located(self, start: Hash, limit: int) -> list[tuple[Hash, Location]]:
        """Up to ``limit`` objects of the index, by name, from ``start`` on. Corrupt."""
        found = []
        with self._database.view() as view:
            for name, row in view.scan(Table.OBJECTS, start=start):
                try:
                    found.append((name, Location.decode(row)))
                except ValueError as error:
                    raise Corrupt(f"the index has no valid row of object {name.hex()}: {error}", name) from error
                if len(found) == limit:
                    break
        return found

    # --- numbers

    def count(self) -> int:
        """How many objects there are, those that are pending included."""
        with self._lock:
            pending = set(self._pending)
        with self._database.view() as view:
            # What is copied to another pack, or put anew, is in both.
            return view.count(Table.OBJECTS) + sum(view.get(Table.OBJECTS, name) is None for name in pending)

    def pack_bytes(self) -> tuple[int, int]:
        """How many packs hold objects, and how many bytes of them."""
        with self._lock:
            ends = dict(self._ends)
            for location in self._pending.values():
                ends[location.pack] = max(location.end, ends.get(location.pack, PACK_HEADER_SIZE))
        return len(ends), sum(ends.values())


def _ends(batch: Batch) -> dict[int, int]:
    ends: dict[int, int] = {}
    for location in batch.objects.values():
        ends[location.pack] = max(location.end, ends.get(location.pack, 0))
    return ends
