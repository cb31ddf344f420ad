"""A daemon with places of its own below a temporary directory, the command line that talks to it, and their end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_COMMAND_TIMEOUT = 300.0
_END_TIMEOUT = 180.0


class CommandFailed(Exception):
    """A command of ``cogfsctl`` that ended with another status than it should."""


class Installation:
    """State and runtime directories that no other daemon shares. ``close`` leaves nothing of it behind."""

    def __init__(self, base: Path | None = None, prefix: str = "cogfs-") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base)).resolve()
        self.state = self.directory / "state"
        self.runtime = self.directory / "run"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("COGFS_")} | {
            "COGFS_STATE_DIR": str(self.state),
            "COGFS_RUNTIME_DIR": str(self.runtime),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"unix://{self.runtime / 'cogfsd.sock'}"

    def run(
        self, *arguments: str | bytes | Path, timeout: float = _COMMAND_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """``cogfsctl`` with these arguments, whatever its exit status. It starts the daemon when none answers."""
        return subprocess.run(
            [Path(sys.executable).parent / "cogfsctl", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )

    def text(self, *arguments: str | bytes | Path) -> str:
        """What ``cogfsctl`` says. CommandFailed, with its own sentence, when it fails."""
        done = self.run(*arguments)
        if done.returncode != 0:
            shown = " ".join(os.fsdecode(argument) for argument in arguments)
            raise CommandFailed(
                f"`cogfsctl {shown}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
            )
        return done.stdout

    def json(self, *arguments: str | bytes | Path) -> Any:
        """The document that ``cogfsctl … --json`` answers. CommandFailed."""
        return json.loads(self.text(*arguments, "--json"))

    def processes(self) -> list[int]:
        """The daemon and its workers, and whatever else runs in this environment."""
        mark = f"COGFS_RUNTIME_DIR={self.runtime}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    environment = Path("/proc", name, "environ").read_bytes()
                except OSError:
                    continue
                if mark in environment.split(b"\0"):
                    found.append(int(name))
        return found

    def mounts(self) -> list[Path]:
        """The mounts below the directory, the innermost first."""
        with open("/proc/self/mountinfo", "rb") as table:
            points = [Path(_unescaped(line.split(b" ")[4])) for line in table]
        return sorted((point for point in points if point.is_relative_to(self.directory)), reverse=True)

    def kill(self, pid: int) -> None:
        """``kill -9`` of one of the processes, and the wait for its end."""
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT
        while _lives(pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the daemon, takes away what is still mounted, and removes the directory. Can be repeated."""
        if not self.directory.exists():
            return
        try:
            if self.processes():
                self.run("--no-start", "daemon", "stop", timeout=_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        for point in self.mounts():
            _detach(point)
        for pid in self.processes():
            try:
                self.kill(pid)
            except ProcessLookupError:
                pass
        left = self.mounts()
        if left:
            # Removing the directory would go into them.
            raise RuntimeError(f"still mounted: {', '.join(map(str, left))}")
        remove(self.directory)


def remove(directory: Path) -> None:
    """Removes a tree, with directories in it that their owner may not enter."""
    for path, _, _ in os.walk(os.fsencode(directory), topdown=True):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
                if mode & 0o700 != 0o700:
                    os.chmod(entry.path, mode | 0o700)
    shutil.rmtree(os.fsencode(directory))


def _detach(point: Path) -> None:
    command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    subprocess.run([*command, "--", point], check=False, capture_output=True, timeout=_END_TIMEOUT)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    if state == "Z":
        # Ours, or its parent will see to it.
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        return False
    return True


def _unescaped(field: bytes) -> str:
    """A path in the mount table, where blanks and backslashes are written as octal numbers."""
    pieces = field.split(b"\\")
    return os.fsdecode(pieces[0] + b"".join(bytes([int(piece[:3], 8)]) + piece[3:] for piece in pieces[1:]))
