"""``cogfsd`` with an engine that does the least that a worker needs, and one service that fails in every way.

Run as a program: ``python -m tests.control.plain [arguments of cogfsd]``.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import grpc

from cogfs.fsd.channel import Committed, Freeze, Frozen, Resume
from cogfs.fsd.control.budget import Budget
from cogfs.fsd.control.command import execute, leave
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.newplace import NewPlaces
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import EngineState, Link
from cogfs.fsd.control.server import Registration
from cogfs.fsd.control.settings import Settings
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.errors import Corrupt, NoSpace, NotFound
from cogfs.store.store import Store
from cogfs.v1 import snapshot_pb2, snapshot_pb2_grpc
from cogfs.v1.reasons import Reason


class PlainEngine:
    """Takes what is dirty and forgets it."""

    def __init__(self, store: Store, places: Places, settings: Settings) -> None:
        self.budget = Budget(store, self._no_workspace, 0)
        self._links: dict[str, Link] = {}
        self._locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._handed: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def _no_workspace(self, workspace_id: str) -> Workspace:
        raise NotFound(f"there is no workspace {workspace_id}")

    def attach(self, workspace_id: str, link: Link) -> None:
        self._links[workspace_id] = link
        self._take(workspace_id, link)

    def detach(self, workspace_id: str) -> None:
        self._links.pop(workspace_id, None)

    def recover(self, workspace_id: str) -> None:
        """Nothing is ever interrupted."""

    def settle(self, workspace_id: str) -> None:
        self._take(workspace_id, self._links[workspace_id])

    def lock(self, workspace_id: str) -> threading.RLock:
        return self._locks[workspace_id]

    def state(self, workspace_id: str) -> EngineState:
        files, directories = self._handed[workspace_id]
        return EngineState(dirty_files=files, dirty_directories=directories)

    def forget(self, workspace_id: str) -> None:
        self._handed.pop(workspace_id, None)

    def stopping(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is being read."""

    def _take(self, workspace_id: str, link: Link) -> None:
        frozen = link.call(Freeze(), 10.0)
        assert isinstance(frozen, Frozen)
        link.call(Resume())
        link.call(Committed(frozen.generation))
        self._handed[workspace_id] = len(frozen.files), len(frozen.directories)


FAULTS: dict[str, Callable[[], Exception]] = {
    "cogfs": lambda: CogfsError(Reason.WORKSPACE_BUSY, "said so", busy_by="[]"),
    "corrupt": lambda: Corrupt("the object is damaged"),
    "full": lambda: NoSpace("the disk is full"),
    "denied": lambda: PermissionError(errno.EACCES, "Permission denied"),
    "no-space": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "unforeseen": lambda: ZeroDivisionError("division by zero"),
}


class FailingService(snapshot_pb2_grpc.SnapshotServiceServicer):
    """Fails in the way that the request's snapshot names, one reply into a stream."""

    def GetSnapshot(
        self, request: snapshot_pb2.GetSnapshotRequest, context: grpc.ServicerContext
    ) -> snapshot_pb2.Snapshot:
        raise FAULTS[request.snapshot_id]()

    def ReadFile(
        self, request: snapshot_pb2.ReadFileRequest, context: grpc.ServicerContext
    ) -> Iterator[snapshot_pb2.ReadFileResponse]:
        yield snapshot_pb2.ReadFileResponse(data=b"x" * (8 << 20))
        raise FAULTS[request.snapshot_id]()

    def _none(self, *_: object) -> Exception:
        raise CogfsError(Reason.NOT_FOUND, "not here")

    CreateSnapshot = ListSnapshots = RestoreSnapshot = DiffSnapshots = ListTree = _none  # type: ignore[assignment]
    DeleteSnapshot = PruneSnapshots = CopySnapshot = _none  # type: ignore[assignment]


def _services(store: Store, engine: PlainEngine, new_places: NewPlaces) -> Sequence[Registration]:
    service = FailingService()
    return [
        (
            "cogfs.v1.SnapshotService",
            lambda server: snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(service, server),
        )
    ]


if __name__ == "__main__":
    leave(execute(None, PlainEngine, _services))
