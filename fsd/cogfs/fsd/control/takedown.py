"""Taking one mount away, the plain way or from under its users.

Must not know workspaces, nor what becomes of the worker.
"""

from __future__ import annotations

import errno
import time

import structlog

from cogfs.fsd.control import mounts, users
from cogfs.fsd.control.errors import BusyBy, CogfsError, busy, from_os_error, show
from cogfs.fsd.control.mounts import MountEntry
from cogfs.fsd.control.ports import Link
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds in which a mount that is no longer used leaves the mount table.
_GONE_PATIENCE = 10.0


def take_away(entry: MountEntry, link: Link | None, *, lazily: bool, patience: float) -> list[BusyBy]:
    """Unmount ``entry``, whose worker is at the end of ``link``, None when it does not answer.

    Users have ``patience`` seconds to go by themselves; then BUSY with who uses it. ``lazily``: it is taken out of the
    tree instead, users keep what they have open, and are the answer. Without a worker that answers it is taken out when
    it is dead, and of no use to its users, or when nobody uses it but we ourselves, with calls that are stuck in it.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            unmount_entry(entry, lazy=False)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise _failed(entry, error) from error
        else:
            mounts.wait_until_gone(entry.mount_id, _GONE_PATIENCE)
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    found = users.who(entry, link)
    inside = [other for other in mounts.table() if other.parent_id == entry.mount_id]
    useless = link is None and not inside and (not found or mounts.is_dead(entry.mountpoint))
    if not lazily and not useless:
        raise _busy(entry, found, inside)
    _log.warning("unmounting under its users", mountpoint=show(entry.mountpoint), busy_by=found)
    try:
        unmount_entry(entry, lazy=True)
    except OSError as error:
        raise _failed(entry, error) from error
    return found


def unmount_entry(entry: MountEntry, *, lazy: bool) -> None:
    """OSError as ``mounts.unmount``; EBUSY also when something else is mounted over it."""
    top = mounts.top_at(entry.mountpoint, mounts.table())
    if top is None:
        return
    if top.mount_id != entry.mount_id:
        raise OSError(errno.EBUSY, f"{top.fstype} is mounted over it", entry.mountpoint)
    mounts.unmount(entry.mountpoint, lazy=lazy)


def _failed(entry: MountEntry, error: OSError) -> CogfsError:
    return from_os_error(error, f"unmount {show(entry.mountpoint)}")


def _busy(entry: MountEntry, found: list[BusyBy], inside: list[MountEntry]) -> CogfsError:
    if inside and not found:
        by = f"{inside[0].fstype} is mounted at {show(inside[0].mountpoint)}"
    else:
        by = f"it is used by {users.names(found)}"
    return busy(
        Reason.BUSY,
        f"{show(entry.mountpoint)} cannot be unmounted: {by}; force leaves users what they have open",
        found,
    )
