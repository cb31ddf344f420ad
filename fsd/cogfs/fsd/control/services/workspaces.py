"""WorkspaceService: which directories are workspaces, and their mounts."""

from __future__ import annotations

import grpc
import msgspec

from cogfs.fsd.control import mounts, roots, users
from cogfs.fsd.control.errors import CogfsError, invalid, show
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import EngineState, Workspaces
from cogfs.fsd.control.registry import Registry
from cogfs.fsd.control.report import busy_messages
from cogfs.fsd.control.runstates import OVER
from cogfs.fsd.control.services.convert import (
    checked_globs,
    checked_retention,
    checked_size,
    retention_message,
    timestamp,
)
from cogfs.fsd.control.supervisor import ServingState, Supervisor
from cogfs.store.schema import WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from cogfs.v1 import common_pb2, workspace_pb2, workspace_pb2_grpc
from cogfs.v1.reasons import Reason

_OUTCOMES = {
    "forward": workspace_pb2.Recovery.FORWARD,
    "back": workspace_pb2.Recovery.BACK,
    "failed": workspace_pb2.Recovery.FAILED,
}


class WorkspaceService(workspace_pb2_grpc.WorkspaceServiceServicer):
    def __init__(
        self, places: Places, store: Store, engine: Workspaces, supervisor: Supervisor, registry: Registry
    ) -> None:
        self._places = places
        self._store = store
        self._engine = engine
        self._supervisor = supervisor
        self._registry = registry

    def CreateWorkspace(
        self, request: workspace_pb2.CreateWorkspaceRequest, context: grpc.ServicerContext
    ) -> workspace_pb2.Workspace:
        path = roots.absolute(request.root, "the root")
        row = self._registry.at(path, exactly=True)
        if row is not None:
            raise _registered(row)
        return self._answer(self._registry.create(path, _options(request.options), force=request.force_root).id)

    def Mount(self, request: workspace_pb2.MountRequest, context: grpc.ServicerContext) -> workspace_pb2.Workspace:
        options = _options(request.options) if request.HasField("options") else None
        if request.scan and request.at:
            raise invalid("a workspace that is scanned is not mounted anywhere: leave the mountpoint out")
        row = self._chosen(request.workspace_id, request.root, exactly=True)
        new = row is None
        if row is None:
            row = self._registry.create(
                roots.absolute(request.root, "the root"), options or WorkspaceOptions(), force=request.force_root
            )
        try:
            mountpoint = row.root if request.scan else self._mountpoint(row, request.at)
            if options is not None and options != row.options:
                self._set_options(row.id, options)
            try:
                self._supervisor.mount(row.id, mountpoint, scanned=request.scan)
            except BaseException:
                if options is not None:
                    self._set_options(row.id, row.options)
                raise
        except BaseException:
            if new:
                self._registry.forget_unless_used(row.id)
            raise
        return self._answer(row.id)

    def Unmount(self, request: workspace_pb2.UnmountRequest, context: grpc.ServicerContext) -> workspace_pb2.Workspace:
        row = self._chosen(request.workspace_id, request.root, exactly=True)
        if row is None:
            raise _unknown(request.root)
        self._supervisor.unmount(row.id, force=request.force)
        return self._answer(row.id)

    def GetWorkspace(
        self, request: workspace_pb2.GetWorkspaceRequest, context: grpc.ServicerContext
    ) -> workspace_pb2.Workspace:
        row = self._chosen(request.workspace_id, request.path, exactly=False)
        if row is None:
            raise _unknown(request.path)
        return self._answer(row.id)

    def ListWorkspaces(
        self, request: workspace_pb2.ListWorkspacesRequest, context: grpc.ServicerContext
    ) -> workspace_pb2.ListWorkspacesResponse:
        with self._store.read() as reader:
            counted = [(row, reader.snapshot_count(row.id)) for row in reader.workspaces()]
        return workspace_pb2.ListWorkspacesResponse(
            workspaces=[
                message(row, count, self._supervisor.state(row.id), self._engine.state(row.id))
                for row, count in counted
            ]
        )

    def DeleteWorkspace(
        self, request: workspace_pb2.DeleteWorkspaceRequest, context: grpc.ServicerContext
    ) -> workspace_pb2.DeleteWorkspaceResponse:
        row = self._by_id(request.workspace_id)
        with self._engine.lock(row.id):
            row = self._by_id(row.id)
            if row.mount_wanted or mounts.of_workspace(row.id):
                raise CogfsError(Reason.BUSY, f"{show(row.root)} is {_kept(row)}: unmount it first")
            with self._store.write() as writer:
                for thread in writer.threads():
                    if thread.workspace_id == row.id:
                        raise CogfsError(
                            Reason.BUSY,
                            f"the thread {thread.id} works in {show(row.root)}, whose snapshots it names",
                            thread_id=thread.id,
                        )
                for run in writer.runs():
                    if run.workspace_id == row.id and run.state not in OVER:
                        raise CogfsError(Reason.BUSY, f"the run {run.id} works in {show(row.root)}", run_id=run.id)
                for command in writer.commands():
                    if command.workspace_id == row.id:
                        raise CogfsError(Reason.BUSY, f"the command {command.command!r} runs in {show(row.root)}")
                writer.delete_workspace(row.id)
            self._engine.forget(row.id)
        return workspace_pb2.DeleteWorkspaceResponse()

    def ListHandles(
        self, request: workspace_pb2.ListHandlesRequest, context: grpc.ServicerContext
    ) -> workspace_pb2.ListHandlesResponse:
        row = self._by_id(request.workspace_id)
        link = self._supervisor.link(row.id)
        if link is None:
            raise invalid(f"{show(row.root)} is neither mounted nor scanned: nobody looks at what is open in it")
        return workspace_pb2.ListHandlesResponse(
            handles=[
                workspace_pb2.Handle(
                    path=handle.path,
                    pid=handle.pid,
                    command=handle.command,
                    access=common_pb2.BusyBy.WRITE if handle.writable else common_pb2.BusyBy.READ,
                    since=timestamp(handle.since_ns),
                    deleted=handle.deleted,
                    directory=handle.directory,
                )
                for handle in users.open_handles(link)
            ]
        )

    # Rows.

    def _set_options(self, workspace_id: str, options: WorkspaceOptions) -> None:
        with self._engine.lock(workspace_id), self._store.write() as writer:
            row = writer.workspace(workspace_id)
            writer.put_workspace(msgspec.structs.replace(row, options=options))

    def _mountpoint(self, row: WorkspaceRow, at: bytes) -> bytes:
        if not at:
            return row.root
        place = roots.absolute(at, "the mountpoint")
        if self._supervisor.link(row.id) is not None or any(
            entry.mountpoint == place for entry in mounts.of_workspace(row.id)
        ):
            # Mounted already, or dead at that very place: the supervisor tells, or clears it.
            return place
        with self._store.read() as reader:
            rows = reader.workspaces()
        return roots.check_mountpoint(place, row.root, rows, self._places, mounts.table())

    def _chosen(self, workspace_id: str, path: bytes, *, exactly: bool) -> WorkspaceRow | None:
        """The workspace that a request names by exactly one of two. NOT_FOUND for an id, None for a path."""
        if bool(workspace_id) == bool(path):
            raise invalid("name the workspace by its id or by a path, and by one of them only")
        if workspace_id:
            return self._by_id(workspace_id)
        return self._registry.at(roots.absolute(path, "the path"), exactly=exactly)

    def _by_id(self, workspace_id: str) -> WorkspaceRow:
        if not workspace_id:
            raise invalid("workspace_id is empty")
        with self._store.read() as reader:
            for row in reader.workspaces():
                if row.id == workspace_id:
                    return row
        raise CogfsError(Reason.NOT_FOUND, f"there is no workspace {workspace_id}", workspace_id=workspace_id)

    def _answer(self, workspace_id: str) -> workspace_pb2.Workspace:
        with self._store.read() as reader:
            row, count = reader.workspace(workspace_id), reader.snapshot_count(workspace_id)
        return message(row, count, self._supervisor.state(workspace_id), self._engine.state(workspace_id))


