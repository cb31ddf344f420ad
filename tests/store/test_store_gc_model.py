"""Collections against a plain model: random puts, snapshots, deletions, operations, restarts and kills at every step.

A kill is a copy of the store's files at that step, as a process that is killed there leaves them; the next one goes on
with the copy.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cogfs.store import steps
from cogfs.store.records import NO_BASE, PACK_HEADER_SIZE
from cogfs.store.schema import Kind, TreeEntry
from cogfs.store.store import Store
from tests.store.rows import snapshot_row

STEPS = (
    "pack.create",
    "pack.append",
    "pack.appended",
    "pack.sync",
    "index.write",
    "index.commit",
    "index.committed",
    "gc.marked",
    "gc.loosened",
    "gc.copied",
    "gc.given-up",
    "pack.remove",
    "pack.removed",
    "gc.forget",
    "repack.made",
    "repack.written",
    "repack.committed",
    "compact.copied",
    "compact.renamed",
    "compact.sync",
)

#: Steps at which the collection holds no lock.
QUIET_STEPS = ("gc.marked", "gc.loosened", "gc.copied", "gc.given-up", "pack.remove", "gc.forget")
QUIET_STEPS_OF_REPACKS = ("repack.made", "repack.written", "repack.committed", *QUIET_STEPS)
TEXT = bytes(range(256))


class CollectionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.lives = 0
        #: What was ever put, trees as the names of their files.
        self.blobs: dict[bytes, bytes] = {}
        self.trees: dict[bytes, tuple[bytes, ...]] = {}
        self.snapshots: dict[str, bytes] = {}
        #: Of the snapshots' files, those that the running operation may use, and what it put.
        self.held: set[bytes] = set()
        self.operation: AbstractContextManager[None] | None = None
        self.count = 0
        self.repacked = False
        self.store = self.open()

    @property
    def place(self) -> Path:
        return self.directory / str(self.lives)

    def open(self) -> Store:
        return Store.open(self.place, map_size=64 * 1024, pack_limit=3000)

    def teardown(self) -> None:
        self.end()
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(data=st.binary(max_size=300), times=st.sampled_from([1, 1, 20]))
    def put(self, data: bytes, times: int) -> None:
        name = self.store.put_blob(data * times)
        self.blobs[name] = data * times
        if self.operation is not None:
            self.held.add(name)

    @precondition(lambda self: self.blobs)
    @rule(data=st.data(), edit=st.binary(min_size=1, max_size=9), growing=st.integers(0, 2))
    def put_like(self, data: st.DataObject, edit: bytes, growing: int) -> None:
        """Against another one, which may be gone."""
        like = data.draw(st.sampled_from(sorted(self.blobs)))
        self.put_edited(like, edit, growing)

    def put_edited(self, like: bytes, edit: bytes, growing: int) -> bytes:
        old = self.blobs[like]
        place = len(old) * growing // 2
        new = (TEXT if len(old) < 200 else b"") + old[:place] + edit + old[place + (growing == 1) :]
        name = self.store.put_blob(new, like)
        self.blobs[name] = new
        if self.operation is not None:
            self.held.add(name)
        return name

    @precondition(lambda self: self.operation is None)
    @rule()
    def begin(self) -> None:
        self.operation = self.store.operation()
        self.operation.__enter__()
        self.held = self.needed()

    @rule()
    def end(self) -> None:
        if self.operation is not None:
            self.operation.__exit__(None, None, None)
            self.operation = None
            self.held = set()

    @precondition(lambda self: self.operation is not None and self.held)
    @rule(data=st.data())
    def take_a_snapshot(self, data: st.DataObject) -> None:
        """Of what the operation may name: some is not put again."""
        known = sorted(self.held & self.blobs.keys())
        names = data.draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
        tree = self.store.put_tree(
            [
                TreeEntry(b"%d" % index, Kind.FILE, size=len(self.blobs[name]), hash=name)
                for index, name in enumerate(names)
            ],
            data.draw(st.sampled_from(sorted(self.trees))) if self.trees else b"",
        )
        self.trees[tree] = tuple(names)
        self.held.add(tree)
        self.count += 1
        with self.store.write() as rows:
            rows.put_snapshot(snapshot_row(f"s{self.count}", tree))
        self.snapshots[f"s{self.count}"] = tree

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def delete_a_snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.snapshots)))
        with self.store.write() as rows:
            rows.delete_snapshot(name)
        del self.snapshots[name]

    @rule(thorough=st.booleans(), grace=st.sampled_from([0.0, 0.0, 3600.0]))
    def collect(self, thorough: bool, grace: float) -> None:
        done = self.store.collect(grace=grace, thorough=thorough, patience=0)
        assert not done.unreadable
        if self.operation is not None:
            assert done.deferred
            return
        assert not done.deferred
        if grace == 0:
            assert done.live == len(self.grounded())
        if thorough and grace == 0:
            self.nothing_is_left_over()

    @rule(thorough=st.booleans())
    def repack(self, thorough: bool) -> None:
        before = (
            {name for name, _ in self.store._objects.located(b"", 100_000)} if self.operation is not None else set()
        )
        self.repacked = True
        done = self.store.repack(grace=0, patience=0)
        assert not done.damaged
        assert done.after <= done.before
        if self.operation is not None:
            assert not done.groups or done.deferred
            assert before <= {name for name, _ in self.store._objects.located(b"", 100_000)}
        elif thorough:
            assert not done.deferred
            assert not self.store.collect(grace=0, thorough=True).deferred

    def nothing_is_left_over(self) -> None:
        assert {name for name, _ in self.store._objects.located(b"", 100_000)} == self.grounded()
        places = [where for _, where in self.store._objects.located(b"", 100_000)]
        size = sum({where.record: where.end - where.offset for where in places}.values())
        files = list((self.place / "packs").iterdir())
        waste = sum(path.stat().st_size for path in files) - size - len(files) * PACK_HEADER_SIZE
        assert waste >= 0
        # What a repack left behind in the pack that grows may stay there.
        if not any(where.is_grouped for where in places):
            assert waste == 0 or self.repacked

    @rule(label=st.sampled_from(STEPS), passing=st.integers(0, 4), thorough=st.booleans(), repacking=st.booleans())
    def killed_while_collecting(self, label: str, passing: int, thorough: bool, repacking: bool) -> None:
        self.end()
        after = self.directory / str(self.lives + 1)
        left = passing

        def hook(passed: str) -> None:
            nonlocal left
            if passed == label:
                if not left:
                    shutil.copytree(self.place, after)
                left -= 1

        with steps.on_step(hook):
            if repacking:
                self.repacked = True
                self.store.repack(grace=0)
            self.store.collect(grace=0, thorough=thorough)
        self.store.close()
        if after.exists():
            self.lives += 1
        self.store = self.open()
        self.all_that_is_needed_is_there()
        self.store.collect(grace=0, thorough=True)
        self.nothing_is_left_over()

    @precondition(lambda self: self.blobs)
    @rule(
        data=st.data(),
        label=st.sampled_from(QUIET_STEPS_OF_REPACKS),
        thorough=st.booleans(),
        repacking=st.booleans(),
    )
    def put_while_collecting(self, data: st.DataObject, label: str, thorough: bool, repacking: bool) -> None:
        """What is put meanwhile, new or again, is there, whatever it was put against."""
        self.end()
        likes = data.draw(st.lists(st.sampled_from(sorted(self.blobs)), min_size=1, max_size=3))
        put: list[bytes] = []

        def hook(passed: str) -> None:
            if passed == label and not put:
                for like in likes:
                    put.append(self.put_edited(like, b"meanwhile", 1))
                    put.append(self.put_edited(put[-1], b"again", 1))
                    put.append(self.store.put_blob(self.blobs[like], put[-1]))

        with steps.on_step(hook):
            if repacking:
                self.repacked = True
                assert not self.store.repack(grace=0).deferred
            assert not self.store.collect(grace=0, thorough=thorough).deferred
        for name in put:
            assert self.store.read_blob(name) == self.blobs[name]
        self.check()

    @rule()
    def check(self) -> None:
        """Whatever is there, needed or not, is whole."""
        found = self.store.check(data=True)
        assert [one for one in found.problems if one.check != "snapshots"] == []
        assert found.affected == []

    @rule()
    def restart(self) -> None:
        self.end()
        self.store.close()
        self.store = self.open()

    @invariant()
    def nothing_needs_itself(self) -> None:
        """Whatever was put, moved and repacked: from each object the bases lead to one that needs none."""
        objects = self.store._objects
        for name, location in objects.with_base():
            seen = {name}
            base = location.base
            while base != NO_BASE:
                assert base not in seen
                seen.add(base)
                found = objects.find(base)
                assert found is not None
                base = found.base

    def needed(self) -> set[bytes]:
        found: set[bytes] = set()
        for tree in self.snapshots.values():
            found |= {tree, *self.trees[tree]}
        return found

    def grounded(self) -> set[bytes]:
        """What is needed, with all that it is stored against."""
        found = set()
        waiting = list(self.needed())
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            location = self.store._objects.find(name)
            assert location is not None
            if location.base != NO_BASE:
                waiting.append(location.base)
        return found

    @invariant()
    def all_that_is_needed_is_there(self) -> None:
        for name in self.needed() | self.held:
            if name in self.trees:
                assert tuple(entry.hash for entry in self.store.read_tree(name).entries) == self.trees[name]
                assert self.store._objects.find(name) is not None
            else:
                assert self.store.read_blob(name) == self.blobs[name]


CollectionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCollection = CollectionMachine.TestCase
