"""Labels of the steps whose order makes the store and the restores safe, and a way to fail or to die at each.

``step(label)`` is called right before the step it names. In ordinary use it costs one comparison. With
``COGFS_CRASH_AT=label`` or ``label:n`` in the environment, the process kills itself with SIGKILL at the first (n-th)
passing of that label. Within a process a test sets a hook, which may raise, for example, an OSError.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Steps of the store, in the order in which a first write passes them, and then those of a start after a crash.
STORE_STEPS = (
    "store.create",
    "store.format",
    "index.create",
    "pack.create",
    "pack.header",
    "pack.append",
    "pack.appended",
    "pack.sync",
    "pack.directory",
    "index.write",
    "index.commit",
    "index.committed",
    "pack.recover",
    "pack.renew",
    "pack.truncate",
    "pack.discard",
)

#: Steps of the first start with a store of an older format.
UPGRADE_STEPS = (
    "store.upgrade",
    "index.upgrade",
)

#: Steps of a collection, in order; between them lie those of the commits that it makes. A start after a crash may pass
#: those of the removal of a pack.
COLLECTION_STEPS = (
    "gc.marked",
    "gc.loosened",
    "gc.copied",
    "gc.given-up",
    "pack.remove",
    "pack.removed",
    "gc.forget",
)

_armed: Callable[[str], None] | None = None
_lock = threading.Lock()

#: Steps of a repack, for each group, and then for the index; likewise, and then those of a collection come.
REPACK_STEPS = (
    "repack.made",
    "repack.written",
    "repack.committed",
    "compact.copied",
    "compact.renamed",
    "compact.sync",
)


def step(label: str) -> None:
    """Passes the step ``label``."""
    if _armed is not None:
        _armed(label)


@contextmanager
def on_step(hook: Callable[[str], None]) -> Iterator[None]:
    """Calls ``hook(label)`` at every step, in the thread that passes it, until the block ends."""
    global _armed  # noqa: PLW0603
    previous = _armed
    _armed = hook
    try:
        yield
    finally:
        _armed = previous


def crash_at(where: str) -> Callable[[str], None]:
    """A hook that kills the process at ``where``: a label, or a label, a colon and a count from 1."""
    label, colon, count = where.rpartition(":")
    if not colon or not count.isdigit():
        label, count = where, "1"
    left = int(count)

    def hook(passed: str) -> None:
        nonlocal left
        if passed != label:
            return
        with _lock:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


if os.environ.get("COGFS_CRASH_AT"):
    _armed = crash_at(os.environ["COGFS_CRASH_AT"])
