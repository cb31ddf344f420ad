"""One workspace: its lock, its worker when it is mounted, and the recording of its files at a boundary.

Does not know conversations, and leaves restores to ``restoration``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from cogfs.fsd.channel import (
    Committed,
    Freeze,
    Frozen,
    GetStats,
    Guard,
    Handles,
    ListHandles,
    Resume,
    SetReadOnly,
    Stats,
    Unguard,
)
from cogfs.fsd.control import boundaries
from cogfs.fsd.control.ahead import Ahead
from cogfs.fsd.control.beneath import Beneath, split
from cogfs.fsd.control.bypass import Bypass
from cogfs.fsd.control.elsewhere import Elsewhere, Found, unlisted_by
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.control.link import WorkerRefused
from cogfs.fsd.control.openers import mapped
from cogfs.fsd.control.ports import EngineState, Link
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import Recorded, Recorder
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.scanned import gone
from cogfs.fsd.control.sealer import Sealer, believed_until, boot_id, delete_expired
from cogfs.fsd.undolog import Was
from cogfs.store.ids import new_id
from cogfs.store.rows import Writer
from cogfs.store.schema import (
    BoundaryRow,
    RecordState,
    RecoveryRow,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
    Sums,
    TreeEntry,
    WorkspaceRow,
)
from cogfs.store.steps import step
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds in which a freeze has to be answered.
_FREEZE_PATIENCE = 30.0
#: Seconds in which a guard has to be set.
_GUARD_PATIENCE = 30.0
#: Seconds in which a worker that did not answer may do so after all.
_SILENT_PATIENCE = 1.0
#: Seconds that flushing one file's shared maps may take; a file that takes longer is left to the kernel.
_FLUSH_PATIENCE = 5.0
#: Files, their bytes, and rows of the record that are found out again sooner than they are synced.
_CHEAP_FILES = 100
_CHEAP_BYTES = 4 * 1024 * 1024
_CHEAP_ROWS = 10_000


class Current:
    """The files of a workspace at one moment, recorded."""

    def __init__(
        self, recorded: Recorded, book: RecordBook, rules: Rules, generation: int, *, followed: bool, scanned: bool
    ) -> None:
        self.root: TreeEntry = recorded.root
        self.root_inode = recorded.root_inode
        self.sums: Sums = recorded.sums
        self.hashed = recorded.hashed
        self.book = book
        self.rules = rules
        self.generation = generation
        #: Whether the worker sees all that changes from then on.
        self.followed = followed
        self.is_committed = False
        #: Whether finding it all out again costs less than to commit it.
        self.is_cheap = (
            not scanned
            and recorded.hashed <= _CHEAP_FILES
            and recorded.hashed_bytes <= _CHEAP_BYTES
            and book.changed_rows() <= _CHEAP_ROWS
        )


class Workspace:
    """What the control process holds of one registered workspace. Everything but ``attach`` is under ``lock``."""

    def __init__(
        self,
        store: Store,
        pool: ThreadPoolExecutor,
        urgent: ThreadPoolExecutor,
        workspace_id: str,
        undo_log: Path,
        refuse_full: Callable[[], None],
    ) -> None:
        """``pool`` reads files into the store, ``urgent`` those that a call in the mount waits for. ``refuse_full``
        raises NO_SPACE when no checkpoint is to be taken."""
        self.store = store
        self.pool = pool
        self.ahead = Ahead(store, workspace_id)
        self.elsewhere = Elsewhere(store, workspace_id)
        self.sealer = Sealer(store, pool, urgent, workspace_id, undo_log, self.ahead, self.elsewhere)
        self.id = workspace_id
        self.lock = threading.RLock()
        self.link: Link | None = None
        self._bypass: Bypass | None = None
        self._refuse_full = refuse_full

    # --- standing -----------------------------------------------------------------------------------------------------

    def row(self) -> WorkspaceRow:
        """NotFound when it was deleted."""
        with self.store.read() as reader:
            return reader.workspace(self.id)

    def attach(self, link: Link) -> None:
        with self.lock:
            self.link = link
            welcome = link.welcome
            # Without a mount there is nothing to pass by.
            self._bypass = Bypass(self.id, welcome.root, link.mountpoint, welcome.worker_pid) if link.watched else None
            self.sealer.attach(link)

    def detach(self) -> None:
        """Without the lock: a call that waits for the dead worker fails by itself."""
        self.link = None
        self.sealer.detach()

    def state(self) -> EngineState:
        row = self.row()
        with self.store.read() as reader:
            recovering = reader.journal(self.id) is not None
        files = directories = 0
        link = self.link
        if link is not None and link.alive:
            try:
                stats = link.call(GetStats(), 5.0)
                if isinstance(stats, Stats):
                    files, directories = stats.dirty_files, stats.dirty_directories
            except CogfsError:
                pass
        bypass = self._bypass
        past = bypass.present() if link is not None and bypass is not None else []
        return EngineState(recovering, row.read_only, files, directories, tuple(past))

    def ready(self) -> Link:
        """The link, when the workspace can be recorded and changed now."""
        row = self.row()
        if row.read_only:
            raise CogfsError(Reason.VALIDATION_ERROR, f"the workspace is read-only: {row.read_only}")
        link = self.link
        if link is not None and not link.watched and not link.alive:
            raise gone(row.root)
        if link is None or not link.alive:
            raise CogfsError(
                Reason.UNAVAILABLE, f"the workspace {show(row.root)} is not mounted: run cogfsctl mount first"
            )
        with self.store.read() as reader:
            if reader.journal(self.id) is not None:
                raise CogfsError(
                    Reason.UNAVAILABLE, "a restore was interrupted and is not finished: run cogfsctl mount to finish it"
                )
        return link

    # --- the cut ------------------------------------------------------------------------------------------------------

    @contextmanager
    def frozen(self, link: Link, *, wait: bool = True) -> Iterator[Frozen]:
        """A consistent cut, with every snapshot before it sealed: shared maps are flushed, then mutating calls wait
        until the block ends (or ``guard``); without ``wait`` they go on a moment later."""
        self.sealer.unstick()
        self.sealer.drain()
        self._flush_maps(link)
        with self._cut(link, Freeze(), wait=wait) as frozen:
            yield frozen

    @contextmanager
    def _cut(self, link: Link, freeze: Freeze, *, wait: bool = True) -> Iterator[Frozen]:
        """Mutating calls wait until the block ends. Without ``wait`` they go on a moment later."""
        try:
            answer = link.call(freeze, _FREEZE_PATIENCE)
        except CogfsError:
            # A worker that was stopped, say, carries it out once it goes on, and then what comes next in the channel.
            self._resume(link, _SILENT_PATIENCE)
            raise
        assert isinstance(answer, Frozen)
        try:
            yield answer
        finally:
            if wait:
                self._resume(link)
            else:
                with suppress(CogfsError):  # its end is a resume, too
                    link.post(Resume())

    def _resume(self, link: Link, patience: float = 30.0) -> None:
        try:
            link.call(Resume(), patience)
        except CogfsError as error:
            # The worker resumes by itself when the connection has ended.
            _log.warning("cannot resume the workspace", workspace=self.id, error=str(error))

    def _flush_maps(self, link: Link) -> None:
        """Have the kernel hand over what was stored in shared maps: only files open for writing can have one.

        Without a mount, reading sees it anyway; see ``record``.
        """
        if not link.watched:
            return
        answer = link.call(ListHandles())
        assert isinstance(answer, Handles)
        paths = {handle.path for handle in answer.handles if handle.writable and not handle.deleted}
        if not paths:
            return

        def flush() -> None:
            for path in paths:
                try:
                    fd = os.open(os.path.join(link.mountpoint, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                except OSError:
                    continue
                try:
                    os.fsync(fd)
                except OSError as error:
                    _log.warning("cannot flush a file", path=os.fsdecode(path), error=str(error))
                finally:
                    os.close(fd)

        thread = threading.Thread(target=flush, name="flush-maps", daemon=True)
        thread.start()
        thread.join(_FLUSH_PATIENCE)
        if thread.is_alive():
            _log.warning("flushing shared maps takes long; going on without", workspace=self.id)

    def record(self, link: Link, frozen: Frozen, *, scan: bool = False, rules: Rules | None = None) -> Current:
        """What the files are now, by the workspace's rules or others. Called within ``frozen``. ``scan``: look at
        everything, whatever the worker saw."""
        rules = rules or Rules.of(self.row().options)
        with self.store.read() as reader:
            state = reader.record_state(self.id)
        recorded = None
        scanned = False
        book = RecordBook(self.store, self.id)
        # Who is past the mount now may change what was looked at, and be gone before the next recording.
        watched = self._watched(link)
        if (
            not scan
            and watched
            and frozen.complete
            and state is not None
            and state.root is not None
            and state.worker_started_ns == link.welcome.started_ns
            and rules.same_as(state)
        ):
            recorder = Recorder(self.store, book, link.root_fd, rules, self.pool, ahead=self.ahead.content)
            changes = frozen.changes
            files = boundaries.with_content(changes.files, self.elsewhere.unrecorded(link))
            recorded = recorder.update(changes.directories, files, state.root)
        if recorded is None:
            book = RecordBook(self.store, self.id)
            # A store into a shared map moves no times until the page was written out: such files are read.
            unsure = None if link.watched else mapped(link.mountpoint)
            believed = believed_until(state)
            recorder = Recorder(self.store, book, link.root_fd, rules, self.pool, unsure=unsure, believed_ns=believed)
            recorded = recorder.scan()
            scanned = True
        return Current(recorded, book, rules, frozen.generation, followed=watched, scanned=scanned)

    def _watched(self, link: Link) -> bool:
        """Whether there is a worker that sees all that is changed."""
        bypass = self._bypass
        return link.watched and (bypass is None or not (bypass.open_to_all or bypass.present()))

    def commit(self, link: Link, current: Current, fill: Callable[[Writer], None] | None = None) -> None:
        """Make a recording durable, in one transaction with what ``fill`` writes; then the worker may forget it."""
        with self.store.write() as writer:
            current.book.write(writer)
            writer.put_record_state(
                self.id,
                RecordState(
                    current.root,
                    current.root_inode,
                    current.rules.exclude,
                    current.rules.max_file_bytes,
                    link.welcome.started_ns if current.followed else 0,
                    boot_id(),
                    refuse_hard_links=current.rules.refuse_hard_links,
                ),
            )
            if fill is not None:
                fill(writer)
        current.is_committed = True
        self.elsewhere.follow(current.book)
        step("checkpoint.committed")
        try:
            link.call(Committed(current.generation))
        except CogfsError as error:
            # What it hands over again is recorded again, to the same end.
            _log.warning("cannot tell the worker of a commit", workspace=self.id, error=str(error))

    def settle(self) -> None:
        """Record what is dirty, before the mount goes: the scan after the next mount then reads little."""
        self.present()

    def present(self) -> TreeEntry:
        """The files as they are now, recorded and in no snapshot."""
        with self.lock:
            link = self.ready()
            with self.frozen(link) as frozen:
                current = self.record(link, frozen)
                self.commit(link, current)
        return current.root

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def checkpoint(
        self,
        label: str,
        metadata: str,
        origin: SnapshotOrigin,
        fill: Callable[[Writer, SnapshotRow], None] | None = None,
        *,
        exclude: Sequence[str] = (),
        max_file_bytes: int | None = None,
    ) -> SnapshotRow:
        """Take a snapshot, durable when this returns and sealed some time later (see ``sealed``).

        ``fill`` writes more in the same transaction. ``exclude`` is left out on top of what the workspace leaves out,
        and ``max_file_bytes`` takes the place of its limit. VALIDATION_ERROR when a glob cannot be read, NO_SPACE
        when the store's budget is used up.
        """
        self._refuse_full()
        with self.lock:
            link = self.ready()
            rules = Rules.of(self.row().options, exclude, max_file_bytes)
            if self._watched(link):
                snapshot = self._freeze(link, rules, label, metadata, origin, fill)
            else:
                # What is changed past the mount, or without one, cannot be kept as it was: it is read before this
                # returns.
                snapshot = self._checkpoint_at_once(link, rules, label, metadata, origin, fill)
        self.sealer.wake()
        return snapshot

    def sealed(self, snapshot_id: str) -> SnapshotRow:
        """A snapshot when it is captured. VALIDATION_ERROR when that has failed, UNAVAILABLE when nobody can capture it
        now, NotFound."""
        snapshot = self.sealer.wait(snapshot_id)
        if snapshot.state is not SnapshotState.SEALED or snapshot.root is None:
            raise failed(snapshot)
        return snapshot

    def _freeze(
        self,
        link: Link,
        rules: Rules,
        label: str,
        metadata: str,
        origin: SnapshotOrigin,
        fill: Callable[[Writer, SnapshotRow], None] | None,
    ) -> SnapshotRow:
        """A snapshot that is answered at its boundary, and captured afterwards."""
        started = time.monotonic_ns()
        self._flush_maps(link)
        self.sealer.unstick()
        with self.sealer.order:
            self.sealer.refuse_stuck()
            row = self.row()
            unlisted = not self._builds_upon(link, rules)
            elsewhere = [] if unlisted else self.elsewhere.changed(link)
            seen = self._seen(link, rules, elsewhere)
            with self._cut(link, Freeze(unlisted), wait=False) as frozen:
                unlisted = unlisted or not frozen.complete or _may_be_elsewhere(rules, frozen)
                changes = b"" if unlisted else self._with_elsewhere(link, rules, frozen, elsewhere, seen)
                snapshot = SnapshotRow(
                    id=new_id("snap"),
                    workspace_id=self.id,
                    root=None,
                    label=label,
                    metadata=metadata,
                    state=SnapshotState.FROZEN,
                    reason="",
                    exclude=rules.exclude,
                    max_file_bytes=rules.max_file_bytes,
                    skipped=(),
                    stats=SnapshotStats(duration_ns=time.monotonic_ns() - started),
                    created_ns=time.time_ns(),
                    origin=origin,
                    parent_id=row.last_snapshot_id,
                    refuse_hard_links=rules.refuse_hard_links,
                )
                boundary = BoundaryRow(
                    snapshot.id,
                    self.id,
                    frozen.generation,
                    link.welcome.started_ns,
                    frozen.frozen_ns,
                    boot_id(),
                    unlisted,
                    changes,
                    self.store.pack_bytes(),
                )
                step("checkpoint.frozen")
                with self.store.write(objects=False) as writer:
                    writer.put_snapshot(snapshot)
                    writer.put_boundary(boundary)
                    writer.put_workspace(
                        msgspec.structs.replace(
                            row, last_snapshot_id=snapshot.id, next_generation=frozen.generation + 1
                        )
                    )
                    if fill is not None:
                        fill(writer, snapshot)
                self.elsewhere.observe(elsewhere)
                step("checkpoint.committed")
                try:
                    link.call(Committed(frozen.generation, True, unlisted, snapshot.max_file_bytes))
                except WorkerRefused as error:
                    self.sealer.not_protected(frozen.generation, str(error))
                except CogfsError as error:
                    # It takes what it was not told of for a boundary until the next connection tells it.
                    _log.warning("cannot tell the worker of a boundary", workspace=self.id, error=str(error))
        return snapshot

    def _seen(self, link: Link, rules: Rules, elsewhere: list[Found]) -> list[Was]:
        """Files that were changed by a name elsewhere, read while nobody has to wait for that. What the worker saw
        change will be listed and protected, and is not read."""
        if not elsewhere:
            return []
        with self._cut(link, Freeze(), wait=False) as frozen:
            files = frozen.files
        return self.elsewhere.read(link, rules, unlisted_by(files, elsewhere))

    def _with_elsewhere(
        self, link: Link, rules: Rules, frozen: Frozen, elsewhere: list[Found], seen: list[Was]
    ) -> bytes:
        """What a boundary consists of, with the files that were changed by a name elsewhere as they are now."""
        packed = bytes(frozen.packed)
        if not elsewhere:
            return packed
        seen = self.elsewhere.read_again(link, rules, unlisted_by(frozen.files, elsewhere), seen)
        return boundaries.with_seen(packed, seen)

    def _builds_upon(self, link: Link, rules: Rules) -> bool:
        """Whether what is recorded, and what will have been when the boundaries are sealed, is followed by what the
        worker sees change from now on."""
        with self.store.read() as reader:
            state = reader.record_state(self.id)
            generations = reader.generations(self.id)
            last = reader.boundary(self.id, generations[-1]) if generations else None
            if last is not None:
                snapshot = reader.snapshot(last.snapshot_id)
                return last.worker_started_ns == link.welcome.started_ns and rules.same_as(snapshot)
        return (
            state is not None
            and state.root is not None
            and state.worker_started_ns == link.welcome.started_ns
            and rules.same_as(state)
        )

    def _checkpoint_at_once(
        self,
        link: Link,
        rules: Rules,
        label: str,
        metadata: str,
        origin: SnapshotOrigin,
        fill: Callable[[Writer, SnapshotRow], None] | None,
    ) -> SnapshotRow:
        """A snapshot that is sealed when this returns."""
        started = time.monotonic_ns()
        before = self.store.pack_bytes()
        with self.frozen(link) as frozen:
            current = self.record(link, frozen, rules=rules)
            step("checkpoint.recorded")
            snapshot = self.snapshot_row(current, current.root, current.rules, label, metadata, origin, started, before)

            def write(writer: Writer) -> None:
                self.put_snapshot(writer, snapshot)
                if fill is not None:
                    fill(writer, snapshot)
                delete_expired(writer, self.id, self.sealer.restoring)

            self.commit(link, current, write)
        return snapshot

    def snapshot_row(
        self,
        current: Current,
        root: TreeEntry,
        rules: Rules,
        label: str,
        metadata: str,
        origin: SnapshotOrigin,
        started_ns: int,
        stored_before: int,
    ) -> SnapshotRow:
        sums = current.sums
        return SnapshotRow(
            id=new_id("snap"),
            workspace_id=self.id,
            root=root,
            label=label,
            metadata=metadata,
            state=SnapshotState.SEALED,
            reason="",
            exclude=rules.exclude,
            max_file_bytes=rules.max_file_bytes,
            skipped=tuple(sorted(current.book.skipped(current.root_inode), key=lambda one: one.path)),
            stats=SnapshotStats(
                files=sums.files,
                bytes=sums.bytes,
                hashed=current.hashed,
                reused=max(0, sums.files - current.hashed),
                stored_bytes=max(0, self.store.pack_bytes() - stored_before),
                duration_ns=time.monotonic_ns() - started_ns,
                directories=sums.directories,
                symlinks=sums.symlinks,
            ),
            created_ns=time.time_ns(),
            origin=origin,
            parent_id=self.row().last_snapshot_id,
            refuse_hard_links=rules.refuse_hard_links,
        )

    def put_snapshot(self, writer: Writer, snapshot: SnapshotRow) -> None:
        writer.put_snapshot(snapshot)
        writer.put_workspace(msgspec.structs.replace(writer.workspace(self.id), last_snapshot_id=snapshot.id))

    def capture(self, reach: Beneath, path: bytes, rules: Rules) -> TreeEntry | None:
        """What is at ``path`` now, whatever its size, in the store; None when nothing is."""
        unlimited = Rules(rules.exclude, -1, rules.refuse_hard_links)
        parent, name = split(path)
        try:
            fd = reach.directory(parent)
            os.stat(name, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        book = RecordBook(self.store, "")
        watched = self.link is not None and self.link.watched
        recorder = Recorder(
            self.store, book, reach.root_fd, unlimited, self.pool, unsure=None if watched else frozenset()
        )
        return recorder.single(parent, name, fd)

    # --- restores -----------------------------------------------------------------------------------------------------

    def guard(self, link: Link, restore_id: str, inodes: set[int], pinned: set[int]) -> None:
        """Keep other processes from what a restore touches; the calling thread is the one that may."""
        owner = threading.get_native_id()
        try:
            link.call(Guard(restore_id, [owner], sorted(inodes), sorted(pinned - inodes)), _GUARD_PATIENCE)
        except CogfsError:
            self.unguard(link, _SILENT_PATIENCE)
            raise

    def unguard(self, link: Link, patience: float = 30.0) -> None:
        try:
            link.call(Unguard(), patience)
        except CogfsError as error:
            _log.warning("cannot take a guard away", workspace=self.id, error=str(error))

    def set_read_only(self, reason: str, recovery: RecoveryRow | None = None) -> None:
        """Nothing may be changed from now on, after a ``recovery`` that failed; empty: all is well again."""
        link = self.link
        if link is not None:
            # First, as it holds even when the store cannot be written.
            try:
                link.call(SetReadOnly(reason))
                if reason:
                    # It says less than the reason, and would be asked first.
                    link.call(Unguard())
            except CogfsError as error:
                _log.warning("cannot tell the worker to be read-only", workspace=self.id, error=str(error))
        with self.store.write() as writer:
            row = writer.workspace(self.id)
            writer.put_workspace(
                msgspec.structs.replace(row, read_only=reason, last_recovery=recovery or row.last_recovery)
            )


def failed(snapshot: SnapshotRow) -> CogfsError:
    """Why a snapshot that FAILED is no target, with the first of the paths."""
    named = ", ".join(f"{show(one.path)} ({one.reason})" for one in snapshot.failed[:3])
    rest = len(snapshot.failed) - 3
    return CogfsError(
        Reason.VALIDATION_ERROR,
        f"the snapshot {snapshot.id} has failed: {snapshot.reason}"
        + (f": {named}" if named else "")
        + (f" and {rest} more" if rest > 0 else ""),
    )


def _may_be_elsewhere(rules: Rules, frozen: Frozen) -> bool:
    """Whether a directory has moved, where that may change what is left out: the directory itself, or what is below it.

    The worker knows no globs. What comes out of a place that one of them leaves out is recorded nowhere, and of all
    that is in it the worker would list, and protect, the directory alone.
    """
    if not rules.exclude:
        return False
    names = {one.inode: one.names for one in frozen.directories}
    for one in frozen.directories:
        if one.attributes and not one.made and one.path:
            above = names.get(one.parent, ())
            if above is None or split(one.path)[1] in above:
                return True
    return False
