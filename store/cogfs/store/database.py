"""The LMDB environment: its tables, transactions, and the growth of its map. Knows keys and values, not their meaning.

One process has it open, and in it one transaction writes at a time (the caller sees to both). The map may be moved only
while no transaction is open, so readers go through a gate. A change keeps a list of what it did: when the map turns out
to be full it is ended, the map grows, and the list is done again in a new transaction.
"""

from __future__ import annotations

import enum
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from cogfs.store.errors import Corrupt, NoSpace, StoreError, StoreIO, of_index, of_system, translated
from cogfs.store.files import make_private, sync_directory
from cogfs.store.gate import Gate
from cogfs.store.steps import step

MAP_SIZE = 1024 * 1024 * 1024
#: Transactions that read at the same time.
_MAX_READERS = 1000
#: Room for the table of readers, 64 bytes each, with some to spare.
_LOCK_FILE_SIZE = 80 * 1024
_DATA = "data.mdb"
#: The index while it is written anew.
_COPY = "data.mdb.new"
#: Rows that are copied before it is asked whether to go on.
_ROWS = 5000
#: A copy that is not so much smaller than the index is not worth it.
_SMALLER = 8
#: A change starts with at least so much of the map free.
_HEADROOM = 4 * 1024 * 1024
_MEMORY = "/dev/shm"
#: A disk with less is full: no transaction may be sure of it.
_HARDLY_ANY = 1024 * 1024


class Table(enum.StrEnum):
    """The named databases; part of the format."""

    META = "meta"
    OBJECTS = "objects"
    PACKS = "packs"
    WORKSPACES = "workspaces"
    SNAPSHOTS = "snapshots"
    WORKSPACE_SNAPSHOTS = "workspace_snapshots"
    THREADS = "threads"
    ENTRIES = "entries"
    ENTRY_SEQUENCES = "entry_sequences"
    ENTRY_CHILDREN = "entry_children"
    JOURNALS = "journals"
    RECORD_STATES = "record_states"
    DIRECTORIES = "directories"
    LINKS = "links"
    BOUNDARIES = "boundaries"
    POLICIES = "policies"
    RUNS = "runs"
    TOOL_CALLS = "tool_calls"
    COMMANDS = "commands"
    MEMORIES = "memories"
    FORKS = "forks"
    LOST = "lost"


