"""Checks of a whole store, each invariant by one ``check_*``. Nothing is changed, and all else goes on meanwhile.

What comes and goes while it is looked at is looked at again before it is called wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cogfs.store.database import Database, Table
from cogfs.store.errors import Corrupt, NotFound, StoreError
from cogfs.store.hashing import HASH_SIZE
from cogfs.store.location import Location
from cogfs.store.naming import Root, roots
from cogfs.store.objects import Objects, says
from cogfs.store.packs import Packs
from cogfs.store.reach import Affected, Interrupted, Reach
from cogfs.store.records import RECORD_HEADER_SIZE, parse_record_header
from cogfs.store.rows import Reader, decodes
from cogfs.store.schema import Hash, SnapshotState

#: Problems of one kind that are told, and paths.
MAX_TOLD = 1000
_ROWS = 2000

Goes = Callable[[], bool]


class Problem(NamedTuple):
    """Something that is not as it must be."""

    #: The check that found it.
    check: str
    text: str
    #: The object that it is about, or empty.
    name: Hash = b""


class AffectedPath(NamedTuple):
    """A path in a snapshot that cannot be read."""

    snapshot_id: str
    workspace_id: str
    #: Empty: the whole snapshot.
    path: bytes


@dataclass
class Checked:
    """What a check found."""

    objects: int = 0
    #: Bytes that were read and hashed.
    bytes_read: int = 0
    snapshots: int = 0
    #: Objects that nothing needs.
    unneeded: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: How many more there were.
    untold: int = 0
    affected: list[AffectedPath] = field(default_factory=list)
    #: It was told to stop.
    interrupted: bool = False


class Check:
    """One check of a store."""

    def __init__(self, database: Database, objects: Objects, packs: Packs, goes_on: Goes = lambda: True) -> None:
        self._database = database
        self._objects = objects
        self._packs = packs
        self._goes_on = goes_on
        self.report = Checked()
        #: Objects that are needed and not whole.
        self.bad: dict[Hash, str] = {}

    def run(self, more_roots: Callable[[], Iterable[Root]], *, data: bool) -> Checked:
        """All checks; with ``data`` every object is read and hashed."""
        try:
            self.check_rows()
            self.check_snapshots()
            self.check_conversations()
            self.check_packs()
            self.check_index()
            if data:
                self.check_contents()
            self.check_reach(more_roots)
            self.name_affected()
        except Interrupted:
            self.report.interrupted = True
        return self.report

    # --- rows

    def check_rows(self) -> None:
        """Every row can be decoded."""
        for table, decode in decodes().items():
            for key, value in self._pairs(table):
                try:
                    decode(value)
                except (msgspec.MsgspecError, ValueError) as error:
                    self._tell("rows", f"row {key!r} of {table.value} cannot be read: {error}")

    def check_snapshots(self) -> None:
        """A snapshot is listed under its workspace, which is there; it is SEALED with a root or FROZEN with a boundary;
        and the snapshots that a restore needs are there."""
        with self._database.view() as view:
            reader = Reader(view)
            try:
                workspaces = {row.id: row for row in reader.workspaces()}
                journals = {row.workspace_id: row for row in reader.journals()}
            except Corrupt:
                return  # told by the check of rows
            listed = {bytes(key) for key in view.keys(Table.WORKSPACE_SNAPSHOTS)}
            waiting = set()
            for workspace_id in workspaces:
                for generation in reader.generations(workspace_id):
                    try:
                        row = reader.boundary(workspace_id, generation)
                    except Corrupt:
                        continue
                    if row is not None:
                        waiting.add(row.snapshot_id)
            for key in list(view.keys(Table.SNAPSHOTS)):
                self.report.snapshots += 1
                try:
                    snapshot = reader.snapshot(key.decode())
                except (StoreError, UnicodeDecodeError):
                    listed = {one for one in listed if not one.endswith(b"\0" + key)}
                    continue
                under = snapshot.workspace_id.encode() + b"\0" + key
                if under not in listed:
                    self._tell("snapshots", f"snapshot {snapshot.id} is not listed in its workspace")
                listed.discard(under)
                if snapshot.workspace_id not in workspaces:
                    self._tell("snapshots", f"the workspace of snapshot {snapshot.id} is not there")
                if snapshot.state is SnapshotState.SEALED and snapshot.root is None:
                    self._tell("snapshots", f"snapshot {snapshot.id} is SEALED and has no root")
                if (snapshot.state is SnapshotState.FROZEN) != (snapshot.id in waiting):
                    self._tell("snapshots", f"snapshot {snapshot.id} and its boundary do not agree")
            for key in sorted(listed):
                self._tell("snapshots", f"a snapshot is listed and not there: {key!r}")
            for journal in journals.values():
                for needed in (journal.target_snapshot_id, journal.safety_snapshot_id):
                    if not reader.has_snapshot(needed):
                        self._tell("snapshots", f"a restore has begun and needs snapshot {needed}, which is not there")

    def check_conversations(self) -> None:
        """The leaf of each thread is one of its entries, and its branch leads to the root."""
        with self._database.view() as view:
            reader = Reader(view)
            try:
                threads = [thread.id for thread in reader.threads()]
            except Corrupt:
                return  # told by the check of rows
        for thread_id in threads:
            self._go_on()
            with self._database.view() as view:
                reader = Reader(view)
                try:
                    reader.branch(thread_id, reader.thread(thread_id).leaf_id)
                except StoreError as error:
                    if not isinstance(error, NotFound) or thread_id in {row.id for row in reader.threads()}:
                        self._tell("conversations", f"the branch of thread {thread_id} is broken: {error}")

    # --- packs and index

    def check_packs(self) -> None:
        """Each pack that the index knows is there, begins as it must, and is no shorter than its end."""
        for number, end in sorted(self._objects.ends().items()):
            self._go_on()
            problem = self._packs.trouble(number, end)
            # A collection may have removed it.
            if problem and number in self._objects.ends():
                self._tell("packs", problem)

    def check_index(self) -> None:
        """Each object of the index lies before the end of a pack, in a record that says the same of it; its base is
        there."""
        grouped: dict[tuple[int, int], list[tuple[Hash, Location]]] = {}
        for name, row in self._pairs(Table.OBJECTS):
            self.report.objects += 1
            try:
                if len(name) != HASH_SIZE:
                    raise ValueError("its name has another length")
                location = Location.decode(row)
            except ValueError as error:
                self._tell("index", f"the row of object {name.hex()} cannot be read: {error}", name)
                continue
            problem = record_trouble(self._objects, self._packs, name, location, in_group=True)
            if problem and self._still(name, location):
                self._tell("index", f"object {name.hex()} {problem}", name)
            elif location.is_grouped:
                grouped.setdefault(location.record, []).append((name, location))
        for members in grouped.values():
            self._go_on()
            where = dict(members)
            for name, problem in group_trouble(self._objects, members).items():
                if self._still(name, where[name]):
                    self._tell("index", f"object {name.hex()} {problem}", name)

    def _still(self, name: Hash, location: Location) -> bool:
        """The index has not changed meanwhile."""
        return self._objects.indexed(name) == location

    def check_contents(self) -> None:
        """Each object can be read, and its bytes have its name."""
        for name, row in self._pairs(Table.OBJECTS):
            self._go_on()
            try:
                location = Location.decode(row)
                self._objects.read(name, location.kind)
                self.report.bytes_read += location.size
            except NotFound:
                continue  # dropped meanwhile
            except ValueError:
                continue  # told by the check of the index
            except StoreError as error:
                self._tell("contents", str(error), name)
                self.bad[name] = str(error)

    # --- what is needed

    def check_reach(self, more_roots: Callable[[], Iterable[Root]]) -> None:
        """All that rows and undo logs name, and what these objects name in turn, is there; trees and lists of chunks
        are read for that."""
        reach = Reach(self._objects, self._goes_on)
        try:
            reach.mark(root.name for root in roots(self._database))
        except Corrupt:
            pass  # told by the check of rows
        reach.mark(root.name for root in more_roots())
        for name, reason in reach.bad.items():
            if name not in self.bad:
                self._tell("reach", reason, name)
            self.bad[name] = reason
        # What nothing needs does no harm.
        self.bad = {name: reason for name, reason in self.bad.items() if name in reach.live}
        self.report.unneeded = max(0, self._objects.count() - len(reach.live - self.bad.keys()))

    def name_affected(self) -> None:
        """Where what is bad is needed."""
        if not self.bad:
            return
        affected = Affected(self._objects, self.bad)
        told: set[AffectedPath] = set()
        for root in self._roots():
            self._go_on()
            for path in affected.paths(root.name):
                if len(told) == MAX_TOLD:
                    return
                # What is recorded of a workspace is read anew; its files are told of by the snapshots.
                one = AffectedPath(root.snapshot_id, root.workspace_id, path if root.snapshot_id else b"")
                if one not in told:
                    told.add(one)
                    self.report.affected.append(one)

    def _roots(self) -> Iterator[Root]:
        try:
            yield from roots(self._database)
        except Corrupt:
            pass

    # --- helpers

    def _pairs(self, table: Table) -> Iterator[tuple[bytes, bytes]]:
        """All pairs of a table, some in a transaction."""
        start = b""
        while True:
            self._go_on()
            part = []
            try:
                with self._database.view() as view:
                    for pair in view.scan(table, start=start):
                        part.append(pair)
                        if len(part) == _ROWS:
                            break
            except StoreError as error:
                self._tell("rows", f"the table {table.value} cannot be read to its end: {error}")
                yield from part
                return
            yield from part
            if len(part) < _ROWS:
                return
            start = part[-1][0] + b"\0"

    def _go_on(self) -> None:
        if not self._goes_on():
            raise Interrupted

    def _tell(self, check: str, text: str, name: Hash = b"") -> None:
        if len(self.report.problems) < MAX_TOLD:
            self.report.problems.append(Problem(check, text, name))
        else:
            self.report.untold += 1


def group_trouble(objects: Objects, members: list[tuple[Hash, Location]]) -> dict[Hash, str]:
    """Which of these objects are not in the group in which the index has them all, and why."""
    try:
        table = objects.group(members[0][1])
    except StoreError as error:
        return {name: f"is not where the index says: {error}" for name, _ in members}
    return {name: "is not in its group as the index says" for name, location in members if table.get(name) != location}


def record_trouble(objects: Objects, packs: Packs, name: Hash, location: Location, *, in_group: bool = False) -> str:
    """What is wrong with a record, but for its payload; empty: nothing. ``in_group``: whether its group has the object
    is looked at elsewhere."""
    end = objects.ends().get(location.pack)
    if end is None or location.end > end:
        return f"is said to be in pack {location.pack:08x}, which does not reach so far"
    try:
        head = packs.read(location.pack, location.offset, RECORD_HEADER_SIZE)
        header = parse_record_header(head)
    except (StoreError, ValueError) as error:
        return f"is not where the index says: {error}"
    if not says(header, name, location):
        return "is not what the index says"
    if location.is_grouped:
        return "" if in_group else group_trouble(objects, [(name, location)]).get(name, "")
    broken = objects.broken(name, location)
    return f"cannot be decoded: {broken}" if broken else ""
