"""A snapshot, as its user holds it: what it was taken of, what it holds, and the way back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cogfs.client.arguments import PathArgument, relative, relatives, text
from cogfs.client.connection import Connection
from cogfs.client.errors import IOFailed
from cogfs.v1 import common_pb2, snapshot_pb2

#: Called for each step of a restore that the daemon reports.
Progress = Callable[[snapshot_pb2.RestoreProgress], object]


class Snapshot:
    """One snapshot. ``message`` is what the daemon said of it last."""

    def __init__(self, connection: Connection, message: snapshot_pb2.Snapshot) -> None:
        self._connection = connection
        self.message = message

    @classmethod
    def get(cls, connection: Connection, snapshot_id: str) -> Snapshot:
        """The snapshot with this id. NotFound."""
        request = snapshot_pb2.GetSnapshotRequest(snapshot_id=text(snapshot_id, "snapshot's id"))
        return cls(connection, connection.call(connection.snapshots.GetSnapshot, request))

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def workspace_id(self) -> str:
        return self.message.workspace_id

    def refresh(self) -> Snapshot:
        """Asks the daemon again."""
        self.message = Snapshot.get(self._connection, self.id).message
        return self

    def delete(self) -> None:
        """Forgets it. Busy while a restore needs it or it is not captured, ValidationError when it is the newest or
        needed to undo the last restore."""
        request = snapshot_pb2.DeleteSnapshotRequest(snapshot_id=self.id)
        self._connection.call(self._connection.snapshots.DeleteSnapshot, request)

    def restore(
        self,
        paths: Iterable[PathArgument] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
    ) -> common_pb2.RestoreReport:
        """As the function of this name."""
        return restore(self._connection, self.id, paths, dry_run=dry_run, force=force, strict=strict, progress=progress)

    def diff(
        self, to: Snapshot | str | None = None, paths: Iterable[PathArgument] = (), *, unified: bool = False
    ) -> Iterator[common_pb2.FileChange]:
        """The changes from this snapshot to another, or, without one, to the files as they are now."""
        request = snapshot_pb2.DiffSnapshotsRequest(
            from_snapshot_id=self.id,
            to_snapshot_id=to.id if isinstance(to, Snapshot) else text(to or "", "snapshot's id"),
            paths=relatives(paths),
            unified=unified,
        )
        return self._connection.stream(self._connection.snapshots.DiffSnapshots, request)

    def ls(self, path: PathArgument = b"", *, recursive: bool = False) -> Iterator[snapshot_pb2.TreeEntry]:
        """The entries of a directory, or of all below it."""
        request = snapshot_pb2.ListTreeRequest(snapshot_id=self.id, path=relative(path), recursive=recursive)
        return self._connection.stream(self._connection.snapshots.ListTree, request)

    def cat(self, path: PathArgument) -> Iterator[bytes]:
        """The content of a file, piece by piece."""
        request = snapshot_pb2.ReadFileRequest(snapshot_id=self.id, path=relative(path))
        return (piece.data for piece in self._connection.stream(self._connection.snapshots.ReadFile, request))


def restore(
    connection: Connection,
    snapshot_id: str,
    paths: Iterable[PathArgument] = (),
    *,
    dry_run: bool = False,
    force: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> common_pb2.RestoreReport:
    """Brings files back to a snapshot: all of them, or ``paths`` below the root and what they hold.

    ``dry_run`` changes nothing and reports what would be changed. Busy when a process is in the way; ``force`` goes
    past open files, whose holders keep the old ones; ``strict`` counts every writable handle in the workspace.
    """
    request = snapshot_pb2.RestoreSnapshotRequest(
        snapshot_id=text(snapshot_id, "snapshot's id"),
        paths=relatives(paths),
        dry_run=dry_run,
        force=force,
        strict=strict,
    )
    for event in connection.stream(connection.snapshots.RestoreSnapshot, request):
        if event.HasField("report"):
            return event.report
        if progress is not None:
            progress(event.progress)
    raise IOFailed("the daemon ended the restore without a report: see `cogfsctl status` and the daemon's log")
