"""What callers pass, as what messages hold: paths, kinds, metadata, text. Raises ValidationError alone."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import duration_pb2, struct_pb2

from cogfs.client.errors import ValidationError
from cogfs.v1 import common_pb2, run_pb2, thread_pb2, workspace_pb2

#: A path: text as Python has it, or the filesystem's own bytes.
PathArgument = str | bytes | os.PathLike[str] | os.PathLike[bytes]

#: What one level says of checkpoints: on, off, or ``enabled``, ``exclude``, ``max_file_bytes``, ``rewind_files``.
CheckpointsArgument = bool | Mapping[str, Any] | thread_pb2.CheckpointPolicy
#: Which snapshots remain: ``count`` and ``max_age`` (a timedelta, or seconds).
RetentionArgument = Mapping[str, Any] | workspace_pb2.Retention

#: What ``entry_kind`` takes.
ENTRY_KINDS = tuple(value.name.lower() for value in thread_pb2.Entry.Kind.DESCRIPTOR.values if value.number)

_WAITS = {"sealed": common_pb2.WAIT_SEALED, "durable": common_pb2.WAIT_DURABLE}


def absolute(path: PathArgument) -> bytes:
    """``path`` from the root of the filesystem, with symbolic links resolved."""
    name = _bytes(path)
    if not name:
        # It would be the working directory: what is most often behind it is a variable that was never set.
        raise ValidationError("a path is empty: give . for the working directory")
    return os.path.realpath(name)


def relative(path: PathArgument) -> bytes:
    """``path`` below a workspace's root: without ``.`` and doubled slashes, empty for the root itself."""
    cleaned = os.path.normpath(_bytes(path) or b".")
    return b"" if cleaned == b"." else cleaned


def relatives(paths: Iterable[PathArgument]) -> list[bytes]:
    """``relative`` of each. One path that names the root means everything, as no path does."""
    if isinstance(paths, str | bytes | os.PathLike):
        paths = [paths]
    cleaned = [relative(path) for path in paths]
    return [] if b"" in cleaned else cleaned


def _bytes(path: PathArgument) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValidationError("a path cannot hold a zero byte")
    return name


def names(values: Iterable[str], what: str) -> list[str]:
    """``text`` of each; one alone may be given as it is."""
    return [text(value, what) for value in ([values] if isinstance(values, str) else values)]


def text(value: str, what: str) -> str:
    """``value``, which becomes a string of a message and so must be encodable as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValidationError(f"the {what} is not valid UTF-8") from None
    return value


def entry_kind(name: str) -> thread_pb2.Entry.Kind.ValueType:
    """The kind of an entry by its name, whatever the case ("user", "session_event")."""
    try:
        kind = thread_pb2.Entry.Kind.Value(name.upper().replace("-", "_"))
    except ValueError:
        kind = thread_pb2.Entry.KIND_UNSPECIFIED
    if kind == thread_pb2.Entry.KIND_UNSPECIFIED:
        raise ValidationError(f"{name!r} is no kind of entry: give one of {', '.join(ENTRY_KINDS)}")
    return kind


def memory_kind(name: str | None) -> thread_pb2.Memory.Kind.ValueType:
    """The kind of a memory by its name, whatever the case ("item", "summary", "file"); None: not said."""
    if name is None:
        return thread_pb2.Memory.KIND_UNSPECIFIED
    try:
        kind = thread_pb2.Memory.Kind.Value(name.upper())
    except ValueError:
        kind = thread_pb2.Memory.KIND_UNSPECIFIED
    if kind == thread_pb2.Memory.KIND_UNSPECIFIED:
        raise ValidationError(f"{name!r} is no kind of memory: give item, summary or file")
    return kind


def wait(name: str | None) -> common_pb2.Wait.ValueType:
    """When a call that takes a snapshot answers: "sealed", "durable", or None to leave it to the daemon."""
    if name is None:
        return common_pb2.WAIT_UNSPECIFIED
    if name not in _WAITS:
        raise ValidationError(f"{name!r} is nothing to wait for: give one of {', '.join(_WAITS)}")
    return _WAITS[name]


def struct(metadata: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    """Metadata: what JSON can say, with text as keys."""
    if not metadata:
        return None
    message = struct_pb2.Struct()
    try:
        message.update(dict(metadata))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValidationError(f"metadata holds only what JSON can say: {error}") from None
    return message


def checkpoints(value: CheckpointsArgument | None) -> thread_pb2.CheckpointPolicy | None:
    """What a level says of checkpoints; None when it says nothing."""
    if value is None or isinstance(value, thread_pb2.CheckpointPolicy):
        return value
    if isinstance(value, bool):
        return thread_pb2.CheckpointPolicy(enabled=value)
    fields = _fields(value, ("enabled", "exclude", "max_file_bytes", "rewind_files"), "checkpoints")
    exclude = fields.pop("exclude", None) or ()
    try:
        return thread_pb2.CheckpointPolicy(exclude=globs(exclude), **fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValidationError(f"checkpoints are true, false, or a policy: {error}") from None


def retention(value: RetentionArgument | None) -> workspace_pb2.Retention | None:
    """Which snapshots remain; None when that is not said."""
    if value is None or isinstance(value, workspace_pb2.Retention):
        return value
    fields = _fields(value, ("count", "max_age"), "a retention")
    try:
        message = workspace_pb2.Retention(count=fields.get("count") or 0)
        age = fields.get("max_age")
        if age is not None:
            message.max_age.CopyFrom(duration(age))
    except (TypeError, ValueError) as error:
        raise ValidationError(f"a retention has a count and a max_age: {error}") from None
    return message


def duration(length: datetime.timedelta | float) -> duration_pb2.Duration:
    """A length of time: a timedelta, or seconds."""
    message = duration_pb2.Duration()
    try:
        seconds = length.total_seconds() if isinstance(length, datetime.timedelta) else float(length)
        message.FromMicroseconds(round(seconds * 1e6))
    except (TypeError, ValueError, OverflowError):
        raise ValidationError(f"{length!r} is no length of time: give a number of seconds") from None
    return message


def strategy_of(name: str) -> run_pb2.Run.Strategy.ValueType:
    """What a run does while a rewind holds its thread: "wait" or "reject"."""
    known = {"wait": run_pb2.Run.WAIT, "reject": run_pb2.Run.REJECT}
    if name not in known:
        raise ValidationError(f"{name!r} is no strategy of a run: give one of {', '.join(known)}")
    return known[name]


def process_id(pid: int) -> int:
    """The number of a process."""
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        raise ValidationError(f"{pid!r} is no number of a process")
    return pid


def globs(value: Iterable[str]) -> list[str]:
    """Globs to exclude; one alone may stand for itself."""
    return [text(glob, "glob") for glob in ([value] if isinstance(value, str) else value)]


def _fields(value: Mapping[str, Any], known: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValidationError(f"{what} cannot be {value!r}")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ValidationError(f"{what} have no {unknown[0]!r}: give {', '.join(known)}")
    return {name: item for name, item in value.items() if item is not None}
