"""Messages of the API as JSON documents. Knows no commands.

Fields have the API's names, and all are there. 64-bit numbers are numbers, timestamps RFC 3339 (null when unset),
durations in seconds ("90s"), enums their names in lower case, hashes hexadecimal, names of files and other bytes
escaped as ``cogfs.client.names`` says; a message that is unset is null.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.timestamp_pb2 import Timestamp

from cogfs.client.names import escape, escape_text

_HASHES = {"hash", "root_hash"}
_TEXTS = {"diff"}
_TIMES = {Timestamp.DESCRIPTOR.full_name, Duration.DESCRIPTOR.full_name}
_STRUCT = Struct.DESCRIPTOR.full_name


# A field's descriptor is of one of two classes, by the implementation of protobuf: Any.


def document(message: Message) -> dict[str, Any]:
    """``message`` as what ``json`` can write."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        item = kind.fields_by_name["value"]
        return {str(key): _value(value[key], item) for key in sorted(value)}
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if kind is not None and kind.full_name == _STRUCT:
        return struct(value)
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return value.ToJsonString() if field.message_type.full_name in _TIMES else document(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name.lower() if known else value
    if isinstance(value, bytes):
        if field.name in _HASHES:
            return value.hex()
        return escape_text(value) if field.name in _TEXTS else escape(value)
    return value


def struct(value: Struct) -> dict[str, Any]:
    """Metadata as it was given: whole numbers are whole."""
    return {key: _json(value.fields[key]) for key in sorted(value.fields)}


def _json(value: Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                return str(number)
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return struct(value.struct_value)
        case "list_value":
            return [_json(item) for item in value.list_value.values]
    return None


def write(content: Any) -> None:
    """One document on stdout, in UTF-8 whatever the locale."""
    sys.stdout.flush()
    sys.stdout.buffer.write(json.dumps(content, ensure_ascii=False, indent=2).encode("utf-8") + b"\n")
    sys.stdout.buffer.flush()
