"""Capturing ahead of the next boundary: files that were written and then left alone are read while there is time.

What was read is remembered by the stat that the file had, and used when a recording finds it with that stat. Nothing
rests on it: what is forgotten is read again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

import structlog

from cogfs.fsd.channel import ListQuiet, Quiet
from cogfs.fsd.control.background import lower_priority
from cogfs.fsd.control.beneath import Beneath, beneath, split
from cogfs.fsd.control.capture import Captured, Vanished, capture_file
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.undolog import Status
from cogfs.store.errors import StoreError
from cogfs.store.schema import NO_HASH, Hash
from cogfs.store.store import Store

_log = structlog.get_logger(__name__)

#: Seconds for which a file must have been left alone; twice as long each time that it was read in vain, up to a bound.
_QUIET = 1.0
_MAX_QUIET = 600.0
#: A file's ctime is read from a clock that may be this late: what changed within it may change without a trace.
_TICK_NS = 20_000_000
#: Files for one round, and bytes after which a round ends.
_FILES = 256
_BYTES = 32 << 20
#: Files that are remembered.
_REMEMBERED = 100_000
#: Seconds between two rounds.
_PAUSE = 0.5
_LOWEST_PRIORITY = 19


class _Known:
    """A file that was read."""

    __slots__ = ("hash", "in_vain", "not_before", "stat")

    def __init__(self) -> None:
        self.hash: Hash = b""
        self.stat = (0, 0, 0)
        #: How often it changed again before what was read was of use.
        self.in_vain = 0
        #: When it may be read again, in seconds of the monotonic clock.
        self.not_before = 0.0


class Ahead:
    """What was captured ahead in one workspace. Its methods may be called by many threads."""

    def __init__(self, store: Store, workspace_id: str) -> None:
        self._store = store
        self._workspace_id = workspace_id
        self._lock = threading.Lock()
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def content(self, status: Status) -> Hash | None:
        """The content of a file that has this stat, where it was captured. It was of use, then."""
        with self._lock:
            known = self._known.get(status.inode)
            if known is None or not known.hash or known.stat != _key(status):
                return None
            known.in_vain = 0
            name = known.hash
        # Nothing in the store names it, so it may have been collected.
        return name if self._store.keep_file(name) else None

    def work(self, link: Link, rules: Rules) -> bool:
        """One round. Whether there may be more to do at once."""
        answer = link.call(ListQuiet(_QUIET, _FILES))
        assert isinstance(answer, Quiet)
        read = 0
        book = RecordBook(self._store, self._workspace_id)
        with beneath(link.root_fd) as reach:
            for inode, path in answer.files:
                if read > _BYTES:
                    return True
                if not rules.excludes_beneath(split(path)[0]):
                    read += self._capture(reach, book, inode, path, rules)
        return False

    def _capture(self, reach: Beneath, book: RecordBook, inode: int, path: bytes, rules: Rules) -> int:
        """Read a file where that is worth it. How many bytes were read."""
        parent, name = split(path)
        try:
            fd = reach.directory(parent)
            before = Status.of(os.stat(name, dir_fd=fd, follow_symlinks=False))
        except OSError:
            return 0
        if before.inode != inode or rules.too_large(before.size) or rules.refuses(before.nlink):
            return 0
        if rules.excludes(path, name, directory=False):
            return 0
        known = self._due(before)
        if known is None:
            return 0
        started = time.time_ns()
        with suppress(Vanished, OSError):
            recorded = book.row(os.fstat(fd).st_ino, name)
            base = recorded.entry.hash if recorded is not None else NO_HASH
            content = capture_file(self._store, name, fd, base=base)
            if isinstance(content, Captured):
                after = Status.of(content.stat)
                if after == before and after.ctime_ns < started - _TICK_NS:
                    with self._lock:
                        known.hash, known.stat = content.hash, _key(after)
        return before.size

    def _due(self, status: Status) -> _Known | None:
        """Where to remember the file, when it should be read now."""
        now = time.monotonic()
        with self._lock:
            known = self._known.pop(status.inode, None) or _Known()
            self._known[status.inode] = known
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            if known.stat == _key(status) or now < known.not_before:
                return None
            if known.hash:
                known.in_vain += 1
            known.hash, known.stat = b"", (0, 0, 0)
            known.not_before = now + min(_MAX_QUIET, _QUIET * 2.0**known.in_vain)
            return known


def _key(status: Status) -> tuple[int, int, int]:
    return status.size, status.mtime_ns, status.ctime_ns


class AheadThread:
    """Works for all workspaces, one after another, with the lowest priority."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._served: dict[str, tuple[Ahead, Link, Rules]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def serve(self, workspace_id: str, ahead: Ahead, link: Link, rules: Rules) -> None:
        """Capture ahead in a workspace from now on."""
        with self._lock:
            self._served[workspace_id] = (ahead, link, rules)

    def leave(self, workspace_id: str) -> None:
        """No longer."""
        with self._lock:
            self._served.pop(workspace_id, None)

    def close(self) -> None:
        """Stop, after the file that is being read."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        lower_priority(_LOWEST_PRIORITY)
        while not self._stop.wait(_PAUSE):
            for workspace_id, ahead, link, rules in self._all():
                if not link.alive or self._stop.is_set() or is_loaded():
                    continue
                try:
                    while ahead.work(link, rules) and not self._stop.is_set() and not is_loaded():
                        self._store.sync()
                except (CogfsError, OSError, StoreError) as error:
                    _log.warning("cannot capture ahead", workspace=workspace_id, error=str(error))

    def _all(self) -> Iterator[tuple[str, Ahead, Link, Rules]]:
        with self._lock:
            served = list(self._served.items())
        for workspace_id, (ahead, link, rules) in served:
            yield workspace_id, ahead, link, rules


def is_loaded() -> bool:
    """Whether the processors have more to do than they can."""
    try:
        return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    except OSError:
        return False
