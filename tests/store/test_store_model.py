"""A store against a plain model: random puts, writes, syncs, failures, restarts and losses of power."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cogfs.store import steps
from cogfs.store.errors import Exists, NotFound, StoreError
from cogfs.store.hashing import hash_object
from cogfs.store.schema import (
    EntryKind,
    EntryRow,
    ObjectKind,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
)
from cogfs.store.store import Store

few = st.sampled_from(["a", "ab", "b", "ü"])
TEXT = bytes(range(256))
FAILING = ("pack.create", "pack.append", "pack.appended", "pack.sync", "pack.directory", "index.write", "index.commit")


def snapshot(name: str, workspace: str) -> SnapshotRow:
    return SnapshotRow(
        name, workspace, None, "", "{}", SnapshotState.FROZEN, "", (), -1, (), SnapshotStats(), 0, SnapshotOrigin.MANUAL
    )


class Rows:
    """What the committed rows are."""

    def __init__(self) -> None:
        self.snapshots: dict[str, str] = {}
        self.entries: dict[str, list[EntryRow]] = {}


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.objects: dict[bytes, bytes] = {}
        #: What a put that failed may have written all the same.
        self.maybe: dict[bytes, bytes] = {}
        self.durable: dict[bytes, bytes] = {}
        self.rows = Rows()
        self.store = self.open()

    def open(self) -> Store:
        return Store.open(self.directory / "store", map_size=64 * 1024, pack_limit=3000)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    @rule(data=st.binary(max_size=300), times=st.sampled_from([1, 1, 30]))
    def put(self, data: bytes, times: int) -> None:
        self.objects[self.store.put_blob(data * times)] = data * times

    @precondition(lambda self: self.objects)
    @rule(data=st.data(), edit=st.binary(min_size=1, max_size=9), where=st.integers(0, 2))
    def put_like(self, data: st.DataObject, edit: bytes, where: int) -> None:
        like = data.draw(st.sampled_from(sorted(self.objects)))
        old = self.objects[like]
        place = len(old) * where // 2
        new = (TEXT if len(old) < 200 else b"") + old[:place] + edit + old[place + (where == 1) :]
        self.objects[self.store.put_blob(new, like)] = new

    @rule()
    def check(self) -> None:
        found = self.store.check(data=True)
        assert [one for one in found.problems if one.check not in {"snapshots", "conversations"}] == []

    @rule()
    def sync(self) -> None:
        self.store.sync()
        self.durable = dict(self.objects)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        for name, data in self.maybe.items():
            if self.store.has(name):
                self.objects[name] = data
        self.maybe.clear()

    @rule(lost=st.lists(st.integers(0, 4000), min_size=1, max_size=4))
    def lose_power(self, lost: list[int]) -> None:
        """Of what was not synced the packs lose so many bytes each, the last ones first."""
        ends = dict(self.store._objects._ends)
        self.store.close()
        for path, length in zip(
            sorted((self.directory / "store" / "packs").iterdir(), reverse=True), lost, strict=False
        ):
            size = path.stat().st_size
            if size > (end := ends.get(int(path.stem, 16), 0)):
                os.truncate(path, max(end, size - length))
        self.store = self.open()
        known = self.objects | self.maybe
        self.objects = {name: data for name, data in known.items() if self.store.has(name)}
        self.maybe.clear()
        assert self.objects.keys() >= self.durable.keys()

    @rule(changes=st.lists(st.tuples(st.sampled_from(["snapshot", "entry", "delete", "workspace"]), few, few)),
          fail=st.sampled_from(["", "", "", "body", *FAILING]))  # fmt: skip
    def write(self, changes: list[tuple[str, str, str]], fail: str) -> None:
        wanted = copy.deepcopy(self.rows)

        def hook(label: str) -> None:
            if label == fail:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        try:
            with steps.on_step(hook), self.store.write() as rows:
                for what, one, two in changes:
                    if what == "snapshot" and one not in wanted.snapshots:
                        rows.put_snapshot(snapshot(one, two))
                        wanted.snapshots[one] = two
                    elif what == "delete":
                        try:
                            rows.delete_snapshot(one)
                            del wanted.snapshots[one]
                        except NotFound:
                            assert one not in wanted.snapshots
                    elif what == "workspace":
                        rows.delete_workspace(two)
                        wanted.snapshots = {key: value for key, value in wanted.snapshots.items() if value != two}
                    elif what == "entry":
                        known = wanted.entries.setdefault(one, [])
                        parent = known[-1].id if known else ""
                        row = EntryRow(two, one, parent, EntryKind.NOTE, "", "{}", 0, len(known))
                        try:
                            rows.put_entry(row)
                            known.append(row)
                        except Exists:
                            assert two in [row.id for row in known]
                if fail == "body":
                    raise StoreError("the caller's own")
        except StoreError:
            assert fail
            return
        self.rows = wanted
        self.durable = dict(self.objects)

    @precondition(lambda self: self.objects)
    @rule(label=st.sampled_from(["pack.create", "pack.append", "pack.appended"]), data=st.binary(min_size=301))
    def put_fails(self, label: str, data: bytes) -> None:
        def hook(passed: str) -> None:
            if passed == label:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with steps.on_step(hook):
            try:
                self.objects[self.store.put_blob(data)] = data
            except StoreError:
                self.maybe[hash_object(ObjectKind.BLOB, data)] = data

    @invariant()
    def all_objects_are_there(self) -> None:
        for name, data in self.objects.items():
            assert self.store.read_blob(name) == data
        assert self.store.stats().objects == len(self.objects)

    @invariant()
    def all_rows_are_there(self) -> None:
        with self.store.read() as reader:
            for workspace in ("a", "ab", "b", "ü"):
                mine = sorted((name for name, of in self.rows.snapshots.items() if of == workspace), reverse=True)
                assert [row.id for row in reader.snapshots(workspace)] == mine
                assert reader.snapshot_count(workspace) == len(mine)
            for thread in ("a", "ab", "b", "ü"):
                known = self.rows.entries.get(thread, [])
                assert list(reader.entries(thread)) == known
                assert reader.branch(thread, known[-1].id if known else "") == known


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
