"""Restores: planned, guarded, journalled, carried out, and after a crash taken forward to the target or back.

The journal names two snapshots, the target and the safety snapshot; the plan is a function of them and is made again
when it is needed. What happens outside the paths of that plan is no concern of a restore.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.control.beneath import Beneath, ancestors, beneath, split
from cogfs.fsd.control.errors import CogfsError, busy
from cogfs.fsd.control.executor import Executor, refuse_what_is_not_ours, remove_temporaries
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.link import WorkerGone
from cogfs.fsd.control.occupancy import Touched, blocking, occupants
from cogfs.fsd.control.planner import Plan, Planner, count, find, normal_path, patched, same_content
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import Recorder, same_stat
from cogfs.fsd.control.report import restore_report
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.syscalls import syncfs
from cogfs.fsd.control.users import names
from cogfs.fsd.control.workspace import Current, Workspace
from cogfs.store.errors import StoreError
from cogfs.store.ids import new_id
from cogfs.store.rows import Writer
from cogfs.store.schema import (
    JournalRow,
    Kind,
    RecoveryRow,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    ThreadRow,
    TreeEntry,
    UndoRow,
)
from cogfs.store.steps import step
from cogfs.v1 import common_pb2 as pb
from cogfs.v1 import snapshot_pb2
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

Phase = snapshot_pb2.RestoreProgress.Phase
Progress = Callable[[snapshot_pb2.RestoreProgress.Phase.ValueType, int, int], None]


def _silent(phase: snapshot_pb2.RestoreProgress.Phase.ValueType, done: int, total: int) -> None:
    pass


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


class Restoration:
    """Restores of one workspace. Used under its lock."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = workspace.store

    # --- a restore that is asked for ----------------------------------------------------------------------------------

    def restore(self, request: Request, progress: Progress = _silent) -> pb.RestoreReport:
        """Carry out, or with ``dry_run`` plan, a restore. CogfsError, store errors and OSError before anything changed;
        after that the error says that the files were taken back."""
        with self._workspace.lock:
            return self._restore(request, progress)

    def _restore(self, request: Request, progress: Progress) -> pb.RestoreReport:
        workspace, store = self._workspace, self._store
        link = workspace.ready()
        target = self.target(request.snapshot_id)
        paths = tuple(sorted({normal_path(path) for path in request.paths}))
        progress(Phase.PLANNING, 0, 0)
        with workspace.frozen(link) as frozen:
            current = workspace.record(link, frozen)
            workspace.commit(link, current)
            if not request.missing_ok:
                self._check_paths(current.root, target, paths)
            base, plan = self._plan(link, current.root, target, paths)
            if self._bypassed(link.root_fd, plan):
                _log.warning("files changed without the mount; looking at all of them", workspace=workspace.id)
                current = workspace.record(link, frozen, scan=True)
                workspace.commit(link, current)
                base, plan = self._plan(link, current.root, target, paths)
            touched = Touched(link.root_fd, plan)
            who = occupants(link, plan, touched, strict=request.strict)
            report = restore_report(store, target.id, plan, who, dry_run=request.dry_run)
            refuse_what_is_not_ours(link.root_fd, plan)
            if request.dry_run:
                return report
            in_the_way = blocking(who)
            if plan.empty:
                self._commit_thread(request)
                return report
            if in_the_way and not request.force:
                raise busy(
                    request.busy_reason,
                    f"the restore is refused: {names(in_the_way)} is in the way; end it, or force the restore",
                    in_the_way,
                )
            safety = self._safety(current, base, target)
            restore_id = new_id("restore")
            # From here on the guard keeps others out, and what does not concern the restore goes on.
            workspace.guard(link, restore_id, touched.changed | touched.directories, touched.above)
        try:
            self._verify(plan, progress)
            journal = self._journal(request, restore_id, target, safety, paths)
            with store.write() as writer:
                writer.put_journal(journal)
            step("restore.journalled")
        except BaseException:
            workspace.unguard(link)
            self._drop_snapshot(safety)
            raise
        self._carry_out(link, journal, plan, target, safety, progress)
        report.safety_snapshot_id = safety.id
        if in_the_way:
            report.forced.extend(report.busy_by)
        return report

    def target(self, snapshot_id: str) -> SnapshotRow:
        """A snapshot of this workspace that can be restored."""
        with self._store.read() as reader:
            snapshot = reader.snapshot(snapshot_id)
        if snapshot.workspace_id != self._workspace.id:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"the snapshot {snapshot_id} is of workspace {snapshot.workspace_id}"
            )
        if snapshot.state is not SnapshotState.SEALED or snapshot.root is None:
            raise CogfsError(Reason.VALIDATION_ERROR, f"the snapshot {snapshot_id} is not sealed: {snapshot.reason}")
        return snapshot

    def _check_paths(self, current: TreeEntry, target: SnapshotRow, paths: Iterable[bytes]) -> None:
        assert target.root is not None
        for path in paths:
            if find(self._store, target.root, path) is None and find(self._store, current, path) is None:
                raise CogfsError(Reason.NOT_FOUND, f"neither the snapshot nor the workspace has {os.fsdecode(path)!r}")

    def _plan(
        self, link: Link, current: TreeEntry, target: SnapshotRow, paths: tuple[bytes, ...]
    ) -> tuple[TreeEntry, Plan]:
        """The plan, and the current tree with everything in it that the plan changes."""
        assert target.root is not None
        rules = Rules(target.exclude, target.max_file_bytes)
        planner = Planner(self._store, rules, paths)
        base = current
        while True:
            plan = planner.plan(base, target.root)
            missing = plan.uncaptured()
            if not missing:
                break
            found: dict[bytes, TreeEntry | None] = {}
            with beneath(link.root_fd) as reach:
                for one in missing:
                    entry = self._capture(reach, one.path, rules)
                    if entry is None or entry.kind is Kind.OPAQUE:
                        why = entry.target.decode() if entry is not None else "gone"
                        raise CogfsError(
                            Reason.DENIED,
                            f"the restore would change {os.fsdecode(one.path)!r}, which no snapshot could keep ({why})",
                        )
                    found[one.path] = entry
            base = patched(self._store, base, found)
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

    def _bypassed(self, root_fd: int, plan: Plan) -> bool:
        """Whether something that the plan changes is not what was recorded: somebody reached it past the mount."""
        book = RecordBook(self._store, self._workspace.id)
        with beneath(root_fd) as reach:
            for one in sorted(plan.steps, key=lambda one: split(one.path)):
                if one.before is None or not one.path or one.before.kind in (Kind.DIRECTORY, Kind.OPAQUE):
                    continue
                parent, name = split(one.path)
                try:
                    fd = reach.directory(parent)
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    return True
                row = book.row(os.fstat(fd).st_ino, name)
                if row is None or not same_stat(row, status):
                    return True
        return False

    def _capture(self, reach: Beneath, path: bytes, rules: Rules) -> TreeEntry | None:
        """What is at ``path`` now, whatever its size, in the store; None when nothing is."""
        unlimited = Rules(rules.exclude, -1)
        parent, name = split(path)
        try:
            fd = reach.directory(parent)
            os.stat(name, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        book = RecordBook(self._store, "")
        recorder = Recorder(self._store, book, reach.root_fd, unlimited, self._workspace.pool)
        return recorder.single(parent, name, fd)

    def _safety(self, current: Current, base: TreeEntry, target: SnapshotRow) -> SnapshotRow:
        """The safety snapshot, sealed. It leaves out only what the target left out."""
        workspace = self._workspace
        rules = Rules(target.exclude, -1)
        snapshot = workspace.snapshot_row(
            current,
            base,
            rules,
            f"before restoring {target.id}",
            "{}",
            SnapshotOrigin.SAFETY,
            time.monotonic_ns(),
            self._store.stats().pack_bytes,
        )
        with self._store.write() as writer:
            workspace.put_snapshot(writer, snapshot)
        step("restore.safe")
        return snapshot

    def _drop_snapshot(self, safety: SnapshotRow) -> None:
        """Nothing was changed, so the safety snapshot says nothing that the files do not. It may stay all the same."""
        try:
            with self._store.write() as writer:
                writer.delete_snapshot(safety.id)
                row = writer.workspace(self._workspace.id)
                if row.last_snapshot_id == safety.id:
                    writer.put_workspace(msgspec.structs.replace(row, last_snapshot_id=safety.parent_id))
        except StoreError as error:
            _log.warning("a safety snapshot that nobody needs stays", snapshot=safety.id, error=str(error))

    def _verify(self, plan: Plan, progress: Progress) -> None:
        """Every content that the plan brings back is there and is what its hash says."""
        wanted = {
            one.after.hash
            for one in plan.steps
            if one.after is not None
            and one.after.kind is Kind.FILE
            and not (one.before is not None and one.before.hash == one.after.hash)
        }
        for done, name in enumerate(sorted(wanted)):
            self._store.verify_file(name)
            progress(Phase.VERIFYING, done + 1, len(wanted))

    def _journal(
        self, request: Request, restore_id: str, target: SnapshotRow, safety: SnapshotRow, paths: tuple[bytes, ...]
    ) -> JournalRow:
        undo = UndoRow(target.id, safety.id, paths=paths)
        if request.thread is not None and request.thread_before is not None:
            undo = msgspec.structs.replace(
                undo,
                thread_id=request.thread.id,
                previous_leaf_id=request.thread_before.leaf_id,
                leaf_id=request.thread.leaf_id,
                files_followed=request.thread_before.files_follow,
            )
        return JournalRow(
            restore_id,
            self._workspace.id,
            target.id,
            safety.id,
            paths,
            time.time_ns(),
            request.thread,
            undo,
        )

    def _commit_thread(self, request: Request) -> None:
        """The files are right as they are: the conversation alone moves."""
        if request.thread is None:
            return
        with self._store.write() as writer:
            writer.put_thread(request.thread)

    # --- carrying out -------------------------------------------------------------------------------------------------

    def _carry_out(
        self,
        link: Link,
        journal: JournalRow,
        plan: Plan,
        target: SnapshotRow,
        safety: SnapshotRow,
        progress: Progress,
    ) -> None:
        """From the journal to its end: forward, or back when that fails."""
        try:
            self._execute(link, journal, plan, lambda done, total: progress(Phase.APPLYING, done, total))
            self._finish(link, journal, None)
        except (OSError, StoreError, CogfsError) as error:
            if self._worker_died(link, error):
                raise CogfsError(
                    Reason.UNAVAILABLE,
                    "the mount went away during the restore; cogfsctl mount brings it back and finishes the restore",
                ) from error
            failure = as_cogfs_error(error, "restore the files")
            self._take_back(link, journal, target, safety, str(failure))
            raise CogfsError(
                failure.reason, f"the restore failed and the files are as they were: {failure}", **failure.metadata
            ) from error
        self._workspace.unguard(link)

    @staticmethod
    def _worker_died(link: Link, error: Exception) -> bool:
        return not link.alive or isinstance(error, WorkerGone)

    def _execute(self, link: Link | None, journal: JournalRow, plan: Plan, advance: Callable[[int, int], None]) -> None:
        root = self._open_root(link)
        try:
            executor = Executor(self._store, root, journal.restore_id, plan, advance)
            executor.run()
            for path in executor.left:
                _log.warning("a directory holds what was made during the restore", path=os.fsdecode(path))
        finally:
            os.close(root)
        step("restore.applied")

    def _open_root(self, link: Link | None) -> int:
        """The root that changes go through: the mount when there is one, else the directory itself."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        if link is None:
            return os.open(self._workspace.row().root, flags)
        fd = os.open(link.mountpoint, flags)
        if os.fstat(fd).st_dev != link.welcome.device:
            os.close(fd)
            raise WorkerGone("the mount of the workspace is not there any more")
        return fd

    def _finish(self, link: Link | None, journal: JournalRow, recovery: RecoveryRow | None) -> None:
        """The files are right and durable: one transaction says so, with the conversation."""
        back = recovery is not None and recovery.outcome == "back"
        root = link.root_fd if link is not None else self._open_root(None)
        try:
            syncfs(root)
        finally:
            if link is None:
                os.close(root)
        step("restore.synced")

        def fill(writer: Writer) -> None:
            writer.delete_journal(self._workspace.id)
            row = writer.workspace(self._workspace.id)
            changes: dict[str, object] = {"read_only": ""}
            if recovery is not None:
                changes["last_recovery"] = recovery
            if not back:
                changes["undo"] = journal.undo
                if journal.thread is not None:
                    writer.put_thread(journal.thread)
            writer.put_workspace(msgspec.structs.replace(row, **changes))

        workspace = self._workspace
        if link is None:
            with self._store.write() as writer:
                fill(writer)
        else:
            with workspace.frozen(link) as frozen:
                workspace.commit(link, workspace.record(link, frozen), fill)
        step("restore.finished")

    def _take_back(self, link: Link, journal: JournalRow, target: SnapshotRow, safety: SnapshotRow, why: str) -> None:
        """A restore failed on its way: bring the files back to the safety snapshot, or stop everything."""
        try:
            self._go(link, journal, target, safety, back=True, why="")
            self._workspace.unguard(link)
        except (OSError, StoreError, CogfsError) as error:
            if self._worker_died(link, error):
                raise CogfsError(
                    Reason.UNAVAILABLE,
                    "the mount went away during the restore; cogfsctl mount brings it back and finishes the restore",
                ) from error
            self._give_up(journal, f"{why}; and taking it back failed: {as_cogfs_error(error, 'take it back')}")
            raise

    # --- recovery -----------------------------------------------------------------------------------------------------

    def recover(self, link: Link | None) -> None:
        """Finish the restore that a crash interrupted, if there is one: forward, else back, else read-only.

        UNAVAILABLE when the directory is not the one that the restore was working in.
        """
        with self._workspace.lock:
            with self._store.read() as reader:
                journal = reader.journal(self._workspace.id)
                if journal is None:
                    # A crash right before the journal was written, or right after it was ended, leaves the guard.
                    if link is not None and link.welcome.guard:
                        self._workspace.unguard(link)
                    return
                target = reader.snapshot(journal.target_snapshot_id)
                safety = reader.snapshot(journal.safety_snapshot_id)
            self._check_root(link)
            _log.info("an interrupted restore is being finished", workspace=self._workspace.id, target=target.id)
            try:
                self._go(link, journal, target, safety, back=False, why="")
            except (OSError, StoreError, CogfsError) as error:
                if link is not None and self._worker_died(link, error):
                    raise
                why = str(as_cogfs_error(error, "finish the restore"))
                try:
                    self._go(link, journal, target, safety, back=True, why=why)
                except (OSError, StoreError, CogfsError) as second:
                    if link is not None and self._worker_died(link, second):
                        raise
                    self._give_up(
                        journal, f"{why}; and taking it back failed: {as_cogfs_error(second, 'take it back')}"
                    )
                    return
            if link is not None:
                self._workspace.unguard(link)
                self._workspace.set_read_only("")

    def _check_root(self, link: Link | None) -> None:
        """What has taken the root's name since the crash is not to be changed by a restore of something else."""
        row = self._workspace.row()
        with self._store.read() as reader:
            state = reader.record_state(self._workspace.id)
        root = link.root_fd if link is not None else self._open_root(None)
        try:
            inode = os.fstat(root).st_ino
        finally:
            if link is None:
                os.close(root)
        if state is not None and state.root_inode != inode:
            raise CogfsError(
                Reason.UNAVAILABLE,
                f"a restore was interrupted in another directory than the one that is at {os.fsdecode(row.root)} now: "
                "put that one back and mount it, so that the restore is finished",
            )

    def _go(
        self, link: Link | None, journal: JournalRow, target: SnapshotRow, safety: SnapshotRow, *, back: bool, why: str
    ) -> None:
        """Take the files, wherever they are between the two snapshots, to one of them, and end the journal."""
        assert target.root is not None and safety.root is not None
        rules = Rules(target.exclude, target.max_file_bytes)
        original = Planner(self._store, rules, journal.paths).plan(safety.root, target.root)
        allowed = original.paths() | {path for members in original.groups.values() for path in members}
        backing = link.root_fd if link is not None else self._open_root(None)
        try:
            if link is not None:
                touched = Touched(backing, original)
                self._workspace.guard(link, journal.restore_id, touched.changed | touched.directories, touched.above)
            parents = {split(path)[0] for path in allowed} | allowed
            through = self._open_root(link)
            try:
                remove_temporaries(through, sorted(parents), journal.restore_id)
            finally:
                os.close(through)
            actual = self._observe(backing, safety.root, allowed, rules)
        finally:
            if link is None:
                os.close(backing)
        self._keep_unknown(journal, actual, target, safety, allowed)
        wanted = safety.root if back else target.root
        plan = Planner(self._store, Rules(target.exclude, -1), journal.paths).plan(actual, wanted)
        within = self._strange_directories(actual, target.root, safety.root, allowed)
        self._confine(plan, allowed | self._directories_above(actual, wanted, allowed), within)
        if not back:
            self._verify(plan, _silent)
        self._execute(link, journal, plan, lambda done, total: None)
        outcome = RecoveryRow("back" if back else "forward", target.id, safety.id, time.time_ns(), why)
        self._finish(link, journal, outcome)
        _log.info("an interrupted restore has ended", workspace=self._workspace.id, outcome=outcome.outcome)

    def _observe(self, root_fd: int, base: TreeEntry, paths: set[bytes], rules: Rules) -> TreeEntry:
        """``base`` with what is really there now at ``paths`` and in the attributes of the directories above them."""
        top: list[bytes] = []
        for path in sorted(paths, key=lambda one: one.split(b"/")):
            if path and not (top and path.startswith(top[-1] + b"/")):
                top.append(path)
        with beneath(root_fd) as reach:
            found: dict[bytes, TreeEntry | None] = {}
            for path in top:
                missing = self._missing_parent(reach, path)
                where = path if missing is None else missing
                if missing is not None and find(self._store, base, missing) is None:
                    continue
                found[where] = self._capture(reach, where, rules)
            base = patched(self._store, base, found)
            attributes: dict[bytes, TreeEntry | None] = {}
            for path in ancestors(paths):
                entry = find(self._store, base, path)
                if entry is None or entry.kind is not Kind.DIRECTORY:
                    continue
                try:
                    status = os.fstat(reach.directory(path))
                except OSError:
                    continue
                now = msgspec.structs.replace(entry, mode=status.st_mode & 0o7777)
                if now != entry and path:
                    attributes[path] = now
                elif now != entry:
                    base = now
            base = patched(self._store, base, attributes)
        return base

    @staticmethod
    def _missing_parent(reach: Beneath, path: bytes) -> bytes | None:
        """The topmost directory above ``path`` that is not there; None when all are."""
        names = path.split(b"/")
        for depth in range(1, len(names)):
            above = b"/".join(names[:depth])
            try:
                reach.directory(above)
            except (FileNotFoundError, NotADirectoryError):
                return above
        return None

    def _directories_above(self, actual: TreeEntry, wanted: TreeEntry, allowed: set[bytes]) -> set[bytes]:
        """Directories above the plan's paths that the interrupted restore may have opened, whose mode is to be set, and
        those that are gone (somebody moved them after the crash), without which it cannot go on."""
        found = set()
        for path in ancestors(allowed):
            now, then = find(self._store, actual, path), find(self._store, wanted, path)
            if then is None:
                continue
            if now is None or (now.mode != then.mode and now.mode == then.mode | 0o700):
                found.add(path)
        return found

    def _strange_directories(
        self, actual: TreeEntry, target: TreeEntry, safety: TreeEntry, allowed: set[bytes]
    ) -> tuple[bytes, ...]:
        """Those of the plan's paths where somebody made a directory after the crash, which goes with all it holds."""
        found = []
        for path in allowed:
            entry = find(self._store, actual, path)
            if entry is None or entry.kind is not Kind.DIRECTORY:
                continue
            known = (find(self._store, safety, path), find(self._store, target, path))
            if not any(one is not None and one.kind is Kind.DIRECTORY for one in known):
                found.append(path)
        return tuple(found)

    @staticmethod
    def _confine(plan: Plan, allowed: set[bytes], within: tuple[bytes, ...]) -> None:
        """Leave what the interrupted restore had nothing to do with: all but ``allowed`` and what is ``within``."""
        below = tuple(path + b"/" for path in within)
        plan.steps = [one for one in plan.steps if one.path in allowed or one.path.startswith(below)]
        plan.groups = {
            group: members for group, members in plan.groups.items() if any(path in allowed for path in members)
        }

    def _keep_unknown(
        self, journal: JournalRow, actual: TreeEntry, target: SnapshotRow, safety: SnapshotRow, allowed: set[bytes]
    ) -> None:
        """What neither snapshot holds (somebody made it after the crash) goes into a snapshot of its own."""
        assert target.root is not None and safety.root is not None
        for path in sorted(allowed):
            entry = find(self._store, actual, path)
            if entry is None or entry.kind is Kind.OPAQUE:
                continue
            known = (find(self._store, safety.root, path), find(self._store, target.root, path))
            if any(one is not None and one.kind is entry.kind and same_content(one, entry) for one in known):
                continue
            snapshot = msgspec.structs.replace(
                safety,
                id=new_id("snap"),
                root=actual,
                label=f"found when the restore of {target.id} was finished",
                created_ns=time.time_ns(),
                parent_id=self._workspace.row().last_snapshot_id,
            )
            with self._store.write() as writer:
                self._workspace.put_snapshot(writer, snapshot)
            _log.warning("unknown changes were kept", workspace=self._workspace.id, snapshot=snapshot.id)
            return

    def _give_up(self, journal: JournalRow, why: str) -> None:
        """Neither snapshot can be reached. The journal stays, so that the next mount tries again."""
        _log.error("a restore can neither be finished nor taken back", workspace=self._workspace.id, reason=why)
        recovery = RecoveryRow("failed", journal.target_snapshot_id, journal.safety_snapshot_id, time.time_ns(), why)
        self._workspace.set_read_only(why, recovery)
