"""SnapshotService: what the files were, and restores of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc

from cogfs.fsd.control import copying, pruning
from cogfs.fsd.control.completion import Progress, silent
from cogfs.fsd.control.engine import Engine
from cogfs.fsd.control.errors import CogfsError, invalid, show
from cogfs.fsd.control.passage import Passage
from cogfs.fsd.control.planner import changes, find, normal_path, walk
from cogfs.fsd.control.report import Outcome, add_changes, tree_changes
from cogfs.fsd.control.restoration import Request, Restoration
from cogfs.fsd.control.services.convert import (
    DEFAULT_PAGE,
    checked_retention,
    metadata_text,
    required,
    snapshot_message,
    tree_entry_message,
)
from cogfs.fsd.control.services.streaming import Apart
from cogfs.store.schema import Kind, SnapshotOrigin, SnapshotRow, TreeEntry
from cogfs.store.store import Store
from cogfs.v1 import common_pb2, snapshot_pb2, snapshot_pb2_grpc
from cogfs.v1.reasons import Reason

_LABEL_MAX = 1024
#: Bytes of one message of ReadFile.
_PIECE = 256 * 1024


class SnapshotService(snapshot_pb2_grpc.SnapshotServiceServicer):
    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    def CreateSnapshot(
        self, request: snapshot_pb2.CreateSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.Snapshot:
        workspace = self._engine.workspace(required(request.workspace_id, "workspace_id"))
        if len(request.label) > _LABEL_MAX:
            raise invalid(f"the label is longer than {_LABEL_MAX:,} characters")
        row = workspace.checkpoint(request.label, metadata_text(request.metadata), SnapshotOrigin.MANUAL)
        if request.wait != common_pb2.WAIT_UNSPECIFIED:
            # What is sealed is durable, too.
            row = workspace.sealed(row.id)
        return snapshot_message(row)

    def GetSnapshot(
        self, request: snapshot_pb2.GetSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.Snapshot:
        return snapshot_message(self._snapshot(request.snapshot_id))

    def ListSnapshots(
        self, request: snapshot_pb2.ListSnapshotsRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.ListSnapshotsResponse:
        size = request.page_size or DEFAULT_PAGE
        with self._store.read() as reader:
            reader.workspace(required(request.workspace_id, "workspace_id"))
            rows = reader.snapshots(request.workspace_id, before=request.page_token, limit=size + 1)
        return snapshot_pb2.ListSnapshotsResponse(
            snapshots=[snapshot_message(row) for row in rows[:size]],
            next_page_token=rows[size - 1].id if len(rows) > size else "",
        )

    def DeleteSnapshot(
        self, request: snapshot_pb2.DeleteSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.DeleteSnapshotResponse:
        snapshot = self._snapshot(request.snapshot_id)
        pruning.delete(self._engine.workspace(snapshot.workspace_id), snapshot.id)
        return snapshot_pb2.DeleteSnapshotResponse()

    def PruneSnapshots(
        self, request: snapshot_pb2.PruneSnapshotsRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.PruneSnapshotsResponse:
        workspace = self._engine.workspace(required(request.workspace_id, "workspace_id"))
        limits = checked_retention(request.retain) if request.HasField("retain") else None
        deleted, remaining = pruning.prune(workspace, limits, dry_run=request.dry_run)
        return snapshot_pb2.PruneSnapshotsResponse(deleted=deleted, dry_run=request.dry_run, remaining=remaining)

    def CopySnapshot(
        self, request: snapshot_pb2.CopySnapshotRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.Snapshot:
        snapshot = self._snapshot(request.snapshot_id)
        target = self._engine.workspace(required(request.workspace_id, "workspace_id"))
        return snapshot_message(copying.copy(self._engine.workspace(snapshot.workspace_id), snapshot.id, target))

    def RestoreSnapshot(
        self, request: snapshot_pb2.RestoreSnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[snapshot_pb2.RestoreEvent]:
        snapshot = self._snapshot(request.snapshot_id)
        workspace = self._engine.workspace(snapshot.workspace_id)
        wanted = Request(
            snapshot.id,
            paths=tuple(request.paths),
            dry_run=request.dry_run,
            force=request.force,
            strict=request.strict,
        )

        def work(progress: Progress) -> Outcome:
            def attempt(passage: Passage, dry_run: bool) -> Outcome:
                occupied_by = passage.enter("", workspace.id)
                asked = replace(wanted, dry_run=dry_run, occupied_by=occupied_by, probing=passage.probing)
                # What is only tried before something is stopped for it is not told of.
                return Restoration(workspace).restore(asked, silent if passage.probing else progress)

            return self._engine.passages.restore(attempt, dry_run=wanted.dry_run, force=wanted.force)

        # A client that goes away must not end a restore half-way.
        apart = Apart("restore", work)
        for event in apart.progress():
            yield snapshot_pb2.RestoreEvent(progress=event)
        done = apart.result
        if not request.stream_changes:
            yield snapshot_pb2.RestoreEvent(report=done.whole(self._store))
            return
        for piece in done.changes(self._store):
            add_changes(done.report, piece)
            yield snapshot_pb2.RestoreEvent(changes=piece)
        yield snapshot_pb2.RestoreEvent(report=done.report)

    def DiffSnapshots(
        self, request: snapshot_pb2.DiffSnapshotsRequest, context: grpc.ServicerContext
    ) -> Iterator[common_pb2.FileChange]:
        old = self._snapshot(request.from_snapshot_id)
        paths = tuple(normal_path(path) for path in request.paths)
        if request.to_snapshot_id:
            new = self._snapshot(request.to_snapshot_id)
            if new.workspace_id != old.workspace_id:
                raise invalid("the two snapshots are of two workspaces")
            root = self._root(new)
        else:
            root = self._engine.workspace(old.workspace_id).present()
        before = self._root(old)
        for path in paths:
            if find(self._store, before, path) is None and find(self._store, root, path) is None:
                raise CogfsError(Reason.NOT_FOUND, f"neither side has {show(path)}")
        yield from tree_changes(self._store, changes(self._store, before, root, paths), unified=request.unified)

    def ListTree(
        self, request: snapshot_pb2.ListTreeRequest, context: grpc.ServicerContext
    ) -> Iterator[snapshot_pb2.TreeEntry]:
        root = self._root(self._snapshot(request.snapshot_id))
        path = normal_path(request.path)
        entry = self._entry(root, path)
        if entry.kind is not Kind.DIRECTORY:
            yield tree_entry_message(path, entry)
        elif request.recursive:
            for where, child in walk(self._store, entry.hash, path):
                yield tree_entry_message(where, child)
        else:
            for child in self._store.read_tree(entry.hash).entries:
                where = path + b"/" + child.name if path else child.name
                yield tree_entry_message(where, child)

    def ReadFile(
        self, request: snapshot_pb2.ReadFileRequest, context: grpc.ServicerContext
    ) -> Iterator[snapshot_pb2.ReadFileResponse]:
        root = self._root(self._snapshot(request.snapshot_id))
        path = normal_path(request.path)
        entry = self._entry(root, path)
        if entry.kind is not Kind.FILE:
            raise invalid(f"{show(path)} is not a file in the snapshot")
        for data in self._store.read_file(entry.hash):
            for start in range(0, len(data), _PIECE):
                yield snapshot_pb2.ReadFileResponse(data=data[start : start + _PIECE])

    def _snapshot(self, snapshot_id: str) -> SnapshotRow:
        with self._store.read() as reader:
            return reader.snapshot(required(snapshot_id, "snapshot_id"))

    def _root(self, snapshot: SnapshotRow) -> TreeEntry:
        """Its root, once it is captured."""
        if snapshot.root is None:
            snapshot = self._engine.workspace(snapshot.workspace_id).sealed(snapshot.id)
        assert snapshot.root is not None
        return snapshot.root

    def _entry(self, root: TreeEntry, path: bytes) -> TreeEntry:
        entry = find(self._store, root, path)
        if entry is None:
            raise CogfsError(Reason.NOT_FOUND, f"the snapshot has no {show(path)}")
        return entry
