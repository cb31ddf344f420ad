"""A restore from the request to its journal: planned, checked, made safe, and guarded. ``completion`` does the rest.

Nothing is changed here: a dry run, and every refusal, ends in this module.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.channel import Frozen
from cogfs.fsd.control.beneath import beneath, split
from cogfs.fsd.control.completion import Completion, Phase, Progress, is_before_restore, silent, verify
from cogfs.fsd.control.errors import BusyBy, CogfsError, busy, show
from cogfs.fsd.control.executor import refuse_what_is_not_ours
from cogfs.fsd.control.occupancy import Touched, blocking, occupants
from cogfs.fsd.control.planner import Plan, Planner, count, find, normal_path, patched
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import same_stat
from cogfs.fsd.control.report import Outcome, outcome
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.runstates import REWOUND, drop
from cogfs.fsd.control.standing import move_leaf
from cogfs.fsd.control.users import as_busy, names, open_handles
from cogfs.fsd.control.workspace import Current, Workspace
from cogfs.store.errors import StoreError
from cogfs.store.ids import new_id
from cogfs.store.rows import Writer
from cogfs.store.schema import (
    ForkRow,
    JournalRow,
    Kind,
    OpaqueReason,
    SnapshotOrigin,
    SnapshotRow,
    ThreadRow,
    TreeEntry,
    UndoRow,
)
from cogfs.store.steps import step
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

_HARD_LINK = OpaqueReason.HARD_LINK.encode()
#: A name with nothing under it, also where the directory that is to hold it is still something else.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class Fork:
    """The fork that a restore is part of. What it writes is taken back with the files."""

    row: ForkRow
    #: Written with the journal: the copies of snapshots.
    begin: Callable[[Writer], None]
    #: Written in the transaction that completes the restore: the new thread.
    finish: Callable[[Writer], None]
    #: The snapshot to be restored, captured, where it is one of the copies; else the workspace has it.
    target: SnapshotRow | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A restore that is asked for."""

    snapshot_id: str
    paths: tuple[bytes, ...] = ()
    #: Paths that neither the snapshot nor the workspace has are no mistake: those of an earlier restore.
    missing_ok: bool = False
    dry_run: bool = False
    force: bool = False
    strict: bool = False
    #: BUSY within a restore, WORKSPACE_BUSY within a rewind.
    busy_reason: Reason = Reason.BUSY
    #: The thread's row after it, when it is part of a rewind; written in the transaction that completes the restore.
    thread: ThreadRow | None = None
    #: The thread's row before it.
    thread_before: ThreadRow | None = None
    #: Where no file changes, the thread's row does not, either.
    thread_stays: bool = False
    #: Refuse to change what the safety snapshot cannot hold, although it is kept elsewhere (see ``_leave_unread``).
    to_be_undone: bool = False
    #: Runs, tool calls and commands in the way, told in a dry run; without one they have refused it (``passage``).
    occupied_by: tuple[BusyBy, ...] = ()
    #: A dry run that shows whether the restore can be made: contents are read, as they are before the first change.
    probing: bool = False
    #: Runs that are dropped in the transaction that completes the restore.
    drops: tuple[str, ...] = ()
    #: What it is part of otherwise.
    fork: Fork | None = None


