"""Any exception as a ``CogfsError``: the one place where the reasons of other layers' errors are decided."""

from __future__ import annotations

import structlog

from cogfs.fsd.control.errors import CogfsError, from_os_error
from cogfs.store.errors import (
    Corrupt,
    Exists,
    Locked,
    NetworkFilesystem,
    NoSpace,
    NotFound,
    StoreError,
    StoreIO,
    Unsafe,
    UnsupportedFormat,
)
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: The first that matches counts; a StoreError that is none of these is IO.
_STORE_REASONS: tuple[tuple[type[StoreError], Reason], ...] = (
    (NotFound, Reason.NOT_FOUND),
    (Exists, Reason.ALREADY_EXISTS),
    (Corrupt, Reason.CORRUPT),
    (NoSpace, Reason.NO_SPACE),
    (Unsafe, Reason.DENIED),
    (Locked, Reason.UNAVAILABLE),
    (UnsupportedFormat, Reason.UNAVAILABLE),
    (NetworkFilesystem, Reason.UNAVAILABLE),
)
#: A filesystem that has failed gives nothing to who has it open, whatever is done to it: it has to be mounted anew.
_DISK = (
    "; see to the store's disk, and where this goes on, run cogfsctl daemon stop, mount that disk anew, and run "
    "cogfsctl daemon start"
)


def as_cogfs_error(error: BaseException, doing: str) -> CogfsError:
    """``error`` for the one who asked. What nobody foresaw is logged with its traceback and told as IO."""
    if isinstance(error, CogfsError):
        return error
    if isinstance(error, StoreError):
        for kind, reason in _STORE_REASONS:
            if isinstance(error, kind):
                return CogfsError(reason, str(error))
        return CogfsError(Reason.IO, f"{error}{_DISK}" if isinstance(error, StoreIO) else str(error))
    if isinstance(error, OSError):
        _log.warning("system call failed", doing=doing, exc_info=error)
        return from_os_error(error, doing)
    _log.error("internal error", doing=doing, exc_info=error)
    return CogfsError(Reason.IO, "internal error, see the log of cogfsd")
