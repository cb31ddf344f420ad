"""What is preserved of a boundary before it is changed, what waits for that, and what does not."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cogfs.fsd import channel
from cogfs.fsd.mount import syscalls
from cogfs.fsd.undolog import EntryWas, InodeWas, UndoLog, Was
from tests.mount.conftest import Start
from tests.support.boundary import Capturer, records, tells_of, was_of
from tests.support.worker_client import Call, MountedWorker, WorkerClient

HASH = b"h" * 32
#: All content of files is captured by the control process. What the log takes of it has its own tests.
CAPTURED = ("--content-at-once", "-1")


@pytest.fixture
def worker(start: Start) -> MountedWorker:
    return start("--exclude-name", ".git", *CAPTURED, undo_log=True)


def fill(directory: Path) -> None:
    """What the calls below change."""
    for name in ("f", "g", "h"):
        (directory / name).write_text(name)
    os.setxattr(directory / "f", b"user.old", b"1")
    (directory / "l").symlink_to("f")
    os.mkfifo(directory / "p")
    (directory / "e").mkdir()
    os.setxattr(directory / "e", b"user.old", b"2")
    (directory / "full").mkdir()
    (directory / "full" / "inside").write_text("inside")
    # So that these are among the names that changed, though there is nothing by them.
    for name in ("new", "d2"):
        (directory / name).touch()
        (directory / name).unlink()


def write(path: Path, flags: int = os.O_WRONLY) -> None:
    fd = os.open(path, flags)
    try:
        os.write(fd, b"changed")
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
    top = os.open(one.parent, os.O_RDONLY)
    try:
        syscalls.rename(top, os.fsencode(one.name), top, os.fsencode(other.name), syscalls.RENAME_EXCHANGE)
    finally:
        os.close(top)


class Case(NamedTuple):
    call: Callable[[Path], object]
    #: Names in the directory, and names of the inodes, that it changes.
    entries: tuple[str, ...]
    inodes: tuple[str, ...]


CASES: dict[str, Case] = {
    "create": Case(lambda d: (d / "new").touch(), ("new",), ()),
    "mkdir": Case(lambda d: (d / "new").mkdir(), ("new",), ()),
    "mknod": Case(lambda d: os.mkfifo(d / "new"), ("new",), ()),
    "symlink": Case(lambda d: (d / "new").symlink_to("f"), ("new",), ()),
    "link": Case(lambda d: os.link(d / "f", d / "new"), ("new",), ("f",)),
    "unlink": Case(lambda d: (d / "f").unlink(), ("f",), ("f",)),
    "unlink a link": Case(lambda d: (d / "l").unlink(), ("l",), ("l",)),
    "unlink a fifo": Case(lambda d: (d / "p").unlink(), ("p",), ("p",)),
    "rmdir": Case(lambda d: (d / "e").rmdir(), ("e",), ("e",)),
    "rename": Case(lambda d: os.rename(d / "f", d / "new"), ("f", "new"), ("f",)),
    "rename a link": Case(lambda d: os.rename(d / "l", d / "new"), ("l", "new"), ("l",)),
    "rename a directory": Case(lambda d: os.rename(d / "full", d / "new"), ("full", "new"), ("full",)),
    "rename over": Case(lambda d: os.rename(d / "f", d / "g"), ("f", "g"), ("f", "g")),
    "rename over a link": Case(lambda d: os.rename(d / "f", d / "l"), ("f", "l"), ("f", "l")),
    "rename over a directory": Case(lambda d: os.rename(d / "full", d / "e"), ("full", "e"), ("full", "e")),
    "exchange": Case(lambda d: exchange(d / "f", d / "g"), ("f", "g"), ("f", "g")),
    "exchange with a directory": Case(lambda d: exchange(d / "f", d / "full"), ("f", "full"), ("f", "full")),
    "write": Case(lambda d: write(d / "f"), (), ("f",)),
    "append": Case(lambda d: write(d / "f", os.O_WRONLY | os.O_APPEND), (), ("f",)),
    "cut on open": Case(lambda d: write(d / "f", os.O_WRONLY | os.O_TRUNC), (), ("f",)),
    "truncate": Case(lambda d: os.truncate(d / "f", 0), (), ("f",)),
    "chmod": Case(lambda d: (d / "f").chmod(0o600), (), ("f",)),
    "chmod a directory": Case(lambda d: (d / "e").chmod(0o700), (), ("e",)),
    "chown": Case(lambda d: os.chown(d / "f", 1, 1), (), ("f",)),
    "chown a link": Case(lambda d: os.lchown(d / "l", 1, 1), (), ("l",)),
    "utime": Case(lambda d: os.utime(d / "f", (1, 1)), (), ("f",)),
    "setxattr": Case(lambda d: os.setxattr(d / "f", b"user.a", b"x"), (), ("f",)),
    "setxattr of a directory": Case(lambda d: os.setxattr(d / "e", b"user.a", b"x"), (), ("e",)),
    "removexattr": Case(lambda d: os.removexattr(d / "f", b"user.old"), (), ("f",)),
}


class Expected:
    """What must be in the log, taken down before the call."""

    def __init__(self, directory: Path, case: Case, boundary: int) -> None:
        number = directory.stat().st_ino
        self.entries = set()
        for name in case.entries:
            path = directory / name
            there = path.lstat() if os.path.lexists(path) else None
            inode, kind = (there.st_ino, stat.S_IFMT(there.st_mode)) if there else (0, 0)
            self.entries.add((boundary, number, os.fsencode(name), inode, kind))
        #: Regular files, which the control process is asked for, and anything else.
        self.files = {(directory / name).stat().st_ino: directory / name for name in case.inodes if name in "fgh"}
        self.others = [was_of(directory / name) for name in case.inodes if name not in "fgh"]
        self.boundary = boundary
        self.captured: list[Was] = []

    def answer(self, client: WorkerClient, path: Path) -> None:
        """Answer one question for a file."""
        wanted = client.next_wanted()
        assert wanted.inode in self.files
        assert self.files[wanted.inode].name in {os.path.basename(os.fsdecode(name)) for name in wanted.paths}
        assert records(path) == ([], [InodeWas(self.boundary, was) for was in self.captured])
        was = was_of(self.files.pop(wanted.inode), HASH)
        client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
        self.captured.append(was)

    def check(self, path: Path) -> None:
        """That the log holds all this and nothing else, each once."""
        entries, inodes = records(path)
        found = [(entry.boundary, entry.directory, entry.name, entry.inode, entry.kind) for entry in entries]
        assert (len(found), set(found)) == (len(self.entries), self.entries)
        expected = [InodeWas(self.boundary, was) for was in (*self.captured, *self.others)]
        assert sorted(inodes, key=order) == sorted(expected, key=order)


def order(record: InodeWas) -> int:
    return record.was.status.inode


@pytest.mark.parametrize("unlisted", [False, True], ids=["listed", "unlisted"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_of_the_boundary_is_preserved_first(worker: MountedWorker, name: str, unlisted: bool) -> None:
    top, case = worker.mountpoint, CASES[name]
    with worker.connect() as client:
        (top / "d").mkdir()
        client.checkpoint()
        fill(top / "d")
        if unlisted:
            client.checkpoint()
        frozen = client.boundary(unlisted=unlisted)
        assert bool(frozen.directories) is not unlisted
        expected = Expected(worker.root / "d", case, frozen.generation)
        call = Call(lambda: case.call(top / "d"))
        for _ in range(len(expected.files)):
            assert call.parked()
            expected.answer(client, worker.undo_log)
        assert call.wait() == 0
        expected.check(worker.undo_log)
        assert client.wanted == []
        assert not client.listen(0.05)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_of_the_boundary_goes_on(worker: MountedWorker, client: WorkerClient, name: str) -> None:
    top = worker.mountpoint
    (top / "d").mkdir()
    fill(top / "d")
    client.checkpoint()
    (top / "of the boundary").touch()
    client.boundary()
    assert Call(lambda: CASES[name].call(top / "d")).wait() == 0
    assert records(worker.undo_log) == ([], [])
    assert not client.listen(0.05)


@pytest.mark.parametrize("name", CASES)
def test_what_was_made_since_goes_on(worker: MountedWorker, client: WorkerClient, name: str) -> None:
    top = worker.mountpoint
    boundary = client.boundary(unlisted=True).generation
    (top / "d").mkdir()
    fill(top / "d")
    assert Call(lambda: CASES[name].call(top / "d")).wait() == 0
    assert records(worker.undo_log) == ([EntryWas(boundary, top.stat().st_ino, b"d", 0, 0)], [])
    assert not client.listen(0.05)


@pytest.mark.parametrize("name", CASES)
def test_what_was_changed_since_is_preserved_once(worker: MountedWorker, client: WorkerClient, name: str) -> None:
    top = worker.mountpoint
    (top / "d").mkdir()
    fill(top / "d")
    client.checkpoint()
    client.boundary(unlisted=True)
    with Capturer(client, worker.undo_log) as capturer:
        for entry in ("f", "g", "h", "l", "p", "e", "full", "new"):
            path = top / "d" / entry
            if entry == "new":
                path.touch()
                path.unlink()
            else:
                os.rename(path, top / "d" / "d2")
                os.rename(top / "d" / "d2", path)
        before = records(worker.undo_log)
        asked = len(capturer.asked)
        assert (len(before[0]), len(before[1]), asked) == (9, 7, 3)
        assert Call(lambda: CASES[name].call(top / "d")).wait() == 0
        assert records(worker.undo_log) == before
        assert len(capturer.asked) == asked


def test_nothing_need_be_kept(worker: MountedWorker, client: WorkerClient) -> None:
    """The control process may answer that a file need not be preserved; it is not asked again for that boundary."""
    top = worker.mountpoint
    (top / "d").mkdir()
    (top / "f").write_text("x")
    first = client.boundary(unlisted=True)
    call = Call(lambda: write(top / "f"))
    wanted = client.next_wanted()
    client.expect(channel.SetReadOnly("so that the file is not changed"), channel.Done)
    client.expect(channel.Preserve(wanted.ticket, None), channel.Done)
    assert call.wait() == errno.EROFS
    client.expect(channel.SetReadOnly(""), channel.Done)
    assert Call(lambda: write(top / "f")).wait() == 0
    assert records(worker.undo_log)[1] == []
    assert client.expect(channel.Preserve(wanted.ticket, None), channel.Failed).errno == errno.ESTALE
    second = client.boundary()
    call = Call(lambda: write(top / "f"))
    wanted = client.next_wanted()
    answer = client.expect(channel.Preserve(wanted.ticket, was_of(worker.root / "d")), channel.Failed)
    assert answer.errno == errno.EINVAL
    was = was_of(worker.root / "f", HASH)
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert call.wait() == 0
    assert records(worker.undo_log)[1] == [InodeWas(second.generation, was)]
    assert second.generation > first.generation


def test_calls_that_fail_do_not_fill_the_log(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "full" / "inside").mkdir(parents=True)
    client.boundary(unlisted=True)
    for _ in range(3):
        assert Call((top / "full").rmdir).wait() == errno.ENOTEMPTY
    entries, inodes = records(worker.undo_log)
    assert (len(entries), len(inodes)) == (1, 1)


def test_two_boundaries(worker: MountedWorker, client: WorkerClient) -> None:
    """A record tells of the latest boundary, and of those before that have none."""
    top, log = worker.mountpoint, UndoLog(os.fsencode(worker.undo_log))
    for name in ("both", "second", "neither"):
        (top / name).write_text("at first")
    inodes = {name: (top / name).stat().st_ino for name in ("both", "second", "neither")}
    client.checkpoint()
    first = client.boundary(unlisted=True).generation
    with Capturer(client, worker.undo_log) as capturer:
        (top / "both").write_text("between")
        with capturer.lock:
            second = client.boundary().generation
        (top / "both").write_text("at last")
        (top / "second").write_text("at last")
        log.refresh()

        def content(name: str, boundary: int) -> bytes | None:
            was = log.inode(inodes[name], boundary)
            return None if was is None else capturer.contents[was.hash]

        assert [record.boundary for _, record in log._inodes[inodes["both"]]] == [first, second]
        assert [record.boundary for _, record in log._inodes[inodes["second"]]] == [second]
        assert (content("both", first), content("both", second)) == (b"at first", b"between")
        assert (content("second", first), content("second", second)) == (b"at first", b"at first")
        assert content("neither", first) is None
        with capturer.lock:
            client.expect(channel.Sealed(first), channel.Done)
        # Of the second alone: what it does not list is not asked for.
        (top / "neither").write_text("x")
        assert len(capturer.asked) == 3
        with capturer.lock:
            client.expect(channel.Sealed(second), channel.Done)
    assert worker.undo_log.stat().st_size == 0
    log.close()


def test_seal_lets_calls_go_on_and_clears_the_log(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    for name in ("f", "g"):
        (top / name).write_text("x")
    client.checkpoint()
    first = client.boundary(unlisted=True).generation
    (top / "of the second").touch()
    second = client.boundary().generation
    call = Call(lambda: write(top / "f"))
    late = Call(lambda: write(top / "of the second"))
    tickets = {client.next_wanted().ticket for _ in range(2)}
    assert call.parked()
    client.expect(channel.Sealed(first), channel.Done)
    # The second boundary does not list it.
    assert call.wait() == 0
    assert late.parked()
    client.expect(channel.Sealed(second), channel.Done)
    assert late.wait() == 0
    assert worker.undo_log.stat().st_size == 0
    for ticket in tickets:
        assert client.expect(channel.Preserve(ticket, None), channel.Failed).errno == errno.ESTALE
    assert client.stats().dirty_files == 2
    assert client.checkpoint().directories == []


def test_a_plain_commit_ends_boundaries(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "f").write_text("x")
    client.boundary(unlisted=True)
    (top / "new").touch()
    client.checkpoint()
    assert worker.undo_log.stat().st_size == 0
    assert Call(lambda: write(top / "f")).wait() == 0


def test_one_ticket_for_many_writers(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    descriptors = [os.open(top / "f", os.O_WRONLY) for _ in range(20)]
    client.boundary()
    was = was_of(worker.root / "f", HASH)
    calls = [Call(lambda fd=fd: os.pwrite(fd, b"after!", 0)) for fd in descriptors[:10]]  # type: ignore[misc]
    calls += [Call(lambda fd=fd: os.fchmod(fd, 0o600)) for fd in descriptors[10:]]  # type: ignore[misc]
    wanted = client.next_wanted()
    assert all(call.parked() for call in calls[::5])
    assert not client.listen(0.05)
    assert (worker.root / "f").read_text() == "before"
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert [call.wait() for call in calls] == [0] * 20
    assert (worker.root / "f").read_text() == "after!"
    assert records(worker.undo_log) == ([], [InodeWas(1, was)])
    for fd in descriptors:
        os.close(fd)


def test_reads_and_other_files_do_not_wait(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "d").mkdir()
    (top / "d" / "f").write_text("before")
    client.boundary()
    call = Call(lambda: os.truncate(top / "d" / "f", 0))
    wanted = client.next_wanted()
    reader = Call((top / "new").touch)
    assert reader.wait() == 0
    assert (worker.root / "d" / "f").read_text() == "before"
    assert Call(lambda: os.listdir(top)).wait() == 0
    writer = Call(lambda: os.close(os.open(top / "d" / "f", os.O_RDONLY)))
    assert writer.wait() == 0
    assert call.parked()
    client.expect(channel.Preserve(wanted.ticket, None), channel.Done)
    assert call.wait() == 0


# --- connections ------------------------------------------------------------------------------------------------------


def test_calls_wait_for_the_next_control_process(worker: MountedWorker) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    (top / "g").write_text("before")
    with worker.connect() as client:
        boundary = client.boundary().generation
        call = Call(lambda: write(top / "f"))
        first = client.next_wanted()
    unasked = Call(lambda: write(top / "g"))
    assert call.parked() and unasked.parked()
    with worker.connect() as client:
        assert client.welcome.boundaries == [boundary]
        assert not client.listen(0.1)
        client.reconnected([boundary])
        again = {wanted.inode: wanted for wanted in (client.next_wanted(), client.next_wanted())}
        assert again[first.inode] == first
        assert call.parked()
        for wanted in again.values():
            was = was_of(worker.root / os.fsdecode(wanted.paths[0]), HASH)
            client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
        assert (call.wait(), unasked.wait()) == (0, 0)
    assert len(records(worker.undo_log)[1]) == 2


def test_the_next_control_process_knows_of_no_boundary(worker: MountedWorker) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    with worker.connect() as client:
        boundary = client.boundary().generation
        call = Call(lambda: write(top / "f"))
        client.next_wanted()
    assert call.parked()
    with worker.connect() as client:
        assert client.welcome.boundaries == [boundary]
        client.reconnected([])
        assert call.wait() == 0
        assert worker.undo_log.stat().st_size == 0


@pytest.mark.parametrize("boundary", [True, False])
def test_handed_over_and_nobody_knows(worker: MountedWorker, boundary: bool) -> None:
    """The connection ends between the hand-over and its commit: all is protected until it is known what it was."""
    top = worker.mountpoint
    for name in ("before", "listed"):
        (top / name).write_text("x")
    with worker.connect() as client:
        client.checkpoint()
        write(top / "listed")
        generation = client.freeze().generation
        parked = Call((top / "new").touch)
        assert parked.parked()
    assert parked.wait() == 0
    listed, other = Call(lambda: write(top / "listed")), Call(lambda: write(top / "before"))
    assert listed.parked() and other.parked()
    with worker.connect() as client:
        assert client.welcome.boundaries == [generation]
        assert client.expect(channel.Freeze(), channel.Failed).errno == errno.EINVAL
        client.reconnected([generation] if boundary else [])
        # What it does not list is not of it.
        assert other.wait() == 0
        if boundary:
            wanted = [client.next_wanted() for _ in range(2)]
            assert listed.parked()
            for each in wanted:
                client.expect(channel.Preserve(each.ticket, None), channel.Done) if each.paths == [b"listed"] else None
        assert listed.wait() == 0
        frozen = client.checkpoint()
        assert frozen.complete
        names = sorted(path for file in frozen.files for path in file.paths)
        assert names == [b"before", b"listed", b"new"]
        assert [directory.names for directory in frozen.directories] == [[b"new"]]


def test_taken_back_after_the_end_of_a_connection(worker: MountedWorker) -> None:
    top = worker.mountpoint
    (top / "f").write_text("x")
    with worker.connect() as client:
        client.checkpoint()
        (top / "one").touch()
        client.freeze()
    (top / "two").touch()
    with worker.connect() as client:
        client.reconnected([])
        assert client.freeze().directories[0].names == [b"one", b"two"]
        client.resume()


def test_what_a_boundary_that_has_failed_lists_is_protected_for_the_next(worker: MountedWorker) -> None:
    """As long as there is a next one: of three, the first and the last are no more when there is a connection again."""
    top = worker.mountpoint
    with worker.connect() as client:
        numbers = []
        for name in ("a", "b", "c"):
            (top / name).write_text("x")
            numbers.append(client.boundary().generation)
    with worker.connect() as client:
        assert client.welcome.boundaries == numbers
        client.reconnected([numbers[1], 99])
    with worker.connect() as client:
        assert client.welcome.boundaries == numbers[:2]
        client.reconnected([numbers[1]])
        assert Call(lambda: write(top / "c")).wait() == 0
        for name in ("a", "b"):
            call = Call(lambda name=name: write(top / name))  # type: ignore[misc]
            client.expect(channel.Preserve(client.next_wanted().ticket, None), channel.Done)
            assert call.wait() == 0
        client.expect(channel.Sealed(numbers[1]), channel.Done)
    with worker.connect() as client:
        assert client.welcome.boundaries == []


def test_a_second_connection_finds_what_the_first_had_under_way(worker: MountedWorker, client: WorkerClient) -> None:
    (worker.mountpoint / "f").write_text("x")
    frozen = client.freeze()
    with worker.connect() as second:
        assert second.welcome.boundaries == [frozen.generation]
        assert client.socket.recv(10) == b""
        second.reconnected([])
        assert second.freeze().directories[0].names == [b"f"]
        second.resume()


def test_what_cannot_become_a_boundary(start: Start) -> None:
    plain = start()
    with plain.connect() as client:
        frozen = client.freeze()
        committed = channel.Committed(frozen.generation, True)
        assert client.expect(committed, channel.Failed).errno == errno.EINVAL
        client.resume()
    worker = start(*CAPTURED, undo_log=True)
    with worker.connect() as client:
        frozen = client.freeze()
        committed = channel.Committed(frozen.generation, True)
        client.resume()
        assert client.expect(committed, channel.Failed).errno == errno.EINVAL  # it was taken back
        frozen = client.freeze()
        committed = channel.Committed(frozen.generation, True)
        client.expect(channel.Guard("r", [], [], []), channel.Done)
        assert client.expect(committed, channel.Failed).errno == errno.EINVAL  # calls went on
        client.expect(channel.Committed(frozen.generation), channel.Done)
        client.expect(channel.Unguard(), channel.Done)
        frozen = client.freeze()
        for _ in range(2):
            client.expect(channel.Committed(frozen.generation, True), channel.Done)
        client.resume()
        client.expect(channel.Sealed(99), channel.Done)


# --- freeze, guard, read-only -----------------------------------------------------------------------------------------


def test_a_freeze_while_calls_wait(worker: MountedWorker, client: WorkerClient) -> None:
    """They have not begun. What is preserved then tells of the new boundary, and so of the old one."""
    top = worker.mountpoint
    (top / "f").write_text("before")
    client.boundary()
    call = Call(lambda: write(top / "f"))
    wanted = client.next_wanted()
    assert call.parked()
    frozen = client.freeze()
    assert frozen.files == []
    client.expect(channel.Committed(frozen.generation, True), channel.Done)
    was = was_of(worker.root / "f", HASH)
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert call.parked()
    assert (worker.root / "f").read_text() == "before"
    client.resume()
    assert call.wait() == 0
    assert records(worker.undo_log)[1] == [InodeWas(frozen.generation, was)]


def test_a_guard_lets_waiting_calls_fail(worker: MountedWorker, client: WorkerClient) -> None:
    """Such a call may hold a lock of the kernel's that the restore needs."""
    top = worker.mountpoint
    (top / "f").write_text("before")
    boundary = client.boundary().generation
    call = Call((top / "f").unlink)
    wanted = client.next_wanted()
    assert call.parked()
    client.expect(channel.Guard("r", [threading.get_native_id()], [top.stat().st_ino], []), channel.Done)
    assert call.wait() == errno.EBUSY
    # What the owner changes is preserved like anything else.
    was = was_of(worker.root / "f", HASH)
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    (top / "f").unlink()
    assert records(worker.undo_log)[1] == [InodeWas(boundary, was)]
    client.expect(channel.Unguard(), channel.Done)


