"""A client of one daemon: where workspaces, snapshots and threads come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from cogfs.client.arguments import CheckpointsArgument, PathArgument, RetentionArgument, absolute, process_id, text
from cogfs.client.arguments import checkpoints as policy_of
from cogfs.client.connection import Connection, paged
from cogfs.client.lifecycle import ensure_daemon
from cogfs.client.places import default_endpoint
from cogfs.client.run import Run, own_name
from cogfs.client.snapshot import Snapshot
from cogfs.client.thread import Thread, workspace_id
from cogfs.client.workspace import Workspace, options
from cogfs.v1 import admin_pb2, run_pb2, thread_pb2, workspace_pb2


class Client:
    """A connection to the daemon at ``endpoint``, and what can be asked of it. Safe to share between threads."""

    def __init__(self, endpoint: str) -> None:
        self._connection = Connection(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    def close(self) -> None:
        """Ends the connection. Can be repeated."""
        self._connection.close()

    def daemon(self, timeout: float | None = None) -> admin_pb2.Daemon:
        """The daemon itself. Unavailable when it does not answer, in ``timeout`` seconds if given."""
        return self._connection.call(self._connection.admin.GetDaemon, admin_pb2.GetDaemonRequest(), timeout)

    def collect(self, *, grace: timedelta | None = None, thorough: bool = False) -> admin_pb2.CollectResponse:
        """Drops what no snapshot needs any more from the store, and gives back its space.

        What came into the store no longer ago than ``grace`` (an hour) stays. With ``thorough`` every file of the store
        is rewritten of which anything is dropped, and not only those of which a quarter is, and what is like each other
        is put together where that takes less.
        """
        request = admin_pb2.CollectRequest(thorough=thorough)
        if grace is not None:
            request.grace.FromTimedelta(grace)
        return self._connection.call(self._connection.admin.Collect, request)

    def check(self, *, data: bool = False) -> admin_pb2.CheckResponse:
        """Looks whether the store is whole, and changes nothing. With ``data`` every object is read and hashed."""
        return self._connection.call(self._connection.admin.Check, admin_pb2.CheckRequest(data=data))

    def repair(self) -> admin_pb2.RepairResponse:
        """Brings back all of the store that is intact, takes contents again from files that still have them, and says
        which paths of which snapshots are lost."""
        return self._connection.call(self._connection.admin.Repair, admin_pb2.RepairRequest())

    def stats(self) -> admin_pb2.Stats:
        """What takes the store's space, by workspace and snapshot."""
        return self._connection.call(self._connection.admin.GetStats, admin_pb2.GetStatsRequest())

    def mount(
        self,
        path: PathArgument,
        at: PathArgument | None = None,
        *,
        exclude: Iterable[str] | None = None,
        max_file_bytes: int | None = None,
        retain: RetentionArgument | None = None,
        refuse_hard_links: bool | None = None,
        force_root: bool = False,
        scan: bool = False,
    ) -> Workspace:
        """Mounts a directory over itself, or ``at`` another; registers it as a workspace when it is none yet.

        With ``scan`` it is kept without a mount: each checkpoint looks at all files for what changed. The rest is as
        with a mount.

        ``exclude`` are globs as in .gitignore, on top of .git, node_modules and .cogfs; files larger than
        ``max_file_bytes`` (10 MiB; negative: no limit) are left out, and with ``refuse_hard_links`` those with more
        than one name. ``retain`` says which snapshots remain after each new one: ``{"count": 200, "max_age":
        timedelta(days=14)}`` (all). Any one of these four, when given, replaces all four of the workspace's.
        """
        request = workspace_pb2.MountRequest(
            root=absolute(path),
            at=b"" if at is None else absolute(at),
            options=options(exclude, max_file_bytes, retain, refuse_hard_links),
            force_root=force_root,
            scan=scan,
        )
        return Workspace(self._connection, self._connection.call(self._connection.workspaces.Mount, request))

    def unmount(self, path: PathArgument, *, force: bool = False) -> Workspace:
        """Takes the mount of the workspace whose root is ``path`` away, as ``Workspace.unmount``."""
        request = workspace_pb2.UnmountRequest(root=absolute(path), force=force)
        return Workspace(self._connection, self._connection.call(self._connection.workspaces.Unmount, request))

    def create_workspace(
        self,
        path: PathArgument,
        *,
        exclude: Iterable[str] | None = None,
        max_file_bytes: int | None = None,
        retain: RetentionArgument | None = None,
        refuse_hard_links: bool | None = None,
        force_root: bool = False,
    ) -> Workspace:
        """Registers a directory without mounting it. AlreadyExists."""
        request = workspace_pb2.CreateWorkspaceRequest(
            root=absolute(path),
            options=options(exclude, max_file_bytes, retain, refuse_hard_links),
            force_root=force_root,
        )
        return Workspace(self._connection, self._connection.call(self._connection.workspaces.CreateWorkspace, request))

    def workspace(self, path: PathArgument | None = None, *, id: str | None = None) -> Workspace:
        """The workspace in which ``path`` lies, or the one with this ``id``. NotFound."""
        request = workspace_pb2.GetWorkspaceRequest(
            workspace_id=text(id or "", "workspace's id"), path=b"" if path is None else absolute(path)
        )
        return Workspace(self._connection, self._connection.call(self._connection.workspaces.GetWorkspace, request))

    def workspaces(self) -> list[Workspace]:
        """All workspaces."""
        answer = self._connection.call(
            self._connection.workspaces.ListWorkspaces, workspace_pb2.ListWorkspacesRequest()
        )
        return [Workspace(self._connection, message) for message in answer.workspaces]

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """The snapshot with this id. NotFound."""
        return Snapshot.get(self._connection, snapshot_id)

    def create_thread(
        self, id: str | None = None, *, workspace: Workspace | str | None = None, agent: str | None = None
    ) -> Thread:
        """A new conversation, about the files of a workspace when one is given. AlreadyExists.

        ``agent``: whose policy of checkpoints holds in it.

        An id is 1 to 128 of A-Z a-z 0-9 . _ : - ; without one the daemon chooses.
        """
        request = thread_pb2.CreateThreadRequest(
            thread_id=text(id or "", "thread's id"),
            workspace_id=workspace_id(workspace),
            agent=text(agent or "", "agent's name"),
        )
        return Thread(self._connection, self._connection.call(self._connection.threads.CreateThread, request))

    def thread(self, thread_id: str) -> Thread:
        """The thread with this id. NotFound."""
        request = thread_pb2.GetThreadRequest(thread_id=text(thread_id, "thread's id"))
        return Thread(self._connection, self._connection.call(self._connection.threads.GetThread, request))

    def run(self, run_id: str, *, holder: str | None = None) -> Run:
        """The run with this id. It is held here once it is entered (``with``), which takes a paused one, or a durable
        one whose lease ran out, up again, by the name of ``holder`` or of this process. NotFound."""
        message = self._connection.call(
            self._connection.runs.GetRun, run_pb2.GetRunRequest(run_id=text(run_id, "run's id"))
        )
        return Run(self._connection, self.thread(message.thread_id), message, holder or own_name())

    def runs(
        self, *, thread: Thread | str | None = None, workspace: Workspace | str | None = None, ended: bool = False
    ) -> Iterator[run_pb2.Run]:
        """The runs that go on, are paused or can be taken up, the newest first; with ``ended`` also the last of those
        that are over."""
        thread_id = thread.id if isinstance(thread, Thread) else text(thread or "", "thread's id")

        def page(token: str) -> tuple[list[run_pb2.Run], str]:
            request = run_pb2.ListRunsRequest(
                thread_id=thread_id, workspace_id=workspace_id(workspace), ended=ended, page_token=token
            )
            answer = self._connection.call(self._connection.runs.ListRuns, request)
            return list(answer.runs), answer.next_page_token

        return paged(page)

    def commands(self, workspace: Workspace | str | None = None) -> list[run_pb2.Command]:
        """The registered commands of which something still runs, in a workspace or in all."""
        request = run_pb2.ListCommandsRequest(workspace_id=workspace_id(workspace))
        return list(self._connection.call(self._connection.runs.ListCommands, request).commands)

    def register_command(
        self,
        pid: int,
        *,
        workspace: Workspace | str | None = None,
        command: str | None = None,
        command_id: str | None = None,
    ) -> run_pb2.Command:
        """Registers a process in a workspace, or adds it to a command (``command_id``), as ``Thread.command``."""
        request = run_pb2.RegisterCommandRequest(
            workspace_id=workspace_id(workspace),
            pid=process_id(pid),
            command=text(command or "", "command's text"),
            command_id=text(command_id or "", "command's id"),
        )
        return self._connection.call(self._connection.runs.RegisterCommand, request)

    def set_policy(self, checkpoints: CheckpointsArgument | None, *, agent: str | None = None) -> thread_pb2.Policy:
        """What an agent, or without one the runtime (this daemon), says of checkpoints; None: nothing any more.

        ``checkpoints`` is True, False, or any of ``{"enabled": True, "exclude": [...], "max_file_bytes": N,
        "rewind_files": False}``. The most specific of run, thread, agent and runtime that says anything turns them on
        or off, and the excludes of all add up. ``rewind_files``, of the runtime alone, is what ``rewind`` does when it
        is not told whether to take the files back.
        """
        request = thread_pb2.SetPolicyRequest(checkpoints=policy_of(checkpoints), **_level(agent))
        return self._connection.call(self._connection.threads.SetPolicy, request)

    def policy(self, *, agent: str | None = None) -> thread_pb2.Policy:
        """What an agent, or without one the runtime, says of checkpoints, and what that comes to."""
        request = thread_pb2.GetPolicyRequest(**_level(agent))
        return self._connection.call(self._connection.threads.GetPolicy, request)

    def threads(self) -> Iterator[Thread]:
        """All threads, the most recently used first."""

        def page(token: str) -> tuple[list[Thread], str]:
            request = thread_pb2.ListThreadsRequest(page_token=token)
            answer = self._connection.call(self._connection.threads.ListThreads, request)
            return [Thread(self._connection, message) for message in answer.threads], answer.next_page_token

        return paged(page)


def _level(agent: str | None) -> dict[str, Any]:
    """The field of a request that names an agent, or without one the runtime."""
    return {"runtime": True} if agent is None else {"agent": text(agent, "agent's name")}


def connect(endpoint: str | None = None, *, start: bool = False) -> Client:
    """A client of the daemon at ``endpoint``, or at the usual place (``cogfs.client.places``); a context manager.

    Nothing is asked of the daemon yet. With ``start``, one is started first when none answers there.
    """
    if start:
        ensure_daemon(endpoint)
    return Client(endpoint or default_endpoint())