def message(
    row: WorkspaceRow, snapshot_count: int, serving: ServingState, engine: EngineState
) -> workspace_pb2.Workspace:
    state, reason = _state(row, serving, engine)
    answer = workspace_pb2.Workspace(
        id=row.id,
        root=row.root,
        mode=workspace_pb2.Workspace.SCANNED if row.scanned else workspace_pb2.Workspace.MOUNTED,
        state=state,
        reason=reason,
        options=_options_message(row.options),
        mountpoint=serving.mountpoint or row.mountpoint,
        created_at=timestamp(row.created_ns),
        worker_pid=serving.worker_pid,
        last_snapshot_id=row.last_snapshot_id,
        dirty_files=engine.dirty_files,
        dirty_directories=engine.dirty_directories,
        snapshot_count=snapshot_count,
        bypassed_by=busy_messages(list(engine.bypassed_by)),
    )
    recovery = row.last_recovery
    if recovery is not None:
        answer.last_recovery.CopyFrom(
            workspace_pb2.Recovery(
                outcome=_OUTCOMES[recovery.outcome],
                target_snapshot_id=recovery.target_snapshot_id,
                safety_snapshot_id=recovery.safety_snapshot_id,
                at=timestamp(recovery.at_ns),
                reason=recovery.reason,
            )
        )
    return answer


