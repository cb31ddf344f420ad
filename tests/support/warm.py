"""``cogfsctl`` in a process of its own that need not begin with half a second of imports.

A server imports the command line once and forks for each call: the child gets the arguments, environment, directory
and descriptors of the call, and runs the same ``main`` to the same exit code. Tests that are about how ``cogfsctl`` is
started, or that signal it, start it themselves.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import cogfs.client
import cogfs.ctl.screen
from cogfs.ctl.main import main

#: What the command line imports when it needs it.
_IMPORTED = (cogfs.client, cogfs.ctl.screen)

Argument = str | bytes | os.PathLike[str]

_LARGEST = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]


def run(
    arguments: Sequence[Argument],
    env: Mapping[str, str],
    *,
    timeout: float,
    stdin: bytes = b"",
    cwd: Path | str | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """One call, whatever its exit code; minus a signal's number where that ended it. subprocess.TimeoutExpired."""
    words = [os.fsdecode(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            call = json.dumps([words, dict(env), os.fspath(cwd or os.getcwd())]).encode()
            with theirs:
                descriptors = [theirs.fileno(), given.fileno(), out.fileno(), err.fileno()]
                socket.send_fds(_server.connection(), [call], descriptors)
            ours.settimeout(timeout)
            pid = int(ours.recv(32))
            try:
                code = ours.recv(32)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, int(code), out.read(), err.read())


class _Server:
    """The server of this process, started by the first call. It ends with its connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def connection(self) -> socket.socket:
        with self._lock:
            if self._connection is None:
                self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST)
                with theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
                        cwd=_ROOT,
                        pass_fds=[theirs.fileno()],
                    )
                atexit.register(self._end, self._connection, process)
            return self._connection

    @staticmethod
    def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        connection.close()
        process.wait()


_server = _Server()


def _serve(connection: socket.socket) -> None:
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            _parent(message, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _parent(message: bytes, descriptors: list[int]) -> None:
    """Who has started a call, and waits for it: only when it is gone is it said to have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(descriptors[0])
        _child(message, descriptors[1:])
    with socket.socket(fileno=descriptors[0]) as answer:
        answer.send(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        answer.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _child(message: bytes, descriptors: list[int]) -> None:
    """What the interpreter does around ``main``."""
    code = 1
    try:
        words, env, cwd = json.loads(message)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = ["cogfsctl", *words]
        main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
