"""Forks: a new thread of the branch up to an entry, with what it remembers and, when asked for, with its files.

Everything is checked first. Then the files are restored, and the transaction that completes this is the one that makes
the thread; so there is never a thread whose files are not its own. Where they go into another workspace than that of
the checkpoint, that one gets the branch's snapshots as its own: rows, as all content is shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from cogfs.fsd.control.checkpoints import Found, checkpoint_at, usable, workspaces_of
from cogfs.fsd.control.copying import copy_of
from cogfs.fsd.control.errors import BusyBy, CogfsError, invalid, show
from cogfs.fsd.control.newplace import NewPlaces, Spot
from cogfs.fsd.control.passage import NO_RUNS, Passage, Passages, RunsReport
from cogfs.fsd.control.report import Outcome
from cogfs.fsd.control.restoration import Fork, Request, Restoration
from cogfs.fsd.control.standing import shifted
from cogfs.fsd.control.threads import Threads
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.errors import NotFound
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import (
    EntryOrigin,
    EntryRow,
    FileCheckpointRow,
    ForkLinkRow,
    ForkRow,
    MemoryKind,
    MemoryRow,
    SnapshotRow,
    SnapshotState,
    ThreadRow,
    WorkspaceRow,
)
from cogfs.store.steps import step
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A fork that is asked for."""

    thread_id: str
    at_entry_id: str
    #: Empty: chosen here.
    new_thread_id: str = ""
    files: bool = False
    workspace_id: str = ""
    into: bytes = b""
    source_workspace_id: str = ""
    agents: tuple[str, ...] = ()
    dry_run: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class ForkedFiles:
    """What became of the files."""

    outcome: Outcome
    #: The entry whose checkpoint it was.
    entry_id: str
    exact: bool
    #: Empty in a dry run where there is none yet.
    workspace_id: str
    #: The root of the workspace that was made; empty: there was one.
    made: bytes = b""
    snapshots: int = 0


@dataclass(frozen=True, slots=True)
class Forked:
    """The outcome of a fork, or with a dry run what it would be."""

    thread: ThreadRow
    entries: int
    memories: int
    #: None when they were not asked for.
    files: ForkedFiles | None = None
    runs: RunsReport = NO_RUNS


@dataclass(frozen=True, slots=True)
class _Branch:
    """What of a thread a fork takes, and the checkpoint for its end."""

    source: ThreadRow
    entries: list[EntryRow]
    memories: list[MemoryRow]
    found: Found | None

    @property
    def point(self) -> EntryRow:
        return self.entries[-1]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the new thread."""

    thread: ThreadRow
    entries: list[EntryRow]
    memories: list[MemoryRow]
    link: ForkLinkRow
    source_id: str

    def write(self, writer: Writer) -> None:
        """VALIDATION_ERROR when the id is taken."""
        _refuse_taken(writer, self.thread.id)
        writer.put_thread(self.thread)
        for entry in self.entries:
            writer.put_entry(entry)
        for memory in self.memories:
            writer.put_memory(memory)
        writer.put_fork_link(self.source_id, self.link)
        step("fork.written")


@dataclass(slots=True)
class _Copies:
    """The branch's snapshots as another workspace gets them, by the ids of those that they are copies of."""

    workspace_id: str
    root: bytes
    rows: dict[str, SnapshotRow] = field(default_factory=dict)

    def write(self, writer: Writer) -> None:
        for row in self.rows.values():
            writer.put_snapshot(row)

    def checkpoint(self, row: FileCheckpointRow | None) -> FileCheckpointRow | None:
        """What a copied entry names in the place of ``row``."""
        copy = self.rows.get(row.snapshot_id) if row is not None else None
        return row if copy is None else FileCheckpointRow(copy.id, self.workspace_id, self.root)


