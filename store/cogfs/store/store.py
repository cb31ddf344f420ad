"""The door to the store: objects and rows of one daemon, with the order in which they become durable.

Locks, in the order in which they are taken: ``_write_lock`` (one thread writes rows or syncs), the gate of the database
(transactions), the table of pending objects, the growing pack. A thread that reads may put and read objects; it must
not write rows, sync or close, which is a RuntimeError, since those may have to wait for all readers.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from cogfs.store import chunking, packs, trees
from cogfs.store.check import Check, Checked
from cogfs.store.database import MAP_SIZE, Change, Database, Table, check_number
from cogfs.store.errors import Corrupt, NoSpace, NotFound, StoreError, StoreIO, translated
from cogfs.store.files import sync_directory
from cogfs.store.gc import Collected, Collection
from cogfs.store.naming import Root, names_in
from cogfs.store.objects import Objects, Recovered
from cogfs.store.packs import Packs
from cogfs.store.place import Place, check_version
from cogfs.store.recent import GRACE
from cogfs.store.records import NO_BASE
from cogfs.store.repack import Repack, Repacked
from cogfs.store.repair import Repair, Repaired, Retake
from cogfs.store.rows import Reader, Writer
from cogfs.store.schema import FORMAT_VERSION, NO_HASH, Chunks, Hash, ObjectKind, Tree, TreeEntry
from cogfs.store.source import Source
from cogfs.store.steps import step
from cogfs.store.treecache import TreeCache
from cogfs.store.usage import Usage, too_many, use

_FORMAT_KEY = b"format"
_FORMAT_SIZE = 4
#: The formats in which objects may be stored against others, and in groups.
_DELTAS_SINCE = 2
_GROUPS_SINCE = 3
#: Threads that hash and compress the pieces of large files, and pieces of one file that they may have.
_THREADS = max(2, min(4, os.cpu_count() or 2))
_PIECES_UNDER_WAY = 2 * _THREADS


class StoreStats(NamedTuple):
    """Sizes of a store."""

    objects: int
    packs: int
    pack_bytes: int
    index_bytes: int


class Store:
    """One open store. Its methods may be called by many threads at once."""

    def __init__(self, path: Path, *, map_size: int = MAP_SIZE, pack_limit: int = packs.PACK_LIMIT) -> None:
        self.path = Path(os.path.abspath(path))
        self._write_lock = threading.Lock()
        self._writer_thread = 0
        self._writer: Writer | None = None
        self._closed = False
        #: Names in rows that were written since a collection began; None while there is none.
        self._named: set[Hash] | None = None
        self._collecting = threading.Lock()
        #: What a repack has tried, and what did not pay.
        self._vain: set[int] = set()
        #: How often rows were deleted that named objects.
        self.deletions = 0
        self._pieces = ThreadPoolExecutor(_THREADS, thread_name_prefix="pieces")
        self._trees = TreeCache()
        self._place = Place(self.path)
        try:
            self._database = Database(self._place.index, map_size)
            self._packs = Packs(self._place.packs, pack_limit)
            try:
                version = self._check_format()
                self._objects = Objects(self._database, self._packs)
                version = self._upgrade(version)
                self._objects.deltas = version >= _DELTAS_SINCE
                self._objects.grouping = version >= _GROUPS_SINCE
                # Without room for it they are left to the next start.
                with suppress(NoSpace):
                    self._forget_removed()
            except BaseException:
                self._database.close()
                self._packs.close()
                raise
        except BaseException:
            self._place.close()
            raise

    @classmethod
    def open(cls, path: Path, *, map_size: int = MAP_SIZE, pack_limit: int = packs.PACK_LIMIT) -> Store:
        """Opens the store at ``path`` and makes it on first use. One process has it open at a time.

        Raises Unsafe (not the user's own, or a symlink), Locked, UnsupportedFormat, NetworkFilesystem, NoSpace,
        StoreIO or Corrupt. What was put and not committed when it was last open is put again: that takes the time to
        read and verify it. ``map_size`` is where the index's map starts; it grows as needed.
        """
        return cls(path, map_size=map_size, pack_limit=pack_limit)

    def close(self) -> None:
        """Waits for those who read or write, and closes. May be repeated.

        What was put and never synced is there when the store is opened again, unless the power was lost meanwhile.
        """
        with self._writing():
            if self._closed:
                return
            self._closed = True
            self._pieces.shutdown()
            self._database.close()
            self._packs.close()
            self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- objects

    def put_blob(self, data: bytes | memoryview, base: Hash = NO_HASH) -> Hash:
        """Puts the content of a small file. It survives the process at once, and is durable after the next ``sync`` or
        ``write``.

        What a memoryview shows must not change meanwhile. ``base``, here and below: what is known to be like it,
        such as an earlier version; then little more is stored than what differs. It need not be there.
        """
        if isinstance(data, memoryview):
            data = data.cast("B")
        return self._objects.put(ObjectKind.BLOB, data, base or NO_BASE)

    def put_file(self, fd: int, size_hint: int, base: Hash = NO_HASH) -> tuple[Hash, int]:
        """Puts all that the file holds, from its beginning whatever the offset of ``fd``.

        Returns the hash of its BLOB, or of its CHUNKS when it has more than ``CHUNK_THRESHOLD`` bytes, and how many
        bytes were read. ``size_hint`` only makes it fast. OSError when the file cannot be read.
        """
        return self.put_content(partial(os.pread, fd), size_hint, base)

    def put_content(self, read: Callable[[int, int], bytes], size_hint: int, base: Hash = NO_HASH) -> tuple[Hash, int]:
        """The same for what ``read`` gives: up to so many bytes at an offset, none at the end. It is asked for one part
        after another, from the beginning, by the thread that calls."""
        source = Source(read)
        head = source.read_up_to(chunking.CHUNK_THRESHOLD + 1, size_hint)
        if len(head) <= chunking.CHUNK_THRESHOLD:
            return self.put_blob(head, base), len(head)
        source.push_back(head)
        del head
        pieces = self._put_pieces(chunking.cut(source.read), self._pieces_of(base))
        size = sum(length for _, length in pieces)
        encoded = trees.encode_chunks(Chunks(size, tuple(pieces)))
        return self._objects.put(ObjectKind.CHUNKS, encoded, base or NO_BASE), size

    def _pieces_of(self, base: Hash) -> Sequence[tuple[Hash, int]]:
        """The pieces of a large file; none where it is not one, or cannot be read."""
        try:
            where = self._objects.find(base) if base else None
            return self._read_chunks(base).pieces if where is not None and where.kind == ObjectKind.CHUNKS else ()
        except StoreError:
            return ()

    def _put_pieces(self, pieces: Iterator[bytes], former: Sequence[tuple[Hash, int]]) -> list[tuple[Hash, int]]:
        """Puts the pieces of a file, several at a time, each against the one of ``former`` in whose place it is."""
        put: list[tuple[Hash, int]] = []
        under_way: deque[tuple[Future[Hash], int]] = deque()
        ends = list(itertools.accumulate(length for _, length in former))
        size = 0
        try:
            for piece in pieces:
                place = bisect.bisect_right(ends, size + len(piece) // 2)
                base = former[place][0] if place < len(former) else NO_HASH
                size += len(piece)
                under_way.append((self._pieces.submit(self.put_blob, piece, base), len(piece)))
                if len(under_way) >= _PIECES_UNDER_WAY:
                    done, length = under_way.popleft()
                    put.append((done.result(), length))
            put += [(done.result(), length) for done, length in under_way]
        finally:
            wait([done for done, _ in under_way])
        return put

    def put_tree(self, entries: Sequence[TreeEntry], base: Hash = NO_HASH) -> Hash:
        """Puts a directory. ValueError unless the names are valid and strictly ascending, as bytes."""
        return self._objects.put(ObjectKind.TREE, trees.encode_tree(entries), base or NO_BASE)

    def has(self, name: Hash) -> bool:
        """The object has been put."""
        return self._objects.find(name) is not None

    def keep_file(self, name: Hash) -> bool:
        """Whether the content of a file, known from earlier, is there with all its pieces; if so it stays as if it had
        just been put."""
        if not self._objects.keep(name):
            return False
        try:
            if self._file_kind(name) == ObjectKind.BLOB:
                return True
            # A collection that was interrupted may have dropped some of them and not the list.
            return all(self._objects.keep(piece) for piece, _ in self._read_chunks(name).pieces)
        except (NotFound, Corrupt):
            return False

    def operation(self) -> AbstractContextManager[None]:
        """Until the block ends, no collection drops what was there at its begin, was put within it, or is named by any
        row within it. For all that reads rows and goes on with the names that it found."""
        return self._objects.recent.operation()

    def kind(self, name: Hash) -> ObjectKind:
        """What the object is. NotFound when there is none."""
        return self._objects.locate(name).kind

    def read_tree(self, name: Hash) -> Tree:
        """The directory. NotFound, or Corrupt naming the object."""
        tree = self._trees.get(name)
        if tree is None:
            data = self._objects.read(name, ObjectKind.TREE)
            try:
                tree = trees.decode_tree(data)
            except ValueError as error:
                raise Corrupt(f"object {name.hex()} is not a valid tree: {error}", name) from error
            self._trees.put(name, tree)
        return tree

    def read_blob(self, name: Hash) -> bytes:
        """The content. NotFound, or Corrupt naming the object."""
        return self._objects.read(name, ObjectKind.BLOB)

    def read_file(self, name: Hash) -> Iterator[bytes]:
        """The content of a BLOB or CHUNKS, piece by piece, each verified before it is given out.

        NotFound and Corrupt: of the object itself at once, of a piece when its turn comes.
        """
        if self._file_kind(name) == ObjectKind.BLOB:
            return iter((self.read_blob(name),))
        return self._read_pieces(name, self._read_chunks(name))

    def verify_file(self, name: Hash) -> None:
        """Reads and verifies every byte of a BLOB or CHUNKS. NotFound, or Corrupt naming the object."""
        for _ in self.read_file(name):
            pass

    def _file_kind(self, name: Hash) -> ObjectKind:
        kind = self._objects.locate(name).kind
        if kind == ObjectKind.TREE:
            raise Corrupt(f"object {name.hex()} is a TREE, not the content of a file", name)
        return kind

    def _read_chunks(self, name: Hash) -> Chunks:
        try:
            return trees.decode_chunks(self._objects.read(name, ObjectKind.CHUNKS))
        except ValueError as error:
            raise Corrupt(f"object {name.hex()} is not a valid chunk list: {error}", name) from error

    def _read_pieces(self, name: Hash, chunks: Chunks) -> Iterator[bytes]:
        for piece, length in chunks.pieces:
            data = self.read_blob(piece)
            if len(data) != length:
                raise Corrupt(f"object {name.hex()} gives piece {piece.hex()} another length", name)
            yield data

    # --- rows and durability

    def sync(self) -> None:
        """Makes every object put so far durable: the bytes first, then one commit that names them.

        NoSpace and StoreIO leave the objects readable, and the next call tries again. When many threads call at the
        same time, one syncs for all and the others find nothing left to do.
        """
        # The bytes first, without keeping those waiting who write rows.
        batch = self._objects.batch()
        self._objects.sync(batch)
        with self._writing():
            self._check_open()
            self._commit(None)

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """The rows as of now. Keep it short, and wait for nothing in it.

        Inside a block of ``write`` of the same thread these are the rows as written so far.
        """
        if self._writer_thread == threading.get_ident() and self._writer is not None:
            yield self._writer
            return
        with self._database.view() as view:
            yield Reader(view)

    @contextmanager
    def write(self, *, objects: bool = True) -> Iterator[Writer]:
        """Rows to be written together. One thread at a time.

        When the block ends they are durable and visible, with every object put until then; an exception in the block
        or in the commit leaves all rows as they were. NoSpace and StoreIO can be tried again. Without ``objects`` the
        objects stay pending, which is quick however many there are: for rows that name none of them.
        """
        with self._writing():
            self._check_open()
            change = self._database.change()
            try:
                self._writer = Writer(change, self._note)
                yield self._writer
                deleted = self._writer.deleted
                if objects:
                    self._commit(change)
                else:
                    change.commit()
                self.deletions += deleted
            finally:
                self._writer = None
                change.abort()

    def _commit(self, change: Change | None) -> None:
        batch = self._objects.batch()
        if not batch.objects and (change is None or change.empty):
            return
        self._objects.sync(batch)
        own = change or self._database.change(batch.cost)
        try:
            self._objects.index(batch, own)
            own.commit()
        finally:
            own.abort()
        self._objects.committed(batch)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._writer_thread == me:
            raise RuntimeError("this thread is writing to the store already")
        if self._database.reading:
            raise RuntimeError("a thread that reads the store cannot write to it")
        with self._write_lock:
            self._writer_thread = me
            try:
                yield
            finally:
                self._writer_thread = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    # --- collections

    def collect(
        self,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        *,
        grace: float = GRACE,
        thorough: bool = False,
        patience: float = 60.0,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Collected:
        """Drops the objects that nothing needs, and gives back the space of packs of which much is dropped.

        Needed is what rows name (``naming``), what ``more_roots`` names (it is asked once the collection has begun),
        what was put or kept within ``grace`` seconds, and what an operation under way may hold. Those that began
        before the collection knew what is needed are waited for, ``patience`` seconds at most. ``thorough`` rewrites
        every pack of which anything is dropped. It ends early, and well, when ``goes_on`` says so. One at a time.

        It takes as much room as one pack, at most. Store errors leave a store in which nothing is lost.
        """
        with self._collecting:
            with self._writing():
                # No transaction is open now, so none writes a row that is not noted.
                self._check_open()
                self._named = set()
            try:
                collection = Collection(self._database, self._objects, self._packs, self._edit)
                return collection.run(
                    more_roots,
                    lambda: self._named or set(),
                    grace=grace,
                    thorough=thorough,
                    patience=patience,
                    goes_on=lambda: goes_on() and not self._closed,
                )
            finally:
                self._named = None

    def repack(
        self,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        *,
        grace: float = GRACE,
        patience: float = 60.0,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Repacked:
        """Puts objects that are like each other together where that saves much, as far as snapshots need them
        (``repack``), collects what is of no use then, and takes the gaps out of the index.

        The arguments are those of ``collect``. It takes as much room as two packs and the index, and does what it can
        with less, but leaves what a collection needs: one pack and the index. It may be interrupted at any time, and
        goes on the next time. Store errors leave a store in which nothing is lost.
        """
        total = Repacked()
        if not self._objects.grouping:
            total.deferred = "the store has an older format"
            return total

        def still() -> bool:
            return goes_on() and not self._closed

        while True:
            # A collection needs the room of a pack to give back any, and the index may grow meanwhile.
            reserve = self._packs.limit + self._database.size()
            limit = min(self._packs.limit, self._place.room() - reserve)
            if limit <= 0:
                total.deferred, total.full = "there is hardly any room on the disk", True
                break
            with self._collecting:
                self._check_open()
                done = Repack(self._database, self._objects, self._edit, self._vain).run(limit, still)
            total.add(done)
            if not done.groups:
                break
            # A disk that is nearly full needs each byte that is of no use.
            scarce = done.full or self._place.room() < self._packs.limit + reserve
            collected = self.collect(more_roots, grace=grace, thorough=scarce, patience=patience, goes_on=goes_on)
            total.freed += collected.freed - done.after
            total.packs += collected.packs
            total.dropped += collected.objects
            if collected.deferred:
                total.deferred = total.deferred or collected.deferred
                break
            if not (done.more or done.full) or not still():
                break
        if total.groups and still():
            total.index = self._compact(still)
        return total

    def _compact(self, goes_on: Callable[[], bool]) -> int:
        """Takes the gaps out of the index, unless somebody writes to it meanwhile. Bytes that it is smaller by."""
        with self._collecting:
            number = self._database.copy(goes_on)
            if number is None:
                return 0
            with self._writing():
                self._check_open()
                return self._database.take_copy(number)

    def check(
        self,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        *,
        data: bool = False,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Checked:
        """Looks whether all is as it must be, and with ``data`` reads and hashes every object. What is found damaged is
        put anew when it comes again."""
        self._check_open()
        with self.operation():
            check = Check(self._database, self._objects, self._packs, lambda: goes_on() and not self._closed)
            return check.run(more_roots, data=data)

    def repair(
        self,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        retake: Retake = lambda affected: None,
    ) -> Repaired:
        """Brings back what is intact, and drops what is damaged. ``retake`` may put again what snapshots need and have
        lost: it gets the paths. No collection goes on meanwhile. Store errors."""
        with self._collecting, self.operation():
            self._check_open()
            return Repair(self._database, self._objects, self._packs, self._edit).run(more_roots, retake)

    def usage(
        self,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        *,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Usage:
        """What takes the space, by workspace and by snapshot. Interrupted when ``goes_on`` says no."""
        self._check_open()
        with self.operation():
            return use(self._database, self._objects, more_roots, lambda: goes_on() and not self._closed)

    def too_many(
        self,
        oldest_first: Sequence[str],
        limit: int,
        more_roots: Callable[[], Iterable[Root]] = tuple,
        *,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> tuple[list[str], int]:
        """Which of some snapshots have to go for what is left to need ``limit`` bytes at most: as few as possible, the
        oldest first, or all of them. And what is needed then. Interrupted when ``goes_on`` says no."""
        self._check_open()
        with self.operation():
            return too_many(
                self._database,
                self._objects,
                oldest_first,
                limit,
                more_roots,
                lambda: goes_on() and not self._closed,
            )

    def _note(self, row: object) -> None:
        if self._named is not None:
            self._named.update(names_in(row))

    def _edit(self, edit: Callable[[Change], None]) -> None:
        """Commits what ``edit`` does to the index, together with all objects put so far."""
        # What is synced first need not be synced while others wait to write.
        self._objects.sync(self._objects.batch())
        with self._writing():
            self._check_open()
            change = self._database.change()
            try:
                edit(change)
                self._commit(change)
            finally:
                change.abort()

    def _forget_removed(self) -> None:
        change = self._database.change()
        try:
            removed = self._objects.forget_removed(change)
            if removed:
                change.commit()
                self._objects.forgotten(removed)
        finally:
            change.abort()

    def pack_bytes(self) -> int:
        """Bytes in all packs at the start and put since: it only counts up."""
        return self._packs.size()

    @property
    def recovered(self) -> Recovered:
        """What this start found of objects that were put and not committed."""
        return self._objects.recovered

    def stats(self) -> StoreStats:
        """Its sizes as of now."""
        count, size = self._objects.pack_bytes()
        return StoreStats(self._objects.count(), count, size, self._database.size())

    def _check_format(self) -> int:
        """The format that the index says it has."""
        with self._database.view() as view:
            row = view.get(Table.META, _FORMAT_KEY)
        if row is not None:
            version = check_number(row, _FORMAT_SIZE, "format")
            check_version(version, str(self._place.index))
            return version
        if self._packs.numbers():
            raise Corrupt(f"the index of {self.path} is missing or empty, and there are packs; it must be rebuilt")
        step("index.create")
        with translated("making its index"):
            sync_directory(self._place.index)
        self._set_version()
        return FORMAT_VERSION

    def _upgrade(self, version: int) -> int:
        """Brings a store of an older format to the newest, and says which one it has then. Where that cannot be done,
        for want of room for example, the store goes on as it is, and the next start tries again.

        First an older version of cogfs must refuse it; only then is anything written that such a one does not know.
        """
        try:
            if self._place.version < FORMAT_VERSION:
                self._place.upgrade()
            if version < FORMAT_VERSION:
                with translated("bringing its index to a new format"):
                    step("index.upgrade")
                self._set_version()
        except (NoSpace, StoreIO):
            return min(version, self._place.version)
        return FORMAT_VERSION

    def _set_version(self) -> None:
        change = self._database.change()
        try:
            change.put(Table.META, _FORMAT_KEY, FORMAT_VERSION.to_bytes(_FORMAT_SIZE))
            change.commit()
        finally:
            change.abort()
