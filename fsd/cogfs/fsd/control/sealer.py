"""Capturing what boundaries left to be captured: in the background, oldest first, until each snapshot is sealed.

A snapshot is answered as soon as its boundary is durable. What it consists of is read afterwards, as of the boundary
(``asof``), while the worker lets nothing of it be changed that is not written down. What cannot be had as it was makes
the snapshot FAILED, by name; it is never something else in silence.

Locks: ``order`` is held while a boundary is made and while one is taken off, so that what a boundary builds upon is
there. It comes after the workspace's lock and is never held while files are read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from cogfs.fsd.channel import Broken, DirtyFile, Foreign, ListForeign, Preserve, Reconcile, Sealed, Wanted
from cogfs.fsd.control import boundaries
from cogfs.fsd.control.ahead import Ahead
from cogfs.fsd.control.asof import AsOf, Stopped
from cogfs.fsd.control.background import lower_priority
from cogfs.fsd.control.before import put_content
from cogfs.fsd.control.beneath import beneath, join, split
from cogfs.fsd.control.capture import Vanished, capture_file, open_inode, read_xattrs
from cogfs.fsd.control.elsewhere import Elsewhere
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recordbook import FLUSH_ROWS, RecordBook
from cogfs.fsd.control.recorder import Recorded, Recorder
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.syscalls import syncfs
from cogfs.fsd.control.whereabouts import Whereabouts
from cogfs.fsd.undolog import Content, Status, UndoLog, Was
from cogfs.store import retention
from cogfs.store.errors import NotFound, StoreError
from cogfs.store.rows import Writer
from cogfs.store.schema import (
    BoundaryRow,
    OpaqueReason,
    RecordState,
    Skipped,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
)
from cogfs.store.steps import step
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: How often a file that is moved while it is looked for is looked for.
_ATTEMPTS = 5
#: Seconds between two tries to write down that a snapshot has failed.
_RETRY = 2.0
#: Seconds without a boundary after which the files are synced.
_SYNC_AFTER = 5.0
#: Rows that an update may hold: it is repeated from its beginning after a crash, so none may be written ahead.
_ALL_ROWS = 1 << 62
#: No generation is later.
_ANY_GENERATION = 1 << 62
_NOT_PRESERVED = "nothing of it was preserved for some time"
#: Paths that a snapshot names as the reason for its failure.
_MAX_FAILED = 1000


def boot_id() -> str:
    """Which boot of the system this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def believed_until(state: RecordState | None) -> int | None:
    """Until when what was recorded is believed by its stat, in nanoseconds since the epoch; None: always. What was not
    synced may have come through a loss of power as a stat without its content."""
    return state.synced_ns if state is not None and state.boot_id not in ("", boot_id()) else None


def delete_expired(writer: Writer, workspace_id: str, restoring: AbstractSet[str]) -> None:
    """Delete the snapshots that the workspace's options do not keep any longer, but for those that are being restored.

    Where that cannot be told it is logged: the snapshot that was just taken does not fail for it.
    """
    workspace = writer.workspace(workspace_id)
    options = workspace.options
    if not options.retain_count and not options.retain_max_age_ns:
        return
    try:
        keep = retention.in_use(workspace, writer.journal(workspace_id)) | restoring
        expired = retention.expired(writer.snapshots(workspace_id), options, time.time_ns(), keep)
    except StoreError as error:
        _log.error("cannot tell which snapshots are past their time", workspace=workspace_id, error=str(error))
        return
    for snapshot_id in expired:
        writer.delete_snapshot(snapshot_id)
    if expired:
        _log.info("snapshots past their time are deleted", workspace=workspace_id, count=len(expired))


