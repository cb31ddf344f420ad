"""Where an inode of a workspace is now: the worker that saw all its moves knows, else somebody has to look."""

from __future__ import annotations

import os

from cogfs.fsd.channel import Locate, Located
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.ports import Link


class Whereabouts:
    """Answers for the directories of one boundary. Use it from one thread."""

    def __init__(self, root_fd: int, link: Link | None, *, held: bool) -> None:
        """``held``: the worker holds everything that may be asked for, so what it does not know is no more."""
        self._root_fd = root_fd
        self._link = link
        self._held = held
        self._found: dict[int, bytes] = {}
        self._gone: set[int] = set()

    def __call__(self, inode: int) -> bytes | None:
        link = self._link
        if link is not None and link.alive:
            try:
                answer = link.call(Locate([inode]))
            except CogfsError:
                answer = None
            if isinstance(answer, Located) and (answer.paths[0] is not None or self._held):
                return answer.paths[0]
        return self._look_everywhere(inode)

    def _look_everywhere(self, inode: int) -> bytes | None:
        """Twice before it is believed to be gone: it may be moved from ahead of the walk to behind it."""
        if inode in self._gone:
            return None
        known = self._found.pop(inode, None)
        if known is not None:
            return known
        for _ in range(2):
            self._found.update(self._walk())
            known = self._found.pop(inode, None)
            if known is not None:
                return known
        self._gone.add(inode)
        return None

    def _walk(self) -> dict[int, bytes]:
        found = {}
        for where, _, _, fd in os.fwalk(b".", dir_fd=self._root_fd):
            found[os.fstat(fd).st_ino] = where.removeprefix(b".").removeprefix(b"/")
        return found
