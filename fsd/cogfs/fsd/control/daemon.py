"""The daemon put together: its lock, the store, the engine, the workers and the server, in the order in which they
begin and end.

Must not know the command line, nor what the services answer.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import structlog

from cogfs.fsd.control.collector import Collector
from cogfs.fsd.control.errors import CogfsError, from_os_error
from cogfs.fsd.control.newplace import NewPlaces
from cogfs.fsd.control.notify import notify
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import EngineT, Workspaces
from cogfs.fsd.control.registry import Registry
from cogfs.fsd.control.server import Registration, Server
from cogfs.fsd.control.services.admin import AdminService
from cogfs.fsd.control.services.workspaces import WorkspaceService
from cogfs.fsd.control.settings import Settings
from cogfs.fsd.control.supervisor import Supervisor
from cogfs.store.store import Store
from cogfs.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from cogfs.v1.reasons import Reason
from cogfs.v1.workspace_pb2_grpc import add_WorkspaceServiceServicer_to_server

_log = structlog.get_logger(__name__)

#: Seconds that calls under way have when the daemon stops.
_CALLS_PATIENCE = 20.0
#: Seconds for which a thread may keep Python's lock while others want it. A call in a mount may wait for one of them,
#: behind those that capture files.
_SWITCH_INTERVAL = 0.0005
#: Some four calls for each level of directories that is planned.
_CALLS_NESTED = 100_000


class AlreadyRunning(CogfsError):
    """Another daemon has this runtime directory."""

    def __init__(self, pid: str, places: Places) -> None:
        super().__init__(Reason.UNAVAILABLE, f"cogfsd is already running (pid {pid}) at {places.endpoint}")


def run(
    places: Places,
    settings: Settings,
    make_engine: Callable[[Store, Places, Settings], EngineT],
    more_services: Callable[[Store, EngineT, NewPlaces], Sequence[Registration]],
    *,
    leave_mounts: bool,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Called in the main thread.

    AlreadyRunning; CogfsError or StoreError when it cannot begin.
    """
    _raise_limits()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    places.make()
    with ExitStack() as stack:
        stack.callback(os.close, _lock(places))
        ended = stack.enter_context(_told_to_end())
        store = stack.enter_context(Store.open(places.store))
        engine = make_engine(store, places, settings)
        stack.callback(engine.close)
        supervisor = Supervisor(places, store, engine)
        registry = Registry(places, store, engine)
        new_places = NewPlaces(store, engine, supervisor, registry)
        collector = Collector(store, places, engine.budget, settings.gc_grace)
        services = [
            *_own_services(places, store, engine, supervisor, registry, collector),
            *more_services(store, engine, new_places),
        ]
        server = Server(places.socket, services, store.operation)
        stack.callback(supervisor.stop, leave_mounts=leave_mounts)
        stack.callback(server.stop, _CALLS_PATIENCE)
        # First of all: a call may be waiting for it.
        stack.callback(collector.close)
        stack.callback(engine.stopping)
        supervisor.start()
        new_places.recover()
        collector.start()
        server.start()
        notify("READY=1")
        _log.info("ready", endpoint=places.endpoint, store=str(places.store), pid=os.getpid())
        waiter = select.poll()
        waiter.register(ended, select.POLLIN)
        waiter.poll()
        notify("STOPPING=1")
        _log.info("stopping", leave_mounts=leave_mounts)
    _log.info("stopped")


@contextmanager
def _told_to_end() -> Iterator[int]:
    """A descriptor that can be read once SIGTERM, SIGINT or SIGHUP has come, also one that comes just before the wait.

    Python's own handler would run only when the main thread is back from its wait, which it may have been about to
    begin: a signal that came in that moment would be lost until the next one.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with ExitStack() as stack:
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        yield reader


def _raise_limits() -> None:
    """Trees may be deeper than a process usually has descriptors and Python usually lets calls nest."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Calls of Python functions by Python functions take no room on the C stack, so this many are safe.
    sys.setrecursionlimit(_CALLS_NESTED)


def _own_services(
    places: Places,
    store: Store,
    engine: Workspaces,
    supervisor: Supervisor,
    registry: Registry,
    collector: Collector,
) -> list[Registration]:
    workspaces = WorkspaceService(places, store, engine, supervisor, registry)
    admin = AdminService(places, store, collector, engine.budget)
    return [
        (
            "cogfs.v1.WorkspaceService",
            lambda server: add_WorkspaceServiceServicer_to_server(workspaces, server),
        ),
        ("cogfs.v1.AdminService", lambda server: add_AdminServiceServicer_to_server(admin, server)),
    ]


def _lock(places: Places) -> int:
    """A descriptor that holds the lock of the runtime directory, with our pid in it. AlreadyRunning."""
    try:
        descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise AlreadyRunning(pid or "unknown", places) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        raise from_os_error(error, f"lock {places.lock}") from error
    return descriptor
