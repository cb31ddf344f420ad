"""Pages of conversations, at a cost that follows the page and not the length of the thread.

The active branch can only be found from its leaf, so where it leads is remembered, as the numbers of its entries.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from itertools import islice

from cogfs.store.rows import Reader
from cogfs.store.schema import EntryRow, ThreadRow

#: Threads whose active branch is remembered: 8 bytes for an entry.
_REMEMBERED = 32


class Path:
    """The numbers of the entries of a branch, ascending. Immutable."""

    def __init__(self, numbers: array[int]) -> None:
        self._numbers = numbers

    def has(self, sequence: int) -> bool:
        place = bisect_left(self._numbers, sequence)
        return place < len(self._numbers) and self._numbers[place] == sequence

    def up_to(self, sequence: int) -> array[int]:
        """Those that are not greater."""
        return self._numbers[: bisect_right(self._numbers, sequence)]

    def after(self, last: int, limit: int) -> array[int]:
        """The next ``limit`` ones after a number."""
        start = bisect_right(self._numbers, last)
        return self._numbers[start : start + limit]

    def before(self, last: int, limit: int) -> array[int]:
        """The ``limit`` ones before a number, or with 0 the last ones, descending."""
        end = bisect_left(self._numbers, last) if last else len(self._numbers)
        return self._numbers[max(0, end - limit) : end][::-1]


class Paths:
    """The active branches of threads. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By id and time of making: a thread that was deleted is not another one with its id.
        self._known: OrderedDict[tuple[str, int], Path] = OrderedDict()

    def of(self, reader: Reader, thread: ThreadRow) -> Path:
        """The active branch of a thread. What is known of it is not walked again, also after a rewind."""
        key = (thread.id, thread.created_ns)
        with self._lock:
            known = self._known.get(key, Path(array("Q")))
        found: list[int] = []
        trunk = array("Q")
        for entry in reader.ancestry(thread.id, thread.leaf_id):
            if known.has(entry.sequence):
                trunk = known.up_to(entry.sequence)
                break
            found.append(entry.sequence)
        path = Path(trunk + array("Q", reversed(found)))
        with self._lock:
            self._known[key] = path
            self._known.move_to_end(key)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return path


def page(
    reader: Reader, thread_id: str, path: Path | None, last: int, limit: int, *, newest_first: bool
) -> list[EntryRow]:
    """Up to ``limit`` entries after the one with the number ``last`` (0: from the beginning), those of ``path`` alone
    where it is given."""
    if path is None:
        rows = reader.entries_back(thread_id, before=last) if newest_first else reader.entries(thread_id, after=last)
        return list(islice(rows, limit))
    numbers = path.before(last, limit) if newest_first else path.after(last, limit)
    return [reader.numbered_entry(thread_id, number) for number in numbers]
