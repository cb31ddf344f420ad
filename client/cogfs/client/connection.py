"""The connection to a daemon: one gRPC channel, and calls that raise the client's exceptions. Knows no objects."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from cogfs.client.errors import Denied, Unavailable, ValidationError, from_rpc
from cogfs.client.places import socket_path
from cogfs.v1 import admin_pb2_grpc, run_pb2_grpc, snapshot_pb2_grpc, thread_pb2_grpc, workspace_pb2_grpc

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")

#: ``sockaddr_un.sun_path`` holds 108 bytes, the last of them zero.
_SUN_PATH = 107
#: What gRPC takes in a target as it is.
_PLAIN = re.compile(r"/[A-Za-z0-9._~/-]*")

#: Seconds before a daemon that did not answer is asked again, and that the last question may take.
_AGAIN = 0.1
_LAST = 1.0

_OPTIONS = [
    # A message holds what it holds: a report of a million files, a diff of a large one.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A new connection does not wait for the back-off of one that failed before.
    ("grpc.use_local_subchannel_pool", 1),
    # A daemon that was restarted is found again soon: who holds a run has little time for that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Connection:
    """One channel to ``endpoint`` (``unix:///…`` or ``host:port``), opened by the first call."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._directory: int | None = None
        self._closed = False
        self._channel = grpc.insecure_channel(self._target(), options=_OPTIONS)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.workspaces = workspace_pb2_grpc.WorkspaceServiceStub(self._channel)
        self.snapshots = snapshot_pb2_grpc.SnapshotServiceStub(self._channel)
        self.threads = thread_pb2_grpc.ThreadServiceStub(self._channel)
        self.runs = run_pb2_grpc.RunServiceStub(self._channel)

    def _target(self) -> str:
        """What gRPC is given. A path that it or the kernel would not take is reached through its open directory."""
        path = socket_path(self.endpoint)
        if path is None:
            if not re.fullmatch(r"\S+:\d+", self.endpoint):
                raise ValidationError(f"{self.endpoint!r} is no endpoint: give unix:///PATH or HOST:PORT")
            return self.endpoint
        if len(os.fsencode(path)) <= _SUN_PATH and _PLAIN.fullmatch(path):
            return f"unix://{path}"
        directory, name = os.path.split(path)
        if len(os.fsencode(name)) > 64 or not _PLAIN.fullmatch(f"/{name}"):
            raise ValidationError(f"the socket's name in {self.endpoint} is too long or has unusual characters")
        try:
            self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            raise Denied(f"{directory} may not be entered") from None
        except OSError as error:
            raise Unavailable(
                f"no cogfs daemon answers at {self.endpoint}: start it with `cogfsctl daemon start`, "
                "or set COGFS_ENDPOINT",
                {"detail": str(error)},
            ) from None
        return f"unix:///proc/self/fd/{self._directory}/{name}"

    def close(self) -> None:
        """Ends it, and the calls that are under way. Can be repeated."""
        self._closed = True
        self._channel.close()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Answer],
        request: _Request,
        timeout: float | None = None,
    ) -> _Answer:
        """The answer. CogfsError when it fails, Unavailable when there is none in ``timeout`` seconds or the connection
        was closed."""
        try:
            return method(request, timeout=timeout)
        except (grpc.RpcError, ValueError) as error:
            raise self._told(error) from None

    def _told(self, error: Exception) -> Exception:
        """What a caller is told of an error of gRPC, which raises ValueError for a call on a closed channel."""
        if self._closed:
            return Unavailable("the connection was closed")
        return from_rpc(error, self.endpoint) if isinstance(error, grpc.RpcError) else error

    def call_patiently(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Answer], request: _Request, patience: float
    ) -> _Answer:
        """As ``call``, for what can be repeated: a daemon that is being restarted is asked again for ``patience``
        seconds."""
        deadline = time.monotonic() + patience
        while True:
            left = deadline - time.monotonic()
            try:
                return method(request, timeout=max(left, _LAST), wait_for_ready=left > 0)
            except grpc.RpcError as error:
                failure = from_rpc(error, self.endpoint)
                if left <= 0 or not isinstance(failure, Unavailable):
                    raise failure from None
                time.sleep(_AGAIN)

    def stream(self, method: grpc.UnaryStreamMultiCallable[_Request, _Answer], request: _Request) -> Iterator[_Answer]:
        """The answers as they come. CogfsError when the call fails; it is cancelled when the iterator is dropped."""
        call = None
        try:
            call = method(request)
            yield from call
        except (grpc.RpcError, ValueError) as error:
            raise self._told(error) from None
        finally:
            if call is not None:
                call.cancel()


def paged(fetch: Callable[[str], tuple[list[_Answer], str]]) -> Iterator[_Answer]:
    """All items of a listing. ``fetch`` answers a page and the token of the next one, empty after the last."""
    token = ""
    while True:
        items, token = fetch(token)
        yield from items
        if not token:
            return
