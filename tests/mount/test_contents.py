"""What the undo log takes of the content of regular files, and what is asked of the control process."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cogfs.fsd import channel
from cogfs.fsd.spans import Spans
from cogfs.fsd.undolog import LOST, TOO_LARGE, Status, UndoLog, Was
from tests.mount.conftest import Start
from tests.support.boundary import Capturer, content_of, records, xattrs_of
from tests.support.worker_client import Call, MountedWorker, WorkerClient

_libc = ctypes.CDLL(None)

BLOCK = 4096


def data(blocks: int) -> bytes:
    """No two blocks are the same."""
    return b"".join(b"%08d" % number * (BLOCK // 8) for number in range(blocks))


def past(worker: MountedWorker, inode: int, boundary: int, contents: dict[bytes, bytes] | None = None) -> bytes:
    """Content of a file at a boundary; it is still there and has its number."""
    log = UndoLog(os.fsencode(worker.undo_log))
    log.refresh()
    was = log.inode(inode, boundary)
    if was is not None and not was.logged:
        log.close()
        return (contents or {})[was.hash]

    def now() -> bytes:
        return next(path.read_bytes() for path in worker.root.rglob("*") if path.lstat().st_ino == inode)

    content = now() if was is None else content_of(log.content(inode, boundary), now, contents or {})
    log.close()
    return content


def write_at(path: Path, offset: int, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, text, offset)
    finally:
        os.close(fd)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    other.rename(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "write": lambda path: write_at(path, 5000, b"changed"),
    "append": lambda path: write_at(path, path.stat().st_size, b"more"),
    "cut": lambda path: path.write_bytes(b"short"),
    "truncate": lambda path: os.truncate(path, 10),
    "grow": lambda path: os.truncate(path, 100_000),
    "unlink": lambda path: path.unlink(),
    "replace": replace,
    "chmod": lambda path: path.chmod(0),
    "rename": lambda path: path.rename(path.with_name("elsewhere")),
    "link": lambda path: path.with_name("again").hardlink_to(path),
    "utime": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, b"user.a", b"1"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 7])
def test_the_log_has_what_was_changed_and_nobody_waits(start: Start, change: str, size: int) -> None:
    worker = start(undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(4)[:size])
    os.setxattr(path, b"user.old", b"1")
    status, xattrs = (worker.root / "f").stat(), xattrs_of(worker.root / "f")
    with worker.connect() as client:
        boundary = client.boundary().generation
        CHANGES[change](path)
        log = UndoLog(os.fsencode(worker.undo_log))
        log.refresh()
        was = log.inode(status.st_ino, boundary)
        log.close()
        assert was is not None and was.logged and was.xattrs == xattrs
        assert (was.status.mode, was.status.size, was.status.nlink) == (status.st_mode, size, 1)
        if change in ("unlink", "replace"):
            content = UndoLog(os.fsencode(worker.undo_log))
            content.refresh()
            assert content.content(status.st_ino, boundary).complete
            content.close()
        assert past(worker, status.st_ino, boundary) == data(4)[:size]
        client.expect(channel.Sealed(boundary), channel.Done)
        assert not client.wanted
    assert worker.undo_log.stat().st_size == 0


def test_of_a_large_file_the_blocks_that_are_written(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(1000))
    inode = path.stat().st_ino
    with worker.connect() as client:
        boundary = client.boundary().generation
        write_at(path, 10 * BLOCK + 5, b"one")
        size = worker.undo_log.stat().st_size
        assert BLOCK < size < 2 * BLOCK
        write_at(path, 10 * BLOCK + 50, b"the same block")
        assert worker.undo_log.stat().st_size == size
        write_at(path, 10 * BLOCK - 2, b"that and the one before")
        assert worker.undo_log.stat().st_size < 3 * BLOCK
        write_at(path, 1000 * BLOCK - 1, b"the last byte, and more")
        write_at(path, 2000 * BLOCK, b"after the end")
        assert past(worker, inode, boundary) == data(1000)
        assert not client.listen(0)


def test_several_boundaries_and_one_that_was_none(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(100))
    inode = path.stat().st_ino
    states: dict[int, bytes] = {}
    with worker.connect() as client:
        for turn in range(3):
            states[client.boundary().generation] = (worker.root / "f").read_bytes()
            write_at(path, turn * BLOCK, b"turn %d" % turn)
            write_at(path, 50 * BLOCK, b"each turn %d" % turn)
        # Handed over, and the connection ends before it is committed.
        client.freeze()
    write_at(path, 70 * BLOCK, b"while nobody was there")
    with worker.connect() as client:
        client.reconnected(list(states))
        write_at(path, 70 * BLOCK + 100, b"the same block")
        write_at(path, 0, b"once more")
        write_at(path, 80 * BLOCK, b"another block")
        for boundary, state in states.items():
            assert past(worker, inode, boundary) == state
        # The last one alone is left.
        client.expect(channel.Sealed(sorted(states)[1]), channel.Done)
        write_at(path, 90 * BLOCK, b"again")
        last = max(states)
        assert past(worker, inode, last) == states[last]


def test_what_does_not_fit_is_captured_with_what_the_log_has(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(100))
    inode = path.stat().st_ino
    with worker.connect() as client, Capturer(client, worker.undo_log) as capturer:
        with capturer.lock:
            first = capturer.latest = client.boundary().generation
        write_at(path, 3 * BLOCK, b"first")
        with capturer.lock:
            second = capturer.latest = client.boundary().generation
        between = (worker.root / "f").read_bytes()
        write_at(path, 4 * BLOCK, b"second")
        path.unlink()
        assert [wanted.logged for wanted in capturer.asked] == [True]
        assert past(worker, inode, second, capturer.contents) == between
        assert past(worker, inode, first, capturer.contents) == data(100)


def test_what_could_not_be_captured_is_lost_and_not_something_else(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(100))
    inode = path.stat().st_ino
    with worker.connect() as client:
        boundary = client.boundary().generation
        write_at(path, 3 * BLOCK, b"first")
        call = Call(lambda: os.truncate(path, 0))
        wanted = client.next_wanted()
        assert call.parked()
        client.expect(channel.Preserve(wanted.ticket, None), channel.Done)
        assert call.wait() == 0
        log = UndoLog(os.fsencode(worker.undo_log))
        log.refresh()
        content = log.content(inode, boundary)
        assert content.base is not None and content.base.reason == LOST and not content.complete
        log.close()


def test_another_worker_goes_on_with_a_file_that_is_partly_logged(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), faulty=True, undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(100))
    inode = path.stat().st_ino
    with worker.connect() as client:
        boundary = client.boundary().generation
        write_at(path, 3 * BLOCK, b"by the first worker")
    assert worker.unmount() == 0
    worker.arguments += ("--boundary", str(boundary), "--generation", str(boundary + 1))
    worker.start()
    with worker.connect() as client:
        client.reconnected([boundary])
        write_at(path, 3 * BLOCK + 10, b"the same block, by the second")
        write_at(path, 7 * BLOCK, b"another one")
        assert past(worker, inode, boundary) == data(100)
        with Capturer(client, worker.undo_log) as capturer:
            capturer.latest = boundary
            path.unlink()
            assert [wanted.logged for wanted in capturer.asked] == [True]
        assert past(worker, inode, boundary, capturer.contents) == data(100)


def test_a_file_that_is_too_large_is_neither_logged_nor_captured(start: Start) -> None:
    worker = start("--content-at-once", str(2 * BLOCK), undo_log=True)
    path = worker.mountpoint / "f"
    path.write_bytes(data(100))
    with worker.connect() as client:
        frozen = client.freeze()
        client.expect(channel.Committed(frozen.generation, True, False, 99 * BLOCK), channel.Done)
        client.resume()
        write_at(path, 0, b"changed")
        path.unlink()
        assert not client.listen(0)
        _, inodes = records(worker.undo_log)
        assert [(record.was.reason, record.was.hash, record.was.logged) for record in inodes] == [
            (TOO_LARGE, b"", False)
        ]


def test_a_full_log_has_the_rest_captured(start: Start) -> None:
    worker = start("--log-limit", str(10 * BLOCK), undo_log=True)
    paths = [worker.mountpoint / str(number) for number in range(5)]
    for path in paths:
        path.write_bytes(data(4))
    inodes = [path.stat().st_ino for path in paths]
    with worker.connect() as client, Capturer(client, worker.undo_log) as capturer:
        with capturer.lock:
            boundary = capturer.latest = client.boundary().generation
        for path in paths:
            path.unlink()
        assert 0 < len(capturer.asked) < 5
        assert worker.undo_log.stat().st_size < 11 * BLOCK
        assert {past(worker, inode, boundary, capturer.contents) for inode in inodes} == {data(4)}


def test_a_full_disk_of_the_log_has_the_rest_captured(start: Start) -> None:
    worker = start(undo_log=True)
    directory = worker.undo_log.parent
    assert worker.unmount() == 0
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", directory], check=True)
    try:
        worker.start()
        path = worker.mountpoint / "f"
        path.write_bytes(data(16))
        inode = path.stat().st_ino
        with worker.connect() as client, Capturer(client, worker.undo_log) as capturer:
            with capturer.lock:
                boundary = capturer.latest = client.boundary().generation
            write_at(path, 3 * BLOCK, b"fits")
            path.unlink()
            assert [wanted.logged for wanted in capturer.asked] == [True]
            assert not client.broken
            assert past(worker, inode, boundary, capturer.contents) == data(16)
        assert worker.unmount() == 0
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def in_memory(fd: int, size: int) -> int:
    """How many pages of a file the system has in memory. Told by mincore(2): a read that may not wait fetches them."""
    with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start
    assert not failed
    return sum(page & 1 for page in pages)


def forgotten(path: Path, tries: int = 50) -> bool:
    """Have the system drop from memory what it has of a file; False if it keeps any.

    Asked again while it does, as of what the commit of a journal is still at.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(tries):
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not in_memory(fd, path.stat().st_size):
                return True
            time.sleep(0.1)
    finally:
        os.close(fd)
    return False


