"""A repack: puts objects that are like each other into groups (``groups``), while all else goes on.

**What goes together.** The snapshots are walked, the newest first, and of each object it is noted at which path it was
met first. Objects are grouped by path, and in a group the newest of each path come first: they are its head. Those that
no snapshot reaches stay as they are, as do large ones and those that look random.

**Again and again.** What came since the last repack is *loose*: it has a record of its own. Once that is much beside
the group that the older versions at its paths are in, or much of that group is not needed any more, the group is made
anew with it. Nothing is replaced unless that saves a sixteenth of what is loose or not needed.

**Safety.** Each object is verified when it is read, and the group that was made is decoded and compared with what went
into it. Its bytes are written behind all others and synced, and one commit gives its objects their new place: as when a
collection moves them. The old records are of no use from then on, and the next collection gives their space back. No
object gets a base here, so none comes to need itself. Killed at any point, a repack leaves objects where they were, or
in groups; no collection and no repair goes on beside it. What is damaged stays as it is, and is told.

It holds a group in memory, and for each object that snapshots reach its name and two numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cogfs.store import groups, trees
from cogfs.store.codec import Codec
from cogfs.store.database import Change, Database
from cogfs.store.errors import Corrupt, NoSpace, NotFound, StoreError
from cogfs.store.hashing import HASH_SIZE
from cogfs.store.location import Location
from cogfs.store.naming import roots
from cogfs.store.objects import Objects
from cogfs.store.reach import Interrupted
from cogfs.store.records import RECORD_HEADER_SIZE
from cogfs.store.schema import NO_HASH, Hash, Kind, ObjectKind
from cogfs.store.steps import step

#: Larger ones stay as they are, and of those that could not be compressed, smaller ones.
_LARGEST = 512 * 1024
_LARGEST_RAW = 128 * 1024
#: Objects of a group.
_MEMBERS = 4096
#: Objects that are put into groups in one go.
_LOOSE = 100_000
#: A group is made anew for what is loose beside it when that is so large a part of it, or such a part is not needed.
_BESIDE = 8
_UNNEEDED = 4
#: The part of both that must be saved.
_SAVED = 16
#: Rows of the index that are read in one transaction, and objects between two looks whether to go on.
_ROWS = 5000
_STRIDE = 200
#: Plans that are remembered not to have paid, and damaged objects that are told.
_REMEMBERED = 100_000
_TOLD = 1000

Edit = Callable[[Callable[[Change], None]], None]
_Record = tuple[int, int]


@dataclass
class Repacked:
    """What a repack did."""

    #: Objects that are in new groups, and these.
    objects: int = 0
    groups: int = 0
    #: Bytes of the records that they were in, as far as these are of no use any more, and of the groups.
    before: int = 0
    after: int = 0
    #: By what was collected then: bytes that the packs are smaller by, packs that were removed, and objects that were
    #: dropped.
    freed: int = 0
    packs: int = 0
    dropped: int = 0
    #: Bytes that the index is smaller by.
    index: int = 0
    #: Why objects could not be read.
    damaged: list[str] = field(default_factory=list)
    #: There is more to do.
    more: bool = False
    #: Why all or part of it is left for another time; empty: it is done, or ``more``.
    deferred: str = ""
    #: It is left for want of room.
    full: bool = False

    def add(self, other: Repacked) -> None:
        """Counts what another one did, which went on where this one ended."""
        self.objects += other.objects
        self.groups += other.groups
        self.before += other.before
        self.after += other.after
        self.damaged = list(dict.fromkeys([*self.damaged, *other.damaged]))[:_TOLD]
        self.more, self.deferred, self.full = other.more, other.deferred, other.full


class _Item(NamedTuple):
    """An object that is to be put into a group."""

    name: Hash
    raw: int
    #: At which path it was met; one that was not has one of its own.
    path: bytes
    #: When it was met there: the newest first.
    met: int


@dataclass
class _Group:
    """A group that there is."""

    where: Location
    #: Bytes of its objects that the index has.
    live: int = 0

    @property
    def size(self) -> int:
        return self.where.end - self.where.offset


class Repack:
    """One repack."""

    def __init__(self, database: Database, objects: Objects, edit: Edit, vain: set[int]) -> None:
        """``edit`` as for a collection. ``vain`` remembers what did not pay, from one repack to the next."""
        self._database = database
        self._objects = objects
        self._edit = edit
        self._vain = vain
        self._report = Repacked()
        self._goes_on: Callable[[], bool] = lambda: True
        self._groups: dict[_Record, _Group] = {}
        #: The paths at which something was met, by number, and for each object the number and when it was met.
        self._paths: dict[bytes, int] = {}
        self._met: dict[Hash, tuple[int, int]] = {}
        self._loose: dict[Hash, Location] = {}
        #: By kind and number of a path: the group in which the newest object at it is that is in one.
        self._home: dict[tuple[ObjectKind, int], _Record] = {}

    def run(self, limit: int, goes_on: Callable[[], bool]) -> Repacked:
        """Writes ``limit`` bytes of groups, and one more group, at most."""
        self._goes_on = goes_on
        try:
            # What is pending is in the index then.
            self._edit(lambda change: None)
            self._look()
            self._walk()
            self._report.more = len(self._loose) >= _LOOSE
            for plan in self._plans():
                self._carry_out(*plan)
                if self._report.after >= limit:
                    self._report.more = True
                    break
            # Nothing came of it: the same would be tried again.
            self._report.more = self._report.more and self._report.groups > 0
        except Interrupted:
            self._report.deferred = "it was told to stop"
        except NoSpace as error:
            self._report.full = True
            self._report.deferred = str(error)
        except StoreError as error:
            self._report.deferred = str(error)
        return self._report

    def _go_on(self) -> None:
        if not self._goes_on():
            raise Interrupted

    # --- what there is

    def _look(self) -> None:
        """The groups, and how much of each is needed or may be."""
        start = b""
        while part := self._objects.located(start, _ROWS):
            self._go_on()
            start = part[-1][0] + b"\0"
            for _, location in part:
                if location.is_grouped:
                    self._groups.setdefault(location.record, _Group(location)).live += location.size

    def _walk(self) -> None:
        """All that snapshots reach, until enough is found that is loose."""
        found = sorted(
            ((root.snapshot_id, root.name) for root in roots(self._database) if root.snapshot_id), reverse=True
        )
        left = _STRIDE
        for _, root in found:
            waiting = [(root, b"")]
            while waiting:
                left -= 1
                if not left:
                    left = _STRIDE
                    self._go_on()
                if len(self._loose) >= _LOOSE:
                    return
                name, path = waiting.pop()
                if name not in self._met and self._meet(name, path) == ObjectKind.TREE:
                    waiting += self._below(name, path)

    def _meet(self, name: Hash, path: bytes) -> ObjectKind | None:
        """Notes an object, and says what it is; None: it is not there."""
        try:
            location = self._objects.locate(name)
        except StoreError as error:
            self._tell(error)
            return None
        number = self._paths.setdefault(path, len(self._paths))
        self._met[name] = number, len(self._met)
        if location.is_grouped:
            self._home.setdefault((location.kind, number), location.record)
        elif _is_fit(location):
            self._loose[name] = location
        return location.kind

    def _below(self, name: Hash, path: bytes) -> list[tuple[Hash, bytes]]:
        try:
            tree = trees.decode_tree(self._objects.read(name, ObjectKind.TREE))
        except (StoreError, ValueError) as error:
            self._tell(error)
            return []
        return [
            (entry.hash, path + b"/" + entry.name)
            for entry in reversed(tree.entries)
            if entry.kind in (Kind.FILE, Kind.DIRECTORY) and entry.hash != NO_HASH and entry.hash not in self._met
        ]

    def _tell(self, error: Exception) -> None:
        text = str(error)
        if len(self._report.damaged) < _TOLD and text not in self._report.damaged:
            self._report.damaged.append(text)

    # --- what goes together

    def _plans(self) -> Iterator[tuple[ObjectKind, list[_Item], _Group | None]]:
        """What is worth a try: objects of a kind, and the group that some of them are in now."""
        paths = list(self._paths)
        beside: dict[_Record, list[Hash]] = {}
        alone: dict[ObjectKind, list[_Item]] = {ObjectKind.TREE: [], ObjectKind.BLOB: []}
        for name, location in self._loose.items():
            home = self._home.get((location.kind, self._met[name][0]))
            if home is None:
                alone[location.kind].append(self._item(name, location, paths))
            else:
                beside.setdefault(home, []).append(name)
        for record, group in self._groups.items():
            loose = beside.get(record, [])
            cost = sum(_cost(self._loose[name]) for name in loose)
            if cost * _BESIDE >= group.size or (group.size - group.live) * _UNNEEDED >= group.size:
                items = [self._item(name, self._loose[name], paths) for name in loose]
                yield group.where.kind, [*items, *self._members(group, paths)], group
        for kind, items in alone.items():
            for part in _cut(items):
                yield kind, part, None

    def _item(self, name: Hash, location: Location, paths: list[bytes]) -> _Item:
        number, met = self._met.get(name, (-1, 0))
        # The names of paths begin with a slash, or are empty.
        return _Item(name, location.raw, paths[number] if number >= 0 else b"\xff" + name, met)

    def _members(self, group: _Group, paths: list[bytes]) -> list[_Item]:
        """The objects of a group that are needed, or may be."""
        try:
            table = self._objects.group(group.where)
        except Corrupt as error:
            self._tell(error)
            return []
        return [
            self._item(name, location, paths)
            for name, location in table.items()
            if self._objects.find(name) == location
        ]

    # --- groups

    def _carry_out(self, kind: ObjectKind, items: list[_Item], group: _Group | None) -> None:
        """Makes groups of some objects, all of them or none."""
        self._go_on()
        plan = hash((kind, frozenset(item.name for item in items)))
        if not items or plan in self._vain:
            return
        made = []
        put: list[Hash] = []
        for part in _cut(items):
            self._go_on()
            frames, names = self._read(kind, part)
            if group is not None and any(one.name not in names and one.name not in self._loose for one in part):
                return  # The group has to stay for its sake.
            if names:
                made.append(_make(kind, frames))
                put += names
        loose = sum(_cost(self._loose[name]) for name in put if name in self._loose)
        before = loose + (group.size if group is not None else 0)
        unneeded = group.size - group.live if group is not None else 0
        after = sum(len(payload) + RECORD_HEADER_SIZE for payload in made)
        if after > before - (loose + unneeded) // _SAVED:
            if len(self._vain) >= _REMEMBERED:
                self._vain.clear()
            self._vain.add(plan)
            return
        for payload in made:
            step("repack.made")
            self._objects.regroup(kind, payload)
            step("repack.written")
            self._edit(lambda change: None)
            step("repack.committed")
        self._report.groups += len(made)
        self._report.objects += len(put)
        self._report.before += before
        self._report.after += after

    def _read(self, kind: ObjectKind, items: list[_Item]) -> tuple[list[list[tuple[Hash, bytes]]], set[Hash]]:
        """What the frames of a group are made of, without what cannot be read."""
        frames: list[list[tuple[Hash, bytes]]] = []
        names: set[Hash] = set()
        for part in _frames(items):
            frame: list[tuple[Hash, bytes]] = []
            for item in part:
                try:
                    frame.append((item.name, self._objects.read(item.name, kind)))
                    names.add(item.name)
                except (NotFound, Corrupt) as error:
                    self._tell(error)
            if frame:
                frames.append(frame)
        return frames, names


def _make(kind: ObjectKind, frames: list[list[tuple[Hash, bytes]]]) -> bytes:
    """The payload of a group, which was proved to give these objects. StoreError when it does not."""
    payload = groups.encode(frames)
    problem = groups.wrong(kind, payload)
    if problem or [one.name for one in groups.members(payload)] != [name for frame in frames for name, _ in frame]:
        raise StoreError(f"a group that was made does not give what went into it: {problem}")
    return payload


def _is_fit(location: Location) -> bool:
    if location.kind == ObjectKind.CHUNKS:
        return False
    return 0 < location.raw <= (_LARGEST_RAW if location.codec == Codec.RAW else _LARGEST)


def _cost(location: Location) -> int:
    """Bytes that a record takes, with what the index has of it."""
    return location.size + (HASH_SIZE if location.is_delta else 0)


def _cut(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """The objects of one group after another; those of a path that are too many for one are cut into equal parts."""
    group: list[_Item] = []
    head = size = 0
    for _, versions in itertools.groupby(sorted(items, key=lambda item: (item.path, item.met)), lambda item: item.path):
        for part in _parts(list(versions)):
            more = sum(item.raw for item in part)
            if group and (
                head + part[0].raw > groups.HEAD_LIMIT
                or size + more > groups.GROUP_LIMIT
                or len(group) + len(part) > _MEMBERS
            ):
                yield group
                group, head, size = [], 0, 0
            group += part
            head += part[0].raw
            size += more
    if group:
        yield group


def _parts(versions: list[_Item]) -> Iterator[list[_Item]]:
    total = sum(item.raw for item in versions)
    # A part may be longer than its share by all but a byte of an object.
    share = -(-total // -(-total // (groups.GROUP_LIMIT - _LARGEST)))
    part: list[_Item] = []
    size = 0
    for item in versions:
        part.append(item)
        size += item.raw
        if size >= share or len(part) == _MEMBERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _frames(items: list[_Item]) -> Iterator[list[_Item]]:
    """The head, with the newest at each path, and then the others, in their order."""
    head: list[_Item] = []
    rest: list[_Item] = []
    for number, item in enumerate(items):
        (rest if number and items[number - 1].path == item.path else head).append(item)
    yield head
    frame: list[_Item] = []
    size = 0
    for item in rest:
        if frame and size + item.raw > groups.FRAME_LIMIT:
            yield frame
            frame, size = [], 0
        frame.append(item)
        size += item.raw
    if frame:
        yield frame
