"""A thread, as its user holds it: a conversation whose user messages each name the files as they were."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from cogfs.client.arguments import CheckpointsArgument, entry_kind, struct, text, wait
from cogfs.client.arguments import checkpoints as policy_of
from cogfs.client.connection import Connection, paged
from cogfs.client.workspace import Workspace
from cogfs.v1 import thread_pb2


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
    ) -> thread_pb2.Entry:
        """Adds a user's message, after a checkpoint of the files which the entry then names.

        A checkpoint that fails is a CheckpointWarning, or, with ``require_checkpoint``, an error without the message.
        Messages that are queued while a run goes on are user's messages too, each with its own checkpoint.

        Of the run that writes the message: ``checkpoints`` is what it says of them (see ``Client.set_policy``),
        ``agent`` the agent that it is on where that is not the thread's, and ``parent_tool_call_id`` the tool call of
        another run that started it, in which case it takes none.
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
        )
        return self._connection.call(self._connection.threads.AppendEntry, request)

    def entry(self, entry_id: str) -> thread_pb2.Entry:
        """The entry with this id, on whatever branch. NotFound."""
        request = thread_pb2.GetEntryRequest(thread_id=self.id, entry_id=text(entry_id, "entry's id"))
        return self._connection.call(self._connection.threads.GetEntry, request)

    def entries(self, *, all_branches: bool = False) -> Iterator[thread_pb2.Entry]:
        """The active branch, or all entries; the oldest first."""

        def page(token: str) -> tuple[list[thread_pb2.Entry], str]:
            request = thread_pb2.ListEntriesRequest(thread_id=self.id, all_branches=all_branches, page_token=token)
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
        dry_run: bool = False,
        force: bool = False,
    ) -> thread_pb2.RewindReport:
        """Takes the conversation back to an entry, and with ``files`` the files to what they were there. Without a word
        on ``files``, the runtime's policy says (``rewind_files``; it does not, unless it was set). With ``before`` the
        entry is a user message and goes too: back to what it follows, and to the files as they were when it came in.

        ``dry_run`` changes nothing and reports what would be changed. ThreadBusy or WorkspaceBusy when something is in
        the way; ``force`` goes past open files, whose holders keep the old ones.
        """
        request = thread_pb2.RewindRequest(
            thread_id=self.id,
            to_entry_id=text(entry_id, "entry's id"),
            before=before,
            files=files,
            memory=memory,
            workspace_id=workspace_id(workspace),
            dry_run=dry_run,
            force=force,
        )
        return self._connection.call(self._connection.threads.Rewind, request)


def workspace_id(workspace: Workspace | str | None) -> str:
    """The id of a workspace that is given as itself or by its id; empty for None."""
    if isinstance(workspace, Workspace):
        return workspace.id
    return text(workspace or "", "workspace's id")
