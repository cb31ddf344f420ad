"""Workspaces for tests without a mount: a store, a directory, and recording, planning and executing on it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
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
            recorded = recorder.scan() if dirty is None else recorder.update(*dirty)
            assert recorded is not None
        finally:
            os.close(fd)
        with self.store.write() as writer:
            book.write(writer)
        return recorded

    def plan(self, target: TreeEntry, rules: Rules | None = None, paths: tuple[bytes, ...] = ()) -> Plan:
        return Planner(self.store, rules or Rules((), ANY_SIZE), paths).plan(self.record(rules), target)

    def execute(self, plan: Plan) -> Executor:
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            executor = Executor(self.store, fd, new_id("restore"), plan)
            executor.run()
        finally:
            os.close(fd)
        return executor

    def restore(self, target: TreeEntry, rules: Rules | None = None, paths: tuple[bytes, ...] = ()) -> Plan:
        plan = self.plan(target, rules, paths)
        self.execute(plan)
        return plan

    def close(self) -> None:
        self.pool.shutdown()


def picture(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Every name below ``root`` with what has to come back: kind, mode, content or target, attributes, shared names."""
    found: dict[bytes, tuple[object, ...]] = {}
    inodes: dict[int, list[bytes]] = {}
    for path in sorted(_names(os.fsencode(root))):
        status = os.lstat(path)
        name = os.path.relpath(path, os.fsencode(root))
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            found[name] = ("link", os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            found[name] = ("directory", mode, _attributes(path))
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                found[name] = ("file", mode, file.read(), _attributes(path))
            inodes.setdefault(status.st_ino, []).append(name)
        else:
            found[name] = ("special", stat.S_IFMT(status.st_mode))
    for names in inodes.values():
        for name in names:
            found[name] = (*found[name], tuple(names))
    return found


def _names(root: bytes) -> Iterator[bytes]:
    for entry in os.scandir(root):
        yield entry.path
        if entry.is_dir(follow_symlinks=False):
            yield from _names(entry.path)


def _attributes(path: bytes) -> tuple[tuple[str, bytes], ...]:
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user.")]
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))


def empty(root: Path) -> None:
    """Remove everything in ``root``, of whatever mode."""
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
