"""Taking contents that the store has lost again from the files of the workspaces that may still have them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import structlog

from cogfs.fsd.control.beneath import beneath, split
from cogfs.fsd.control.capture import Vanished, capture_file
from cogfs.store.check import AffectedPath
from cogfs.store.store import Store

_log = structlog.get_logger(__name__)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def retake(store: Store, affected: Iterable[AffectedPath]) -> None:
    """Puts what the files at these paths hold now. Whether that is what was lost, its hash tells; if not, the next
    collection drops it. StoreError."""
    paths: dict[str, set[bytes]] = {}
    for one in affected:
        if one.path:
            paths.setdefault(one.workspace_id, set()).add(one.path)
    with store.read() as reader:
        roots = {row.id: row.root for row in reader.workspaces()}
    for workspace_id, wanted in paths.items():
        if workspace_id not in roots:
            continue
        try:
            root = os.open(roots[workspace_id], _OPEN)
        except OSError as error:
            _log.warning("cannot look for lost contents", workspace=workspace_id, error=str(error))
            continue
        try:
            with beneath(root) as reach:
                for path in sorted(wanted):
                    parent, name = split(path)
                    with suppress(OSError, Vanished):
                        capture_file(store, name, reach.directory(parent))
        finally:
            os.close(root)
