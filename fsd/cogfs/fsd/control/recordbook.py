"""The recorded state of a workspace, with what a recording in progress has changed of it on top."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

import msgspec

from cogfs.fsd.control.beneath import join
from cogfs.store.rows import Writer
from cogfs.store.schema import DirectoryRow, Kind, OpaqueReason, Skipped, StatRow, Sums
from cogfs.store.store import Store

#: Rows of files that are held before they are written ahead of the transaction that completes the recording.
FLUSH_ROWS = 20_000

#: Opaque entries that a snapshot lists as skipped; the others are left out by rule.
REPORTED = frozenset(
    {
        OpaqueReason.TOO_LARGE,
        OpaqueReason.CHANGING,
        OpaqueReason.UNREADABLE,
        OpaqueReason.HARD_LINK,
        OpaqueReason.SUBMOUNT,
        OpaqueReason.UNSUPPORTED_NAME,
    }
)
_REPORTED_BYTES = frozenset(reason.encode() for reason in REPORTED)

Link = tuple[int, tuple[int, ...]]


def is_reported(row: StatRow) -> bool:
    return row.entry.kind is Kind.OPAQUE and row.entry.target in _REPORTED_BYTES


def is_linked(row: StatRow) -> bool:
    """Whether the row is of a regular file with several names, also of one that is not kept. One that had several and
    has one counts while it keeps its group."""
    entry = row.entry
    return entry.link_group != 0 or (
        entry.kind is Kind.OPAQUE and row.nlink > 1 and stat.S_ISREG(row.mode) and is_reported(row)
    )


def sum_of(rows: Iterable[StatRow]) -> Sums:
    """What a directory with these rows holds, with all below it."""
    files = total = directories = symlinks = skipped = 0
    for row in rows:
        kind = row.entry.kind
        if kind is Kind.FILE:
            files += 1
            total += row.entry.size
        elif kind is Kind.DIRECTORY:
            directories += 1
            if row.sums is not None:
                files += row.sums.files
                total += row.sums.bytes
                directories += row.sums.directories
                symlinks += row.sums.symlinks
                skipped += row.sums.skipped
        elif kind is Kind.SYMLINK:
            symlinks += 1
        elif is_reported(row):
            skipped += 1
    return Sums(files, total, directories, symlinks, skipped)


class RecordBook:
    """Directory rows and hard-link rows of one workspace: reads fall through to the store, writes stay here.

    A row is true by itself (each is checked against stat or against what a worker watched before it is believed), so
    rows may be written before the recording they belong to is complete, see ``flush``.
    """

    def __init__(self, store: Store, workspace_id: str, flush_rows: int = FLUSH_ROWS) -> None:
        """An empty ``workspace_id``: a book of its own that knows nothing and is never written."""
        self._flush_rows = flush_rows
        self._store = store
        self._workspace_id = workspace_id
        self._directories: dict[int, DirectoryRow | None] = {}
        self._links: dict[int, Link | None] = {}
        self._held = 0
        #: Something was written ahead, and is not held any more.
        self._flushed = False
        self._looked_up: tuple[int, dict[bytes, StatRow]] = (0, {})

    def directory(self, inode: int) -> DirectoryRow | None:
        if inode in self._directories or not self._workspace_id:
            return self._directories.get(inode)
        with self._store.read() as reader:
            return reader.directory(self._workspace_id, inode)

    def row(self, directory: int, name: bytes) -> StatRow | None:
        """What was recorded of one name; quick for the names of one directory after another."""
        if self._looked_up[0] != directory:
            found = self.directory(directory)
            self._looked_up = (directory, {row.entry.name: row for row in found.rows} if found is not None else {})
        return self._looked_up[1].get(name)

    def put_directory(self, inode: int, row: DirectoryRow) -> None:
        self._directories[inode] = row
        self._looked_up = (0, {})
        self._held += len(row.rows) + 1
        if self._held >= self._flush_rows and self._workspace_id:
            self.flush()

    def link(self, inode: int) -> Link | None:
        if inode in self._links or not self._workspace_id:
            return self._links.get(inode)
        with self._store.read() as reader:
            return reader.link(self._workspace_id, inode)

    def group(self, inode: int) -> int:
        """The hard-link group of a file with several names: the one it has, or a new one.

        No two files that stand at one time have the same, whatever snapshots were restored: it says which names are
        one file. What a group is called does not matter.
        """
        known = self.link(inode)
        if known is None:
            known = (int.from_bytes(os.urandom(8)) or 1, ())
            self._links[inode] = known
        return known[0]

    def add_link(self, inode: int, group: int, directory: int) -> None:
        """``inode`` has a name in ``directory``, and its names are of ``group``."""
        known = self.link(inode)
        directories = known[1] if known is not None else ()
        if directory not in directories:
            directories = (*directories, directory)
        if known != (group, directories):
            self._links[inode] = (group, directories)

    def remove_link(self, inode: int, directory: int) -> None:
        """``inode`` has no name in ``directory`` any more."""
        known = self.link(inode)
        if known is None or directory not in known[1]:
            return
        rest = tuple(other for other in known[1] if other != directory)
        self._links[inode] = (known[0], rest) if rest else None

    def linked(self) -> set[int] | None:
        """Files with several names whose rows or names have changed; None: there may be more of them."""
        if self._flushed:
            return None
        changed = set(self._links)
        for row in self._directories.values():
            changed.update(child.inode for child in (row.rows if row is not None else ()) if is_linked(child))
        return changed

    def drop_tree(self, inode: int, keep: frozenset[int] | set[int]) -> None:
        """Forget a directory that is gone and all below it, except the directories in ``keep`` (they moved)."""
        waiting = [inode]
        while waiting:
            current = waiting.pop()
            row = self.directory(current)
            if row is None:
                continue
            for child in row.rows:
                if child.entry.kind is Kind.DIRECTORY:
                    if child.inode not in keep:
                        waiting.append(child.inode)
                elif child.nlink > 1:
                    self.remove_link(child.inode, current)
            self._directories[current] = None
        self._looked_up = (0, {})

    def path_of(self, inode: int) -> bytes | None:
        """Where directory ``inode`` was when it was last recorded; None when that is not known."""
        names: list[bytes] = []
        passed: set[int] = set()
        # While a recording is in progress, rows of before and after a move may lead in a circle.
        while inode not in passed:
            passed.add(inode)
            row = self.directory(inode)
            if row is None:
                return None
            if row.parent == inode and not row.name:
                return b"/".join(reversed(names))
            names.append(row.name)
            inode = row.parent
        return None

    def skipped(self, root_inode: int) -> Iterator[Skipped]:
        """What a snapshot of this state lists as skipped, found by descending only where there is any."""
        waiting = [(b"", root_inode)]
        while waiting:
            path, inode = waiting.pop()
            row = self.directory(inode)
            if row is None:
                continue
            for child in row.rows:
                where = join(path, child.entry.name)
                if is_reported(child):
                    yield Skipped(where, child.entry.target.decode())
                elif child.sums is not None and child.sums.skipped:
                    waiting.append((where, child.inode))

    def changed_rows(self) -> int:
        """About how many rows of files and directories were changed; ``FLUSH_ROWS`` where some are written already."""
        return FLUSH_ROWS if self._flushed else self._held

    def write(self, writer: Writer) -> None:
        """Put what changed into a transaction."""
        for inode, row in self._directories.items():
            if row is None:
                writer.delete_directory(self._workspace_id, inode)
            else:
                writer.put_directory(self._workspace_id, inode, row)
        for inode, link in self._links.items():
            if link is None:
                writer.delete_link(self._workspace_id, inode)
            else:
                writer.put_link(self._workspace_id, inode, *link)

    def flush(self) -> None:
        """Write what changed so far in a transaction of its own.

        Should the recording not be completed, directories have newer rows then than those above them know of. So until
        it is, the state says that nothing was watched: the next recording is a scan, which looks at all of them.
        """
        self._store.sync()  # does not keep those waiting who write rows, as syncing within the transaction would
        with self._store.write() as writer:
            self.write(writer)
            state = writer.record_state(self._workspace_id)
            if state is not None and state.worker_started_ns:
                writer.put_record_state(self._workspace_id, msgspec.structs.replace(state, worker_started_ns=0))
        self._flushed = True
        self._directories.clear()
        self._links.clear()
        self._held = 0
