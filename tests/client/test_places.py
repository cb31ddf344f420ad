"""Where the daemon is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cogfs.client import places

_VARIABLES = ("COGFS_STATE_DIR", "COGFS_RUNTIME_DIR", "COGFS_ENDPOINT", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A home directory, and none of the variables."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def _as_user(environment: pytest.MonkeyPatch, uid: int) -> None:
    environment.setattr(os, "geteuid", lambda: uid)


def test_chosen_directories_come_first(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("COGFS_STATE_DIR", str(tmp_path / "s"))
    environment.setenv("COGFS_RUNTIME_DIR", str(tmp_path / "r"))
    for uid in (0, 1000):
        _as_user(environment, uid)
        assert places.state_dir() == tmp_path / "s"
        assert places.runtime_dir() == tmp_path / "r"
        assert places.log_file() == tmp_path / "s" / "cogfsd.log"
        assert places.default_endpoint() == f"unix://{tmp_path}/r/cogfsd.sock"


def test_root_has_the_systems_directories(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("XDG_STATE_HOME", str(tmp_path))
    environment.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    _as_user(environment, 0)
    assert places.state_dir() == Path("/var/lib/cogfs")
    assert places.runtime_dir() == Path("/run/cogfs")


def test_user_has_those_of_the_session(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _as_user(environment, 1000)
    environment.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    environment.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert places.state_dir() == tmp_path / "state" / "cogfs"
    assert places.runtime_dir() == tmp_path / "cogfs"


def test_without_a_session_the_runtime_directory_is_in_the_state(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _as_user(environment, 1000)
    state = tmp_path / ".local" / "state" / "cogfs"
    assert places.state_dir() == state
    assert places.runtime_dir() == state / "run"
    environment.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert places.runtime_dir() == state / "run"


def test_empty_and_relative_xdg_variables_do_not_count(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _as_user(environment, 1000)
    environment.setenv("COGFS_STATE_DIR", "")
    environment.setenv("XDG_STATE_HOME", "relative")
    environment.setenv("COGFS_ENDPOINT", "")
    assert places.state_dir() == tmp_path / ".local" / "state" / "cogfs"
    assert places.default_endpoint() == places.socket_endpoint()


def test_endpoint_of_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("COGFS_ENDPOINT", "127.0.0.1:7777")
    assert places.default_endpoint() == "127.0.0.1:7777"
    assert places.default_endpoint() != places.socket_endpoint()


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("unix:///run/cogfs/cogfsd.sock", "/run/cogfs/cogfsd.sock"),
        ("unix:/run/cogfs/cogfsd.sock", "/run/cogfs/cogfsd.sock"),
        ("unix:///a%20b%25/c", "/a b%/c"),
        ("unix:relative", None),
        ("localhost:1", None),
    ],
)
def test_socket_path(endpoint: str, path: str | None) -> None:
    assert places.socket_path(endpoint) == path


@pytest.mark.parametrize("name", ["plain", "a b", "50%", "q?#", "名", os.fsdecode(b"\xff")])
def test_socket_endpoint_names_its_path(environment: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    environment.setenv("COGFS_RUNTIME_DIR", str(tmp_path / name))
    assert places.socket_path(places.socket_endpoint()) == str(tmp_path / name / "cogfsd.sock")
