"""Rows of snapshots and threads as the API's messages, and what they share of checking requests."""

from __future__ import annotations

import json

from google.protobuf import json_format, struct_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from cogfs.fsd.control.errors import invalid
from cogfs.store.schema import EntryRow, FileCheckpointRow, Kind, SnapshotRow, ThreadRow, TreeEntry
from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2

#: Entries of a page when the request does not say.
DEFAULT_PAGE = 100

_METADATA_MAX = 1024 * 1024

_KINDS = {
    Kind.FILE: snapshot_pb2.TreeEntry.FILE,
    Kind.DIRECTORY: snapshot_pb2.TreeEntry.DIRECTORY,
    Kind.SYMLINK: snapshot_pb2.TreeEntry.SYMLINK,
    Kind.OPAQUE: snapshot_pb2.TreeEntry.OPAQUE,
}


def required(value: str, name: str) -> str:
    if not value:
        raise invalid(f"{name} is empty")
    return value


def timestamp(nanoseconds: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(nanoseconds)
    return stamp


def metadata_text(metadata: struct_pb2.Struct) -> str:
    """A request's metadata as the JSON text that is kept. VALIDATION_ERROR when it is too large."""
    text = json.dumps(json_format.MessageToDict(metadata), ensure_ascii=False, sort_keys=True)
    if len(text.encode("utf-8", "surrogatepass")) > _METADATA_MAX:
        raise invalid(f"the metadata is larger than {_METADATA_MAX:,} bytes")
    return text


def metadata_struct(text: str) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(json.loads(text))
    return struct


def snapshot_message(row: SnapshotRow) -> snapshot_pb2.Snapshot:
    stats = row.stats
    return snapshot_pb2.Snapshot(
        id=row.id,
        workspace_id=row.workspace_id,
        label=row.label,
        metadata=metadata_struct(row.metadata),
        state=snapshot_pb2.Snapshot.State.Value(row.state.name),
        reason=row.reason,
        root_hash=row.root.hash if row.root is not None else b"",
        exclude=row.exclude,
        max_file_bytes=row.max_file_bytes,
        skipped=[common_pb2.PathReason(path=one.path, reason=one.reason) for one in row.skipped],
        failed=[common_pb2.PathReason(path=one.path, reason=one.reason) for one in row.failed],
        stats=snapshot_pb2.SnapshotStats(
            files=stats.files,
            bytes=stats.bytes,
            hashed=stats.hashed,
            reused=stats.reused,
            stored_bytes=stats.stored_bytes,
            duration_ms=stats.duration_ns / 1e6,
            directories=stats.directories,
            symlinks=stats.symlinks,
        ),
        created_at=timestamp(row.created_ns),
        origin=snapshot_pb2.Snapshot.Origin.Value(row.origin.name),
        parent_id=row.parent_id,
    )


def tree_entry_message(path: bytes, entry: TreeEntry) -> snapshot_pb2.TreeEntry:
    opaque = entry.kind is Kind.OPAQUE
    return snapshot_pb2.TreeEntry(
        path=path,
        kind=_KINDS[entry.kind],
        mode=0 if opaque else entry.mode,
        size=entry.size,
        hash=entry.hash,
        symlink_target=b"" if opaque else entry.target,
        xattrs={name.decode("utf-8", "backslashreplace"): value for name, value in entry.xattrs},
        link_group=entry.link_group,
        reason=entry.target.decode() if opaque else "",
    )


def thread_message(row: ThreadRow) -> thread_pb2.Thread:
    return thread_pb2.Thread(
        id=row.id,
        workspace_id=row.workspace_id,
        leaf_id=row.leaf_id,
        entry_count=row.entry_count,
        created_at=timestamp(row.created_ns),
        updated_at=timestamp(row.updated_ns),
    )


def entry_message(row: EntryRow, *, active: bool) -> thread_pb2.Entry:
    message = thread_pb2.Entry(
        id=row.id,
        thread_id=row.thread_id,
        parent_id=row.parent_id,
        kind=thread_pb2.Entry.Kind.Value(row.kind.name),
        content=row.content,
        metadata=metadata_struct(row.metadata),
        created_at=timestamp(row.created_ns),
        files_follow=row.files_follow,
        active=active,
    )
    if row.file_checkpoint is not None:
        message.file_checkpoint.CopyFrom(_checkpoint_message(row.file_checkpoint))
    return message


def _checkpoint_message(row: FileCheckpointRow) -> thread_pb2.FileCheckpoint:
    return thread_pb2.FileCheckpoint(snapshot_id=row.snapshot_id, workspace_id=row.workspace_id, root=row.root)