def _state(
    row: WorkspaceRow, serving: ServingState, engine: EngineState
) -> tuple[workspace_pb2.Workspace.State.ValueType, str]:
    if serving.starting:
        return workspace_pb2.Workspace.RECOVERING, "cogfsd has just started and is taking it up again"
    if serving.dead:
        return workspace_pb2.Workspace.DEAD, serving.dead
    read_only = engine.read_only or row.read_only
    if read_only:
        return workspace_pb2.Workspace.READ_ONLY, read_only
    if engine.recovering:
        return workspace_pb2.Workspace.RECOVERING, ""
    if serving.worker_pid or serving.scanned:
        return workspace_pb2.Workspace.ACTIVE, ""
    return workspace_pb2.Workspace.DETACHED, ""


def _options(options: workspace_pb2.WorkspaceOptions) -> WorkspaceOptions:
    count, age_ns = checked_retention(options.retain)
    return WorkspaceOptions(
        exclude=checked_globs(options.exclude),
        max_file_bytes=checked_size(options.max_file_bytes),
        retain_count=count,
        retain_max_age_ns=age_ns,
        refuse_hard_links=options.refuse_hard_links,
    )


def _options_message(options: WorkspaceOptions) -> workspace_pb2.WorkspaceOptions:
    message = workspace_pb2.WorkspaceOptions(
        exclude=options.exclude,
        max_file_bytes=options.max_file_bytes,
        refuse_hard_links=options.refuse_hard_links,
    )
    if options.retain_count or options.retain_max_age_ns:
        message.retain.CopyFrom(retention_message(options.retain_count, options.retain_max_age_ns))
    return message


def _kept(row: WorkspaceRow) -> str:
    return "scanned" if row.scanned else "mounted"


def _registered(row: WorkspaceRow) -> CogfsError:
    return CogfsError(
        Reason.ALREADY_EXISTS, f"{show(row.root)} is registered already, as {row.id}", workspace_id=row.id
    )


def _unknown(path: bytes) -> CogfsError:
    return CogfsError(Reason.NOT_FOUND, f"there is no workspace at {show(path)}")
