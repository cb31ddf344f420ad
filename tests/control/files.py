"""Workspaces for tests without a mount: a store, a directory, and recording, planning and executing on it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.executor import Executor
from cogfs.fsd.control.planner import Plan, Planner
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import Recorded, Recorder
from cogfs.fsd.control.rules import Rules
from cogfs.store.ids import new_id
from cogfs.store.schema import TreeEntry, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store

#: Larger than any test's file.
ANY_SIZE = 10 * 1024 * 1024


class Directory:
    """A directory that is recorded by scans, as one that is not mounted is."""

    def __init__(self, store: Store, root: Path) -> None:
        self.store = store
        self.root = root
        self.id = new_id("ws")
        self.pool = ThreadPoolExecutor(2)
        self.recorded: TreeEntry | None = None
        with store.write() as writer:
            writer.put_workspace(WorkspaceRow(self.id, os.fsencode(root), b"", WorkspaceOptions(), 0))

    def record(self, rules: Rules | None = None) -> TreeEntry:
        return self.scan(rules).root

    def scan(self, rules: Rules | None = None) -> Recorded:
        return self._record(rules, None)

    def update(self, directories: list[DirtyDirectory], files: list[DirtyFile], rules: Rules | None = None) -> Recorded:
        return self._record(rules, (directories, files))

    def _record(self, rules: Rules | None, dirty: tuple[list[DirtyDirectory], list[DirtyFile]] | None) -> Recorded:
        book = RecordBook(self.store, self.id)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            recorder = Recorder(self.store, book, fd, rules or Rules((), ANY_SIZE), self.pool)
            if dirty is None:
                recorded = recorder.scan()
            else:
                assert self.recorded is not None
                updated = recorder.update(*dirty, self.recorded)
                assert updated is not None
                recorded = updated
            self.recorded = recorded.root
        finally:
            os.close(fd)
        with self.store.write() as writer:
            book.write(writer)
        return recorded

    def plan(
        self, target: TreeEntry, rules: Rules | None = None, paths: tuple[bytes, ...] = (), *, back: bool = False
    ) -> Plan:
        planner = Planner(self.store, rules or Rules((), ANY_SIZE), paths, back=back)
        return planner.plan(self.record(rules), target)

    def execute(self, plan: Plan) -> Executor:
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            executor = Executor(self.store, fd, new_id("restore"), plan)
            executor.run()
        finally:
            os.close(fd)
        return executor

    def restore(
        self, target: TreeEntry, rules: Rules | None = None, paths: tuple[bytes, ...] = (), *, back: bool = False
    ) -> Plan:
        plan = self.plan(target, rules, paths, back=back)
        self.execute(plan)
        return plan

    def close(self) -> None:
        self.pool.shutdown()
