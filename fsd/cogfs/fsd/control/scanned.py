"""Workspaces without FUSE: what stands for the worker where changes are found by a scan, and which ones there are.

Nothing sees a change here and nobody can be kept from one: a freeze hands nothing over, so that everything is looked
at, and a guard guards nothing. What is built on the link has to know that by ``Link.watched``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from cogfs.fsd import channel
from cogfs.fsd.channel import (
    Answer,
    Broken,
    Done,
    Freeze,
    Frozen,
    GetStats,
    Handles,
    ListHandles,
    Request,
    Stats,
    Wanted,
    Welcome,
)
from cogfs.fsd.control.errors import CogfsError, from_os_error, show
from cogfs.fsd.control.openers import opened
from cogfs.fsd.control.ports import Workspaces
from cogfs.v1.reasons import Reason

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScannedLink:
    """A directory that is scanned. Safe from any thread until ``close``."""

    watched = False

    def __init__(self, workspace_id: str, root: bytes) -> None:
        """``root``: canonical. CogfsError when it cannot be opened."""
        try:
            self.root_fd = os.open(root, _OPEN)
        except OSError as error:
            raise from_os_error(error, f"open {show(root)}") from error
        self.mountpoint = root
        status = os.fstat(self.root_fd)
        self._identity = status.st_dev, status.st_ino
        self._closed = False
        self.welcome = Welcome(
            version=channel.PROTOCOL_VERSION,
            workspace_id=workspace_id,
            worker_pid=0,
            root=root,
            mountpoint=root,
            device=status.st_dev,
            started_ns=time.time_ns(),
            guard="",
            read_only="",
            boundaries=[],
            broken="",
        )

    @property
    def alive(self) -> bool:
        """The directory that was opened is still the one at its path."""
        if self._closed:
            return False
        try:
            status = os.lstat(self.mountpoint)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def on_event(self, callback: Callable[[Wanted | Broken], None]) -> None:
        """There are none: nothing waits, and nothing is preserved."""

    def call(self, request: Request, timeout: float = 30.0) -> Answer:
        """What a worker would answer that has seen nothing. UNAVAILABLE when the directory is not there any more."""
        if not self.alive:
            raise gone(self.mountpoint)
        if isinstance(request, Freeze):
            return Frozen(generation=0, complete=False, frozen_ns=time.time_ns(), packed=channel.pack([], []))
        if isinstance(request, ListHandles):
            return Handles(opened(self.mountpoint))
        if isinstance(request, GetStats):
            return Stats(operations=[], nodes=0, handles=0, dirty_files=0, dirty_directories=0, descriptors=0)
        return Done()

    def post(self, request: Request) -> None:
        """As ``call``."""
        self.call(request)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.root_fd)


def gone(root: bytes) -> CogfsError:
    return CogfsError(Reason.UNAVAILABLE, why_gone(root))


def why_gone(root: bytes) -> str:
    return (
        f"the directory that was scanned is not at {show(root)} any more: put it back, or run cogfsctl mount --scan "
        "for the one that is there"
    )


class Scans:
    """The scanned workspaces. ``begin`` and ``end`` are called under the workspace's lock."""

    def __init__(self, engine: Workspaces) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._links: dict[str, ScannedLink] = {}

    def link(self, workspace_id: str) -> ScannedLink | None:
        """Also one whose directory is gone."""
        with self._mutex:
            return self._links.get(workspace_id)

    def begin(self, workspace_id: str, root: bytes) -> None:
        """Let the engine have the directory, which finishes an interrupted restore. Its refusal is raised."""
        link = ScannedLink(workspace_id, root)
        with self._mutex:
            self._links[workspace_id] = link
        try:
            self._engine.attach(workspace_id, link)
        except BaseException:
            self.end(workspace_id)
            raise

    def end(self, workspace_id: str) -> None:
        """Idempotent."""
        with self._mutex:
            link = self._links.pop(workspace_id, None)
        if link is not None:
            self._engine.detach(workspace_id)
            link.close()
