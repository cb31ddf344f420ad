"""The messages between the control process and a mount worker, and their framing.

The worker listens on a Unix socket, one per workspace; the control process connects, sends ``Hello`` and gets
``Welcome`` with a descriptor of the backing root (SCM_RIGHTS). After that each ``Request`` gets one ``Reply`` with the
same number; several may be under way. The worker sends ``Wanted`` and ``Broken`` by itself. A frame is a big-endian
u32 length and that many bytes of msgpack.

**Boundaries.** A generation that is ``Committed`` as a boundary belongs to a snapshot whose files are still to be read.
Until it is ``Sealed``, the worker lets nothing of it be changed before it has written down what it was in the undo log
(``undolog``). For content of a regular file that is too much for the log, or not in memory, it asks the control
process, which captures the file and answers with ``Preserve``. What is not of the boundary (it was not in what the
generation handed over, unless that was ``unlisted``) is not preserved.

When a connection ends, the worker lets parked calls go on, keeps a guard, keeps its boundaries, and treats what was
handed over and neither committed nor taken back as a boundary: the next control process says by ``Reconcile`` what it
was. A second connection takes the place of the first.

Both sides import this module and nothing else of each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

from cogfs.fsd.undolog import Was

#: Raised by one whenever a message changes; a control process adopts only workers of its own version.
PROTOCOL_VERSION = 4

#: No frame is larger. One freeze of a million dirty nodes fits.
MAX_FRAME = 1 << 30

_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages; encoded as an array that begins with the class's name."""


class Hello(Message, frozen=True):
    """First message of a control process."""

    version: int
    control_pid: int


class Welcome(Message, frozen=True):
    """Answer to ``Hello``; carries a descriptor of the backing root."""

    version: int
    workspace_id: str
    worker_pid: int
    root: bytes
    mountpoint: bytes
    #: ``st_dev`` of the mount.
    device: int
    #: Nanoseconds since the epoch.
    started_ns: int
    #: Restore that guards the mount, or empty.
    guard: str
    #: Why nothing may be changed, or empty.
    read_only: str
    #: Generations that are boundaries or may be (they were handed over, and the connection ended before the worker was
    #: told), the oldest first.
    boundaries: list[int]
    #: Why the undo log could not be written, after which nothing was preserved any more; empty: it could.
    broken: str


class DirtyDirectory(Message, frozen=True):
    """A directory whose entries changed since the last committed generation."""

    inode: int
    #: Of the directory that holds it; its own for the root.
    parent: int
    #: Relative to the root, ``b""`` for the root.
    path: bytes
    #: Names that were made, removed or replaced; None when any may have been.
    names: list[bytes] | None
    #: The directory is new itself, and has no other entries than those of ``names``.
    made: bool
    #: Its own mode, owner or extended attributes changed.
    attributes: bool
    #: It came from a place that is not watched: anything below it may have changed unseen.
    subtree: bool


class DirtyFile(Message, frozen=True):
    """A file or link whose content or attributes changed since the last committed generation."""

    inode: int
    #: Every path by which the worker knows it, relative to the root; empty when it has no name any more.
    paths: list[bytes]
    #: Inodes of the directories that hold these.
    parents: list[int]
    #: Content as well as attributes.
    content: bool


class OpenHandle(Message, frozen=True):
    """One open file or directory description."""

    inode: int
    #: A path by which the worker knows it, relative to the root; the last one when ``deleted``.
    path: bytes
    #: As the kernel gave it at open: a thread id, 0 when it is outside the daemon's pid namespace.
    pid: int
    command: str
    writable: bool
    #: Nanoseconds since the epoch.
    since_ns: int
    deleted: bool
    directory: bool


class Freeze(Message, frozen=True):
    """Park mutating calls, opens for writing among them, and hand over what is dirty. Answer: ``Frozen``.

    No call is under way while the worker carries this out, so there is nothing to wait for. The calls stay parked until
    ``Resume``, ``Guard`` or the end of the connection. ``unlisted``: should it become a boundary, everything is of it,
    as what changed is not known; so it is too when the worker does not know all that changed (see ``Frozen``).
    """

    unlisted: bool = False


class Changes(msgspec.Struct, array_like=True, frozen=True):
    """What changed since the generation before."""

    directories: list[DirtyDirectory]
    files: list[DirtyFile]


class Frozen(Message, frozen=True):
    generation: int
    #: False until a generation was committed since the worker started: what changed before is not known.
    complete: bool
    #: Of the files' clock: what changed later has a ctime that is not earlier.
    frozen_ns: int
    #: ``Changes`` as msgpack: kept as they are with a snapshot, and only looked into when that is captured.
    packed: msgspec.Raw

    @property
    def changes(self) -> Changes:
        """What changed."""
        return changes_decoder.decode(self.packed)

    @property
    def directories(self) -> list[DirtyDirectory]:
        """Of ``changes``."""
        return self.changes.directories

    @property
    def files(self) -> list[DirtyFile]:
        """Of ``changes``."""
        return self.changes.files


class Committed(Message, frozen=True):
    """What generation ``generation`` handed over is durable. Answer: ``Done``.

    With ``boundary`` it is protected until it is ``Sealed``, and may only be the one handed over last; else it and all
    before are forgotten. ``unlisted``: as with ``Freeze``, when that was found out later. Of files of more than
    ``limit`` bytes the content does not matter; -1: of any it does.
    """

    generation: int
    boundary: bool = False
    unlisted: bool = False
    limit: int = -1


class Sealed(Message, frozen=True):
    """Boundary ``generation``, and all before, need no protection any more. Answer: ``Done``. ``given_up``: though they
    are not sealed; that is written into the undo log."""

    generation: int
    given_up: bool = False


