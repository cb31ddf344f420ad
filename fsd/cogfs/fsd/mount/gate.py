"""Admission of calls that change something: frozen, guarded by a restore, read-only, held until what they change is
preserved, or open.

Invariant: between its admission and its end a mutating call awaits nothing, so whenever another task runs, no mutating
call has begun and not ended. That is why a freeze has nothing to drain.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import trio

#: No clock of the kernel's lags by more, in nanoseconds: a tick is 10 ms at most.
_MAX_LAG = 20_000_000
#: Seconds.
_LOOK_AGAIN = 0.0002
#: ``CLOCK_REALTIME_COARSE``, which the standard library has no name for: files get their times from it, or from a
#: reading that is later.
_LAGGING = 5


def place_of(inode: int) -> int:
    """A number for the place of an inode, its name in its directory, as against the inode itself."""
    return ~inode


class Gate:
    """Decides whether a mutating call goes on, waits, or fails."""

    __slots__ = (
        "_changed",
        "_frozen",
        "_frozen_ns",
        "_guarded",
        "_outside",
        "_owners",
        "_protected",
        "closed",
        "guard",
        "read_only",
    )

    def __init__(self, outside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """``outside`` is entered while a call waits for what somebody else does."""
        #: Whether ``admit`` has anything to look at; calls skip it otherwise.
        self.closed = False
        #: Restore that guards the mount, or empty.
        self.guard = ""
        #: Why nothing may be changed, or empty.
        self.read_only = ""
        self._outside = outside
        self._protected = False
        self._frozen = False
        self._frozen_ns = 0
        self._owners: frozenset[int] = frozenset()
        self._guarded: set[int] = set()
        self._changed = trio.Event()

    @property
    def frozen(self) -> bool:
        """Whether mutating calls are parked."""
        return self._frozen

    def freeze(self) -> int:
        """Park mutating calls from now on; the time of that, in nanoseconds.

        What changed before has no later ctime, since files get theirs from this clock or from one that lags behind it
        by up to a tick. See ``settle`` for what changes later.
        """
        self._frozen = True
        self._update()
        self._frozen_ns = time.time_ns()
        return self._frozen_ns

    def resume(self) -> None:
        """Let parked calls go on; a guard stays."""
        self._settle()
        self._frozen = False
        self._update()

    async def settle(self) -> None:
        """Before a resume or a guard: wait until the clock that lags has reached the time of the freeze, too, so that
        what changes from now on has a ctime that is not earlier. Only a freeze of less than a tick waits here."""
        with self._outside():
            while self._ahead():
                await trio.sleep(_LOOK_AGAIN)

    def _settle(self) -> None:
        """The same, where nothing may be awaited."""
        while self._ahead():
            time.sleep(_LOOK_AGAIN)

    def _ahead(self) -> bool:
        """Whether the clock that lags has not come as far as the freeze. One that was set back meanwhile does not
        count."""
        return self._frozen and 0 < self._frozen_ns - time.clock_gettime_ns(_LAGGING) <= _MAX_LAG

    def protect(self, protected: bool) -> None:
        """Whether calls must ask what they have to preserve."""
        self._protected = protected
        self._update()

    def set_guard(
        self, restore_id: str, owners: Collection[int], inodes: Collection[int], pinned: Collection[int]
    ) -> None:
        """Guard ``inodes``, and the places of ``pinned``, in the place of a freeze or of another guard."""
        self.guard = restore_id
        self._owners = frozenset(owners)
        self._guarded = {*inodes, *map(place_of, pinned)}
        self._settle()
        self._frozen = False
        self._update()

    def unguard(self) -> None:
        """Take the guard away."""
        self.guard = ""
        self._owners = frozenset()
        self._guarded = set()
        self._update()

    def made(self, pid: int, inode: int) -> None:
        """Thread ``pid`` has made ``inode``. What the restore makes is guarded. What others make is not, though its
        number may be one that the restore has just freed."""
        if pid in self._owners:
            self._guarded.add(inode)
        else:
            self._guarded.discard(inode)
            self._guarded.discard(place_of(inode))

    def set_read_only(self, reason: str) -> None:
        """Refuse every mutating call, or none when ``reason`` is empty."""
        self.read_only = reason
        self._update()

    async def admit(
        self, pid: int, inodes: Callable[[], Collection[int]], preserve: Callable[[], trio.Event | None] | None
    ) -> None:
        """Return when the call of thread ``pid`` on ``inodes`` may be made at once. OSError EBUSY or EROFS.

        ``preserve`` writes down what the call is about to change, or says what has to happen first; None: the call
        itself changes nothing. Both are asked anew after each wait, since what a name stands for may have changed
        meanwhile.
        """
        while True:
            while self._frozen:
                await self._changed.wait()
            if pid not in self._owners:
                if self._guarded and not self._guarded.isdisjoint(inodes()):
                    raise OSError(errno.EBUSY, f"restore {self.guard} is changing it")
                if self.read_only:
                    raise OSError(errno.EROFS, self.read_only)
            if not self._protected or preserve is None or (awaited := preserve()) is None:
                return
            with self._outside():
                await awaited.wait()

    def _update(self) -> None:
        self.closed = bool(self._frozen or self.guard or self.read_only or self._protected)
        waiting, self._changed = self._changed, trio.Event()
        waiting.set()
