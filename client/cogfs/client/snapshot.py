"""A snapshot, as its user holds it: what it was taken of, what it holds, and the way back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cogfs.client.arguments import PathArgument, relative, relatives, text
from cogfs.client.connection import Connection
from cogfs.client.errors import IOFailed
from cogfs.v1 import common_pb2, snapshot_pb2

#: Called for each step of a restore that the daemon reports.
Progress = Callable[[snapshot_pb2.RestoreProgress], object]
#: Called with each piece of what a restore changes, in the order of the paths.
Changes = Callable[[common_pb2.RestoreChanges], object]


class Pieces:
    """The changes of one restore as they come: handed on to who wants them so, else put into the report."""

    def __init__(self, changes: Changes | None) -> None:
        self._changes = changes
        self._lists = common_pb2.RestoreReport()

    def take(self, piece: common_pb2.RestoreChanges) -> None:
        """One more piece."""
        if self._changes is not None:
            self._changes(piece)
            return
        lists = self._lists
        lists.files.extend(piece.files)
        lists.kept.extend(piece.kept)
        for file in piece.files:
            (lists.deleted if file.change == common_pb2.CREATED else lists.restored).append(file.path)

    def complete(self, report: common_pb2.RestoreReport) -> common_pb2.RestoreReport:
        """``report`` with the lists that nobody took piece by piece."""
        report.MergeFrom(self._lists)
        return report


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
        changes: Changes | None = None,
    ) -> common_pb2.RestoreReport:
        """As the function of this name."""
        return restore(
            self._connection,
            self.id,
            paths,
            dry_run=dry_run,
            force=force,
            strict=strict,
            progress=progress,
            changes=changes,
        )

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
    changes: Changes | None = None,
) -> common_pb2.RestoreReport:
    """Brings files back to a snapshot: all of them, or ``paths`` below the root and what they hold.

    ``dry_run`` changes nothing and reports what would be changed. Busy when a process is in the way; ``force`` goes
    past open files, whose holders keep the old ones; ``strict`` counts every writable handle in the workspace.
    ``changes`` is called with each piece of what changes, which the report then does not list: so it takes no more
    memory for many files than for few.
    """
    request = snapshot_pb2.RestoreSnapshotRequest(
        snapshot_id=text(snapshot_id, "snapshot's id"),
        paths=relatives(paths),
        dry_run=dry_run,
        force=force,
        strict=strict,
        stream_changes=True,
    )
    pieces = Pieces(changes)
    for event in connection.stream(connection.snapshots.RestoreSnapshot, request):
        if event.HasField("report"):
            return pieces.complete(event.report)
        if event.HasField("changes"):
            pieces.take(event.changes)
        elif progress is not None:
            progress(event.progress)
    raise IOFailed("the daemon ended the restore without a report: see `cogfsctl status` and the daemon's log")
