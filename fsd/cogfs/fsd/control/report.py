"""What a plan or a comparison of trees comes to, in the API's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cogfs.fsd.control.errors import BusyBy
from cogfs.fsd.control.linediff import MAX_BYTES, LineChange, compare
from cogfs.fsd.control.occupancy import blocking
from cogfs.fsd.control.planner import Action, Plan, Step
from cogfs.store.schema import Kind, TreeEntry
from cogfs.store.store import Store
from cogfs.v1 import common_pb2 as pb

_CHANGES = {
    Action.CREATE: pb.Change.CREATED,
    Action.DELETE: pb.Change.DELETED,
    Action.METADATA: pb.Change.METADATA,
    Action.REPLACE: pb.Change.MODIFIED,
}


def _content(store: Store, entry: TreeEntry | None) -> bytes | None:
    """What is compared by line; None for what has no lines."""
    if entry is None:
        return b""
    if entry.kind is Kind.SYMLINK:
        return entry.target
    if entry.kind is Kind.FILE:
        return None if entry.size > MAX_BYTES else b"".join(store.read_file(entry.hash))
    return None if entry.kind is Kind.OPAQUE else b""


def _lines(store: Store, old: TreeEntry | None, new: TreeEntry | None, *, unified: bool) -> LineChange:
    if old is not None and new is not None and old.kind is new.kind is Kind.FILE and old.hash == new.hash:
        return LineChange()
    before, after = _content(store, old), _content(store, new)
    if before is None or after is None:
        return LineChange(binary=True)
    return compare(before, after, unified=unified)


def file_change(
    store: Store, path: bytes, old: TreeEntry | None, new: TreeEntry | None, *, unified: bool
) -> pb.FileChange:
    """How ``path`` came from ``old`` to ``new``; None is nothing."""
    step = Step(path, old, new)
    change = _CHANGES[step.action]
    if old is not None and new is not None and len({old.kind, new.kind} - {Kind.OPAQUE}) > 1:
        change = pb.Change.TYPE
    lines = _lines(store, old, new, unified=unified)
    diff = b""
    if unified and lines.hunks:
        before = b"a/" + path if old is not None else b"/dev/null"
        after = b"b/" + path if new is not None else b"/dev/null"
        diff = b"--- %s\n+++ %s\n%s" % (before, after, lines.hunks)
    return pb.FileChange(
        path=path,
        change=change,
        insertions=lines.insertions,
        deletions=lines.deletions,
        binary=lines.binary,
        diff=diff,
    )


def tree_changes(store: Store, steps: Iterable[Step], *, unified: bool) -> Iterator[pb.FileChange]:
    for step in steps:
        yield file_change(store, step.path, step.before, step.after, unified=unified)


def busy_messages(who: Sequence[BusyBy]) -> list[pb.BusyBy]:
    found = []
    for one in who:
        message = pb.BusyBy(
            kind=pb.BusyBy.Kind.Value(one["kind"]),
            path=one["path"].encode("utf-8", "surrogateescape"),
            pid=one["pid"],
            command=one["command"],
            access=pb.BusyBy.Access.Value(one["access"]),
            id=one.get("id", ""),
        )
        if one["since_ns"]:
            message.since.FromNanoseconds(one["since_ns"])
        found.append(message)
    return found


def restore_report(store: Store, snapshot_id: str, plan: Plan, who: list[BusyBy], *, dry_run: bool) -> pb.RestoreReport:
    """The report of a plan. ``files`` tells what happened since the snapshot, which the restore takes back."""
    files = [file_change(store, step.path, step.after, step.before, unified=False) for step in plan.steps]
    return pb.RestoreReport(
        snapshot_id=snapshot_id,
        dry_run=dry_run,
        restored=plan.restored(),
        deleted=plan.deleted(),
        unchanged=plan.unchanged,
        kept=[pb.PathReason(path=path, reason=reason) for path, reason in plan.kept],
        busy=bool(blocking(who)),
        busy_by=busy_messages(who),
        insertions=sum(file.insertions for file in files),
        deletions=sum(file.deletions for file in files),
        files=files,
    )
