"""A last look at what a step of a restore replaces, where no guard keeps others from changing it.

Between the plan and the step another program may have written what no snapshot holds. Then the step is not taken.
"""

from __future__ import annotations

import os
import stat

from cogfs.fsd.control.capture import Captured, Vanished, capture_file
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import RACY_NS, same_stat
from cogfs.store.schema import Kind, StatRow, TreeEntry
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason


class Moved(CogfsError):
    """Another program changed what a restore was about to change."""


class Recheck:
    """For one run of an executor, in one thread."""

    def __init__(self, store: Store, workspace_id: str, reason: Reason, passed: frozenset[int] = frozenset()) -> None:
        """``reason``: of what is raised. ``passed``: files whose writers a forced restore goes past."""
        self._store = store
        self._book = RecordBook(store, workspace_id)
        self._reason = reason
        self._passed = passed
        #: What was recorded of the directory that was asked for last.
        self._recorded: tuple[int, int, dict[bytes, StatRow]] = (0, 0, {})

    def __call__(self, path: bytes, expected: TreeEntry | None, directory: int, name: bytes) -> None:
        """``Moved`` unless ``name`` in ``directory`` (a descriptor) is what the plan found there, or nothing. None:
        it found nothing. Modes and times are no content and not asked for."""
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if expected is None or not self._same(expected, directory, name, status):
            raise self.moved(path)

    def moved(self, path: bytes) -> Moved:
        """What is raised where another program changed ``path``, or moved the directory in which it is."""
        return Moved(
            self._reason, f"another program changed {show(path)} while it was being restored, and that change stays"
        )

    def _same(self, expected: TreeEntry, directory: int, name: bytes, status: os.stat_result) -> bool:
        if expected.kind is Kind.DIRECTORY:
            return stat.S_ISDIR(status.st_mode)
        if expected.kind is Kind.SYMLINK:
            return stat.S_ISLNK(status.st_mode) and os.readlink(name, dir_fd=directory) == expected.target
        if expected.kind is not Kind.FILE or not stat.S_ISREG(status.st_mode):
            return False
        if status.st_ino in self._passed or self._as_recorded(expected, directory, name, status):
            return True
        if status.st_size != expected.size:
            return False
        try:
            found = capture_file(self._store, name, directory, moving=True)
        except Vanished:
            return False
        return isinstance(found, Captured) and found.hash == expected.hash

    def _as_recorded(self, expected: TreeEntry, directory: int, name: bytes, status: os.stat_result) -> bool:
        """Whether the stat alone tells that the content is what was expected, as it does in a scan."""
        inode = os.fstat(directory).st_ino
        if self._recorded[0] != inode:
            found = self._book.directory(inode)
            rows = {row.entry.name: row for row in found.rows} if found is not None else {}
            self._recorded = inode, found.recorded_ns if found is not None else 0, rows
        _, recorded_ns, rows = self._recorded
        row = rows.get(name)
        if row is None or row.entry.hash != expected.hash or not same_stat(row, status):
            return False
        return max(status.st_mtime_ns, status.st_ctime_ns) < recorded_ns - RACY_NS
