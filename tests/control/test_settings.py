"""The configuration file: what it may say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cogfs.fsd.control import settings
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.settings import Settings, load
from cogfs.v1.reasons import Reason


def _load(tmp_path: Path, text: str, **environ: str) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load({"COGFS_CONFIG": str(file), **environ}, 1000)


def test_every_key(tmp_path: Path) -> None:
    found = _load(
        tmp_path,
        """
        [store]
        max_bytes = "1.5 GiB"
        gc_grace = "2h"
        [runs]
        tool_settle = 3
        grace = 0.5
        [log]
        level = "warning"
        """,
    )
    assert found.max_bytes == 3 << 29
    assert found.gc_grace == 7200
    assert (found.patience.tool_settle, found.patience.grace) == (3, 0.5)
    assert found.log_level == "warning"


@pytest.mark.parametrize(
    ("written", "size"),
    [("0", 0), ("4096", 4096), ('"4096"', 4096), ('"20 GB"', 20 << 30), ('"7k"', 7168), ('"3MiB"', 3 << 20)],
)
def test_sizes(tmp_path: Path, written: str, size: int) -> None:
    assert _load(tmp_path, f"store.max_bytes = {written}").max_bytes == size


def test_nothing_said(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == Settings()
    assert load({"XDG_CONFIG_HOME": str(tmp_path / "none")}, 1000) == Settings()


def test_the_environment_overrules_the_file(tmp_path: Path) -> None:
    found = _load(tmp_path, "[runs]\ntool_settle = 3\ngrace = 4", COGFS_TOOL_SETTLE="7")
    assert (found.patience.tool_settle, found.patience.grace) == (7, 4)


def test_where_it_is(tmp_path: Path) -> None:
    assert settings.path({}, 0) == Path("/etc/cogfs/config.toml")
    assert settings.path({"HOME": "/home/somebody"}, 1000) == Path("/home/somebody/.config/cogfs/config.toml")
    assert settings.path({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, 1000) == Path("/x/cogfs/config.toml")
    assert settings.path({"XDG_CONFIG_HOME": "x", "HOME": "/h"}, 1000) == Path("/h/.config/cogfs/config.toml")
    assert settings.path({"COGFS_CONFIG": "/y/c.toml"}, 0) == Path("/y/c.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[store", "not valid TOML"),
        ("[stor]\nmax_bytes = 1", r"no table \[stor\].*store, runs, log"),
        ("max_bytes = 1", r"no table \[max_bytes\]"),
        ("[store]\nmax_byte = 1", r"no key 'max_byte'.*max_bytes, gc_grace"),
        ("store.max_bytes = -1", "max_bytes must be a number of bytes"),
        ("store.max_bytes = true", "max_bytes must be a number of bytes"),
        ("store.max_bytes = 1.5", "max_bytes must be a number of bytes"),
        ('store.max_bytes = "much"', "'much'"),
        ('store.max_bytes = "99999999 T"', "max_bytes must be"),
        ("store.gc_grace = -1", "gc_grace must be seconds from 0"),
        ("store.gc_grace = nan", "gc_grace must be seconds"),
        ('runs.tool_settle = "2d"', "tool_settle must be seconds from 0 to 3600"),
        ("runs.grace = []", "grace must be seconds"),
        ('log.level = "loud"', "log.level must be one of debug, info, warning, error"),
        ("log.level = []", "log.level must be one of"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CogfsError, match=says) as caught:
        _load(tmp_path, text)
    assert caught.value.reason is Reason.VALIDATION_ERROR
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(CogfsError, match=r"there is no file .*COGFS_CONFIG"):
        load({"COGFS_CONFIG": str(tmp_path / "none")}, 1000)
    with pytest.raises(CogfsError, match="absolute path"):
        load({"COGFS_CONFIG": "config.toml"}, 1000)
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CogfsError, match="UTF-8"):
        load({"COGFS_CONFIG": str(tmp_path / "config.toml")}, 1000)
    with pytest.raises(CogfsError) as caught:
        load({"COGFS_CONFIG": str(tmp_path)}, 1000)
    assert caught.value.reason is Reason.IO


@pytest.mark.parametrize("value", ["-1", "nan", "1e9", "soon"])
def test_variables_that_make_no_sense(value: str) -> None:
    with pytest.raises(CogfsError, match="COGFS_TOOL_SETTLE must be a number of seconds from 0 to 3600"):
        load({"COGFS_TOOL_SETTLE": value, "HOME": "/nowhere"}, 1000)
