"""What calls raise: one class for each reason of the API, and the way there from a gRPC status. Opens no connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cogfs.v1.reasons import DOMAIN, Reason


class CogfsError(Exception):
    """A call that failed. ``str()`` is one sentence that says what to do."""

    reason: ClassVar[Reason]

    def __init__(self, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        #: Details by name, as the daemon gave them ("busy_by", say).
        self.metadata = dict(metadata or {})


class ValidationError(CogfsError):
    """The request makes no sense, here or now."""

    reason = Reason.VALIDATION_ERROR


class NotFound(CogfsError):
    """There is no such workspace, snapshot, thread, entry or path."""

    reason = Reason.NOT_FOUND


class AlreadyExists(CogfsError):
    """The id is taken, or the workspace is mounted."""

    reason = Reason.ALREADY_EXISTS


class Denied(CogfsError):
    """Somebody has no right to do it: the daemon to a file, or the caller to the daemon."""

    reason = Reason.DENIED


class IOFailed(CogfsError):
    """A disk failed, or the daemon itself."""

    reason = Reason.IO


class Busy(CogfsError):
    """Something is in the way of a restore or of an unmount."""

    reason = Reason.BUSY


class ThreadBusy(CogfsError):
    """Something is in the way in the thread."""

    reason = Reason.THREAD_BUSY


class WorkspaceBusy(CogfsError):
    """Something is in the way in the workspace."""

    reason = Reason.WORKSPACE_BUSY


class RunInterrupted(CogfsError):
    """The run was told to stop."""

    reason = Reason.RUN_INTERRUPTED


class NoSpace(CogfsError):
    """The disk, or the store's budget, is full."""

    reason = Reason.NO_SPACE


class Unavailable(CogfsError):
    """No daemon answers, or what it needs is missing."""

    reason = Reason.UNAVAILABLE


class Corrupt(CogfsError):
    """Something stored is not what was stored."""

    reason = Reason.CORRUPT


#: The class of each reason.
CLASSES: dict[Reason, type[CogfsError]] = {kind.reason: kind for kind in CogfsError.__subclasses__()}

#: For a status that carries no reason: it comes from the transport, or from a daemon of another version.
_BARE = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,
    grpc.StatusCode.INVALID_ARGUMENT: ValidationError,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
    grpc.StatusCode.UNAUTHENTICATED: Denied,
}


def from_rpc(error: grpc.RpcError, endpoint: str) -> CogfsError:
    """The exception for a failed call to ``endpoint``."""
    if not isinstance(error, grpc.Call):
        return IOFailed(f"the call to {endpoint} failed: {error}")
    code, details = error.code(), error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The details belong to another status: trust the status alone.
        status = None
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            return CLASSES[Reason[info.reason]](details, info.metadata)
    kind = _BARE.get(code, IOFailed)
    if code == grpc.StatusCode.UNAVAILABLE:
        return kind(
            f"no cogfs daemon answers at {endpoint}: start it with `cogfsctl daemon start`, or set COGFS_ENDPOINT",
            {"detail": details},
        )
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return kind(f"the daemon at {endpoint} does not know this call: it is of another version ({details})")
    return kind(f"the daemon at {endpoint} answered {code.name}: {details or 'no details'}")
