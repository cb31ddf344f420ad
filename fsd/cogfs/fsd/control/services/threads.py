"""ThreadService: conversations, and the way back in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import grpc

from cogfs.fsd.control.completion import Progress, silent
from cogfs.fsd.control.engine import Engine
from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.fsd.control.fork import Forks
from cogfs.fsd.control.listing import Paths, page
from cogfs.fsd.control.memory import Memories
from cogfs.fsd.control.report import add_changes
from cogfs.fsd.control.services.convert import (
    DEFAULT_PAGE,
    check_content,
    checked_agent,
    checked_policy,
    entry_message,
    metadata_text,
    policy_message,
    required,
    runs_report,
    thread_message,
)
from cogfs.fsd.control.services.forks import ForkCalls
from cogfs.fsd.control.services.memory import MemoryCalls, memory_report
from cogfs.fsd.control.services.streaming import Apart
from cogfs.fsd.control.threads import Conversation, Draft, Rewound
from cogfs.store.errors import NotFound
from cogfs.store.rows import Reader
from cogfs.store.schema import EntryKind, EntryRow
from cogfs.store.store import Store
from cogfs.v1 import common_pb2, thread_pb2, thread_pb2_grpc

_NUMBER = re.compile(r"[0-9]{1,19}")

#: Keys of metadata that a client could take for a checkpoint; only the daemon says where one is.
_RESERVED = frozenset({"file_checkpoint", "file_checkpoint_at", "fileCheckpoint", "fileCheckpointAt"})


class ThreadService(ForkCalls, MemoryCalls, thread_pb2_grpc.ThreadServiceServicer):
    def __init__(self, store: Store, engine: Engine, forks: Forks) -> None:
        ForkCalls.__init__(self, store, forks)
        MemoryCalls.__init__(self, Memories(store, engine.threads))
        self._store = store
        self._engine = engine
        self._threads = engine.threads
        self._paths = Paths()

    def CreateThread(self, request: thread_pb2.CreateThreadRequest, context: grpc.ServicerContext) -> thread_pb2.Thread:
        agent = checked_agent(request.agent)
        return thread_message(self._threads.create(request.thread_id, request.workspace_id, agent))

    def GetThread(self, request: thread_pb2.GetThreadRequest, context: grpc.ServicerContext) -> thread_pb2.Thread:
        with self._store.read() as reader:
            row = reader.thread(required(request.thread_id, "thread_id"))
            return thread_message(row, reader.fork_links(row.id))

    def ListThreads(
        self, request: thread_pb2.ListThreadsRequest, context: grpc.ServicerContext
    ) -> thread_pb2.ListThreadsResponse:
        size = request.page_size or DEFAULT_PAGE
        with self._store.read() as reader:
            rows = reader.threads()
            if request.page_token:
                moment, _, thread_id = request.page_token.partition(":")
                mark = (-_number(moment), thread_id)
                rows = [row for row in rows if (-row.updated_ns, row.id) > mark]
            rows.sort(key=lambda row: (-row.updated_ns, row.id))
            more = len(rows) > size
            rows = rows[:size]
            threads = [thread_message(row, reader.fork_links(row.id)) for row in rows]
        return thread_pb2.ListThreadsResponse(
            threads=threads,
            next_page_token=f"{rows[-1].updated_ns}:{rows[-1].id}" if more else "",
        )

    def SetPolicy(self, request: thread_pb2.SetPolicyRequest, context: grpc.ServicerContext) -> thread_pb2.Policy:
        level = _level(request)
        row = None
        if request.HasField("checkpoints"):
            row = checked_policy(request.checkpoints, runtime=level == "runtime")
        self._threads.set_policy(row, agent=request.agent, thread_id=request.thread_id)
        return self._policy(request)

    def GetPolicy(self, request: thread_pb2.GetPolicyRequest, context: grpc.ServicerContext) -> thread_pb2.Policy:
        _level(request)
        return self._policy(request)

    def _policy(self, request: thread_pb2.SetPolicyRequest | thread_pb2.GetPolicyRequest) -> thread_pb2.Policy:
        row, whole = self._threads.policy(agent=request.agent, thread_id=request.thread_id)
        answer = thread_pb2.Policy(
            checkpoints=policy_message(row) if row is not None else None, effective=policy_message(whole)
        )
        match _level(request):
            case "agent":
                answer.agent = request.agent
            case "thread_id":
                answer.thread_id = request.thread_id
            case _:
                answer.runtime = True
        return answer

    def AppendEntry(
        self, request: thread_pb2.AppendEntryRequest, context: grpc.ServicerContext
    ) -> thread_pb2.AppendEntryResponse:
        if request.kind == thread_pb2.Entry.KIND_UNSPECIFIED:
            raise invalid("an entry needs a kind")
        check_content(request.content)
        forged = _RESERVED.intersection(request.metadata.fields)
        if forged:
            raise invalid(f"the metadata key {min(forged)!r} is set by the daemon alone")
        if request.run_id and (request.HasField("checkpoints") or request.parent_tool_call_id):
            raise invalid("what the run says of checkpoints, and what started it, is said in StartRun")
        draft = Draft(
            required(request.thread_id, "thread_id"),
            EntryKind[thread_pb2.Entry.Kind.Name(request.kind)],
            request.content,
            metadata_text(request.metadata),
            request.entry_id,
            request.require_checkpoint,
            checked_agent(request.agent),
            checked_policy(request.checkpoints) if request.HasField("checkpoints") else None,
            bool(request.parent_tool_call_id),
            request.run_id,
        )
        entry, trouble = self._threads.append(draft)
        if request.wait != common_pb2.WAIT_UNSPECIFIED and entry.file_checkpoint is not None:
            try:
                self._engine.workspace(entry.file_checkpoint.workspace_id).sealed(entry.file_checkpoint.snapshot_id)
            except CogfsError as error:
                # The message is saved, whatever becomes of its checkpoint.
                trouble = str(error)
            except NotFound:
                trouble = "the checkpoint was taken, and pruned for newer ones before this was answered"
        return thread_pb2.AppendEntryResponse(entry=entry_message(entry, active=True), checkpoint_error=trouble)

    def GetEntry(self, request: thread_pb2.GetEntryRequest, context: grpc.ServicerContext) -> thread_pb2.Entry:
        with self._store.read() as reader:
            thread = reader.thread(required(request.thread_id, "thread_id"))
            entry = reader.entry(thread.id, required(request.entry_id, "entry_id"))
            active = self._paths.of(reader, thread).has(entry.sequence)
            pruned = _pruned(reader, [entry])
        return entry_message(entry, active=active, pruned=pruned)

    def ListEntries(
        self, request: thread_pb2.ListEntriesRequest, context: grpc.ServicerContext
    ) -> thread_pb2.ListEntriesResponse:
        size = request.page_size or DEFAULT_PAGE
        last = _number(request.page_token) if request.page_token else 0
        with self._store.read() as reader:
            thread = reader.thread(required(request.thread_id, "thread_id"))
            path = self._paths.of(reader, thread)
            only = None if request.all_branches else path
            rows = page(reader, thread.id, only, last, size + 1, newest_first=request.newest_first)
            more = len(rows) > size
            rows = rows[:size]
            pruned = _pruned(reader, rows)
        return thread_pb2.ListEntriesResponse(
            entries=[entry_message(row, active=path.has(row.sequence), pruned=pruned) for row in rows],
            next_page_token=str(rows[-1].sequence) if more else "",
        )

    def Rewind(self, request: thread_pb2.RewindRequest, context: grpc.ServicerContext) -> thread_pb2.RewindReport:
        done = self._rewind(request)
        return _rewind_report(request, done, done.files.whole(self._store) if done.files is not None else None)

    def StreamRewind(
        self, request: thread_pb2.RewindRequest, context: grpc.ServicerContext
    ) -> Iterator[thread_pb2.RewindEvent]:
        apart = Apart("rewind", lambda progress: self._rewind(request, progress))
        for event in apart.progress():
            yield thread_pb2.RewindEvent(progress=event)
        done = apart.result
        if done.files is not None:
            for piece in done.files.changes(self._store):
                add_changes(done.files.report, piece)
                yield thread_pb2.RewindEvent(changes=piece)
        report = _rewind_report(request, done, done.files.report if done.files is not None else None)
        yield thread_pb2.RewindEvent(report=report)

    def _rewind(self, request: thread_pb2.RewindRequest, progress: Progress = silent) -> Rewound:
        return self._threads.rewind(
            required(request.thread_id, "thread_id"),
            required(request.to_entry_id, "to_entry_id"),
            before=request.before,
            files=request.files if request.HasField("files") else None,
            memory=request.memory if request.HasField("memory") else True,
            workspace_id=request.workspace_id,
            agents=[checked_agent(required(agent, "agents")) for agent in request.agents],
            dry_run=request.dry_run,
            force=request.force,
            calling_run=request.calling_run_id,
            progress=progress,
        )

    def Undo(self, request: thread_pb2.UndoRequest, context: grpc.ServicerContext) -> thread_pb2.UndoReport:
        workspace_id = required(request.workspace_id, "workspace_id")
        done = self._threads.undo(workspace_id, dry_run=request.dry_run, force=request.force)
        report = thread_pb2.UndoReport(
            workspace_id=workspace_id,
            dry_run=request.dry_run,
            undone_snapshot_id=done.undone_snapshot_id,
            files=done.files.whole(self._store),
            thread_id=done.thread_id,
            files_only_reason=done.files_only_reason,
        )
        if done.conversation is not None:
            report.conversation.CopyFrom(_conversation(done.conversation))
        if done.memory is not None:
            report.memory.CopyFrom(memory_report(done.memory))
        return report

    def DeleteThread(
        self, request: thread_pb2.DeleteThreadRequest, context: grpc.ServicerContext
    ) -> thread_pb2.DeleteThreadResponse:
        self._threads.delete(required(request.thread_id, "thread_id"))
        return thread_pb2.DeleteThreadResponse()


def _level(request: thread_pb2.SetPolicyRequest | thread_pb2.GetPolicyRequest) -> str:
    """Which of the levels a request names. VALIDATION_ERROR when it is none."""
    level = request.WhichOneof("level")
    if level is None or (level == "runtime" and not request.runtime):
        raise invalid("say whose policy it is: runtime (true), an agent by its name, or a thread by its id")
    if level == "agent":
        checked_agent(required(request.agent, "agent"))
    return level


def _pruned(reader: Reader, entries: Iterable[EntryRow]) -> set[str]:
    """The snapshots that entries name and that are not kept any more."""
    named = [one for entry in entries for one in (entry.file_checkpoint, entry.file_checkpoint_at)]
    return {one.snapshot_id for one in named if one is not None and not reader.has_snapshot(one.snapshot_id)}


def _number(token: str) -> int:
    """A number in a page token, as this service writes it."""
    if not _NUMBER.fullmatch(token):
        raise invalid("the page token is not one that this call gave")
    return int(token)


def _conversation(done: Conversation) -> thread_pb2.ConversationReport:
    return thread_pb2.ConversationReport(rewound=done.rewound, cut=done.cut, previous_leaf_id=done.previous_leaf_id)


def _rewind_report(
    request: thread_pb2.RewindRequest, done: Rewound, files: common_pb2.RestoreReport | None
) -> thread_pb2.RewindReport:
    """``files``: what became of them, as far as it is told in one message."""
    report = thread_pb2.RewindReport(
        thread_id=request.thread_id,
        to_entry_id=request.to_entry_id,
        dry_run=request.dry_run,
        conversation=_conversation(done.conversation),
        runs=runs_report(done.runs),
        memory=memory_report(done.memory),
    )
    if files is not None:
        report.files.CopyFrom(
            thread_pb2.RewindFilesReport(
                restore=files,
                entry_id=done.entry_id,
                exact=done.exact,
                workspace_id=done.workspace_id,
                safety_snapshot_id=files.safety_snapshot_id,
            )
        )
    return report
