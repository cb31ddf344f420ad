"""``cogfsd``: the daemon with its engine and all its services."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

try:
    from cogfs.fsd.control.command import execute, leave
    from cogfs.fsd.control.engine import Engine
    from cogfs.fsd.control.fork import Forks
    from cogfs.fsd.control.newplace import NewPlaces
    from cogfs.fsd.control.server import Registration
    from cogfs.fsd.control.services.runs import RunService
    from cogfs.fsd.control.services.snapshots import SnapshotService
    from cogfs.fsd.control.services.threads import ThreadService
    from cogfs.store.store import Store
    from cogfs.v1.run_pb2_grpc import add_RunServiceServicer_to_server
    from cogfs.v1.snapshot_pb2_grpc import add_SnapshotServiceServicer_to_server
    from cogfs.v1.thread_pb2_grpc import add_ThreadServiceServicer_to_server
except ModuleNotFoundError as error:
    # Installed for the client alone: the command is there, what it runs on is not.
    print(f"cogfsd: {error.name} is not installed here: run `pip install 'cogfs[daemon]'`", file=sys.stderr)
    sys.exit(20)


def main() -> NoReturn:
    leave(execute(None, Engine, _services))


def _services(store: Store, engine: Engine, new_places: NewPlaces) -> Sequence[Registration]:
    """What is served besides the workspaces and the daemon itself."""
    forks = Forks(store, engine.threads, engine.workspace, new_places, engine.passages)
    snapshots, threads, runs = (
        SnapshotService(store, engine),
        ThreadService(store, engine, forks),
        RunService(store, engine),
    )
    return [
        ("cogfs.v1.SnapshotService", lambda server: add_SnapshotServiceServicer_to_server(snapshots, server)),
        ("cogfs.v1.ThreadService", lambda server: add_ThreadServiceServicer_to_server(threads, server)),
        ("cogfs.v1.RunService", lambda server: add_RunServiceServicer_to_server(runs, server)),
    ]


if __name__ == "__main__":
    main()
