"""Conversations: entries as a tree, the checkpoint that a user message takes, rewind and undo.

A thread's lock is taken before its workspace's. Knows rows and restorations, not the API's messages of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec
import structlog

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.policies import Effective, effective
from cogfs.fsd.control.restoration import Request, Restoration
from cogfs.fsd.control.workspace import Workspace, failed
from cogfs.store.errors import NotFound
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import (
    EntryKind,
    EntryRow,
    FileCheckpointRow,
    PolicyRow,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    ThreadRow,
    UndoRow,
)
from cogfs.store.store import Store
from cogfs.v1 import common_pb2 as pb
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Entries that may stand between a point and the user message whose checkpoint is exact for it.
_PASSED_OVER = frozenset({EntryKind.NOTE, EntryKind.SESSION_EVENT})


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry that is to be appended."""

    thread_id: str
    kind: EntryKind
    content: str
    #: JSON text of an object.
    metadata: str
    #: Empty: chosen here.
    entry_id: str = ""
    require_checkpoint: bool = False
    #: The agent of the run that writes it; empty: the thread's.
    agent: str = ""
    #: What that run says of checkpoints.
    checkpoints: PolicyRow | None = None
    #: The run was started from a tool call of another, whose checkpoint covers the turn.
    called_by_run: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a rewind does to a thread."""

    rewound: bool
    #: Ids of the entries that leave the active branch, the oldest first.
    cut: tuple[str, ...]
    previous_leaf_id: str


@dataclass(frozen=True, slots=True)
class Rewound:
    """The outcome of a rewind; ``files`` is None when the files were not asked for."""

    conversation: Conversation
    files: pb.RestoreReport | None = None
    entry_id: str = ""
    exact: bool = False
    workspace_id: str = ""


@dataclass(frozen=True, slots=True)
class Undone:
    """The outcome of an undo; ``conversation`` is None when the files alone were taken back."""

    undone_snapshot_id: str
    files: pb.RestoreReport
    thread_id: str = ""
    conversation: Conversation | None = None
    files_only_reason: str = ""


class Threads:
    """All threads of the store."""

    def __init__(self, store: Store, workspace: Callable[[str], Workspace]) -> None:
        """``workspace`` finds a workspace by id; it raises NotFound."""
        self._store = store
        self._workspace = workspace
        #: Of the threads that somebody works with: gone when nobody holds one.
        self._locks: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        self._locks_lock = threading.Lock()

    def _lock(self, thread_id: str) -> threading.RLock:
        with self._locks_lock:
            return self._locks.setdefault(thread_id, threading.RLock())

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, thread_id: str, workspace_id: str, agent: str = "") -> ThreadRow:
        """ALREADY_EXISTS when the id is taken, NotFound when there is no such workspace."""
        thread_id = thread_id or new_id("thread")
        with self._lock(thread_id), self._store.write() as writer:
            if workspace_id:
                writer.workspace(workspace_id)
            try:
                writer.thread(thread_id)
            except NotFound:
                now = time.time_ns()
                row = ThreadRow(thread_id, workspace_id, "", 0, now, now, agent=agent)
                writer.put_thread(row)
                return row
            raise CogfsError(Reason.ALREADY_EXISTS, f"there is a thread {thread_id} already")

    def append(self, draft: Draft) -> tuple[EntryRow, str]:
        """Add an entry after the active leaf; also why its checkpoint, where one was due, is missing."""
        with self._lock(draft.thread_id):
            with self._store.read() as reader:
                thread = reader.thread(draft.thread_id)
                if draft.entry_id and reader.has_entry(draft.thread_id, draft.entry_id):
                    raise CogfsError(Reason.ALREADY_EXISTS, f"the thread has an entry {draft.entry_id} already")
                self._refuse_unfinished(reader, thread)
                policy = effective(reader, draft.agent or thread.agent, thread.checkpoints, draft.checkpoints)
            entry_id = draft.entry_id or new_id("entry")
            trouble = ""
            due = policy.enabled and not draft.called_by_run
            if draft.kind is EntryKind.USER and thread.workspace_id and due:
                try:
                    return self._append_with_checkpoint(draft, thread, entry_id, policy), ""
                except Exception as error:
                    # Whatever it is, the message is not lost for it.
                    failure = as_cogfs_error(error, "take the checkpoint")
                    if draft.require_checkpoint:
                        raise failure from error
                    trouble = str(failure)
                    _log.warning("a message is saved without its checkpoint", thread=thread.id, reason=trouble)
            with self._store.write() as writer:
                return self._put_entry(writer, draft, thread, entry_id, None), trouble

    def _append_with_checkpoint(self, draft: Draft, thread: ThreadRow, entry_id: str, policy: Effective) -> EntryRow:
        written: list[EntryRow] = []

        def fill(writer: Writer, snapshot: SnapshotRow) -> None:
            root = writer.workspace(thread.workspace_id).root
            checkpoint = FileCheckpointRow(snapshot.id, thread.workspace_id, root)
            written.append(self._put_entry(writer, draft, thread, entry_id, checkpoint))

        workspace = self._workspace(thread.workspace_id)
        workspace.checkpoint(
            entry_id,
            "{}",
            SnapshotOrigin.MESSAGE,
            fill,
            exclude=policy.exclude,
            max_file_bytes=policy.max_file_bytes,
        )
        return written[-1]

    @staticmethod
    def _put_entry(
        writer: Writer, draft: Draft, thread: ThreadRow, entry_id: str, checkpoint: FileCheckpointRow | None
    ) -> EntryRow:
        now = time.time_ns()
        user = draft.kind is EntryKind.USER
        entry = EntryRow(
            id=entry_id,
            thread_id=thread.id,
            parent_id=thread.leaf_id,
            kind=draft.kind,
            content=draft.content,
            metadata=draft.metadata,
            created_ns=now,
            sequence=thread.entry_count + 1,
            file_checkpoint=checkpoint,
            files_follow=user and thread.files_follow,
        )
        writer.put_entry(entry)
        writer.put_thread(
            msgspec.structs.replace(
                thread,
                leaf_id=entry_id,
                entry_count=thread.entry_count + 1,
                updated_ns=now,
                # A checkpoint says what the files are here, wherever they came from.
                files_follow=thread.files_follow or checkpoint is not None,
            )
        )
        return entry

    def _refuse_unfinished(self, reader: Reader, thread: ThreadRow) -> None:
        """While a rewind of this thread waits for its recovery, the thread must not grow under it."""
        if not thread.workspace_id:
            return
        for journal in reader.journals():
            if journal.thread is not None and journal.thread.id == thread.id:
                raise CogfsError(
                    Reason.THREAD_BUSY,
                    "a rewind of the thread was interrupted and is not finished: run cogfsctl mount to finish it",
                )

    # --- policies -----------------------------------------------------------------------------------------------------

    def set_policy(self, row: PolicyRow | None, *, agent: str = "", thread_id: str = "") -> None:
        """What a thread, an agent or, without either, the runtime says of checkpoints from now on; None: nothing.

        NotFound: there is no such thread. THREAD_BUSY: a rewind of it is not finished.
        """
        if thread_id:
            with self._lock(thread_id), self._store.write() as writer:
                thread = writer.thread(thread_id)
                self._refuse_unfinished(writer, thread)
                writer.put_thread(msgspec.structs.replace(thread, checkpoints=row))
            return
        with self._store.write() as writer:
            if row is None:
                writer.delete_policy(agent)
            else:
                writer.put_policy(row, agent)

    def policy(self, *, agent: str = "", thread_id: str = "") -> tuple[PolicyRow | None, Effective]:
        """What a level says, and what it comes to with the less specific ones. NotFound."""
        with self._store.read() as reader:
            if thread_id:
                thread = reader.thread(thread_id)
                return thread.checkpoints, effective(reader, thread.agent, thread.checkpoints)
            return reader.policy(agent), effective(reader, agent)

    # --- rewind -------------------------------------------------------------------------------------------------------

    def rewind(
        self,
        thread_id: str,
        to_entry_id: str,
        *,
        before: bool = False,
        files: bool | None,
        memory: bool,
        workspace_id: str = "",
        dry_run: bool = False,
        force: bool = False,
    ) -> Rewound:
        """Take the conversation (``memory``) and the files back to an entry of the active branch.

        ``files`` is None: as the runtime's policy says, for a thread with a workspace. ``before``: the entry is a user
        message; to what it follows, and to the files of its own checkpoint.
        """
        with self._lock(thread_id):
            with self._store.read() as reader:
                thread = reader.thread(thread_id)
                if files is None:
                    files = bool(thread.workspace_id) and effective(reader).rewind_files
                if not files and not memory:
                    raise CogfsError(Reason.VALIDATION_ERROR, "a rewind of neither conversation nor files does nothing")
                reader.entry(thread_id, to_entry_id)
                branch = reader.branch(thread_id, thread.leaf_id)
                self._refuse_unfinished(reader, thread)
                place = next((i for i, entry in enumerate(branch) if entry.id == to_entry_id), None)
                if place is None:
                    raise CogfsError(
                        Reason.VALIDATION_ERROR, f"the entry {to_entry_id} is not on the thread's active branch"
                    )
                end = place if before else place + 1
                cut = tuple(entry.id for entry in branch[end:])
                if before:
                    found = self._own_checkpoint(branch[place], files)
                else:
                    found = self._checkpoint_at(reader, branch[:end]) if files else None
            point = branch[end - 1].id if end else ""
            conversation = Conversation(memory, cut if memory else (), thread.leaf_id)
            if found is None:
                if files:
                    raise CogfsError(
                        Reason.VALIDATION_ERROR, f"no checkpoint stands at or before the entry {to_entry_id}"
                    )
                if not dry_run and cut:
                    with self._store.write() as writer:
                        writer.put_thread(self._moved(thread, point, follow=False))
                return Rewound(conversation)
            entry, exact = found
            workspace = self._workspace_of(thread, entry, workspace_id)
            leaf = point if memory else thread.leaf_id
            after = self._moved(thread, leaf, follow=exact and memory)
            request = Request(
                entry.file_checkpoint.snapshot_id if entry.file_checkpoint is not None else "",
                dry_run=dry_run,
                force=force,
                busy_reason=Reason.WORKSPACE_BUSY,
                thread=after,
                thread_before=thread,
                to_be_undone=True,
            )
            report = Restoration(workspace).restore(request)
        return Rewound(conversation, report, entry.id, exact, workspace.id)

    @staticmethod
    def _moved(thread: ThreadRow, leaf_id: str, *, follow: bool) -> ThreadRow:
        return msgspec.structs.replace(thread, leaf_id=leaf_id, files_follow=follow, updated_ns=time.time_ns())

    @staticmethod
    def _own_checkpoint(entry: EntryRow, files: bool) -> tuple[EntryRow, bool] | None:
        """A user message, when the ``files`` are to be those of its checkpoint; and whether they followed from what
        stands before it."""
        if entry.kind is not EntryKind.USER:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"the entry {entry.id} is no user message, so nothing is rewound to before it"
            )
        if not files:
            return None
        if entry.file_checkpoint is None:
            raise CogfsError(Reason.VALIDATION_ERROR, f"the entry {entry.id} has no checkpoint of the files")
        return entry, entry.files_follow

    def _checkpoint_at(self, reader: Reader, branch: list[EntryRow]) -> tuple[EntryRow, bool] | None:
        """The message whose checkpoint is the files at the end of ``branch``, and whether it is so exactly."""
        following = self._next_message(reader, branch[-1])
        if following is not None:
            return following, True
        for entry in reversed(branch):
            if entry.kind is EntryKind.USER and entry.file_checkpoint is not None:
                return entry, False
        return None

    @staticmethod
    def _next_message(reader: Reader, point: EntryRow) -> EntryRow | None:
        """Of the user messages right after a point, on every branch, the one written last whose files followed."""
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
                    and (found is None or child.sequence > found.sequence)
                ):
                    found = child
        return found

    def _workspace_of(self, thread: ThreadRow, entry: EntryRow, workspace_id: str) -> Workspace:
        """The workspace to restore, after every check that a checkpoint has to pass."""
        checkpoint = entry.file_checkpoint
        assert checkpoint is not None
        if workspace_id and workspace_id != checkpoint.workspace_id:
            raise CogfsError(
                Reason.VALIDATION_ERROR,
                f"the thread did not run in workspace {workspace_id} there, but in {checkpoint.workspace_id}",
            )
        with self._store.read() as reader:
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
            return self._workspace(checkpoint.workspace_id)
        except NotFound as error:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"the workspace of the entry {entry.id} is not registered any more"
            ) from error

    # --- undo ---------------------------------------------------------------------------------------------------------

    def undo(self, workspace_id: str, *, dry_run: bool = False, force: bool = False) -> Undone:
        """Take back the last restore of a workspace, and the rewind that it was part of when nothing came after it."""
        workspace = self._workspace(workspace_id)
        last = self._last_restore(workspace)
        # The thread's lock comes first, and what was read before it was held is read again.
        with self._lock(last.thread_id or workspace_id), workspace.lock:
            if self._last_restore(workspace) != last:
                raise CogfsError(Reason.BUSY, "another restore of the workspace came in between; look again")
            thread, why = self._thread_to_undo(last)
            conversation = None
            after = None
            if thread is not None:
                after = msgspec.structs.replace(
                    thread,
                    leaf_id=last.previous_leaf_id,
                    files_follow=last.files_followed,
                    updated_ns=time.time_ns(),
                )
                conversation = Conversation(
                    last.previous_leaf_id != last.leaf_id, self._cut(thread, last), thread.leaf_id
                )
            request = Request(
                last.safety_snapshot_id,
                paths=last.paths,
                missing_ok=True,
                dry_run=dry_run,
                force=force,
                thread=after,
                thread_before=thread,
            )
            report = Restoration(workspace).restore(request)
        return Undone(last.target_snapshot_id, report, thread.id if thread is not None else "", conversation, why)

    def _last_restore(self, workspace: Workspace) -> UndoRow:
        undo = workspace.row().undo
        if undo is None:
            raise CogfsError(Reason.VALIDATION_ERROR, "no restore of the workspace can be undone: there was none")
        return undo

    def _thread_to_undo(self, undo: UndoRow) -> tuple[ThreadRow | None, str]:
        """The thread that is taken back with the files, or why they are taken back alone."""
        if not undo.thread_id:
            return None, ""
        with self._store.read() as reader:
            try:
                thread = reader.thread(undo.thread_id)
            except NotFound:
                return None, f"the thread {undo.thread_id} is gone"
        if thread.leaf_id != undo.leaf_id:
            return None, f"the thread {undo.thread_id} has gone on since"
        return thread, ""

    def _cut(self, thread: ThreadRow, undo: UndoRow) -> tuple[str, ...]:
        """The entries that leave the active branch when it ends at the earlier leaf again."""
        with self._store.read() as reader:
            kept = {entry.id for entry in reader.branch(thread.id, undo.previous_leaf_id)}
            return tuple(entry.id for entry in reader.branch(thread.id, thread.leaf_id) if entry.id not in kept)