class Restoration:
    """Restores of one workspace. Used under its lock."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = workspace.store

    def restore(self, request: Request, progress: Progress = silent) -> Outcome:
        """Carry out, or with ``dry_run`` plan, a restore. CogfsError, store errors and OSError before anything changed;
        after that the error says that the files were taken back."""
        with (
            self._store.operation(),
            self._workspace.lock,
            self._workspace.sealer.keeping(request.snapshot_id),
        ):
            return self._restore(request, progress)

    def _restore(self, request: Request, progress: Progress) -> Outcome:
        workspace, store = self._workspace, self._store
        link = workspace.ready()
        target = self._target(request)
        paths = tuple(sorted({normal_path(path) for path in request.paths}))
        progress(Phase.PLANNING, 0, 0)
        safety = None
        # After a dry run nobody has to know that the others go on.
        with workspace.frozen(link, wait=not request.dry_run) as frozen:
            # Nothing is sealed now, so no retention takes it; one that did before it was known to be needed is seen.
            target = self._target(request)
            current, base, plan = self._look(link, frozen, request, target, paths)
            touched = Touched(link.root_fd, plan)
            who = [*occupants(link, plan, touched, strict=request.strict), *request.occupied_by]
            refuse_what_is_not_ours(link.root_fd, plan)
            if not request.dry_run and not plan.empty:
                self._refuse_busy(request, who)
                safety = self._safety(link, current, base, target)
                restore_id = new_id("restore")
                # From here on the guard keeps others out, and what does not concern the restore goes on.
                workspace.guard(link, restore_id, touched.changed | touched.directories, touched.above)
        done = outcome(target.id, plan, who, dry_run=request.dry_run)
        if safety is None:
            if not request.dry_run:
                self._commit_rows(request, target, paths)
            # A dry run is refused for it, too; else the plan is empty.
            verify(store, plan, progress, kept=request.probing)
            return done
        completion = Completion(workspace)
        try:
            passed = self._passed(link, request)
            verify(store, plan, progress, kept=True)
            journal = self._journal(request, restore_id, target, safety, paths)
            with store.write() as writer:
                writer.put_journal(journal)
                if request.fork is not None:
                    request.fork.begin(writer)
            step("restore.journalled")
        except BaseException:
            workspace.unguard(link)
            self._drop_snapshot(safety)
            raise
        more = request.fork.finish if request.fork is not None else None
        completion.carry_out(link, journal, plan, target, safety, progress, passed, more)
        done.report.safety_snapshot_id = safety.id
        if blocking(who):
            done.report.forced.extend(done.report.busy_by)
        return done

    def _look(
        self, link: Link, frozen: Frozen, request: Request, target: SnapshotRow, paths: tuple[bytes, ...]
    ) -> tuple[Current, TreeEntry, Plan]:
        """What the files are, the same with all that the plan changes, and the plan. What was cheap to find out is
        committed with the safety snapshot; without one it is found out again the next time."""
        workspace = self._workspace
        current = workspace.record(link, frozen)
        if not current.is_cheap:
            workspace.commit(link, current)
        if not request.missing_ok:
            self._check_paths(current.root, target, paths)
        base, plan = self._plan(link, current, target, request, paths)
        if self._bypassed(link.root_fd, current.book, plan):
            _log.warning("files changed without the mount; looking at all of them", workspace=workspace.id)
            current = workspace.record(link, frozen, scan=True)
            workspace.commit(link, current)
            base, plan = self._plan(link, current, target, request, paths)
        return current, base, plan

    @staticmethod
    def _passed(link: Link, request: Request) -> frozenset[int]:
        """Files whose writers a forced restore goes past, where no guard holds them up."""
        if link.watched or not request.force:
            return frozenset()
        return frozenset(handle.inode for handle in open_handles(link) if handle.writable)

    @staticmethod
    def _refuse_busy(request: Request, who: list[BusyBy]) -> None:
        in_the_way = blocking(who)
        if in_the_way and not request.force:
            raise busy(
                request.busy_reason,
                f"the restore is refused: what it would change is used by {names(in_the_way)}; "
                "end that, or force the restore",
                in_the_way,
            )

    def _target(self, request: Request) -> SnapshotRow:
        """A snapshot of this workspace that can be restored, or that will be one."""
        if request.fork is not None and request.fork.target is not None:
            return request.fork.target
        snapshot_id = request.snapshot_id
        with self._store.read() as reader:
            snapshot = reader.snapshot(snapshot_id)
        if snapshot.workspace_id != self._workspace.id:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"the snapshot {snapshot_id} is of workspace {snapshot.workspace_id}"
            )
        return self._workspace.sealed(snapshot_id)

    def _check_paths(self, current: TreeEntry, target: SnapshotRow, paths: Iterable[bytes]) -> None:
        assert target.root is not None
        for path in paths:
            if find(self._store, target.root, path) is None and find(self._store, current, path) is None:
                raise CogfsError(Reason.NOT_FOUND, f"neither the snapshot nor the workspace has {show(path)}")

    def _plan(
        self,
        link: Link,
        current: Current,
        target: SnapshotRow,
        request: Request,
        paths: tuple[bytes, ...],
    ) -> tuple[TreeEntry, Plan]:
        """The plan, and the current tree with all that the plan changes, but for what is not to be read."""
        assert target.root is not None
        planner = Planner(self._store, Rules.of(target), paths, back=is_before_restore(target))
        rules = Rules(target.exclude, -1, current.rules.refuse_hard_links)
        base = current.root
        unread: set[bytes] = set()
        while True:
            plan = planner.plan(base, target.root)
            missing = [one for one in plan.uncaptured() if one.path not in unread]
            if not missing:
                break
            found: dict[bytes, TreeEntry | None] = {}
            with beneath(link.root_fd) as reach:
                for one in missing:
                    entry = self._workspace.capture(reach, one.path, rules)
                    if (
                        entry is not None
                        and entry.target == _HARD_LINK
                        and entry.kind is Kind.OPAQUE
                        and not request.to_be_undone
                    ):
                        unread.add(one.path)
                        continue
                    if entry is None or entry.kind is Kind.OPAQUE:
                        why = entry.target.decode() if entry is not None else "gone"
                        if why == OpaqueReason.CHANGING:
                            raise _being_written(link, one.path, request.busy_reason)
                        raise CogfsError(
                            Reason.DENIED,
                            f"the restore would change {show(one.path)}, which no snapshot could keep ({why})",
                        )
                    found[one.path] = entry
            base = patched(self._store, base, found)
        self._leave_unread(link, unread & plan.paths())
        told = {path for path, _ in plan.kept}
        for skipped in target.skipped:
            # Also where nothing differs: what was skipped may have changed, and nobody knows from what.
            if skipped.path not in told and planner.in_filter(skipped.path) and find(self._store, base, skipped.path):
                plan.kept.append((skipped.path, skipped.reason))
        plan.kept.sort()
        if paths and b"" not in paths:
            recorded = count(self._store, target.root, paths)
        else:
            stats = target.stats
            recorded = stats.files + stats.directories + stats.symlinks
        plan.unchanged = max(0, recorded - sum(one.path != b"" for one in plan.steps if one.after is not None))
        return base, plan

    @staticmethod
    def _leave_unread(link: Link, paths: set[bytes]) -> None:
        """See that the files at ``paths``, which give way and are in no snapshot, keep another name. DENIED."""
        names: dict[int, list[bytes]] = {}
        with beneath(link.root_fd) as reach:
            for path in sorted(paths):
                parent, name = split(path)
                status = os.stat(name, dir_fd=reach.directory(parent), follow_symlinks=False)
                known = names.setdefault(status.st_ino, [])
                known.append(path)
                if len(known) >= status.st_nlink:
                    raise CogfsError(
                        Reason.DENIED,
                        f"the restore would change every name of {show(known[0])}, which no snapshot could keep "
                        f"({OpaqueReason.HARD_LINK.value})",
                    )

    @staticmethod
    def _bypassed(root_fd: int, book: RecordBook, plan: Plan) -> bool:
        """Whether something that the plan changes is not what was recorded: somebody reached it past the mount."""
        with beneath(root_fd) as reach:
            for one in sorted(plan.steps, key=lambda one: split(one.path)):
                if not one.path or (one.before is not None and one.before.kind is Kind.OPAQUE):
                    continue
                parent, name = split(one.path)
                try:
                    fd = reach.directory(parent)
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError as error:
                    if one.before is None and error.errno in _NOTHING_THERE:
                        continue
                    return True
                if one.before is None:
                    return True
                if one.before.kind is Kind.DIRECTORY:
                    if not stat.S_ISDIR(status.st_mode):
                        return True
                    continue
                row = book.row(os.fstat(fd).st_ino, name)
                if row is None or not same_stat(row, status):
                    return True
        return False

    def _safety(self, link: Link, current: Current, base: TreeEntry, target: SnapshotRow) -> SnapshotRow:
        """The safety snapshot, sealed. It leaves out only what the target left out."""
        workspace = self._workspace
        rules = Rules(target.exclude, -1, current.rules.refuse_hard_links)
        snapshot = workspace.snapshot_row(
            current,
            base,
            rules,
            f"before restoring {target.id}",
            "{}",
            SnapshotOrigin.SAFETY,
            time.monotonic_ns(),
            self._store.pack_bytes(),
        )

        def fill(writer: Writer) -> None:
            workspace.put_snapshot(writer, snapshot)

        if current.is_committed:
            with self._store.write() as writer:
                fill(writer)
        else:
            workspace.commit(link, current, fill)
        step("restore.safe")
        return snapshot

    def _drop_snapshot(self, safety: SnapshotRow) -> None:
        """Nothing was changed, so the safety snapshot says nothing that the files do not. It may stay all the same."""
        try:
            with self._store.write() as writer:
                writer.delete_snapshot(safety.id)
                row = writer.workspace(self._workspace.id)
                if row.last_snapshot_id == safety.id:
                    # The one before it may have been deleted meanwhile.
                    newest = next((one.id for one in writer.snapshots(row.id, limit=1)), "")
                    before = safety.parent_id if writer.has_snapshot(safety.parent_id) else newest
                    writer.put_workspace(msgspec.structs.replace(row, last_snapshot_id=before))
        except StoreError as error:
            _log.warning("a safety snapshot that nobody needs stays", snapshot=safety.id, error=str(error))

    def _journal(
        self, request: Request, restore_id: str, target: SnapshotRow, safety: SnapshotRow, paths: tuple[bytes, ...]
    ) -> JournalRow:
        return JournalRow(
            restore_id,
            self._workspace.id,
            target.id,
            safety.id,
            paths,
            time.time_ns(),
            request.thread,
            _undo(request, target.id, safety.id, paths),
            request.drops,
            request.fork.row if request.fork is not None else None,
        )

    def _commit_rows(self, request: Request, target: SnapshotRow, paths: tuple[bytes, ...]) -> None:
        """The files are right as they are: the conversation alone moves, or is forked."""
        if request.fork is not None:
            with self._store.write() as writer:
                request.fork.begin(writer)
                request.fork.finish(writer)
            return
        thread, before = request.thread, request.thread_before
        if thread is None or before is None or request.thread_stays:
            return
        with self._store.write() as writer:
            move_leaf(writer, thread)
            drop(writer, request.drops, REWOUND)
            if thread.leaf_id != before.leaf_id:
                # An undo must not take back the restore before this one. The files were those of the target.
                row = writer.workspace(self._workspace.id)
                undo = _undo(request, target.id, target.id, paths)
                writer.put_workspace(msgspec.structs.replace(row, undo=undo))


def _being_written(link: Link, path: bytes, reason: Reason) -> CogfsError:
    who = [as_busy(handle) for handle in open_handles(link) if handle.writable and handle.path == path]
    return busy(
        reason,
        f"the restore would change {show(path)}, which is being written all the time, by {names(who)}: end that first",
        who,
    )


def _undo(request: Request, target_id: str, safety_id: str, paths: tuple[bytes, ...]) -> UndoRow:
    """What takes a restore back, with the rewind that it is part of."""
    thread, before = request.thread, request.thread_before
    if thread is None or before is None:
        return UndoRow(target_id, safety_id, paths=paths)
    return UndoRow(target_id, safety_id, thread.id, before.leaf_id, thread.leaf_id, before.files_follow, paths)
