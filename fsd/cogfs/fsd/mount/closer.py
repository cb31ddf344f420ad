"""Closing descriptors behind which there is work for the filesystem.

To close a file that was cut off and written again makes ext4 allocate all that was written, and to close the last
descriptor of a removed file gives all its blocks back: half a second for a GiB. Nobody waits for either, so a thread
does it, while the event loop serves requests.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

#: Bytes from which on it is worth a thread's while.
LARGE = 4 << 20


class Closer:
    """Closes descriptors in a thread of its own, which starts with the first and touches nothing else."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def close(self, fd: int) -> None:
        """Close ``fd`` some time soon. Its number is not given out again before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="close", daemon=True)
            self._thread.start()
        self._queue.put(fd)

    def stop(self) -> None:
        """Close what is left, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (fd := self._queue.get()) is not None:
            # What the disk has to say is said by fsync; a close tells nobody.
            with suppress(OSError):
                os.close(fd)
