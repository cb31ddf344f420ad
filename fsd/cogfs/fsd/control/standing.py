"""Which memories of a thread count on its active branch, and what becomes of them when the active leaf moves.

Whether a memory counts is kept in its row, with why not and since when, and always is what ``reasons`` makes of the
active branch. So whoever moves a leaf does it by ``move_leaf``, in one transaction. Knows rows alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import MemoryKind, MemoryRow, StaleRow, ThreadRow

#: Of an item: none of the entries that it stands on is on the active branch.
REWOUND = "rewound"
#: Of a summary or a file: it belongs to another branch.
BRANCH = "branch"
#: Of a file: the active branch has a later version.
REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Shift:
    """What a move of the leaf does to memories: their ids, ascending."""

    #: Items that are stale from then on.
    stale: tuple[str, ...] = ()
    #: Summaries and files that are not seen from then on.
    hidden: tuple[str, ...] = ()
    #: Those that count again.
    active: tuple[str, ...] = ()


NO_SHIFT = Shift()


def reasons(rows: Iterable[MemoryRow], places: Mapping[str, int]) -> dict[str, str]:
    """Why each memory does not count, by its id; empty: it does.

    ``rows`` has all versions of each file in it. ``places``: the entries of the active branch, as far as a memory
    stands on them, with their places on it.
    """
    found: dict[str, str] = {}
    versions: dict[str, list[tuple[int, int, str]]] = {}
    for row in rows:
        here = [places[entry] for entry in row.entry_ids if entry in places]
        if row.kind is MemoryKind.ITEM:
            found[row.id] = "" if here or not row.entry_ids else REWOUND
            continue
        found[row.id] = "" if here else BRANCH
        if here and row.kind is MemoryKind.FILE:
            versions.setdefault(row.name, []).append((here[0], row.updated_ns, row.id))
    for several in versions.values():
        found.update((replaced, REPLACED) for _, _, replaced in sorted(several)[:-1])
    return found


def shifted(rows: Iterable[MemoryRow], places: Mapping[str, int], leaf_id: str) -> tuple[Shift, list[MemoryRow]]:
    """What becomes of memories on a branch that ends at ``leaf_id``, and the rows that change. As for ``reasons``."""
    rows = list(rows)
    now = time.time_ns()
    why = reasons(rows, places)
    stale, hidden, active, changed = [], [], [], []
    for row in rows:
        reason = why[row.id]
        if reason == (row.stale.reason if row.stale is not None else ""):
            continue
        changed.append(msgspec.structs.replace(row, stale=StaleRow(reason, leaf_id, now) if reason else None))
        if not reason:
            active.append(row.id)
        elif row.kind is MemoryKind.ITEM:
            stale.append(row.id)
        elif row.stale is None:
            hidden.append(row.id)
    return Shift(tuple(sorted(stale)), tuple(sorted(hidden)), tuple(sorted(active))), changed


def places_on(reader: Reader, thread_id: str, leaf_id: str, rows: Iterable[MemoryRow]) -> dict[str, int]:
    """The ``places`` of ``reasons`` on the branch that ends at ``leaf_id``. It is walked as far as it has to be."""
    wanted = {entry for row in rows for entry in row.entry_ids}
    found: dict[str, int] = {}
    if not wanted:
        return found
    first = min(reader.entry(thread_id, entry).sequence for entry in wanted)
    for entry in reader.ancestry(thread_id, leaf_id):
        if entry.id in wanted:
            found[entry.id] = entry.sequence
        if entry.sequence <= first:
            break
    return found


def shift(reader: Reader, thread_id: str, leaf_id: str) -> Shift:
    """What a move of a thread's active leaf to ``leaf_id`` would do to its memories."""
    rows = list(reader.memories(thread_id))
    return shifted(rows, places_on(reader, thread_id, leaf_id, rows), leaf_id)[0]


def settle(writer: Writer, thread_id: str, leaf_id: str, rows: Iterable[MemoryRow]) -> Shift:
    """Write down what counts of ``rows`` on the branch that ends at ``leaf_id``. As for ``reasons``."""
    rows = list(rows)
    done, changed = shifted(rows, places_on(writer, thread_id, leaf_id, rows), leaf_id)
    for row in changed:
        writer.put_memory(row)
    return done


def move_leaf(writer: Writer, thread: ThreadRow) -> None:
    """Write a thread's row with another leaf, and what its memories become by that. The entries are there."""
    moved = writer.thread(thread.id).leaf_id != thread.leaf_id
    writer.put_thread(thread)
    if moved:
        settle(writer, thread.id, thread.leaf_id, writer.memories(thread.id))
