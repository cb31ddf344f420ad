"""Tells the kernel to forget attributes that the worker changed by itself, from a thread of its own.

A notification can wait for a request that only the event loop can answer, so it is never made on the loop's thread and
never under a lock.
"""

from __future__ import annotations

import logging
import queue
import threading

import pyfuse3

log = logging.getLogger(__name__)


class Invalidator:
    """A queue of notifications and the thread that makes them, which starts with the first."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def attributes(self, node_id: int) -> None:
        """The kernel's attributes of this node are old."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="invalidate", daemon=True)
            self._thread.start()
        self._queue.put(node_id)

    def close(self) -> None:
        """End the thread. The mount is gone, so nothing it does can wait."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (node_id := self._queue.get()) is not None:
            try:
                pyfuse3.invalidate_inode(node_id, attr_only=True)
            except FileNotFoundError:
                pass  # the kernel does not have it any more
            except OSError as error:
                log.warning("cannot invalidate node %d: %s", node_id, error)
