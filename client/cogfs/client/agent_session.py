"""A session of an agent, as agent SDKs see it: user messages with ids of the caller's, and rewinds to before one.

It is a thread, seen otherwise: a message's id stands for the files and the conversation as they were when the message
came in. Whatever runs the agent can use it; field names of results are those of the agent SDKs. Opens no connection.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Self, TypedDict, get_args
from uuid import uuid4

from cogfs.client.agent_settings import Checkpointing, SettingsArgument, resolve
from cogfs.client.client import Client
from cogfs.client.errors import (
    AlreadyExists,
    Busy,
    CogfsError,
    IOFailed,
    NotFound,
    RunInterrupted,
    ThreadBusy,
    Unavailable,
    ValidationError,
    WorkspaceBusy,
)
from cogfs.client.thread import CheckpointWarning, Thread
from cogfs.client.workspace import Workspace
from cogfs.v1 import common_pb2, thread_pb2

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

#: Of the most recently used sessions, how many are asked whether a message is theirs.
_SEARCHED = 1000
#: Of the processes in the way, how many a sentence names.
_NAMED = 3

#: After these it is not known whether an execution was carried out; after any other error it was not.
_UNCERTAIN = (Unavailable, IOFailed, RunInterrupted)

#: What is taken back.
RewindScope = Literal["conversation", "files", "both"]
#: Of a dry run "ready", of an execution "success", of either "rejected", which changes nothing. "partial" is for
#: runtimes in which conversation and files can part; here they do not.
RewindStatus = Literal["ready", "success", "partial", "rejected"]


class RewindFilesResult(TypedDict):
    """What ``rewind_files`` answers."""

    canRewind: bool
    #: Why not, as a sentence for the user.
    error: NotRequired[str]
    #: Absolute paths of all that is changed, created or removed by it: files, links and directories.
    filesChanged: NotRequired[list[str]]
    #: Lines added since the message, in all files, which the rewind takes away.
    insertions: NotRequired[int]
    #: Lines deleted since the message, in all files, which the rewind brings back.
    deletions: NotRequired[int]


class RewindFileFailure(TypedDict):
    """A file that could not be taken back. There is none: either all files are, or none is."""

    path: str
    error: str


class RewindResult(TypedDict):
    """What ``rewind`` answers."""

    status: RewindStatus
    targetUserMessageId: str
    scope: RewindScope
    #: The entry after which the conversation goes on; None before its first one. Missing when it stays as it is.
    retainedLeafId: NotRequired[str | None]
    #: Entries that leave the conversation, the message itself first. Missing when it stays as it is.
    removedMessageIds: NotRequired[list[str]]
    #: As in RewindFilesResult; missing when the files stay as they are.
    filesChanged: NotRequired[list[str]]
    insertions: NotRequired[int]
    deletions: NotRequired[int]
    failedFiles: NotRequired[list[RewindFileFailure]]
    #: Why it is rejected, as a sentence for the user.
    error: NotRequired[str]


@dataclass(frozen=True, slots=True)
class _Done:
    """A rewind that was carried out, or in a dry run could be."""

    message: thread_pb2.Entry
    report: thread_pb2.RewindReport
    #: Where the user of the files has them.
    root: bytes

    @property
    def files_changed(self) -> list[str]:
        restore = self.report.files.restore
        names = sorted({*restore.restored, *restore.deleted})
        return [os.fsdecode(os.path.join(self.root, name) if name else self.root) for name in names]


class AgentSession:
    """One session; its id is that of its thread.

    A user message's id stands for the moment at which the message came in: rewinding to it takes back everything since,
    the message too. It counts in its own session alone, for as long as the message is in the conversation, also after
    the session was resumed by another process.
    """

    def __init__(self, cog: Client, thread: Thread, checkpointing: Checkpointing) -> None:
        """See ``start`` and ``resume``."""
        self._cog = cog
        self._checkpointing = checkpointing
        #: The conversation. What is appended to it is in the session.
        self.thread = thread

    # --- opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        cog: Client,
        workspace: Workspace | str,
        *,
        session_id: str | None = None,
        enable_file_checkpointing: bool | None = None,
        settings: SettingsArgument | None = None,
        agent: str | None = None,
    ) -> Self:
        """A new session about the files of a workspace. AlreadyExists when there is one of that id.

        User messages take checkpoints when ``enable_file_checkpointing`` or the settings say so (see
        ``cogfs.client.agent_settings.resolve``); without a word they do not.
        """
        checkpointing = resolve(enable_file_checkpointing, settings)
        if not (workspace.id if isinstance(workspace, Workspace) else workspace):
            raise ValidationError("a session needs a workspace: give the one whose files the agent works on")
        thread = cog.create_thread(session_id or str(uuid4()), workspace=workspace, agent=agent)
        session = cls(cog, thread, checkpointing)
        session._switch(bool(checkpointing.enabled))
        return session

    @classmethod
    def resume(
        cls,
        cog: Client,
        session_id: str,
        *,
        enable_file_checkpointing: bool | None = None,
        settings: SettingsArgument | None = None,
    ) -> Self:
        """A session, or any other thread, that is there already. NotFound.

        Checkpoints are taken as before, unless something is said of them; the ids of its messages go on to count.
        """
        checkpointing = resolve(enable_file_checkpointing, settings)
        session = cls(cog, cog.thread(session_id), checkpointing)
        if checkpointing.enabled is not None:
            session._switch(checkpointing.enabled)
        return session

    def _switch(self, on: bool) -> None:
        """Turns checkpoints on or off in the thread; what it says else of them stays."""
        said = self.thread.policy()
        if said.HasField("checkpoints") and said.checkpoints.enabled is on:
            return
        policy = thread_pb2.CheckpointPolicy()
        policy.CopyFrom(said.checkpoints)
        policy.enabled = on
        self.thread.set_policy(policy)

    @property
    def session_id(self) -> str:
        return self.thread.id

    @property
    def settings(self) -> dict[str, Any] | str | None:
        """The settings with the switch merged into them, or the path of their file, for the program that is run."""
        return self._checkpointing.settings

    def file_checkpointing(self) -> bool:
        """Whether user messages take checkpoints now; asks the daemon."""
        policy = self.thread.policy()
        return bool(self.thread.workspace_id) and policy.effective.enabled

    # --- messages -----------------------------------------------------------------------------------------------------

    def user_message(
        self,
        content: str,
        *,
        uuid: str | None = None,
        parent_tool_use_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        require_checkpoint: bool = False,
        wait_for: str | None = None,
    ) -> thread_pb2.Entry:
        """Adds a user's message before the agent works on it; its ``id`` is what a rewind takes.

        ``uuid`` may be chosen by the caller. A message that is replayed (same ``uuid``, same content) is the one that
        is there: it takes no second checkpoint. AlreadyExists when another message has the id, or had it before a
        rewind. ``parent_tool_use_id``: it is a subagent's message, which has no checkpoint, as that of the turn covers
        it. The rest is as in ``Thread.user_message``.
        """
        message_id = str(uuid4()) if uuid is None else _uuid(uuid)
        try:
            answer = self.thread.append_entry(
                "user",
                content,
                id=message_id,
                metadata=metadata,
                require_checkpoint=require_checkpoint,
                wait_for=wait_for,
                parent_tool_call_id=parent_tool_use_id,
            )
        except AlreadyExists:
            known = self.thread.entry(message_id)
            if known.kind != thread_pb2.Entry.USER or known.content != content:
                raise AlreadyExists(f"another message has the id {message_id}: give each message its own") from None
            if not known.active:
                raise AlreadyExists(
                    f"the message {message_id} was rewound: send it again under a new id, edited or not"
                ) from None
            return known
        if answer.checkpoint_error:
            warnings.warn(
                f"message {message_id} has no checkpoint: {answer.checkpoint_error}", CheckpointWarning, stacklevel=2
            )
        return answer.entry

    def user_messages(self) -> Iterator[thread_pb2.Entry]:
        """The user messages of the conversation with their ids, the oldest first: all to which it can be rewound."""
        return (entry for entry in self.thread.entries() if entry.kind == thread_pb2.Entry.USER)

    # --- rewinding ----------------------------------------------------------------------------------------------------

    def rewind_files(self, user_message_id: str, dry_run: bool = False) -> RewindFilesResult:
        """Brings the files to what they were when a message came in; the conversation stays.

        A dry run changes nothing, and never raises: ``canRewind`` is False and ``error`` says why. An execution raises:
        ValidationError when checkpoints are off, the id is not a user message's, it is another session's, or the
        message has no snapshot; WorkspaceBusy when something is in the way; else as ``Thread.rewind``.
        """
        try:
            done, in_the_way = self._rewind(user_message_id, "files", dry_run)
        except Exception as error:
            # Whatever it is: also a connection that was closed.
            if not dry_run:
                raise
            return {"canRewind": False, "error": str(error) or type(error).__name__}
        result: RewindFilesResult = {"canRewind": not in_the_way}
        if in_the_way:
            result["error"] = in_the_way
        restore = done.report.files.restore
        result["filesChanged"] = done.files_changed
        result["insertions"] = restore.insertions
        result["deletions"] = restore.deletions
        return result

    def rewind(self, user_message_id: str, scope: RewindScope = "both", dry_run: bool = False) -> RewindResult:
        """Takes the conversation, the files or both back to what they were when a message came in.

        The conversation then ends with what the message followed, or is empty; an edited message can be sent next. Both
        are taken back in one step, or neither is. What is refused is "rejected", with the reason in ``error``, in a dry
        run and an execution alike; an execution of which the end is not known raises Unavailable or IOFailed.
        ValidationError for a scope that there is not.
        """
        if scope not in get_args(RewindScope):
            raise ValidationError(f"{scope!r} is no scope: give one of {', '.join(get_args(RewindScope))}")
        result: RewindResult = {"status": "rejected", "targetUserMessageId": user_message_id, "scope": scope}
        try:
            done, in_the_way = self._rewind(user_message_id, scope, dry_run)
        except CogfsError as error:
            if not dry_run and isinstance(error, _UNCERTAIN):
                raise
            result["error"] = str(error)
            return result
        if in_the_way:
            result["error"] = in_the_way
        else:
            result["status"] = "ready" if dry_run else "success"
        if scope != "files":
            result["retainedLeafId"] = done.message.parent_id or None
            result["removedMessageIds"] = list(done.report.conversation.cut)
        if scope != "conversation":
            result["filesChanged"] = done.files_changed
            result["insertions"] = done.report.files.restore.insertions
            result["deletions"] = done.report.files.restore.deletions
        return result

    def _rewind(self, user_message_id: str, scope: RewindScope, dry_run: bool) -> tuple[_Done, str]:
        """The rewind, and in a dry run what would refuse it, empty when nothing would. All else is raised."""
        files = scope != "conversation"
        if files and not self.file_checkpointing():
            raise ValidationError(
                f"file checkpointing is not enabled in session {self.session_id}: {self._checkpointing.where}"
            )
        message = self._message(user_message_id)
        root = self._root(message) if files else b""
        try:
            report = self.thread.rewind(message.id, files=files, memory=scope != "files", dry_run=dry_run, before=True)
        except (Busy, ThreadBusy, WorkspaceBusy) as error:
            found = json.loads(error.metadata.get("busy_by", "[]"))
            users = [_user(one["pid"], one["command"]) for one in found if _blocks(one["kind"], one["access"])]
            raise type(error)(_in_the_way(users) if users else error.message, error.metadata) from None
        restore = report.files.restore
        users = [
            _user(one.pid, one.command)
            for one in restore.busy_by
            if _blocks(common_pb2.BusyBy.Kind.Name(one.kind), common_pb2.BusyBy.Access.Name(one.access))
        ]
        # Without files nothing but the thread's own runs is in the way.
        going = report.runs.going if not files else ()
        users += [f"the run {run_id}" for run_id in going]
        return _Done(message, report, root), _in_the_way(users) if dry_run and (restore.busy or going) else ""

    def _message(self, message_id: str) -> thread_pb2.Entry:
        """The user message with this id. ValidationError when it is none, or another session's."""
        no_message = ValidationError(
            f"{message_id!r} is not the id of a user message: give the id under which one was sent"
        )
        if not isinstance(message_id, str) or not message_id:
            raise no_message
        wanted = message_id.lower() if _UUID.fullmatch(message_id) else message_id
        try:
            message = self.thread.entry(wanted)
        except ValidationError:
            raise no_message from None
        except NotFound:
            self.thread.refresh()
            other = self._owner(wanted)
            if other is None:
                raise no_message from None
            raise ValidationError(
                f"the message {wanted} belongs to session {other}: it can be rewound there, not in {self.session_id}"
            ) from None
        if message.kind != thread_pb2.Entry.USER:
            raise no_message
        if not message.active:
            raise ValidationError(f"the message {wanted} was rewound, and is not in the conversation any more")
        return message

    def _owner(self, message_id: str) -> str | None:
        """The session that has a user message of this id."""
        for thread in itertools.islice(self._cog.threads(), _SEARCHED):
            try:
                if thread.id != self.session_id and thread.entry(message_id).kind == thread_pb2.Entry.USER:
                    return thread.id
            except NotFound:
                continue
        return None

    def _root(self, message: thread_pb2.Entry) -> bytes:
        """Where the files of a message's checkpoint are seen. ValidationError when it has none to go back to."""
        trouble = ""
        if not message.HasField("file_checkpoint"):
            trouble = "none was taken when it was sent"
        elif message.file_checkpoint.pruned:
            trouble = "it was pruned since"
        if trouble:
            raise ValidationError(f"the message {message.id} has no snapshot of the files: {trouble}")
        workspace = self._cog.workspace(id=message.file_checkpoint.workspace_id)
        return workspace.mountpoint or workspace.root


def _uuid(value: str) -> str:
    """A UUID in its usual form, in lower case."""
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        raise ValidationError(f"{value!r} is no UUID: give one as str(uuid.uuid4()) writes it")
    return value.lower()


def _blocks(kind: str, access: str) -> bool:
    """Whether what uses the files refuses a rewind: a reader does not."""
    return kind != "HANDLE" or access == "WRITE"


def _user(pid: int, command: str) -> str:
    return f"{command or 'a process'} (pid {pid})" if pid else command or "something that cannot be named"


def _in_the_way(users: Iterable[str]) -> str:
    """Why a rewind is refused, for a dry run and an execution alike."""
    distinct = list(dict.fromkeys(users))
    names = ", ".join(distinct[:_NAMED]) or "something that cannot be named"
    if len(distinct) > _NAMED:
        names += f" and {len(distinct) - _NAMED} more"
    return f"the rewind is refused: what it would change is used by {names}; end that first"
