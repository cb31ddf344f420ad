"""RunService: runs, their tool calls and holders, and commands."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.duration_pb2 import Duration

from cogfs.fsd.control.commands import Running
from cogfs.fsd.control.engine import Engine
from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.runs import NewRun, Standing
from cogfs.fsd.control.runstates import OVER, refuse_over
from cogfs.fsd.control.services.convert import (
    DEFAULT_PAGE,
    checked_agent,
    checked_name,
    checked_policy,
    policy_message,
    required,
    timestamp,
)
from cogfs.store.schema import RunKind, RunStrategy, ToolCallRow
from cogfs.store.store import Store
from cogfs.v1 import run_pb2, run_pb2_grpc

_TEXT_MAX = 4096
_SECOND_NS = 1_000_000_000
_LEASE_NS = 30 * _SECOND_NS
_LEASE_MAX_NS = 3600 * _SECOND_NS
#: Seconds after which a stream looks whether its caller is still there. It is woken when the caller goes.
_LOOK = 60.0


class RunService(run_pb2_grpc.RunServiceServicer):
    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._runs = engine.runs
        self._holders = engine.holders
        self._commands = engine.commands

    def StartRun(self, request: run_pb2.StartRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        if request.kind == run_pb2.Run.KIND_UNSPECIFIED:
            raise invalid("a run is plain or durable: say its kind")
        kind = RunKind[run_pb2.Run.Kind.Name(request.kind)]
        if bool(request.parent_run_id) != bool(request.parent_tool_call_id):
            raise invalid("a run is started by a tool call of another run: give both of them, or none")
        new = NewRun(
            required(request.thread_id, "thread_id"),
            kind,
            workspace_id=request.workspace_id,
            run_id=request.run_id,
            agent=checked_agent(request.agent),
            holder=checked_name(request.holder, "a holder's name"),
            strategy=RunStrategy.REJECT if request.strategy == run_pb2.Run.REJECT else RunStrategy.WAIT,
            checkpoints=checked_policy(request.checkpoints) if request.HasField("checkpoints") else None,
            parent_run_id=request.parent_run_id,
            parent_tool_call_id=request.parent_tool_call_id,
            lease_ns=_lease(kind, request),
        )
        return run_message(self._runs.start(new, context.is_active))

    def RenewRun(self, request: run_pb2.RenewRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        holder = checked_name(request.holder, "a holder's name")
        return run_message(self._runs.renew(required(request.run_id, "run_id"), holder, context.is_active))

    def EndRun(self, request: run_pb2.EndRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        return run_message(self._runs.end(required(request.run_id, "run_id")))

    def PauseRun(self, request: run_pb2.PauseRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        return run_message(self._runs.pause(required(request.run_id, "run_id")))

    def ResumeRun(self, request: run_pb2.ResumeRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        holder = checked_name(request.holder, "a holder's name")
        return run_message(self._runs.resume(required(request.run_id, "run_id"), holder, context.is_active))

    def GetRun(self, request: run_pb2.GetRunRequest, context: grpc.ServicerContext) -> run_pb2.Run:
        return run_message(self._runs.get(required(request.run_id, "run_id")))

    def ListRuns(self, request: run_pb2.ListRunsRequest, context: grpc.ServicerContext) -> run_pb2.ListRunsResponse:
        size = request.page_size or DEFAULT_PAGE
        with self._store.read() as reader:
            if request.thread_id:
                reader.thread(request.thread_id)
            if request.workspace_id:
                reader.workspace(request.workspace_id)
        found = [
            one
            for one in self._runs.all()
            if (request.ended or one.row.state not in OVER)
            and request.thread_id in ("", one.row.thread_id)
            and request.workspace_id in ("", one.row.workspace_id)
        ]
        if request.page_token:
            moment, _, run_id = request.page_token.partition(":")
            if not moment.isdecimal():
                raise invalid("the page token is not one that this call gave")
            mark = (-int(moment), run_id)
            found = [one for one in found if (-one.row.started_ns, one.row.id) > mark]
        more = len(found) > size
        found = found[:size]
        last = found[-1].row if more else None
        return run_pb2.ListRunsResponse(
            runs=[run_message(one) for one in found],
            next_page_token=f"{last.started_ns}:{last.id}" if last is not None else "",
        )

    def BeginToolCall(self, request: run_pb2.BeginToolCallRequest, context: grpc.ServicerContext) -> run_pb2.ToolCall:
        run_id = required(request.run_id, "run_id")
        name = checked_name(request.name, "a tool's name")
        return _call_message(self._runs.begin_tool_call(run_id, request.tool_call_id, name, context.is_active))

    def EndToolCall(
        self, request: run_pb2.EndToolCallRequest, context: grpc.ServicerContext
    ) -> run_pb2.EndToolCallResponse:
        self._runs.end_tool_call(required(request.run_id, "run_id"), required(request.tool_call_id, "tool_call_id"))
        return run_pb2.EndToolCallResponse()

    def RegisterCommand(
        self, request: run_pb2.RegisterCommandRequest, context: grpc.ServicerContext
    ) -> run_pb2.Command:
        given = [one for one in (request.thread_id, request.workspace_id, request.run_id, request.command_id) if one]
        if len(given) != 1:
            raise invalid("say where the command runs by one of thread_id, workspace_id, run_id and command_id")
        text = request.command
        if len(text.encode()) > _TEXT_MAX or "\0" in text:
            raise invalid(f"the text of a command has at most {_TEXT_MAX:,} bytes, and no zero byte")
        if request.command_id:
            return _command_message(self._commands.add(request.command_id, request.pid))
        workspace_id, thread_id = request.workspace_id, request.thread_id
        with self._store.read() as reader:
            if request.run_id:
                run = reader.run(request.run_id)
                refuse_over(run)
                workspace_id, thread_id = run.workspace_id, run.thread_id
                if not workspace_id:
                    raise invalid(f"the run {run.id} has no workspace in which a command could be in the way")
            elif thread_id:
                workspace_id = reader.thread(thread_id).workspace_id
                if not workspace_id:
                    raise invalid(f"the thread {thread_id} has no workspace in which a command could be in the way")
        return _command_message(self._commands.register(workspace_id, thread_id, request.run_id, request.pid, text))

    def ListCommands(
        self, request: run_pb2.ListCommandsRequest, context: grpc.ServicerContext
    ) -> run_pb2.ListCommandsResponse:
        if request.workspace_id:
            with self._store.read() as reader:
                reader.workspace(request.workspace_id)
        found = self._commands.running(lambda row: request.workspace_id in ("", row.workspace_id))
        return run_pb2.ListCommandsResponse(commands=[_command_message(one) for one in found])

    def WatchRun(self, request: run_pb2.WatchRunRequest, context: grpc.ServicerContext) -> Iterator[run_pb2.RunEvent]:
        watch = self._holders.watch(required(request.run_id, "run_id"))
        try:
            # It fails when the call has ended already.
            if not context.add_callback(watch.wake):
                return
            yield run_pb2.RunEvent(kind=run_pb2.RunEvent.HELD)
            while context.is_active():
                told = watch.next(_LOOK)
                self._holders.refuse_stopping()
                if told is None:
                    continue
                if told.why or not told.over:
                    yield run_pb2.RunEvent(kind=run_pb2.RunEvent.STOP, why=told.why)
                if told.over:
                    yield run_pb2.RunEvent(kind=run_pb2.RunEvent.ENDED, why=told.why)
                    return
        finally:
            self._holders.unwatch(watch)


def _lease(kind: RunKind, request: run_pb2.StartRunRequest) -> int:
    """Nanoseconds; 0 for a plain run. VALIDATION_ERROR."""
    if not request.HasField("lease"):
        return _LEASE_NS if kind is RunKind.DURABLE else 0
    if kind is not RunKind.DURABLE:
        raise invalid("a plain run has no lease: its holder's connection holds it")
    lease = request.lease.seconds * _SECOND_NS + request.lease.nanos
    if not (_SECOND_NS <= lease <= _LEASE_MAX_NS and 0 <= request.lease.nanos < _SECOND_NS):
        raise invalid("a lease is from 1 second to 1 hour")
    return lease


def run_message(one: Standing) -> run_pb2.Run:
    row = one.row
    message = run_pb2.Run(
        id=row.id,
        thread_id=row.thread_id,
        workspace_id=row.workspace_id,
        agent=row.agent,
        kind=run_pb2.Run.Kind.Value(row.kind.name),
        holder=row.holder,
        strategy=run_pb2.Run.Strategy.Value(row.strategy.name),
        state=run_pb2.Run.State.Value(row.state.name),
        stopping=row.stopping,
        tool_calls=row.tool_calls,
        open_tool_calls=[_call_message(call) for call in one.open_tool_calls],
        parent_run_id=row.parent_run_id,
        parent_tool_call_id=row.parent_tool_call_id,
        checkpoints=policy_message(row.checkpoints) if row.checkpoints is not None else None,
        started_at=timestamp(row.started_ns),
        why=row.why,
    )
    if row.ended_ns:
        message.ended_at.CopyFrom(timestamp(row.ended_ns))
    if row.lease_ns:
        lease = Duration()
        lease.FromNanoseconds(row.lease_ns)
        message.lease.CopyFrom(lease)
    if one.lease_until_ns:
        message.lease_until.CopyFrom(timestamp(one.lease_until_ns))
    return message


def _call_message(row: ToolCallRow) -> run_pb2.ToolCall:
    return run_pb2.ToolCall(id=row.id, run_id=row.run_id, name=row.name, begun_at=timestamp(row.begun_ns))


def _command_message(one: Running) -> run_pb2.Command:
    row = one.row
    tracking = run_pb2.Command.CONTROL_GROUP if row.cgroup else run_pb2.Command.PROCESSES
    return run_pb2.Command(
        id=row.id,
        workspace_id=row.workspace_id,
        thread_id=row.thread_id,
        run_id=row.run_id,
        pid=row.processes[0].pid,
        command=row.command,
        since=timestamp(row.since_ns),
        tracking=tracking,
        pids=[process.pid for process in one.processes],
    )
