"""A thread, as its user holds it: a conversation whose user messages each name the files as they were."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, overload

from cogfs.client.arguments import (
    CheckpointsArgument,
    PathArgument,
    absolute,
    duration,
    entry_kind,
    memory_kind,
    names,
    process_id,
    strategy_of,
    struct,
    text,
    wait,
)
from cogfs.client.arguments import checkpoints as policy_of
from cogfs.client.connection import Connection, paged
from cogfs.client.errors import IOFailed
from cogfs.client.run import Run, own_name
from cogfs.client.snapshot import Changes, Pieces, Progress
from cogfs.client.workspace import Workspace
from cogfs.v1 import run_pb2, thread_pb2


class CheckpointWarning(UserWarning):
    """A message was saved without the checkpoint that was due."""


class Thread:
    """One thread. ``message`` is what the daemon said of it last."""

    def __init__(self, connection: Connection, message: thread_pb2.Thread) -> None:
        self._connection = connection
        self.message = message

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def workspace_id(self) -> str:
        """Empty for a conversation without files."""
        return self.message.workspace_id

    def refresh(self) -> Thread:
        """Asks the daemon again."""
        request = thread_pb2.GetThreadRequest(thread_id=self.id)
        self.message = self._connection.call(self._connection.threads.GetThread, request)
        return self

    def user_message(
        self,
        content: str,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        require_checkpoint: bool = False,
        wait_for: str | None = None,
        checkpoints: CheckpointsArgument | None = None,
        agent: str | None = None,
        parent_tool_call_id: str | None = None,
        run: str | None = None,
    ) -> thread_pb2.Entry:
        """Adds a user's message, after a checkpoint of the files which the entry then names.

        A checkpoint that fails is a CheckpointWarning, or, with ``require_checkpoint``, an error without the message.
        Messages that are queued while a run goes on are user's messages too, each with its own checkpoint.

        Of the run that writes the message: ``checkpoints`` is what it says of them (see ``Client.set_policy``),
        ``agent`` the agent that it is on where that is not the thread's, and ``parent_tool_call_id`` the tool call of
        another run that started it, in which case it takes none. A run that is registered has said all that: give its
        id as ``run``, or write through it (``Run.user_message``).
        """
        return self.append(
            "user",
            content,
            id=id,
            metadata=metadata,
            require_checkpoint=require_checkpoint,
            wait_for=wait_for,
            checkpoints=checkpoints,
            agent=agent,
            parent_tool_call_id=parent_tool_call_id,
            run=run,
        )

    def append(
        self,
        kind: str,
        content: str,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        require_checkpoint: bool = False,
        wait_for: str | None = None,
        checkpoints: CheckpointsArgument | None = None,
        agent: str | None = None,
        parent_tool_call_id: str | None = None,
        run: str | None = None,
    ) -> thread_pb2.Entry:
        """Adds an entry: user, assistant, tool, system, note, session_event or summary."""
        answer = self.append_entry(
            kind,
            content,
            id=id,
            metadata=metadata,
            require_checkpoint=require_checkpoint,
            wait_for=wait_for,
            checkpoints=checkpoints,
            agent=agent,
            parent_tool_call_id=parent_tool_call_id,
            run=run,
        )
        if answer.checkpoint_error:
            warnings.warn(
                f"entry {answer.entry.id} has no checkpoint: {answer.checkpoint_error}", CheckpointWarning, stacklevel=2
            )
        return answer.entry

    def append_entry(
        self,
        kind: str,
        content: str,
        *,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        require_checkpoint: bool = False,
        wait_for: str | None = None,
        checkpoints: CheckpointsArgument | None = None,
        agent: str | None = None,
        parent_tool_call_id: str | None = None,
        run: str | None = None,
    ) -> thread_pb2.AppendEntryResponse:
        """As ``append``, with the whole answer: the entry, and why a checkpoint that was due is missing."""
        request = thread_pb2.AppendEntryRequest(
            thread_id=self.id,
            kind=entry_kind(kind),
            content=text(content, "text"),
            metadata=struct(metadata),
            entry_id=text(id or "", "entry's id"),
            require_checkpoint=require_checkpoint,
            wait=wait(wait_for),
            checkpoints=policy_of(checkpoints),
            agent=text(agent or "", "agent's name"),
            parent_tool_call_id=text(parent_tool_call_id or "", "tool call's id"),
            run_id=text(run or "", "run's id"),
        )
        return self._connection.call(self._connection.threads.AppendEntry, request)

    def run(
        self,
        *,
        id: str | None = None,
        agent: str | None = None,
        workspace: Workspace | str | None = None,
        durable: bool = False,
        lease: float | None = None,
        holder: str | None = None,
        strategy: str = "wait",
        checkpoints: CheckpointsArgument | None = None,
        parent: run_pb2.ToolCall | None = None,
    ) -> Run:
        """Begins a run, which is held for as long as the block of ``with`` lasts:

        >>> with thread.run() as run:
        ...     run.user_message("Refactor the parser")
        ...     with run.tool_call("shell"):
        ...         ...

        A plain run ends with this process; a ``durable`` one has a lease (of 30 seconds, or ``lease``) that is renewed
        meanwhile, and can be taken up again by another process (``Client.run``). ``workspace``: another than the
        thread's. ``strategy``: whether it waits while a rewind holds the thread ("wait"), or is refused with ThreadBusy
        ("reject"). ``checkpoints``: what it says of them, as ``Client.set_policy``. ``parent``: the tool call of
        another run that starts it; then it takes none.
        """
        name = holder or own_name()
        request = run_pb2.StartRunRequest(
            thread_id=self.id,
            workspace_id=workspace_id(workspace),
            run_id=text(id or "", "run's id"),
            agent=text(agent or "", "agent's name"),
            kind=run_pb2.Run.DURABLE if durable else run_pb2.Run.PLAIN,
            holder=text(name, "holder's name"),
            strategy=strategy_of(strategy),
            checkpoints=policy_of(checkpoints),
            parent_run_id=parent.run_id if parent is not None else "",
            parent_tool_call_id=parent.id if parent is not None else "",
            lease=None if lease is None else duration(lease),
        )
        return Run(self._connection, self, self._connection.call(self._connection.runs.StartRun, request), name)

    def command(self, pid: int, command: str | None = None) -> run_pb2.Command:
        """Registers a process that runs in the thread's workspace: no files are restored there until it has ended, with
        all that it left behind."""
        request = run_pb2.RegisterCommandRequest(
            thread_id=self.id, pid=process_id(pid), command=text(command or "", "command's text")
        )
        return self._connection.call(self._connection.runs.RegisterCommand, request)

    def entry(self, entry_id: str) -> thread_pb2.Entry:
        """The entry with this id, on whatever branch. NotFound."""
        request = thread_pb2.GetEntryRequest(thread_id=self.id, entry_id=text(entry_id, "entry's id"))
        return self._connection.call(self._connection.threads.GetEntry, request)

    def entries(self, *, all_branches: bool = False, newest_first: bool = False) -> Iterator[thread_pb2.Entry]:
        """The active branch, or all entries; the oldest first, or with ``newest_first`` the newest."""

        def page(token: str) -> tuple[list[thread_pb2.Entry], str]:
            request = thread_pb2.ListEntriesRequest(
                thread_id=self.id, all_branches=all_branches, newest_first=newest_first, page_token=token
            )
            answer = self._connection.call(self._connection.threads.ListEntries, request)
            return list(answer.entries), answer.next_page_token

        return paged(page)

    def set_policy(self, checkpoints: CheckpointsArgument | None) -> thread_pb2.Policy:
        """What the thread says of checkpoints, as ``Client.set_policy``; None: nothing any more."""
        request = thread_pb2.SetPolicyRequest(thread_id=self.id, checkpoints=policy_of(checkpoints))
        return self._connection.call(self._connection.threads.SetPolicy, request)

    def policy(self) -> thread_pb2.Policy:
        """What the thread says of checkpoints, and what it comes to with its agent and the runtime."""
        request = thread_pb2.GetPolicyRequest(thread_id=self.id)
        return self._connection.call(self._connection.threads.GetPolicy, request)

    def rewind(
        self,
        entry_id: str,
        *,
        before: bool = False,
        files: bool | None = None,
        memory: bool = True,
        workspace: Workspace | str | None = None,
        agents: Iterable[str] = (),
        dry_run: bool = False,
        force: bool = False,
        calling_run: str | None = None,
        progress: Progress | None = None,
        changes: Changes | None = None,
    ) -> thread_pb2.RewindReport:
        """Takes the conversation and its memory back to an entry, and with ``files`` the files to what they were there.
        Without a word on ``files``, the runtime's policy says (``rewind_files``; it does not, unless it was set). With
        ``before`` the entry is a user message and goes too: back to what it follows, and to the files as they were when
        it came in.

        Where the thread ran in several workspaces, ``workspace`` says which files, or ``agents`` (names) in whose.

        ``dry_run`` changes nothing and reports what would be changed. ThreadBusy or WorkspaceBusy when something is in
        the way; ``force`` goes past open files, whose holders keep the old ones, and stops runs and commands, once it
        was seen that the files can be restored. A run that asks for it names itself as ``calling_run``.

        ``progress`` and ``changes`` as in ``Snapshot.restore``: with the latter, the report lists no paths.
        """
        request = thread_pb2.RewindRequest(
            thread_id=self.id,
            to_entry_id=text(entry_id, "entry's id"),
            before=before,
            files=files,
            memory=memory,
            workspace_id=workspace_id(workspace),
            agents=names(agents, "agent's name"),
            dry_run=dry_run,
            force=force,
            calling_run_id=text(calling_run or "", "run's id"),
        )
        pieces = Pieces(changes)
        for event in self._connection.stream(self._connection.threads.StreamRewind, request):
            if event.HasField("report"):
                if event.report.HasField("files"):
                    pieces.complete(event.report.files.restore)
                return event.report
            if event.HasField("changes"):
                pieces.take(event.changes)
            elif progress is not None:
                progress(event.progress)
        raise IOFailed("the daemon ended the rewind without a report: see `cogfsctl status` and the daemon's log")

    @overload
    def fork(
        self,
        entry_id: str,
        *,
        id: str | None = None,
        files: bool = False,
        into: PathArgument | None = None,
        workspace: Workspace | str | None = None,
        source: Workspace | str | None = None,
        agents: Iterable[str] = (),
        dry_run: Literal[False] = False,
        force: bool = False,
    ) -> Fork: ...

    @overload
    def fork(
        self,
        entry_id: str,
        *,
        id: str | None = None,
        files: bool = False,
        into: PathArgument | None = None,
        workspace: Workspace | str | None = None,
        source: Workspace | str | None = None,
        agents: Iterable[str] = (),
        dry_run: bool,
        force: bool = False,
    ) -> Fork | thread_pb2.ForkThreadReport: ...

    def fork(
        self,
        entry_id: str,
        *,
        id: str | None = None,
        files: bool = False,
        into: PathArgument | None = None,
        workspace: Workspace | str | None = None,
        source: Workspace | str | None = None,
        agents: Iterable[str] = (),
        dry_run: bool = False,
        force: bool = False,
    ) -> Fork | thread_pb2.ForkThreadReport:
        """A new thread of the branch up to an entry, with what it remembers; with ``id`` as its id.

        With ``files``, the files of a workspace are brought to what they were there, and the new thread works in it:
        ``workspace``, or the one at ``into``, or that of the checkpoint. A directory ``into`` that does not exist or is
        empty becomes a workspace, kept as that of the checkpoint is. ``source``: the workspace that the checkpoint has
        to be of, or ``agents`` (names) in whose.

        ``dry_run`` makes nothing and answers what would be made. ValidationError when the id is taken or the files
        cannot be had, ThreadBusy or WorkspaceBusy when something is in the way; ``force`` goes past open files, whose
        holders keep the old ones. After an error nothing of the fork is left.
        """
        request = thread_pb2.ForkThreadRequest(
            thread_id=self.id,
            at_entry_id=text(entry_id, "entry's id"),
            new_thread_id=text(id or "", "thread's id"),
            files=files,
            into=b"" if into is None else absolute(into),
            workspace_id=workspace_id(workspace),
            source_workspace_id=workspace_id(source),
            agents=names(agents, "agent's name"),
            dry_run=dry_run,
            force=force,
        )
        report = self._connection.call(self._connection.threads.ForkThread, request)
        return report if dry_run else Fork(self._connection, report)

    def put_memory(
        self,
        content: str,
        entries: Iterable[str] = (),
        *,
        kind: str = "item",
        name: str | None = None,
        id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> thread_pb2.Memory:
        """Remembers something, in the place of what has the ``id``. ``entries`` are the ids of those that it stands on.

        An "item" counts as long as one of them is on the active branch, and always when it stands on none. A "summary",
        or a "file" with its ``name``, belongs to one entry (the active leaf, when none is given) and is seen from the
        branches that hold it; of a file, the latest version on the branch is.
        """
        request = thread_pb2.PutMemoryRequest(
            thread_id=self.id,
            memory_id=text(id or "", "memory's id"),
            kind=memory_kind(kind),
            name=text(name or "", "file's name"),
            content=text(content, "text"),
            metadata=struct(metadata),
            entry_ids=names(entries, "entry's id"),
        )
        return self._connection.call(self._connection.threads.PutMemory, request)

    def memory(
        self, *, kind: str | None = None, active_only: bool = False, all_branches: bool = False
    ) -> Iterator[thread_pb2.Memory]:
        """What the thread remembers: items, the stale ones too unless ``active_only``, and the summaries and files that
        are seen from the active branch, with ``all_branches`` all of them."""

        def page(token: str) -> tuple[list[thread_pb2.Memory], str]:
            request = thread_pb2.ListMemoryRequest(
                thread_id=self.id,
                active_only=active_only,
                all_branches=all_branches,
                kind=memory_kind(kind),
                page_token=token,
            )
            answer = self._connection.call(self._connection.threads.ListMemory, request)
            return list(answer.memories), answer.next_page_token

        return paged(page)

    def delete(self) -> None:
        """Forgets the thread with its entries and its memory. Snapshots and forks of it stay."""
        request = thread_pb2.DeleteThreadRequest(thread_id=self.id)
        self._connection.call(self._connection.threads.DeleteThread, request)


class Fork(Thread):
    """A thread that was just forked. ``report`` tells what was made of it."""

    def __init__(self, connection: Connection, report: thread_pb2.ForkThreadReport) -> None:
        super().__init__(connection, report.thread)
        self.report = report

    @property
    def files(self) -> thread_pb2.RewindFilesReport | None:
        """What became of the files; None when they were not asked for."""
        return self.report.files if self.report.HasField("files") else None

    @property
    def snapshots_copied(self) -> int:
        """Checkpoints of the branch that the fork's workspace got as its own."""
        return self.report.snapshots_copied


def workspace_id(workspace: Workspace | str | None) -> str:
    """The id of a workspace that is given as itself or by its id; empty for None."""
    if isinstance(workspace, Workspace):
        return workspace.id
    return text(workspace or "", "workspace's id")
