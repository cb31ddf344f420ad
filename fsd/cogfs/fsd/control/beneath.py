"""Directories beneath a root, reached one name at a time, never through a symlink and never onto another mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cogfs.fsd.control.syscalls import open_within

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split(path: bytes) -> tuple[bytes, bytes]:
    """The parent's path and the name; both relative to the root, the root being ``b""``."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


def join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


def ancestors(paths: Iterable[bytes]) -> set[bytes]:
    """The directories above paths, the root among them."""
    found: set[bytes] = set()
    for path in paths:
        parent = path
        while parent:
            parent = split(parent)[0]
            if parent in found:
                break
            found.add(parent)
    return found


class Beneath:
    """Opens directories below one root.

    The descriptors of the path opened last are kept, so that a walk in the order of paths opens each directory once.
    Not for several threads at once.
    """

    def __init__(self, root_fd: int, *, watchful: bool = False) -> None:
        """``root_fd`` stays the caller's. ``watchful``: others may rename directories meanwhile. Then each call
        looks whether those that it has open are still where they were."""
        self._root = os.open(b".", _OPEN, dir_fd=root_fd)
        self._watchful = watchful
        self._names: list[bytes] = []
        self._fds: list[int] = []

    @property
    def root_fd(self) -> int:
        return self._root

    def directory(self, path: bytes) -> int:
        """A descriptor of directory ``path``, valid until the next call.

        OSError: ENOENT or ENOTDIR when it is not a directory reached without symlinks, EXDEV when something else is
        mounted there.
        """
        names = path.split(b"/") if path else []
        if self._watchful:
            self._drop(self._standing())
        common = 0
        while common < len(names) and common < len(self._names) and names[common] == self._names[common]:
            common += 1
        self._drop(common)
        current = self._fds[-1] if self._fds else self._root
        for name in names[common:]:
            current = self._enter(current, name)
            self._names.append(name)
            self._fds.append(current)
        return current

    def _enter(self, parent: int, name: bytes) -> int:
        if name in (b"", b".", b"..") or b"/" in name:
            raise OSError(errno.EINVAL, "not a name", name)
        try:
            return open_within(name, _OPEN, parent)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
            if error.errno == errno.EXDEV:
                raise OSError(errno.EXDEV, "something else is mounted there", name) from error
            raise

    def stands(self) -> bool:
        """Whether the directory that was asked for last is still where it was."""
        return self._standing() == len(self._fds)

    def _standing(self) -> int:
        """How many of the open directories, from the root on, are where they were."""
        parent = self._root
        for depth, (name, fd) in enumerate(zip(self._names, self._fds, strict=True)):
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except OSError:
                return depth
            if not os.path.samestat(found, os.fstat(fd)):
                return depth
            parent = fd
        return len(self._fds)

    def forget(self) -> None:
        """Look every directory up anew: names may have moved."""
        self._drop(0)

    def _drop(self, keep: int) -> None:
        while len(self._fds) > keep:
            os.close(self._fds.pop())
            self._names.pop()

    def close(self) -> None:
        self._drop(0)
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


@contextmanager
def beneath(root_fd: int, *, watchful: bool = False) -> Iterator[Beneath]:
    reach = Beneath(root_fd, watchful=watchful)
    try:
        yield reach
    finally:
        reach.close()
