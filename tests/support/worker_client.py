"""A mount worker as a subprocess, and a synchronous client of its channel, for tests and benchmarks."""

from __future__ import annotations

import array
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from cogfs.fsd import channel

T = TypeVar("T")


class Call:
    """A call in a thread, since a parked one does not return."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error = 0
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except OSError as error:
            self.error = error.errno or -1

    def parked(self) -> bool:
        """Whether it is still under way after a time that is long for a call."""
        self._thread.join(0.15)
        return self._thread.is_alive()

    def wait(self) -> int:
        """Its errno, or 0."""
        self._thread.join(180)
        assert not self._thread.is_alive()
        return self.error


_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """``umount2``. OSError."""
    if _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH if lazy else 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(mountpoint))


class WorkerClient:
    """The control process's end of a channel."""

    def __init__(self, path: Path, *, version: int = channel.PROTOCOL_VERSION, timeout: float = 180) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        self.socket.connect(str(path))
        self._splitter = channel.Splitter()
        self._bodies: list[bytes] = []
        self._number = 0
        self.socket.sendall(channel.encode(channel.Hello(version, os.getpid())))
        data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(4))
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        #: What the worker has said by itself and nobody has looked at yet.
        self.wanted: list[channel.Wanted] = []
        #: Why it could not write its undo log, when it said so.
        self.broken: list[str] = []
        #: Descriptor of the backing root.
        self.root_fd: int = fds[0]
        self._bodies += self._splitter.feed(data)
        self.welcome = channel.welcome_decoder.decode(self._body())

    def _body(self) -> bytes:
        while not self._bodies:
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the worker closed the connection")
            self._bodies += self._splitter.feed(data)
        return self._bodies.pop(0)

    def send(self, request: channel.Request) -> int:
        """Send without waiting for the reply; the number of the request."""
        self._number += 1
        self.socket.sendall(channel.encode(channel.RequestFrame(self._number, request)))
        return self._number

    def receive(self, number: int) -> channel.Answer:
        """The reply to the request with this number, which must be the next reply."""
        while True:
            reply = channel.reply_decoder.decode(self._body())
            if self._unasked(reply):
                continue
            assert reply.number == number
            assert not isinstance(reply.answer, channel.Wanted | channel.Broken)
            return reply.answer

    def _unasked(self, reply: channel.ReplyFrame) -> bool:
        if isinstance(reply.answer, channel.Wanted):
            self.wanted.append(reply.answer)
        elif isinstance(reply.answer, channel.Broken):
            self.broken.append(reply.answer.reason)
        else:
            return False
        assert reply.number == 0
        return True

    def listen(self, seconds: float) -> bool:
        """Take in what the worker says by itself; whether it said something within this time."""
        if not self._bodies:
            former = self.socket.gettimeout()
            self.socket.settimeout(seconds)
            try:
                body = self._body()
            except (TimeoutError, BlockingIOError):
                return False
            finally:
                self.socket.settimeout(former)
            self._bodies.insert(0, body)
        assert self._unasked(channel.reply_decoder.decode(self._body()))
        return True

    def next_wanted(self, seconds: float = 20) -> channel.Wanted:
        """The next file that the worker asks for."""
        while not self.wanted:
            assert self.listen(seconds), "the worker asks for nothing"
        return self.wanted.pop(0)

    def ask(self, request: channel.Request) -> channel.Answer:
        """One request and its answer."""
        return self.receive(self.send(request))

    def expect(self, request: channel.Request, kind: type[T]) -> T:
        """One request, whose answer must be of this kind."""
        answer = self.ask(request)
        assert isinstance(answer, kind), answer
        return answer

    def freeze(self) -> channel.Frozen:
        """Park mutating calls; what is dirty."""
        return self.expect(channel.Freeze(), channel.Frozen)

    def resume(self) -> None:
        """Let parked calls go on."""
        self.expect(channel.Resume(), channel.Done)

    def checkpoint(self) -> channel.Frozen:
        """Freeze, commit and resume at once; what was dirty."""
        frozen = self.freeze()
        self.expect(channel.Committed(frozen.generation), channel.Done)
        self.resume()
        return frozen

    def boundary(self, *, unlisted: bool = False) -> channel.Frozen:
        """The same, with a boundary; what was dirty."""
        frozen = self.expect(channel.Freeze(unlisted), channel.Frozen)
        self.expect(channel.Committed(frozen.generation, True), channel.Done)
        self.resume()
        return frozen

    def reconnected(self, boundaries: list[int]) -> None:
        """Say which of the boundaries are some."""
        self.expect(channel.Reconcile(boundaries), channel.Done)

    def stats(self) -> channel.Stats:
        """The worker's counters."""
        return self.expect(channel.GetStats(), channel.Stats)

    def counts(self) -> dict[str, int]:
        """Calls by operation."""
        return {operation.name: operation.count for operation in self.stats().operations}

    def close(self) -> None:
        """End the connection."""
        os.close(self.root_fd)
        self.socket.close()

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MountedWorker:
    """A worker with a backing directory of its own, mounted elsewhere or in place."""

    def __init__(
        self,
        *arguments: str,
        in_place: bool = False,
        base: Path | None = None,
        python: str = "",
        user: int | None = None,
        undo_log: bool = False,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="cogfs-test-", dir=base))
        self.directory.chmod(0o755)
        self.root = self.directory / "root"
        self.root.mkdir()
        self.mountpoint = self.root if in_place else self.directory / "mount"
        self.mountpoint.mkdir(exist_ok=True)
        self.socket = self.directory / "worker.sock"
        self.log_path = self.directory / "worker.log"
        #: In a directory of its own, for a test to mount something on.
        self.undo_log = self.directory / "log" / "undo"
        self.undo_log.parent.mkdir()
        if undo_log:
            arguments += ("--undo-log", str(self.undo_log))
        self.arguments = arguments
        self._python = python or sys.executable
        self._user = user
        if user is not None:
            for path in (self.directory, self.root, self.mountpoint):
                os.chown(path, user, user)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the worker, and wait until it serves."""
        self.process, ready = self.spawn()
        assert ready.get("ok"), (ready, self.log())
        assert ready["pid"] == self.process.pid
        return self.process

    def spawn(self) -> tuple[subprocess.Popen[bytes], dict[str, object]]:
        """Start the worker; what it wrote when it was ready."""
        reader, writer = os.pipe()
        command = [self._python, "-m", "cogfs.fsd.mount", "--workspace-id", "w1", "--root", str(self.root)]
        command += ["--mountpoint", str(self.mountpoint), "--socket", str(self.socket), "--ready-fd", str(writer)]
        try:
            with self.log_path.open("ab") as log:
                process = subprocess.Popen(
                    [*command, *self.arguments],
                    pass_fds=[writer],
                    stderr=log,
                    start_new_session=True,
                    user=self._user,
                    group=self._user,
                    extra_groups=None if self._user is None else [],
                )
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            line = pipe.readline()
        return process, json.loads(line) if line else {}

    def connect(self) -> WorkerClient:
        """A client of the channel."""
        return WorkerClient(self.socket)

    def log(self) -> str:
        """What the worker has logged."""
        return self.log_path.read_text()

    def errors(self) -> list[str]:
        """Logged events of level error or above, but for releases that an unmount overtook: nobody waits for those."""
        records = [json.loads(line) for line in self.log().splitlines()]
        events = [record["event"] for record in records if record["level"] in ("error", "critical")]
        return [event for event in events if not event.startswith("fuse_release(): fuse_reply_* failed")]

    def unmount(self) -> int:
        """Unmount, and wait for the worker's end; its exit code."""
        unmount(self.mountpoint)
        return self.process.wait(180)

    def stop(self) -> None:
        """Whatever state it is in: nothing of it is left afterwards."""
        if self.process.poll() is None:
            try:
                unmount(self.mountpoint)
                self.process.wait(60)
            except (OSError, subprocess.TimeoutExpired):
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()
        while os.path.ismount(self.mountpoint) or _dead(self.mountpoint):
            unmount(self.mountpoint, lazy=True)
        shutil.rmtree(self.directory)


def _dead(mountpoint: Path) -> bool:
    try:
        mountpoint.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
