"""Rows of snapshots and threads as the API's messages, and what they share of checking requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from google.protobuf import json_format, struct_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from pathspec import GitIgnoreSpec

from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.passage import RunsReport
from cogfs.fsd.control.policies import Effective
from cogfs.store.schema import (
    EntryOrigin,
    EntryRow,
    FileCheckpointRow,
    ForkLinkRow,
    Kind,
    PolicyRow,
    SnapshotRow,
    ThreadRow,
    TreeEntry,
    WorkspaceOptions,
)
from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2, workspace_pb2

#: Entries of a page when the request does not say.
DEFAULT_PAGE = 100

_METADATA_MAX = 1024 * 1024
_CONTENT_MAX = 16 * 1024 * 1024
_GLOBS_MAX = 1000
_GLOB_LENGTH_MAX = 4096
#: Larger than any file.
_FILE_BYTES_MAX = 1 << 62
_AGENT_MAX = 128
_AGE_MAX_NS = 100 * 366 * 24 * 3600 * 1_000_000_000
_COUNT_MAX = 1 << 62

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


def checked_globs(globs: Sequence[str]) -> tuple[str, ...]:
    """Globs to exclude. VALIDATION_ERROR when one is none, or there are too many."""
    if len(globs) > _GLOBS_MAX:
        raise invalid(f"there are {len(globs)} globs to exclude, and at most {_GLOBS_MAX:,} are allowed")
    for glob in globs:
        if not glob.strip() or "\n" in glob or "\0" in glob or len(glob) > _GLOB_LENGTH_MAX:
            raise invalid(
                f"a glob to exclude is empty, longer than {_GLOB_LENGTH_MAX:,} characters, or holds a line break"
            )
        try:
            GitIgnoreSpec.from_lines([glob])
        except ValueError as error:
            raise invalid(f"{glob!r} is no glob in gitignore syntax: {error}") from error
    return tuple(globs)


def checked_size(size: int) -> int:
    """A limit of the size of files as it is kept: zero is the default, negative none. VALIDATION_ERROR."""
    if size > _FILE_BYTES_MAX:
        raise invalid(f"max_file_bytes of {size} is larger than any file")
    return WorkspaceOptions().max_file_bytes if size == 0 else max(size, -1)


def checked_retention(retain: workspace_pb2.Retention) -> tuple[int, int]:
    """A count and an age in nanoseconds, 0: no limit. VALIDATION_ERROR when one is negative or too large."""
    age = retain.max_age.ToNanoseconds()
    if not 0 <= retain.count <= _COUNT_MAX:
        raise invalid(f"a retention keeps a number of snapshots, or with 0 all of them: not {retain.count}")
    if not 0 <= age <= _AGE_MAX_NS or not 0 <= retain.max_age.nanos < 1_000_000_000:
        raise invalid("the greatest age of a retention is from 0 (no limit) to 100 years")
    return retain.count, age


def retention_message(count: int, age_ns: int) -> workspace_pb2.Retention:
    message = workspace_pb2.Retention(count=count)
    if age_ns:
        age = Duration()
        age.FromNanoseconds(age_ns)
        message.max_age.CopyFrom(age)
    return message


def checked_agent(agent: str) -> str:
    """The name of an agent, or nothing. VALIDATION_ERROR when it cannot be one."""
    return checked_name(agent, "an agent's name")


def checked_name(name: str, what: str) -> str:
    """A name, or nothing. VALIDATION_ERROR when it is too long or cannot be shown."""
    if len(name.encode()) > _AGENT_MAX or not (name.isprintable() and name == name.strip()):
        raise invalid(f"{what} has at most {_AGENT_MAX} bytes, no control characters, and no space around it")
    return name


def checked_policy(message: thread_pb2.CheckpointPolicy, *, runtime: bool = False) -> PolicyRow:
    """What a level says. VALIDATION_ERROR when it cannot say that."""
    if message.HasField("rewind_files") and not runtime:
        raise invalid("rewind_files is a setting of the runtime alone")
    return PolicyRow(
        enabled=message.enabled if message.HasField("enabled") else True,
        exclude=checked_globs(message.exclude),
        max_file_bytes=checked_size(message.max_file_bytes) if message.HasField("max_file_bytes") else None,
        rewind_files=message.rewind_files if message.HasField("rewind_files") else None,
    )


def policy_message(policy: PolicyRow | Effective) -> thread_pb2.CheckpointPolicy:
    return thread_pb2.CheckpointPolicy(
        enabled=policy.enabled,
        exclude=policy.exclude,
        max_file_bytes=policy.max_file_bytes,
        rewind_files=policy.rewind_files,
    )


def check_content(content: str) -> None:
    """VALIDATION_ERROR when what an entry or a memory says is too large."""
    if len(content.encode()) > _CONTENT_MAX:
        raise invalid(f"the content is larger than {_CONTENT_MAX:,} bytes")


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
        refuse_hard_links=row.refuse_hard_links,
        copied_from=row.copied_from,
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


def thread_message(row: ThreadRow, forks: Sequence[ForkLinkRow] = ()) -> thread_pb2.Thread:
    return thread_pb2.Thread(
        id=row.id,
        workspace_id=row.workspace_id,
        leaf_id=row.leaf_id,
        entry_count=row.entry_count,
        created_at=timestamp(row.created_ns),
        updated_at=timestamp(row.updated_ns),
        agent=row.agent,
        forked_from=_origin_message(row.forked_from),
        forks=[
            thread_pb2.ForkLink(thread_id=one.thread_id, entry_id=one.entry_id, created_at=timestamp(one.created_ns))
            for one in forks
        ],
    )


def _origin_message(row: EntryOrigin | None) -> thread_pb2.EntryOrigin | None:
    return None if row is None else thread_pb2.EntryOrigin(thread_id=row.thread_id, entry_id=row.entry_id)


def entry_message(row: EntryRow, *, active: bool, pruned: AbstractSet[str] = frozenset()) -> thread_pb2.Entry:
    """``pruned``: snapshots that are not kept any more."""
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
        run_id=row.run_id,
        copied_from=_origin_message(row.copied_from),
    )
    if row.file_checkpoint is not None:
        message.file_checkpoint.CopyFrom(_checkpoint_message(row.file_checkpoint, pruned))
    if row.file_checkpoint_at is not None:
        message.file_checkpoint_at.CopyFrom(_checkpoint_message(row.file_checkpoint_at, pruned))
    return message


def _checkpoint_message(row: FileCheckpointRow, pruned: AbstractSet[str]) -> thread_pb2.FileCheckpoint:
    return thread_pb2.FileCheckpoint(
        snapshot_id=row.snapshot_id, workspace_id=row.workspace_id, root=row.root, pruned=row.snapshot_id in pruned
    )


def runs_report(found: RunsReport) -> thread_pb2.RunsReport:
    return thread_pb2.RunsReport(
        going=found.going, interrupted=found.interrupted, paused=found.paused, durable=found.durable
    )