class Forks:
    """Forks of all threads."""

    def __init__(
        self,
        store: Store,
        threads: Threads,
        workspace: Callable[[str], Workspace],
        new_places: NewPlaces,
        passages: Passages,
    ) -> None:
        """``workspace`` finds a workspace by id; it raises NotFound."""
        self._passages = passages
        self._store = store
        self._threads = threads
        self._workspace = workspace
        self._new_places = new_places

    def fork(self, request: ForkRequest) -> Forked:
        """Make a thread of another one's branch, or with ``dry_run`` tell what that would be.

        NotFound: there is no such thread, entry or workspace. VALIDATION_ERROR: the id is taken, or the files cannot be
        had. THREAD_BUSY, WORKSPACE_BUSY: as a rewind. DENIED and others: as a restore. Whatever is raised, nothing of
        the fork is left.
        """
        if not request.files and (
            request.workspace_id or request.into or request.source_workspace_id or request.agents
        ):
            raise invalid("a workspace, a directory or an agent of a fork is for its files: ask for these, too")
        if request.workspace_id and request.into:
            raise invalid("name the workspace of a fork by its id or by its directory, and by one of them only")

        def attempt(passage: Passage, dry: bool) -> Forked:
            return self._fork(replace(request, dry_run=dry), passage)

        return self._passages.rewind(request.thread_id, attempt, dry_run=request.dry_run, force=request.force)

    def _fork(self, request: ForkRequest, passage: Passage) -> Forked:
        with self._threads.lock(request.thread_id):
            with self._store.read() as reader:
                branch = self._branch(reader, request)
                _refuse_taken(reader, request.new_thread_id)
            thread_id = request.new_thread_id or new_id("thread")
            # Nobody makes another thread of this id meanwhile. Who waits here for a lock that somebody holds who waits
            # for ours cannot be: a thread that is forked is there, and one that is to be made is not.
            with self._threads.lock(thread_id):
                if request.files:
                    return self._with_files(request, branch, thread_id, passage)
                passage.enter(request.thread_id, "")
                follow = branch.point.id == branch.source.leaf_id and branch.source.files_follow
                rows = _copied(branch, thread_id, branch.source.workspace_id, None, follow=follow)
                if not request.dry_run:
                    with self._store.write() as writer:
                        rows.write(writer)
                return self._forked(request, rows, passage)

    def _branch(self, reader: Reader, request: ForkRequest) -> _Branch:
        source = reader.thread(request.thread_id)
        self._threads.refuse_unfinished(reader, source)
        entries = reader.branch(source.id, reader.entry(source.id, request.at_entry_id).id)
        found = checkpoint_at(reader, entries, self._places(reader, source, request))
        return _Branch(source, entries, list(reader.memories(source.id)), found)

    @staticmethod
    def _places(reader: Reader, source: ThreadRow, request: ForkRequest) -> Collection[str]:
        """The workspaces that the checkpoint may be of; none: any."""
        if request.source_workspace_id:
            return (request.source_workspace_id,)
        return workspaces_of(reader, source, request.agents) if request.agents else ()

    @staticmethod
    def _forked(request: ForkRequest, rows: _Rows, passage: Passage, files: ForkedFiles | None = None) -> Forked:
        thread = rows.thread
        if request.dry_run:
            thread = msgspec.structs.replace(thread, id=request.new_thread_id)
        return Forked(thread, len(rows.entries), len(rows.memories), files, passage.report(dropping=False))

    # --- files --------------------------------------------------------------------------------------------------------

    def _with_files(self, request: ForkRequest, branch: _Branch, thread_id: str, passage: Passage) -> Forked:
        found = branch.found
        if found is None:
            raise invalid(f"no checkpoint stands at or before the entry {branch.point.id}")
        source, snapshot = usable(self._store, self._workspace, found, ())
        snapshot = source.sealed(snapshot.id)
        here = source.row()
        row, spot = self._target(request, here)
        step("fork.checked")
        # What is made for the fork alone has nobody in it.
        occupied_by = passage.enter(request.thread_id, row.id if spot is None else "")
        if spot is None:
            return self._into(request, branch, thread_id, row, found, snapshot, passage, occupied_by)
        if request.dry_run:
            copies = self._copies(branch, here.id, None, wait=False)
            plan = self._new_places.preview(spot, snapshot, occupied_by)
            files = ForkedFiles(plan, found.entry.id, found.exact, "", spot.root, len(copies.rows))
            rows = _copied(branch, thread_id, "", copies, follow=found.exact)
            return self._forked(request, rows, passage, files)
        made = self._new_places.make(spot, here, thread_id)
        try:
            return self._into(request, branch, thread_id, made, found, snapshot, passage, made=spot.root)
        except BaseException:
            self._new_places.take_back(made.id)
            raise

    def _target(self, request: ForkRequest, source: WorkspaceRow) -> tuple[WorkspaceRow, Spot | None]:
        """The workspace that gets the files, or where it is to be made (with the row that it is made like)."""
        if request.into:
            known = self._new_places.workspace_at(request.into)
            if known is None:
                return source, self._new_places.check(request.into, source)
        else:
            known = self._workspace(request.workspace_id or source.id).row()
        if known.new_place is not None:
            # It may be taken away again.
            raise CogfsError(
                Reason.WORKSPACE_BUSY,
                f"the workspace {show(known.root)} is being made for the fork {known.new_place.thread_id}: try again",
            )
        return known, None

    def _into(
        self,
        request: ForkRequest,
        branch: _Branch,
        thread_id: str,
        row: WorkspaceRow,
        found: Found,
        snapshot: SnapshotRow,
        passage: Passage,
        occupied_by: tuple[BusyBy, ...] = (),
        made: bytes = b"",
    ) -> Forked:
        """Into a workspace that there is."""
        copies = self._copies(branch, snapshot.workspace_id, row, wait=not request.dry_run)
        rows = _copied(branch, thread_id, row.id, copies, follow=found.exact)

        def finish(writer: Writer) -> None:
            rows.write(writer)
            if made:
                self._new_places.keep(writer, row.id)

        target = copies.rows.get(snapshot.id)
        part = Fork(ForkRow(thread_id, tuple(copy.id for copy in copies.rows.values())), copies.write, finish, target)
        wanted = Request(
            target.id if target is not None else snapshot.id,
            dry_run=request.dry_run,
            force=passage.force,
            busy_reason=Reason.WORKSPACE_BUSY,
            occupied_by=occupied_by,
            to_be_undone=True,
            probing=passage.probing,
            fork=part,
        )
        done = Restoration(self._workspace(row.id)).restore(wanted)
        if request.dry_run:
            # There is no copy whose id could be told.
            done.report.snapshot_id = snapshot.id
        files = ForkedFiles(done, found.entry.id, found.exact, row.id, made, len(copies.rows))
        return self._forked(request, rows, passage, files)

    def _copies(self, branch: _Branch, source_id: str, row: WorkspaceRow | None, *, wait: bool) -> _Copies:
        """The snapshots of the branch that are of the workspace ``source_id``, for another one (None: one that is not
        made yet); none for itself.

        Without ``wait`` also those that are not captured yet, which is good enough to count them.
        """
        copies = _Copies(row.id, row.root) if row is not None else _Copies("", b"")
        if copies.workspace_id == source_id:
            return copies
        named = [one for entry in branch.entries for one in (entry.file_checkpoint, entry.file_checkpoint_at)]
        named.append(branch.found.checkpoint if branch.found is not None else None)
        for one in named:
            if one is None or one.workspace_id != source_id or one.snapshot_id in copies.rows:
                continue
            try:
                with self._store.read() as reader:
                    snapshot = reader.snapshot(one.snapshot_id)
                if wait and snapshot.state is SnapshotState.FROZEN:
                    snapshot = self._workspace(source_id).sealer.wait(one.snapshot_id)
            except NotFound:
                # It was pruned. The fork goes on naming it, and shows that.
                continue
            copies.rows[snapshot.id] = copy_of(snapshot, copies.workspace_id)
        return copies


