"""Messages as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.message import Message

from cogfs.client.arguments import struct
from cogfs.client.names import unescape
from cogfs.ctl import documents
from cogfs.v1 import admin_pb2, common_pb2, run_pb2, snapshot_pb2, thread_pb2, workspace_pb2

_MESSAGES = [
    message
    for module in (admin_pb2, common_pb2, run_pb2, snapshot_pb2, thread_pb2, workspace_pb2)
    for message in module.DESCRIPTOR.message_types_by_name.values()
]


@pytest.mark.parametrize("descriptor", _MESSAGES, ids=lambda descriptor: descriptor.name)
def test_every_field_of_every_message_is_there(descriptor: Any) -> None:
    empty: Message = descriptor._concrete_class()
    made = documents.document(empty)
    assert list(made) == [field.name for field in descriptor.fields]
    json.dumps(made, allow_nan=False)


def test_values() -> None:
    name = b"caf\xe9\n"
    snapshot = snapshot_pb2.Snapshot(
        id="s1",
        state=snapshot_pb2.Snapshot.SEALED,
        root_hash=b"\x00\xff",
        max_file_bytes=2**62 + 1,
        skipped=[common_pb2.PathReason(path=name, reason="too-large")],
        metadata=struct({"whole": 3, "half": 0.5, "deep": {"list": [1, None, True, "x"]}}),
    )
    snapshot.created_at.FromJsonString("2026-01-02T03:04:05.500Z")
    made = json.loads(json.dumps(documents.document(snapshot)))
    assert made["state"] == "sealed"
    assert made["origin"] == "origin_unspecified"
    assert made["root_hash"] == "00ff"
    assert made["max_file_bytes"] == 2**62 + 1
    assert made["created_at"] == "2026-01-02T03:04:05.500Z"
    assert made["stats"] is None
    assert made["metadata"] == {"whole": 3, "half": 0.5, "deep": {"list": [1, None, True, "x"]}}
    assert isinstance(made["metadata"]["whole"], int)
    assert unescape(made["skipped"][0]["path"]) == name


def test_numbers_that_json_does_not_have() -> None:
    metadata = struct({"not": float("nan"), "much": float("inf")})
    made = documents.document(snapshot_pb2.Snapshot(metadata=metadata))
    assert made["metadata"] == {"not": "nan", "much": "inf"}


def test_maps_and_bytes() -> None:
    entry = snapshot_pb2.TreeEntry(
        path=b"a", symlink_target=b"\xff", hash=b"\xab", xattrs={"user.b": b"\0", "user.a": b"x"}
    )
    made = documents.document(entry)
    assert made["xattrs"] == {"user.a": "x", "user.b": "\\x00"}
    assert list(made["xattrs"]) == ["user.a", "user.b"]
    assert made["symlink_target"] == "\\xff"
    assert made["hash"] == "ab"


def test_durations() -> None:
    retain = workspace_pb2.Retention(count=2)
    assert documents.document(retain) == {"count": 2, "max_age": None}
    retain.max_age.FromMilliseconds(90_500)
    assert documents.document(retain) == {"count": 2, "max_age": "90.500s"}


def test_diff_keeps_its_lines() -> None:
    made = documents.document(common_pb2.FileChange(diff=b"-a\\\n+\tb\x1b\n"))
    assert made["diff"] == "-a\\\\\n+\tb\\x1b\n"


def test_unset_and_set_optional_scalar() -> None:
    assert documents.document(thread_pb2.RewindRequest())["memory"] is None
    assert documents.document(thread_pb2.RewindRequest(memory=False))["memory"] is False


def test_value_of_an_enum_that_is_not_known() -> None:
    change = common_pb2.FileChange.FromString(b"\x10\x63")
    assert documents.document(change)["change"] == 99


def test_written_in_utf8_as_one_document(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    documents.write({"path": "文件"})
    out = capfdbinary.readouterr().out
    assert "文件".encode() in out
    assert json.loads(out) == {"path": "文件"}
    assert out.endswith(b"}\n")
