"""``cogfsctl`` as a process, with a state and runtime directory of the test's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.warm import Argument

#: How the kernel writes white space and backslashes in names.
_OCTAL = re.compile(rb"\\([0-7]{3})")
#: No command of a test takes longer, however slow the machine is.
TIMEOUT = 240


class Ctl:
    """The command line for the daemon whose directories are below ``base``."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.environment = {
            **os.environ,
            "COGFS_STATE_DIR": str(base / "state"),
            "COGFS_RUNTIME_DIR": str(base / "run"),
            "NO_COLOR": "1",
        }
        self.environment.pop("COGFS_ENDPOINT", None)

    def command(self, *arguments: Argument) -> list[Argument]:
        """To start it otherwise than ``run`` does."""
        return [sys.executable, "-m", "cogfs.ctl.main", *arguments]

    def run(
        self, *arguments: Argument, stdin: bytes = b"", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """The finished command, whatever its exit code."""
        return warm.run(arguments, self.environment, stdin=stdin, cwd=cwd, timeout=TIMEOUT)

    def __call__(self, *arguments: Argument, stdin: bytes = b"", cwd: Path | None = None) -> str:
        """What a command that must succeed prints."""
        done = self.run(*arguments, stdin=stdin, cwd=cwd)
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout!r}\n{done.stderr!r}"
        return done.stdout.decode()

    def json(self, *arguments: Argument, stdin: bytes = b"", cwd: Path | None = None) -> Any:
        """The document of a command that must succeed."""
        # After the command and before what follows "--".
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return json.loads(self(*arguments[:end], "--json", *arguments[end:], stdin=stdin, cwd=cwd))

    def fails(self, reason: str, code: int, *arguments: Argument, cwd: Path | None = None) -> dict[str, Any]:
        """The error of a command that must fail so, told in both ways."""
        done = self.run(*arguments, "--json", cwd=cwd)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout!r}\n{done.stderr!r}"
        error: dict[str, Any] = json.loads(done.stdout)["error"]
        assert error["reason"] == reason, error
        assert error["message"]
        assert "Traceback" not in error["message"]
        assert done.stderr == b""
        done = self.run(*arguments, cwd=cwd)
        assert done.returncode == code
        assert done.stderr.startswith(b"cogfsctl: ")
        assert b"Traceback" not in done.stderr
        return error


def mounts_below(base: Path) -> list[str]:
    """The mountpoints below ``base``, the deepest first."""
    found = []
    # Mounts of others may have names of any bytes.
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            point = os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), line.split()[4]))
            if Path(point).is_relative_to(base):
                found.append(point)
    return sorted(found, key=len, reverse=True)


def processes_of(base: Path) -> dict[int, list[str]]:
    """The processes that were started with the directories below ``base``, with their command lines."""
    wanted = f"COGFS_STATE_DIR={base / 'state'}".encode()
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if wanted in environment:
            found[int(name)] = command
    return found
