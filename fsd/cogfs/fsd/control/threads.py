"""Conversations: entries as a tree, the checkpoint that a user message takes, rewind and undo.

A thread's lock is taken before its workspace's. Knows rows and restorations, not the API's messages of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import msgspec
import structlog

from cogfs.fsd.control.checkpoints import checkpoint_at, own_checkpoint, usable, workspaces_of
from cogfs.fsd.control.completion import Progress, silent
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.passage import NO_RUNS, Passage, Passages, RunsReport
from cogfs.fsd.control.policies import Effective, effective
from cogfs.fsd.control.report import Outcome
from cogfs.fsd.control.restoration import Request, Restoration
from cogfs.fsd.control.runstates import DELETED, REWOUND, drop, refuse_over
from cogfs.fsd.control.standing import NO_SHIFT, Shift, move_leaf, shift
from cogfs.fsd.control.workspace import Workspace
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
    ThreadRow,
    UndoRow,
)
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)


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
    #: The run, which then says the three above; empty: a writer that is not registered.
    run_id: str = ""
    #: Where the checkpoint is taken; empty: the thread's.
    workspace_id: str = ""


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
    files: Outcome | None = None
    entry_id: str = ""
    exact: bool = False
    workspace_id: str = ""
    runs: RunsReport = NO_RUNS
    memory: Shift = NO_SHIFT


@dataclass(frozen=True, slots=True)
class Undone:
    """The outcome of an undo; ``conversation`` is None when the files alone were taken back."""

    undone_snapshot_id: str
    files: Outcome
    thread_id: str = ""
    conversation: Conversation | None = None
    files_only_reason: str = ""
    memory: Shift | None = None


class Threads:
    """All threads of the store."""

    def __init__(self, store: Store, workspace: Callable[[str], Workspace], passages: Passages) -> None:
        """``workspace`` finds a workspace by id; it raises NotFound."""
        self._store = store
        self._workspace = workspace
        self._passages = passages
        #: Of the threads that somebody works with: gone when nobody holds one.
        self._locks: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        self._locks_lock = threading.Lock()

    def lock(self, thread_id: str) -> threading.RLock:
        """Held by whatever adds to the thread, or moves in it. Taken before a workspace's."""
        with self._locks_lock:
            return self._locks.setdefault(thread_id, threading.RLock())

    # --- writing ------------------------------------------------------------------------------------------------------

    def create(self, thread_id: str, workspace_id: str, agent: str = "") -> ThreadRow:
        """ALREADY_EXISTS when the id is taken, NotFound when there is no such workspace."""
        thread_id = thread_id or new_id("thread")
        with self.lock(thread_id), self._store.write() as writer:
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

    def delete(self, thread_id: str) -> None:
        """Forget a thread with its entries and memories. NotFound; THREAD_BUSY: a rewind of it is not finished, or a
        run goes on in it."""

        def attempt(passage: Passage, _: bool) -> None:
            passage.enter(thread_id, "")
            self._delete(thread_id, passage.drops)

        with self._store.read() as reader:
            reader.thread(thread_id)
        self._passages.rewind(thread_id, attempt, dry_run=False, force=False)

    def _delete(self, thread_id: str, drops: Sequence[str]) -> None:
        with self.lock(thread_id), self._store.write() as writer:
            self.refuse_unfinished(writer, writer.thread(thread_id))
            writer.delete_thread(thread_id)
            drop(writer, drops, DELETED)
            for row in writer.workspaces():
                undo = row.undo
                if undo is not None and undo.thread_id == thread_id:
                    # It takes the files back alone, also when there is another thread of this id by then.
                    undo = msgspec.structs.replace(undo, previous_leaf_id="", leaf_id="")
                    writer.put_workspace(msgspec.structs.replace(row, undo=undo))

    def append(self, draft: Draft) -> tuple[EntryRow, str]:
        """Add an entry after the active leaf; also why its checkpoint, where one was due, is missing."""
        if draft.run_id:
            # A run that was stopped is told so at once, and not after the rewind that stopped it.
            with self._store.read() as reader:
                of_run(reader, draft)
        with self.lock(draft.thread_id):
            with self._store.read() as reader:
                thread = reader.thread(draft.thread_id)
                draft = of_run(reader, draft)
                if draft.entry_id and reader.has_entry(draft.thread_id, draft.entry_id):
                    raise CogfsError(Reason.ALREADY_EXISTS, f"the thread has an entry {draft.entry_id} already")
                self.refuse_unfinished(reader, thread)
                policy = effective(reader, draft.agent or thread.agent, thread.checkpoints, draft.checkpoints)
            entry_id = draft.entry_id or new_id("entry")
            trouble = ""
            due = policy.enabled and not draft.called_by_run
            if draft.kind is EntryKind.USER and (draft.workspace_id or thread.workspace_id) and due:
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
        workspace_id = draft.workspace_id or thread.workspace_id

        def fill(writer: Writer, snapshot: SnapshotRow) -> None:
            root = writer.workspace(workspace_id).root
            checkpoint = FileCheckpointRow(snapshot.id, workspace_id, root)
            written.append(self._put_entry(writer, draft, thread, entry_id, checkpoint))

        workspace = self._workspace(workspace_id)
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
            run_id=draft.run_id,
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

    def refuse_unfinished(self, reader: Reader, thread: ThreadRow) -> None:
        """THREAD_BUSY while a rewind of this thread waits for its recovery: the thread must not grow under it."""
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
            with self.lock(thread_id), self._store.write() as writer:
                thread = writer.thread(thread_id)
                self.refuse_unfinished(writer, thread)
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
        agents: Collection[str] = (),
        dry_run: bool = False,
        force: bool = False,
        calling_run: str = "",
        progress: Progress = silent,
    ) -> Rewound:
        """Take the conversation with its memory (``memory``) and the files back to an entry of the active branch.

        ``files`` is None: as the runtime's policy says, for a thread with a workspace. ``before``: the entry is a user
        message; to what it follows, and to the files of its own checkpoint. Where the thread ran in several workspaces,
        ``workspace_id`` says which files, or ``agents`` in whose. ``calling_run`` asks for it.
        """

        def attempt(passage: Passage, dry: bool) -> Rewound:
            told = silent if passage.probing else progress
            return self._rewind(thread_id, to_entry_id, files, memory, before, workspace_id, agents, passage, dry, told)

        return self._passages.rewind(thread_id, attempt, dry_run=dry_run, force=force, calling_run=calling_run)

    def _rewind(
        self,
        thread_id: str,
        to_entry_id: str,
        files: bool | None,
        memory: bool,
        before: bool,
        workspace_id: str,
        agents: Collection[str],
        passage: Passage,
        dry_run: bool,
        progress: Progress,
    ) -> Rewound:
        with self.lock(thread_id):
            with self._store.read() as reader:
                thread = reader.thread(thread_id)
                if files is None:
                    files = bool(thread.workspace_id) and effective(reader).rewind_files
                if not files and not memory:
                    raise CogfsError(Reason.VALIDATION_ERROR, "a rewind of neither conversation nor files does nothing")
                reader.entry(thread_id, to_entry_id)
                branch = reader.branch(thread_id, thread.leaf_id)
                self.refuse_unfinished(reader, thread)
                place = next((i for i, entry in enumerate(branch) if entry.id == to_entry_id), None)
                if place is None:
                    raise CogfsError(
                        Reason.VALIDATION_ERROR, f"the entry {to_entry_id} is not on the thread's active branch"
                    )
                end = place if before else place + 1
                cut = tuple(entry.id for entry in branch[end:])
                point = branch[end - 1].id if end else ""
                places: Collection[str] = (workspace_id,) if workspace_id else ()
                if files and agents and not places:
                    places = workspaces_of(reader, thread, agents)
                if before:
                    found = own_checkpoint(branch[place], files)
                else:
                    found = checkpoint_at(reader, branch[:end], places) if files else None
                remembered = shift(reader, thread_id, point) if memory else NO_SHIFT
            conversation = Conversation(memory, cut if memory else (), thread.leaf_id)
            if found is None:
                if files:
                    raise CogfsError(
                        Reason.VALIDATION_ERROR, f"no checkpoint stands at or before the entry {to_entry_id}"
                    )
                passage.enter(thread_id, "")
                if not dry_run and cut:
                    with self._store.write() as writer:
                        move_leaf(writer, self._moved(thread, point, follow=False))
                        drop(writer, passage.drops, REWOUND)
                return Rewound(conversation, memory=remembered, runs=passage.report(dropping=bool(cut)))
            workspace, snapshot = usable(self._store, self._workspace, found, places)
            occupied_by = passage.enter(thread_id, workspace.id)
            dropping = bool(conversation.cut)
            leaf = point if memory else thread.leaf_id
            after = self._moved(thread, leaf, follow=found.exact and memory)
            # Files that are right already still follow, where they did.
            stays = leaf == thread.leaf_id and thread.files_follow >= after.files_follow
            request = Request(
                snapshot.id,
                dry_run=dry_run,
                force=passage.force,
                busy_reason=Reason.WORKSPACE_BUSY,
                thread=after,
                thread_before=thread,
                thread_stays=stays,
                to_be_undone=True,
                occupied_by=occupied_by,
                probing=passage.probing,
                drops=passage.drops if dropping else (),
            )
            done = Restoration(workspace).restore(request, progress)
        return Rewound(
            conversation,
            done,
            found.entry.id,
            found.exact,
            workspace.id,
            memory=remembered,
            runs=passage.report(dropping=dropping),
        )

    @staticmethod
    def _moved(thread: ThreadRow, leaf_id: str, *, follow: bool) -> ThreadRow:
        return msgspec.structs.replace(thread, leaf_id=leaf_id, files_follow=follow, updated_ns=time.time_ns())

    # --- undo ---------------------------------------------------------------------------------------------------------

    def undo(self, workspace_id: str, *, dry_run: bool = False, force: bool = False) -> Undone:
        """Take back the last restore of a workspace, and the rewind that it was part of when nothing came after it."""
        last = self._last_restore(self._workspace(workspace_id))

        def attempt(passage: Passage, dry: bool) -> Undone:
            return self._undo(workspace_id, last, passage, dry)

        thread_id = last.thread_id if self._thread_to_undo(last)[0] is not None else ""
        return self._passages.undo(thread_id, attempt, dry_run=dry_run, force=force)

    def _undo(self, workspace_id: str, last: UndoRow, passage: Passage, dry_run: bool) -> Undone:
        workspace = self._workspace(workspace_id)
        # The thread's lock comes first, and what was read before it was held is read again.
        with self.lock(last.thread_id or workspace_id), workspace.lock:
            if self._last_restore(workspace) != last:
                raise CogfsError(Reason.BUSY, "another restore of the workspace came in between; look again")
            thread, why = self._thread_to_undo(last)
            occupied_by = passage.enter(thread.id if thread is not None else "", workspace_id)
            conversation = None
            after = None
            remembered = None
            drops: tuple[str, ...] = ()
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
                # As a rewind: what waits to go on after an entry that is cut cannot.
                drops = passage.drops if conversation.cut else ()
                with self._store.read() as reader:
                    remembered = shift(reader, thread.id, last.previous_leaf_id)
            request = Request(
                last.safety_snapshot_id,
                paths=last.paths,
                missing_ok=True,
                dry_run=dry_run,
                force=passage.force,
                thread=after,
                thread_before=thread,
                occupied_by=occupied_by,
                probing=passage.probing,
                drops=drops,
            )
            done = Restoration(workspace).restore(request)
        thread_id = thread.id if thread is not None else ""
        return Undone(last.target_snapshot_id, done, thread_id, conversation, why, remembered)

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


def of_run(reader: Reader, draft: Draft) -> Draft:
    """A draft with what its run says. NotFound; RUN_INTERRUPTED or VALIDATION_ERROR when the run cannot write it."""
    if not draft.run_id:
        return draft
    run = reader.run(draft.run_id)
    if run.thread_id != draft.thread_id:
        raise CogfsError(Reason.VALIDATION_ERROR, f"the run {run.id} is in the thread {run.thread_id}")
    refuse_over(run)
    return replace(
        draft,
        agent=draft.agent or run.agent,
        checkpoints=run.checkpoints,
        called_by_run=bool(run.parent_run_id),
        workspace_id=run.workspace_id,
    )
