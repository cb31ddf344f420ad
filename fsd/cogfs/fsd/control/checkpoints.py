"""Which checkpoint is the files at a point of a conversation, and whether it can be restored.

Only the daemon writes which checkpoint belongs to which entry, so what is found here was taken in the thread, or in
one that it was forked from. Knows rows and workspaces; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.workspace import Workspace, failed
from cogfs.store.errors import NotFound
from cogfs.store.rows import Reader
from cogfs.store.schema import EntryKind, EntryRow, FileCheckpointRow, SnapshotRow, SnapshotState, ThreadRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

#: Entries that may stand between a point and the user message whose checkpoint is exact for it.
_PASSED_OVER = frozenset({EntryKind.NOTE, EntryKind.SESSION_EVENT})


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint for a point of a thread."""

    checkpoint: FileCheckpointRow
    #: The entry of the thread that names it.
    entry: EntryRow
    #: It is the files as they were right after the point.
    exact: bool
    #: The entry is a message after the point, on whatever branch.
    follows: bool = False


def checkpoint_at(reader: Reader, branch: Sequence[EntryRow], places: Collection[str] = ()) -> Found | None:
    """The checkpoint that is the files at the end of ``branch``, or the nearest one before; None: there is none.
    ``places``: the workspaces that it may be of, of those in which the thread ran; none are given: any.

    VALIDATION_ERROR: there is one, but of another workspace.
    """
    point = branch[-1]
    following = next_message(reader, point, places)
    if following is not None and following.file_checkpoint is not None:
        return Found(following.file_checkpoint, following, exact=True, follows=True)
    if point.file_checkpoint_at is not None and _is_of(point.file_checkpoint_at, places):
        return Found(point.file_checkpoint_at, point, exact=True)
    for entry in reversed(branch):
        if entry.kind is EntryKind.USER and entry.file_checkpoint is not None and _is_of(entry.file_checkpoint, places):
            return Found(entry.file_checkpoint, entry, exact=False)
    other = checkpoint_at(reader, branch) if places else None
    if other is not None:
        raise _ran_elsewhere(places, other.checkpoint)
    return None


def _is_of(checkpoint: FileCheckpointRow, places: Collection[str]) -> bool:
    return not places or checkpoint.workspace_id in places


def _ran_elsewhere(places: Collection[str], checkpoint: FileCheckpointRow) -> CogfsError:
    named = " or ".join(sorted(places))
    return CogfsError(
        Reason.VALIDATION_ERROR,
        f"the thread did not run in workspace {named} there, but in {checkpoint.workspace_id}",
    )


def workspaces_of(reader: Reader, thread: ThreadRow, agents: Collection[str]) -> frozenset[str]:
    """The workspaces in which agents worked in a thread: those of the runs that they are on, and the thread's own where
    it is of one of them. VALIDATION_ERROR: none of them did."""
    found = {run.workspace_id for run in reader.runs() if run.thread_id == thread.id and run.agent in agents}
    if thread.agent in agents:
        found.add(thread.workspace_id)
    found.discard("")
    if not found:
        raise CogfsError(
            Reason.VALIDATION_ERROR,
            f"no run of {' or '.join(sorted(agents))} is known that worked on files in the thread {thread.id}: name the"
            " workspace",
        )
    return frozenset(found)


def own_checkpoint(entry: EntryRow, files: bool) -> Found | None:
    """That of a user message itself, when the ``files`` are asked for; exact where they followed from what stands
    before it. VALIDATION_ERROR when the entry is something else, or has none."""
    if entry.kind is not EntryKind.USER:
        raise CogfsError(
            Reason.VALIDATION_ERROR, f"the entry {entry.id} is no user message, so nothing is rewound to before it"
        )
    if not files:
        return None
    if entry.file_checkpoint is None:
        raise CogfsError(Reason.VALIDATION_ERROR, f"the entry {entry.id} has no checkpoint of the files")
    return Found(entry.file_checkpoint, entry, entry.files_follow, follows=True)


def next_message(reader: Reader, point: EntryRow, places: Collection[str] = ()) -> EntryRow | None:
    """Of the user messages right after a point, on every branch, the one written last whose files followed and that
    has a checkpoint, of one of the workspaces ``places`` where any are given."""
    found: EntryRow | None = None
    waiting = [point]
    while waiting:
        for child in reader.children(point.thread_id, waiting.pop().id):
            if child.kind in _PASSED_OVER:
                waiting.append(child)
            elif (
                child.kind is EntryKind.USER
                and child.files_follow
                and child.file_checkpoint is not None
                and _is_of(child.file_checkpoint, places)
                and (found is None or child.sequence > found.sequence)
            ):
                found = child
    return found


def usable(
    store: Store, workspaces: Callable[[str], Workspace], found: Found, places: Collection[str]
) -> tuple[Workspace, SnapshotRow]:
    """The workspace that a checkpoint is of and its snapshot, which may still be captured.

    VALIDATION_ERROR: it is of none of the workspaces ``places`` where any are given, it was pruned or has failed, or
    its workspace is gone.
    """
    checkpoint, entry = found.checkpoint, found.entry
    if not _is_of(checkpoint, places):
        raise _ran_elsewhere(places, checkpoint)
    with store.read() as reader:
        try:
            snapshot = reader.snapshot(checkpoint.snapshot_id)
        except NotFound as error:
            raise CogfsError(
                Reason.VALIDATION_ERROR,
                f"the checkpoint of the entry {entry.id} was pruned, so the files cannot be taken back to it",
            ) from error
    if snapshot.state is SnapshotState.FAILED:
        raise failed(snapshot)
    if snapshot.workspace_id != checkpoint.workspace_id:
        raise CogfsError(Reason.VALIDATION_ERROR, f"the checkpoint of the entry {entry.id} cannot be restored")
    try:
        return workspaces(checkpoint.workspace_id), snapshot
    except NotFound as error:
        raise CogfsError(
            Reason.VALIDATION_ERROR, f"the workspace of the entry {entry.id} is not registered any more"
        ) from error
