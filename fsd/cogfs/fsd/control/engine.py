"""All workspaces and threads of one store: what the services and the supervisor speak to."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from cogfs.fsd.control.ahead import AheadThread
from cogfs.fsd.control.background import lower_priority
from cogfs.fsd.control.budget import Budget
from cogfs.fsd.control.commands import Commands
from cogfs.fsd.control.completion import Completion
from cogfs.fsd.control.holders import Holders
from cogfs.fsd.control.holds import Holds
from cogfs.fsd.control.passage import Passages
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import EngineState, Link
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.control.runs import Runs
from cogfs.fsd.control.settings import Settings
from cogfs.fsd.control.threads import Threads
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.store import Store


class Engine:
    """Owns the workspaces' locks and the pool that reads files into the store. Safe from any thread."""

    def __init__(self, store: Store, places: Places, settings: Settings) -> None:
        patience = settings.patience
        self.store = store
        self._places = places
        self._pool = ThreadPoolExecutor(
            max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="ingest", initializer=lower_priority
        )
        #: For what a call in a mount waits for, so that it never waits for the others.
        self._urgent = ThreadPoolExecutor(4, thread_name_prefix="urgent")
        self._ahead = AheadThread(store)
        self._workspaces: dict[str, Workspace] = {}
        self._lock = threading.Lock()
        self.budget = Budget(store, self.workspace, settings.max_bytes)
        self._holds = Holds()
        self.holders = Holders(store, self._holds, patience)
        self.runs = Runs(store, self._holds, self.holders)
        self.commands = Commands(store, self._holds)
        self.passages = Passages(store, self._holds, self.runs, self.commands, patience)
        self.threads = Threads(store, self.workspace, self.passages)

    def workspace(self, workspace_id: str) -> Workspace:
        """NotFound when none is registered under the id."""
        with self.store.read() as reader:
            reader.workspace(workspace_id)
        with self._lock:
            known = self._workspaces.get(workspace_id)
            if known is None:
                undo_log = self._places.undo_log(workspace_id)
                known = Workspace(self.store, self._pool, self._urgent, workspace_id, undo_log, self.budget.refuse_full)
                self._workspaces[workspace_id] = known
            return known

    def attach(self, workspace_id: str, link: Link) -> None:
        """A worker, new or adopted, serves the workspace from now on; an interrupted restore is finished first."""
        workspace = self.workspace(workspace_id)
        with self.store.operation(), workspace.lock:
            workspace.attach(link)
            Completion(workspace).recover(link)
            row = workspace.row()
            if link.watched:
                self._ahead.serve(workspace_id, workspace.ahead, link, Rules.of(row.options))
            reason = row.read_only
            if reason != link.welcome.read_only:
                workspace.set_read_only(reason)
        # The restore that was finished may have dropped some.
        self.holders.refresh()

    def detach(self, workspace_id: str) -> None:
        """The worker is gone. Idempotent; never waits for the worker."""
        with self._lock:
            known = self._workspaces.get(workspace_id)
        self._ahead.leave(workspace_id)
        if known is not None:
            known.detach()

    def recover(self, workspace_id: str) -> None:
        """Finish an interrupted restore: through the mount when there is one, else on the backing directory."""
        workspace = self.workspace(workspace_id)
        with self.store.operation(), workspace.lock:
            link = workspace.link
            link = link if link is not None and link.alive else None
            if link is None:
                workspace.sealer.serve_bare(workspace.row().root)
            Completion(workspace).recover(link)
        self.holders.refresh()

    def settle(self, workspace_id: str) -> None:
        """Hand over what is dirty before an orderly unmount."""
        with self.store.operation():
            self.workspace(workspace_id).settle()

    def lock(self, workspace_id: str) -> threading.RLock:
        return self.workspace(workspace_id).lock

    def state(self, workspace_id: str) -> EngineState:
        return self.workspace(workspace_id).state()

    def forget(self, workspace_id: str) -> None:
        """The workspace was deleted."""
        with self._lock:
            known = self._workspaces.pop(workspace_id, None)
        if known is not None:
            known.sealer.close()

    def stopping(self) -> None:
        """Runs and commands go on, and are taken up by the next daemon; nobody waits for this one."""
        self._holds.close()
        self.holders.close()
        self.commands.close()

    def close(self) -> None:
        """Wait for what is being read into the store."""
        self.stopping()
        with self._lock:
            workspaces = list(self._workspaces.values())
        self._ahead.close()
        for workspace in workspaces:
            workspace.sealer.close()
        self._pool.shutdown()
        self._urgent.shutdown()
