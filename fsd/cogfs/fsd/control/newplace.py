"""Directories that become workspaces for the files of forks, and go again when the fork is not completed.

Such a workspace says so in its row (``new_place``) from before anything is made until the transaction that completes
the fork. So whatever interrupts it, the next daemon knows what to take back. Knows no conversations.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.control import mounts, roots
from cogfs.fsd.control.capture import read_xattrs
from cogfs.fsd.control.completion import verify
from cogfs.fsd.control.errors import BusyBy, CogfsError, from_os_error, invalid, show
from cogfs.fsd.control.executor import refuse_what_is_not_ours
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.planner import Planner
from cogfs.fsd.control.ports import Workspaces
from cogfs.fsd.control.registry import Registry
from cogfs.fsd.control.report import Outcome, outcome
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.supervisor import Supervisor
from cogfs.store.errors import NotFound
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import Kind, NewPlaceRow, SnapshotRow, TreeEntry, WorkspaceRow
from cogfs.store.steps import step
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

_MODE = 0o755
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_MAX = 255


@dataclass(frozen=True, slots=True)
class Spot:
    """A directory that can become a workspace."""

    #: Canonical.
    root: bytes
    #: It is to be made.
    missing: bool


class NewPlaces:
    """The workspaces that forks make. Safe from any thread."""

    def __init__(self, store: Store, engine: Workspaces, supervisor: Supervisor, registry: Registry) -> None:
        self._store = store
        self._engine = engine
        self._supervisor = supervisor
        self._registry = registry

    # --- before anything is made --------------------------------------------------------------------------------------

    def workspace_at(self, path: bytes) -> WorkspaceRow | None:
        """The workspace whose root or mountpoint is ``path``. VALIDATION_ERROR: it is no absolute path."""
        return self._registry.at(roots.absolute(path, "the directory of the fork"), exactly=True)

    def check(self, path: bytes, like: WorkspaceRow) -> Spot:
        """A directory that does not exist or is empty, and can become a workspace that is kept as ``like`` is.

        VALIDATION_ERROR or DENIED, as for any new workspace; UNAVAILABLE when FUSE is needed and cannot be used.
        """
        path = roots.absolute(path, "the directory of the fork")
        table = mounts.table()
        roots.check_no_cogfs(path, table)
        try:
            missing = not os.path.lexists(path)
            if missing:
                parent, name = os.path.split(path)
                spot = Spot(os.path.join(roots.canonical(parent, table), name), missing=True)
            else:
                spot = Spot(roots.canonical(path, table), missing=False)
            self._registry.check(spot.root, table, missing=missing)
            if missing:
                self._check_parent(spot.root)
            else:
                _check_empty(spot.root)
        except OSError as error:
            raise from_os_error(error, f"look at {show(path)}") from error
        if not like.scanned:
            roots.check_fuse()
        return spot

    @staticmethod
    def _check_parent(root: bytes) -> None:
        parent, name = os.path.split(root)
        if len(name) > _NAME_MAX:
            raise invalid(f"the name of {show(root)} is longer than {_NAME_MAX} bytes")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CogfsError(
                Reason.DENIED, f"user {os.geteuid()}, as whom cogfsd runs, may make no directory in {show(parent)}"
            )

    def preview(self, spot: Spot, target: SnapshotRow, who: Sequence[BusyBy]) -> Outcome:
        """What a restore of ``target`` in the new workspace would report; ``who`` is in its way. Makes nothing."""
        assert target.root is not None
        root_fd = os.open(os.path.dirname(spot.root) if spot.missing else spot.root, _OPEN)
        try:
            plan = Planner(self._store, Rules.of(target)).plan(self._empty(root_fd, spot), target.root)
            refuse_what_is_not_ours(root_fd, plan)
        finally:
            os.close(root_fd)
        verify(self._store, plan)
        return outcome(target.id, plan, list(who), dry_run=True)

    def _empty(self, fd: int, spot: Spot) -> TreeEntry:
        """The directory as it will be recorded. ``fd``: itself, or where it is to be made."""
        status = os.fstat(fd)
        uid, gid, mode, xattrs = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), read_xattrs(b".", fd)
        if spot.missing:
            uid, mode, xattrs = os.geteuid(), _MODE, ()
            gid = gid if status.st_mode & stat.S_ISGID else os.getegid()
        if os.geteuid() != 0:
            uid = gid = -1
        return TreeEntry(b"", Kind.DIRECTORY, mode, hash=self._store.put_tree(()), xattrs=xattrs, uid=uid, gid=gid)

    # --- making -------------------------------------------------------------------------------------------------------

    def make(self, spot: Spot, like: WorkspaceRow, thread_id: str) -> WorkspaceRow:
        """A workspace at ``spot`` for the fork ``thread_id``, with the options of ``like`` and kept as that one is,
        mounted or scanned. When that fails, nothing of it is left."""
        place = NewPlaceRow(thread_id, spot.missing)
        row = self._registry.create_for_fork(spot.root, like.options, place)
        step("fork.registered")
        try:
            if spot.missing:
                try:
                    os.mkdir(spot.root)
                    # Whatever the umask says.
                    os.chmod(spot.root, _MODE)
                except OSError as error:
                    raise from_os_error(error, f"make the directory {show(spot.root)}") from error
                step("fork.made")
            self._supervisor.mount(row.id, spot.root, scanned=like.scanned)
            step("fork.mounted")
        except BaseException:
            self.take_back(row.id)
            raise
        return row

    @staticmethod
    def keep(writer: Writer, workspace_id: str) -> None:
        """Written in the transaction that completes the fork: the workspace is one like any other."""
        row = writer.workspace(workspace_id)
        writer.put_workspace(msgspec.structs.replace(row, new_place=None))

    # --- taking back --------------------------------------------------------------------------------------------------

    def take_back(self, workspace_id: str) -> None:
        """Remove the workspace of a fork that was not completed, with its directory where that was made for it.

        Where others have begun to use it, it stays, as a workspace like any other. What cannot be done now is logged,
        and done by the next daemon.
        """
        try:
            with self._engine.lock(workspace_id):
                self._take_back(workspace_id)
        except NotFound:
            return
        except Exception as error:
            why = str(as_cogfs_error(error, "take a fork's workspace back"))
            _log.error("a fork's workspace is left to the next start", workspace=workspace_id, reason=why)

    def _take_back(self, workspace_id: str) -> None:
        with self._store.read() as reader:
            row = reader.workspace(workspace_id)
        if row.new_place is None:
            return
        if row.mount_wanted or mounts.of_workspace(workspace_id):
            self._supervisor.unmount(workspace_id, force=True)
        if os.path.isdir(row.root):
            self._engine.recover(workspace_id)
        with self._store.read() as reader:
            if reader.journal(workspace_id) is not None:
                raise CogfsError(Reason.IO, f"the files in {show(row.root)} cannot be taken back")
            used = self._used(reader, row)
        step("fork.unmounted")
        if used:
            _log.warning("a fork that failed leaves its workspace", root=show(row.root), reason=used)
            with self._store.write() as writer:
                self.keep(writer, workspace_id)
            return
        if row.new_place.directory_made:
            try:
                os.rmdir(row.root)
            except FileNotFoundError:
                pass
            step("fork.removed")
        with self._store.write() as writer:
            writer.delete_workspace(workspace_id)
        self._engine.forget(workspace_id)

    def _used(self, reader: Reader, row: WorkspaceRow) -> str:
        """Why the workspace has to stay; empty: it need not."""
        try:
            _check_empty(row.root)
        except FileNotFoundError:
            pass
        except CogfsError as error:
            return str(error)
        if any(thread.workspace_id == row.id for thread in reader.threads()):
            return "a thread was begun in it"
        nothing = self._store.put_tree(())
        for snapshot in reader.snapshots(row.id):
            if not snapshot.copied_from and (snapshot.root is None or snapshot.root.hash != nothing):
                return f"the snapshot {snapshot.id} holds files that were put there meanwhile"
        return ""

    def recover(self) -> None:
        """Take back what the daemon before has left of forks. Called before anything else is asked of this one."""
        with self._store.read() as reader:
            left = [row for row in reader.workspaces() if row.new_place is not None]
        for row in left:
            _log.info("an interrupted fork is taken back", workspace=row.id, root=show(row.root))
            self.take_back(row.id)


def _check_empty(root: bytes) -> None:
    """VALIDATION_ERROR unless the directory has nothing in it. OSError when it cannot be read."""
    with os.scandir(root) as entries:
        if next(entries, None) is not None:
            raise invalid(
                f"{show(root)} is not empty: give a directory that is empty or does not exist, or a workspace"
            )
