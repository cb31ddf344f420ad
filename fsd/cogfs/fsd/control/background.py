"""Work that nobody waits for gives way to what the programs in the mounts do."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from cogfs.fsd.control.syscalls import set_scheduling

#: As ``nice`` counts. Lower still, and a busy machine would leave such a thread standing with Python's lock.
_NICE = 10
#: Nanoseconds. Who wakes up takes the processor at once from a thread with longer slices than its own, which are some
#: milliseconds by default, instead of after the end of that thread's slice. (Linux 6.12 and later.)
_SLICE_NS = 100_000_000


def lower_priority(nice: int = _NICE) -> None:
    """Of the calling thread."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    with suppress(OSError):
        set_scheduling(thread, nice, _SLICE_NS)
