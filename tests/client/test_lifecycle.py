"""Finding, starting and stopping a process that answers as a daemon does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cogfs.client import Denied, Unavailable, ValidationError, lifecycle, places
from cogfs.v1 import admin_pb2
from tests.client.server import serving


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual place of a daemon, in directories of the test."""
    monkeypatch.delenv("COGFS_ENDPOINT", raising=False)
    monkeypatch.setenv("COGFS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COGFS_RUNTIME_DIR", str(tmp_path))
    return places.socket_endpoint()


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_start_waits_for_the_answer_and_stop_for_the_end(endpoint: str) -> None:
    repository = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(repository)!r}); sys.argv[1:] = [{endpoint!r}]; "
    daemon, started = lifecycle._start(endpoint, _python(code + "from tests.client.server import main; main()"))
    assert started
    try:
        assert os.getsid(daemon.pid) == daemon.pid
        assert os.readlink(f"/proc/{daemon.pid}/cwd") == "/"
        assert lifecycle.ensure_daemon() == (daemon, False)
    finally:
        assert lifecycle.stop_daemon() == daemon.pid
    # Reaped or about to be: it runs no more.
    with pytest.raises(Unavailable):
        lifecycle._start(endpoint, _python("raise SystemExit(3)"))
    assert lifecycle.stop_daemon() is None


def test_daemon_that_ends_says_why(endpoint: str) -> None:
    code = "import sys; print('cogfsd: the state belongs to another user', file=sys.stderr); sys.exit(13)"
    with pytest.raises(Denied, match="the daemon did not start: the state belongs to another user"):
        lifecycle._start(endpoint, _python(code))


def test_daemon_that_dies_shows_its_last_lines(endpoint: str) -> None:
    os.makedirs(places.state_dir())
    places.log_file().write_text("of an earlier one\n")
    with pytest.raises(Unavailable, match=r"(?s)exit status 1.*ZeroDivisionError") as caught:
        lifecycle._start(endpoint, _python("1/0"))
    assert "earlier" not in str(caught.value)
    assert str(places.log_file()) in str(caught.value)


def test_loser_of_a_race_waits_for_the_winner(endpoint: str, tmp_path: Path) -> None:
    """The daemon that was spawned finds another's lock and ends with 0; the other answers a little later."""
    marker = tmp_path / "lost"
    answering = threading.Event()
    done = threading.Event()

    def win() -> None:
        while not marker.exists() and not done.wait(0.01):
            pass
        with serving(endpoint, lambda context: admin_pb2.Daemon(pid=1)):
            answering.set()
            done.wait()

    winner = threading.Thread(target=win)
    winner.start()
    try:
        daemon, started = lifecycle._start(endpoint, _python(f"open({str(marker)!r}, 'w').close()"))
        assert (daemon.pid, started) == (1, False)
        assert answering.is_set()
    finally:
        done.set()
        winner.join()


def test_log_is_for_its_owner(endpoint: str) -> None:
    with pytest.raises(Unavailable):
        lifecycle._start(endpoint, _python("raise SystemExit(1)"))
    assert places.log_file().stat().st_mode & 0o777 == 0o600
    assert places.state_dir().stat().st_mode & 0o777 == 0o700


def test_log_is_never_written_through_a_link(endpoint: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    os.makedirs(places.state_dir())
    places.log_file().symlink_to(target)
    with pytest.raises(Exception, match="cannot be written"):
        lifecycle._start(endpoint, _python("print('over it')"))
    assert target.read_text() == "keep"


def test_only_a_unix_socket_can_be_started_or_stopped(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="only on a Unix socket"):
        lifecycle.ensure_daemon("127.0.0.1:1")
    with pytest.raises(ValidationError, match="its own machine"):
        lifecycle.stop_daemon("127.0.0.1:1")


def test_daemon_is_told_where_it_is_looked_for(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COGFS_STATE_DIR")
    environment = lifecycle.daemon_environment(endpoint)
    assert environment["COGFS_STATE_DIR"] == str(places.state_dir())
    assert environment["COGFS_RUNTIME_DIR"] == str(tmp_path)
    assert "COGFS_ENDPOINT" not in environment
    assert lifecycle.daemon_environment("unix:///x/y")["COGFS_ENDPOINT"] == "unix:///x/y"


def test_command_runs_this_interpreter() -> None:
    assert lifecycle.missing_packages() == []
    command = lifecycle.daemon_command(("--leave-mounts",))
    assert command[0] == sys.executable
    assert command[-1] == "--leave-mounts"
    # Not from a directory where somebody planted a module.
    assert "-P" in command
    subprocess.run([sys.executable, "-P", "-c", ""], check=True)