def test_content_that_is_not_in_memory_is_captured(start: Start) -> None:
    """The worker waits for no disk. What a quick disk has fetched by the time it is looked for is in memory."""
    worker = start(undo_log=True)
    with worker.connect() as client:
        for number in range(30):
            path = worker.mountpoint / f"f{number}"
            path.write_bytes(data(4))
            if not forgotten(worker.root / path.name):
                break
            boundary = client.boundary().generation
            call = Call(path.unlink)
            while call.parked() and not client.wanted:
                client.listen(0.1)
            if not client.wanted:
                assert call.wait() == 0
                client.expect(channel.Sealed(boundary), channel.Done)
                continue
            wanted = client.next_wanted()
            assert (wanted.paths, wanted.logged, call.parked()) == ([os.fsencode(path.name)], False, True)
            was = Was(status_of(client, os.fsencode(path.name)), hash=b"h" * 32)
            client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
            assert call.wait() == 0
            client.expect(channel.Sealed(boundary), channel.Done)
            return
    pytest.skip("the filesystem keeps everything in memory, or is as quick")


def status_of(client: WorkerClient, name: bytes) -> Status:
    return Status.of(os.stat(name, dir_fd=client.root_fd))


def test_spans() -> None:
    spans = Spans()
    assert spans.missing(3, 9) == [(3, 9)]
    spans.add(5, 7)
    spans.add(10, 12)
    spans.add(4, 4)
    assert spans.missing(0, 20) == [(0, 5), (7, 10), (12, 20)]
    assert (spans.missing(5, 7), spans.missing(6, 11)) == ([], [(7, 10)])
    spans.add(7, 10)
    assert spans.missing(0, 20) == [(0, 5), (12, 20)]
    spans.add(0, 30)
    assert (spans.missing(0, 30), spans.missing(29, 31)) == ([], [(30, 31)])
