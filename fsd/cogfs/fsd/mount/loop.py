"""The burst loop: a stand-in for the ``trio`` that pyfuse3's session loop uses.

The session loop takes a lock and waits for the descriptor through trio before each request, which costs two task
switches and an ``epoll_wait`` even when the next request is already there. pyfuse3 reads the ``trio`` attribute of its
module at each use (its support for asyncio rests on that), so this module puts an object there whose lock does nothing
and whose ``wait_readable`` polls the descriptor itself:

- A request that is there is taken at once.
- When there is none, the thread asks again for up to ``SPIN_NS``, as long as that has paid of late, and then waits up
  to ``PATIENCE_MS`` in ``poll``, together with the descriptors given to ``watch``. A program that makes one call after
  another is served without a switch.
- After that, when a watched descriptor is readable, and every ``MAX_BURST_NS`` or so, trio gets its turn.

What has to hold: the read that follows ``wait_readable`` blocks the whole process, with the interpreter's lock, when
the descriptor is empty. Only one task runs at a time and none waits between its poll and its read, so no other task can
take the request away. The kernel can: when the caller is killed just then. An interval timer interrupts such a read.

``supported`` checks all that is used of pyfuse3; without it the stock loop runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import select
import signal
from collections.abc import Awaitable, Iterator
from time import monotonic_ns
from typing import Any, cast

import pyfuse3
import trio

#: Nanoseconds after which trio gets its turn, and how many requests are served between two looks at the clock.
MAX_BURST_NS = 20_000_000
CLOCK_READ = 16

#: The same while a thread works for a task, which waits for trio's turn.
MAX_BURST_OUTSIDE_NS = 1_000_000

#: Nanoseconds for which the loop asks again and again before it sleeps. To be woken costs more than that on a machine
#: with idle processors, a virtual one above all.
SPIN_NS = 150_000

#: After so many times in vain the loop does not spin for ``REST`` requests: who calls is busy with something else.
MAX_MISSES = 32
REST = 32

#: Milliseconds for which ``poll`` waits before the loop turns to trio.
PATIENCE_MS = 1

#: Seconds after which a read that found nothing is interrupted.
_INTERRUPT = 0.5


def supported() -> bool:
    """Whether pyfuse3 has the seam as it is known."""
    return (
        getattr(pyfuse3, "trio", None) is trio
        and pyfuse3.__version__.startswith("3.5.")
        and hasattr(pyfuse3, "_wait_fuse_readable")
        and hasattr(pyfuse3, "_session_loop")
        and inspect.iscoroutinefunction(pyfuse3.main)
    )


class _NoLoop:
    """All that a future asks of its loop when it is made."""

    def get_debug(self) -> bool:
        return False


def _ready() -> Awaitable[None]:
    """An awaitable that does not wait: a future of asyncio that is done. Three are awaited for each request, and this
    kind costs no frame of Python; no loop of asyncio has to do with it."""
    future: asyncio.Future[None] = asyncio.Future(loop=cast(Any, _NoLoop()))
    future.set_result(None)
    return future


_READY = _ready()


class _NoLock:
    """In the place of the session loop's read lock. Polling and reading are one step, so nothing has to be locked."""

    def __aenter__(self) -> Awaitable[None]:
        return _READY

    def __aexit__(self, *_: object) -> Awaitable[None]:
        return _READY


class BurstLoop:
    """Stands in for the module ``trio`` and for ``trio.lowlevel`` within pyfuse3."""

    def __init__(self) -> None:
        self.lowlevel = self
        self.Lock = _NoLock
        self.ClosedResourceError = trio.ClosedResourceError
        self.open_nursery = trio.open_nursery
        self.current_task = trio.lowlevel.current_task
        self.current_trio_token = trio.lowlevel.current_trio_token
        self.notify_closing = trio.lowlevel.notify_closing
        self._poll = select.poll()
        self._ask = self._poll.poll
        self._fd = -1
        #: Of the session's descriptor alone, which is quicker.
        self._ask_session = select.poll().poll
        #: What ``poll`` says when there is a request and nothing else.
        self._request: list[tuple[int, int]] = []
        self._burst = 0
        self._burst_end = 0
        self._outside = 0
        #: How often in a row nothing came while the loop was spinning, and how often it has not tried since.
        self._misses = 0
        self._rest = 0
        self._idle: trio.Lock | None = None

    def install(self) -> None:
        """Take trio's place, before ``pyfuse3.init``."""
        pyfuse3.trio = self  # type: ignore[attr-defined]
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        signal.setitimer(signal.ITIMER_REAL, _INTERRUPT, _INTERRUPT)

    def uninstall(self) -> None:
        """Give trio its place back."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        pyfuse3.trio = trio  # type: ignore[attr-defined]

    def watch(self, fd: int) -> None:
        """Turn to trio as soon as ``fd`` is readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Before ``fd`` is closed."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(fd)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """While a thread works for a task: its end must be noticed at once, so the loop has no patience meanwhile."""
        self._outside += 1
        self._burst_end = 0
        try:
            yield
        finally:
            self._outside -= 1

    def wait_readable(self, fd: int) -> Awaitable[None]:
        """Waits until the session's descriptor has a request, and nothing can take it away before it is read."""
        if fd != self._fd:
            self._begin(fd)
        self._burst += 1
        if self._burst % CLOCK_READ:
            if self._ask_session(0) or self._wait() == self._request:
                return _READY
        elif monotonic_ns() < self._burst_end and (self._ask(0) or self._wait()) == self._request:
            return _READY
        return self._turn(fd)

    def _wait(self) -> list[tuple[int, int]]:
        """What is readable after spinning, or within ``PATIENCE_MS``; empty when nothing is by then."""
        if self._misses < MAX_MISSES:
            ask = self._ask_session
            end = monotonic_ns() + SPIN_NS
            while monotonic_ns() < end:
                if ready := ask(0) or ask(0):
                    self._misses = 0
                    return ready
            self._misses += 1
        else:
            self._rest += 1
            if self._rest >= REST:
                self._rest = 0
                self._misses = 0
        return self._ask(0 if self._outside else PATIENCE_MS)

    def _begin(self, fd: int) -> None:
        self._fd = fd
        self._request = [(fd, select.POLLIN)]
        self._poll.register(fd, select.POLLIN)
        session = select.poll()
        session.register(fd, select.POLLIN)
        self._ask_session = session.poll

    def _has(self, fd: int, ready: list[tuple[int, int]]) -> bool:
        return any(found == fd for found, _ in ready)

    async def _turn(self, fd: int) -> None:
        """Give trio its turn, then wait through it for a request."""
        if self._idle is None:
            self._idle = trio.Lock()
        await trio.lowlevel.checkpoint()
        while not self._has(fd, self._poll.poll(0)):
            async with self._idle:
                if self._has(fd, self._poll.poll(0)):
                    break
                await trio.lowlevel.wait_readable(fd)
        self._burst = 0
        self._burst_end = monotonic_ns() + (MAX_BURST_OUTSIDE_NS if self._outside else MAX_BURST_NS)