class Sealer:
    """The unsealed boundaries of one workspace. Its methods may be called by many threads."""

    def __init__(
        self,
        store: Store,
        pool: ThreadPoolExecutor,
        urgent: ThreadPoolExecutor,
        workspace_id: str,
        undo_log: Path,
        ahead: Ahead,
        elsewhere: Elsewhere,
    ) -> None:
        """``pool`` reads what a boundary left, ``urgent`` what a call waits for."""
        self._store = store
        self._pool = pool
        self._urgent = urgent
        self._workspace_id = workspace_id
        self._undo_log = undo_log
        self._ahead = ahead
        self._elsewhere = elsewhere
        self.order = threading.Lock()
        #: The snapshot that is being restored, from before it is looked up.
        self.restoring: frozenset[str] = frozenset()
        #: By generation: the largest file that its snapshot keeps, and whether it refuses hard links.
        self._kept: dict[int, tuple[int, bool]] = {}
        #: Guards the fields below, and tells of boundaries that came and went.
        self._changed = threading.Condition(threading.RLock())
        self._root_fd = -1
        self._link: Link | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unsynced_since = 0.0
        #: Up to which generation nothing is preserved any more, and why; 0: everything is.
        self._broken = (0, "")
        #: Why it cannot even be written down that a snapshot has failed.
        self._stuck: CogfsError | None = None
        self._tries = 0
        #: Why files that a call waited for could not be captured.
        self._trouble: dict[bytes, str] = {}

    # --- who serves the files -----------------------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """A worker serves the workspace; it is told which boundaries there are. Where there is no mount, those that an
        earlier one left are captured as if nobody served it."""
        if not link.watched:
            self._serve_bare(lambda: os.dup(link.root_fd))
            return
        link.on_event(lambda event: self._take_event(link, event))
        with self.order:
            with self._store.read() as reader:
                generations = reader.generations(self._workspace_id)
                rows = [reader.boundary(self._workspace_id, generation) for generation in generations]
            unlisted = [row.generation for row in rows if row is not None and row.unlisted]
            with self._changed:
                self._link = link
                self._hold(os.dup(link.root_fd))
                # Of the boundaries so far; with the next one the worker begins anew.
                unknown = set(generations) - set(link.welcome.boundaries)
                if unknown and max(unknown) > self._broken[0]:
                    self._broken = (max(unknown), link.welcome.broken or _NOT_PRESERVED)
            link.call(Reconcile(generations, unlisted))
        if generations:
            self.wake()

    def serve_bare(self, root: bytes) -> None:
        """Nobody serves the workspace, and nothing is mounted on ``root``. OSError."""
        self._serve_bare(lambda: os.open(root, _OPEN))

    def _serve_bare(self, open_root: Callable[[], int]) -> None:
        with self._store.read() as reader:
            if not reader.generations(self._workspace_id):
                return
        with self._changed:
            self._hold(open_root())
        self.wake()

    def detach(self) -> None:
        """The worker is gone. What is still to be captured is captured all the same."""
        with self._changed:
            self._link = None
            if self._thread is None:
                self._hold(-1)

    def _hold(self, fd: int) -> None:
        if self._root_fd >= 0:
            os.close(self._root_fd)
        self._root_fd = fd

    def close(self) -> None:
        """Stop; what is not sealed is taken up by the next daemon."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        with self._changed:
            self._hold(-1)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be a boundary to capture."""
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"seal-{self._workspace_id}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, snapshot_id: str) -> SnapshotRow:
        """The snapshot, once it is SEALED or FAILED. UNAVAILABLE when nobody can capture it now; NotFound."""
        while True:
            with self._changed:
                with self._store.read() as reader:
                    row = reader.snapshot(snapshot_id)
                if row.state is not SnapshotState.FROZEN:
                    return row
                self._refuse_idle()
                self._changed.wait(1.0)

    def drain(self) -> None:
        """Until there is no boundary. UNAVAILABLE when nobody can capture them now."""
        while True:
            with self._changed:
                with self._store.read() as reader:
                    if not reader.generations(self._workspace_id):
                        return
                self._refuse_idle()
                self._changed.wait(1.0)

    def not_protected(self, generation: int, reason: str) -> None:
        """The worker does not preserve what a boundary consists of."""
        with self._changed:
            self._broken = (generation, reason)

    def unstick(self) -> None:
        """If an earlier snapshot's failure could not be written down, try that now: there may be room again."""
        with self._changed:
            tries = self._tries
            if self._stuck is not None:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stuck is None or self._tries > tries, _RETRY)

    def refuse_stuck(self) -> None:
        """No snapshot can be taken while it cannot be told that an earlier one has failed: the reason why not."""
        with self._changed:
            if self._stuck is not None:
                raise CogfsError(self._stuck.reason, f"a snapshot could not be captured: {self._stuck}")

    def _refuse_idle(self) -> None:
        self.refuse_stuck()
        if self._closed or self._root_fd < 0:
            raise CogfsError(
                Reason.UNAVAILABLE, "the snapshot is not captured yet: run cogfsctl mount, and it will be finished"
            )

    @contextmanager
    def keeping(self, snapshot_id: str) -> Iterator[None]:
        """Delete a snapshot neither by retention nor otherwise: it is being restored. One at a time."""
        self.restoring = frozenset((snapshot_id,))
        try:
            yield
        finally:
            self.restoring = frozenset()

    # --- what a call waits for ----------------------------------------------------------------------------------------

    def _take_event(self, link: Link, event: Wanted | Broken) -> None:
        """Called by the link's own thread."""
        if isinstance(event, Broken):
            try:
                with self._store.read() as reader:
                    last = max(reader.generations(self._workspace_id), default=0)
            except StoreError:
                last = _ANY_GENERATION  # whatever there is; the worker says it again to the next daemon
            with self._changed:
                self._broken = (last, event.reason)
            return
        try:
            self._urgent.submit(self._preserve, link, event)
        except RuntimeError:
            pass  # The daemon stops; the worker asks the next one.

    def _preserve(self, link: Link, wanted: Wanted) -> None:
        try:
            with self._store.operation():
                was = self._capture(link, wanted)
        except Exception as error:
            # The call must go on. The snapshot will be FAILED, since the file has changed then and is not in the log.
            failure = as_cogfs_error(error, "capture a file that is about to change")
            _log.error("a file is not preserved", workspace=self._workspace_id, reason=str(failure))
            with self._changed:
                self._trouble.update(dict.fromkeys(wanted.paths, str(failure)))
            was = None
        step("preserve.captured")
        try:
            link.call(Preserve(wanted.ticket, was))
        except CogfsError as error:
            # It asks again when there is a connection again.
            _log.warning("cannot answer the worker", workspace=self._workspace_id, error=str(error))

    def _capture(self, link: Link, wanted: Wanted) -> Was | None:
        """What a file is, with its content in the store; None when it has no name, so that no snapshot has it."""
        whereabouts = Whereabouts(link.root_fd, link, held=True)
        paths: list[bytes] = list(wanted.paths)
        limit, refuse = self._limits()
        if wanted.logged:
            with self._logged(wanted.inode) as logged:
                if logged is not None:
                    return self._put_logged(link, wanted, logged)
        for _ in range(_ATTEMPTS):
            for path in paths:
                parent, name = split(path)
                try:
                    with beneath(link.root_fd) as reach:
                        fd = reach.directory(parent)
                        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                        if found.st_ino != wanted.inode:
                            continue
                        status = Status.of(found)
                        xattrs = read_xattrs(name, fd)
                        if 0 <= limit < status.size:
                            return Was(status, xattrs, reason=OpaqueReason.TOO_LARGE.value)
                        if refuse and status.nlink > 1:
                            return Was(status, xattrs, reason=OpaqueReason.HARD_LINK.value)
                        known = self._ahead.content(status)
                        if known is not None:
                            return Was(status, xattrs, hash=known)
                        content = capture_file(self._store, name, fd)
                except (FileNotFoundError, NotADirectoryError, Vanished):
                    continue
                if isinstance(content, OpaqueReason):
                    return Was(status, xattrs, reason=content.value)
                return Was(Status.of(content.stat), xattrs, hash=content.hash)
            now = whereabouts(wanted.inode)
            paths = self._recorded_names(wanted.inode) if now is None else [now]
        return None

    @contextmanager
    def _logged(self, inode: int) -> Iterator[Content | None]:
        """What the log has of a file at the latest boundary, when it has part of it."""
        with self._store.read() as reader:
            latest = max(reader.generations(self._workspace_id), default=0)
        log = UndoLog(self._undo_log)
        try:
            log.refresh()
            was = log.inode(inode, latest)
            yield log.content(inode, latest) if was is not None and was.logged else None
        finally:
            log.close()

    def _put_logged(self, link: Link, wanted: Wanted, content: Content) -> Was:
        """What a file was of which the log has part, and which nobody changes until the worker has this."""

        def open_file() -> int:
            for path in wanted.paths:
                parent, name = split(path)
                with suppress(FileNotFoundError, NotADirectoryError), beneath(link.root_fd) as reach:
                    fd = open_inode(reach.directory(parent), name, wanted.inode)
                    if fd >= 0:
                        return fd
            return -1

        was = msgspec.structs.replace(content.was, logged=False)
        found = put_content(self._store, content, open_file).content
        if isinstance(found, OpaqueReason):
            return msgspec.structs.replace(was, reason=found.value)
        return msgspec.structs.replace(was, hash=found)

    def _recorded_names(self, inode: int) -> list[bytes]:
        """Where a file with several names was recorded: the worker may know none of those that are left."""
        book = RecordBook(self._store, self._workspace_id)
        link = book.link(inode)
        found = []
        for directory in link[1] if link is not None else ():
            above, recorded = book.path_of(directory), book.directory(directory)
            if above is not None and recorded is not None:
                found += [join(above, row.entry.name) for row in recorded.rows if row.inode == inode]
        return found

    def _limits(self) -> tuple[int, bool]:
        """The largest file that any unsealed snapshot keeps (-1: no limit), and whether all refuse hard links."""
        with self._store.read() as reader:
            known, kept = self._kept, {}
            for generation in reader.generations(self._workspace_id):
                if generation in known:
                    kept[generation] = known[generation]
                elif (boundary := reader.boundary(self._workspace_id, generation)) is not None:
                    snapshot = reader.snapshot(boundary.snapshot_id)
                    kept[generation] = snapshot.max_file_bytes, snapshot.refuse_hard_links
            options = reader.workspace(self._workspace_id).options
        self._kept = kept
        found = list(kept.values()) or [(options.max_file_bytes, options.refuse_hard_links)]
        sizes = [size for size, _ in found]
        return -1 if min(sizes) < 0 else max(sizes), all(refuse for _, refuse in found)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lower_priority()
        while True:
            try:
                row = self._next()
            except StoreError as error:
                _log.error("cannot tell what is to be captured", workspace=self._workspace_id, error=str(error))
                with self._changed:
                    if not self._closed:
                        self._changed.wait(_RETRY)
                        continue
                    self._thread = None
                return
            if row is None:
                return
            try:
                with self._store.operation():
                    self._seal(row)
            except Stopped:
                continue
            except Exception as error:
                failure = as_cogfs_error(error, "capture the files of a snapshot")
                self._give_up(row, failure, ())
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> BoundaryRow | None:
        """The oldest boundary; None when there is nothing to do, and the thread ends."""
        while True:
            with self.order, self._changed:
                if self._closed:
                    self._thread = None
                    return None
                with self._store.read() as reader:
                    generations = reader.generations(self._workspace_id)
                    row = reader.boundary(self._workspace_id, generations[0]) if generations else None
                if row is not None:
                    return row
                if not self._unsynced_since or self._link is None:
                    self._thread = None
                    if self._link is None:
                        self._hold(-1)
                    self._changed.notify_all()
                    return None
            self._rest()

    def _rest(self) -> None:
        """Wait a while for the next boundary; when none comes, have the files synced, so that what was recorded of them
        can be believed after a loss of power."""
        with self._changed:
            left = self._unsynced_since + _SYNC_AFTER - time.monotonic()
            if left > 0:
                self._changed.wait(left)
                return
            self._unsynced_since = 0.0
            fd = os.dup(self._root_fd)
        started = time.time_ns()
        try:
            syncfs(fd)
            with self.order, self._store.write() as writer:
                state = writer.record_state(self._workspace_id)
                if state is not None:
                    writer.put_record_state(
                        self._workspace_id, msgspec.structs.replace(state, boot_id=boot_id(), synced_ns=started)
                    )
        except (OSError, StoreError, NotFound) as error:
            _log.warning("the files are not synced", workspace=self._workspace_id, error=str(error))
        finally:
            os.close(fd)

    # --- sealing ------------------------------------------------------------------------------------------------------

    def _seal(self, row: BoundaryRow) -> None:
        if row.boot_id != boot_id():
            failure = CogfsError(
                Reason.IO, "the system went down before the snapshot was captured, and the files may be older than it"
            )
            self._give_up(row, failure, ())
            return
        with self._store.read() as reader:
            snapshot = reader.snapshot(row.snapshot_id)
            state = reader.record_state(self._workspace_id)
        with self._changed:
            root_fd = os.dup(self._root_fd)
            link = self._link
        started = time.monotonic_ns()
        log = UndoLog(self._undo_log)
        try:
            recorded, book = self._record(row, snapshot, state, root_fd, link, log)
            step("seal.recorded")
            lost = recorded.failed + self._check_preserved(row, link, log, recorded.in_place)
            if lost:
                failure = CogfsError(Reason.IO, "some files could not be captured as they were")
                self._give_up(row, failure, lost)
                return
            self._commit(row, snapshot, recorded, book, started)
        finally:
            log.close()
            os.close(root_fd)
        step("seal.committed")
        self._tell(row.generation)

    def _check_preserved(
        self, row: BoundaryRow, link: Link | None, log: UndoLog, in_place: Mapping[int, bytes]
    ) -> tuple[Skipped, ...]:
        """Whether the undo log had all that was changed before the files were looked at: CogfsError IO. Of the files
        that were read ``in_place``, those that were changed past the mount."""
        foreign: list[int] = []
        if link is not None and link.alive:
            try:
                # What the worker had to say before this is said when it is answered.
                answer = link.call(ListForeign())
                foreign = answer.inodes if isinstance(answer, Foreign) else []
            except CogfsError:
                pass  # It is gone, and nothing is changed any more.
        with self._changed:
            until, why = self._broken
        if row.generation <= until:
            raise CogfsError(Reason.IO, f"what was changed meanwhile could not be kept: {why}")
        log.refresh()
        if not log.tells_of(row.generation):
            # A daemon before this one may have been told why.
            raise CogfsError(Reason.IO, f"what was changed meanwhile could not be kept: {_NOT_PRESERVED}")
        return tuple(Skipped(in_place[one], "it was changed past the mount") for one in foreign if one in in_place)

    def _record(
        self,
        row: BoundaryRow,
        snapshot: SnapshotRow,
        state: RecordState | None,
        root_fd: int,
        link: Link | None,
        log: UndoLog,
    ) -> tuple[Recorded, RecordBook]:
        same_worker = link is not None and link.welcome.started_ns == row.worker_started_ns
        whereabouts = Whereabouts(root_fd, link, held=same_worker and not row.unlisted)
        rules = Rules.of(snapshot)
        book = RecordBook(self._store, self._workspace_id, FLUSH_ROWS if row.unlisted else _ALL_ROWS)
        listed = None if row.unlisted else boundaries.decode(row.changes)
        asof = AsOf(
            root_fd,
            log=log,
            boundary=row.generation,
            frozen_ns=row.frozen_ns,
            locate=whereabouts,
            stopped=lambda: self._closed,
            seen=listed.seen if listed is not None else (),
        )
        try:
            asof.refresh()
            recorder = Recorder(
                self._store, book, root_fd, rules, self._pool, asof, believed_until(state), self._ahead.content
            )
            recorded = None
            if listed is not None and state is not None and state.root is not None:
                files = self._with_late(row, listed.files, link)
                # Nobody watched while there was no worker.
                earlier = listed.earlier if same_worker else ()
                recorded = recorder.update(listed.directories, files, state.root, earlier)
            if recorded is None:
                if not row.unlisted:
                    raise CogfsError(Reason.IO, "what the snapshot builds upon is not recorded")
                recorded = recorder.scan()
        finally:
            asof.close()
        return recorded, book

    def _with_late(self, row: BoundaryRow, files: list[DirtyFile], link: Link | None) -> list[DirtyFile]:
        """With the files that were changed by a name elsewhere before the boundary, and after the one before it had
        been read: that one was not recorded yet when this was made, so that they could not be compared with it. And
        those of which the worker only saw attributes change: it cannot know of the content."""
        if link is None or not link.alive:
            return files
        late = self._elsewhere.unrecorded(link, {file.inode for file in files if file.content}, row.frozen_ns)
        return boundaries.with_content(files, late)

    def _commit(
        self, row: BoundaryRow, snapshot: SnapshotRow, recorded: Recorded, book: RecordBook, started_ns: int
    ) -> None:
        sums = recorded.sums
        sealed = msgspec.structs.replace(
            snapshot,
            root=recorded.root,
            state=SnapshotState.SEALED,
            skipped=tuple(sorted(book.skipped(recorded.root_inode), key=lambda one: one.path)),
            stats=SnapshotStats(
                files=sums.files,
                bytes=sums.bytes,
                hashed=recorded.hashed,
                reused=max(0, sums.files - recorded.hashed),
                stored_bytes=max(0, self._store.pack_bytes() - row.stored_before),
                duration_ns=snapshot.stats.duration_ns + time.monotonic_ns() - started_ns,
                directories=sums.directories,
                symlinks=sums.symlinks,
            ),
        )
        # What is synced first need not be synced while others wait for the order.
        self._store.sync()
        with self.order:
            with self._store.write() as writer:
                book.write(writer)
                before = writer.record_state(self._workspace_id)
                writer.put_record_state(
                    self._workspace_id,
                    RecordState(
                        recorded.root,
                        recorded.root_inode,
                        snapshot.exclude,
                        snapshot.max_file_bytes,
                        row.worker_started_ns,
                        boot_id(),
                        before.synced_ns if before is not None and before.boot_id == boot_id() else 0,
                        snapshot.refuse_hard_links,
                    ),
                )
                writer.put_snapshot(sealed)
                writer.delete_boundary(self._workspace_id, row.generation)
                delete_expired(writer, self._workspace_id, self.restoring)
            self._elsewhere.follow(book)
        with suppress(StoreError):
            # Or the next boundary has to wait for it.
            self._elsewhere.catch_up()
        with self._changed:
            self._unsynced_since = self._unsynced_since or time.monotonic()

    def _tell(self, generation: int, *, given_up: bool = False) -> None:
        """The worker need not protect the boundary any more."""
        with self._changed:
            link = self._link
        if link is None:
            return
        try:
            link.call(Sealed(generation, given_up))
        except CogfsError as error:
            _log.warning("cannot tell the worker of a seal", workspace=self._workspace_id, error=str(error))

    # --- failing ------------------------------------------------------------------------------------------------------

    def _give_up(self, row: BoundaryRow, failure: CogfsError, failed: tuple[Skipped, ...]) -> None:
        """Make a snapshot FAILED, and let the next one have what it leaves. Repeated until that is written down."""
        _log.error("snapshot failed", snapshot=row.snapshot_id, reason=str(failure), paths=len(failed))
        while True:
            try:
                last = self._write_failure(row, failure, failed)
            except NotFound:
                return  # the workspace was deleted
            except (StoreError, OSError) as error:
                _log.warning("cannot write down that a snapshot failed", snapshot=row.snapshot_id, error=str(error))
                if not self._abandon_all(row, failure):
                    return
                continue
            with self._changed:
                self._stuck = None
                self._changed.notify_all()
            step("seal.failed")
            if last:
                self._tell(last)
            return

    def _abandon_all(self, row: BoundaryRow, failure: CogfsError) -> bool:
        """The store cannot be written, and the workload goes on: no boundary is protected any more, and none is made
        until that is over. False when there is no time to wait for it."""
        with self.order:
            last = row.generation
            # It may be so broken that nothing can be read either.
            with suppress(StoreError), self._store.read() as reader:
                last = max([last, *reader.generations(self._workspace_id)])
            with self._changed:
                self._stuck = failure
                self._tries += 1
                self._broken = (last, str(failure))
                self._changed.notify_all()
            self._tell(last, given_up=True)
        with self._changed:
            if not self._closed:
                self._changed.wait(_RETRY)
            return not self._closed

    def _write_failure(self, row: BoundaryRow, failure: CogfsError, failed: tuple[Skipped, ...]) -> int:
        """The latest of those that have failed, when no boundary is left; else 0."""
        with self._changed:
            known = {path: self._trouble.pop(path, "") for path in [one.path for one in failed]}
        failed = tuple(Skipped(one.path, known[one.path] or one.reason) for one in failed[:_MAX_FAILED])
        with self.order, self._store.write() as writer:
            self._fail(writer, row, str(failure), failed)
            last = row.generation if self._is_protected(row) else self._fail_those_upon(writer, row)
            return 0 if self._hand_on(writer, row) else last

    def _fail(self, writer: Writer, row: BoundaryRow, reason: str, failed: tuple[Skipped, ...]) -> None:
        snapshot = writer.snapshot(row.snapshot_id)
        writer.put_snapshot(msgspec.structs.replace(snapshot, state=SnapshotState.FAILED, reason=reason, failed=failed))
        writer.delete_boundary(self._workspace_id, row.generation)

    def _is_protected(self, row: BoundaryRow) -> bool:
        """Whether all that was changed since a boundary is in the log, and will be."""
        with self._changed:
            link, until = self._link, self._broken[0]
        if row.generation <= until or link is None or not link.alive:
            return False
        log = UndoLog(self._undo_log)
        try:
            log.refresh()
            return link.welcome.started_ns == row.worker_started_ns and log.tells_of(row.generation)
        except (OSError, ValueError):
            return False
        finally:
            log.close()

    def _fail_those_upon(self, writer: Writer, row: BoundaryRow) -> int:
        """What a boundary was of may have changed unseen: so of those that list only what changed after it, nobody
        knows the rest. The last of them, or ``row``."""
        last = row.generation
        for generation in writer.generations(self._workspace_id):
            following = writer.boundary(self._workspace_id, generation)
            assert following is not None
            if following.unlisted:
                break
            reason = f"it builds upon the snapshot {row.snapshot_id}, which failed, and {_NOT_PRESERVED}"
            _log.error("snapshot failed", snapshot=following.snapshot_id, reason=reason, paths=0)
            self._fail(writer, following, reason, ())
            last = generation
        return last

    def _hand_on(self, writer: Writer, row: BoundaryRow) -> bool:
        """Have the next boundary build upon what the failed one did; whether there is one."""
        rest = writer.generations(self._workspace_id)
        if not rest:
            state = writer.record_state(self._workspace_id)
            if state is not None:
                # The next snapshot looks at everything.
                writer.put_record_state(self._workspace_id, msgspec.structs.replace(state, worker_started_ns=0))
            return False
        following = writer.boundary(self._workspace_id, rest[0])
        assert following is not None
        unlisted = row.unlisted or following.unlisted
        changes = b"" if unlisted else boundaries.merge(row.changes, following.changes)
        writer.put_boundary(msgspec.structs.replace(following, unlisted=unlisted, changes=changes))
        return True
