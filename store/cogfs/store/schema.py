"""What the store keeps, as records. Each is msgpack, an array in the order of its fields.

Objects (content of files, chunk lists, trees) are immutable and named by hash; everything else is a row of LMDB. A
field is only ever appended, with a default, so that an older row can be read.
"""

from __future__ import annotations

import enum

import msgspec

#: 32 bytes of BLAKE3.
Hash = bytes

#: The format of everything below; a store of a newer one is refused, and one of an older one is brought to this.
FORMAT_VERSION = 3

NO_HASH = b""


class ObjectKind(enum.IntEnum):
    """What an object is; part of its hash, so that no object can be taken for one of another kind."""

    BLOB = 1
    #: The pieces of a large file, in order.
    CHUNKS = 2
    TREE = 3


class Kind(enum.IntEnum):
    """What an entry of a tree is."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    #: Present, and not recorded: left alone by a restore, with everything under it.
    OPAQUE = 4


class OpaqueReason(enum.StrEnum):
    EXCLUDED = "excluded"
    TOO_LARGE = "too-large"
    CHANGING = "changing"
    UNREADABLE = "unreadable"
    HARD_LINK = "hard-link"
    UNSUPPORTED_NAME = "unsupported-name"
    #: A fifo, a socket or a device.
    SPECIAL = "special"
    #: Another filesystem is mounted there.
    SUBMOUNT = "submount"


class TreeEntry(msgspec.Struct, array_like=True, frozen=True):
    """One name in a directory."""

    name: bytes
    kind: Kind
    #: ``st_mode & 0o7777``; 0 for SYMLINK; the type, ``st_mode & 0o170000``, for OPAQUE.
    mode: int = 0
    #: Bytes of content; 0 for anything but a FILE.
    size: int = 0
    #: FILE: a BLOB or CHUNKS object. DIRECTORY: a TREE. Else empty.
    hash: Hash = NO_HASH
    #: Target of a SYMLINK, reason of an OPAQUE; else empty.
    target: bytes = b""
    #: Extended attributes, sorted by name; empty for SYMLINK and OPAQUE.
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    #: Equal for the names of one inode, also where it is OPAQUE for being a hard link; 0 for a file with one name.
    link_group: int = 0
    #: -1 where the daemon does not run as root.
    uid: int = -1
    gid: int = -1


class Tree(msgspec.Struct, array_like=True, frozen=True):
    """One directory: its entries, in ascending order of their names as bytes."""

    entries: tuple[TreeEntry, ...]


class Chunks(msgspec.Struct, array_like=True, frozen=True):
    """One large file: its length and the BLOBs that make it up, with the length of each."""

    size: int
    pieces: tuple[tuple[Hash, int], ...]


class WorkspaceOptions(msgspec.Struct, array_like=True, frozen=True):
    exclude: tuple[str, ...] = ()
    #: -1: no limit.
    max_file_bytes: int = 10 * 1024 * 1024
    #: Retention: how many snapshots remain, and how old they may get; 0: no limit.
    retain_count: int = 0
    retain_max_age_ns: int = 0
    refuse_hard_links: bool = False


class RecoveryRow(msgspec.Struct, array_like=True, frozen=True):
    """How the last interrupted restore ended."""

    #: ``forward``, ``back`` or ``failed``.
    outcome: str
    target_snapshot_id: str
    safety_snapshot_id: str
    at_ns: int
    reason: str = ""


class UndoRow(msgspec.Struct, array_like=True, frozen=True):
    """The last restore of a workspace, so that it can be taken back."""

    #: What was restored.
    target_snapshot_id: str
    #: What the files were before; the target itself after a rewind that had nothing to change in them.
    safety_snapshot_id: str
    #: Set when it was part of a rewind: the thread, its leaf before and after, and whether the files followed before.
    thread_id: str = ""
    previous_leaf_id: str = ""
    leaf_id: str = ""
    files_followed: bool = True
    #: Path filter of the restore; empty: everything.
    paths: tuple[bytes, ...] = ()


class NewPlaceRow(msgspec.Struct, array_like=True, frozen=True):
    """A fork that is under way made the workspace for its files: it goes again unless the fork is completed."""

    #: The fork's id; there is no such thread yet.
    thread_id: str
    #: The directory did not exist before.
    directory_made: bool = False


class WorkspaceRow(msgspec.Struct, array_like=True, frozen=True):
    id: str
    root: bytes
    #: Where it is or was last mounted; empty: never.
    mountpoint: bytes
    options: WorkspaceOptions
    created_ns: int
    last_snapshot_id: str = ""
    #: Why nothing may be changed; empty: all is well.
    read_only: str = ""
    #: It should be mounted, or scanned: set by Mount, cleared by Unmount.
    mount_wanted: bool = False
    last_recovery: RecoveryRow | None = None
    undo: UndoRow | None = None
    #: The number that the next generation of changes gets; it only counts up, whichever worker gathers them.
    next_generation: int = 1
    #: Kept by scans, now or last, and not through a mount.
    scanned: bool = False
    #: Cleared in the transaction that completes the fork.
    new_place: NewPlaceRow | None = None


class Skipped(msgspec.Struct, array_like=True, frozen=True):
    path: bytes
    reason: str


class SnapshotStats(msgspec.Struct, array_like=True, frozen=True):
    files: int = 0
    bytes: int = 0
    hashed: int = 0
    reused: int = 0
    stored_bytes: int = 0
    duration_ns: int = 0
    directories: int = 0
    symlinks: int = 0


class SnapshotState(enum.IntEnum):
    #: Taken, and not yet captured: its boundary is among the rows.
    FROZEN = 1
    SEALED = 2
    #: Something of it could not be captured any more.
    FAILED = 3


class SnapshotOrigin(enum.IntEnum):
    MANUAL = 1
    MESSAGE = 2
    SAFETY = 3


class SnapshotRow(msgspec.Struct, array_like=True, frozen=True):
    id: str
    workspace_id: str
    #: The directory at the root; its name is empty. None until SEALED.
    root: TreeEntry | None
    label: str
    #: JSON text of an object.
    metadata: str
    state: SnapshotState
    reason: str
    exclude: tuple[str, ...]
    max_file_bytes: int
    skipped: tuple[Skipped, ...]
    stats: SnapshotStats
    created_ns: int
    origin: SnapshotOrigin
    parent_id: str = ""
    #: FAILED: the paths that could not be captured, and why.
    failed: tuple[Skipped, ...] = ()
    #: Retention leaves it alone.
    protected: bool = False
    #: Files with several names were left out.
    refuse_hard_links: bool = False
    #: The snapshot of another workspace that it is a copy of; empty: none.
    copied_from: str = ""


class BoundaryRow(msgspec.Struct, array_like=True, frozen=True):
    """What is still to be captured of a FROZEN snapshot.

    Written with the snapshot, removed in the transaction that seals it or makes it FAILED. The boundaries of a
    workspace are captured in the order of their generations.
    """

    snapshot_id: str
    workspace_id: str
    #: Counts up within the workspace.
    generation: int
    #: The worker that gathered the changes: its start, nanoseconds since the epoch.
    worker_started_ns: int
    #: When the files were as the snapshot shows them, nanoseconds since the epoch.
    frozen_ns: int
    #: The boot of the system in which it was taken: in another one the files may be older than the snapshot.
    boot_id: str
    #: The changes do not tell all that is to be captured: everything has to be looked at.
    unlisted: bool
    #: msgpack, up to several megabytes, whose form is not the store's: what changed since the generation before.
    changes: bytes
    #: Bytes in the packs when it was taken, so that the snapshot can say what it took.
    stored_before: int = 0


class PolicyRow(msgspec.Struct, array_like=True, frozen=True):
    """What one level (runtime, agent, thread, run) says of checkpoints. A level that says nothing has no row."""

    enabled: bool = True
    exclude: tuple[str, ...] = ()
    #: -1: no limit; None: not said here.
    max_file_bytes: int | None = None
    #: Of the runtime alone: whether a rewind that does not say takes the files back. None: not said.
    rewind_files: bool | None = None


class EntryOrigin(msgspec.Struct, array_like=True, frozen=True):
    """An entry of another thread."""

    thread_id: str
    entry_id: str


class ThreadRow(msgspec.Struct, array_like=True, frozen=True):
    id: str
    workspace_id: str
    leaf_id: str
    entry_count: int
    created_ns: int
    updated_ns: int
    #: The files are those that belong to the leaf; False after a rewind of the conversation alone.
    files_follow: bool = True
    #: The agent that it is of; empty: none.
    agent: str = ""
    checkpoints: PolicyRow | None = None
    #: The entry that it was forked at, which may be gone; None: it was not forked.
    forked_from: EntryOrigin | None = None


class EntryKind(enum.IntEnum):
    USER = 1
    ASSISTANT = 2
    TOOL = 3
    SYSTEM = 4
    NOTE = 5
    SESSION_EVENT = 6
    SUMMARY = 7


class FileCheckpointRow(msgspec.Struct, array_like=True, frozen=True):
    snapshot_id: str
    workspace_id: str
    root: bytes


class EntryRow(msgspec.Struct, array_like=True, frozen=True):
    id: str
    thread_id: str
    parent_id: str
    kind: EntryKind
    content: str
    #: JSON text of an object.
    metadata: str
    created_ns: int
    #: Counts up within the thread, in order of writing.
    sequence: int
    file_checkpoint: FileCheckpointRow | None = None
    files_follow: bool = False
    #: The run in which it was written; empty: none.
    run_id: str = ""
    #: In a fork, at the entry that it was forked at: the checkpoint of the message after it, which was not copied. The
    #: files as they were right after the entry.
    file_checkpoint_at: FileCheckpointRow | None = None
    #: The entry of the thread that was forked.
    copied_from: EntryOrigin | None = None


class RunKind(enum.IntEnum):
    #: Ends with its holder's connection.
    PLAIN = 1
    #: Held by a lease.
    DURABLE = 2


class RunStrategy(enum.IntEnum):
    """What a run does that is asked for while a rewind holds its thread."""

    WAIT = 1
    REJECT = 2


class RunState(enum.IntEnum):
    GOING = 1
    #: It waits for somebody, and needs no holder.
    PAUSED = 2
    #: DURABLE: its lease ran out, and it can be taken up again.
    LAPSED = 3
    #: By its holder's word.
    ENDED = 4
    #: It was stopped, dropped by a rewind, or its holder went.
    INTERRUPTED = 5


class RunRow(msgspec.Struct, array_like=True, frozen=True):
    """A piece of agent work in a thread. The last of those that are over are kept, so that their holders are told."""

    id: str
    thread_id: str
    #: Empty: without files.
    workspace_id: str
    agent: str
    kind: RunKind
    holder: str
    strategy: RunStrategy
    state: RunState
    started_ns: int
    #: Length of the lease; 0 for PLAIN.
    lease_ns: int = 0
    #: Tool calls that were begun.
    tool_calls: int = 0
    #: The tool call of another run that started it; empty: none.
    parent_run_id: str = ""
    parent_tool_call_id: str = ""
    checkpoints: PolicyRow | None = None
    #: It was told to stop: no lease is renewed and no tool call begins any more.
    stopping: bool = False
    #: Why it is INTERRUPTED, or was told to stop.
    why: str = ""
    #: 0 until it is over.
    ended_ns: int = 0


class ToolCallRow(msgspec.Struct, array_like=True, frozen=True):
    """A tool call that has not ended. It may outlive its run."""

    id: str
    run_id: str
    name: str
    begun_ns: int


class ProcessRow(msgspec.Struct, array_like=True, frozen=True):
    """A process, so that no other is taken for it: its number, and the clock ticks from the boot to its start."""

    pid: int
    started_ticks: int


class CommandRow(msgspec.Struct, array_like=True, frozen=True):
    """A command in a workspace, until all that it left has ended."""

    id: str
    workspace_id: str
    #: Where they were given.
    thread_id: str
    run_id: str
    #: Those that were registered, and those that were found below them; the first is the one it was registered by.
    processes: tuple[ProcessRow, ...]
    command: str
    since_ns: int
    #: In another boot nothing of it runs.
    boot_id: str
    #: Its control group, a directory; empty: it has none.
    cgroup: str = ""


class MemoryKind(enum.IntEnum):
    #: Something that is known, by what some entries say.
    ITEM = 1
    #: What the conversation came to, up to an entry.
    SUMMARY = 2
    #: A file of notes, as it was from an entry on; each version is a row.
    FILE = 3


class StaleRow(msgspec.Struct, array_like=True, frozen=True):
    """Why a memory does not count."""

    #: ``rewound`` for an ITEM; ``branch`` or ``replaced`` for the others.
    reason: str
    #: The active leaf by which it does not.
    leaf_id: str
    at_ns: int


class MemoryRow(msgspec.Struct, array_like=True, frozen=True):
    """Something that a thread remembers."""

    id: str
    thread_id: str
    kind: MemoryKind
    #: Of a FILE; else empty.
    name: str
    content: str
    #: JSON text of an object.
    metadata: str
    #: The entries that it stands on. Of a SUMMARY and a FILE exactly one, which says to which branch it belongs.
    entry_ids: tuple[str, ...]
    created_ns: int
    updated_ns: int
    #: None: it counts. Always what the active branch and the other rows make of it.
    stale: StaleRow | None = None


class ForkLinkRow(msgspec.Struct, array_like=True, frozen=True):
    """A thread was forked from another one: kept under the other one."""

    thread_id: str
    entry_id: str
    created_ns: int


class ForkRow(msgspec.Struct, array_like=True, frozen=True):
    """The fork that a restore is part of, and what was made for it: taken back unless it is completed."""

    thread_id: str
    #: The copies of snapshots in the workspace.
    snapshot_ids: tuple[str, ...] = ()


class JournalRow(msgspec.Struct, array_like=True, frozen=True):
    """A restore that has begun. The plan is a function of the two snapshots, so it is not kept here.

    Written durably before the first change; removed in the transaction that makes the restore's outcome visible.
    """

    restore_id: str
    workspace_id: str
    target_snapshot_id: str
    safety_snapshot_id: str
    paths: tuple[bytes, ...]
    started_ns: int
    #: Rows to write when it ends forward (thread, undo), so that conversation and files commit together.
    thread: ThreadRow | None = None
    undo: UndoRow | None = None
    #: Runs that it drops when it ends forward.
    runs: tuple[str, ...] = ()
    #: Set: it is part of a fork, and is taken back when it is interrupted.
    fork: ForkRow | None = None


class Sums(msgspec.Struct, array_like=True, frozen=True):
    """What is below a directory."""

    files: int = 0
    bytes: int = 0
    directories: int = 0
    symlinks: int = 0
    #: OPAQUE entries that a snapshot reports as skipped.
    skipped: int = 0


class StatRow(msgspec.Struct, array_like=True, frozen=True):
    """What was recorded for one name of a directory, with the stat by which a change is noticed.

    ``entry`` of a DIRECTORY has the hash of its tree as last recorded, and ``sums`` what is below it.
    """

    entry: TreeEntry
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    sums: Sums | None = None


class DirectoryRow(msgspec.Struct, array_like=True, frozen=True):
    """The recorded state of one directory of a workspace, found by the directory's inode number.

    Only a cache of the past: everything in it is checked by stat before it is believed, except what a worker has
    watched since.
    """

    tree_hash: Hash
    rows: tuple[StatRow, ...]
    #: When its files were read, nanoseconds since the epoch: what changed less than two seconds before is read again by
    #: a scan.
    recorded_ns: int
    #: The inode of the directory that holds it, and its name there; the root has itself and an empty name.
    parent: int
    name: bytes
    sums: Sums


class RecordState(msgspec.Struct, array_like=True, frozen=True):
    """What the directory rows of a workspace are of."""

    #: The directory at the root, or None when nothing is recorded.
    root: TreeEntry | None
    root_inode: int
    #: The rules that they were recorded by; with others everything is looked at anew.
    exclude: tuple[str, ...]
    max_file_bytes: int
    #: Worker whose generations they follow (its start, nanoseconds); 0: none, a scan is needed.
    worker_started_ns: int = 0
    #: The boot in which they were recorded; empty: not known.
    boot_id: str = ""
    #: When the files were last synced, nanoseconds since the epoch. What was recorded later is not believed after
    #: another boot: the stat may have come through a loss of power, and the content not.
    synced_ns: int = 0
    #: Also one of the rules.
    refuse_hard_links: bool = False
