"""What threads remember: written and listed. What of it counts is ``standing``'s to say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.standing import REWOUND, settle
from cogfs.fsd.control.threads import Threads
from cogfs.store.ids import new_id
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import MemoryKind, MemoryRow, ThreadRow
from cogfs.store.store import Store


@dataclass(frozen=True, slots=True)
class Remembered:
    """A memory that is to be written."""

    thread_id: str
    kind: MemoryKind
    content: str
    #: JSON text of an object.
    metadata: str = "{}"
    name: str = ""
    entry_ids: tuple[str, ...] = ()
    #: Empty: chosen here.
    memory_id: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which memories of a thread are asked for."""

    active_only: bool = False
    all_branches: bool = False
    kind: MemoryKind | None = None

    def has(self, row: MemoryRow) -> bool:
        if self.kind is not None and row.kind is not self.kind:
            return False
        if row.stale is None:
            return True
        return not self.active_only and (self.all_branches or row.stale.reason == REWOUND)


class Memories:
    """The memories of all threads."""

    def __init__(self, store: Store, threads: Threads) -> None:
        self._store = store
        self._threads = threads

    def put(self, memory: Remembered) -> MemoryRow:
        """Write a memory, in the place of the one with its id. NotFound: there is no such thread, or no such entry in
        it. VALIDATION_ERROR: it cannot be of its kind. THREAD_BUSY: a rewind of the thread is not finished."""
        if (memory.kind is MemoryKind.FILE) != bool(memory.name):
            raise invalid("a file of the memory needs a name, and nothing else has one")
        with self._threads.lock(memory.thread_id), self._store.write() as writer:
            thread = writer.thread(memory.thread_id)
            self._threads.refuse_unfinished(writer, thread)
            memory_id = memory.memory_id or new_id("mem")
            known = writer.memory(thread.id, memory_id)
            if known is not None and known.kind is not memory.kind:
                raise invalid(f"the memory {memory_id} is of another kind: a {known.kind.name}")
            now = time.time_ns()
            row = MemoryRow(
                id=memory_id,
                thread_id=thread.id,
                kind=memory.kind,
                name=memory.name,
                content=memory.content,
                metadata=memory.metadata,
                entry_ids=self._stands_on(writer, thread, memory),
                created_ns=now if known is None else known.created_ns,
                updated_ns=now,
                stale=None if known is None else known.stale,
            )
            writer.put_memory(row)
            settle(writer, thread.id, thread.leaf_id, self._concerned(writer, row, known))
            written = writer.memory(thread.id, memory_id)
            assert written is not None
            return written

    @staticmethod
    def _stands_on(reader: Reader, thread: ThreadRow, memory: Remembered) -> tuple[str, ...]:
        entry_ids = tuple(dict.fromkeys(memory.entry_ids))
        for entry_id in entry_ids:
            reader.entry(thread.id, entry_id)
        if memory.kind is MemoryKind.ITEM:
            return entry_ids
        if not entry_ids and not thread.leaf_id:
            raise invalid("a summary or a file belongs to an entry, and the thread has none yet")
        if len(entry_ids) > 1:
            raise invalid("a summary or a file belongs to one entry, the one from which it is seen")
        return entry_ids or (thread.leaf_id,)

    @staticmethod
    def _concerned(writer: Writer, row: MemoryRow, known: MemoryRow | None) -> list[MemoryRow]:
        """The memories whose standing may change by ``row``: of a file all versions, also of the name that it had."""
        if row.kind is not MemoryKind.FILE:
            return [row]
        names = {row.name, row.name if known is None else known.name}
        return [one for one in writer.memories(row.thread_id) if one.kind is MemoryKind.FILE and one.name in names]

    def list(self, thread_id: str, wanted: Wanted, *, after: str, limit: int) -> list[MemoryRow]:
        """At most ``limit`` memories in order of their ids, those greater than ``after``. NotFound."""
        with self._store.read() as reader:
            reader.thread(thread_id)
            rows: Iterator[MemoryRow] = (row for row in reader.memories(thread_id, after=after) if wanted.has(row))
            return list(islice(rows, limit))
