"""What a plan or a comparison of trees comes to, in the API's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cogfs.fsd.control.errors import BusyBy
from cogfs.fsd.control.linediff import MAX_BYTES, LineChange, compare
from cogfs.fsd.control.occupancy import blocking
from cogfs.fsd.control.planner import Action, Plan, Step
from cogfs.store.errors import StoreError
from cogfs.store.schema import Kind, TreeEntry
from cogfs.store.store import Store
from cogfs.v1 import common_pb2 as pb

#: What one message of changes holds about, and what an item takes of it beside its path.
_PIECE_BYTES = 64 * 1024
_ITEM_BYTES = 64

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
    return _change(path, old, new, _lines(store, old, new, unified=unified))


def _change(path: bytes, old: TreeEntry | None, new: TreeEntry | None, lines: LineChange) -> pb.FileChange:
    step = Step(path, old, new)
    change = _CHANGES[step.action]
    if old is not None and new is not None and len({old.kind, new.kind} - {Kind.OPAQUE}) > 1:
        change = pb.Change.TYPE
    diff = b""
    if lines.hunks:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a restore came to, or in a dry run would come to.

    The paths are told apart from the rest and when somebody asks for them: piece by piece, outside of all locks, and
    within an operation of the store, since nothing may name what they are compared with.
    """

    #: Without ``restored``, ``deleted``, ``kept``, ``files`` and the numbers of lines.
    report: pb.RestoreReport
    plan: Plan

    def changes(self, store: Store) -> Iterator[pb.RestoreChanges]:
        """What is kept, and what happened since the snapshot, which the restore takes back, in the order of the plan.
        Of a dry run, a content that cannot be read is an error; after the restore it has no lines to tell of."""
        piece, size = pb.RestoreChanges(), 0
        for message in self._messages(store):
            if isinstance(message, pb.PathReason):
                piece.kept.append(message)
            else:
                piece.files.append(message)
            size += _ITEM_BYTES + len(message.path)
            if size >= _PIECE_BYTES:
                yield piece
                piece, size = pb.RestoreChanges(), 0
        if size:
            yield piece

    def _messages(self, store: Store) -> Iterator[pb.PathReason | pb.FileChange]:
        for path, reason in self.plan.kept:
            yield pb.PathReason(path=path, reason=reason)
        for step in self.plan.steps:
            try:
                yield file_change(store, step.path, step.after, step.before, unified=False)
            except StoreError:
                if self.report.dry_run:
                    raise
                yield _change(step.path, step.after, step.before, LineChange(binary=True))

    def whole(self, store: Store) -> pb.RestoreReport:
        """The report with all paths in it."""
        report = pb.RestoreReport()
        report.CopyFrom(self.report)
        for piece in self.changes(store):
            add_changes(report, piece)
            report.kept.extend(piece.kept)
            report.files.extend(piece.files)
        report.restored.extend(self.plan.restored())
        report.deleted.extend(self.plan.deleted())
        return report


def add_changes(report: pb.RestoreReport, piece: pb.RestoreChanges) -> None:
    """Count the lines of a piece."""
    report.insertions += sum(file.insertions for file in piece.files)
    report.deletions += sum(file.deletions for file in piece.files)


def outcome(snapshot_id: str, plan: Plan, who: list[BusyBy], *, dry_run: bool) -> Outcome:
    """Of a plan, and of who is in its way."""
    deleted = sum(step.after is None for step in plan.steps)
    report = pb.RestoreReport(
        snapshot_id=snapshot_id,
        dry_run=dry_run,
        unchanged=plan.unchanged,
        busy=bool(blocking(who)),
        busy_by=busy_messages(who),
        restored_count=len(plan.steps) - deleted,
        deleted_count=deleted,
        kept_count=len(plan.kept),
    )
    return Outcome(report, plan)
