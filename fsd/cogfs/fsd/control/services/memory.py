"""The calls of ThreadService about what threads remember."""

from __future__ import annotations

import grpc

from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.memory import Memories, Remembered, Wanted
from cogfs.fsd.control.server import check_id
from cogfs.fsd.control.services.convert import (
    DEFAULT_PAGE,
    check_content,
    metadata_struct,
    metadata_text,
    required,
    timestamp,
)
from cogfs.fsd.control.standing import Shift
from cogfs.store.schema import MemoryKind, MemoryRow
from cogfs.v1 import thread_pb2

_NAME_MAX = 1024
#: Entries that a memory may stand on.
_BASIS_MAX = 1000


class MemoryCalls:
    def __init__(self, memories: Memories) -> None:
        self._memories = memories

    def PutMemory(self, request: thread_pb2.PutMemoryRequest, context: grpc.ServicerContext) -> thread_pb2.Memory:
        thread_id = required(request.thread_id, "thread_id")
        if request.kind == thread_pb2.Memory.KIND_UNSPECIFIED:
            raise invalid("a memory needs a kind")
        check_content(request.content)
        if len(request.name.encode()) > _NAME_MAX or not request.name.isprintable():
            raise invalid(f"the name of a file has at most {_NAME_MAX:,} bytes, and no control characters")
        if len(request.entry_ids) > _BASIS_MAX:
            raise invalid(f"a memory stands on at most {_BASIS_MAX:,} entries, not {len(request.entry_ids):,}")
        for entry_id in request.entry_ids:
            check_id(required(entry_id, "an id in entry_ids"), "an id in entry_ids")
        remembered = Remembered(
            thread_id,
            MemoryKind[thread_pb2.Memory.Kind.Name(request.kind)],
            request.content,
            metadata_text(request.metadata),
            request.name,
            tuple(request.entry_ids),
            request.memory_id,
        )
        return memory_message(self._memories.put(remembered))

    def ListMemory(
        self, request: thread_pb2.ListMemoryRequest, context: grpc.ServicerContext
    ) -> thread_pb2.ListMemoryResponse:
        thread_id = required(request.thread_id, "thread_id")
        size = request.page_size or DEFAULT_PAGE
        if request.page_token:
            check_id(request.page_token, "the page token")
        kind = MemoryKind[thread_pb2.Memory.Kind.Name(request.kind)] if request.kind else None
        wanted = Wanted(request.active_only, request.all_branches, kind)
        rows = self._memories.list(thread_id, wanted, after=request.page_token, limit=size + 1)
        return thread_pb2.ListMemoryResponse(
            memories=[memory_message(row) for row in rows[:size]],
            next_page_token=rows[size - 1].id if len(rows) > size else "",
        )


def memory_message(row: MemoryRow) -> thread_pb2.Memory:
    message = thread_pb2.Memory(
        id=row.id,
        thread_id=row.thread_id,
        kind=thread_pb2.Memory.Kind.Value(row.kind.name),
        name=row.name,
        content=row.content,
        metadata=metadata_struct(row.metadata),
        entry_ids=row.entry_ids,
        state=thread_pb2.Memory.ACTIVE if row.stale is None else thread_pb2.Memory.STALE,
        created_at=timestamp(row.created_ns),
        updated_at=timestamp(row.updated_ns),
    )
    if row.stale is not None:
        stale = row.stale
        because = thread_pb2.StaleBecause(reason=stale.reason, leaf_id=stale.leaf_id, at=timestamp(stale.at_ns))
        message.stale_because.CopyFrom(because)
    return message


def memory_report(shift: Shift) -> thread_pb2.MemoryReport:
    return thread_pb2.MemoryReport(stale=shift.stale, hidden=shift.hidden, active=shift.active)
