"""The control process's end of the channel to one worker: a blocking client that many threads may use at once.

Owns the socket, the numbers of requests and the descriptor of the backing root. Must not know what the messages mean.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import msgspec
import structlog

from cogfs.fsd import channel
from cogfs.fsd.channel import Answer, Broken, Failed, Hello, Request, RequestFrame, Splitter, Wanted, Welcome
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.places import SOCKET_PATH_MAX
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: What a worker says by itself.
Event = Wanted | Broken

#: Seconds without an answer before the mount is poked, and between pokes.
_POKE_AFTER = 1.0
#: Pokes that may be stuck at once.
_POKES = 4
#: Seconds that sending one frame may make no progress.
_SEND_PATIENCE = 30
_READ_SIZE = 1 << 18
_INT = struct.Struct("i")


class WorkerGone(CogfsError):
    """The connection to the worker ended, or there is none."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class WorkerSilent(CogfsError):
    """The worker did not answer in time. It may still carry out the request."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class WorkerRefused(CogfsError):
    """The worker answered that it did not carry out the request."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(Reason.BUSY if number == errno.EBUSY else Reason.IO, f"the mount worker refused: {why}")
        self.errno = number
        self.why = why


class OtherVersion(CogfsError):
    """The worker speaks another version of the channel."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNAVAILABLE, message)


class _Poker:
    """Makes the kernel send a worker requests: its session may sit in a read of ``/dev/fuse`` until one comes."""

    def __init__(self, mountpoint: bytes) -> None:
        self._mountpoint = mountpoint
        self._free = threading.Semaphore(_POKES)

    def poke(self) -> None:
        """Never waits; the thread that does may be stuck for as long as the worker is."""
        if self._free.acquire(blocking=False):
            threading.Thread(target=self._run, name="link-poke", daemon=True).start()

    def _run(self) -> None:
        try:
            os.statvfs(self._mountpoint)
        except OSError:
            pass  # Whether the mount is well is not the question here.
        finally:
            self._free.release()


class WorkerLink:
    """One connection. ``root_fd`` and everything else is valid until ``close``."""

    watched = True

    def __init__(self, connection: socket.socket, welcome: Welcome, root_fd: int) -> None:
        self.welcome = welcome
        self.root_fd = root_fd
        self.mountpoint = welcome.mountpoint
        self._socket = connection
        self._sending = threading.Lock()
        #: Guards the fields below.
        self._state = threading.Lock()
        self._pending: dict[int, Future[Answer]] = {}
        self._number = 0
        self._ended = False
        self._closed = False
        self._on_end: Callable[[], None] | None = None
        self._on_event: Callable[[Event], None] | None = None
        #: What came before there was somebody to tell.
        self._events: list[Event] = []
        self._poker = _Poker(welcome.mountpoint)
        # Recv has no time limit, sending has: a worker that stopped reading must not hold a thread for ever.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_PATIENCE, 0))
        self._reader = threading.Thread(target=self._read, name=f"link-{welcome.workspace_id}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, path: Path, mountpoint: bytes, timeout: float = 10.0) -> WorkerLink:
        """Connect to the worker that listens at ``path`` and, as far as is known, serves ``mountpoint``; shake hands.

        WorkerGone when nobody answers there, OtherVersion when its version is not ours.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors: list[int] = []
        try:
            connection.settimeout(timeout)
            _connect(connection, path)
            connection.sendall(channel.encode(Hello(version=channel.PROTOCOL_VERSION, control_pid=os.getpid())))
            welcome = _receive_welcome(connection, descriptors, _Poker(mountpoint), timeout)
            if welcome.version != channel.PROTOCOL_VERSION:
                raise OtherVersion(
                    f"the mount worker {welcome.worker_pid} speaks version {welcome.version} of the channel and this "
                    f"daemon {channel.PROTOCOL_VERSION}: unmount the workspace and mount it again"
                )
            if len(descriptors) != 1:
                raise WorkerGone(f"the mount worker at {path} sent no descriptor of its root")
            return cls(connection, welcome, descriptors.pop())
        except OSError as error:
            connection.close()
            raise WorkerGone(f"no mount worker answers at {path}: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @property
    def alive(self) -> bool:
        """The connection stands."""
        return not self._ended

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once, in a thread of the link's, when the connection has ended by itself; at once
        when it has already."""
        with self._state:
            if not self._ended:
                self._on_end = callback
                return
        threading.Thread(target=callback, name="link-ended", daemon=True).start()

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Have ``callback`` called, by the link's own thread, for what the worker says by itself, before the answer to
        any request that it gives later. It must not wait."""
        with self._state:
            self._on_event = callback
            events, self._events = self._events, []
        for event in events:
            callback(event)

    def call(self, request: Request, timeout: float = 30.0) -> Answer:
        """Send ``request`` and wait ``timeout`` seconds for the answer, which is never ``Failed``.

        WorkerGone, WorkerRefused, WorkerSilent.
        """
        future: Future[Answer] = Future()
        with self._state:
            if self._ended:
                raise self._gone()
            self._number += 1
            number = self._number
            self._pending[number] = future
        try:
            self._send(channel.encode(RequestFrame(number=number, request=request)))
            answer = self._wait(future, timeout, type(request).__name__)
        finally:
            with self._state:
                self._pending.pop(number, None)
        if isinstance(answer, Failed):
            raise WorkerRefused(answer.errno, answer.reason)
        return answer

    def post(self, request: Request) -> None:
        """Send ``request`` and do not wait: it is carried out after what was sent before. WorkerGone."""
        with self._state:
            if self._ended:
                raise self._gone()
            self._number += 1
            number = self._number
        self._send(channel.encode(RequestFrame(number=number, request=request)))

    def close(self) -> None:
        """End the connection and give the descriptor back. Idempotent; ``on_end`` is not called."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._on_end = None
        self._end()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()
        os.close(self.root_fd)

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            # A frame may be half sent: the stream is of no use any more.
            self._end()
            raise self._gone() from error

    def _wait(self, future: Future[Answer], timeout: float, name: str) -> Answer:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(max(0.0, min(left, _POKE_AFTER)))
            except FutureTimeout:
                if left <= _POKE_AFTER:
                    raise WorkerSilent(
                        f"the mount worker {self.welcome.worker_pid} did not answer {name} within {timeout:g} s"
                    ) from None
                self._poker.poke()

    def _read(self) -> None:
        splitter = Splitter()
        try:
            while data := self._socket.recv(_READ_SIZE):
                for body in splitter.feed(data):
                    reply = channel.reply_decoder.decode(body)
                    if isinstance(reply.answer, Wanted | Broken):
                        self._tell(reply.answer)
                        continue
                    with self._state:
                        future = self._pending.pop(reply.number, None)
                    # None: nobody waits any longer.
                    if future is not None:
                        future.set_result(reply.answer)
        except OSError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            _log.error("malformed frame from a worker", workspace=self.welcome.workspace_id, error=str(error))
        self._end()

    def _tell(self, event: Event) -> None:
        with self._state:
            callback = self._on_event
            if callback is None:
                self._events.append(event)
        if callback is not None:
            callback(event)

    def _end(self) -> None:
        with self._state:
            if self._ended:
                return
            self._ended = True
            pending, self._pending = self._pending, {}
            callback, self._on_end = self._on_end, None
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        for future in pending.values():
            future.set_exception(self._gone())
        if callback is not None:
            threading.Thread(target=callback, name="link-ended", daemon=True).start()

    def _gone(self) -> WorkerGone:
        return WorkerGone(f"the mount worker {self.welcome.worker_pid} is gone")


def _connect(connection: socket.socket, path: Path) -> None:
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        connection.connect(os.fsencode(path))
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _receive_welcome(connection: socket.socket, descriptors: list[int], poker: _Poker, timeout: float) -> Welcome:
    """The worker's greeting; the descriptors that came with it go into ``descriptors``. OSError, also when late."""
    deadline = time.monotonic() + timeout
    splitter = Splitter()
    while True:
        connection.settimeout(min(_POKE_AFTER, max(0.001, deadline - time.monotonic())))
        try:
            data, received = _receive_descriptors(connection)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            poker.poke()
            continue
        descriptors.extend(received)
        if not data:
            raise WorkerGone("the mount worker closed the connection instead of answering")
        try:
            bodies = splitter.feed(data)
            if bodies:
                return channel.welcome_decoder.decode(bodies[0])
        except (ValueError, msgspec.MsgspecError) as error:
            raise OtherVersion(f"the mount worker's greeting cannot be understood: {error}") from error


def _receive_descriptors(connection: socket.socket) -> tuple[bytes, list[int]]:
    # socket.recv_fds of Python 3.11 takes flags and drops them.
    space = socket.CMSG_SPACE(4 * _INT.size)
    data, ancillary, _flags, _address = connection.recvmsg(_READ_SIZE, space, socket.MSG_CMSG_CLOEXEC)
    received: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _INT.size
            received += [number for (number,) in _INT.iter_unpack(content[:whole])]
    return data, received
