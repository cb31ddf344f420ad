"""The life of the daemon's process as a client sees it: find it, start it, stop it. Imports nothing of the daemon."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

from cogfs.client import places
from cogfs.client.connection import Connection
from cogfs.client.errors import CLASSES, CogfsError, Denied, IOFailed, Unavailable, ValidationError
from cogfs.v1 import admin_pb2
from cogfs.v1.reasons import Reason

#: Seconds in which a daemon that was started has to answer.
START_TIMEOUT = 120.0
#: Seconds in which a daemon that was told to stop has to be gone: it ends its calls and unmounts first.
STOP_TIMEOUT = 60.0
#: Seconds for one question whether it answers.
_ASK_TIMEOUT = 5.0
_POLL = 0.05
#: Seconds after which a start that found another daemon's lock is tried again: that one may have been ending.
_RETRY = 1.0
_LOG_LINES = 12


def find_daemon(endpoint: str | None = None) -> admin_pb2.Daemon | None:
    """The daemon that answers at ``endpoint``, or at the usual place; None when none does."""
    connection = None
    try:
        connection = Connection(endpoint or places.default_endpoint())
        return connection.call(connection.admin.GetDaemon, admin_pb2.GetDaemonRequest(), _ASK_TIMEOUT)
    except Unavailable:
        return None
    finally:
        if connection is not None:
            connection.close()


def daemon_command(arguments: tuple[str, ...] = ()) -> list[str]:
    """The command that runs a daemon. Unavailable when what it needs is not installed beside this client."""
    missing = missing_packages()
    if missing:
        raise Unavailable(
            f"the daemon is not installed here (missing: {', '.join(missing)}): run `pip install 'cogfs[daemon]'`"
        )
    # -P: the working directory holds no module of ours.
    return [sys.executable, "-P", "-m", "cogfs.fsd.control.main", *arguments]


def daemon_environment(endpoint: str) -> dict[str, str]:
    """The environment of a daemon: it is told the places in which this client looks for it."""
    environment = {
        **os.environ,
        "COGFS_STATE_DIR": os.fspath(places.state_dir()),
        "COGFS_RUNTIME_DIR": os.fspath(places.runtime_dir()),
        "COGFS_ENDPOINT": endpoint,
    }
    if endpoint == places.socket_endpoint():
        del environment["COGFS_ENDPOINT"]
    return environment


def missing_packages() -> list[str]:
    """The distributions of the extra ``daemon`` that are not installed."""
    # Here, as it takes long to import and is seldom needed.
    import importlib.metadata

    try:
        requirements = importlib.metadata.requires("cogfs") or []
    except importlib.metadata.PackageNotFoundError:
        return ["cogfs"]
    missing = []
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is None or not re.search(r"""extra\s*==\s*['"]daemon['"]""", requirement):
            continue
        try:
            importlib.metadata.version(name.group())
        except importlib.metadata.PackageNotFoundError:
            missing.append(name.group())
    return missing


def ensure_daemon(endpoint: str | None = None, *, leave_mounts: bool = False) -> tuple[admin_pb2.Daemon, bool]:
    """The daemon that answers, started in the background when none did; and whether it was started here.

    Unavailable when nothing can be started there, as it is no Unix socket or the daemon is not installed, and when the
    daemon does not come up: then with the last lines of its log, and of the class that its exit code names.
    """
    wanted = endpoint or places.default_endpoint()
    found = find_daemon(wanted)
    if found is not None:
        return found, False
    if places.socket_path(wanted) is None:
        raise Unavailable(f"no cogfs daemon answers at {wanted}, and one can be started only on a Unix socket")
    return _start(wanted, daemon_command(("--leave-mounts",) if leave_mounts else ()))


def _start(endpoint: str, command: list[str]) -> tuple[admin_pb2.Daemon, bool]:
    """The daemon that answers, and whether it is the one that was begun here."""
    log = _open_log()
    try:
        beginning = os.fstat(log).st_size
        process = _spawn(command, endpoint, log)
        started = time.monotonic()
        deadline = started + START_TIMEOUT
        while True:
            found = find_daemon(endpoint)
            now = time.monotonic()
            status = process.poll()
            # While another one answers, the one that was begun here is seen to its end: it would come up, and stay,
            # should the other be told to stop before this one looks for the lock.
            if found is not None and (found.pid == process.pid or status is not None or now > deadline):
                return found, found.pid == process.pid
            if status:
                raise _ended(status, _last_lines(beginning))
            if now > deadline:
                raise Unavailable(
                    _with_log(f"the daemon does not answer after {START_TIMEOUT:.0f} s", _last_lines(beginning))
                )
            # Status 0 without an answer: another daemon held the lock. It is coming up, or it was just ending.
            if status == 0 and now > started + _RETRY:
                process = _spawn(command, endpoint, log)
                started = now
            time.sleep(_POLL)
    finally:
        os.close(log)


def _open_log() -> int:
    path = places.log_file()
    try:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        raise Denied(f"{path} may not be written: set COGFS_STATE_DIR to a directory of your own") from None
    except OSError as error:
        raise IOFailed(f"{path} cannot be written: {error.strerror}") from None


def _spawn(command: list[str], endpoint: str, log: int) -> subprocess.Popen[bytes]:
    """A process that survives this one, its terminal and its working directory."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env=daemon_environment(endpoint),
        start_new_session=True,
        umask=0o077,
    )
    # Reaps it, should it end before this process does.
    threading.Thread(target=process.wait, name="cogfsd-reaper", daemon=True).start()
    return process


def _last_lines(beginning: int) -> list[str]:
    """The last lines that were logged since ``beginning``."""
    try:
        with open(places.log_file(), "rb") as log:
            log.seek(beginning)
            text = log.read()[-65536:].decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]


def _ended(status: int, lines: list[str]) -> CogfsError:
    """The error for a daemon that ended instead of answering: its own sentence and reason when it gave them."""
    reasons = {reason.exit_code: reason for reason in Reason}
    if status in reasons and lines and lines[-1].startswith("cogfsd: "):
        return CLASSES[reasons[status]](f"the daemon did not start: {lines[-1].removeprefix('cogfsd: ')}")
    return Unavailable(_with_log(f"the daemon did not start (exit status {status})", lines))


def _with_log(sentence: str, lines: list[str]) -> str:
    return f"{sentence}; see {places.log_file()}" + "".join(f"\n  {line}" for line in lines)


def stop_daemon(endpoint: str | None = None) -> int | None:
    """Tells the daemon to end and waits until it has; its process id, or None when none answered.

    Denied when it belongs to another user. Unavailable when it is still there after a minute.
    """
    wanted = endpoint or places.default_endpoint()
    if places.socket_path(wanted) is None:
        raise ValidationError(f"{wanted} is not a Unix socket: the daemon can only be stopped on its own machine")
    found = find_daemon(wanted)
    if found is None:
        return None
    try:
        # A descriptor, so that a process that takes the number later is never meant.
        process = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return found.pid
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
        waiter = select.poll()
        waiter.register(process, select.POLLIN)
        if not waiter.poll(STOP_TIMEOUT * 1000):
            raise Unavailable(
                f"the daemon (process {found.pid}) is still there after {STOP_TIMEOUT:.0f} s; see {places.log_file()}"
            )
    except PermissionError:
        raise Denied(f"the daemon (process {found.pid}) belongs to another user") from None
    finally:
        os.close(process)
    return found.pid
