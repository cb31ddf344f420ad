"""A daemon of its own with a project, run as a user runs it: started by ``cogfsctl``, and killed as the test likes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cogfs.client import Client, CogfsError, Workspace, connect
from cogfs.v1 import workspace_pb2
from tests.support import warm

#: Longest wait for anything; reached only when something is wrong.
PATIENCE = 240.0
_ROOM = 512 << 20

CTL = Path(sys.executable).with_name("cogfsctl")
State = workspace_pb2.Workspace


def fast_directory() -> Path:
    """A directory of its own, in memory where there is room."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM
    return Path(tempfile.mkdtemp(prefix="cogfs-e2e-", dir=memory if roomy else None))


def wait_for(what: str, condition: Callable[[], object], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def kill(pid: int) -> None:
    """SIGKILL, and wait until it has ended. Nothing when it is gone already."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert poll.poll(PATIENCE * 1000), f"process {pid} does not end"
    finally:
        os.close(process)


class Outcome:
    """What one call of ``cogfsctl`` came to."""

    def __init__(self, arguments: Sequence[str | bytes], code: int, out: str, err: str) -> None:
        self.arguments = arguments
        self.code = code
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"cogfsctl {self.arguments}: exit code {self.code}\n{self.out}\n{self.err}"

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Site:
    """Places of one daemon below ``base``, and a project directory."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.state = base / "state"
        self.runtime = base / "run"
        self.project = base / "project"
        self.project.mkdir(exist_ok=True)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("COGFS_")},
            "COGFS_STATE_DIR": str(self.state),
            "COGFS_RUNTIME_DIR": str(self.runtime),
        }
        self.prefix: tuple[str, ...] = ()
        self._daemons: set[int] = set()

    # --- calls --------------------------------------------------------------------------------------------------------

    def ctl(self, *arguments: str | bytes | Path, code: int | None = 0, env: dict[str, str] | None = None) -> Outcome:
        """One call of ``cogfsctl``, which has to end with ``code``, unless that is None."""
        words = [os.fspath(argument) for argument in arguments]
        environ = {**self.environ, **(env or {})}
        if self.prefix:
            done = subprocess.run(
                [*self.prefix, str(CTL), *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE,
                cwd="/",
                check=False,
            )
        else:
            done = warm.run(words, environ, timeout=PATIENCE, cwd="/")
        outcome = Outcome(words, done.returncode, done.stdout.decode(), done.stderr.decode())
        assert code is None or outcome.code == code, outcome
        return outcome

    def prefix_as(self, user: int, group: int) -> tuple[str, ...]:
        """A prefix by which root runs a command as somebody else, in the environment of this site."""
        names = ("HOME", "COGFS_STATE_DIR", "COGFS_RUNTIME_DIR")
        environ = (f"{name}={self.environ[name]}" for name in names)
        return ("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "env", *environ)

    def json(self, *arguments: str | bytes | Path, code: int | None = 0) -> Any:
        return self.ctl(*arguments, "--json", code=code).document

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        with connect(f"unix://{self.runtime}/cogfsd.sock") as client:
            yield client

    # --- the daemon and the workers -----------------------------------------------------------------------------------

    def start(self, crash_at: str = "") -> int | None:
        """Start the daemon, which may be made to kill itself at a step; its pid, None when it did so at once."""
        outcome = self.ctl("daemon", "start", "--json", code=None if crash_at else 0, env={"COGFS_CRASH_AT": crash_at})
        if outcome.code != 0:
            return None
        pid = int(outcome.document["pid"])
        self._daemons.add(pid)
        return pid

    def daemon_pid(self) -> int:
        """Of the daemon that answers."""
        with self.client() as cog:
            pid = cog.daemon(PATIENCE).pid
        self._daemons.add(pid)
        return pid

    def kill_daemon(self) -> None:
        """kill -9 of the daemon that answers, if one does."""
        try:
            pid = self.daemon_pid()
        except CogfsError:
            return
        kill(pid)

    def mount(self, root: Path | None = None) -> None:
        self.ctl("mount", root or self.project)
        self.daemon_pid()

    def workspace(self, cog: Client) -> Workspace:
        return cog.workspace(self.project)

    def settled(self, cog: Client) -> State:
        """The workspace, once it is served again and no restore is unfinished."""
        seen: list[State] = []

        def active() -> bool:
            seen.append(self.workspace(cog).message)
            return seen[-1].state == State.ACTIVE

        try:
            wait_for("the workspace is active", active)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen[-1]}\n{self.log_tail()}") from None
        return seen[-1]

    def worker_pid(self) -> int:
        with self.client() as cog:
            return self.settled(cog).worker_pid

    def log_tail(self) -> str:
        log = self.state / "cogfsd.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-30:]) if log.exists() else ""

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """No process and no mount of it is left."""
        self.close_processes()
        unmount_all(self.base)
        # Not by Python, which goes down a deep tree by recursion.
        subprocess.run([*as_root(), "rm", "-rf", str(self.base)], check=False, timeout=PATIENCE)

    def close_processes(self) -> None:
        """No process of it is left, and nothing is mounted on the project."""
        with contextlib.suppress(subprocess.TimeoutExpired, CogfsError):
            self._daemons.add(self.daemon_pid())
            self.ctl("daemon", "stop", code=None)
        for pid in self._daemons:
            if _is_ours(pid, self.base):
                kill(pid)
        for pid in _workers(self.base):
            kill(pid)
        unmount_all(self.project)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_ours(pid: int, base: Path) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"COGFS_STATE_DIR=" + os.fsencode(base) + b"/" in environ


def _workers(base: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and b"cogfs.fsd" in _command_line(int(name)) and _is_ours(int(name), base):
            found.append(int(name))
    return found


def mounts_below(base: Path) -> list[str]:
    """Mountpoints below ``base``, the last one first."""
    with open("/proc/self/mounts", "rb") as table:
        fields = [line.split(b" ")[1].decode("unicode_escape") for line in table]
    points = [os.fsdecode(field.encode("latin-1")) for field in fields]
    return [point for point in reversed(points) if point == str(base) or point.startswith(f"{base}/")]


def as_root() -> list[str]:
    """What to put before a command that needs root."""
    return [] if os.geteuid() == 0 else ["sudo", "-n"]


def unmount_all(base: Path) -> None:
    for point in mounts_below(base):
        subprocess.run([*as_root(), "umount", "-l", point], check=False, timeout=PATIENCE)


@contextlib.contextmanager
def site() -> Iterator[Site]:
    place = Site(fast_directory())
    try:
        yield place
    finally:
        place.close()


class Aside:
    """Something that goes on in a thread; what it raises is kept for ``join``."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._act = act
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:
            self.error = error

    def join(self, patience: float = PATIENCE) -> None:
        """Wait for its end; an error of the API is left in ``error``, any other is raised."""
        self._thread.join(patience)
        assert not self._thread.is_alive(), "it hangs"
        if self.error is not None and not isinstance(self.error, CogfsError):
            raise self.error
