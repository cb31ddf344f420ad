"""A gRPC server on a Unix socket that answers as a test says. Knows nothing of the daemon.

As a program (``python -m tests.client.server ENDPOINT``) it answers GetDaemon with its own process id until SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from cogfs.v1 import admin_pb2, admin_pb2_grpc


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers GetDaemon with what ``answer`` gives for the call's context."""

    def __init__(self, answer: Callable[[Any], admin_pb2.Daemon]) -> None:
        self.answer = answer

    def GetDaemon(self, request: admin_pb2.GetDaemonRequest, context: Any) -> admin_pb2.Daemon:
        return self.answer(context)

    def Collect(self, request: admin_pb2.CollectRequest, context: Any) -> admin_pb2.CollectResponse:
        raise NotImplementedError

    def Check(self, request: admin_pb2.CheckRequest, context: Any) -> admin_pb2.CheckResponse:
        raise NotImplementedError

    def Repair(self, request: admin_pb2.RepairRequest, context: Any) -> admin_pb2.RepairResponse:
        raise NotImplementedError

    def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> admin_pb2.Stats:
        raise NotImplementedError


@contextlib.contextmanager
def serving(endpoint: str, answer: Callable[[Any], admin_pb2.Daemon]) -> Iterator[None]:
    """A server at ``endpoint`` for the time of the block."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(2), options=options)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(answer), server)
    server.add_insecure_port(endpoint)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with serving(sys.argv[1], lambda _: admin_pb2.Daemon(pid=os.getpid(), endpoint=sys.argv[1], version="1")):
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
