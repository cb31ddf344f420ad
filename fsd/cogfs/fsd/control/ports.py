"""What the parts of the control process need of each other, as protocols: the supervisor of the engine, and the engine
of the link to a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cogfs.fsd.channel import Answer, Broken, Request, Wanted, Welcome
from cogfs.fsd.control.errors import BusyBy
from cogfs.store.naming import Root


class Link(Protocol):
    """A connection to a worker (``cogfs.fsd.control.link``), or what stands for one where there is no mount
    (``cogfs.fsd.control.scanned``)."""

    @property
    def welcome(self) -> Welcome: ...

    @property
    def root_fd(self) -> int:
        """The backing root, opened for reading; valid until ``Workspaces.detach`` has returned."""

    @property
    def mountpoint(self) -> bytes: ...

    @property
    def watched(self) -> bool:
        """There is a mount: changes are seen, and can be parked and refused. Otherwise only a scan tells what changed,
        and nobody can be kept from changing more."""

    @property
    def alive(self) -> bool: ...

    def on_event(self, callback: Callable[[Wanted | Broken], None]) -> None: ...

    def call(self, request: Request, timeout: float = 30.0) -> Answer: ...

    def post(self, request: Request) -> None: ...


@dataclass(frozen=True)
class EngineState:
    """How a workspace stands, as far as its records and restores go."""

    recovering: bool = False
    #: Why nothing may be changed; empty: all is well.
    read_only: str = ""
    dirty_files: int = 0
    dirty_directories: int = 0
    #: Processes that can change the files past the mount.
    bypassed_by: tuple[BusyBy, ...] = ()


class Room(Protocol):
    """The bytes that a store may take (``cogfs.fsd.control.budget``)."""

    @property
    def max_bytes(self) -> int:
        """0: any number."""

    @property
    def full(self) -> str:
        """Why no checkpoint is taken; empty: they are."""

    @property
    def exceeded(self) -> bool: ...

    def prune(self, more_roots: Callable[[], Iterable[Root]], goes_on: Callable[[], bool]) -> int: ...

    def settle(self) -> None: ...


class Workspaces(Protocol):
    """What the supervisor tells the engine about workers that come and go. All of it is safe from any thread."""

    @property
    def budget(self) -> Room: ...

    def attach(self, workspace_id: str, link: Link) -> None:
        """A worker, new or adopted, serves the workspace now. Recovers an interrupted restore through the mount."""

    def detach(self, workspace_id: str) -> None:
        """The worker is gone or its mount was taken away. Idempotent; never waits for the worker."""

    def recover(self, workspace_id: str) -> None:
        """Finish an interrupted restore: through the mount when there is one, else on the backing directory."""

    def settle(self, workspace_id: str) -> None:
        """An orderly unmount follows: hand over what is dirty."""

    def lock(self, workspace_id: str) -> threading.RLock:
        """Held while the workspace is mounted, unmounted, restored or checkpointed."""

    def state(self, workspace_id: str) -> EngineState: ...

    def forget(self, workspace_id: str) -> None:
        """The workspace was deleted."""

    def stopping(self) -> None:
        """The daemon is about to end: calls that wait for something answer. Can be repeated."""

    def close(self) -> None:
        """The daemon ends: wait for what is being read into the store."""


EngineT = TypeVar("EngineT", bound=Workspaces)
