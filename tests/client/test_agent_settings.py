"""Whether a session takes checkpoints: the switch and the settings, as an object and as a file. No daemon."""

from __future__ import annotations

import json
import os
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest

from cogfs.client import SettingsWarning, ValidationError
from cogfs.client.agent_settings import resolve

ON = {"general": {"fileCheckpointing": {"enabled": True}}}
OFF = {"general": {"fileCheckpointing": {"enabled": False}}}


@pytest.mark.parametrize(
    ("switch", "settings", "enabled", "merged"),
    [
        (None, None, None, None),
        (True, None, True, ON),
        (False, None, False, OFF),
        (None, {}, None, {}),
        (None, ON, True, ON),
        (None, OFF, False, OFF),
        (True, {}, True, ON),
        (True, OFF, True, ON),
        (False, ON, False, OFF),
        (True, {"theme": "dark"}, True, {"theme": "dark", **ON}),
        (True, {"general": None}, True, ON),
        (True, {"general": {"fileCheckpointing": None}}, True, ON),
        (
            True,
            {"general": {"vim": True, "fileCheckpointing": {"enabled": False, "depth": 3}}, "x": [1]},
            True,
            {"general": {"vim": True, "fileCheckpointing": {"enabled": True, "depth": 3}}, "x": [1]},
        ),
    ],
)
def test_an_object(switch: bool | None, settings: Any, enabled: bool | None, merged: Any) -> None:
    before = json.dumps(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolve(switch, settings)
    assert (found.enabled, found.settings) == (enabled, merged)
    assert json.dumps(settings) == before


def test_the_callers_object_is_its_own() -> None:
    settings = {"general": {"fileCheckpointing": {"enabled": True, "more": []}}}
    found = resolve(True, UserDict(settings)).settings
    assert isinstance(found, dict)
    found["general"]["fileCheckpointing"]["more"].append(1)
    assert settings["general"]["fileCheckpointing"]["more"] == []


@pytest.mark.parametrize("content", [ON, OFF, {}, {"theme": "dark"}])
@pytest.mark.parametrize("switch", [None, True, False])
def test_a_file_counts_alone_and_is_not_written(tmp_path: Path, content: Any, switch: bool | None) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(content))
    path.chmod(0o400)
    before = path.stat()
    says = content.get("general", {}).get("fileCheckpointing", {}).get("enabled")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = resolve(switch, path)
    assert (found.enabled, found.settings) == (says, str(path))
    assert [one.category for one in told] == ([] if switch is None or bool(says) is switch else [SettingsWarning])
    assert path.stat() == before
    assert json.loads(path.read_text()) == content


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    fifo, folder, large = tmp_path / "fifo", tmp_path / "folder", tmp_path / "large"
    os.mkfifo(fifo)
    folder.mkdir()
    large.write_text('"' + "x" * (1 << 20) + '"')
    files: list[Any] = [fifo, folder, large, tmp_path / "missing", "/dev/zero", "settings.json", "", '{"a": 1}', "/\0"]
    for number, text in enumerate(["", "{", "[]", "null", "7", '"x"', "[" * 100_000]):
        (tmp_path / f"bad{number}").write_text(text)
        files.append(tmp_path / f"bad{number}")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    objects: list[Any] = [
        tmp_path / "bytes",
        b"/bytes",
        7,
        [],
        True,
        {"general": 7},
        {"general": []},
        {"general": {"fileCheckpointing": True}},
        {"general": {"fileCheckpointing": {"enabled": "yes"}}},
        {"general": {"fileCheckpointing": {"enabled": 1}}},
    ]
    for settings in (*files, *objects):
        for switch in (None, True, False):
            with pytest.raises(ValidationError) as refused:
                resolve(switch, settings)
            assert "settings" in str(refused.value)
    switches: list[Any] = ["true", 1, 0, {}]
    for value in switches:
        with pytest.raises(ValidationError, match="enable_file_checkpointing is true, false or None"):
            resolve(value, None)
