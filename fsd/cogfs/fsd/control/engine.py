"""All workspaces and threads of one store: what the services and the supervisor speak to."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from cogfs.fsd.control.completion import Completion
from cogfs.fsd.control.ports import EngineState, Link
from cogfs.fsd.control.threads import Threads
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.store import Store


class Engine:
    """Owns the workspaces' locks and the pool that reads files into the store. Safe from any thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="ingest")
        self._workspaces: dict[str, Workspace] = {}
        self._lock = threading.Lock()
        self.threads = Threads(store, self.workspace)

    def workspace(self, workspace_id: str) -> Workspace:
        """NotFound when none is registered under the id."""
        with self.store.read() as reader:
            reader.workspace(workspace_id)
        with self._lock:
            known = self._workspaces.get(workspace_id)
            if known is None:
                known = self._workspaces[workspace_id] = Workspace(self.store, self._pool, workspace_id)
            return known

    def attach(self, workspace_id: str, link: Link) -> None:
        """A worker, new or adopted, serves the workspace from now on; an interrupted restore is finished first."""
        workspace = self.workspace(workspace_id)
        with workspace.lock:
            workspace.attach(link)
            Completion(workspace).recover(link)
            reason = workspace.row().read_only
            if reason != link.welcome.read_only:
                workspace.set_read_only(reason)

    def detach(self, workspace_id: str) -> None:
        """The worker is gone. Idempotent; never waits for the worker."""
        with self._lock:
            known = self._workspaces.get(workspace_id)
        if known is not None:
            known.detach()

    def recover(self, workspace_id: str) -> None:
        """Finish an interrupted restore: through the mount when there is one, else on the backing directory."""
        workspace = self.workspace(workspace_id)
        with workspace.lock:
            link = workspace.link
            Completion(workspace).recover(link if link is not None and link.alive else None)

    def settle(self, workspace_id: str) -> None:
        """Hand over what is dirty before an orderly unmount."""
        self.workspace(workspace_id).settle()

    def lock(self, workspace_id: str) -> threading.RLock:
        return self.workspace(workspace_id).lock

    def state(self, workspace_id: str) -> EngineState:
        return self.workspace(workspace_id).state()

    def forget(self, workspace_id: str) -> None:
        """The workspace was deleted."""
        with self._lock:
            self._workspaces.pop(workspace_id, None)

    def close(self) -> None:
        """Wait for what is being read into the store."""
        self._pool.shutdown()
