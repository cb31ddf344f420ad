"""Work that nobody waits for gives way to what the programs in the mounts do."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

#: As ``nice`` counts. Lower still, and a busy machine would leave such a thread standing with Python's lock.
_NICE = 10


def lower_priority(nice: int = _NICE) -> None:
    """Of the calling thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
