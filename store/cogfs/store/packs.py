"""The pack files: appended to, synced, read, scanned. Knows records, not objects, and not the index.

Files are ``<8 hexadecimal digits>.pack`` in one directory. One pack at a time grows; it is left for a new one when the
next record would make it larger than the bound. What lies beyond the end that the index knows is nobody's.

Locks: ``_append_lock`` covers the growing pack and the set of packs that wait for a sync; ``_files_lock`` covers the
open descriptors. Neither is held across a sync, and the second never across any call of the system but close.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cogfs.store.errors import Corrupt, StoreError, of_system, translated
from cogfs.store.files import sync_directory
from cogfs.store.records import (
    PACK_HEADER_SIZE,
    RECORD_HEADER_SIZE,
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
_TORN = "a record is cut off"


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
        self._limit = limit
        self._append_lock = threading.Lock()
        self._files_lock = threading.Lock()
        self._files: OrderedDict[int, _File] = OrderedDict()
        #: The pack that grows: number and end; number 0 when the next record starts a new one.
        self._number = 0
        self._end = 0
        self._next_number = 1
        #: Bytes in all packs.
        self._bytes = 0
        #: Ends of the packs that hold bytes that are not synced.
        self._unsynced: dict[int, int] = {}
        self._directory_unsynced = False
        self._closed = False

    # --- start and end

    def settle(self, ends: dict[int, int]) -> None:
        """Makes the files what the index says: ``ends`` has the end of each pack that holds something.

        What is beyond is cut off, files that are not named are removed. A pack that is missing or too short is left as
        it is, for reads to report, and does not grow. Called once, before anything else.
        """
        with translated("looking at its packs"):
            sizes = self._sizes()
            for number, size in sizes.items():
                if number not in ends:
                    step("pack.discard")
                    os.unlink(self._path(number))
                elif size > ends[number]:
                    step("pack.truncate")
                    os.truncate(self._path(number), ends[number])
        self._next_number = max(ends, default=0) + 1
        self._bytes = sum(ends.values())
        if ends:
            last = max(ends)
            if sizes.get(last, 0) >= ends[last]:
                self._number, self._end = last, ends[last]

    def size(self) -> int:
        """Bytes in all packs."""
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

    def append(self, header: bytes, payload: bytes | memoryview) -> tuple[int, int]:
        """Appends one record and returns where it is: number of the pack, offset of the header in it.

        It can be read at once, and is durable after the next ``sync``. NoSpace and StoreIO leave everything as it was.
        """
        length = len(header) + len(payload)
        with self._append_lock:
            try:
                if not self._number or self._end + length > max(self._limit, PACK_HEADER_SIZE + length):
                    self._start_pack()
                number, offset = self._number, self._end
                step("pack.append")
                with self._open(number) as fd:
                    self._write(fd, offset, header, payload)
                step("pack.appended")
            except OSError as error:
                raise of_system(error, "writing a pack") from error
            self._end = offset + length
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
            os.unlink(path)
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
                size = os.fstat(fd).st_size
                check_pack_header(_read_exactly(fd, 0, PACK_HEADER_SIZE), number)
                offset = PACK_HEADER_SIZE
                while offset < size:
                    header = parse_record_header(_read_exactly(fd, offset, RECORD_HEADER_SIZE))
                    end = offset + RECORD_HEADER_SIZE + header.stored
                    if end > size:
                        raise ValueError(_TORN)
                    payload = _read_exactly(fd, offset + RECORD_HEADER_SIZE, header.stored)
                    if zlib.crc32(payload) != header.checksum:
                        raise ValueError("the payload of a record is damaged")
                    yield offset, header
                    offset = end
        except ValueError as error:
            raise Corrupt(f"pack {number:08x} of the store is damaged: {error}") from error
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

    def _keep(self, number: int, file: _File) -> None:
        self._files[number] = file
        if len(self._files) > _OPEN_FILES:
            _, oldest = self._files.popitem(last=False)
            oldest.dropped = True
            if not oldest.users:
                os.close(oldest.fd)


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
