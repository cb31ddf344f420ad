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

**Deltas.** An object may be put against another one of its kind, its *base*, without which it cannot be decoded. The
base is there before it, in the packs and in the index, and stays as long as it does:

- It is put so only while the base stays (looked at under ``_lock``, which a collection takes to say what it keeps). A
  collection that began before finds it, and keeps the base for its sake.
- What has a record already is put anew without a base, whatever is wrong with that record. So no object comes to need
  itself: the bases of what is put now were all there when it was not.
- A delta of which a base is gone or damaged counts as absent for those who put or keep it.

**Groups.** An object may be one of many in a record (``groups``), which needs nothing outside of it. A repack puts
those that are there into such records; for them that is no more than another place, as a move of a collection is.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cogfs.store import chains, codec, groups
from cogfs.store.database import Change, Database, Table, View, check_number
from cogfs.store.errors import Corrupt, NotFound, StoreError, StoreIO, of_system, translated
from cogfs.store.hashing import hash_object
from cogfs.store.location import Location, has_base
from cogfs.store.packs import Packs, Record
from cogfs.store.recent import Position, Recent
from cogfs.store.records import (
    NO_BASE,
    NO_NAME,
    PACK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RecordHeader,
    parse_record_header,
    record_header,
)
from cogfs.store.schema import Hash, ObjectKind
from cogfs.store.steps import step

