"""Bringing a journalled restore to its end: forward to the target, else back, also after a crash.

The journal names two snapshots, the target and the safety snapshot; the plan is a function of them and is made again
when it is needed. What happens outside the paths of that plan is no concern of a restore.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import structlog

from cogfs.fsd.control.beneath import Beneath, ancestors, beneath, split
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.control.executor import Executor, remove_temporaries
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.link import WorkerGone
from cogfs.fsd.control.occupancy import Touched
from cogfs.fsd.control.planner import Plan, Planner, find, patched, same_content
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recheck import Moved, Recheck
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.runstates import REWOUND, drop
from cogfs.fsd.control.standing import move_leaf
from cogfs.fsd.control.syscalls import syncfs
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.errors import Corrupt, NotFound
from cogfs.store.ids import new_id
from cogfs.store.rows import Writer
from cogfs.store.schema import JournalRow, Kind, RecoveryRow, SnapshotOrigin, SnapshotRow, TreeEntry
from cogfs.store.steps import step
from cogfs.store.store import Store
from cogfs.v1 import snapshot_pb2
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

Phase = snapshot_pb2.RestoreProgress.Phase
Progress = Callable[[snapshot_pb2.RestoreProgress.Phase.ValueType, int, int], None]


#: How often a restore on its way back, or one that is being finished, looks anew when another program came between.
_LOOKS = 3


def silent(phase: snapshot_pb2.RestoreProgress.Phase.ValueType, done: int, total: int) -> None:
    """A ``Progress`` that tells nobody."""


def is_before_restore(snapshot: SnapshotRow) -> bool:
    """Whether it is what the files were right before a restore."""
    return snapshot.origin is SnapshotOrigin.SAFETY


def verify(store: Store, plan: Plan, progress: Progress = silent, *, kept: bool = False) -> None:
    """Every content that the plan brings back is there and is what its hash says; with ``kept`` also what it takes
    away, which the safety snapshot alone has then. CogfsError IO when one is not; store errors."""
    wanted = set()
    for one in plan.steps:
        if one.before is not None and one.after is not None and one.before.hash == one.after.hash:
            continue
        for entry in (one.after, one.before if kept else None):
            if entry is not None and entry.kind is Kind.FILE:
                wanted.add(entry.hash)
    for done, name in enumerate(sorted(wanted)):
        try:
            store.verify_file(name)
        except (Corrupt, NotFound) as error:
            raise CogfsError(Reason.IO, f"a content that the store keeps is not what was stored: {error}") from error
        progress(Phase.VERIFYING, done + 1, len(wanted))


class Completion:
    """The second half of a restore of one workspace. Used under its lock."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = workspace.store

    # --- carrying out -------------------------------------------------------------------------------------------------

    def carry_out(
        self,
        link: Link,
        journal: JournalRow,
        plan: Plan,
        target: SnapshotRow,
        safety: SnapshotRow,
        progress: Progress,
        passed: frozenset[int] = frozenset(),
        more: Callable[[Writer], None] | None = None,
    ) -> None:
        """From the journal to its end: forward, or back when that fails. ``passed``: files whose writers are gone past
        where there is no mount. ``more`` is written in the transaction that ends it forward."""
        try:
            self._execute(link, journal, plan, lambda done, total: progress(Phase.APPLYING, done, total), passed)
            self._finish(link, journal, None, more)
        except Exception as error:
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

    def _execute(
        self,
        link: Link | None,
        journal: JournalRow,
        plan: Plan,
        advance: Callable[[int, int], None],
        passed: frozenset[int] = frozenset(),
    ) -> None:
        recheck = None
        if link is not None and not link.watched:
            # No guard keeps others out: each step looks for itself.
            reason = Reason.BUSY if journal.thread is None and journal.fork is None else Reason.WORKSPACE_BUSY
            recheck = Recheck(self._store, self._workspace.id, reason, passed)
        root = self._open_root(link)
        try:
            executor = Executor(self._store, root, journal.restore_id, plan, advance, recheck)
            try:
                executor.run()
            except OSError as error:
                raise as_cogfs_error(error, f"restore {show(executor.at)}") from error
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
        if not link.watched:
            return os.open(b".", flags, dir_fd=link.root_fd)
        fd = os.open(link.mountpoint, flags)
        if os.fstat(fd).st_dev != link.welcome.device:
            os.close(fd)
            raise WorkerGone("the mount of the workspace is not there any more")
        return fd

    def _finish(
        self,
        link: Link | None,
        journal: JournalRow,
        recovery: RecoveryRow | None,
        more: Callable[[Writer], None] | None = None,
    ) -> None:
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
                    move_leaf(writer, journal.thread)
                drop(writer, journal.runs, REWOUND)
            writer.put_workspace(msgspec.structs.replace(row, **changes))
            if back and journal.fork is not None:
                for snapshot_id in journal.fork.snapshot_ids:
                    if writer.has_snapshot(snapshot_id):
                        writer.delete_snapshot(snapshot_id)
            if more is not None:
                more(writer)

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
            self._go_on(link, journal, target, safety, back=True, why="")
            self._workspace.unguard(link)
        except Exception as error:
            if self._worker_died(link, error):
                raise CogfsError(
                    Reason.UNAVAILABLE,
                    "the mount went away during the restore; cogfsctl mount brings it back and finishes the restore",
                ) from error
            self._give_up(journal, f"{why}; and taking it back failed: {as_cogfs_error(error, 'take it back')}")
            raise

    # --- recovery -----------------------------------------------------------------------------------------------------

    def recover(self, link: Link | None) -> None:
        """Finish the restore that a crash interrupted, if there is one: forward, else back, else read-only. That of a
        fork goes back, as who asked for it has no thread to show for it.

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
            fork = journal.fork
            try:
                why = "" if fork is None else f"the fork to thread {fork.thread_id} was interrupted"
                self._go_on(link, journal, target, safety, back=fork is not None, why=why)
            except Exception as error:
                if link is not None and self._worker_died(link, error):
                    raise
                why = str(as_cogfs_error(error, "finish the restore"))
                try:
                    self._go_on(link, journal, target, safety, back=True, why=why)
                except Exception as second:
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
                f"a restore was interrupted in another directory than the one that is at {show(row.root)} now: "
                "put that one back and mount it, so that the restore is finished",
            )

    def _go_on(
        self, link: Link | None, journal: JournalRow, target: SnapshotRow, safety: SnapshotRow, *, back: bool, why: str
    ) -> None:
        """``_go``, again when another program changed something meanwhile."""
        for _ in range(_LOOKS - 1):
            try:
                return self._go(link, journal, target, safety, back=back, why=why)
            except Moved as error:
                _log.warning("looking at the files anew", workspace=self._workspace.id, reason=str(error))
        return self._go(link, journal, target, safety, back=back, why=why)

    def _go(
        self, link: Link | None, journal: JournalRow, target: SnapshotRow, safety: SnapshotRow, *, back: bool, why: str
    ) -> None:
        """Take the files, wherever they are between the two snapshots, to one of them, and end the journal."""
        assert target.root is not None and safety.root is not None
        rules = Rules.of(target)
        undoes = is_before_restore(target)
        original = Planner(self._store, rules, journal.paths, back=undoes).plan(safety.root, target.root)
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
            # What the restore did not read for having several names is not read now.
            seen_by = Rules(target.exclude, -1, safety.refuse_hard_links)
            actual = self._observe(backing, safety.root, allowed, seen_by)
        finally:
            if link is None:
                os.close(backing)
        wanted = safety.root if back else target.root
        above = self._directories_above(actual, wanted, allowed)
        self._keep_unknown(journal, actual, target, safety, allowed | above)
        planner = Planner(self._store, Rules(target.exclude, -1), journal.paths, back=back or undoes)
        plan = planner.plan(actual, wanted)
        within = self._strange_directories(actual, target.root, safety.root, allowed)
        self._confine(plan, allowed | above, within)
        if back and not why and link is not None and not link.watched:
            # What others changed while nothing kept them from it is theirs: a restore that could not be made leaves it.
            self._leave(plan, self._unknown(actual, target, safety, allowed, unkept=True))
        if not back:
            verify(self._store, plan)
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
                found[where] = self._workspace.capture(reach, where, rules)
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
        those that are gone (somebody moved them meanwhile) or in whose place is something else (a symlink, say), as it
        cannot go on without them."""
        found = set()
        for path in ancestors(allowed):
            now, then = find(self._store, actual, path), find(self._store, wanted, path)
            if then is None:
                continue
            there = now is not None and now.kind is Kind.DIRECTORY
            if now is None or not there or (now.mode != then.mode and now.mode == then.mode | 0o700):
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

    @staticmethod
    def _leave(plan: Plan, paths: list[bytes]) -> None:
        """Keep a plan from all that is at or below ``paths``."""
        left = set(paths)
        below = tuple(path + b"/" for path in paths)
        plan.steps = [one for one in plan.steps if one.path not in left and not one.path.startswith(below)]
        plan.groups = {
            group: tuple(path for path in members if path not in left and not path.startswith(below))
            for group, members in plan.groups.items()
        }

    def _unknown(
        self, actual: TreeEntry, target: SnapshotRow, safety: SnapshotRow, allowed: set[bytes], *, unkept: bool = False
    ) -> list[bytes]:
        """The paths at which is what neither snapshot holds; with ``unkept`` also what cannot be recorded."""
        assert target.root is not None and safety.root is not None
        found = []
        for path in sorted(allowed):
            entry = find(self._store, actual, path)
            if entry is None or (entry.kind is Kind.OPAQUE and not unkept):
                continue
            known = (find(self._store, safety.root, path), find(self._store, target.root, path))
            if not any(one is not None and one.kind is entry.kind and same_content(one, entry) for one in known):
                found.append(path)
        return found

    def _keep_unknown(
        self, journal: JournalRow, actual: TreeEntry, target: SnapshotRow, safety: SnapshotRow, allowed: set[bytes]
    ) -> None:
        """What neither snapshot holds (somebody made it after the crash) goes into a snapshot of its own."""
        if not self._unknown(actual, target, safety, allowed):
            return
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

    def _give_up(self, journal: JournalRow, why: str) -> None:
        """Neither snapshot can be reached. The journal stays, so that the next mount tries again."""
        _log.error("a restore can neither be finished nor taken back", workspace=self._workspace.id, reason=why)
        recovery = RecoveryRow("failed", journal.target_snapshot_id, journal.safety_snapshot_id, time.time_ns(), why)
        self._workspace.set_read_only(why, recovery)
