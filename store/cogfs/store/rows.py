"""The rows of LMDB by what they mean: workspaces, snapshots and their boundaries, threads, entries, memories, runs,
journals, recorded directories.

Keys are ids in UTF-8. Where a key has several parts, a NUL ends each id, and numbers are 8 bytes, big-endian, so that
the order of the keys is the order of the parts. Values are msgpack (see ``schema``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from cogfs.store.database import Change, Table, View, check_number
from cogfs.store.errors import Corrupt, Exists, NotFound
from cogfs.store.schema import (
    BoundaryRow,
    CommandRow,
    DirectoryRow,
    EntryRow,
    ForkLinkRow,
    JournalRow,
    MemoryRow,
    PolicyRow,
    RecordState,
    RunRow,
    SnapshotRow,
    ThreadRow,
    ToolCallRow,
    WorkspaceRow,
)

#: Bytes of UTF-8. With it no key is longer than LMDB allows.
MAX_ID = 128

LinkRow = tuple[int, tuple[int, ...]]

_Row = TypeVar("_Row")

_encoder = msgspec.msgpack.Encoder()
_workspace = msgspec.msgpack.Decoder(WorkspaceRow)
_snapshot = msgspec.msgpack.Decoder(SnapshotRow)
_thread = msgspec.msgpack.Decoder(ThreadRow)
_entry = msgspec.msgpack.Decoder(EntryRow)
_journal = msgspec.msgpack.Decoder(JournalRow)
_record_state = msgspec.msgpack.Decoder(RecordState)
_directory = msgspec.msgpack.Decoder(DirectoryRow)
_link = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...]])
_boundary = msgspec.msgpack.Decoder(BoundaryRow)
_policy = msgspec.msgpack.Decoder(PolicyRow)
_run = msgspec.msgpack.Decoder(RunRow)
_tool_call = msgspec.msgpack.Decoder(ToolCallRow)
_command = msgspec.msgpack.Decoder(CommandRow)
_memory = msgspec.msgpack.Decoder(MemoryRow)
_fork_link = msgspec.msgpack.Decoder(ForkLinkRow)
#: The key of the runtime's policy. An agent's begins with another word.
_RUNTIME = b"runtime"
_NUMBER = 8


def _id(value: str) -> bytes | None:
    """The key of an id, or None when no row can have it."""
    try:
        key = value.encode()
    except UnicodeEncodeError:
        return None
    return key if key and len(key) <= MAX_ID and b"\0" not in key else None


def _new_id(value: str) -> bytes:
    key = _id(value)
    if key is None:
        raise ValueError(f"{value!r} cannot be an id: 1 to {MAX_ID} bytes of UTF-8 without NUL")
    return key


def _under(value: str) -> bytes:
    """The prefix of what belongs to ``value``. An impossible id gets a prefix that nothing has."""
    return (_id(value) or b"\0") + b"\0"


def _of(value: str, number: int) -> bytes:
    return _under(value) + number.to_bytes(_NUMBER)


def _policy_key(agent: str) -> bytes | None:
    """The key of an agent's policy, of the runtime's without an agent; None when no agent can have the name."""
    if not agent:
        return _RUNTIME
    key = _id(agent)
    return None if key is None else b"agent\0" + key


def _decode(decoder: msgspec.msgpack.Decoder[_Row], value: bytes, table: Table, key: bytes) -> _Row:
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Corrupt(f"the index has no valid row {key!r} of {table.value}: {error}") from error


def decodes() -> dict[Table, Callable[[bytes], object]]:
    """How the rows of each table that has any are decoded. MsgspecError, ValueError."""
    return {
        Table.WORKSPACES: _workspace.decode,
        Table.SNAPSHOTS: _snapshot.decode,
        Table.THREADS: _thread.decode,
        Table.ENTRIES: _entry.decode,
        Table.JOURNALS: _journal.decode,
        Table.RECORD_STATES: _record_state.decode,
        Table.DIRECTORIES: _directory.decode,
        Table.LINKS: _link.decode,
        Table.BOUNDARIES: _boundary.decode,
        Table.POLICIES: _policy.decode,
    }


class Reader:
    """The rows in one transaction that reads. Use it in the thread and the block that it was made for."""

    def __init__(self, view: View) -> None:
        self._view = view

    def _one(self, decoder: msgspec.msgpack.Decoder[_Row], table: Table, key: bytes | None) -> _Row | None:
        value = None if key is None else self._view.get(table, key)
        return None if value is None or key is None else _decode(decoder, value, table, key)

    def _all(self, decoder: msgspec.msgpack.Decoder[_Row], table: Table, prefix: bytes = b"") -> Iterator[_Row]:
        for key, value in self._view.scan(table, prefix):
            yield _decode(decoder, value, table, key)

    # --- workspaces

    def workspace(self, workspace_id: str) -> WorkspaceRow:
        """NotFound when there is none."""
        row = self._one(_workspace, Table.WORKSPACES, _id(workspace_id))
        if row is None:
            raise NotFound(f"there is no workspace {workspace_id}")
        return row

    def workspaces(self) -> list[WorkspaceRow]:
        """All, in order of their ids."""
        return list(self._all(_workspace, Table.WORKSPACES))

    # --- snapshots

    def snapshot(self, snapshot_id: str) -> SnapshotRow:
        """NotFound when there is none."""
        row = self._one(_snapshot, Table.SNAPSHOTS, _id(snapshot_id))
        if row is None:
            raise NotFound(f"there is no snapshot {snapshot_id}")
        return row

    def snapshots(self, workspace_id: str, *, before: str = "", limit: int | None = None) -> list[SnapshotRow]:
        """Those of a workspace, the newest first: at most ``limit``, and only those older than ``before``."""
        prefix = _under(workspace_id)
        rows: list[SnapshotRow] = []
        keys = self._view.scan_back(
            Table.WORKSPACE_SNAPSHOTS, prefix, before=prefix + before.encode(errors="replace") if before else b""
        )
        while (limit is None or len(rows) < limit) and (pair := next(keys, None)) is not None:
            rows.append(self.snapshot(pair[0][len(prefix) :].decode()))
        return rows

    def has_snapshot(self, snapshot_id: str) -> bool:
        """There is a snapshot of this id."""
        key = _id(snapshot_id)
        return key is not None and self._view.get(Table.SNAPSHOTS, key) is not None

    def snapshot_count(self, workspace_id: str) -> int:
        """How many snapshots the workspace has."""
        return sum(1 for _ in self._view.scan(Table.WORKSPACE_SNAPSHOTS, _under(workspace_id)))

    # --- boundaries

    def boundaries(self, workspace_id: str) -> list[BoundaryRow]:
        """Those that are not captured yet, in the order of their generations. Each may have megabytes."""
        return list(self._all(_boundary, Table.BOUNDARIES, _under(workspace_id)))

    def boundary(self, workspace_id: str, generation: int) -> BoundaryRow | None:
        """The boundary of one generation."""
        return self._one(_boundary, Table.BOUNDARIES, _of(workspace_id, generation))

    def generations(self, workspace_id: str) -> list[int]:
        """The generations of ``boundaries``, without reading these."""
        prefix = _under(workspace_id)
        return [
            check_number(key[len(prefix) :], _NUMBER, "generation of a boundary")
            for key in self._view.keys(Table.BOUNDARIES, prefix)
        ]

    def unsealed_workspaces(self) -> list[str]:
        """The ids of the workspaces that have boundaries, in order."""
        found: list[str] = []
        start = b""
        while (key := next(self._view.keys(Table.BOUNDARIES, start=start), None)) is not None:
            workspace, end, _ = key.partition(b"\0")
            try:
                found.append(workspace.decode())
            except UnicodeDecodeError:
                end = b""
            if not end:
                raise Corrupt(f"the index has a boundary under a key that is not valid: {key!r}")
            start = workspace + b"\1"
        return found

    # --- threads

    def thread(self, thread_id: str) -> ThreadRow:
        """NotFound when there is none."""
        row = self._one(_thread, Table.THREADS, _id(thread_id))
        if row is None:
            raise NotFound(f"there is no thread {thread_id}")
        return row

    def threads(self) -> list[ThreadRow]:
        """All, by id, descending."""
        return [_decode(_thread, value, Table.THREADS, key) for key, value in self._view.scan_back(Table.THREADS)]

    def has_thread(self, thread_id: str) -> bool:
        """There is a thread of this id."""
        key = _id(thread_id)
        return key is not None and self._view.get(Table.THREADS, key) is not None

    def fork_links(self, thread_id: str) -> list[ForkLinkRow]:
        """The forks of a thread, in order of their ids."""
        return list(self._all(_fork_link, Table.FORKS, _under(thread_id)))

    # --- memories

    def memory(self, thread_id: str, memory_id: str) -> MemoryRow | None:
        """That of this id, if the thread has it."""
        key = _id(memory_id)
        return self._one(_memory, Table.MEMORIES, None if key is None else _under(thread_id) + key)

    def memories(self, thread_id: str, *, after: str = "") -> Iterator[MemoryRow]:
        """All of a thread in order of their ids, those greater than ``after`` where that is given."""
        prefix = _under(thread_id)
        start = prefix + after.encode(errors="replace") + b"\0" if after else b""
        for key, value in self._view.scan(Table.MEMORIES, prefix, start=start):
            yield _decode(_memory, value, Table.MEMORIES, key)

    # --- policies

    def policy(self, agent: str = "") -> PolicyRow | None:
        """What an agent, or without one the runtime, says of checkpoints; None: nothing."""
        return self._one(_policy, Table.POLICIES, _policy_key(agent))

    # --- entries

    def entry(self, thread_id: str, entry_id: str) -> EntryRow:
        """NotFound when the thread has none of this id."""
        row = self._find_entry(thread_id, entry_id)
        if row is None:
            raise NotFound(f"there is no entry {entry_id} in thread {thread_id}")
        return row

    def has_entry(self, thread_id: str, entry_id: str) -> bool:
        """The thread has an entry of this id."""
        return self._find_entry(thread_id, entry_id) is not None

    def entries(self, thread_id: str, *, after: int = -1) -> Iterator[EntryRow]:
        """All of the thread in order of writing, those with a number greater than ``after``."""
        prefix = _under(thread_id)
        for key, value in self._view.scan(Table.ENTRIES, prefix, start=_of(thread_id, after + 1)):
            yield _decode(_entry, value, Table.ENTRIES, key)

    def entries_back(self, thread_id: str, *, before: int = 0) -> Iterator[EntryRow]:
        """All of the thread, the last one first; with ``before`` those with a lesser number."""
        limit = _of(thread_id, before) if before else b""
        for key, value in self._view.scan_back(Table.ENTRIES, _under(thread_id), before=limit):
            yield _decode(_entry, value, Table.ENTRIES, key)

    def numbered_entry(self, thread_id: str, sequence: int) -> EntryRow:
        """The entry of a number that the thread has."""
        return self._numbered(thread_id, sequence)

    def children(self, thread_id: str, parent_id: str) -> list[EntryRow]:
        """The entries that follow ``parent_id`` (empty: those at the root), in order of writing."""
        if parent_id and _id(parent_id) is None:
            return []
        prefix = _under(thread_id) + parent_id.encode() + b"\0"
        return [
            self._numbered(thread_id, check_number(key[len(prefix) :], _NUMBER, "number of an entry"))
            for key, _ in self._view.scan(Table.ENTRY_CHILDREN, prefix)
        ]

    def branch(self, thread_id: str, leaf_id: str) -> list[EntryRow]:
        """From the root to ``leaf_id``; nothing for an empty one. NotFound when an entry is not there."""
        rows = list(self.ancestry(thread_id, leaf_id))
        rows.reverse()
        return rows

    def ancestry(self, thread_id: str, leaf_id: str) -> Iterator[EntryRow]:
        """``branch`` from its end: each entry is read when its turn comes."""
        next_id, before = leaf_id, 0
        while next_id:
            row = self.entry(thread_id, next_id)
            if before and row.sequence >= before:
                raise Corrupt(f"entry {row.id} of thread {thread_id} comes after one that follows it")
            yield row
            next_id, before = row.parent_id, row.sequence

    def _find_entry(self, thread_id: str, entry_id: str) -> EntryRow | None:
        key = _id(entry_id)
        value = None if key is None else self._view.get(Table.ENTRY_SEQUENCES, _under(thread_id) + key)
        if value is None:
            return None
        return self._numbered(thread_id, check_number(value, _NUMBER, "number of an entry"))

    def _numbered(self, thread_id: str, sequence: int) -> EntryRow:
        row = self._one(_entry, Table.ENTRIES, _of(thread_id, sequence))
        if row is None:
            raise Corrupt(f"the index has no entry number {sequence} of thread {thread_id}")
        return row

    # --- runs

    def run(self, run_id: str) -> RunRow:
        """NotFound when there is none, or none any more."""
        row = self._one(_run, Table.RUNS, _id(run_id))
        if row is None:
            raise NotFound(f"there is no run {run_id}")
        return row

    def has_run(self, run_id: str) -> bool:
        """There is a run of this id."""
        return self._one(_run, Table.RUNS, _id(run_id)) is not None

    def runs(self) -> list[RunRow]:
        """All, in order of their ids."""
        return list(self._all(_run, Table.RUNS))

    def tool_call(self, run_id: str, tool_call_id: str) -> ToolCallRow | None:
        """One that has not ended."""
        key = _id(tool_call_id)
        return None if key is None else self._one(_tool_call, Table.TOOL_CALLS, _under(run_id) + key)

    def tool_calls(self, run_id: str = "") -> list[ToolCallRow]:
        """Those that have not ended: of a run, or all."""
        return list(self._all(_tool_call, Table.TOOL_CALLS, _under(run_id) if run_id else b""))

    def command(self, command_id: str) -> CommandRow:
        """NotFound when there is none, or nothing of it runs any more."""
        row = self._one(_command, Table.COMMANDS, _id(command_id))
        if row is None:
            raise NotFound(f"there is no command {command_id}")
        return row

    def commands(self) -> list[CommandRow]:
        """All, in order of their ids."""
        return list(self._all(_command, Table.COMMANDS))

    # --- what is recorded of a workspace

    def journal(self, workspace_id: str) -> JournalRow | None:
        """The restore that has begun in the workspace."""
        return self._one(_journal, Table.JOURNALS, _id(workspace_id))

    def journals(self) -> list[JournalRow]:
        """All restores that have begun."""
        return list(self._all(_journal, Table.JOURNALS))

    def record_state(self, workspace_id: str) -> RecordState | None:
        """What the directory rows of the workspace are of."""
        return self._one(_record_state, Table.RECORD_STATES, _id(workspace_id))

    def directory(self, workspace_id: str, inode: int) -> DirectoryRow | None:
        """The recorded state of one directory."""
        return self._one(_directory, Table.DIRECTORIES, _of(workspace_id, inode))

    def link(self, workspace_id: str, inode: int) -> LinkRow | None:
        """Of a file with several names: its link group, and the inodes of the directories that hold its names."""
        return self._one(_link, Table.LINKS, _of(workspace_id, inode))

    def links(self, workspace_id: str) -> Iterator[tuple[int, LinkRow]]:
        """All of a workspace, each with the inode that it is of."""
        prefix = _under(workspace_id)
        for key, value in self._view.scan(Table.LINKS, prefix):
            inode = check_number(key[len(prefix) :], _NUMBER, "inode of a file with several names")
            yield inode, _decode(_link, value, Table.LINKS, key)


class Writer(Reader):
    """The rows in the one transaction that writes; it reads what it wrote. A bad id is a ValueError."""

    def __init__(self, change: Change, noted: Callable[[object], None] | None = None) -> None:
        """``noted`` is told of each row before it is put."""
        super().__init__(change)
        self._change = change
        self._noted = noted
        #: A snapshot or a workspace was deleted.
        self.deleted = False

    def _put(self, table: Table, key: bytes, row: object) -> None:
        if self._noted is not None:
            self._noted(row)
        self._change.put(table, key, _encoder.encode(row))

    def _delete_under(self, table: Table, prefix: bytes) -> None:
        for key in self._change.keys(table, prefix):
            self._change.delete(table, key)

    # --- workspaces and snapshots

    def put_workspace(self, row: WorkspaceRow) -> None:
        """Makes or replaces it."""
        self._put(Table.WORKSPACES, _new_id(row.id), row)

    def delete_workspace(self, workspace_id: str) -> None:
        """Removes it with its snapshots, their boundaries, its journal and all that is recorded of it; threads stay."""
        prefix = _under(workspace_id)
        self.deleted = True
        for key, _ in self._change.scan(Table.WORKSPACE_SNAPSHOTS, prefix):
            self._change.delete(Table.SNAPSHOTS, key[len(prefix) :])
            self._change.delete(Table.WORKSPACE_SNAPSHOTS, key)
        self._delete_under(Table.DIRECTORIES, prefix)
        self._delete_under(Table.LINKS, prefix)
        self._delete_under(Table.BOUNDARIES, prefix)
        for table in (Table.JOURNALS, Table.RECORD_STATES, Table.WORKSPACES):
            self._change.delete(table, prefix[:-1])

    def put_snapshot(self, row: SnapshotRow) -> None:
        """Makes or replaces it."""
        key = _new_id(row.id)
        _new_id(row.workspace_id)
        self._put(Table.SNAPSHOTS, key, row)
        self._change.put(Table.WORKSPACE_SNAPSHOTS, _under(row.workspace_id) + key, b"")

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Removes it. NotFound when there is none."""
        row = self.snapshot(snapshot_id)
        self.deleted = True
        key = _new_id(snapshot_id)
        self._change.delete(Table.SNAPSHOTS, key)
        self._change.delete(Table.WORKSPACE_SNAPSHOTS, _under(row.workspace_id) + key)

    def put_boundary(self, row: BoundaryRow) -> None:
        """Makes or replaces that of the row's generation."""
        _new_id(row.workspace_id)
        _new_id(row.snapshot_id)
        self._put(Table.BOUNDARIES, _of(row.workspace_id, row.generation), row)

    def delete_boundary(self, workspace_id: str, generation: int) -> None:
        """Removes it if it is there."""
        self._change.delete(Table.BOUNDARIES, _of(workspace_id, generation))

    # --- policies

    def put_policy(self, row: PolicyRow, agent: str = "") -> None:
        """Makes or replaces that of an agent, or without one that of the runtime."""
        if agent:
            _new_id(agent)
        self._put(Table.POLICIES, _policy_key(agent) or _RUNTIME, row)

    def delete_policy(self, agent: str = "") -> None:
        """Removes it if there is one."""
        key = _policy_key(agent)
        if key is not None:
            self._change.delete(Table.POLICIES, key)

    # --- threads and entries

    def put_thread(self, row: ThreadRow) -> None:
        """Makes or replaces it."""
        self._put(Table.THREADS, _new_id(row.id), row)

    def put_entry(self, row: EntryRow) -> None:
        """Adds it. Exists when the thread has one of this id; ValueError when its sequence is taken."""
        thread, key = _new_id(row.thread_id) + b"\0", _new_id(row.id)
        parent = _new_id(row.parent_id) if row.parent_id else b""
        number = row.sequence.to_bytes(_NUMBER)
        if self._change.get(Table.ENTRY_SEQUENCES, thread + key) is not None:
            raise Exists(f"thread {row.thread_id} has an entry {row.id} already")
        if self._change.get(Table.ENTRIES, thread + number) is not None:
            raise ValueError(f"thread {row.thread_id} has an entry number {row.sequence} already")
        self._put(Table.ENTRIES, thread + number, row)
        self._change.put(Table.ENTRY_SEQUENCES, thread + key, number)
        self._change.put(Table.ENTRY_CHILDREN, thread + parent + b"\0" + number, b"")

    # --- runs

    def put_run(self, row: RunRow) -> None:
        """Makes or replaces it."""
        self._put(Table.RUNS, _new_id(row.id), row)

    def delete_run(self, run_id: str) -> None:
        """Removes it, if it is there, with its tool calls."""
        self._change.delete(Table.RUNS, _new_id(run_id))
        self._delete_under(Table.TOOL_CALLS, _under(run_id))

    def put_tool_call(self, row: ToolCallRow) -> None:
        """Makes or replaces it."""
        self._put(Table.TOOL_CALLS, _new_id(row.run_id) + b"\0" + _new_id(row.id), row)

    def delete_tool_call(self, run_id: str, tool_call_id: str) -> None:
        """Removes it if it is there."""
        self._change.delete(Table.TOOL_CALLS, _new_id(run_id) + b"\0" + _new_id(tool_call_id))

    def put_command(self, row: CommandRow) -> None:
        """Makes or replaces it."""
        self._put(Table.COMMANDS, _new_id(row.id), row)

    def delete_command(self, command_id: str) -> None:
        """Removes it if it is there."""
        self._change.delete(Table.COMMANDS, _new_id(command_id))

    # --- threads that end, forks and memories

    def delete_thread(self, thread_id: str) -> None:
        """Removes it with its entries, its memories and its link in the thread that it was forked from. NotFound."""
        row = self.thread(thread_id)
        prefix = _under(thread_id)
        for table in (Table.ENTRIES, Table.ENTRY_SEQUENCES, Table.ENTRY_CHILDREN, Table.MEMORIES, Table.FORKS):
            self._delete_under(table, prefix)
        if row.forked_from is not None:
            self._change.delete(Table.FORKS, _under(row.forked_from.thread_id) + prefix[:-1])
        self._change.delete(Table.THREADS, prefix[:-1])

    def put_fork_link(self, source_id: str, row: ForkLinkRow) -> None:
        """Makes or replaces, in the thread ``source_id``, the link to a fork of it."""
        _new_id(source_id)
        self._put(Table.FORKS, _under(source_id) + _new_id(row.thread_id), row)

    def put_memory(self, row: MemoryRow) -> None:
        """Makes or replaces it."""
        _new_id(row.thread_id)
        self._put(Table.MEMORIES, _under(row.thread_id) + _new_id(row.id), row)

    # --- what is recorded of a workspace

    def put_journal(self, row: JournalRow) -> None:
        """Makes or replaces the journal of the row's workspace."""
        self._put(Table.JOURNALS, _new_id(row.workspace_id), row)

    def delete_journal(self, workspace_id: str) -> None:
        """Removes it if there is one."""
        self._change.delete(Table.JOURNALS, _new_id(workspace_id))

    def put_record_state(self, workspace_id: str, row: RecordState) -> None:
        """Makes or replaces it."""
        self._put(Table.RECORD_STATES, _new_id(workspace_id), row)

    def put_directory(self, workspace_id: str, inode: int, row: DirectoryRow) -> None:
        """Makes or replaces it."""
        _new_id(workspace_id)
        self._put(Table.DIRECTORIES, _of(workspace_id, inode), row)

    def delete_directory(self, workspace_id: str, inode: int) -> None:
        """Removes it if it is there."""
        self._change.delete(Table.DIRECTORIES, _of(workspace_id, inode))

    def put_link(self, workspace_id: str, inode: int, group: int, directories: tuple[int, ...]) -> None:
        """Makes or replaces it."""
        _new_id(workspace_id)
        self._put(Table.LINKS, _of(workspace_id, inode), (group, directories))

    def delete_link(self, workspace_id: str, inode: int) -> None:
        """Removes it if it is there."""
        self._change.delete(Table.LINKS, _of(workspace_id, inode))
