"""What goes wrong, as one exception with the reason that the API gives for it."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from cogfs.v1.reasons import Reason


class BusyBy(TypedDict):
    """One thing that stands in the way, as JSON in an error's metadata and as ``cogfs.v1.BusyBy`` in a report."""

    kind: str
    path: str
    pid: int
    command: str
    access: str
    since_ns: int
    #: Of a run, or of a command.
    id: NotRequired[str]


class CogfsError(Exception):
    """A call that cannot be carried out. ``str()`` is one sentence for the user."""

    def __init__(self, reason: Reason, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = metadata


def invalid(message: str) -> CogfsError:
    """A request that makes no sense."""
    return CogfsError(Reason.VALIDATION_ERROR, message)


def busy(reason: Reason, message: str, who: Sequence[BusyBy]) -> CogfsError:
    """A refusal that names who is in the way."""
    return CogfsError(reason, message, busy_by=json.dumps(list(who)))


def show(path: bytes) -> str:
    """``path`` for a sentence: on one line, and any bytes can be told."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def from_os_error(error: OSError, doing: str) -> CogfsError:
    """``error`` as NO_SPACE, DENIED or IO, with what was being done: "cannot {doing}: …"."""
    detail = error.strerror or str(error)
    if error.errno in _SPACE:
        reason = Reason.NO_SPACE
    elif error.errno in _DENIED:
        reason = Reason.DENIED
    else:
        reason = Reason.IO
    return CogfsError(reason, f"cannot {doing}: {detail}")
