"""Admission of calls that change something: frozen, guarded by a restore, read-only, or open.

Invariant: between its admission and its end a mutating call awaits nothing, so whenever another task runs, no mutating
call has begun and not ended. That is why a freeze has nothing to drain.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection

import trio


def place_of(inode: int) -> int:
    """A number for the place of an inode, its name in its directory, as against the inode itself."""
    return ~inode


class Gate:
    """Decides whether a mutating call goes on, waits, or fails."""

    __slots__ = ("_changed", "_frozen", "_guarded", "_owners", "closed", "guard", "read_only")

    def __init__(self) -> None:
        #: Whether ``admit`` has anything to look at; calls skip it otherwise.
        self.closed = False
        #: Restore that guards the mount, or empty.
        self.guard = ""
        #: Why nothing may be changed, or empty.
        self.read_only = ""
        self._frozen = False
        self._owners: frozenset[int] = frozenset()
        self._guarded: set[int] = set()
        self._changed = trio.Event()

    @property
    def frozen(self) -> bool:
        """Whether mutating calls are parked."""
        return self._frozen

    def freeze(self) -> None:
        """Park mutating calls from now on."""
        self._frozen = True
        self._update()

    def resume(self) -> None:
        """Let parked calls go on; a guard stays."""
        self._frozen = False
        self._update()

    def set_guard(
        self, restore_id: str, owners: Collection[int], inodes: Collection[int], pinned: Collection[int]
    ) -> None:
        """Guard ``inodes``, and the places of ``pinned``, in the place of a freeze or of another guard."""
        self.guard = restore_id
        self._owners = frozenset(owners)
        self._guarded = {*inodes, *map(place_of, pinned)}
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

    async def admit(self, pid: int, inodes: Callable[[], Collection[int]]) -> None:
        """Return when the call of thread ``pid`` on ``inodes`` may be made at once. OSError EBUSY or EROFS.

        ``inodes`` is asked after the wait, since what a name stands for may have changed meanwhile.
        """
        while self._frozen:
            await self._changed.wait()
        if pid in self._owners:
            return
        if self._guarded and not self._guarded.isdisjoint(inodes()):
            raise OSError(errno.EBUSY, f"restore {self.guard} is changing it")
        if self.read_only:
            raise OSError(errno.EROFS, self.read_only)

    def _update(self) -> None:
        self.closed = bool(self._frozen or self.guard or self.read_only)
        waiting, self._changed = self._changed, trio.Event()
        waiting.set()
