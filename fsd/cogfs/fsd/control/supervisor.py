"""The workers of this daemon: brought up, adopted, watched, brought back when they die, and taken away.

Owns which worker serves which workspace, and why a workspace that should be mounted is not. Must not know what is
recorded or restored: the engine is told when a worker comes (``attach``) and when it goes (``detach``).

Everything that changes what is mounted holds the engine's lock of that workspace. ``_mutex`` guards the tables only and
is never held across a call of anything else.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.channel import GetStats
from cogfs.fsd.control import mounts, roots, takedown, users, worker
from cogfs.fsd.control.errors import BusyBy, CogfsError, from_os_error, invalid, show
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.link import OtherVersion, WorkerGone, WorkerLink
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import Link, Workspaces
from cogfs.fsd.control.scanned import Scans, why_gone
from cogfs.fsd.control.worker import WorkerProcess
from cogfs.store.schema import WorkspaceRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: A worker that dies more often than so within so many seconds is not started again.
_REVIVALS = 3
_REVIVAL_WINDOW = 60.0
#: Seconds before the first new start after a death, and the factor for each further one.
_BACKOFF = 0.2
_BACKOFF_FACTOR = 4
#: Seconds in which a user of a mount that is passing by (an indexer, a shell prompt) may go.
_BUSY_PATIENCE = 1.0
#: Seconds in which a worker that runs must be reached.
_REACH_PATIENCE = 15.0
#: Seconds that a worker without its mount has to end.
_END_PATIENCE = 10.0
#: Seconds that a worker has to show that it lives.
_ANSWER_PATIENCE = 5.0
#: Seconds that stopping waits for the lock of a workspace.
_STOP_PATIENCE = 20.0


@dataclass(eq=False)
class _Served:
    """A workspace with a worker."""

    link: WorkerLink
    process: WorkerProcess
    #: It was mounted again by itself, after a death or at start, and nobody has asked for that yet.
    revived: bool = False


@dataclass(frozen=True)
class ServingState:
    """How a workspace stands, as far as its mount goes."""

    #: 0 when no worker serves it.
    worker_pid: int = 0
    mountpoint: bytes = b""
    #: It should be mounted and is not, for this reason; empty otherwise.
    dead: str = ""
    #: The daemon has just started and has not looked at it yet.
    starting: bool = False
    #: It has no worker as it is scanned.
    scanned: bool = False


class Supervisor:
    def __init__(self, places: Places, store: Store, engine: Workspaces) -> None:
        self._places = places
        self._store = store
        self._engine = engine
        self._scans = Scans(engine)
        self._mutex = threading.Lock()
        self._served: dict[str, _Served] = {}
        self._dead: dict[str, str] = {}
        self._deaths: dict[str, deque[float]] = {}
        self._starting: set[str] = set()
        self._stopping = threading.Event()

    # What is asked.

    def state(self, workspace_id: str) -> ServingState:
        scan = self._scans.link(workspace_id)
        if scan is not None:
            return ServingState(
                mountpoint=scan.mountpoint, dead="" if scan.alive else why_gone(scan.mountpoint), scanned=True
            )
        with self._mutex:
            served = self._served.get(workspace_id)
            if served is not None and served.link.alive:
                return ServingState(served.process.pid, served.link.mountpoint)
            if workspace_id in self._starting:
                return ServingState(starting=True)
            if served is not None:
                return ServingState(dead=f"the mount worker {served.process.pid} is gone")
            return ServingState(dead=self._dead.get(workspace_id, ""))

    def link(self, workspace_id: str) -> Link | None:
        """The link to the worker that serves the workspace, or what stands for one."""
        scan = self._scans.link(workspace_id)
        return scan if scan is not None and scan.alive else self._worker_link(workspace_id)

    def _worker_link(self, workspace_id: str) -> WorkerLink | None:
        with self._mutex:
            served = self._served.get(workspace_id)
        return served.link if served is not None and served.link.alive else None

    # Start.

    def start(self, patience: float = 10.0) -> None:
        """Take up every workspace: adopt its worker, or finish what was interrupted and mount it again where wanted.

        Returns when that is done, or after ``patience`` seconds, while the rest goes on under the workspaces' locks.
        """
        with self._store.read() as reader:
            rows = reader.workspaces()
        self._clear_sockets({row.id for row in rows})
        threads = []
        for row in rows:
            with self._mutex:
                self._starting.add(row.id)
            locked = threading.Event()
            threads.append(self._thread(lambda row=row, locked=locked: self._take_up(row, locked), f"start-{row.id}"))  # type: ignore[misc]
            locked.wait()
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _take_up(self, row: WorkspaceRow, locked: threading.Event) -> None:
        """``locked`` is set as soon as nobody else can come first."""
        try:
            with self._engine.lock(row.id):
                locked.set()
                missing = self._adopt(row)
                if missing:
                    self._set_dead(row.id, missing if row.mount_wanted else "")
                    self._clear(row.id)
                    if row.mount_wanted:
                        self._bring_up(row.id, revived=True)
                    else:
                        self._engine.recover(row.id)
        except Exception as error:
            reason = str(as_cogfs_error(error, f"take up {row.id}"))
            _log.error("workspace not taken up", workspace=row.id, reason=reason)
            self._set_dead(row.id, reason if row.mount_wanted else "")
        finally:
            locked.set()
            with self._mutex:
                self._starting.discard(row.id)

    def _adopt(self, row: WorkspaceRow) -> str:
        """Why there is no worker to adopt; empty when there is one (or one that only a person can deal with)."""
        try:
            link = self._reach(row)
        except OtherVersion as error:
            _log.error("worker of another version", workspace=row.id, reason=str(error))
            self._set_dead(row.id, str(error))
            return ""
        except WorkerGone as error:
            return str(error) if mounts.of_workspace(row.id) else "it is not mounted"
        if link.welcome.workspace_id != row.id or not self._is_mounted(link):
            link.close()
            return "its worker serves a mount that was taken away"
        try:
            process = WorkerProcess(link.welcome.worker_pid)
        except OSError:
            link.close()
            return "its worker has just ended"
        if not row.mount_wanted:
            # The daemon before ended within an unmount; what is seen counts.
            self._want(row.id, True, link.mountpoint)
        self._put(row.id, link, process)
        _log.info("worker adopted", workspace=row.id, worker_pid=process.pid)
        return ""

    def _reach(self, row: WorkspaceRow) -> WorkerLink:
        """Connect to the worker. One that the daemon before had just started gets the time to come up, and one that
        still cannot be reached is ended, or it would mount over its successor. WorkerGone, OtherVersion."""
        deadline = time.monotonic() + _REACH_PATIENCE
        while True:
            try:
                return WorkerLink.connect(self._places.worker_socket(row.id), row.mountpoint)
            except WorkerGone:
                pids = worker.running(self._places, row.id)
                if not pids:
                    raise
                if time.monotonic() > deadline:
                    for pid in pids:
                        _log.error("worker runs and cannot be reached", workspace=row.id, worker_pid=pid)
                        worker.end(pid)
                    raise
            time.sleep(0.1)

    @staticmethod
    def _is_mounted(link: WorkerLink) -> bool:
        return any(entry.device == link.welcome.device for entry in mounts.of_workspace(link.welcome.workspace_id))

    def _clear_sockets(self, known: set[str]) -> None:
        for path in self._places.workers.glob("*.sock"):
            if path.stem not in known:
                _log.warning("a worker's socket of a workspace that the store does not know", socket=str(path))

    # Mount.

    def mount(self, workspace_id: str, mountpoint: bytes, *, scanned: bool = False) -> None:
        """Have the workspace served at ``mountpoint``, or scanned, ``mountpoint`` being its root. ALREADY_EXISTS when
        it is either, UNAVAILABLE when it cannot be."""
        self._refuse_when_stopping()
        with self._engine.lock(workspace_id):
            self._refuse_when_stopping()
            with self._mutex:
                served = self._served.get(workspace_id)
            if served is not None and not isinstance(_probe(served.link), WorkerGone):
                # Who found the workspace dead or gone and asks for it back must not be refused for being second.
                revived, served.revived = served.revived, False
                if revived and served.link.mountpoint == mountpoint:
                    return
                state = self._engine.state(workspace_id)
                if state.recovering or state.read_only:
                    # What kept a restore from being finished may be over: a full disk, say.
                    self._engine.attach(workspace_id, served.link)
                    return
                raise CogfsError(
                    Reason.ALREADY_EXISTS,
                    f"{show(served.link.welcome.root)} is mounted already, at {show(served.link.mountpoint)}",
                    workspace_id=workspace_id,
                )
            if self._is_scanned(workspace_id, again=scanned):
                return
            before = self._want(workspace_id, True, mountpoint, scanned=scanned)
            try:
                self._drop(workspace_id)
                self._clear(workspace_id)
                self._bring_up(workspace_id)
            except BaseException:
                self._want(workspace_id, before.mount_wanted, before.mountpoint, scanned=before.scanned)
                if before.mount_wanted and before.scanned:
                    self._set_dead(workspace_id, why_gone(before.root))
                raise
            with self._mutex:
                self._deaths.pop(workspace_id, None)

    def _is_scanned(self, workspace_id: str, *, again: bool) -> bool:
        """False unless it is scanned and well. Then ALREADY_EXISTS, or True when there was a restore to be finished."""
        scan = self._scans.link(workspace_id)
        if scan is None or not scan.alive:
            return False
        state = self._engine.state(workspace_id)
        if again and (state.recovering or state.read_only):
            self._engine.attach(workspace_id, scan)
            return True
        hint = "" if again else ": unmount it first, to mount it instead"
        raise CogfsError(
            Reason.ALREADY_EXISTS, f"{show(scan.mountpoint)} is scanned already{hint}", workspace_id=workspace_id
        )

    def _bring_up(self, workspace_id: str, *, revived: bool = False) -> None:
        """A new worker for a workspace that has none and no mount; none when it is to be scanned."""
        with self._store.read() as reader:
            row = reader.workspace(workspace_id)
            boundaries = reader.generations(workspace_id)
        mountpoint = row.mountpoint or row.root
        roots.check_no_cogfs(row.root, mounts.table())
        roots.check_directory(row.root)
        if row.scanned:
            self._scans.begin(workspace_id, row.root)
            self._set_dead(workspace_id, "")
            _log.info("scanned from now on", workspace=workspace_id, root=show(row.root))
            return
        roots.check_fuse()
        self._engine.recover(workspace_id)
        made = mountpoint != row.root and _make_mountpoint(mountpoint)
        try:
            process = worker.start(
                self._places,
                workspace_id,
                row.root,
                mountpoint,
                generation=row.next_generation,
                boundaries=boundaries,
            )
        except BaseException:
            self._clear(workspace_id)
            if made:
                _remove_mountpoint(mountpoint)
            raise
        try:
            link = WorkerLink.connect(self._places.worker_socket(workspace_id), mountpoint)
            self._put(workspace_id, link, process, revived=revived)
        except BaseException as error:
            self._clear(workspace_id)
            ended = process.wait(0)
            process.kill()
            process.wait(_END_PATIENCE)
            how = process.how_it_ended()
            process.close()
            if made:
                _remove_mountpoint(mountpoint)
            if ended and isinstance(error, WorkerGone):
                raise WorkerGone(how) from error
            raise
        self._set_dead(workspace_id, "")
        _log.info("mounted", workspace=workspace_id, mountpoint=show(mountpoint), worker_pid=process.pid)

    def _put(self, workspace_id: str, link: WorkerLink, process: WorkerProcess, *, revived: bool = False) -> None:
        """Let the engine have a worker, and watch it. The engine's refusal is raised, and the link closed."""
        served = _Served(link, process, revived)
        with self._mutex:
            self._served[workspace_id] = served
        try:
            self._engine.attach(workspace_id, link)
        except BaseException:
            self._drop(workspace_id)
            raise
        link.on_end(lambda: self._worker_ended(workspace_id, served))

    def _drop(self, workspace_id: str) -> None:
        """The engine and the tables forget the workspace's worker, which may well go on, or that it is scanned."""
        self._scans.end(workspace_id)
        with self._mutex:
            served = self._served.pop(workspace_id, None)
        self._engine.detach(workspace_id)
        if served is not None:
            served.link.close()
            served.process.close()

    def _clear(self, workspace_id: str) -> None:
        """Take away mounts and a socket of the workspace that nobody serves or can reach. Users keep what they have."""
        for entry in reversed(mounts.of_workspace(workspace_id)):
            _log.warning("mount without a worker", workspace=workspace_id, mountpoint=show(entry.mountpoint))
            try:
                takedown.unmount_entry(entry, lazy=True)
            except OSError as error:
                raise from_os_error(error, f"take the dead mount at {show(entry.mountpoint)} away") from error
        worker.forget(self._places, workspace_id)

    # Death.

    def _worker_ended(self, workspace_id: str, served: _Served) -> None:
        """The connection ended by itself."""
        with self._engine.lock(workspace_id):
            with self._mutex:
                if self._stopping.is_set() or self._served.get(workspace_id) is not served:
                    return
            reason = "the mount worker is gone"
            try:
                if self._reconnect(workspace_id, served):
                    return
                reason = served.process.how_it_ended()
                _log.error("worker died", workspace=workspace_id, worker_pid=served.process.pid, reason=reason)
                self._set_dead(workspace_id, f"{reason}: mount it again")
                self._drop(workspace_id)
                self._clear(workspace_id)
            except Exception as error:
                _log.error("dead worker not cleared away", workspace=workspace_id, exc_info=error)
        self._revive(workspace_id, reason)

    def _reconnect(self, workspace_id: str, served: _Served) -> bool:
        """A worker that lives although the connection ended is connected to again, or ended for good."""
        process = served.process
        if process.wait(2.0):
            return False
        try:
            link = WorkerLink.connect(self._places.worker_socket(workspace_id), served.link.mountpoint)
        except CogfsError as error:
            _log.error("worker lives and cannot be reached", workspace=workspace_id, reason=str(error))
            process.kill()
            process.wait(_END_PATIENCE)
            return False
        self._engine.detach(workspace_id)
        served.link.close()
        self._put(workspace_id, link, process, revived=served.revived)
        _log.warning("connected to the worker again", workspace=workspace_id, worker_pid=process.pid)
        return True

    def _revive(self, workspace_id: str, reason: str) -> None:
        """Bring a workspace whose worker died back, unless it dies too often or somebody else was first."""
        while True:
            with self._mutex:
                deaths = self._deaths.setdefault(workspace_id, deque())
                now = time.monotonic()
                deaths.append(now)
                while deaths[0] < now - _REVIVAL_WINDOW:
                    deaths.popleft()
                count = len(deaths)
            if count > _REVIVALS:
                self._set_dead(workspace_id, f"{reason}, the {count}th time within a minute: mount it again")
                _log.error("worker not started again", workspace=workspace_id, deaths=count)
                return
            if self._stopping.wait(_BACKOFF * _BACKOFF_FACTOR ** (count - 1)):
                return
            with self._engine.lock(workspace_id):
                with self._mutex:
                    if self._stopping.is_set() or workspace_id in self._served:
                        return
                try:
                    with self._store.read() as reader:
                        if not reader.workspace(workspace_id).mount_wanted:
                            return
                    self._clear(workspace_id)
                    self._bring_up(workspace_id, revived=True)
                    return
                except Exception as error:
                    reason = str(as_cogfs_error(error, f"mount {workspace_id} again"))
                    _log.error("worker not brought back", workspace=workspace_id, reason=reason)
                    self._set_dead(workspace_id, reason)

    # Unmount.

    def unmount(self, workspace_id: str, *, force: bool) -> None:
        """Take the mount away and keep it away. BUSY with who uses it; ``force``: they keep what they have open.

        VALIDATION_ERROR when it is neither mounted nor should be.
        """
        self._refuse_when_stopping()
        with self._engine.lock(workspace_id):
            with self._store.read() as reader:
                row = reader.workspace(workspace_id)
            if not row.mount_wanted and not mounts.of_workspace(workspace_id):
                raise invalid(f"{show(row.root)} is not mounted")
            if row.scanned:
                self._drop(workspace_id)
            else:
                self._take_away(row, lazily=force, patience=_BUSY_PATIENCE)
            self._want(workspace_id, False, row.mountpoint)
            self._set_dead(workspace_id, "")

    def _take_away(self, row: WorkspaceRow, *, lazily: bool, patience: float) -> None:
        """Unmount, the plain way first; BUSY when it is used, unless ``lazily``."""
        link = self._worker_link(row.id)
        if link is not None and _probe(link) is not None:
            # Dead, or so stuck that nothing is to be had from it: nobody may wait for it.
            link = None
        if link is not None:
            try:
                self._engine.settle(row.id)
            except Exception as error:
                # Nothing is lost: the next mount finds by stat what was not handed over.
                fault = as_cogfs_error(error, f"settle {row.id}")
                _log.warning("not settled before unmount", workspace=row.id, reason=str(fault))
        left: list[BusyBy] = []
        for entry in reversed(mounts.of_workspace(row.id)):
            left += takedown.take_away(entry, link, lazily=lazily, patience=patience)
        with self._mutex:
            served = self._served.get(row.id)
        # It ends with the last user of its mount.
        if served is not None and not left and not served.process.wait(_END_PATIENCE):
            _log.error("worker did not end with its mount", workspace=row.id, worker_pid=served.process.pid)
            served.process.kill()
            served.process.wait(_END_PATIENCE)
        self._drop(row.id)
        worker.forget(self._places, row.id)
        _log.info("unmounted", workspace=row.id, users=users.names(left) if left else "")

    # Stop.

    def stop(self, *, leave_mounts: bool) -> None:
        """Let go of every workspace. With ``leave_mounts`` the workers serve on for the next daemon.

        Otherwise each is unmounted, the plain way first. A mount that is still used then is taken out of the tree:
        nothing waits for its users, who keep what they have open, and the worker ends with the last of them.
        """
        self._stopping.set()
        with self._store.read() as reader:
            rows = reader.workspaces()
        threads = [self._thread(lambda row=row: self._stop_one(row, leave_mounts), f"stop-{row.id}") for row in rows]  # type: ignore[misc]
        for thread in threads:
            thread.join()

    def _stop_one(self, row: WorkspaceRow, leave_mounts: bool) -> None:
        try:
            lock = self._engine.lock(row.id)
            if not lock.acquire(timeout=_STOP_PATIENCE):
                _log.error("workspace left as it is: something still works in it", workspace=row.id)
                return
            try:
                if leave_mounts or row.scanned:
                    self._drop(row.id)
                elif mounts.of_workspace(row.id):
                    self._take_away(row, lazily=True, patience=_BUSY_PATIENCE)
            finally:
                lock.release()
        except Exception as error:
            fault = as_cogfs_error(error, f"stop {row.id}")
            _log.error("workspace not let go of", workspace=row.id, reason=str(fault))

    # Small things.

    def _refuse_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise CogfsError(Reason.UNAVAILABLE, "cogfsd is stopping: try again when it runs")

    def _set_dead(self, workspace_id: str, reason: str) -> None:
        with self._mutex:
            if reason:
                self._dead[workspace_id] = reason
            else:
                self._dead.pop(workspace_id, None)

    def _want(self, workspace_id: str, wanted: bool, mountpoint: bytes, *, scanned: bool | None = None) -> WorkspaceRow:
        """Note durably whether the workspace should be mounted, or with ``scanned`` scanned. The row as it was."""
        with self._store.write() as writer:
            row = writer.workspace(workspace_id)
            how = row.scanned if scanned is None else scanned
            writer.put_workspace(msgspec.structs.replace(row, mount_wanted=wanted, mountpoint=mountpoint, scanned=how))
        return row

    @staticmethod
    def _thread(run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


def _probe(link: WorkerLink) -> CogfsError | None:
    """Why the worker does not answer, or None. One that is being killed still looks alive; WorkerGone is certain."""
    try:
        link.call(GetStats(), _ANSWER_PATIENCE)
    except CogfsError as error:
        _log.warning("worker does not answer", workspace=link.welcome.workspace_id, reason=str(error))
        return error
    return None


def _make_mountpoint(mountpoint: bytes) -> bool:
    """True when the directory was missing and has been made."""
    try:
        os.mkdir(mountpoint, 0o755)
    except FileExistsError:
        return False
    except OSError as error:
        raise from_os_error(error, f"make the mountpoint {show(mountpoint)}") from error
    return True


def _remove_mountpoint(mountpoint: bytes) -> None:
    try:
        os.rmdir(mountpoint)
    except OSError as error:
        _log.warning("mountpoint not removed", mountpoint=show(mountpoint), error=str(error))