class View:
    """A transaction that reads."""

    def __init__(self, transaction: lmdb.Transaction[bytes], tables: dict[Table, Any]) -> None:
        self._transaction = transaction
        self._tables = tables

    @property
    def number(self) -> int:
        """Of the transaction that wrote last what is seen."""
        return self._transaction.id()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value of ``key``, or None."""
        try:
            return self._transaction.get(key, db=self._tables[table])
        except lmdb.Error as error:
            raise of_index(error, "reading") from error

    def scan(self, table: Table, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """The pairs whose keys begin with ``prefix``, ascending, from ``start`` on."""
        try:
            cursor = self._transaction.cursor(db=self._tables[table])
            found = cursor.set_range(max(prefix, start)) if prefix or start else cursor.first()
            while found:
                key, value = cursor.item()
                if not key.startswith(prefix):
                    break
                yield key, value
                found = cursor.next()
        except lmdb.Error as error:
            raise of_index(error, "reading") from error

    def keys(self, table: Table, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[bytes]:
        """The keys that begin with ``prefix``, ascending, from ``start`` on. No value is read."""
        try:
            cursor = self._transaction.cursor(db=self._tables[table])
            found = cursor.set_range(max(prefix, start)) if prefix or start else cursor.first()
            while found:
                key = cursor.key()
                if not key.startswith(prefix):
                    break
                yield key
                found = cursor.next()
        except lmdb.Error as error:
            raise of_index(error, "reading") from error

    def scan_back(self, table: Table, prefix: bytes = b"", *, before: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """The pairs whose keys begin with ``prefix``, descending, those less than ``before`` where that is given.

        ``prefix`` must not end in the byte 255.
        """
        limit = before or (prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b"")
        try:
            cursor = self._transaction.cursor(db=self._tables[table])
            found = cursor.prev() if limit and cursor.set_range(limit) else cursor.last()
            while found:
                key, value = cursor.item()
                if not key.startswith(prefix):
                    break
                yield key, value
                found = cursor.prev()
        except lmdb.Error as error:
            raise of_index(error, "reading") from error

    def count(self, table: Table) -> int:
        """How many pairs the table has."""
        entries: int = self._transaction.stat(self._tables[table])["entries"]
        return entries


class Change(View):
    """The transaction that writes. Nothing of it is seen before ``commit``."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._log: list[tuple[Table, bytes, bytes | None]] = []
        super().__init__(database.begin(), database.tables)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Sets the value of ``key``."""
        self._do([(table, key, value)])

    def put_all(self, table: Table, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Sets many values; fastest in ascending order of the keys."""
        self._do([(table, key, value) for key, value in items])

    def delete(self, table: Table, key: bytes) -> None:
        """Removes ``key`` if it is there."""
        self._do([(table, key, None)])

    def scan(self, table: Table, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        # A list, because a full map ends the transaction and its cursors.
        return iter(list(super().scan(table, prefix, start=start)))

    def keys(self, table: Table, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[bytes]:
        return iter(list(super().keys(table, prefix, start=start)))

    def scan_back(self, table: Table, prefix: bytes = b"", *, before: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return iter(list(super().scan_back(table, prefix, before=before)))

    @property
    def empty(self) -> bool:
        """Nothing has been put or deleted."""
        return not self._log

    def commit(self) -> None:
        """Makes everything durable and visible. On an error nothing is, and the change has ended."""
        while True:
            try:
                step("index.commit")
                self._transaction.commit()
            except lmdb.MapFullError:
                self._again()
            except lmdb.Error as error:
                self._transaction.abort()
                full = self._database.is_full()
                self._database.revive()
                if full:
                    raise NoSpace(f"no space is left for the index while committing: {error}") from error
                raise of_index(error, "committing") from error
            except OSError as error:
                self._transaction.abort()
                raise of_system(error, "committing its index") from error
            else:
                step("index.committed")
                return

    def abort(self) -> None:
        """Forgets everything. May be called when the change has ended already."""
        self._transaction.abort()

    def _do(self, operations: list[tuple[Table, bytes, bytes | None]]) -> None:
        self._log += operations
        try:
            self._apply(operations)
        except lmdb.MapFullError:
            self._again()

    def _apply(self, operations: list[tuple[Table, bytes, bytes | None]]) -> None:
        transaction, tables = self._transaction, self._tables
        try:
            for table, key, value in operations:
                if value is None:
                    transaction.delete(key, db=tables[table])
                else:
                    transaction.put(key, value, db=tables[table])
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            raise of_index(error, "writing") from error

    def _again(self) -> None:
        """Does everything in the log in a new transaction, in a map as large as that takes."""
        while True:
            self._transaction.abort()
            self._database.grow()
            self._transaction = self._database.begin()
            self._tables = self._database.tables
            try:
                self._apply(self._log)
            except lmdb.MapFullError:
                continue
            return


class Database:
    """The environment in ``directory``, which must exist, be private, and lie on a local filesystem."""

    def __init__(self, directory: Path, map_size: int = MAP_SIZE) -> None:
        self._directory = directory
        self._gate = Gate()
        self._closed = False
        #: It could not be opened again, which is tried by whoever needs it next.
        self._lost = False
        #: Another file was put in its place, and that is not durable yet.
        self._unsynced_name = False
        with translated("opening its index"):
            # LMDB maps this file and makes it sparse; on a full disk the first touch of a hole would kill the process.
            make_private(directory / "lock.mdb", _LOCK_FILE_SIZE)
            used = make_private(directory / _DATA, 0)
            (directory / _COPY).unlink(missing_ok=True)
            self._map_size = map_size
            while self._map_size < 2 * used:
                self._map_size *= 2
            self._open()

    def _open(self) -> None:
        with _lock_in_memory(self._directory) as (path, is_directory):
            self._environment = lmdb.open(
                str(path),
                subdir=is_directory,
                map_size=self._map_size,
                mode=0o600,
                max_dbs=len(Table),
                max_readers=_MAX_READERS,
                max_spare_txns=8,
            )
        try:
            self._environment.reader_check()
            with self._environment.begin(write=True) as transaction:
                self.tables: dict[Table, Any] = {
                    table: self._environment.open_db(table.encode(), txn=transaction) for table in Table
                }
        except BaseException:
            self._environment.close()
            raise

    def close(self) -> None:
        """Waits for readers and closes the environment. No change may be open."""
        with self._gate.alone():
            if not self._closed:
                self._closed = True
                self._environment.close()

    @property
    def reading(self) -> bool:
        """This thread has a transaction open that reads."""
        return self._gate.entered

    @contextmanager
    def view(self) -> Iterator[View]:
        """One consistent state of all tables, as of now."""
        self._ready()
        self._gate.enter()
        try:
            self._check_open()
            try:
                transaction = self._environment.begin()
            except lmdb.Error as error:
                raise of_index(error, "reading") from error
            try:
                yield View(transaction, self.tables)
            finally:
                transaction.abort()
        finally:
            self._gate.leave()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The committed value of ``key``, or None."""
        self._ready()
        self._gate.enter()
        try:
            self._check_open()
            with self._environment.begin(db=self.tables[table]) as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise of_index(error, "reading") from error
        finally:
            self._gate.leave()

    def change(self, expected: int = 0) -> Change:
        """Begins the transaction that writes, with room in the map for about ``expected`` bytes."""
        self._ready()
        self._check_open()
        info = self._environment.info()
        used = (info["last_pgno"] + 1) * self._environment.stat()["psize"]
        if info["map_size"] - used < _HEADROOM + 2 * expected:
            self.grow(2 * expected)
        return Change(self)

    def begin(self) -> lmdb.Transaction[bytes]:
        """The bare transaction behind a change."""
        try:
            return self._environment.begin(write=True)
        except lmdb.Error as error:
            raise of_index(error, "writing") from error

    def grow(self, more: int = 0) -> None:
        """At least doubles the map. Waits for readers; no change may be open."""
        with self._gate.alone():
            size = self._map_size * 2
            while size < self._map_size + more:
                size *= 2
            try:
                self._environment.set_mapsize(size)
            except lmdb.Error as error:
                raise NoSpace(f"the index cannot grow to {size} bytes: {error}") from error
            self._map_size = size

    def size(self) -> int:
        """Bytes of the index on disk; 0 when that cannot be told."""
        try:
            return (self._directory / _DATA).stat().st_blocks * 512
        except OSError:
            return 0  # A daemon whose disk is gone still says what it is.

    def is_full(self) -> bool:
        """Whether hardly any space is left: LMDB calls it an input/output error when a write is cut short by that."""
        try:
            place = os.statvfs(self._directory)
        except OSError:
            return False
        return place.f_bavail * place.f_frsize < _HARDLY_ANY

    def revive(self) -> None:
        """Opens the environment again where LMDB refuses to go on, as it does when a write of its root page failed.

        Waits for readers; no change may be open.
        """
        try:
            self._environment.begin().abort()
        except lmdb.PanicError:
            with self._gate.alone(), translated("opening its index again"):
                self._environment.close()
                self._lost = True
                self._open_again()

    def copy(self, goes_on: Callable[[], bool]) -> int | None:
        """Writes all rows anew, beside the index and without gaps, and makes that durable: for ``take_copy``. Gives the
        number of the transaction whose state it is; None when the copy would not be much smaller, or is not made for
        want of room, since ``goes_on`` says so, or since somebody waits for all readers to end."""
        path = self._directory / _COPY
        number = None
        try:
            path.unlink(missing_ok=True)
            place = os.statvfs(self._directory)
            if place.f_bavail * place.f_frsize > 2 * self.size() + _HARDLY_ANY:
                number = self._copy_to(path, lambda: goes_on() and not self._gate.wanted)
        except (lmdb.Error, OSError, StoreError):
            pass  # The index stays as it is.
        if number is None:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return number

    def _copy_to(self, path: Path, goes_on: Callable[[], bool]) -> int | None:
        make_private(path, 0)
        with self.view() as view:
            environment = lmdb.open(
                str(path), subdir=False, map_size=self._map_size, max_dbs=len(Table), lock=False, sync=False
            )
            try:
                tables = {table: environment.open_db(table.encode()) for table in Table}
                for table in Table:
                    rows = view.scan(table)
                    while part := list(itertools.islice(rows, _ROWS)):
                        if not goes_on():
                            return None
                        with environment.begin(db=tables[table], write=True) as transaction:
                            transaction.cursor().putmulti(part, append=True)
                environment.sync(True)
                if path.stat().st_size * _SMALLER > (self._directory / _DATA).stat().st_size * (_SMALLER - 1):
                    return None
                with environment.begin() as transaction:
                    for table in Table:
                        if not goes_on():
                            return None
                        for ours, theirs in itertools.zip_longest(
                            view.scan(table), transaction.cursor(db=tables[table])
                        ):
                            if ours != theirs:
                                return None
                return view.number
            finally:
                environment.close()

    def take_copy(self, number: int) -> int:
        """Puts the copy into the place of the index, unless something was written since transaction ``number``. Gives
        the bytes that the index is smaller by. Waits for readers; no change may be open, and none may begin."""
        path, copy = self._directory / _DATA, self._directory / _COPY
        with self._gate.alone(), translated("putting a smaller index into its place"):
            if self._closed or self._lost or self._environment.info()["last_txnid"] != number:
                copy.unlink(missing_ok=True)
                return 0
            saved = path.stat().st_size - copy.stat().st_size
            step("compact.copied")
            self._environment.close()
            self._lost = True
            try:
                os.rename(copy, path)
                self._unsynced_name = True
                step("compact.renamed")
            finally:
                self._open_again()
            return saved

    def _open_again(self) -> None:
        """OSError and store errors while that cannot be done."""
        if self._unsynced_name:
            # What is committed to a file whose name is not durable would be lost with the power.
            step("compact.sync")
            sync_directory(self._directory)
            self._unsynced_name = False
        self._open()
        self._lost = False

    def _ready(self) -> None:
        """Opens the environment that was lost, as the disk may be well again. StoreError while it is not."""
        if self._lost and not self._gate.entered:
            with self._gate.alone(), translated("opening its index again"):
                if self._lost and not self._closed:
                    self._open_again()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        if self._lost:
            raise StoreIO("the index could not be opened again after a write of it had failed")


@contextmanager
def _lock_in_memory(directory: Path) -> Iterator[tuple[Path, bool]]:
    """The path by which LMDB opens the index in ``directory``, and whether that is a directory's.

    LMDB stores into a map of its lock file in every transaction, those that read too. On a disk that is not to be
    written any more that may kill the process (SIGBUS: XFS and Btrfs do so), so the file is made in memory, beside a
    link to the data, and has no name once it is open: nobody else may have the index open. Where that cannot be done,
    it stands beside the data.
    """
    try:
        aside = Path(tempfile.mkdtemp(prefix="cogfs-index-", dir=_MEMORY))
    except OSError:
        yield directory, True
        return
    try:
        try:
            make_private(aside / "index-lock", _LOCK_FILE_SIZE)
            os.symlink(os.path.abspath(directory / _DATA), aside / "index")
        except OSError:
            yield directory, True
        else:
            yield aside / "index", False
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_number(value: bytes | None, size: int, what: str) -> int:
    """The big-endian number of ``size`` bytes that a row holds. Corrupt when the row has another form."""
    if value is None or len(value) != size:
        raise Corrupt(f"the index has no valid {what}")
    return int.from_bytes(value)
