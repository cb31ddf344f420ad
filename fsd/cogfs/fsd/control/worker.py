"""A mount worker as a process: started so that it outlives the control process, watched and ended.

Must not know what the worker serves beyond its command line.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cogfs.fsd.control.errors import CogfsError, from_os_error, show
from cogfs.fsd.control.places import SOCKET_PATH_MAX, Places
from cogfs.fsd.control.roots import OFFER
from cogfs.fsd.control.rules import DEFAULT_NAMES
from cogfs.v1.reasons import Reason

#: Seconds until a new worker has mounted.
_START_PATIENCE = 120.0
_LOG_MAX = 4 << 20
#: Of its log, the last bytes are looked at for why it ended.
_LOG_TAIL = 4096

#: Children that serve what was open in a mount that is no more; looked after so that they leave no zombies.
_lingering: list[subprocess.Popen[bytes]] = []


class WorkerProcess:
    """A process that is a worker, our child or not, by a descriptor that no later process can take over."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """ProcessLookupError when there is no such process."""
        self.pid = pid
        self._child = child
        self._descriptor = os.pidfd_open(pid)

    def wait(self, patience: float) -> bool:
        """Wait for its end. False when it still runs."""
        if self._descriptor < 0:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(patience * 1000))

    def kill(self) -> None:
        if self._descriptor >= 0:
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def how_it_ended(self) -> str:
        """In a few words, for a process that has ended."""
        code = self._child.wait(1) if self._child is not None else None
        if code is None:
            return f"the mount worker {self.pid} has ended"
        if code < 0:
            return f"the mount worker {self.pid} was killed by {signal.Signals(-code).name}"
        return f"the mount worker {self.pid} ended with exit code {code}"

    def close(self) -> None:
        """Give the descriptor back; the process goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._child is not None and self._child.poll() is None:
            _lingering.append(self._child)
            self._child = None


def end(pid: int) -> None:
    """Kill a worker that is not our child, and wait for its end."""
    try:
        process = WorkerProcess(pid)
    except ProcessLookupError:
        return
    process.kill()
    process.wait(5)
    process.close()


def start(
    places: Places, workspace_id: str, root: bytes, mountpoint: bytes, *, generation: int, boundaries: Sequence[int]
) -> WorkerProcess:
    """Start a worker and wait until it has mounted and listens. UNAVAILABLE, with why, when it does not come up.

    ``generation``: the number of its first one. ``boundaries``: those that are not captured yet.
    """
    _lingering[:] = [child for child in _lingering if child.poll() is None]
    socket_path = places.worker_socket(workspace_id)
    log = places.worker_log(workspace_id)
    try:
        forget(places, workspace_id)
        _bound(log)
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        written = os.fstat(log_fd).st_size
        mark = os.open(places.worker_mark(workspace_id), os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        directory = os.open(places.workers, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, "start a mount worker") from error
    ready, ready_in_worker = os.pipe2(os.O_CLOEXEC)
    keep = [ready_in_worker, mark]
    shown = os.fsencode(socket_path)
    if len(shown) > SOCKET_PATH_MAX:
        # A socket is bound by a path of bounded length; through the directory's descriptor it is short.
        shown = b"/proc/self/fd/%d/%s" % (directory, os.fsencode(socket_path.name))
        keep.append(directory)
    try:
        child = subprocess.Popen(
            [
                *_command(workspace_id, root, mountpoint, shown, ready_in_worker),
                *("--undo-log", places.undo_log(workspace_id)),
                *("--generation", str(generation)),
                *(word for number in boundaries for word in ("--boundary", str(number))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            cwd="/",
            pass_fds=keep,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
        )
    except OSError as error:
        os.close(ready)
        raise from_os_error(error, "start a mount worker") from error
    finally:
        for descriptor in (log_fd, mark, directory, ready_in_worker):
            os.close(descriptor)
    process = WorkerProcess(child.pid, child)
    try:
        _await_ready(ready, process, mountpoint, log, written)
    except BaseException:
        process.kill()
        process.wait(5)
        process.how_it_ended()
        process.close()
        raise
    finally:
        os.close(ready)
    return process


def running(places: Places, workspace_id: str) -> list[int]:
    """Workers of the workspace that run, even one that has not come as far as its socket, or does not answer there."""
    mark = str(places.worker_mark(workspace_id))
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _holds(name, mark)]


def _holds(pid: str, path: str) -> bool:
    if int(pid) == os.getpid():
        return False
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{number}") == path for number in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False  # Not ours, or gone.


def forget(places: Places, workspace_id: str) -> None:
    """Remove what a worker is found by. One that still serves what was open in its mount is nobody's from then on."""
    places.worker_socket(workspace_id).unlink(missing_ok=True)
    places.worker_mark(workspace_id).unlink(missing_ok=True)


def _command(workspace_id: str, root: bytes, mountpoint: bytes, socket_path: bytes, ready: int) -> list[str | bytes]:
    # -P: the current directory is no place to import from.
    command: list[str | bytes] = [sys.executable, "-P", "-m", "cogfs.fsd.mount"]
    command += ["--workspace-id", workspace_id, "--root", root, "--mountpoint", mountpoint]
    command += ["--socket", socket_path, "--ready-fd", str(ready)]
    if os.geteuid() == 0:
        command.append("--allow-other")
    for name in sorted(DEFAULT_NAMES):
        command += ["--exclude-name", name]
    return command


def _await_ready(ready: int, process: WorkerProcess, mountpoint: bytes, log: Path, written: int) -> None:
    deadline = time.monotonic() + _START_PATIENCE
    line = b""
    poll = select.poll()
    poll.register(ready, select.POLLIN | select.POLLHUP)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise _unavailable(mountpoint, f"its worker was not ready within {_START_PATIENCE:g} s", log)
        data = os.read(ready, 65536)
        if not data:
            break
        line += data
    try:
        answer = json.loads(line) if line else None
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.get("ok") is True:
        return
    why = str(answer.get("message", "")) if isinstance(answer, dict) else ""
    if isinstance(answer, dict) and answer.get("errno") == errno.EPERM:
        why += "; a container needs the device /dev/fuse and the capability SYS_ADMIN" + OFFER
    if not why:
        process.wait(5)
        why = _last_line(log, written) or process.how_it_ended()
    raise _unavailable(mountpoint, why, log)


def _unavailable(mountpoint: bytes, why: str, log: Path) -> CogfsError:
    return CogfsError(Reason.UNAVAILABLE, f"cannot mount {show(mountpoint)}: {why}", log=str(log))


def _bound(log: Path) -> None:
    """Put a log that has grown large aside, in the place of the one before it."""
    try:
        if log.stat().st_size > _LOG_MAX:
            log.replace(log.with_suffix(".log.old"))
    except FileNotFoundError:
        pass


def _last_line(log: Path, written: int) -> str:
    """The last that was logged after the first ``written`` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(written, file.seek(0, os.SEEK_END) - _LOG_TAIL))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
