"""What callers pass."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest

from cogfs.client import ValidationError, arguments
from cogfs.client.workspace import options
from cogfs.v1 import common_pb2, thread_pb2, workspace_pb2


def test_absolute_resolves_links_and_keeps_bytes(tmp_path: Path) -> None:
    real = os.path.join(os.fsencode(tmp_path.resolve()), b"r\xff")
    os.mkdir(real)
    os.symlink(real, os.fsencode(tmp_path / "link"))
    assert arguments.absolute(tmp_path / "link") == real
    assert arguments.absolute(str(tmp_path / "link")) == real
    assert arguments.absolute(os.fsencode(tmp_path / "link") + b"/.") == real


def test_absolute_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert arguments.absolute("a/../b") == os.fsencode(tmp_path.resolve() / "b")
    assert arguments.absolute(".") == os.fsencode(tmp_path.resolve())
    for empty in ("", b""):
        with pytest.raises(ValidationError):
            arguments.absolute(empty)


@pytest.mark.parametrize(
    ("path", "cleaned"),
    [("a/b", b"a/b"), ("./a//b/", b"a/b"), (".", b""), ("", b""), (b"\xff", b"\xff"), ("../x", b"../x"), ("/a", b"/a")],
)
def test_relative(path: str | bytes, cleaned: bytes) -> None:
    assert arguments.relative(path) == cleaned


def test_root_among_paths_means_everything() -> None:
    assert arguments.relatives(["a", "."]) == []
    assert arguments.relatives(["a", b"b/"]) == [b"a", b"b"]
    assert arguments.relatives("abc") == [b"abc"]


def test_zero_byte_is_refused() -> None:
    with pytest.raises(ValidationError, match="zero byte"):
        arguments.absolute("a\0b")


def test_entry_kinds() -> None:
    assert arguments.entry_kind("user") == thread_pb2.Entry.USER
    assert arguments.entry_kind("session-event") == thread_pb2.Entry.SESSION_EVENT
    for name in arguments.ENTRY_KINDS:
        assert thread_pb2.Entry.Kind.Name(arguments.entry_kind(name)) == name.upper()
    for name in ("", "human", "kind_unspecified"):
        with pytest.raises(ValidationError, match="session_event"):
            arguments.entry_kind(name)


def test_waits() -> None:
    assert arguments.wait(None) == common_pb2.WAIT_UNSPECIFIED
    assert arguments.wait("durable") == common_pb2.WAIT_DURABLE
    with pytest.raises(ValidationError, match="sealed"):
        arguments.wait("unspecified")


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(ValidationError, match="the label is not valid UTF-8"):
        arguments.text("\udcff", "label")


def test_metadata_holds_what_json_can_say() -> None:
    made = arguments.struct({"n": 1, "list": [True, None, "x"], "deep": {"a": 1.5}})
    assert made is not None
    assert made["n"] == 1
    assert arguments.struct({}) is None
    with pytest.raises(ValidationError, match="JSON"):
        arguments.struct({"x": object()})


def test_options_are_left_alone_when_none_is_given() -> None:
    assert options(None, None) is None
    cleared = options([], None)
    assert cleared is not None
    assert list(cleared.exclude) == []
    both = options("*.log", -1)
    assert both is not None
    assert list(both.exclude) == ["*.log"]
    assert both.max_file_bytes == -1
    assert options(None, None, {"count": 3}) == workspace_pb2.WorkspaceOptions(retain=workspace_pb2.Retention(count=3))
    refusing = options(None, None, None, True)
    assert refusing is not None and refusing.refuse_hard_links
    assert options(None, None, None, False) == workspace_pb2.WorkspaceOptions()


def test_checkpoints() -> None:
    Policy = thread_pb2.CheckpointPolicy
    assert arguments.checkpoints(None) is None
    assert arguments.checkpoints(True) == Policy(enabled=True)
    assert arguments.checkpoints(False) == Policy(enabled=False)
    assert arguments.checkpoints({}) == Policy()
    assert arguments.checkpoints({"exclude": "*.o", "max_file_bytes": 0}) == Policy(exclude=["*.o"], max_file_bytes=0)
    assert arguments.checkpoints({"enabled": None, "rewind_files": False}) == Policy(rewind_files=False)
    own = Policy(enabled=True)
    assert arguments.checkpoints(own) is own
    strange: list[Any] = [
        1,
        "true",
        ["a"],
        {"excludes": []},
        {"exclude": [1]},
        {"enabled": "x"},
        {"exclude": ["\udcff"]},
    ]
    for value in strange:
        with pytest.raises(ValidationError):
            arguments.checkpoints(value)


def test_retention() -> None:
    assert arguments.retention(None) is None
    found = arguments.retention({"count": 5, "max_age": datetime.timedelta(days=14, microseconds=3)})
    assert found is not None
    assert (found.count, found.max_age.seconds, found.max_age.nanos) == (5, 14 * 86400, 3000)
    found = arguments.retention({"max_age": 1.5})
    assert found is not None and found.max_age.ToMilliseconds() == 1500
    assert arguments.retention({}) == workspace_pb2.Retention()
    strange: list[Any] = [
        5,
        {"counts": 1},
        {"count": "many"},
        {"count": 1 << 64},
        {"max_age": "14d"},
        {"max_age": 1e30},
    ]
    for value in strange:
        with pytest.raises(ValidationError):
            arguments.retention(value)
