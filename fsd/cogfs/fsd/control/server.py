"""The gRPC server: threads, the Unix socket, and what every call has in common.

Owns how an exception becomes a ``google.rpc.Status`` and which faults of a request are found before its servicer is
called. Must not know what any call does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from cogfs.fsd.control.errors import CogfsError, from_os_error, invalid
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.v1.reasons import DOMAIN, Reason

#: Threads of calls that read what is written down, or end something, and wait for nobody.
_QUICK_THREADS = 16
_QUICK = frozenset(
    {
        "GetDaemon",
        "GetWorkspace",
        "ListWorkspaces",
        "GetSnapshot",
        "ListSnapshots",
        "GetThread",
        "ListThreads",
        "GetPolicy",
        "GetEntry",
        "ListEntries",
        "ListMemory",
        "GetRun",
        "ListRuns",
        "EndRun",
        "PauseRun",
        "EndToolCall",
    }
)
#: Threads of calls that may wait for long, as many as there may be runs and some more. A thread is made when one is
#: needed.
_PATIENT_THREADS = 1200
#: Those calls: streams that last as long as a run, and what waits until a restore is over.
_PATIENT = frozenset({"WatchRun", "StartRun", "RenewRun", "ResumeRun", "BeginToolCall"})
#: Threads of all other calls: they may wait for the lock of a thread or a workspace, for a capture, or for a client
#: that takes a stream slowly. Made when they are needed, too.
_THREADS = 512
PAGE_SIZE_MAX = 1000
_ADMIN = f"{DOMAIN}.v1.AdminService/"

if TYPE_CHECKING:
    # Generic for the type checker only.
    _Handler = grpc.RpcMethodHandler[Any, Any]

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

#: Registers one servicer: ``lambda server: add_XServicer_to_server(servicer, server)``, and its full name.
Registration = tuple[str, Callable[[grpc.Server], None]]


class Server:
    """A server that answers from ``start`` to ``stop``."""

    def __init__(
        self, socket: Path, servicers: Sequence[Registration], operation: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """``operation`` stands around each call that works with what is stored. IO when the socket cannot be bound."""
        self._socket = socket
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc")
        self._quick = ThreadPoolExecutor(_QUICK_THREADS, thread_name_prefix="quick")
        self._patient = ThreadPoolExecutor(_PATIENT_THREADS, thread_name_prefix="patient")
        self._server = grpc.server(
            self._pool,
            interceptors=[_Edge(operation, self._quick, self._patient)],
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._health = health.HealthServicer()
        self._names = [name for name, _ in servicers]
        for _, register in servicers:
            register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            # Ours alone, as the runtime directory is locked: what is there is of a daemon that was killed.
            if socket.is_socket():
                socket.unlink()
            self._server.add_insecure_port(f"unix:{socket}")
            os.chmod(socket, 0o600)
            self._identity = _identity(socket)
        except OSError as error:
            raise from_os_error(error, f"listen on {socket}") from error
        except RuntimeError as error:
            raise CogfsError(Reason.IO, f"cannot listen on {socket}: {error}") from error

    def start(self) -> None:
        self._server.start()
        for name in ["", *self._names]:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, patience: float) -> None:
        """Take no further call, wait ``patience`` seconds for those under way, then end them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(patience).wait()
        for pool in (self._pool, self._quick, self._patient):
            pool.shutdown(wait=False, cancel_futures=True)
        try:
            if _identity(self._socket) == self._identity:
                self._socket.unlink()
        except FileNotFoundError:
            pass


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else (0, 0)


class _Edge(grpc.ServerInterceptor):
    """Stands around every call."""

    def __init__(
        self,
        operation: Callable[[], AbstractContextManager[None]],
        quick: ThreadPoolExecutor,
        patient: ThreadPoolExecutor,
    ) -> None:
        """``quick`` and ``patient`` carry out the calls that wait for nobody, and those that may wait for long, so that
        no call is kept waiting by others that only wait."""
        self._operation = operation
        self._quick = quick
        self._patient = patient

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or not method.startswith(f"{DOMAIN}."):
            return handler
        name = method.rpartition("/")[2]
        patient = name in _PATIENT
        pool = self._patient if patient else self._quick if name in _QUICK else None
        # Who watches does so for hours, who administers the store waits for the operations in it, and who may wait for
        # long works with no contents.
        apart = name.startswith("Watch") or method.startswith(_ADMIN) or patient
        around = nullcontext if apart else self._operation
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _In(_unary(handler.unary_unary, name, around), pool),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _In(_stream(handler.unary_stream, name, around), pool),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


class _In:
    """A behaviour that is carried out in a pool, or without one in the server's own."""

    def __init__(self, behaviour: Callable[[Any, grpc.ServicerContext], Any], pool: ThreadPoolExecutor | None) -> None:
        self._behaviour = behaviour
        # gRPC looks for an attribute of this name.
        self.experimental_thread_pool = pool

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behaviour(request, context)


def _unary(
    behaviour: Callable[..., Any], name: str, around: Callable[[], AbstractContextManager[None]]
) -> Callable[[Any, grpc.ServicerContext], Any]:
    def run(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            check(request)
            with around():
                return behaviour(request, context)
        except Exception as error:
            _abort(context, error, name)

    return run


def _stream(
    behaviour: Callable[..., Any], name: str, around: Callable[[], AbstractContextManager[None]]
) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
    def run(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            check(request)
            with around():
                yield from behaviour(request, context)
        except Exception as error:
            _abort(context, error, name)

    return run


def _abort(context: grpc.ServicerContext, error: Exception, name: str) -> NoReturn:
    fault = as_cogfs_error(error, f"carry out {name}")
    context.abort_with_status(rpc_status.to_status(status_of(fault)))
    raise AssertionError("abort_with_status returned")


def status_of(error: CogfsError) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=error.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = error.reason.status.value[0]
    return status_pb2.Status(code=code, message=str(error), details=[detail])


def check(request: Message) -> None:
    """VALIDATION_ERROR for what is wrong with a request by its form alone: ids, page sizes, enums."""
    for field, value in request.ListFields():
        if field.name == "page_size":
            if not 0 <= value <= PAGE_SIZE_MAX:
                raise invalid(f"page_size must be from 0 to {PAGE_SIZE_MAX:,}, not {value}")
        elif field.type == FieldDescriptor.TYPE_STRING and field.name.endswith("_id"):
            check_id(value, field.name)
        elif field.enum_type is not None and not field.is_repeated and value not in field.enum_type.values_by_number:
            raise invalid(f"{field.name} has no value {value}")


def check_id(value: str, name: str) -> None:
    """VALIDATION_ERROR when ``value`` cannot be an id."""
    if not _ID.fullmatch(value):
        raise invalid(f"{name} is malformed: an id has 1 to 128 characters of A-Z a-z 0-9 . _ : -")
