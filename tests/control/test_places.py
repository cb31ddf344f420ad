"""Where things are kept, by environment and user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.places import find
from cogfs.v1.reasons import Reason


def test_root() -> None:
    found = find({"HOME": "/root", "XDG_RUNTIME_DIR": "/run/user/0"}, 0)
    assert found.state == Path("/var/lib/cogfs")
    assert found.runtime == Path("/run/cogfs")
    assert found.endpoint == "unix:///run/cogfs/cogfsd.sock"


def test_a_user(tmp_path: Path) -> None:
    found = find({"HOME": "/home/u", "XDG_RUNTIME_DIR": str(tmp_path)}, 7)
    assert found.state == Path("/home/u/.local/state/cogfs")
    assert found.runtime == tmp_path / "cogfs"
    assert find({"HOME": "/home/u", "XDG_STATE_HOME": "/s"}, 7).state == Path("/s/cogfs")
    assert find({"HOME": "/home/u", "XDG_STATE_HOME": "s"}, 7).state == Path("/home/u/.local/state/cogfs")


def test_a_user_without_a_login_session(tmp_path: Path) -> None:
    ended = {"HOME": "/home/u", "XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert find(ended, 7).runtime == Path("/home/u/.local/state/cogfs/run")
    assert find({"HOME": "/home/u"}, 7).runtime == Path("/home/u/.local/state/cogfs/run")
    assert find({"HOME": "/home/u", "COGFS_STATE_DIR": "/s"}, 7).runtime == Path("/s/run")


@pytest.mark.parametrize("uid", [0, 7])
def test_the_environment_comes_first(uid: int) -> None:
    found = find({"HOME": "/h", "COGFS_STATE_DIR": "/a//b/", "COGFS_RUNTIME_DIR": "/r"}, uid)
    assert (found.state, found.runtime) == (Path("/a/b"), Path("/r"))
    assert found.store == Path("/a/b/store")
    assert found.worker_socket("ws_1") == Path("/r/workers/ws_1.sock")
    assert find({"HOME": "/h", "COGFS_ENDPOINT": "unix:///e/d.sock"}, uid).socket == Path("/e/d.sock")


@pytest.mark.parametrize(
    "environ",
    [
        {"COGFS_STATE_DIR": "relative"},
        {"COGFS_RUNTIME_DIR": "./r"},
        {"COGFS_ENDPOINT": "localhost:50051"},
        {"COGFS_ENDPOINT": "unix://relative.sock"},
        {"COGFS_ENDPOINT": "unix:relative.sock"},
    ],
)
def test_nonsense(environ: dict[str, str]) -> None:
    with pytest.raises(CogfsError) as caught:
        find({"HOME": "/h", **environ}, 7)
    assert caught.value.reason is Reason.VALIDATION_ERROR


def test_made_for_the_owner_whatever_the_umask(base: Path) -> None:
    places = find({"COGFS_STATE_DIR": str(base / "a" / "s"), "COGFS_RUNTIME_DIR": str(base / "r")}, 0)
    before = os.umask(0o777)
    try:
        (base / "a").mkdir()
        (base / "a").chmod(0o755)
        places.make()
    finally:
        os.umask(before)
    places.state.chmod(0o755)
    places.make()
    for directory in (places.state, places.runtime, places.logs, places.workers):
        assert directory.stat().st_mode & 0o7777 == 0o700
