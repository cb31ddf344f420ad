"""The pack files: appended to, synced, read, scanned. Knows records, not objects, and not the index.

Files are ``<8 hexadecimal digits>.pack`` in one directory. One pack at a time grows; it is left for a new one when the
next record would make it larger than the bound. What lies beyond the end that the index knows is a *tail*: records
that were put and not committed, and maybe a torn one. A pack that the index does not know is a tail from its header on.

Locks: ``_append_lock`` covers the growing pack and the set of packs that wait for a sync; ``_files_lock`` covers the
open descriptors. Neither is held across a sync, and the second never across any call of the system but close.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cogfs.store.errors import Corrupt, StoreError, of_system, translated
from cogfs.store.files import sync_directory
from cogfs.store.records import (
    PACK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RECORD_MAGIC,
    RecordHeader,
    check_pack_header,
    pack_header,
    parse_record_header,
)
from cogfs.store.steps import step

PACK_LIMIT = 64 * 1024 * 1024
#: Descriptors kept for reading.
_OPEN_FILES = 64
_NAME = re.compile(r"([0-9a-f]{8})\.pack")
#: Bytes that are searched at a time for the begin of a record.
_STRIDE = 1024 * 1024
_TORN = "a record is cut off"
#: Of these another start may know nothing, so a tail is not given up for them.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Record(NamedTuple):
    """A record whose checksums are right."""

    pack: int
    #: Of its header in the pack.
    offset: int
    header: RecordHeader
    #: The bytes of the header.
    head: bytes
    payload: bytes

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + len(self.head) + len(self.payload)


@dataclass
class Settled:
    """What ``settle`` met."""

    #: Bytes that were cut off or removed.
    dropped: int = 0
    #: Packs whose tail cannot be read to its end.
    unreadable: set[int] = field(default_factory=set)
    #: Packs with records that were taken and may never reach the disk from where they are.
    suspect: set[int] = field(default_factory=set)


class _File:
    """An open pack. ``users`` counts who reads or syncs it; it is closed when it is dropped and the last is done."""

    __slots__ = ("dropped", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.dropped = False


class Packs:
    """All packs of a store, whose directory must exist."""

    def __init__(self, directory: Path, limit: int = PACK_LIMIT) -> None:
        self._directory = directory
        self.limit = limit
        self._append_lock = threading.Lock()
        self._files_lock = threading.Lock()
        self._files: OrderedDict[int, _File] = OrderedDict()
        #: The pack that grows: number and end; number 0 when the next record starts a new one.
        self._number = 0
        self._end = 0
        self._next_number = 1
        #: Bytes in all packs at the start, and those appended since.
        self._bytes = 0
        #: Ends of the packs that hold bytes that are not synced.
        self._unsynced: dict[int, int] = {}
        self._directory_unsynced = False
        self._closed = False

    # --- start and end

    def settle(
        self, ends: dict[int, int], take: Callable[[Record], bool], removed: AbstractSet[int] = frozenset()
    ) -> Settled:
        """Looks at the tail of each pack; ``ends`` has the end of each pack that the index knows. Those in ``removed``
        are removed first, if they are there.

        ``take`` gets the records of the tails, in order. It says whether it needs the record, which then is one that
        waits for a sync, and raises ValueError when the record is not what it says it is. The first such record, or
        torn one, ends the tail. What follows the last record that is needed is cut off, and a pack that the index does
        not know and that has none is removed. A tail that the system cannot read is left as it is beyond that point.

        A pack that is missing or too short is left as it is, for reads to report. Such packs do not grow. Called once,
        before anything else.
        """
        met = Settled()
        with translated("looking at its packs"):
            for number in removed:
                self.remove(number)
            sizes = self._sizes()
            settled = dict(ends)
            for number, size in sorted(sizes.items()):
                known = ends.get(number, 0)
                if number in ends and size <= known:
                    continue
                end = self._take_tail(number, known, size, take, met)
                if number in met.unreadable:
                    settled[number] = end
                elif end or number in ends:
                    settled[number] = end
                    if end < size:
                        step("pack.truncate")
                        os.truncate(self._path(number), end)
                        met.dropped += size - end
                else:
                    step("pack.discard")
                    os.unlink(self._path(number))
                    self._drop(number)
                    met.dropped += size
        last = max(settled, default=0)
        self._next_number = max([last, *removed]) + 1
        self._bytes = sum(settled.values())
        if last and sizes.get(last, 0) >= settled[last] and last not in met.unreadable | met.suspect:
            self._number, self._end = last, settled[last]
        return met

    def _take_tail(self, number: int, known: int, size: int, take: Callable[[Record], bool], met: Settled) -> int:
        """The end of the last record that is needed; ``known`` when there is none."""
        end = known
        try:
            step("pack.recover")
            with self._open(number) as fd:
                if not known:
                    check_pack_header(_read_exactly(fd, 0, PACK_HEADER_SIZE), number)
                for record in _records(fd, number, known or PACK_HEADER_SIZE, size):
                    if take(record):
                        end = record.end
                        self._unsynced[number] = end
                        if number not in met.suspect and not _renew(fd, record):
                            met.suspect.add(number)
        except ValueError:
            pass
        except OSError as error:
            if error.errno in _SCARCE:
                raise
            met.unreadable.add(number)
        if not known and end:
            self._directory_unsynced = True
        return end

    def size(self) -> int:
        """Bytes in all packs at the start and appended since: it only counts up, also when packs are removed."""
        return self._bytes

    def numbers(self) -> list[int]:
        """The numbers of the packs that there are, ascending."""
        with translated("looking at its packs"):
            return sorted(self._sizes())

    def close(self) -> None:
        """Closes the descriptors. Nothing may be read or appended afterwards."""
        with self._files_lock:
            self._closed = True
            for file in self._files.values():
                file.dropped = True
                if not file.users:
                    os.close(file.fd)
            self._files.clear()

    # --- writing

    def append(self, header: bytes, payload: bytes | memoryview, *, copy: bool = False) -> tuple[int, int]:
        """Appends one record and returns where it is: number of the pack, offset of the header in it. A ``copy`` of
        another record is not counted.

        It can be read at once, and is durable after the next ``sync``. NoSpace and StoreIO leave everything as it was.
        """
        length = len(header) + len(payload)
        with self._append_lock:
            try:
                if not self._number or self._end + length > max(self.limit, PACK_HEADER_SIZE + length):
                    self._start_pack()
                number, offset = self._number, self._end
                step("pack.append")
                with self._open(number) as fd:
                    self._write(fd, offset, header, payload)
                step("pack.appended")
            except OSError as error:
                raise of_system(error, "writing a pack") from error
            self._end = offset + length
            if not copy:
                self._bytes += length
            self._unsynced[number] = self._end
            return number, offset

    def leave(self, number: int) -> None:
        """Lets nothing more be appended to pack ``number``."""
        with self._append_lock:
            if self._number == number:
                self._number = 0

    def unsynced(self) -> dict[int, int]:
        """The ends, as of now, of the packs that hold bytes that are not synced."""
        with self._append_lock:
            return dict(self._unsynced)

    def sync(self, ends: dict[int, int]) -> None:
        """Makes every byte before ``ends`` durable, and the names of new packs. OSError when that fails."""
        for number in sorted(ends):
            step("pack.sync")
            with self._open(number) as fd:
                os.fdatasync(fd)
        if self._directory_unsynced:
            step("pack.directory")
            # Cleared first: a pack made meanwhile sets it again.
            self._directory_unsynced = False
            try:
                sync_directory(self._directory)
            except OSError:
                self._directory_unsynced = True
                raise
        with self._append_lock:
            for number, end in ends.items():
                if self._unsynced.get(number) == end:
                    del self._unsynced[number]

    def forget(self, number: int) -> None:
        """Stops waiting for a sync of pack ``number``: what it held since the last one is kept elsewhere."""
        with self._append_lock:
            self._unsynced.pop(number, None)

    def end(self) -> tuple[int, int]:
        """Number of a pack and offset in it: nothing will be appended before."""
        with self._append_lock:
            return (self._number, self._end) if self._number else (self._next_number, 0)

    def remove(self, number: int) -> None:
        """Removes pack ``number``, if it is there, and makes that durable. Who reads it may read on; nothing may be
        appended to it any more (``leave``)."""
        with translated("removing a pack"):
            step("pack.remove")
            try:
                os.unlink(self._path(number))
            except FileNotFoundError:
                pass
            with self._files_lock:
                file = self._files.pop(number, None)
                if file is not None:
                    file.dropped = True
                    if not file.users:
                        os.close(file.fd)
            self.forget(number)
            step("pack.removed")
            sync_directory(self._directory)

    def _start_pack(self) -> None:
        number = self._next_number
        path = self._path(number)
        step("pack.create")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            step("pack.header")
            self._write(fd, 0, pack_header(number), b"")
        except BaseException:
            os.close(fd)
            try:
                os.unlink(path)
            except OSError:
                # The next start discards it. Meanwhile another attempt must not meet it.
                self._next_number = number + 1
            raise
        with self._files_lock:
            self._keep(number, _File(fd))
        self._number, self._end = number, PACK_HEADER_SIZE
        self._next_number = number + 1
        self._directory_unsynced = True

    @staticmethod
    def _write(fd: int, offset: int, header: bytes, payload: bytes | memoryview) -> None:
        """Writes both at ``offset``; on an error the file ends at ``offset`` again."""
        length = len(header) + len(payload)
        try:
            written = os.pwritev(fd, [header, payload], offset)
            if written < length:
                rest = memoryview(b"".join([header, payload]))
                while written < length:
                    written += os.pwrite(fd, rest[written:], offset + written)
        except OSError:
            try:
                os.ftruncate(fd, offset)
            except OSError:
                pass  # The next record is written over the torn one.
            raise

    # --- reading

    def read(self, number: int, offset: int, length: int) -> bytes:
        """``length`` bytes of pack ``number``. Corrupt when they are not all there."""
        try:
            with self._open(number) as fd:
                data = _read_exactly(fd, offset, length)
        except FileNotFoundError as error:
            raise Corrupt(f"pack {number:08x} of the store is missing") from error
        except OSError as error:
            raise of_system(error, f"reading pack {number:08x}") from error
        if len(data) != length:
            raise Corrupt(f"pack {number:08x} of the store is cut off")
        return data

    def scan(self, number: int) -> Iterator[tuple[int, RecordHeader]]:
        """The records of pack ``number`` in order, each with the offset of its header, payloads checked.

        Corrupt at the first that is torn or damaged; what came before is good.
        """
        try:
            with self._open(number) as fd:
                check_pack_header(_read_exactly(fd, 0, PACK_HEADER_SIZE), number)
                for record in _records(fd, number, PACK_HEADER_SIZE, os.fstat(fd).st_size):
                    yield record.offset, record.header
        except ValueError as error:
            raise Corrupt(f"pack {number:08x} of the store is damaged: {error}") from error
        except OSError as error:
            raise of_system(error, f"reading pack {number:08x}") from error

    def trouble(self, number: int, end: int) -> str:
        """What is wrong with the file of a pack that should reach to ``end``, as a sentence; empty: nothing."""
        try:
            with self._open(number) as fd:
                size = os.fstat(fd).st_size
                header = _read_exactly(fd, 0, PACK_HEADER_SIZE)
        except FileNotFoundError:
            return f"pack {number:08x} is missing"
        except OSError as error:
            return f"pack {number:08x} cannot be read: {error.strerror}"
        if header != pack_header(number):
            return f"the header of pack {number:08x} is damaged"
        return f"pack {number:08x} is cut off: it has {size} bytes of {end}" if size < end else ""

    def salvage(self, number: int, end: int) -> Iterator[Record]:
        """The records of a pack before ``end`` whose checksums are right, also behind damaged ones. StoreIO."""
        try:
            with self._open(number) as fd:
                size = min(end, os.fstat(fd).st_size)
                offset = PACK_HEADER_SIZE
                while offset < size:
                    try:
                        for record in _records(fd, number, offset, size):
                            offset = record.end
                            yield record
                    except ValueError:
                        offset = _next_magic(fd, offset + 1, size)
        except FileNotFoundError:
            return
        except OSError as error:
            raise of_system(error, f"reading pack {number:08x}") from error

    # --- files

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08x}.pack"

    def _sizes(self) -> dict[int, int]:
        sizes = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                status = entry.stat(follow_symlinks=False)
                if match and stat.S_ISREG(status.st_mode):
                    sizes[int(match[1], 16)] = status.st_size
        return sizes

    @contextmanager
    def _open(self, number: int) -> Iterator[int]:
        """A descriptor of pack ``number``, which stays open until the block ends."""
        with self._files_lock:
            if self._closed:
                raise StoreError("the store is closed")
            file = self._files.get(number)
            if file is None:
                fd = os.open(self._path(number), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                file = _File(fd)
                self._keep(number, file)
            else:
                self._files.move_to_end(number)
            file.users += 1
        try:
            yield file.fd
        finally:
            with self._files_lock:
                file.users -= 1
                if file.dropped and not file.users:
                    os.close(file.fd)

    def _drop(self, number: int) -> None:
        """Closes what is open of a pack that nobody reads and that is no more."""
        with self._files_lock:
            file = self._files.pop(number, None)
        if file is not None:
            os.close(file.fd)

    def _keep(self, number: int, file: _File) -> None:
        self._files[number] = file
        if len(self._files) > _OPEN_FILES:
            _, oldest = self._files.popitem(last=False)
            oldest.dropped = True
            if not oldest.users:
                os.close(oldest.fd)


def _records(fd: int, number: int, offset: int, size: int) -> Iterator[Record]:
    """The records of a pack of ``size`` bytes from ``offset`` on. ValueError at the first that is torn or damaged."""
    while offset < size:
        head = _read_exactly(fd, offset, RECORD_HEADER_SIZE)
        header = parse_record_header(head)
        if offset + RECORD_HEADER_SIZE + header.stored > size:
            raise ValueError(_TORN)
        payload = _read_exactly(fd, offset + RECORD_HEADER_SIZE, header.stored)
        if zlib.crc32(payload) != header.checksum:
            raise ValueError("the payload of a record is damaged")
        record = Record(number, offset, header, head, payload)
        yield record
        offset = record.end


def _next_magic(fd: int, offset: int, size: int) -> int:
    """Where a record may begin, from ``offset`` on; ``size`` when nowhere."""
    while offset < size:
        data = _read_exactly(fd, offset, min(_STRIDE, size - offset))
        found = data.find(RECORD_MAGIC)
        if found >= 0:
            return offset + found
        if len(data) < len(RECORD_MAGIC):
            return size
        # The mark may lie across the end of what was read.
        offset += len(data) - len(RECORD_MAGIC) + 1
    return size


def _renew(fd: int, record: Record) -> bool:
    """Writes the record over itself, so that the next sync writes it to disk; says whether that was done.

    The process that wrote it may have been told that a sync of it failed. The system then takes its bytes for written,
    and would say nothing of them at a second sync.
    """
    try:
        step("pack.renew")
        written = os.pwritev(fd, [record.head, record.payload], record.offset)
    except OSError:
        return False
    return written == record.end - record.offset


def _read_exactly(fd: int, offset: int, length: int) -> bytes:
    """``length`` bytes at ``offset``, fewer only at the end of the file."""
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    parts = [data]
    got = len(data)
    while got < length and (data := os.pread(fd, length - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)