class Resume(Message, frozen=True):
    """Let parked calls go on. What was handed over and not committed belongs to the present generation again.
    Answer: ``Done``."""


class Reconcile(Message, frozen=True):
    """Of the generations in ``Welcome.boundaries`` these are boundaries; the others were never committed, and belong to
    the present generation again. The first request after ``Welcome``. ``unlisted``: those of them of which everything
    is, see ``Freeze``, as the connection may have ended before the worker was told. Answer: ``Done``."""

    boundaries: list[int]
    unlisted: list[int] = []


class Wanted(Message, frozen=True):
    """From the worker, by itself: a call waits until the content of a regular file is captured.

    Sent again to the next control process when the connection ends. Nothing changes the file until ``Preserve``.
    """

    ticket: int
    inode: int
    #: Paths by which the worker knows it, relative to the root; empty when it has no name any more.
    paths: list[bytes]
    #: Part of the file may have been changed since the boundary, and be in the undo log.
    logged: bool


class Preserve(Message, frozen=True):
    """What the file of ``Wanted`` is, to be written down; None: it need not be. The call goes on. Answer: ``Done``.

    ``Failed`` with ESTALE when there is no such ticket (any more).
    """

    ticket: int
    was: Was | None


class Broken(Message, frozen=True):
    """From the worker, by itself: the undo log cannot be written, all boundaries are given up, and nothing is preserved
    any more until the next is committed. ``reason`` is ``Welcome.broken`` from now on."""

    reason: str


class Locate(Message, frozen=True):
    """Where inodes are now. Answer: ``Located``."""

    inodes: list[int]


class Located(Message, frozen=True):
    """A path of each, relative to the root; None when the worker knows none."""

    paths: list[bytes | None]


class ListForeign(Message, frozen=True):
    """Files of which part is in the undo log and the rest is not, and that were changed past the mount since the first
    part was written down. Answer: ``Foreign``."""


class Foreign(Message, frozen=True):
    inodes: list[int]


class ListQuiet(Message, frozen=True):
    """Files with changed content that nobody has open for writing, and that were not changed in the last
    ``quiet_seconds``: worth capturing ahead of the next boundary. Each is told once after it was closed, those closed
    first come first. Answer: ``Quiet``."""

    quiet_seconds: float
    limit: int


class Quiet(Message, frozen=True):
    #: (inode, a path of it).
    files: list[tuple[int, bytes]]


class Guard(Message, frozen=True):
    """A restore begins: foreign calls that would change ``inodes`` are answered EBUSY from now on. Answer: ``Done``.

    A call changes an inode when it writes, truncates, sets attributes of it, or makes, removes, renames or replaces an
    entry in it (a directory) or of it. Calls of threads whose id is in ``owners`` pass. Parked calls are let go and
    looked at anew. The guard stays over the end of the connection.
    """

    restore_id: str
    owners: list[int]
    inodes: list[int]
    #: Directories that must stay where they are: renaming or removing one is EBUSY, changes in it are not.
    pinned: list[int]


class Unguard(Message, frozen=True):
    """Take the guard away. Answer: ``Done``."""


class SetReadOnly(Message, frozen=True):
    """Answer EROFS to mutating calls while ``reason`` is not empty; ``owners`` of a guard pass. Answer: ``Done``."""

    reason: str


class ListHandles(Message, frozen=True):
    """Answer: ``Handles``."""


class Handles(Message, frozen=True):
    handles: list[OpenHandle]


class GetStats(Message, frozen=True):
    """Answer: ``Stats``."""


class OperationStats(Message, frozen=True):
    name: str
    count: int
    errors: int
    total_ns: int
    #: Counts by latency: bucket i holds what took less than 2**i microseconds and not less than 2**(i-1).
    buckets: list[int]


class Stats(Message, frozen=True):
    operations: list[OperationStats]
    nodes: int
    handles: int
    dirty_files: int
    dirty_directories: int
    descriptors: int


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    """The request was not carried out."""

    errno: int
    reason: str


Request = (
    Freeze
    | Committed
    | Sealed
    | Resume
    | Reconcile
    | Preserve
    | Locate
    | ListForeign
    | ListQuiet
    | Guard
    | Unguard
    | SetReadOnly
    | ListHandles
    | GetStats
)
Answer = Frozen | Done | Handles | Stats | Located | Foreign | Quiet | Failed


class RequestFrame(msgspec.Struct, array_like=True, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=1)]
    request: Request


class ReplyFrame(msgspec.Struct, array_like=True, frozen=True):
    """With number 0 the worker speaks by itself."""

    number: int
    answer: Answer | Wanted | Broken


Frame = Hello | Welcome | RequestFrame | ReplyFrame

_encoder = msgspec.msgpack.Encoder()
changes_decoder = msgspec.msgpack.Decoder(Changes)
hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder = msgspec.msgpack.Decoder(Welcome)
request_decoder = msgspec.msgpack.Decoder(RequestFrame)
reply_decoder = msgspec.msgpack.Decoder(ReplyFrame)


def pack(directories: Sequence[DirtyDirectory], files: Sequence[DirtyFile]) -> msgspec.Raw:
    """For ``Frozen.packed``."""
    return msgspec.Raw(_encoder.encode(Changes(list(directories), list(files))))


def encode(frame: Frame) -> bytes:
    """``frame`` with its length before it. ValueError when it is larger than ``MAX_FRAME``."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes is larger than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Cuts a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that ``data`` completes. ValueError when a length is larger than ``MAX_FRAME``."""
        buffer = self._buffer
        buffer += data
        bodies = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes is larger than {MAX_FRAME}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies
