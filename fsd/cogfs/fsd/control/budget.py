"""The bytes that the packs of a store may take, and which snapshots go when there are more: the oldest first.

Owns the choice, and whether further checkpoints are refused. Must not know when it is looked at (``collector``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.pruning import delete, oldest
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.errors import NotFound
from cogfs.store.naming import Root
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Snapshots go until what the others need takes this much of what there may be, so that it is not done all the time.
_ROOM = 0.9
#: Seconds after which it is tried again, once nothing more could be deleted.
_AGAIN = 60.0


class Budget:
    """Of one store. Its methods may be called by many threads."""

    def __init__(self, store: Store, workspace: Callable[[str], Workspace], max_bytes: int) -> None:
        """``workspace`` finds a workspace by id; it raises NotFound. ``max_bytes`` is 0: there is none."""
        self._store = store
        self._workspace = workspace
        self.max_bytes = max_bytes
        #: Why no checkpoint is taken; empty: they are.
        self.full = ""
        self._not_before = 0.0

    @property
    def exceeded(self) -> bool:
        """The packs take more than they may, and it is time to do something about it."""
        if not self._over():
            self.full = ""
            return False
        return time.monotonic() >= self._not_before

    def refuse_full(self) -> None:
        """NO_SPACE when no checkpoint is taken before there is room."""
        if self.full and self._over():
            raise CogfsError(Reason.NO_SPACE, self.full)

    def prune(self, more_roots: Callable[[], Iterable[Root]], goes_on: Callable[[], bool]) -> int:
        """Delete the oldest snapshots, as many as have to go; how many. What only they needed is collected later.

        Neither those that are protected, nor what a workspace needs by itself: the newest, both of its last restore.
        Interrupted; store errors.
        """
        named = oldest(self._store)
        doomed, needed = self._store.too_many(
            [one.id for one in named], round(self.max_bytes * _ROOM), more_roots, goes_on=goes_on
        )
        gone: Counter[str] = Counter()
        for snapshot in named[: len(doomed)]:
            try:
                delete(self._workspace(snapshot.workspace_id), snapshot.id)
            except (CogfsError, NotFound):
                continue  # It has become needed since, or has gone.
            gone[snapshot.workspace_id] += 1
        if gone:
            _log.warning(
                "budget.pruned",
                snapshots=gone.total(),
                workspaces=dict(gone),
                bytes_needed=needed,
                max_bytes=self.max_bytes,
            )
        return gone.total()

    def settle(self) -> None:
        """All that can be done was done."""
        self._not_before = time.monotonic() + _AGAIN
        if self._over():
            self.full = (
                f"the store takes more than its budget of {self.max_bytes} bytes, and nothing more can be deleted:"
                " raise store.max_bytes, or keep less (see cogfsctl stats)"
            )
            _log.error("budget.full", max_bytes=self.max_bytes, pack_bytes=self._store.stats().pack_bytes)

    def _over(self) -> bool:
        return 0 < self.max_bytes < self._store.stats().pack_bytes
