"""``cogfsctl`` as a process, where no daemon is."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cogfs.ctl.reference import page
from cogfs.v1.reasons import Reason
from tests.support import warm

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Directories in which no daemon listens."""
    variables = {**os.environ, "COGFS_STATE_DIR": str(tmp_path / "s"), "COGFS_RUNTIME_DIR": str(tmp_path / "r")}
    variables.pop("COGFS_ENDPOINT", None)
    return variables


def _run(
    environment: dict[str, str], *arguments: str | bytes, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return warm.run(arguments, environment, stdin=stdin, timeout=600)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["mount", "/tmp"],
        ["unmount", "/tmp"],
        ["workspaces"],
        ["handles", "/tmp"],
        ["thread", "new", "t"],
        ["threads"],
        ["log", "t"],
        ["message", "t", "x"],
        ["checkpoint", "/tmp"],
        ["snapshots", "/tmp"],
        ["show", "s"],
        ["diff", "s"],
        ["cat", "s", "p"],
        ["ls", "s"],
        ["restore", "s", "--yes"],
        ["undo", "/tmp", "--dry-run"],
        ["rewind", "t"],
        ["rewind", "t", "e", "--files", "--yes"],
    ],
    ids=" ".join,
)
def test_without_a_daemon(environment: dict[str, str], arguments: list[str]) -> None:
    done = _run(environment, "--no-start", *arguments, "--json")
    assert done.returncode == Reason.UNAVAILABLE.exit_code
    error = json.loads(done.stdout)["error"]
    assert error["reason"] == "UNAVAILABLE"
    assert "cogfsctl daemon start" in error["message"]
    assert done.stderr == b""


def test_error_for_a_person_is_one_sentence(environment: dict[str, str]) -> None:
    done = _run(environment, "--no-start", "status")
    assert done.returncode == Reason.UNAVAILABLE.exit_code
    assert done.stdout == b""
    assert done.stderr.startswith(b"cogfsctl: no cogfs daemon answers")
    assert done.stderr.count(b"\n") == 1
    assert not os.path.exists(environment["COGFS_STATE_DIR"])


def test_daemon_commands_without_a_daemon(environment: dict[str, str]) -> None:
    status = _run(environment, "daemon", "status", "--json")
    assert status.returncode == Reason.UNAVAILABLE.exit_code
    assert json.loads(status.stdout)["error"]["reason"] == "UNAVAILABLE"
    stop = _run(environment, "daemon", "stop", "--json")
    assert stop.returncode == 0
    assert json.loads(stop.stdout) == {"stopped": False, "pid": 0}
    version = _run(environment, "version", "--json")
    assert version.returncode == 0
    assert json.loads(version.stdout)["daemon_version"] is None


@pytest.mark.parametrize(
    "arguments",
    [["restore", "s"], ["undo", "/tmp"], ["rewind", "t", "e"], ["rewind", "t", "e", "--files"]],
    ids=" ".join,
)
def test_what_would_ask_needs_an_answer(environment: dict[str, str], arguments: list[str]) -> None:
    done = _run(environment, "--no-start", *arguments)
    assert done.returncode == 2
    assert b"--yes" in done.stderr
    assert b"--dry-run" in done.stderr
    done = _run(environment, "--no-start", *arguments, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reason"] == "USAGE"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["mount"],
        ["cat", "s"],
        ["message", "t", "x", "--max"],
        ["restore", "s", "--yes", "--dry-run"],
        ["rewind", "t", "--files"],
        ["rewind", "t", "e", "--no-memory", "--yes"],
        ["rewind", "t", "--no-files"],
        ["rewind", "t", "e", "--no-memory", "--no-files", "--yes"],
        ["prune", "/tmp", "--count", "0"],
        ["prune", "/tmp", "--max-age", "1 month"],
        ["mount", "/tmp", "--retain-count", "-1"],
        ["policy", "--thread", "t", "--agent", "a"],
        ["policy", "--clear", "--off"],
        ["rewind", "t", "e", "--workspace", "/tmp", "--yes"],
    ],
    ids=" ".join,
)
def test_usage(environment: dict[str, str], arguments: list[str]) -> None:
    done = _run(environment, "--no-start", *arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr
    assert b"Traceback" not in done.stderr


def test_text_that_is_not_unicode(environment: dict[str, str]) -> None:
    done = _run(environment, "--no-start", "message", "t", stdin=b"\xff")
    assert done.returncode == Reason.VALIDATION_ERROR.exit_code
    assert done.stderr == b"cogfsctl: the text is not valid UTF-8\n"
    done = _run(environment, "--no-start", "show", b"\xff")
    assert done.returncode == Reason.VALIDATION_ERROR.exit_code
    assert b"not valid UTF-8" in done.stderr


def test_endpoint_that_is_none(environment: dict[str, str]) -> None:
    done = _run({**environment, "COGFS_ENDPOINT": "nowhere"}, "daemon", "status")
    assert done.returncode == Reason.VALIDATION_ERROR.exit_code
    assert b"unix:///PATH" in done.stderr


def test_question_on_a_terminal_comes_after_the_daemon(environment: dict[str, str]) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cogfs.ctl.main", "--no-start", "restore", "s"],
            env=environment,
            stdin=follower,
            capture_output=True,
            timeout=600,
            check=False,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == Reason.UNAVAILABLE.exit_code


def test_reader_that_went_away(environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cogfs.ctl.main", "version", "--json"],
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=600,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


def test_help_loads_no_grpc(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom cogfs.ctl.invocation import Invocation\nfrom cogfs.ctl.main import app\n"
        "try:\n    app(['rewind', '--help'], obj=Invocation())\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('grpc', 'google.protobuf', 'cogfs.client') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=600, check=True)
    assert b"Usage: " in done.stdout
    assert done.stderr == b"[]\n"


def test_reference_is_current() -> None:
    assert (_REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8") == page(), "run `make generate`"


def test_reference_names_every_reason_and_an_example_of_every_command() -> None:
    text = page()
    for reason in Reason:
        assert f"| {reason.exit_code} | `{reason.name}` |" in text
    commands = [part for part in text.split("\n### ")[1:] if part.startswith("cogfsctl") and "COMMAND" not in part]
    assert len(commands) >= 23
    for command in commands:
        assert "Example: cogfsctl" in command