_PACK_KEY_SIZE = 4
_END_SIZE = 8
#: The end of a pack whose objects are elsewhere, and whose file is to be removed or is.
_REMOVED = 0
#: About what one object takes of the index.
_ROW_COST = 160
#: Rows of the index that are read in one transaction.
_ROWS = 5000


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
        self._groups = groups.Groups(packs)
        self._lock = threading.Lock()
        self._pending: dict[Hash, Location] = {}
        #: Packs whose sync failed. The system may have dropped what it could not write, and would not say so again.
        self._suspect: set[int] = set()
        #: Objects of which a read has found that what is stored is not what was put.
        self._damaged: set[Hash] = set()
        self._sweep: Sweep | None = None
        #: Counts what may make an object absent that was there, or present where ``find`` has looked already.
        self._epoch = 0
        #: Whether objects may be put against others: the format of the store has to allow it.
        self.deltas = False
        #: Whether objects may be put into groups: likewise.
        self.grouping = False
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
            if header.codec == codec.Codec.GROUP:
                return take_group(record)
            base = b""
            if header.codec == codec.Codec.ZSTD_DELTA and header.base != NO_BASE:
                try:
                    base = self.read(header.base, header.kind)
                except (NotFound, Corrupt):
                    # It is lost with its base; what follows it is not.
                    return False
                except StoreIO as error:
                    raise OSError(errno.EIO, str(error)) from error
            data = codec.decode(header.codec, record.payload, header.raw, base)
            if hash_object(header.kind, data) != header.hash:
                raise ValueError("the content of a record does not match its hash")
            if header.hash in self._pending or view.get(Table.OBJECTS, header.hash) is not None:
                return False
            self._pending[header.hash] = Location(
                record.pack, record.offset, header.stored, header.raw, header.kind, header.codec, header.base
            )
            return True

        def take_group(record: Record) -> bool:
            problem = groups.wrong(record.header.kind, record.payload)
            if problem:
                raise ValueError(problem)
            needed = False
            for name, location in groups.places(record.header.kind, record.pack, record.offset, record.payload):
                if name not in self._pending and view.get(Table.OBJECTS, name) is None:
                    self._pending[name] = location
                    needed = True
            return needed

        met = self._packs.settle(self._ends, take, self._removed)
        self._suspect |= met.suspect
        size = sum(location.size for location in self._pending.values())
        return Recovered(len(self._pending), size, met.dropped, tuple(sorted(met.unreadable)))

    # --- objects

    def put(self, kind: ObjectKind, data: bytes | memoryview, base: Hash = NO_BASE) -> Hash:
        """Puts the object and returns its name. Nothing is written when it is there already.

        ``base`` is one that is like it, if any: an earlier version. It need not be there.
        """
        name = hash_object(kind, data)
        if self.keep(name):
            return name
        self.recent.pass_by()
        if base == NO_BASE or not self.deltas or not self._put_against(base, name, kind, data):
            used_codec, payload = codec.encode(data)
            header = record_header(kind, used_codec, name, len(data), payload)
            with self._lock:
                self._append(name, kind, used_codec, header, payload, len(data))
        # Where it is says that it is new.
        self.recent.untouch(name)
        return name

    def _append(
        self,
        name: Hash,
        kind: ObjectKind,
        used_codec: int,
        header: bytes,
        payload: bytes | memoryview,
        raw: int,
        base: Hash = NO_BASE,
    ) -> None:
        """Appends a record, unless the object has come meanwhile. Under ``_lock``."""
        there = self._pending.get(name)
        if there is None or name in self._damaged or not self._stays(name, there):
            pack, offset = self._packs.append(header, payload)
            self._pending[name] = Location(pack, offset, len(payload), raw, kind, used_codec, base)
            self._damaged.discard(name)

    def _put_against(self, wanted: Hash, name: Hash, kind: ObjectKind, data: bytes | memoryview) -> bool:
        """Puts an object against ``wanted``, or another in its chain, if it can be; whether it was put."""
        try:
            base = self._choose_base(wanted, name, kind)
            base_data = self.read(base, kind) if base != NO_BASE else b""
        except StoreError:
            return False  # Whatever it is, this object does not need the other.
        if base == NO_BASE:
            return False
        used_codec, payload = codec.encode_against(data, base_data)
        against = base if used_codec == codec.Codec.ZSTD_DELTA else NO_BASE
        header = record_header(kind, used_codec, name, len(data), payload, base=against)
        while True:
            epoch = self._epoch
            try:
                where = self.find(base)
                if where is None or self.find(name) is not None:
                    return False
            except Corrupt:
                return False
            with self._lock:
                if self._epoch != epoch:
                    continue
                if base in self._damaged or not self._stays(base, where):
                    return False
                self._append(name, kind, used_codec, header, payload, len(data), against)
                return True

    def _choose_base(self, wanted: Hash, name: Hash, kind: ObjectKind) -> Hash:
        """What to put an object against: ``wanted``, or the last of its chain where that is as long as it may be."""
        where = self.find(wanted)
        if where is None or where.kind != kind or where.raw > codec.DELTA_LIMIT or not self._is_founded(wanted, where):
            return NO_BASE
        chain = chains.follow(self.find, wanted, where)
        if any(link.name == name for link in chain.links):
            return NO_BASE
        return chain.links[0 if chain.depth < chains.MAX_DEPTH else -1].name

    def _is_founded(self, name: Hash, location: Location) -> bool:
        """Whether nothing that the object is decoded from is missing or known to be damaged."""
        if name in self._damaged:
            return False
        if not location.is_delta:
            return True
        chain = chains.follow(self.find, name, location)
        return not chain.broken and not any(link.name in self._damaged for link in chain.links)

    def keep(self, name: Hash) -> bool:
        """Whether the object is there and not known to be damaged; then it stays until a row may have named it
        (``recent``). What it names is not looked at."""
        # First, so that a collection that decides right now either knows of it or is seen by the look at its sweep.
        self.recent.touch(name)
        try:
            location = self.find(name)
        except Corrupt:
            return False
        return location is not None and self._stays(name, location) and self._is_founded(name, location)

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
        chain = chains.follow(self.find, name, self.locate(name, kind))
        while True:
            try:
                return chains.read(self._groups, chain)
            except StoreError as error:
                # A collection may have moved some of it, and removed the pack, since it was looked up.
                now = chains.follow(self.find, name, self.locate(name, kind))
                if now == chain:
                    if isinstance(error, Corrupt):
                        self._damaged.update((name, error.source or name))
                    raise
                chain = now

    def broken(self, name: Hash, location: Location) -> str:
        """Why an object cannot be decoded, as far as the index tells; empty: it can."""
        return chains.follow(self.find, name, location).broken

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
            self._epoch += 1

    def _move_suspects(self) -> None:
        """Writes what is pending in a suspect pack to another one, while its bytes can still be read."""
        records: dict[tuple[int, int], list[tuple[Hash, Location]]] = {}
        for name, location in self._pending.items():
            if location.pack in self._suspect:
                records.setdefault(location.record, []).append((name, location))
        for members in records.values():
            name, location = members[0]
            try:
                head, payload = self._record(name, location)
            except StoreError as error:
                raise Corrupt(
                    f"object {name.hex()} could not be written to disk and is lost; start the daemon again", name
                ) from error
            self._place_pending(members, *self._packs.append(head, payload))
        for number in self._suspect:
            self._packs.forget(number)

    # --- collections; one at a time

    def sweep(self, sweep: Sweep | None) -> None:
        """From now on, what ``sweep`` does not keep counts as absent; None: nothing any more does."""
        with self._lock:
            self._sweep = sweep
            self._epoch += 1

    def move(self, members: Sequence[tuple[Hash, Location]]) -> None:
        """Copies a record to the pack that grows, from where the next commit names it: that of an object, or that of
        some objects of one group. Corrupt when it is damaged; NoSpace and StoreIO leave everything as it was."""
        head, payload = self._record(*members[0])
        with self._lock:
            left = [(name, location) for name, location in members if name not in self._pending]
            if left:
                self._place_pending(left, *self._packs.append(head, payload, copy=True))

    def regroup(self, kind: ObjectKind, payload: bytes) -> None:
        """Gives objects that are there the group ``payload`` for their record, from where the next commit names them.
        No collection may go on. NoSpace and StoreIO leave everything as it was."""
        raw = sum(member.raw for member in groups.members(payload))
        head = record_header(kind, codec.Codec.GROUP, NO_NAME, raw, payload)
        with self._lock:
            pack, offset = self._packs.append(head, payload, copy=True)
            for name, location in groups.places(kind, pack, offset, payload):
                # What was put anew meanwhile may be so because the other record is damaged.
                if name not in self._pending:
                    self._pending[name] = location

    def _place_pending(self, members: Sequence[tuple[Hash, Location]], pack: int, offset: int) -> None:
        for name, location in members:
            self._pending[name] = location._replace(pack=pack, offset=offset)

    def group(self, location: Location) -> dict[Hash, Location]:
        """The objects of the group in which ``location`` is, in order. Corrupt; StoreIO."""
        try:
            return self._groups.table(location)
        except ValueError as error:
            raise Corrupt(f"a group in pack {location.pack:08x} is damaged: {error}") from error

    def _record(self, name: Hash, location: Location) -> tuple[bytes, bytes]:
        """Header and payload of the record of an object, both checked by their CRCs and against the index. Corrupt."""
        record = self._packs.read(location.pack, location.offset, location.end - location.offset)
        head, payload = record[:RECORD_HEADER_SIZE], record[RECORD_HEADER_SIZE:]
        try:
            header = parse_record_header(head)
            if zlib.crc32(payload) != header.checksum:
                raise ValueError("its payload does not match its checksum")
            if location.is_grouped:
                found = groups.places(header.kind, location.pack, location.offset, payload)
                same = header.codec == location.codec and (name, location) in found
            else:
                same = says(header, name, location)
            if not same:
                raise ValueError("its record is of something else")
        except ValueError as error:
            raise Corrupt(f"object {name.hex()} is damaged: {error}", name) from error
        return head, payload

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

    def with_base(self) -> Iterator[tuple[Hash, Location]]:
        """All objects that have a base, those that are pending first. Corrupt."""
        with self._lock:
            pending = [(name, where) for name, where in self._pending.items() if where.base != NO_BASE]
        yield from pending
        start = b""
        while True:
            found = []
            count = 0
            with self._database.view() as view:
                for name, row in view.scan(Table.OBJECTS, start=start):
                    count += 1
                    start = name
                    if has_base(row):
                        found.append((name, row))
                    if count == _ROWS:
                        break
            for name, row in found:
                try:
                    yield name, Location.decode(row)
                except ValueError as error:
                    raise Corrupt(f"the index has no valid row of object {name.hex()}: {error}", name) from error
            if count < _ROWS:
                return
            start += b"\0"

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


def says(header: RecordHeader, name: Hash, location: Location) -> bool:
    """Whether a header is that of the record of an object, or of the group that it is in."""
    if location.is_grouped:
        return (header.hash, header.kind, header.codec, header.stored, header.base) == (
            NO_NAME,
            location.kind,
            location.codec,
            location.stored,
            NO_BASE,
        )
    return header[:-1] == (location.kind, location.codec, location.stored, location.raw, name, location.base)


def _ends(batch: Batch) -> dict[int, int]:
    ends: dict[int, int] = {}
    for location in batch.objects.values():
        ends[location.pack] = max(location.end, ends.get(location.pack, 0))
    return ends
