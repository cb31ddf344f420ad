"""A workspace, as its user holds it: a directory whose history is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cogfs.client import snapshot as snapshots
from cogfs.client.arguments import PathArgument, RetentionArgument, absolute, globs, retention, struct, text, wait
from cogfs.client.connection import Connection, paged
from cogfs.client.errors import ValidationError
from cogfs.client.snapshot import Changes, Progress, Snapshot
from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2, workspace_pb2


class Workspace:
    """One workspace. ``message`` is what the daemon said of it last."""

    def __init__(self, connection: Connection, message: workspace_pb2.Workspace) -> None:
        self._connection = connection
        self.message = message

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def root(self) -> bytes:
        return self.message.root

    @property
    def mountpoint(self) -> bytes:
        return self.message.mountpoint

    def status(self) -> workspace_pb2.Workspace:
        """Asks the daemon again."""
        request = workspace_pb2.GetWorkspaceRequest(workspace_id=self.id)
        self.message = self._connection.call(self._connection.workspaces.GetWorkspace, request)
        return self.message

    def mount(
        self,
        at: PathArgument | None = None,
        *,
        exclude: Iterable[str] | None = None,
        max_file_bytes: int | None = None,
        scan: bool = False,
        retain: RetentionArgument | None = None,
        refuse_hard_links: bool | None = None,
    ) -> Workspace:
        """Mounts it again, after it was unmounted or its worker died. Options as for ``Client.mount``."""
        request = workspace_pb2.MountRequest(
            workspace_id=self.id,
            at=b"" if at is None else absolute(at),
            options=options(exclude, max_file_bytes, retain, refuse_hard_links),
            scan=scan,
        )
        self.message = self._connection.call(self._connection.workspaces.Mount, request)
        return self

    def unmount(self, *, force: bool = False) -> Workspace:
        """Takes the mount away, or ends the scanning. Busy when a process uses the mount; with ``force`` processes keep
        what they have open."""
        request = workspace_pb2.UnmountRequest(workspace_id=self.id, force=force)
        self.message = self._connection.call(self._connection.workspaces.Unmount, request)
        return self

    def delete(self) -> None:
        """Forgets it, with its snapshots; the files stay. Busy when it is mounted or a thread names it."""
        request = workspace_pb2.DeleteWorkspaceRequest(workspace_id=self.id)
        self._connection.call(self._connection.workspaces.DeleteWorkspace, request)

    def handles(self) -> list[workspace_pb2.Handle]:
        """The open files of the mount; where it is scanned, those that /proc tells of."""
        request = workspace_pb2.ListHandlesRequest(workspace_id=self.id)
        return list(self._connection.call(self._connection.workspaces.ListHandles, request).handles)

    def checkpoint(
        self, label: str = "", *, metadata: Mapping[str, Any] | None = None, wait_for: str | None = None
    ) -> Snapshot:
        """Takes a snapshot of the files as they are. ``wait_for`` is "sealed" or "durable"."""
        request = snapshot_pb2.CreateSnapshotRequest(
            workspace_id=self.id, label=text(label, "label"), metadata=struct(metadata), wait=wait(wait_for)
        )
        return Snapshot(self._connection, self._connection.call(self._connection.snapshots.CreateSnapshot, request))

    def snapshots(self) -> Iterator[Snapshot]:
        """All of its snapshots, the newest first."""

        def page(token: str) -> tuple[list[Snapshot], str]:
            request = snapshot_pb2.ListSnapshotsRequest(workspace_id=self.id, page_token=token)
            answer = self._connection.call(self._connection.snapshots.ListSnapshots, request)
            return [Snapshot(self._connection, message) for message in answer.snapshots], answer.next_page_token

        return paged(page)

    def copy_snapshot(self, snapshot: Snapshot | str) -> Snapshot:
        """Gets a snapshot of another workspace as its own, so that it can be restored here; no content is copied.
        ValidationError when it is of this one, or has failed."""
        source = snapshot.id if isinstance(snapshot, Snapshot) else text(snapshot, "snapshot's id")
        request = snapshot_pb2.CopySnapshotRequest(snapshot_id=source, workspace_id=self.id)
        return Snapshot(self._connection, self._connection.call(self._connection.snapshots.CopySnapshot, request))

    def prune(
        self, retain: RetentionArgument | None = None, *, dry_run: bool = False
    ) -> snapshot_pb2.PruneSnapshotsResponse:
        """Deletes the snapshots that ``retain`` (``{"count": 50, "max_age": timedelta(days=14)}``), or without it the
        workspace's own retention, does not keep. What the workspace needs itself always remains."""
        request = snapshot_pb2.PruneSnapshotsRequest(workspace_id=self.id, retain=retention(retain), dry_run=dry_run)
        return self._connection.call(self._connection.snapshots.PruneSnapshots, request)

    def restore(
        self,
        snapshot_id: str,
        paths: Iterable[PathArgument] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
        changes: Changes | None = None,
    ) -> common_pb2.RestoreReport:
        """Brings files back to a snapshot of this workspace, as ``cogfs.client.snapshot.restore``. ValidationError when
        it is of another one."""
        snapshot = Snapshot.get(self._connection, snapshot_id)
        if snapshot.workspace_id != self.id:
            raise ValidationError(f"the snapshot {snapshot_id} is of workspace {snapshot.workspace_id}, not {self.id}")
        return snapshots.restore(
            self._connection,
            snapshot_id,
            paths,
            dry_run=dry_run,
            force=force,
            strict=strict,
            progress=progress,
            changes=changes,
        )

    def undo(self, *, dry_run: bool = False, force: bool = False) -> thread_pb2.UndoReport:
        """Takes back the last restore or rewind of this workspace."""
        request = thread_pb2.UndoRequest(workspace_id=self.id, dry_run=dry_run, force=force)
        return self._connection.call(self._connection.threads.Undo, request)


def options(
    exclude: Iterable[str] | None,
    max_file_bytes: int | None,
    retain: RetentionArgument | None = None,
    refuse_hard_links: bool | None = None,
) -> workspace_pb2.WorkspaceOptions | None:
    """The options of a workspace; None when none is given, which leaves those that it has."""
    if exclude is None and max_file_bytes is None and retain is None and refuse_hard_links is None:
        return None
    return workspace_pb2.WorkspaceOptions(
        exclude=globs(exclude or ()),
        max_file_bytes=max_file_bytes or 0,
        retain=retention(retain),
        refuse_hard_links=refuse_hard_links or False,
    )
