"""A collection: marks what is needed, and sweeps the rest out of the packs, one pack at a time, while all else goes on.

**Mark.** From now on each row that is written is noted (``named``). All rows are read, a few at a time, and all that
they reach is marked. Then operations are waited for that began before that was done: they may hold names out of rows
that have been replaced since, and if they put them into rows again, these are noted. So what those can come to name
that begin later is marked, noted, or new: put or kept since. The last two are marked as well, and that is *decided*:
from then on what is left counts as absent for those who put (``Objects.sweep``), so that nobody comes to need it.

**Bases.** What is needed needs its base. What is kept for being new does as well, though nothing has marked it, so its
base is marked; and nothing is put any more against what is going to be dropped. Of what is to be dropped, all that has
a base goes first, those before their bases: so at no moment has the index an object whose base it has not.

**Sweep.** Of a pack, what is needed is copied to the pack that grows, some records at a time. Each time the bytes are
synced, and one commit names the copies and drops what is not needed. The last commit says that the pack is empty; only
then is its file removed, and at last the row that said so. Packs of which nothing is needed come first, since they
give back space without taking any. A collection that is interrupted or killed at any point has moved some objects and
dropped some that nobody needs; the next one does the rest.

**Groups** (``groups``) go as a whole. As long as anything in one is needed it is kept, and moved; what is not needed of
it leaves the index.

**What cannot be read.** A tree, or a list of chunks, that is damaged hides what it names: nobody knows then what is
needed, and a repair may bring it back. So nothing at all is dropped when something that is needed cannot be read, or
is not there, unless a repair has found that it is in no pack any more (table ``lost``): then what is still reached
without it is kept, and the rest goes. A record that is needed and damaged keeps its pack from being removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cogfs.store.database import Change, Database, Table
from cogfs.store.errors import Corrupt, StoreError
from cogfs.store.location import Location
from cogfs.store.naming import Root, roots
from cogfs.store.objects import Objects, Sweep
from cogfs.store.packs import Packs
from cogfs.store.reach import Affected, Interrupted, Reach
from cogfs.store.records import PACK_HEADER_SIZE
from cogfs.store.schema import Hash
from cogfs.store.steps import step

#: Rows of the index that are read in one transaction.
_ROWS = 5000
#: Records and bytes that are moved or dropped in one commit.
_STEP_RECORDS = 1000
_STEP_BYTES = 8 * 1024 * 1024
#: Objects whose places are in memory while packs are swept.
_PLACES = 200_000
#: A pack is rewritten when a quarter of it is not needed.
_WASTE = 4
#: So many packs that are small, and do not grow any more, are put together.
_SMALL_PACKS = 16
#: Snapshots that are named as unreadable.
_MAX_NAMED = 1000

Edit = Callable[[Callable[[Change], None]], None]


class Unreadable(NamedTuple):
    """Something that needs an object which cannot be read."""

    #: Empty when it is no snapshot, but what is recorded of the workspace.
    snapshot_id: str
    workspace_id: str
    reason: str


@dataclass
class Collected:
    """What a collection did."""

    #: Objects that were dropped.
    objects: int = 0
    #: Bytes that the packs are smaller by.
    freed: int = 0
    #: Packs that were removed.
    packs: int = 0
    #: Objects that are needed.
    live: int = 0
    #: Bytes of no use that stay, in packs of which most is needed.
    waste: int = 0
    unreadable: tuple[Unreadable, ...] = ()
    #: Why all or part of it is left for another time; empty: it is done.
    deferred: str = ""


@dataclass
class _Pack:
    """What an index says of a pack."""

    live: int = 0
    dead: int = 0
    live_bytes: int = 0
    #: Offsets of the groups of which something is needed.
    groups: set[int] = field(default_factory=set)
    #: Offsets of the groups of which something is not.
    shrunk: set[int] = field(default_factory=set)
    places: list[tuple[int, Hash, Location]] = field(default_factory=list)

    @property
    def hollow(self) -> set[int]:
        """Offsets of the groups of which some is needed and some is not."""
        return self.groups & self.shrunk


class Collection:
    """One collection."""

    def __init__(self, database: Database, objects: Objects, packs: Packs, edit: Edit) -> None:
        """``edit`` commits a change of the index, with all objects put so far, whose bytes it syncs before."""
        self._database = database
        self._objects = objects
        self._packs = packs
        self._edit = edit
        self._report = Collected()
        self._unreadable: dict[tuple[str, str], str] = {}

    def run(
        self,
        more_roots: Callable[[], Iterable[Root]],
        named: Callable[[], set[Hash]],
        *,
        grace: float,
        thorough: bool,
        patience: float,
        goes_on: Callable[[], bool],
    ) -> Collected:
        """As ``Store.collect``."""
        started = self._objects.recent.now()
        try:
            reach = Reach(self._objects, goes_on)
            reach.mark(root.name for root in self._roots(more_roots))
            step("gc.marked")
            if not self._objects.recent.wait(patience, goes_on):
                self._report.deferred = "other work that began before takes long"
                return self._report
            # What waits for a commit is in the index then, and what is put from now on lies behind.
            self._edit(lambda change: None)
            sweep = Sweep(reach.live, self._objects.recent.fresh(grace, started).since)
            self._objects.sweep(sweep)
            # Touched before it was told what counts as absent: the sweep must know of it.
            touched = self._objects.recent.fresh(grace, started).names
            # One that is not there is about to be put.
            reach.mark([name for name in touched if self._objects.find(name) is not None])
            reach.mark(root.name for root in more_roots())
            reach.mark(list(named()))
            loose = self._ground(sweep, reach)
            self._report.live = len(reach.live)
            if self._may_drop(reach.bad, more_roots):
                self._sweep(sweep, loose, thorough, goes_on)
        except Interrupted:
            self._report.deferred = "it was told to stop"
        except StoreError as error:
            self._report.deferred = str(error)
        finally:
            self._objects.sweep(None)
            self._report.unreadable = tuple(
                Unreadable(snapshot, workspace, reason)
                for (snapshot, workspace), reason in list(self._unreadable.items())[:_MAX_NAMED]
            )
        return self._report

    def _roots(self, more_roots: Callable[[], Iterable[Root]]) -> Iterator[Root]:
        # Those first: what they name leaves them only when a row has it.
        yield from more_roots()
        yield from roots(self._database)

    def _ground(self, sweep: Sweep, reach: Reach) -> dict[Hash, Location]:
        """Marks the bases of what is kept for being new; gives what has a base and is to be dropped."""
        loose: dict[Hash, Location] = {}
        for name, location in self._objects.with_base():
            if sweep.keeps(name, location):
                reach.mark_base(location.base)
            else:
                loose[name] = location
        return {name: location for name, location in loose.items() if name not in reach.live}

    # --- what cannot be read

    def _may_drop(self, bad: dict[Hash, str], more_roots: Callable[[], Iterable[Root]]) -> bool:
        lost = set()
        with self._database.view() as view:
            for name in view.keys(Table.LOST):
                lost.add(name)
        unknown = {name: reason for name, reason in bad.items() if name not in lost}
        self._name_unreadable(bad, more_roots)
        if unknown:
            self._report.deferred = (
                f"{len(unknown)} objects that are needed cannot be read, so what they need is not known:"
                " run cogfsctl check and cogfsctl repair"
            )
            return False
        return True

    def _name_unreadable(self, bad: dict[Hash, str], more_roots: Callable[[], Iterable[Root]]) -> None:
        if not bad:
            return
        affected = Affected(self._objects, bad)
        for root in self._roots(more_roots):
            key = (root.snapshot_id, root.workspace_id)
            if key not in self._unreadable and next(affected.paths(root.name), None) is not None:
                self._unreadable[key] = bad.get(root.name, "something in it cannot be read")

    # --- sweeping

    def _sweep(self, sweep: Sweep, loose: dict[Hash, Location], thorough: bool, goes_on: Callable[[], bool]) -> None:
        growing = self._packs.end()[0]
        found = self._look(sweep)
        chosen = self._choose(found, growing, thorough)
        if not chosen and not any(pack.hollow for pack in found.values()):
            return
        # Of a pack that is left it is known later how much of it is of no use.
        for number in chosen | {location.pack for location in loose.values()}:
            self._packs.leave(number)
        # Nothing is appended to them any more, and what was put into them meanwhile is in the index from here on.
        self._edit(lambda change: None)
        self._drop_loose(loose, goes_on)
        self._drop_members({number: pack for number, pack in found.items() if number not in chosen}, sweep, goes_on)
        waiting = sorted(chosen, key=lambda number: found[number].live_bytes)
        while waiting:
            group = [waiting.pop(0)]
            places = found[group[0]].live + found[group[0]].dead
            while waiting and places + found[waiting[0]].live + found[waiting[0]].dead <= _PLACES:
                group.append(waiting.pop(0))
                places += found[group[-1]].live + found[group[-1]].dead
            for number, pack in self._places(set(group)).items():
                self._empty(number, pack, sweep, goes_on)
        self._forget_removed()

    def _drop_loose(self, loose: dict[Hash, Location], goes_on: Callable[[], bool]) -> None:
        """Drops what has a base, each before its base."""
        order = sorted(loose.items(), key=lambda item: _depth(item[0], loose), reverse=True)
        for start in range(0, len(order), _STEP_RECORDS):
            if not goes_on():
                raise Interrupted
            step("gc.loosened")
            self._drop(order[start : start + _STEP_RECORDS], 0)

    def _drop_members(self, packs: dict[int, _Pack], sweep: Sweep, goes_on: Callable[[], bool]) -> None:
        """Drops what is not needed of groups that stay where they are. Their bytes stay until a repack makes the group
        anew, which goes by what the index has of it."""
        hollow = {(number, offset) for number, pack in packs.items() for offset in pack.hollow}
        dead: list[tuple[Hash, Location]] = []
        for name, location in self._located() if hollow else ():
            if location.is_grouped and location.record in hollow and not sweep.keeps(name, location):
                dead.append((name, location))
            if len(dead) == _STEP_RECORDS:
                if not goes_on():
                    raise Interrupted
                self._drop(dead, 0)
                dead = []
        if dead:
            self._drop(dead, 0)

    def _look(self, sweep: Sweep) -> dict[int, _Pack]:
        """All packs that the index knows."""
        found = {number: _Pack() for number in self._objects.ends()}
        for name, location in self._located():
            pack = found.setdefault(location.pack, _Pack())
            if sweep.keeps(name, location):
                pack.live += 1
                if not location.is_grouped:
                    pack.live_bytes += location.size
                elif location.offset not in pack.groups:
                    # As long as anything in it is needed, the whole of it stays.
                    pack.groups.add(location.offset)
                    pack.live_bytes += location.end - location.offset
            else:
                pack.dead += 1
                if location.is_grouped:
                    pack.shrunk.add(location.offset)
        return found

    def _choose(self, found: dict[int, _Pack], growing: int, thorough: bool) -> set[int]:
        """The packs to rewrite."""
        ends = self._objects.ends()
        sizes = {number: ends[number] - PACK_HEADER_SIZE for number in found if number in ends}
        waste = {number: max(0, size - found[number].live_bytes) for number, size in sizes.items()}
        chosen = {
            number
            for number, size in sizes.items()
            if not found[number].live or (waste[number] and (thorough or waste[number] * _WASTE >= size))
        }
        small = {number for number in sizes if number != growing and ends[number] * _SMALL_PACKS < self._packs.limit}
        if len(small) >= _SMALL_PACKS:
            chosen |= small
        much = growing in sizes and waste[growing] * _WASTE >= sizes[growing]
        if not found.get(growing, _Pack()).dead and growing not in small and not much:
            # What is new is in it: only what is dropped is worth another one, or what a repack has left behind.
            chosen.discard(growing)
        self._report.waste = sum(size for number, size in waste.items() if number not in chosen)
        return chosen

    def _places(self, numbers: set[int]) -> dict[int, _Pack]:
        """What the index has in some packs, by offset."""
        found = {number: _Pack() for number in sorted(numbers)}
        for name, location in self._located():
            if location.pack in numbers:
                found[location.pack].places.append((location.offset, name, location))
        for pack in found.values():
            pack.places.sort()
        return found

    def _located(self) -> Iterator[tuple[Hash, Location]]:
        start = b""
        while part := self._objects.located(start, _ROWS):
            yield from part
            start = part[-1][0] + b"\0"

    def _empty(self, number: int, pack: _Pack, sweep: Sweep, goes_on: Callable[[], bool]) -> None:
        """Moves what is needed out of a pack, drops the rest, and removes it, unless something in it is damaged."""
        whole = True
        moved = 0
        places = deque(pack.places)
        while True:
            if not goes_on():
                raise Interrupted
            dead: list[tuple[Hash, Location]] = []
            size = count = 0
            while places and count < _STEP_RECORDS and size < _STEP_BYTES:
                offset = places[0][0]
                members: list[tuple[Hash, Location]] = []
                while places and places[0][0] == offset:
                    _, name, location = places.popleft()
                    count += 1
                    (members if sweep.keeps(name, location) else dead).append((name, location))
                if not members:
                    continue
                size += members[0][1].end - offset
                try:
                    self._objects.move(members)
                except Corrupt as error:
                    whole = False
                    self._unreadable.setdefault(("", ""), str(error))
            moved += size
            step("gc.copied")
            self._drop(dead, number if whole and not places else 0)
            if not places:
                break
        if whole:
            step("gc.given-up")
            self._report.freed += self._objects.remove(number) - moved
            self._report.packs += 1

    def _drop(self, dead: list[tuple[Hash, Location]], empty: int) -> None:
        """Names what was copied, drops ``dead``, and says that pack ``empty`` is empty (0: none)."""
        dropped = 0

        def edit(change: Change) -> None:
            nonlocal dropped
            dropped = self._objects.drop(dead, change)
            if empty:
                self._objects.give_up(empty, change)

        self._edit(edit)
        self._report.objects += dropped

    def _forget_removed(self) -> None:
        """Takes the rows of removed packs away."""
        removed: set[int] = set()

        def edit(change: Change) -> None:
            nonlocal removed
            removed = self._objects.forget_removed(change)

        step("gc.forget")
        self._edit(edit)
        self._objects.forgotten(removed)


def _depth(name: Hash, loose: dict[Hash, Location]) -> int:
    """How many of ``loose`` the object needs, itself included."""
    depth = 0
    while depth <= len(loose) and (location := loose.get(name)) is not None:
        depth += 1
        name = location.base
    return depth