def _copied(branch: _Branch, thread_id: str, workspace_id: str, copies: _Copies | None, *, follow: bool) -> _Rows:
    """The new thread's rows. ``follow``: the files are those that belong to its end."""
    now = time.time_ns()
    source, point, found = branch.source, branch.point, branch.found

    def named(row: FileCheckpointRow | None) -> FileCheckpointRow | None:
        return row if copies is None else copies.checkpoint(row)

    entries = []
    for number, entry in enumerate(branch.entries, 1):
        at = entry.file_checkpoint_at
        if entry is point and found is not None and found.follows:
            at = found.checkpoint
        entries.append(
            msgspec.structs.replace(
                entry,
                thread_id=thread_id,
                sequence=number,
                file_checkpoint=named(entry.file_checkpoint),
                file_checkpoint_at=named(at),
                copied_from=EntryOrigin(source.id, entry.id),
            )
        )
    thread = ThreadRow(
        thread_id,
        workspace_id,
        point.id,
        len(entries),
        now,
        now,
        files_follow=follow,
        agent=source.agent,
        checkpoints=source.checkpoints,
        forked_from=EntryOrigin(source.id, point.id),
    )
    places = {entry.id: entry.sequence for entry in entries}
    memories = _remembered(branch.memories, thread_id, places)
    return _Rows(thread, entries, memories, ForkLinkRow(thread_id, point.id, now), source.id)


def _remembered(memories: Sequence[MemoryRow], thread_id: str, places: Mapping[str, int]) -> list[MemoryRow]:
    """The memories that a fork takes along: those that stand on what it copies, by that alone, and those that stand on
    nothing. Of a file also the earlier versions, to which the fork can be rewound."""
    kept = []
    for row in memories:
        stands_on = tuple(entry for entry in row.entry_ids if entry in places)
        if stands_on or (row.kind is MemoryKind.ITEM and not row.entry_ids):
            kept.append(msgspec.structs.replace(row, thread_id=thread_id, entry_ids=stands_on))
    leaf_id = max(places, key=lambda entry: places[entry])
    changed = {row.id: row for row in shifted(kept, places, leaf_id)[1]}
    return [changed.get(row.id, row) for row in kept]


def _refuse_taken(reader: Reader, thread_id: str) -> None:
    if reader.has_thread(thread_id):
        raise CogfsError(Reason.VALIDATION_ERROR, f"there is a thread {thread_id} already: choose another id")
