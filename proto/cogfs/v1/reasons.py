"""The reasons why a call fails: one table for the API's status, the client's exceptions and the CLI's exit codes."""

from __future__ import annotations

import enum

import grpc

#: ``google.rpc.ErrorInfo.domain`` of every error.
DOMAIN = "cogfs"


class Reason(enum.Enum):
    """``google.rpc.ErrorInfo.reason``, with the gRPC status and the exit code of ``cogfsctl`` that go with it."""

    VALIDATION_ERROR = (grpc.StatusCode.INVALID_ARGUMENT, 10)
    NOT_FOUND = (grpc.StatusCode.NOT_FOUND, 11)
    ALREADY_EXISTS = (grpc.StatusCode.ALREADY_EXISTS, 12)
    DENIED = (grpc.StatusCode.PERMISSION_DENIED, 13)
    IO = (grpc.StatusCode.INTERNAL, 14)
    BUSY = (grpc.StatusCode.FAILED_PRECONDITION, 15)
    THREAD_BUSY = (grpc.StatusCode.FAILED_PRECONDITION, 16)
    WORKSPACE_BUSY = (grpc.StatusCode.FAILED_PRECONDITION, 17)
    RUN_INTERRUPTED = (grpc.StatusCode.ABORTED, 18)
    NO_SPACE = (grpc.StatusCode.RESOURCE_EXHAUSTED, 19)
    UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, 20)
    CORRUPT = (grpc.StatusCode.DATA_LOSS, 21)

    def __init__(self, status: grpc.StatusCode, exit_code: int) -> None:
        self.status = status
        self.exit_code = exit_code
