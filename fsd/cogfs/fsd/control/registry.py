"""Which directories are workspaces: new ones are checked and registered here, and found by path. Mounts nothing."""

from __future__ import annotations

import os
import threading
import time

from cogfs.fsd.control import mounts, roots
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import Workspaces
from cogfs.store.ids import new_id
from cogfs.store.schema import NewPlaceRow, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store


class Registry:
    """The rows of workspaces as they come and go. Safe from any thread."""

    def __init__(self, places: Places, store: Store, engine: Workspaces) -> None:
        self._places = places
        self._store = store
        self._engine = engine
        #: Held from the check of a new root until it is registered, so that no two meet.
        self._registering = threading.Lock()

    def create(self, path: bytes, options: WorkspaceOptions, *, force: bool) -> WorkspaceRow:
        """Register an existing directory. VALIDATION_ERROR, ALREADY_EXISTS or DENIED, as ``roots`` says."""
        table = mounts.table()
        root = roots.canonical(path, table)
        return self._register(root, table, WorkspaceRow(new_id("ws"), root, b"", options, time.time_ns()), force=force)

    def create_for_fork(self, root: bytes, options: WorkspaceOptions, place: NewPlaceRow) -> WorkspaceRow:
        """Register a directory, whose path is canonical, for the files of a fork; as ``create``. It need not exist."""
        row = WorkspaceRow(new_id("ws"), root, b"", options, time.time_ns(), new_place=place)
        return self._register(root, mounts.table(), row, force=False, missing=place.directory_made)

    def _register(
        self, root: bytes, table: list[mounts.MountEntry], row: WorkspaceRow, *, force: bool, missing: bool = False
    ) -> WorkspaceRow:
        with self._registering:
            self.check(root, table, force=force, missing=missing)
            with self._store.write() as writer:
                writer.put_workspace(row)
        return row

    def check(self, root: bytes, table: list[mounts.MountEntry], *, force: bool = False, missing: bool = False) -> None:
        """A canonical path may become a workspace, or one sentence says why not. ``missing``: it is to be made."""
        with self._store.read() as reader:
            rows = reader.workspaces()
        roots.check_new_root(root, rows, self._places, table, force=force, missing=missing)

    def at(self, path: bytes, *, exactly: bool) -> WorkspaceRow | None:
        """The workspace at ``path`` (in its root or its mountpoint) or, if not ``exactly``, the one that holds it."""
        with self._store.read() as reader:
            rows = reader.workspaces()
        row = _match(path, rows, exactly=exactly)
        if row is None and _fstype_at(path) != mounts.FSTYPE:
            # Only now, as what is below a mount may not answer.
            row = _match(os.path.realpath(path), rows, exactly=exactly)
        return row

    def forget_unless_used(self, workspace_id: str) -> None:
        """Take back a registration, unless somebody else has mounted it or begun a thread in it since."""
        with self._engine.lock(workspace_id):
            with self._store.write() as writer:
                row = writer.workspace(workspace_id)
                if row.mount_wanted or any(thread.workspace_id == row.id for thread in writer.threads()):
                    return
                writer.delete_workspace(workspace_id)
            self._engine.forget(workspace_id)


def _match(path: bytes, rows: list[WorkspaceRow], *, exactly: bool) -> WorkspaceRow | None:
    row = roots.find(path, rows)
    return row if row is None or not exactly or path in roots.places_of(row) else None


def _fstype_at(path: bytes) -> str:
    entry = mounts.covering(path, mounts.table())
    return entry.fstype if entry is not None else ""
