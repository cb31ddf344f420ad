"""What callers pass, as what messages hold: paths, kinds, metadata, text. Raises ValidationError alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import struct_pb2

from cogfs.client.errors import ValidationError
from cogfs.v1 import common_pb2, thread_pb2

#: A path: text as Python has it, or the filesystem's own bytes.
PathArgument = str | bytes | os.PathLike[str] | os.PathLike[bytes]

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
