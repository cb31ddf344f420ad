"""What the store raises. The text of each error can be shown to a user: one sentence without its capital and full stop,
since it may follow other words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import lmdb


class StoreError(Exception):
    """Base of all errors of the store."""


class NotFound(StoreError):
    """There is no such row or object."""


class Exists(StoreError):
    """A row of this id is there already."""


class Corrupt(StoreError):
    """What is stored is not what was put. ``object_hash`` names the object, where it is one, and ``source`` the one
    that it cannot be read without and that is damaged, which may be another."""

    def __init__(self, message: str, object_hash: bytes = b"", source: bytes = b"") -> None:
        super().__init__(message)
        self.object_hash = object_hash
        self.source = source


class NoSpace(StoreError):
    """The disk or the quota is full. Nothing was changed, and the store can be used again once there is room."""


class StoreIO(StoreError):
    """The operating system refused a read or a write."""


class Locked(StoreError):
    """Another process has the store open."""


class UnsupportedFormat(StoreError):
    """The store was written in a format that this version does not know."""


class NetworkFilesystem(StoreError):
    """The store lies on a filesystem that cannot hold it: a network, cluster or user-space one."""


class Unsafe(StoreError):
    """The place of the store is not the user's own, or leads through a symlink."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def of_system(error: OSError, doing: str) -> StoreError:
    """The store's error for ``error``, met while ``doing`` (a phrase such as "writing a pack")."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return NoSpace(f"no space is left for the store while {doing}: {reason}")
    return StoreIO(f"the store failed while {doing}: {reason}")


def of_index(error: lmdb.Error, doing: str) -> StoreError:
    """The store's error for an error of LMDB."""
    if isinstance(error, lmdb.MapFullError):
        return NoSpace(f"no space is left in the index while {doing}, and it cannot grow")
    code = getattr(error, "code", 0)
    text = str(error)
    if isinstance(error, lmdb.DiskError) or code in _FULL or os.strerror(errno.EDQUOT) in text:
        return NoSpace(f"no space is left for the index while {doing}: {text}")
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
        return Corrupt(f"the index is damaged, seen while {doing}: {text}")
    return StoreIO(f"the index failed while {doing}: {text}")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns errors of the system and of LMDB into the store's own."""
    try:
        yield
    except OSError as error:
        raise of_system(error, doing) from error
    except lmdb.Error as error:
        raise of_index(error, doing) from error
