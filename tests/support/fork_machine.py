"""A state machine: random conversations with memory about two workspaces, rewound, forked, undone and pruned, by
daemons that are killed in between, against a plain model of what each of that means.

The model has no transactions, no hashes and no plans: files are a dictionary, and a branch is found by walking it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cogfs.client import CogfsError, Fork, NotFound, Thread, ValidationError, Workspace
from cogfs.v1 import thread_pb2
from tests.support.installation import remove
from tests.support.state_machine import Session

Files = dict[str, str]
_Item = TypeVar("_Item")

_KINDS = ("user", "user", "user", "assistant", "tool", "note", "session_event")
_PASSED_OVER = ("note", "session_event")
_NAMES = ("a", "b", "c")


@dataclass(eq=False)
class Kept:
    """A snapshot."""

    id: str
    place: int
    files: Files
    pruned: bool = False


@dataclass(frozen=True)
class Said:
    id: str
    kind: str
    parent: str
    number: int
    kept: Kept | None = None
    kept_after: Kept | None = None
    follows: bool = False


@dataclass(frozen=True)
class Memo:
    id: str
    kind: str
    name: str
    on: tuple[str, ...]
    order: int


@dataclass
class Talk:
    id: str
    #: Of the workspace; -1: none.
    place: int
    said: dict[str, Said] = field(default_factory=dict)
    leaf: str = ""
    follows: bool = True
    memos: dict[str, Memo] = field(default_factory=dict)
    forks: set[tuple[str, str]] = field(default_factory=set)

    def branch(self, leaf: str) -> list[Said]:
        """From the root."""
        found: list[Said] = []
        while leaf:
            found.insert(0, self.said[leaf])
            leaf = found[0].parent
        return found

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

    def at(self, point: str) -> tuple[Kept, bool, str] | None:
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

    def _next(self, point: str) -> Iterator[Said]:
        for one in self.said.values():
            if one.parent == point:
                if one.kind in _PASSED_OVER:
                    yield from self._next(one.id)
                elif one.kind == "user":
                    yield one


@dataclass(frozen=True)
class Way:
    """The last restore of a workspace, as an undo has to take it back."""

    before: Files
    talk: str = ""
    previous: str = ""
    leaf: str = ""
    followed: bool = True


#: What is said, one after the other, and the files that are written before each, with what is remembered by it.
Turn = list[tuple[str, str, str, str]]
_turns: st.SearchStrategy[Turn] = st.lists(
    st.tuples(
        st.sampled_from(_KINDS),
        st.sampled_from(_NAMES),
        st.sampled_from(("x", "y", "z", "")),
        st.sampled_from(("", "", "item", "summary", "file")),
    ),
    min_size=1,
    max_size=5,
)


class ForkMachine(RuleBasedStateMachine):
    """``session`` is set by who runs it."""

    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.session.runs += 1
        self.place = self.session.installation.directory / f"talk{self.session.runs}"
        self.roots = [self.place / "one", self.place / "two"]
        self.files: list[Files] = [{"a": "begin"}, {"b": "other"}]
        for root, files in zip(self.roots, self.files, strict=True):
            root.mkdir(parents=True)
            for name, content in files.items():
                (root / name).write_text(content)
        self.talks: dict[str, Talk] = {}
        self.kept: list[Kept] = []
        self.ways: list[Way | None] = [None, None]
        self.count = 0

    @initialize(scanned=st.tuples(st.booleans(), st.booleans()), turns=st.lists(_turns, min_size=3, max_size=6))
    def mount(self, scanned: tuple[bool, bool], turns: list[Turn]) -> None:
        for root, scan in zip(self.roots, scanned, strict=True):
            self.session.cog.mount(root, scan=scan)
        self._begin(0)
        self._begin(1)
        for turn in turns:
            self._turn(self._talk(0), turn)

    def teardown(self) -> None:
        try:
            for talk in self.talks.values():
                self._check(talk)
        finally:
            for thread in self.session.cog.threads():
                if thread.id in self.talks:
                    thread.delete()
            for root in self.roots:
                workspace = self.session.cog.workspace(root)
                workspace.unmount(force=True)
                workspace.delete()
            remove(self.place)

    # --- what there is ------------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        self.count += 1
        return f"r{self.session.runs}-{what}{self.count}"

    def _thread(self, talk: Talk) -> Thread:
        return self.session.cog.thread(talk.id)

    def _workspace(self, place: int) -> Workspace:
        return self.session.cog.workspace(self.roots[place])

    def _one(self, items: list[_Item], number: int) -> _Item:
        return items[number % len(items)]

    def _talk(self, number: int) -> Talk:
        return self._one(list(self.talks.values()), number)

    def _begin(self, place: int) -> None:
        talk = Talk(self._name("t"), place)
        workspace = self._workspace(place) if place >= 0 else None
        self.session.cog.create_thread(talk.id, workspace=workspace)
        self.talks[talk.id] = talk

    def _check(self, talk: Talk) -> None:
        """The daemon says of a thread what the model says."""
        thread = self._thread(talk)
        assert thread.message.leaf_id == talk.leaf
        assert {(link.thread_id, link.entry_id) for link in thread.message.forks} == talk.forks
        active = {one.id for one in talk.branch(talk.leaf)}
        listed = list(thread.entries(all_branches=True))
        assert [entry.id for entry in listed] == [one.id for one in talk.said.values()]
        for entry, one in zip(listed, talk.said.values(), strict=True):
            assert (entry.parent_id, entry.active, entry.files_follow) == (one.parent, one.id in active, one.follows)
            for message, kept in (
                (entry.file_checkpoint, one.kept),
                (entry.file_checkpoint_at, one.kept_after),
            ):
                assert message.snapshot_id == (kept.id if kept is not None else "")
                assert message.pruned == (kept is not None and kept.pruned)
        branch = [entry.id for entry in thread.entries()]
        assert branch == [one.id for one in talk.branch(talk.leaf)]
        assert [entry.id for entry in thread.entries(newest_first=True)] == branch[::-1]
        self._check_memory(thread, talk)

    def _check_memory(self, thread: Thread, talk: Talk) -> None:
        counting = talk.counting(talk.leaf)
        items = {memo.id for memo in talk.memos.values() if memo.kind == "item"}
        assert {memory.id for memory in thread.memory(active_only=True)} == counting
        assert {memory.id for memory in thread.memory()} == counting | items
        for memory in thread.memory(all_branches=True):
            assert memory.HasField("stale_because") == (memory.id not in counting)
            assert list(memory.entry_ids) == list(talk.memos[memory.id].on)
        assert {memory.id for memory in thread.memory(all_branches=True)} == set(talk.memos)

    def _check_files(self) -> None:
        for root, files in zip(self.roots, self.files, strict=True):
            assert {path.name: path.read_text() for path in root.iterdir()} == files

    def _check_shift(self, report: thread_pb2.MemoryReport, talk: Talk, before: str, after: str) -> None:
        was, now = talk.counting(before), talk.counting(after)
        items = {memo.id for memo in talk.memos.values() if memo.kind == "item"}
        assert set(report.stale) == (was - now) & items
        assert set(report.hidden) == was - now - items
        assert set(report.active) == now - was

    # --- what is done -------------------------------------------------------------------------------------------------

    @rule(place=st.integers(0, 1), name=st.sampled_from(_NAMES), content=st.sampled_from(("x", "y", "z", "")))
    def write(self, place: int, name: str, content: str) -> None:
        self._write(place, name, content)

    def _write(self, place: int, name: str, content: str) -> None:
        path = self.roots[place] / name
        if content:
            path.write_text(content)
            self.files[place][name] = content
        elif self.files[place].pop(name, None) is not None:
            path.unlink()

    @rule(place=st.integers(-1, 1))
    @precondition(lambda self: len(self.talks) < 4)
    def begin(self, place: int) -> None:
        self._begin(place)

    @rule(number=st.integers(0, 9), turn=_turns)
    def turn(self, number: int, turn: Turn) -> None:
        self._turn(self._talk(number), turn)

    def _turn(self, talk: Talk, turn: Turn) -> None:
        for kind, name, content, memory in turn:
            if talk.place >= 0:
                self._write(talk.place, name, content)
            self._say(talk, kind)
            if memory:
                # On the entry that was just said and one before it.
                last = len(talk.said) - 1
                self._remember(talk, memory, [last, last // 2], again=False)
        self._check(talk)

    def _say(self, talk: Talk, kind: str) -> None:
        entry = self._thread(talk).append(kind, "said", id=self._name("e"))
        kept = None
        if kind == "user" and talk.place >= 0:
            kept = Kept(entry.file_checkpoint.snapshot_id, talk.place, dict(self.files[talk.place]))
            self.kept.append(kept)
        assert entry.HasField("file_checkpoint") == (kept is not None)
        follows = kind == "user" and talk.follows
        talk.said[entry.id] = Said(entry.id, kind, talk.leaf, len(talk.said) + 1, kept, None, follows)
        talk.leaf = entry.id
        talk.follows = talk.follows or kept is not None

    @rule(
        number=st.integers(0, 9),
        kind=st.sampled_from(("item", "item", "summary", "file")),
        on=st.lists(st.integers(0, 99), max_size=3),
        again=st.booleans(),
    )
    def remember(self, number: int, kind: str, on: list[int], again: bool) -> None:
        self._remember(self._talk(number), kind, on, again=again)

    def _remember(self, talk: Talk, kind: str, on: list[int], *, again: bool) -> None:
        entries = tuple(dict.fromkeys(self._one(list(talk.said), one) for one in on)) if talk.said else ()
        known = [memo for memo in talk.memos.values() if memo.kind == kind]
        memory_id = known[0].id if again and known else self._name("m")
        if kind != "item":
            entries = entries[:1]
        if kind != "item" and not talk.said:
            with pytest.raises(ValidationError):
                self._thread(talk).put_memory("x", kind=kind, name="n" if kind == "file" else None)
            return
        name = f"n{len(on) % 2}" if kind == "file" else ""
        put = self._thread(talk).put_memory("x", entries, kind=kind, name=name, id=memory_id)
        if kind != "item":
            entries = entries or (talk.leaf,)
        self.count += 1
        talk.memos[memory_id] = Memo(memory_id, kind, name, entries, self.count)
        assert put.HasField("stale_because") == (memory_id not in talk.counting(talk.leaf))
        self._check_memory(self._thread(talk), talk)

    @rule(number=st.integers(0, 9), to=st.integers(0, 99), files=st.booleans(), memory=st.booleans())
    def rewind(self, number: int, to: int, files: bool, memory: bool) -> None:
        talk = self._talk(number)
        if not talk.said:
            return
        thread = self._thread(talk)
        branch = [one.id for one in talk.branch(talk.leaf)]
        # One that is not on the branch now and then.
        point = self._one(list(talk.said) if to % 5 == 0 else branch, to)
        found = talk.at(point) if files and point in branch else None
        if not (files or memory) or point not in branch or (files and (found is None or found[0].pruned)):
            for dry_run in (True, False):
                with pytest.raises(ValidationError):
                    thread.rewind(point, files=files, memory=memory, dry_run=dry_run)
            self._check(talk)
            self._check_files()
            return
        plan = thread.rewind(point, files=files, memory=memory, dry_run=True)
        report = thread.rewind(point, files=files, memory=memory)
        cut = branch[branch.index(point) + 1 :] if memory else []
        assert list(plan.conversation.cut) == list(report.conversation.cut) == cut
        assert plan.memory == report.memory
        before, leaf = talk.leaf, point if memory else talk.leaf
        self._check_shift(report.memory, talk, before, leaf)
        if found is None:
            if cut:
                talk.leaf, talk.follows = leaf, False
        else:
            kept, exact, entry = found
            assert (report.files.exact, report.files.entry_id) == (exact, entry)
            # Files that were right already still follow, where they did.
            stays = not self._restored(kept, talk, leaf) and leaf == talk.leaf
            talk.leaf, talk.follows = leaf, (exact and memory) or (stays and talk.follows)
        self._check(talk)
        self._check_files()

    def _restored(self, kept: Kept, talk: Talk | None = None, leaf: str = "") -> bool:
        """A workspace gets the files of a snapshot, in a rewind if there is a ``talk``. Whether any file changes."""
        before = self.files[kept.place]
        way = Way(dict(before))
        if talk is not None:
            way = replace(way, talk=talk.id, previous=talk.leaf, leaf=leaf, followed=talk.follows)
        if before != kept.files or (talk is not None and talk.leaf != leaf):
            self.ways[kept.place] = way
        self.files[kept.place] = dict(kept.files)
        return before != kept.files

    @rule(number=st.integers(0, 9), at=st.integers(0, 99), where=st.integers(-2, 1))
    @precondition(lambda self: len(self.talks) < 6)
    def fork(self, number: int, at: int, where: int) -> None:
        """``where``: -2 without files, -1 into the workspace of the checkpoint, else into that workspace."""
        talk = self._talk(number)
        if not talk.said:
            return
        thread, point, files = self._thread(talk), self._one(list(talk.said), at), where != -2
        found = talk.at(point)
        new = Talk(self._name("t"), talk.place)
        into = self._workspace(where) if where >= 0 else None

        def go(dry_run: bool) -> Fork | thread_pb2.ForkThreadReport:
            return thread.fork(point, id=new.id, files=files, workspace=into, dry_run=dry_run)

        if files and (found is None or found[0].pruned):
            for dry_run in (True, False):
                with pytest.raises(ValidationError):
                    go(dry_run)
            with pytest.raises(NotFound):
                self.session.cog.thread(new.id)
            self._check(talk)
            self._check_files()
            return
        plan = go(True)
        self._check_files()
        with pytest.raises(NotFound):
            self.session.cog.thread(new.id)
        fork = go(False)
        assert isinstance(fork, Fork) and isinstance(plan, thread_pb2.ForkThreadReport)
        assert (plan.snapshots_copied, plan.files.exact) == (fork.snapshots_copied, fork.report.files.exact)
        branch = talk.branch(point)
        named = {one.id: (one.kept, one.kept_after) for one in branch}
        if found is not None and found[1]:
            named[point] = (named[point][0], found[0])
        if files:
            assert found is not None
            new.place = where if where >= 0 else found[0].place
        copies = self._copies(fork, named, found, new.place) if files else {}
        for place, one in enumerate(branch, 1):
            kept, after = (copies.get(id(kept), kept) for kept in named[one.id])
            new.said[one.id] = replace(one, number=place, kept=kept, kept_after=after)
        new.leaf = point
        for memo in talk.memos.values():
            on = tuple(entry for entry in memo.on if entry in named)
            if on or not memo.on:
                new.memos[memo.id] = replace(memo, on=on)
        new.follows = point == talk.leaf and talk.follows
        if files:
            assert found is not None
            assert (fork.report.files.exact, fork.report.files.entry_id) == found[1:]
            self._restored(copies.get(id(found[0]), found[0]))
            new.follows = found[1]
        assert fork.report.memories_copied == len(new.memos)
        talk.forks.add((new.id, point))
        self.talks[new.id] = new
        for one_of in (talk, new):
            self._check(one_of)
        self._check_files()

    def _copies(
        self,
        fork: Fork,
        named: dict[str, tuple[Kept | None, Kept | None]],
        found: tuple[Kept, bool, str] | None,
        place: int,
    ) -> dict[int, Kept]:
        """What the workspace of a fork got as its own, by what it is a copy of."""
        assert found is not None
        source = found[0].place
        wanted = {id(kept): kept for pair in named.values() for kept in pair if kept is not None}
        wanted[id(found[0])] = found[0]
        wanted = {key: kept for key, kept in wanted.items() if kept.place == source != place and not kept.pruned}
        assert fork.snapshots_copied == len(wanted)
        ids = {}
        for entry in fork.entries():
            for message, kept in zip((entry.file_checkpoint, entry.file_checkpoint_at), named[entry.id], strict=True):
                if kept is not None:
                    ids[id(kept)] = message.snapshot_id
        copies = {}
        for key, kept in wanted.items():
            copies[key] = Kept(ids.get(key, fork.report.files.restore.snapshot_id), place, dict(kept.files))
            self.kept.append(copies[key])
            assert self.session.cog.snapshot(copies[key].id).message.copied_from == kept.id
        return copies

    @rule(place=st.integers(0, 1))
    def undo(self, place: int) -> None:
        workspace, way = self._workspace(place), self.ways[place]
        if way is None:
            with pytest.raises(ValidationError):
                workspace.undo()
            return
        talk = self.talks.get(way.talk)
        if talk is not None and talk.leaf != way.leaf:
            talk = None
        report = workspace.undo()
        assert report.thread_id == (talk.id if talk is not None else "")
        assert bool(report.files_only_reason) == (bool(way.talk) and talk is None)
        self._restored(Kept("", place, way.before), talk, way.previous)
        if talk is not None:
            self._check_shift(report.memory, talk, talk.leaf, way.previous)
            talk.leaf, talk.follows = way.previous, way.followed
            self._check(talk)
        self._check_files()

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: any(not kept.pruned for kept in self.kept))
    def prune(self, number: int) -> None:
        kept = self._one([kept for kept in self.kept if not kept.pruned], number)
        try:
            self.session.cog.snapshot(kept.id).delete()
        except CogfsError as error:
            # The workspace needs it: what it says is the model's business no further.
            note(str(error))
        else:
            kept.pruned = True

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: len(self.talks) > 2)
    def delete(self, number: int) -> None:
        talk = self._talk(number)
        self._thread(talk).delete()
        del self.talks[talk.id]
        for other in self.talks.values():
            other.forks = {link for link in other.forks if link[0] != talk.id}

    @rule(really=st.integers(0, 3))
    def kill(self, really: int) -> None:
        if really:
            return
        self.session.kill_daemon()
        for root in self.roots:
            assert Path(root).is_dir()
