"""A plain model of conversations, of what they remember, of the work that goes on in them and of their files: what each
message, rewind, fork, restore and undo means.

It has no transactions, no hashes and no plans: files are a value, and a branch is found by walking it. Knows nothing of
the product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

F = TypeVar("F")

KINDS = ("user", "user", "user", "assistant", "tool", "note", "session_event")
PASSED_OVER = ("note", "session_event")
OVER = ("ended", "interrupted")


@dataclass(eq=False)
class Kept(Generic[F]):
    """A snapshot."""

    #: Empty: nobody was told of it, as of a copy, or of what a restore keeps of the files before it.
    id: str
    place: int
    files: F
    pruned: bool = False
    copy_of: Kept[F] | None = None

    @property
    def name(self) -> str:
        """What it is known by; empty: by nothing."""
        return self.id or (f"copy of {self.copy_of.name}" if self.copy_of is not None else "")


@dataclass(frozen=True)
class Said(Generic[F]):
    """An entry of a thread."""

    id: str
    kind: str
    parent: str
    number: int
    kept: Kept[F] | None = None
    kept_after: Kept[F] | None = None
    follows: bool = False


@dataclass(frozen=True)
class Memo:
    """Something that is remembered: an item, a summary or a version of a file."""

    id: str
    kind: str
    name: str
    on: tuple[str, ...]
    order: int


@dataclass
class Work:
    """A run."""

    id: str
    talk: str
    #: Of the workspace; -1: none.
    place: int
    durable: bool
    #: going, paused, lapsed, ended or interrupted.
    state: str = "going"
    #: It was told to stop.
    stopping: bool = False
    #: Tool calls that have not ended.
    calls: set[str] = field(default_factory=set)


@dataclass
class Talk(Generic[F]):
    """A thread."""

    id: str
    #: Of the workspace; -1: none.
    place: int
    said: dict[str, Said[F]] = field(default_factory=dict)
    leaf: str = ""
    follows: bool = True
    memos: dict[str, Memo] = field(default_factory=dict)
    forks: set[tuple[str, str]] = field(default_factory=set)
    forked_from: tuple[str, str] | None = None

    def branch(self, leaf: str) -> list[Said[F]]:
        """From the root."""
        found: list[Said[F]] = []
        while leaf:
            found.insert(0, self.said[leaf])
            leaf = found[0].parent
        return found

    def ids(self) -> list[str]:
        """Of the entries of the active branch."""
        return [one.id for one in self.branch(self.leaf)]

    def counting(self, leaf: str) -> set[str]:
        """The memories that count on a branch."""
        there = {one.id: one.number for one in self.branch(leaf)}
        found = set()
        for memo in self.memos.values():
            if memo.kind == "item":
                good = not memo.on or any(entry in there for entry in memo.on)
            else:
                good = memo.on[0] in there
            if good and memo.kind == "file":
                mark = (there[memo.on[0]], memo.order)
                good = not any(
                    (there[one.on[0]], one.order) > mark
                    for one in self.memos.values()
                    if one.kind == "file" and one.name == memo.name and one.on[0] in there
                )
            if good:
                found.add(memo.id)
        return found

    def at(self, point: str) -> tuple[Kept[F], bool, str] | None:
        """The snapshot for a point, whether it is exact, and the entry that names it."""
        followed = [one for one in self._next(point) if one.kept is not None and one.follows]
        if followed:
            last = max(followed, key=lambda one: one.number)
            assert last.kept is not None
            return last.kept, True, last.id
        here = self.said[point]
        if here.kept_after is not None:
            return here.kept_after, True, point
        for one in reversed(self.branch(point)):
            if one.kept is not None:
                return one.kept, False, one.id
        return None

    def _next(self, point: str) -> Iterator[Said[F]]:
        for one in self.said.values():
            if one.parent == point:
                if one.kind in PASSED_OVER:
                    yield from self._next(one.id)
                elif one.kind == "user":
                    yield one


@dataclass(frozen=True)
class Way(Generic[F]):
    """The last restore of a workspace, as an undo has to take it back."""

    before: F
    #: What was restored, and the snapshot of the files before, where that was not made for the restore.
    target: Kept[F]
    safety: Kept[F] | None = None
    talk: str = ""
    previous: str = ""
    leaf: str = ""
    followed: bool = True


@dataclass(frozen=True)
class InTheWay:
    """Runs of the thread, runs of others in the workspace, and runs with tool calls there."""

    here: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    calling: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        return bool(self.here or self.elsewhere or self.calling)


@dataclass
class World(Generic[F]):
    """All there is: the files of each workspace, what undoes its last restore, and what is about them."""

    files: list[F]
    ways: list[Way[F] | None] = field(default_factory=list)
    talks: dict[str, Talk[F]] = field(default_factory=dict)
    kept: list[Kept[F]] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.ways = self.ways or [None for _ in self.files]

    def copy(self) -> World[F]:
        """Another one, in which things can go on differently. Files are shared, and never changed in place."""
        shared = [*self.files, *(kept.files for kept in self.kept), *(way.before for way in self.ways if way)]
        return copy.deepcopy(self, {id(files): files for files in shared})

    # --- writing ------------------------------------------------------------------------------------------------------

    def begin(self, talk_id: str, place: int) -> Talk[F]:
        self.talks[talk_id] = Talk(talk_id, place)
        return self.talks[talk_id]

    def keep(self, snapshot_id: str, place: int) -> Kept[F]:
        """The files as they are."""
        kept = Kept(snapshot_id, place, self.files[place])
        self.kept.append(kept)
        return kept

    def say(self, talk_id: str, entry_id: str, kind: str, kept: Kept[F] | None) -> Said[F]:
        talk = self.talks[talk_id]
        follows = kind == "user" and talk.follows
        said = Said(entry_id, kind, talk.leaf, len(talk.said) + 1, kept, None, follows)
        talk.said[entry_id] = said
        talk.leaf = entry_id
        talk.follows = talk.follows or kept is not None
        return said

    def remember(self, talk_id: str, memory_id: str, kind: str, name: str, on: tuple[str, ...]) -> Memo:
        talk = self.talks[talk_id]
        if kind != "item":
            on = on[:1] or (talk.leaf,)
        self.count += 1
        talk.memos[memory_id] = Memo(memory_id, kind, name, on, self.count)
        return talk.memos[memory_id]

    def pruned(self, ids: Iterable[str]) -> None:
        for snapshot_id in ids:
            for kept in self.kept:
                if kept.id == snapshot_id:
                    kept.pruned = True

    def delete(self, talk_id: str) -> None:
        """Forget a thread. The runs of it that nobody works on are over."""
        del self.talks[talk_id]
        for other in self.talks.values():
            other.forks = {link for link in other.forks if link[0] != talk_id}
        for work in self.works.values():
            if work.talk == talk_id and work.state not in OVER:
                work.state = "interrupted"

    # --- what is in the way -------------------------------------------------------------------------------------------

    def in_the_way(self, talk_id: str, place: int, *, of_runs: bool = True) -> InTheWay:
        """Of the conversation of a thread (empty: of none), and of the files of a workspace (-1: of none)."""
        going = [work for work in self.works.values() if work.state == "going" and of_runs]
        return InTheWay(
            tuple(work.id for work in going if work.talk == talk_id),
            tuple(work.id for work in going if work.talk != talk_id and place >= 0 and work.place == place),
            tuple(work.id for work in self.works.values() if work.calls and place >= 0 and work.place == place),
        )

    def clear(self, talk_id: str, place: int, *, of_runs: bool = True) -> tuple[str, ...]:
        """Stop what is in the way, and wait for nobody; the runs that were stopped."""
        found = self.in_the_way(talk_id, place, of_runs=of_runs)
        stopped = []
        for run_id in found.here + found.elsewhere:
            if self.works[run_id].durable and place >= 0:
                # A lease is not broken while files are restored.
                self.works[run_id].stopping = True
            else:
                stopped.append(run_id)
        if of_runs:
            going = found.here + found.elsewhere
            stopped += [one for one in found.calling if one not in going and self.works[one].state not in OVER]
        for run_id in stopped:
            self.works[run_id].state = "interrupted"
            self.works[run_id].stopping = False
        return tuple(stopped)

    def idle(self, talk_id: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The runs of a thread that nobody works on: paused ones, and those whose lease ran out."""
        here = [work for work in self.works.values() if work.talk == talk_id]
        return (
            tuple(work.id for work in here if work.state == "paused"),
            tuple(work.id for work in here if work.state == "lapsed"),
        )

    def _drop(self, talk_id: str) -> None:
        for run_id in (one for some in self.idle(talk_id) for one in some):
            self.works[run_id].state = "interrupted"

    # --- ways back ----------------------------------------------------------------------------------------------------

    def restore(self, kept: Kept[F], talk: Talk[F] | None = None, leaf: str = "") -> bool:
        """A workspace gets the files of a snapshot, in a rewind or its undo if there is a ``talk``. Whether any file
        changes."""
        before = self.files[kept.place]
        way = Way(before, kept, kept if before == kept.files else None)
        if talk is not None:
            way = replace(way, talk=talk.id, previous=talk.leaf, leaf=leaf, followed=talk.follows)
        if before != kept.files or (talk is not None and talk.leaf != leaf):
            self.ways[kept.place] = way
        self.files[kept.place] = kept.files
        return before != kept.files

    def rewind(self, talk_id: str, point: str, *, files: bool, memory: bool, before: bool = False) -> None:
        """To an entry of the active branch; with ``before`` to what it follows, and to its own files."""
        talk = self.talks[talk_id]
        found = self.found(talk, point, before=before) if files else None
        leaf = talk.leaf
        if memory:
            leaf = talk.said[point].parent if before else point
        cut = leaf != talk.leaf
        if found is not None:
            # Files that were right already still follow, where they did.
            stays = not self.restore(found[0], talk, leaf) and not cut
            talk.follows = (found[1] and memory) or (stays and talk.follows)
        elif cut:
            talk.follows = False
        talk.leaf = leaf
        if cut:
            self._drop(talk_id)

    @staticmethod
    def found(talk: Talk[F], point: str, *, before: bool = False) -> tuple[Kept[F], bool, str] | None:
        """The snapshot for a rewind, whether it is exact, and the entry that names it."""
        if not before:
            return talk.at(point)
        said = talk.said[point]
        return (said.kept, said.follows, point) if said.kept is not None else None

    def to_undo(self, place: int) -> Talk[F] | None:
        """The thread that an undo takes back with the files."""
        way = self.ways[place]
        talk = self.talks.get(way.talk) if way is not None else None
        return talk if talk is not None and way is not None and talk.leaf == way.leaf else None

    def undo(self, place: int) -> None:
        way, talk = self.ways[place], self.to_undo(place)
        assert way is not None
        self.restore(way.safety or Kept("", place, way.before), talk, way.previous)
        if talk is not None:
            cut = set(talk.ids()) - {one.id for one in talk.branch(way.previous)}
            talk.leaf, talk.follows = way.previous, way.followed
            if cut:
                self._drop(talk.id)

    # --- forks --------------------------------------------------------------------------------------------------------

    def copied(self, talk_id: str, point: str, place: int) -> list[Kept[F]]:
        """The snapshots that the workspace of a fork with files gets as its own."""
        talk = self.talks[talk_id]
        found = talk.at(point)
        assert found is not None
        named = [kept for one in talk.branch(point) for kept in (one.kept, one.kept_after) if kept is not None]
        wanted = {id(kept): kept for kept in (*named, found[0])}
        return [kept for kept in wanted.values() if kept.place == found[0].place != place and not kept.pruned]

    def taken_along(self, talk_id: str, point: str) -> list[Memo]:
        """What a fork remembers."""
        talk = self.talks[talk_id]
        there = {one.id for one in talk.branch(point)}
        cut = [replace(memo, on=tuple(entry for entry in memo.on if entry in there)) for memo in talk.memos.values()]
        return [memo for memo in cut if memo.on or not talk.memos[memo.id].on]

    def fork(self, talk_id: str, point: str, new_id: str, place: int | None) -> None:
        """``place``: the workspace that gets the files; None: the files are left alone."""
        talk = self.talks[talk_id]
        found = talk.at(point)
        new: Talk[F] = Talk(new_id, talk.place if place is None else place)
        copies: dict[int, Kept[F]] = {}
        if place is not None:
            for kept in self.copied(talk_id, point, place):
                copies[id(kept)] = Kept("", place, kept.files, copy_of=kept)
            self.kept += copies.values()
        for number, one in enumerate(talk.branch(point), 1):
            after = one.kept_after
            if one.id == point and found is not None and found[1] and found[2] != point:
                after = found[0]
            own, own_after = (copies.get(id(kept), kept) if kept is not None else None for kept in (one.kept, after))
            new.said[one.id] = replace(one, number=number, kept=own, kept_after=own_after)
        new.leaf = point
        new.memos = {memo.id: memo for memo in self.taken_along(talk_id, point)}
        new.follows = point == talk.leaf and talk.follows
        if place is not None:
            assert found is not None
            self.restore(copies.get(id(found[0]), found[0]))
            new.follows = found[1]
        new.forked_from = (talk_id, point)
        talk.forks.add((new_id, point))
        self.talks[new_id] = new

    def add_place(self, files: F) -> int:
        """Another workspace."""
        self.files.append(files)
        self.ways.append(None)
        return len(self.files) - 1
