"""Collecting what nothing in the store needs: on request, and in the background some time after snapshots were deleted.
And putting together what is like each other, when much has come into the store and the machine is idle.

Owns when that is done, and what is needed that no row names: the contents in the undo logs of boundaries that are not
captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import structlog

from cogfs.fsd.control import boundaries
from cogfs.fsd.control.ahead import is_loaded
from cogfs.fsd.control.background import lower_priority
from cogfs.fsd.control.errors import CogfsError, from_os_error
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import Room
from cogfs.fsd.undolog import UndoLog
from cogfs.store.errors import StoreError
from cogfs.store.gc import Collected, Unreadable
from cogfs.store.naming import Root
from cogfs.store.reach import Interrupted
from cogfs.store.recent import GRACE
from cogfs.store.repack import Repacked
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds between two looks whether there is something to do.
_PAUSE = 10.0
#: Seconds between two collections, and how many times as long as the last one took.
_INTERVAL = 300.0
_SHARE = 20
#: Seconds after the start of the daemon: what an earlier one left is found then.
_AFTER_START = 600.0
#: Seconds for which what puts a collection off is waited for, at most.
_LONGEST = 3600.0
#: Snapshots that the log names as unreadable, and damaged objects.
_TOLD = 20
#: Bytes that came into the store since the last repack, or that part of it, for another one to be worth while.
_MUCH = 1024 * 1024
_PART = 16
#: Seconds between two repacks.
_REPACK_INTERVAL = 3600.0
#: Seconds for which operations that began before are waited for.
_PATIENCE = 60.0
_PATIENCE_IN_BACKGROUND = 600.0


class Collector:
    """Collections of one store. Its methods may be called by many threads."""

    def __init__(self, store: Store, places: Places, budget: Room, grace: float = GRACE) -> None:
        """``grace``: seconds for which what came into the store stays, unless it is over its ``budget``."""
        self._store = store
        self._places = places
        self._budget = budget
        self.grace = grace
        self._stop = threading.Event()
        #: How many wait for a collection that they asked for: the one in the background ends for them.
        self._asked = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gc", daemon=True)

    def start(self) -> None:
        """Collect in the background from now on."""
        self._thread.start()

    def close(self) -> None:
        """End what is under way, and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def collect(self, grace: float, *, thorough: bool, goes_on: Callable[[], bool]) -> Collected:
        """Collect now, and repack when it is to be ``thorough``. Store errors; CogfsError IO when an undo log cannot be
        read."""

        def still() -> bool:
            return goes_on() and not self._stop.is_set()

        with self._lock:
            self._asked += 1
        try:
            done = self._collect(grace, thorough, _PATIENCE, still)
            if thorough and not done.deferred:
                more = self._repack(grace, _PATIENCE, still)
                done.freed += more.freed
                done.packs += more.packs
                done.objects += more.dropped
                done.unreadable += tuple(Unreadable("", "", reason) for reason in more.damaged)
                done.deferred = more.deferred
            return done
        finally:
            with self._lock:
                self._asked -= 1

    def _collect(self, grace: float, thorough: bool, patience: float, goes_on: Callable[[], bool]) -> Collected:
        started = time.monotonic()
        done = self._store.collect(self.roots, grace=grace, thorough=thorough, patience=patience, goes_on=goes_on)
        for one in done.unreadable[:_TOLD]:
            _log.warning("gc.unreadable", snapshot=one.snapshot_id, workspace=one.workspace_id, reason=one.reason)
        if done.deferred:
            _log.warning("gc.deferred", reason=done.deferred)
        _log.info(
            "gc.done",
            dropped=done.objects,
            kept=done.live,
            bytes=done.freed,
            packs=done.packs,
            wasted=done.waste,
            seconds=round(time.monotonic() - started, 3),
        )
        return done

    def _repack(self, grace: float, patience: float, goes_on: Callable[[], bool]) -> Repacked:
        started = time.monotonic()
        done = self._store.repack(self.roots, grace=grace, patience=patience, goes_on=goes_on)
        for reason in done.damaged[:_TOLD]:
            _log.warning("repack.damaged", reason=reason)
        if done.deferred:
            _log.warning("repack.deferred", reason=done.deferred)
        _log.info(
            "repack.done",
            objects=done.objects,
            groups=done.groups,
            before=done.before,
            after=done.after,
            bytes=done.freed,
            index=done.index,
            seconds=round(time.monotonic() - started, 3),
        )
        return done

    def roots(self) -> list[Root]:
        """What the undo logs name (all are read, whether a boundary needs them or not: they are few), and what was read
        when a boundary was made. CogfsError IO, store errors."""
        return [*self._logged(), *self._seen()]

    def _seen(self) -> Iterator[Root]:
        with self._store.read() as reader:
            for workspace in reader.workspaces():
                for generation in reader.generations(workspace.id):
                    row = reader.boundary(workspace.id, generation)
                    for was in boundaries.decode(row.changes).seen if row is not None and row.changes else ():
                        if was.hash:
                            yield Root(was.hash, row.snapshot_id if row is not None else "", workspace.id)

    def _logged(self) -> Iterator[Root]:
        try:
            paths = sorted(self._places.undo_logs.iterdir())
        except OSError as error:
            raise from_os_error(error, "look for undo logs") from error
        for path in paths:
            log = UndoLog(path)
            try:
                log.refresh()
                for name in log.stored():
                    yield Root(name, "", path.stem)
            except (OSError, ValueError) as error:
                raise CogfsError(Reason.IO, f"the undo log {path} cannot be read: {error}") from error
            finally:
                log.close()

    # --- in the background

    def _make_room(self) -> None:
        """The store takes more than it may: delete what has to go, and collect all that nobody needs at once."""

        def goes_on() -> bool:
            return not self._stop.is_set() and not self._asked

        try:
            self._budget.prune(self.roots, goes_on)
            done = self._collect(0, True, _PATIENCE_IN_BACKGROUND, goes_on)
        except Interrupted:
            return
        except (CogfsError, StoreError, OSError) as error:
            _log.warning("gc.deferred", reason=str(error))
            return
        if not done.deferred:
            self._budget.settle()

    def _run(self) -> None:
        lower_priority()
        seen = self._store.deletions
        not_before = 0.0
        delay = _INTERVAL
        #: When to look without a deletion: what was new at the last collection is not any more then.
        again = time.monotonic() + _AFTER_START
        repack = _Repacking(self._store)
        while not self._stop.wait(_PAUSE):
            if self._budget.exceeded and not self._asked:
                self._make_room()
            now = time.monotonic()
            if repack.is_due(now) and not self._asked and not is_loaded():
                try:
                    done = self._repack(
                        self.grace,
                        _PATIENCE_IN_BACKGROUND,
                        lambda: not self._stop.is_set() and not self._asked and not is_loaded(),
                    )
                    ended = not done.deferred
                except (CogfsError, StoreError, OSError) as error:
                    _log.warning("repack.deferred", reason=str(error))
                    ended = False
                repack.ended(now, time.monotonic(), whole=ended)
                now = time.monotonic()
            deletions = self._store.deletions
            if now < not_before or is_loaded() or (deletions == seen and now < again):
                continue
            try:
                collected = self._collect(
                    self.grace,
                    False,
                    _PATIENCE_IN_BACKGROUND,
                    lambda: not self._stop.is_set() and not self._asked,
                )
                deferred = bool(collected.deferred)
            except (CogfsError, StoreError, OSError) as error:
                _log.warning("gc.deferred", reason=str(error))
                deferred = True
            finished = time.monotonic()
            if not deferred:
                again = now + self.grace if deletions != seen else float("inf")
                seen = deletions
            # What puts it off may last.
            delay = min(2 * delay, _LONGEST) if deferred else _INTERVAL
            not_before = finished + max(delay, _SHARE * (finished - now))


class _Repacking:
    """When the next repack in the background is due."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: What had come into the store at the last one. What came before the start is looked at once.
        self._seen = 0
        self._not_before = time.monotonic() + _AFTER_START

    def is_due(self, now: float) -> bool:
        """Much came since the last one, which is some time ago."""
        put = self._store.pack_bytes()
        return now >= self._not_before and put - self._seen >= max(_MUCH, put // _PART)

    def ended(self, began: float, now: float, *, whole: bool) -> None:
        """One that began at ``began`` on the monotonic clock has ended, done or not."""
        if whole:
            self._seen = self._store.pack_bytes()
        self._not_before = now + max(_REPACK_INTERVAL, _SHARE * (now - began))
