"""What unsealed boundaries were, written to the undo log before it is changed.

A boundary is a generation whose snapshot is not sealed: its files are still to be read. Before a call changes an entry
or an inode for the first time since the latest boundary, what it was is written down, if some boundary may still need
it. The worker reads entries, directories and links itself. The content of a regular file is captured by the control
process, which is asked by a ticket; calls that are about to change the file wait for it.

Invariant: a key (an entry or an inode) that the dirty table has noted in the present generation was preserved before,
or no boundary needs it. So what is noted, or was made since the latest boundary, is passed by with a look at the node;
``_done`` holds the keys that were preserved and perhaps not changed after all.

A reader of a boundary finds the entries of a directory by the directory's inode number, in what is there now and in the
log. So when a directory is removed and its number given to a new one, the entries of the new one are written down as
absent, though it is of no boundary: they would be taken for entries of the old one.

When the log cannot be written, the boundaries are given up and ``broken`` says why: programs in the mount must not fail
because of snapshots.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Sequence
from stat import S_ISREG

import trio
from msgspec import structs

from cogfs.fsd.channel import Wanted
from cogfs.fsd.mount import syscalls
from cogfs.fsd.mount.dirty import Change, DirtyTable, Retained, file_paths
from cogfs.fsd.mount.gate import Gate
from cogfs.fsd.mount.nodes import Node
from cogfs.fsd.mount.tree import Tree
from cogfs.fsd.spans import Spans
from cogfs.fsd.undolog import (
    LOST,
    TOO_LARGE,
    ContentWas,
    DirectoryMade,
    EntryWas,
    GivenUp,
    InodeWas,
    Record,
    Status,
    UndoLogWriter,
    Was,
)

log = logging.getLogger(__name__)

#: Bytes of content that one call writes to the log: a fraction of a millisecond.
AT_ONCE = 1 << 20
#: Bytes of the log after which it takes no content any more.
LOG_LIMIT = 512 << 20
#: What is overwritten is written down in whole blocks.
_BLOCK = 4096
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: After the end of every file.
_END = 1 << 62

_NOTHING: dict[Node, Change] = {}


class Boundary:
    """A generation that is protected."""

    __slots__ = ("changes", "limit", "number", "retained", "unknown", "unlisted")

    def __init__(self, number: int, retained: Retained | None, unknown: bool, limit: int = -1) -> None:
        self.number = number
        #: Bytes of the largest file whose content matters; -1: there may be none that is too large.
        self.limit = limit
        #: None for one of an earlier worker.
        self.retained = retained
        self.changes = _NOTHING if retained is None else retained.changes
        #: Everything may be of it, as against what it lists.
        self.unlisted = retained is None or retained.unlisted
        #: The connection ended before it was committed or taken back: whether it is a boundary at all.
        self.unknown = unknown


class _Kept:
    """A regular file of which only part is in the log."""

    __slots__ = ("boundary", "foreign", "seen", "spans", "was")

    def __init__(self, boundary: int, was: Was) -> None:
        self.boundary = boundary
        self.was = was
        #: Its size and times after the last write through the mount.
        self.seen = _stamp(was.status)
        #: They were others before the next one.
        self.foreign = False
        #: Offsets in the log; whatever is not in it must not be changed.
        self.spans = Spans()


def _stamp(status: Status) -> tuple[int, int, int]:
    return status.size, status.mtime_ns, status.ctime_ns


class _Ticket:
    """A regular file whose content the control process is asked for."""

    __slots__ = ("answered", "node", "number")

    def __init__(self, number: int, node: Node) -> None:
        self.number = number
        self.node = node
        #: Set when there is reason to look again, with another event in its place.
        self.answered = trio.Event()

    def wanted(self, logged: bool) -> Wanted:
        return Wanted(self.number, self.node.ino, file_paths(self.node, {}), logged)


class Preserver:
    """The boundaries, and what has to be written down for them."""

    def __init__(
        self,
        tree: Tree,
        gate: Gate,
        path: str | None,
        boundaries: Collection[int],
        at_once: int = AT_ONCE,
        log_limit: int = LOG_LIMIT,
    ) -> None:
        """``path`` is the undo log's; None: there can be no boundaries. ``boundaries`` are those that earlier workers
        have left unsealed. ``at_once``: bytes of a file's content that are written to the log for one call, and
        ``log_limit`` those after which the log takes none any more."""
        self._tree = tree
        self._dirty: DirtyTable = tree.dirty
        self._device = tree.nodes.root.dev
        self._gate = gate
        self._path = path
        self._log: UndoLogWriter | None = None
        #: The latest boundary that the log does not tell of.
        self._given_up = 0
        #: Why the log could not be written, or empty.
        self.broken = ""
        #: Says to the control process, when there is one that listens, that a call waits.
        self.ask: Callable[[Wanted], None] = _nobody
        #: Called when ``broken`` has come to be.
        self.on_broken: Callable[[], None] = _nobody
        self._boundaries: list[Boundary] = []
        self._latest = 0
        self._all = False
        self._oldest = 0
        self._limit = -1
        #: Some boundary is of an earlier worker, which knew what it had removed.
        self._inherited = False
        self._done: set[Node | tuple[Node, bytes]] = set()
        #: Files that were preserved in part. It outlasts the boundary for which that was done: what is in the log for
        #: a boundary that turns out to be none is in it for the one before.
        self._kept: dict[Node, _Kept] = {}
        self._at_once = at_once
        self._log_limit = log_limit
        #: Numbers of the directories that were removed or moved while there were boundaries.
        self._gone: set[int] = set()
        self._tickets: dict[Node, _Ticket] = {}
        self._numbers: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._changed = trio.Event()
        if path is not None:
            self._open(boundaries)

    def _open(self, boundaries: Collection[int]) -> None:
        assert self._path is not None
        self._boundaries = [Boundary(number, None, False) for number in sorted(set(boundaries))]
        try:
            if boundaries and not os.path.lexists(self._path):
                raise FileNotFoundError(errno.ENOENT, "it is not there any more")
            self._writable()
        except OSError as error:
            # A mount without protection is better than none.
            self._give_up(error)
            return
        self._update()

    def _writable(self) -> UndoLogWriter:
        """The log. OSError when there is none, and none can be made that says what it does not tell of."""
        if self._log is None:
            if self._path is None:
                raise OSError(errno.EINVAL, "the worker has no undo log")
            made = UndoLogWriter(self._path)
            try:
                if self._given_up:
                    made.clear()
                    made.append(GivenUp(self._given_up))
            except BaseException:
                made.close()
                raise
            self._log = made
        return self._log

    def _forsake(self, number: int) -> None:
        """What the log says of boundary ``number`` and those before is of no use any more, and may be what fills the
        disk."""
        self._given_up = max(self._given_up, number)
        if self._log is not None and not self._log.give_up(self._given_up):
            self._log.close()
            self._log = None

    # Boundaries

    @property
    def numbers(self) -> list[int]:
        """Of the boundaries, the oldest first."""
        return [boundary.number for boundary in self._boundaries]

    @property
    def undecided(self) -> bool:
        """Whether it is not known of a boundary whether it is one."""
        return any(boundary.unknown for boundary in self._boundaries)

    def commit(self, number: int, *, unlisted: bool = False, limit: int = -1) -> None:
        """Generation ``number`` becomes a boundary, while nothing changes; see ``Boundary`` for ``limit``. OSError,
        ValueError."""
        if number in self.numbers:
            return
        retained = self._dirty.retained
        if retained is None or retained.number != number:
            raise ValueError(f"generation {number} is not the one handed over last, or was taken back")
        if not self._gate.frozen:
            raise ValueError(f"what generation {number} was may have been changed since it was handed over")
        try:
            self._writable()
        except OSError as error:
            raise OSError(error.errno, f"the undo log cannot be written: {error.strerror}") from error
        self.broken = ""
        self._dirty.commit(number)
        boundary = Boundary(number, retained, False, limit)
        boundary.unlisted = boundary.unlisted or unlisted
        self._boundaries.append(boundary)
        self._done = set()
        self._update()

    def leave(self) -> None:
        """The control process has gone. What was handed over, and is as it was then, may be a boundary."""
        self.ask = _nobody
        retained = self._dirty.retained
        if retained is None or not self._gate.frozen or self._log is None or self.broken:
            self._dirty.take_back()
            return
        self._dirty.retained = None
        self._boundaries.append(Boundary(retained.number, retained, True))
        self._done = set()
        self._update()

    def reconcile(self, numbers: Collection[int], unlisted: Collection[int] = ()) -> None:
        """Of the boundaries these are some, and of ``unlisted`` everything is. Others were never committed, or are
        sealed, or have failed: what is of one of these belongs to the next one, and is protected as long as that."""
        kept = []
        latest = max((number for number in self.numbers if number in numbers), default=0)
        for boundary in self._boundaries:
            if boundary.number in numbers:
                if boundary.unknown:
                    boundary.unknown = False
                    self._dirty.acknowledge(boundary.number)
                boundary.unlisted = boundary.unlisted or boundary.number in unlisted
                kept.append(boundary)
            elif boundary.unknown:
                assert boundary.retained is not None
                self._dirty.merge(boundary.retained)
            elif boundary.number < latest:
                kept.append(boundary)
            else:
                self._dirty.release(boundary.changes)
        self._boundaries = kept
        self._update()

    def sealed(self, number: int, *, given_up: bool = False) -> None:
        """Boundary ``number``, and all before it, need no protection any more; ``given_up``: though they are needed."""
        kept = []
        for boundary in self._boundaries:
            if boundary.number > number:
                kept.append(boundary)
            else:
                self._dirty.release(boundary.changes)
        if len(kept) < len(self._boundaries):
            self._boundaries = kept
            self._update()
        if given_up and not kept:
            self._forsake(number)

    def _update(self) -> None:
        """After a change of the boundaries."""
        boundaries = self._boundaries
        self._latest = boundaries[-1].number if boundaries else 0
        self._oldest = boundaries[0].number if boundaries else 0
        self._inherited = any(boundary.retained is None for boundary in boundaries)
        limits = [boundary.limit for boundary in boundaries]
        self._limit = -1 if -1 in limits else max(limits, default=-1)
        self._kept = {node: kept for node, kept in self._kept.items() if kept.boundary >= self._oldest}
        self._all = any(boundary.unlisted or boundary.unknown for boundary in boundaries)
        self._gate.protect(bool(boundaries))
        self.wake()
        if not boundaries:
            self._done = set()
            self._kept = {}
            self._gone = set()
            self._tickets = {}
            self._numbers = {}
            if self._log is not None and not self.broken:
                try:
                    self._log.clear()
                except OSError as error:
                    self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = f"the undo log cannot be written: {error.strerror or error}"
        log.warning("snapshots that are not sealed are not protected any more: %s", self.broken)
        boundaries, self._boundaries = self._boundaries, []
        self._forsake(max((boundary.number for boundary in boundaries), default=0))
        for boundary in boundaries:
            if boundary.unknown:
                assert boundary.retained is not None
                self._dirty.merge(boundary.retained)
            else:
                self._dirty.release(boundary.changes)
        self._update()
        self.on_broken()

    def wake(self) -> None:
        """Let all calls that wait look again."""
        waiting, self._changed = self._changed, trio.Event()
        waiting.set()
        for ticket in self._tickets.values():
            waiting, ticket.answered = ticket.answered, trio.Event()
            waiting.set()

    # Calls

    def prepare(self, entries: Sequence[tuple[Node, bytes]], nodes: Sequence[Node]) -> trio.Event | None:
        """Write down what ``entries``, the inodes that they name, and ``nodes`` are, as far as it is needed, and return
        None: they may be changed at once. Or write nothing, and say when to look again. OSError."""
        if not self._tickets and self._settled(entries, nodes):
            return None
        touched = list(nodes)
        inodes = [node for node in nodes if node in self._kept or self._inode_needed(node)]
        keys: list[Node | tuple[Node, bytes]] = []
        records: list[Record] = []
        for directory, name in entries:
            found = self._tree.look(directory, name)
            needed = self._entry_needed(directory, name)
            if needed:
                inode, kind = (0, 0) if found is None else (found[1].st_ino, found[0].kind)
                records.append(EntryWas(self._latest, directory.ino, name, inode, kind))
                keys.append((directory, name))
            if found is None or (node := found[0]) in touched:
                continue
            touched.append(node)
            if node.children is not None:
                self._gone.add(node.ino)
            # What has a name that is of a boundary is of it, too.
            unchanged = (self._unchanged(node) and node.dev == self._device) if needed else self._inode_needed(node)
            if unchanged or node in self._kept:
                inodes.append(node)
        awaited = None
        for node in inodes:
            if S_ISREG(node.kind):
                waits = self._keep(node, 0, _END)
                awaited = awaited if waits is None else waits
            elif awaited is None and (was := self._describe(node)) is not None:
                records.append(InodeWas(self._latest, was))
        if awaited is not None:
            return awaited
        if not self._boundaries:
            return None
        if records:
            try:
                self._writable().append(*records)
            except OSError as error:
                self._give_up(error)
                return None
            self._done.update(keys, inodes)
        for node in touched:
            self._drop_ticket(node)
        return None

    def prepare_write(self, node: Node, start: int, length: int) -> trio.Event | None:
        """The same for a write to a file."""
        kept = self._kept.get(node)
        if kept is not None:
            kept.foreign = kept.foreign or self._is_foreign(node, kept)
        if kept is not None or self._inode_needed(node):
            awaited = self._keep(node, start, start + length)
            if awaited is not None:
                return awaited
        if self._tickets:
            self._drop_ticket(node)
        return None

    def written(self, node: Node) -> None:
        """A write to a file has been made."""
        kept = self._kept.get(node)
        if kept is not None:
            kept.seen = self._stamp_of(node)

    def foreign(self) -> list[int]:
        """Inodes of the files that are in the log in part, and were changed past the mount."""
        return [node.ino for node, kept in self._kept.items() if kept.foreign or self._is_foreign(node, kept)]

    def _is_foreign(self, node: Node, kept: _Kept) -> bool:
        return self._stamp_of(node) != kept.seen

    def _stamp_of(self, node: Node) -> tuple[int, int, int]:
        try:
            return _stamp(Status.of(self._tree.nodes.stat(node)))
        except OSError:
            return -1, 0, 0  # it has gone, past the mount

    def prepare_rename(
        self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, exchange: bool
    ) -> trio.Event | None:
        """The same for a rename."""
        node = self._named(parent, name)
        other = self._named(new_parent, new_name)
        if node is None or node is other:
            return None  # fails, or does nothing
        # Changes below it would not be seen any more, while some boundary may need what is there.
        if node.children is not None and self._dirty.leaves(node, new_parent, new_name):
            return self._changed
        if exchange and other is not None and other.children is not None and self._dirty.leaves(other, parent, name):
            return self._changed
        return self.prepare(((parent, name), (new_parent, new_name)), ())

    def made_directory(self, node: Node) -> None:
        """``node`` is new. A directory of a boundary may have had its inode number, and is looked for by that."""
        if self._boundaries:
            try:
                self._writable().append(DirectoryMade(self._latest, node.ino))
            except OSError as error:
                self._give_up(error)

    def _named(self, directory: Node, name: bytes) -> Node | None:
        assert directory.children is not None
        node = directory.children.get(name)
        if node is None and (found := self._tree.look(directory, name)) is not None:
            node = found[0]
        return node

    def _settled(self, entries: Sequence[tuple[Node, bytes]], nodes: Sequence[Node]) -> bool:
        """Whether nothing of these is needed, told as quickly as possible."""
        for node in nodes:
            if node in self._kept or self._inode_needed(node):
                return False
        for directory, name in entries:
            if self._entry_needed(directory, name):
                return False
            there = self._named(directory, name)
            if there is None:
                continue
            if there in self._kept or self._inode_needed(there):
                return False
            if there.children is not None:
                self._gone.add(there.ino)
        return True

    def _entry_needed(self, directory: Node, name: bytes) -> bool:
        change = directory.change
        if directory.deleted or (change is not None and name in change.names):
            return False
        if directory.made <= self._oldest or not (self._inherited or directory.ino in self._gone):
            if directory.made > self._latest or (change is not None and change.made):
                return False
            if not self._all and not self._lists_entry(directory, name):
                return False
        return (directory, name) not in self._done and self._recorded(directory)

    def _lists_entry(self, directory: Node, name: bytes) -> bool:
        for boundary in self._boundaries:
            change = boundary.changes.get(directory)
            if change is not None and (change.made or change.subtree or name in change.names):
                return True
        return False

    def _inode_needed(self, node: Node) -> bool:
        return self._unchanged(node) and (self._all or self._lists_inode(node)) and self._recorded(node)

    def _recorded(self, node: Node) -> bool:
        """Whether it is where snapshots go: in no excluded place, and on the root's filesystem, as inode numbers of
        another one mean something else."""
        return node.dev == self._device and self._dirty.watched(node)

    def _unchanged(self, node: Node) -> bool:
        """Whether it was there at the latest boundary, has not been changed since, and is not preserved."""
        change = node.change
        if change is not None and change.attributes:
            return False
        # What has no name any more has been preserved when it lost its last, or is of no boundary.
        return node.made <= self._latest and not node.deleted and node not in self._done

    def _lists_inode(self, node: Node) -> bool:
        for boundary in self._boundaries:
            change = boundary.changes.get(node)
            if change is not None and change.attributes:
                return True
        return False

    def _describe(self, node: Node) -> Was | None:
        try:
            return self._tree.describe(node)
        except OSError as error:
            # It was changed behind the mount. Whether the call can be made is for the call to find.
            log.warning("what inode %d was cannot be told: %s", node.ino, error)
            return None

    # Content of regular files

    def _keep(self, node: Node, start: int, end: int) -> trio.Event | None:
        """Write down what a file is between two offsets, and all else of it when it is the first time; or say when to
        look again."""
        if node in self._tickets:
            return self._tickets[node].answered
        records: list[Record] = []
        kept = self._kept.get(node)
        if kept is None or self._unchanged(node):
            was = self._describe(node)
            if was is None:
                return self._ticket(node).answered
            too_large = 0 <= self._limit < was.status.size
            was = structs.replace(was, reason=TOO_LARGE) if too_large else structs.replace(was, logged=True)
            kept = _Kept(self._latest, was)
            records.append(InodeWas(self._latest, was))
        size = kept.was.status.size if kept.was.logged else 0
        missing = kept.spans.missing(start - start % _BLOCK, min(size, end + -end % _BLOCK))
        data = self._read(node, missing)
        if data is None:
            return self._ticket(node).answered
        for (first, _), part in zip(missing, data, strict=True):
            records.append(ContentWas(self._latest, node.ino, first, part))
        try:
            self._writable().append(*records)
        except OSError as error:
            if data and error.errno in _NO_ROOM:
                return self._ticket(node).answered  # the store may have room, where it takes less
            self._give_up(error)
            return None
        self._preserved(node)
        for first, stop in missing:
            kept.spans.add(first, stop)
        if kept.spans.missing(0, size):
            self._kept[node] = kept
        return None

    def _preserved(self, node: Node) -> None:
        self._kept.pop(node, None)
        self._done.add(node)

    def _read(self, node: Node, ranges: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Parts of a file, where they are in memory and the log may take as much: nobody waits for the disk here."""
        wanted = sum(stop - start for start, stop in ranges)
        if wanted > self._at_once or self._writable().size + wanted > self._log_limit:
            return None
        if not wanted:
            return []
        try:
            fd = self._open_file(node)
        except OSError:
            return None
        try:
            return [syscalls.read_in_memory(fd, stop - start, start) for start, stop in ranges]
        except OSError:
            return None
        finally:
            os.close(fd)

    def _open_file(self, node: Node) -> int:
        try:
            return self._tree.nodes.open(node, os.O_RDONLY | os.O_NOATIME)
        except PermissionError:
            return self._tree.nodes.open(node, os.O_RDONLY)

    # Tickets

    def _ticket(self, node: Node) -> _Ticket:
        ticket = self._tickets.get(node)
        if ticket is None:
            self._last_ticket += 1
            ticket = self._tickets[node] = self._numbers[self._last_ticket] = _Ticket(self._last_ticket, node)
            self.ask(ticket.wanted(self._partly_logged(node)))
        return ticket

    def _partly_logged(self, node: Node) -> bool:
        """Whether part of a file may be in the log, perhaps written by an earlier worker."""
        return node in self._kept or self._inherited

    def _drop_ticket(self, node: Node) -> None:
        """The file is about to be changed, and what it was is of no interest: an answer would come too late."""
        ticket = self._tickets.pop(node, None)
        if ticket is not None:
            del self._numbers[ticket.number]
            ticket.answered.set()

    def ask_again(self) -> None:
        """Send all tickets that have no answer, to a new control process."""
        for ticket in self._tickets.values():
            self.ask(ticket.wanted(self._partly_logged(ticket.node)))

    def preserve(self, number: int, was: Was | None) -> None:
        """The answer to a ticket: write it down, and let the calls go on. OSError ESTALE: there is no such ticket;
        ValueError."""
        ticket = self._numbers.get(number)
        if ticket is None:
            raise OSError(errno.ESTALE, f"there is no ticket {number}")
        if was is None and self._partly_logged(ticket.node):
            # What is not in the log is not to be looked for in the file.
            known = self._describe(ticket.node)
            was = None if known is None else structs.replace(known, reason=LOST)
        if was is not None:
            if was.status.inode != ticket.node.ino:
                raise ValueError(f"ticket {number} is of inode {ticket.node.ino}, not {was.status.inode}")
            try:
                self._writable().append(InodeWas(self._latest, was))
            except OSError as error:
                self._give_up(error)
                raise
        self._kept.pop(ticket.node, None)
        self._done.add(ticket.node)
        self._drop_ticket(ticket.node)


def _nobody(*_: object) -> None:
    """Nobody listens."""