def test_the_owner_of_a_guard_waits_too(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    client.boundary()
    owner: list[int] = []
    ready, go = threading.Event(), threading.Event()

    def restore() -> None:
        owner.append(threading.get_native_id())
        ready.set()
        go.wait(180)
        (top / "f").unlink()

    call = Call(restore)
    ready.wait(180)
    client.expect(channel.Guard("r", owner, [top.stat().st_ino], []), channel.Done)
    go.set()
    wanted = client.next_wanted()
    assert call.parked()
    client.expect(channel.Preserve(wanted.ticket, was_of(worker.root / "f", HASH)), channel.Done)
    assert call.wait() == 0
    client.expect(channel.Unguard(), channel.Done)


def test_read_only_while_a_call_waits(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    client.boundary()
    call = Call(lambda: write(top / "f"))
    wanted = client.next_wanted()
    client.expect(channel.SetReadOnly("why not"), channel.Done)
    client.expect(channel.Preserve(wanted.ticket, None), channel.Done)
    assert call.wait() == errno.EROFS
    client.expect(channel.SetReadOnly(""), channel.Done)


def test_the_time_of_a_freeze(worker: MountedWorker, client: WorkerClient) -> None:
    """What changed before has no later ctime, and what changes later has no earlier one."""
    path = worker.mountpoint / "f"
    for number in range(50):
        path.write_text("before")
        before = (worker.root / "f").stat().st_ctime_ns
        frozen = client.checkpoint()
        path.write_text("after")
        assert before <= frozen.frozen_ns <= (worker.root / "f").stat().st_ctime_ns, number


# --- what is the same inode -------------------------------------------------------------------------------------------


def test_below_a_directory_that_was_moved(worker: MountedWorker, client: WorkerClient) -> None:
    """A directory can be moved without a look at what is below it, which goes by inode."""
    top = worker.mountpoint
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "f").write_text("x")
    boundary = client.boundary(unlisted=True).generation
    was = was_of(worker.root / "a" / "b" / "f", HASH)
    directory = (top / "a" / "b").stat().st_ino
    assert Call(lambda: os.rename(top / "a", top / "z")).wait() == 0
    call = Call((top / "z" / "b" / "f").unlink)
    wanted = client.next_wanted()
    assert (wanted.inode, wanted.paths) == (was.status.inode, [b"z/b/f"])
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert call.wait() == 0
    entries, inodes = records(worker.undo_log)
    assert EntryWas(boundary, directory, b"f", was.status.inode, stat.S_IFREG) in entries
    assert InodeWas(boundary, was) in inodes


def test_a_file_with_two_names_is_preserved_once(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "one").write_text("x")
    os.link(top / "one", top / "two")
    boundary = client.boundary().generation
    was = was_of(worker.root / "one", HASH)
    call = Call(lambda: write(top / "two"))
    wanted = client.next_wanted()
    assert sorted(wanted.paths) == [b"one", b"two"]
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert call.wait() == 0
    assert Call(lambda: write(top / "one")).wait() == 0
    assert Call((top / "one").unlink).wait() == 0
    entries, inodes = records(worker.undo_log)
    assert [entry.name for entry in entries] == [b"one"]
    assert inodes == [InodeWas(boundary, was)]


def test_an_open_file_that_is_removed(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "f").write_text("before")
    (top / "gone").write_text("x")
    early = os.open(top / "gone", os.O_WRONLY)
    (top / "gone").unlink()
    fd = os.open(top / "f", os.O_WRONLY)
    boundary = client.boundary(unlisted=True).generation
    os.write(early, b"of no boundary")
    was = was_of(worker.root / "f", HASH)
    call = Call((top / "f").unlink)
    client.expect(channel.Preserve(client.next_wanted().ticket, was), channel.Done)
    assert call.wait() == 0
    os.write(fd, b"after")
    assert records(worker.undo_log)[1] == [InodeWas(boundary, was)]
    client.boundary(unlisted=True)
    os.write(fd, b"again")
    assert not client.listen(0.05)
    os.close(fd)
    os.close(early)


def test_what_was_made_behind_the_mount(worker: MountedWorker, client: WorkerClient) -> None:
    """A file that the kernel takes for absent: it is made by create, which cuts it."""
    top = worker.mountpoint
    assert not (top / "f").exists()
    (worker.root / "f").write_text("behind")
    boundary = client.boundary(unlisted=True).generation
    was = was_of(worker.root / "f", HASH)
    call = Call(lambda: (top / "f").write_text("through"))
    wanted = client.next_wanted()
    assert call.parked()
    assert (worker.root / "f").read_text() == "behind"
    client.expect(channel.Preserve(wanted.ticket, was), channel.Done)
    assert call.wait() == 0
    entries, inodes = records(worker.undo_log)
    assert entries == [EntryWas(boundary, top.stat().st_ino, b"f", was.status.inode, stat.S_IFREG)]
    assert inodes == [InodeWas(boundary, was)]


def test_a_tree_is_removed(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    for directory in ("a", "a/b", "a/c"):
        (top / directory).mkdir()
        for name in range(30):
            (top / directory / str(name)).write_text(f"{directory} {name}")
    client.boundary()
    with Capturer(client, worker.undo_log) as capturer:
        shutil.rmtree(top / "a")
        assert len(capturer.asked) == 90
        assert sorted(capturer.contents.values())[0] == b"a 0"
    entries, inodes = records(worker.undo_log)
    assert (len(entries), len(inodes)) == (93, 93)


@pytest.mark.parametrize("unlisted", [False, True], ids=["listed", "unlisted"])
def test_the_number_of_a_removed_directory_is_given_to_a_new_one(
    worker: MountedWorker, client: WorkerClient, unlisted: bool
) -> None:
    """The entries of the new one must not be taken for entries of the old one."""
    top = worker.mountpoint
    client.checkpoint()
    (top / "old").mkdir()
    number = (top / "old").stat().st_ino
    boundary = client.boundary(unlisted=unlisted).generation
    (top / "old").rmdir()
    for attempt in range(200):
        new = top / f"new{attempt}"
        new.mkdir()
        (new / "entry").touch()
        if new.stat().st_ino == number:
            break
    else:
        pytest.skip("this filesystem does not give numbers out again soon")
    (new / "entry").unlink()
    (new / "entry").touch()
    entries, _ = records(worker.undo_log)
    assert [entry for entry in entries if entry.directory == number] == [EntryWas(boundary, number, b"entry", 0, 0)]
    assert {entry.directory for entry in entries} == {number, top.stat().st_ino}


# --- excluded places --------------------------------------------------------------------------------------------------


def test_excluded_places_are_not_preserved(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / ".git").mkdir()
    (top / ".git" / "f").write_text("x")
    client.boundary(unlisted=True)
    (top / ".git" / "f").write_text("y")
    (top / ".git" / "g").touch()
    (top / ".git").chmod(0o700)
    assert records(worker.undo_log) == ([], [])
    assert not client.listen(0.05)


def test_into_an_excluded_place(worker: MountedWorker, client: WorkerClient) -> None:
    """A directory waits until nothing below it is needed; a file is preserved."""
    top = worker.mountpoint
    for path in (".git", "d", "e"):
        (top / path).mkdir()
    (top / "d" / "f").write_text("x")
    boundary = client.boundary().generation
    file = Call(lambda: os.rename(top / "d" / "f", top / ".git" / "f"))
    client.expect(channel.Preserve(client.next_wanted().ticket, None), channel.Done)
    assert file.wait() == 0
    calls = [Call(lambda: os.rename(top / "d", top / ".git" / "d"))]
    assert calls[0].parked()
    client.expect(channel.Sealed(boundary), channel.Done)
    assert calls[0].wait() == 0
    assert Call(lambda: os.rename(top / "e", top / "e2")).wait() == 0


def test_exchanged_with_what_is_in_an_excluded_place(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    for path in ("x/.git", "x/d"):
        (top / path).mkdir(parents=True)
    boundary = client.boundary().generation
    call = Call(lambda: exchange(top / "x" / "d", top / "x" / ".git"))
    assert call.parked()
    client.expect(channel.Sealed(boundary), channel.Done)
    assert call.wait() == 0


def test_another_filesystem_below_the_root(worker: MountedWorker) -> None:
    """Snapshots do not go there, and its inode numbers may be those of other files."""
    assert worker.unmount() == 0
    directory = worker.root / "other"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", directory], check=True)
    try:
        (directory / "f").write_text("x")
        worker.start()
        with worker.connect() as client:
            client.boundary(unlisted=True)
            (worker.mountpoint / "other" / "f").write_text("y")
            (worker.mountpoint / "other" / "new").touch()
            os.rename(worker.mountpoint / "other" / "f", worker.mountpoint / "other" / "new")
            assert records(worker.undo_log) == ([], [])
        assert worker.unmount() == 0
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_out_of_an_excluded_place_makes_it_unlisted(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / ".git" / "d").mkdir(parents=True)
    (top / "f").write_text("x")
    client.checkpoint()
    os.rename(top / ".git" / "d", top / "d")
    frozen = client.boundary()
    assert [directory.subtree for directory in frozen.directories if directory.path == b"d"] == [True]
    call = Call(lambda: write(top / "f"))
    client.expect(channel.Preserve(client.next_wanted().ticket, None), channel.Done)
    assert call.wait() == 0


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(start: Start) -> Iterator[MountedWorker]:
    """A worker whose undo log is on a filesystem of one page or so."""
    worker = start(*CAPTURED, undo_log=True)
    directory = worker.undo_log.parent
    assert worker.unmount() == 0
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", directory], check=True)
    try:
        worker.start()
        yield worker
    finally:
        worker.unmount()
        subprocess.run(["umount", directory], check=True)


def test_a_full_disk_ends_protection_and_not_the_work(small: MountedWorker) -> None:
    top, log = small.mountpoint, small.undo_log
    for name in ("f", "g"):
        (top / name).write_text("x")
    with small.connect() as client:
        assert (client.welcome.boundaries, client.welcome.broken) == ([], "")
        given_up = client.boundary().generation
        waiting = Call(lambda: write(top / "g"))
        client.next_wanted()
        for number in range(200):
            (top / ("n" * 150 + str(number))).touch()
        assert client.listen(5) or client.broken
        assert client.broken and os.strerror(errno.ENOSPC) in client.broken[0]
        assert waiting.wait() == 0
        assert Call(lambda: write(top / "f")).wait() == 0
        records(log)  # can be read to its end
    with small.connect() as client:
        assert client.welcome.boundaries == []
        assert client.welcome.broken == client.broken[0] if client.broken else client.welcome.broken
        boundary = client.boundary().generation
        assert records(log) == ([], [])
        assert (tells_of(log, given_up), tells_of(log, boundary)) == (False, True)
        call = Call(lambda: write(top / "f"))
        was = was_of(small.root / "f", HASH)
        client.expect(channel.Preserve(client.next_wanted().ticket, was), channel.Done)
        assert call.wait() == 0
        assert records(log)[1] == [InodeWas(boundary, was)]
    with small.connect() as client:
        assert client.welcome.broken == ""
        client.reconnected([])


def test_a_full_disk_when_a_file_is_preserved(small: MountedWorker) -> None:
    top = small.mountpoint
    (top / "f").write_text("x")
    with small.connect() as client:
        client.boundary()
        call = Call(lambda: write(top / "f"))
        wanted = client.next_wanted()
        (small.undo_log.parent / "filler").write_bytes(b"x" * 8192)
        with contextlib.suppress(OSError):
            (small.undo_log.parent / "filler2").write_bytes(b"x" * 16384)
        was = Was(was_of(small.root / "f").status, ((b"user.large", b"x" * 60000),))
        assert client.expect(channel.Preserve(wanted.ticket, was), channel.Failed).errno == errno.ENOSPC
        assert call.wait() == 0
        assert client.broken
        os.unlink(small.undo_log.parent / "filler")
        os.unlink(small.undo_log.parent / "filler2")


def test_a_killed_worker_leaves_its_log(worker: MountedWorker) -> None:
    top, log = worker.mountpoint, worker.undo_log
    for name in ("f", "g"):
        (top / name).write_text(name)
    top_inode = top.stat().st_ino
    with worker.connect() as client:
        boundary = client.boundary().generation
        (top / "new").touch()
        call = Call(lambda: write(top / "f"))
        was = was_of(worker.root / "f", HASH)
        client.expect(channel.Preserve(client.next_wanted().ticket, was), channel.Done)
        assert call.wait() == 0
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait()
    subprocess.run(["umount", "-l", worker.mountpoint], check=True)
    with log.open("ab") as file:  # as a write that did not come to its end
        file.write(b"\0\0\1\0torn")
    expected = ([EntryWas(boundary, top_inode, b"new", 0, 0)], [InodeWas(boundary, was)])
    assert records(log) == expected
    worker.arguments += ("--generation", str(boundary + 5), "--boundary", str(boundary))
    worker.start()
    with worker.connect() as client:
        assert client.welcome.boundaries == [boundary]
        client.reconnected([boundary])
        # All is of a boundary of which this worker does not know what it lists.
        call = Call(lambda: write(top / "g"))
        later = was_of(worker.root / "g", HASH)
        client.expect(channel.Preserve(client.next_wanted().ticket, later), channel.Done)
        assert call.wait() == 0
        assert records(log) == (expected[0], [*expected[1], InodeWas(boundary, later)])
        frozen = client.freeze()
        assert (frozen.generation, frozen.complete) == (boundary + 5, False)
        client.expect(channel.Committed(frozen.generation, True), channel.Done)
        client.resume()
        client.expect(channel.Sealed(boundary), channel.Done)
        assert log.stat().st_size > 0
        client.expect(channel.Committed(boundary), channel.Done)
        client.expect(channel.Sealed(frozen.generation), channel.Done)
        assert log.stat().st_size == 0


def test_the_worker_ends_while_calls_wait(start: Start) -> None:
    worker = start(*CAPTURED, faulty=True, undo_log=True)
    (worker.mountpoint / "f").write_text("x")
    with worker.connect() as client:
        client.boundary()
        call = Call(lambda: write(worker.mountpoint / "f"))
        client.next_wanted()
        subprocess.run(["umount", "-f", worker.mountpoint], check=False)
        assert call.wait() in (errno.ECONNABORTED, errno.ENOTCONN, errno.EIO)
    assert (worker.root / "f").read_text() == "x"
    subprocess.run(["umount", "-l", worker.mountpoint], check=False)
    assert worker.process.wait(180) == 0
    assert (worker.root / "f").read_text() == "x"


def test_a_log_of_no_boundary_is_cleared_at_the_start(worker: MountedWorker) -> None:
    assert worker.unmount() == 0
    worker.undo_log.write_bytes(b"x" * 100)
    worker.start()
    assert worker.undo_log.stat().st_size == 0


def test_a_log_that_cannot_be_opened(worker: MountedWorker) -> None:
    """The mount serves; there can be no boundaries."""
    assert worker.unmount() == 0
    worker.undo_log.unlink()
    worker.undo_log.mkdir()
    worker.arguments += ("--generation", "5", "--boundary", "4")
    worker.start()
    with worker.connect() as client:
        assert client.welcome.boundaries == []
        assert os.strerror(errno.EISDIR) in client.welcome.broken
        frozen = client.freeze()
        assert client.expect(channel.Committed(frozen.generation, True), channel.Failed).errno == errno.EISDIR
        client.resume()
        worker.undo_log.rmdir()
        client.boundary()


@pytest.mark.parametrize(
    "arguments", [("--boundary", "1"), ("--generation", "0"), ("--generation", "3", "--boundary", "3")]
)
def test_impossible_numbers(start: Start, arguments: tuple[str, ...]) -> None:
    worker = start(*CAPTURED, faulty=True, undo_log=True)
    assert worker.unmount() == 0
    worker.arguments += arguments
    process, ready = worker.spawn()
    assert (process.wait(180), ready["ok"], ready["errno"]) == (1, False, errno.EINVAL)


# --- questions --------------------------------------------------------------------------------------------------------


def test_locate(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "f").write_text("x")
    (top / "gone").touch()
    numbers = [path.stat().st_ino for path in (top, top / "a" / "b", top / "a" / "b" / "f", top / "gone")]
    kept = os.open(top / "gone", os.O_RDONLY)
    (top / "gone").unlink()
    os.rename(top / "a", top / "z")
    found = client.expect(channel.Locate([*numbers, 1 << 60]), channel.Located)
    assert found.paths == [b"", b"z/b", b"z/b/f", None, None]
    os.close(kept)


def test_quiet_files(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint

    def quiet(seconds: float = 0.0, limit: int = 10) -> list[bytes]:
        found = client.expect(channel.ListQuiet(seconds, limit), channel.Quiet).files
        assert all(inode == (worker.root / os.fsdecode(path)).stat().st_ino for inode, path in found)
        return [path for _, path in found]

    (top / "d").mkdir()
    for name in ("a", "d/b", "c", "cut"):
        (top / name).write_text("x")
    client.checkpoint()
    assert quiet() == []
    (top / "a").chmod(0o600)
    (top / "d" / "b").write_text("y")
    (top / "c").write_text("y")
    os.truncate(top / "cut", 0)
    (top / "new").touch()
    (top / "removed").write_text("x")
    (top / "removed").unlink()
    with (top / "c").open("r+") as writer:
        assert quiet(60) == []
        deadline = time.monotonic() + 180
        found = quiet(limit=2)
        while len(found) < 3 and time.monotonic() < deadline:  # the kernel releases in the background
            found += quiet(limit=1)
        assert sorted(found) == [b"cut", b"d/b", b"new"]
        assert quiet() == []
        writer.write("z")
    deadline = time.monotonic() + 180
    while not (found := quiet()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == [b"c"]
    # What was handed over is to be captured anyway, and what was taken back is not.
    (top / "a").write_text("y")
    time.sleep(0.1)
    client.freeze()
    assert quiet() == []
    client.resume()
    assert quiet() == [b"a"]


def test_names_of_a_new_directory_are_all_known(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    client.checkpoint()
    (top / "new" / "sub").mkdir(parents=True)
    for name in ("x", "y"):
        (top / "new" / name).touch()
    (top / "new" / "y").unlink()
    os.rename(top / "new", top / "moved")
    client.freeze()
    client.resume()
    (top / "moved" / "z").touch()
    found = {directory.path: directory for directory in client.checkpoint().directories}
    assert (found[b"moved"].names, found[b"moved"].made) == ([b"sub", b"x", b"y", b"z"], True)
    assert (found[b"moved/sub"].names, found[b"moved/sub"].made) == ([], True)
    assert (found[b""].names, found[b""].made) == ([b"moved", b"new"], False)
    (top / "moved" / "late").touch()
    found = {directory.path: directory for directory in client.checkpoint().directories}
    assert (found[b"moved"].names, found[b"moved"].made) == ([b"late"], False)


def test_a_storm_of_changes_while_files_are_captured(worker: MountedWorker, client: WorkerClient) -> None:
    """Many processes change many files of a boundary: each is preserved as it was."""
    top = worker.mountpoint
    for number in range(200):
        (top / f"f{number}").write_text(f"before {number}")
    inodes = {(top / f"f{number}").stat().st_ino: f"before {number}".encode() for number in range(200)}
    boundary = client.boundary().generation
    code = """
import os, random, sys
top, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
for _ in range(300):
    path = f"{top}/f{random.randrange(200)}"
    try:
        action = random.randrange(4)
        if action == 0:
            with open(path, "w") as file: file.write("after")
        elif action == 1: os.unlink(path)
        elif action == 2: os.rename(path, f"{top}/f{random.randrange(200)}")
        else: os.chmod(path, 0o600)
    except FileNotFoundError: pass
"""
    with Capturer(client, worker.undo_log) as capturer:
        storms = [subprocess.Popen([sys.executable, "-c", code, top, str(seed)]) for seed in range(3)]
        assert [storm.wait(180) for storm in storms] == [0, 0, 0]
        log = UndoLog(os.fsencode(worker.undo_log))
        log.refresh()
        now = {path.stat().st_ino: path.read_bytes() for path in worker.root.iterdir()}
        for inode, content in inodes.items():
            was = log.inode(inode, boundary)
            assert (now[inode] if was is None else capturer.contents[was.hash]) == content
        assert len(capturer.asked) == len({wanted.inode for wanted in capturer.asked})
        log.close()
