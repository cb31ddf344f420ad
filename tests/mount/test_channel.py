"""The channel over the real socket: freeze, guard, read-only, handles, and peers that misbehave."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogfs.fsd import channel
from tests.mount.conftest import Start
from tests.support.worker_client import Call, MountedWorker, WorkerClient


@pytest.fixture
def files(worker: MountedWorker) -> Iterator[MountedWorker]:
    """A worker with a directory of its own for each mutating call, since a parked one keeps its directory locked."""
    for name in ("create", "mkdir", "unlink", "rmdir", "rename", "over", "link", "symlink", "mknod", "exchange"):
        directory = worker.mountpoint / name
        directory.mkdir()
        (directory / "f").write_text("content")
        (directory / "g").write_text("other")
        (directory / "d").mkdir()
    for name in ("write", "truncate", "chmod", "utime", "chown", "setxattr", "removexattr", "trunc"):
        (worker.mountpoint / name).write_text("content")
    os.setxattr(worker.mountpoint / "removexattr", b"user.a", b"")
    yield worker


def mutations(top: Path) -> dict[str, Callable[[], object]]:
    """Each mutating call."""
    writer = os.open(top / "write", os.O_WRONLY)
    return {
        "create": (top / "create" / "new").touch,
        "mkdir": (top / "mkdir" / "new").mkdir,
        "unlink": (top / "unlink" / "f").unlink,
        "rmdir": (top / "rmdir" / "d").rmdir,
        "rename": lambda: os.rename(top / "rename" / "f", top / "rename" / "new"),
        "over": lambda: os.rename(top / "over" / "f", top / "over" / "g"),
        "link": lambda: os.link(top / "link" / "f", top / "link" / "new"),
        "symlink": lambda: os.symlink("x", top / "symlink" / "new"),
        "mknod": lambda: os.mkfifo(top / "mknod" / "new"),
        "write": lambda: (os.write(writer, b"changed"), os.close(writer)),
        "truncate": lambda: os.truncate(top / "truncate", 2),
        "chmod": lambda: (top / "chmod").chmod(0o600),
        "utime": lambda: os.utime(top / "utime", (1, 1)),
        "chown": lambda: os.chown(top / "chown", 1, 1),
        "setxattr": lambda: os.setxattr(top / "setxattr", b"user.a", b""),
        "removexattr": lambda: os.removexattr(top / "removexattr", b"user.a"),
        "trunc": lambda: os.close(os.open(top / "trunc", os.O_WRONLY | os.O_TRUNC)),
    }


def state(root: Path) -> list[object]:
    """Everything below ``root``, read from the backing directory."""
    found: list[object] = []
    for directory, _, names in sorted(os.walk(root)):
        for name in sorted([".", *names]):
            path = Path(directory) / name
            status = path.lstat()
            content = path.read_bytes() if name != "." and path.is_file() and not path.is_symlink() else b""
            found.append((str(path), status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns, content))
    return found


def test_freeze_parks_every_mutating_call_and_nothing_else(files: MountedWorker) -> None:
    top = files.mountpoint
    calls_of = mutations(top)
    with files.connect() as client:
        client.freeze()
        before = state(files.root)
        calls = {name: Call(call) for name, call in calls_of.items()}
        assert [name for name, call in calls.items() if not call.parked()] == []
        assert state(files.root) == before
        assert (top / "chmod").read_text() == "content"
        # Not of a directory with a file that has a parked write: the kernel would wait for the page that it writes.
        assert sorted(os.listdir(top / "exchange")) == ["d", "f", "g"]
        assert not (top / "never seen").exists()
        os.close(os.open(top / "utime", os.O_RDONLY))
        # Who opens a file for writing just before a restore replaces it would write into the old one.
        writer = Call(lambda: os.close(os.open(top / "utime", os.O_RDWR)))
        assert writer.parked()
        client.resume()
        assert writer.wait() == 0
        assert {name: call.wait() for name, call in calls.items()} == dict.fromkeys(calls, 0)
    assert (top / "over" / "g").read_text() == "content"
    assert (files.root / "write").read_text() == "changed"
    assert (files.root / "truncate").read_text() == "co"


def test_many_parked_calls_do_not_stop_reads(worker: MountedWorker, client: WorkerClient) -> None:
    (worker.mountpoint / "read").write_text("x")
    for number in range(150):
        (worker.mountpoint / str(number)).mkdir()
    client.freeze()
    calls = [Call((worker.mountpoint / str(number) / "new").touch) for number in range(150)]
    assert calls[-1].parked()
    assert (worker.mountpoint / "read").read_text() == "x"
    client.resume()
    assert [call.wait() for call in calls] == [0] * 150


def test_end_of_connection_resumes(worker: MountedWorker) -> None:
    with worker.connect() as client:
        client.freeze()
        call = Call((worker.mountpoint / "f").touch)
        assert call.parked()
    assert call.wait() == 0


def test_second_connection_takes_the_place(worker: MountedWorker, client: WorkerClient) -> None:
    (worker.mountpoint / "f").touch()
    frozen = client.freeze()
    with worker.connect() as second:
        assert client.socket.recv(10) == b""
        (worker.mountpoint / "g").touch()
        again = second.freeze()
        assert again.generation > frozen.generation
        assert again.directories[0].names == [b"f", b"g"]
        second.resume()


def test_handed_over_until_committed(worker: MountedWorker) -> None:
    (worker.mountpoint / "one").touch()
    with worker.connect() as client:
        first = client.freeze()
        assert not first.complete
        client.resume()
        (worker.mountpoint / "two").touch()
        second = client.freeze()
        # What was not committed is handed over once more.
        assert second.directories[0].names == [b"one", b"two"]
        client.resume()
    with worker.connect() as client:
        third = client.freeze()
        assert third.directories[0].names == [b"one", b"two"]
        assert sorted(path for file in third.files for path in file.paths) == [b"one", b"two"]
        assert not third.complete
        client.resume()
        # Too late: it belongs to the present generation again.
        assert client.expect(channel.Committed(third.generation), channel.Failed).errno == errno.EINVAL
        third = client.freeze()
        assert third.directories[0].names == [b"one", b"two"]
        client.expect(channel.Committed(third.generation), channel.Done)
        client.resume()
        fourth = client.freeze()
        assert fourth.complete
        assert (fourth.directories, fourth.files) == ([], [])
        client.resume()


def test_guard(files: MountedWorker) -> None:
    """Foreign calls on what is guarded fail at once, others go on, and so do the owner's."""
    top = files.mountpoint
    calls_of = mutations(top)
    guarded = [
        (top / name).stat().st_ino
        for name in ("create", "mkdir", "unlink", "rmdir", "rename", "over", "link", "symlink", "mknod")
    ]
    guarded += [(top / name).stat().st_ino for name in ("write", "truncate", "chmod", "utime", "chown", "setxattr")]
    guarded += [(top / name).stat().st_ino for name in ("removexattr", "trunc")]
    owned = os.open(top / "write", os.O_WRONLY)
    before = state(files.root)
    with files.connect() as client:
        client.freeze()
        parked = Call((top / "create" / "parked").touch)
        unrelated = Call((top / "exchange" / "new").touch)
        assert parked.parked()
        assert unrelated.parked()
        client.expect(channel.Guard("restore-1", [0], guarded, []), channel.Done)
        assert parked.wait() == errno.EBUSY
        assert unrelated.wait() == 0
        (files.root / "exchange" / "new").unlink()
        os.utime(files.root / "exchange", ns=(0, 0))
        calls = {name: Call(call) for name, call in calls_of.items()}
        assert {name: call.wait() for name, call in calls.items()} == dict.fromkeys(calls, errno.EBUSY)
        unchanged = [entry for entry in state(files.root) if "/exchange" not in str(entry)]
        assert unchanged == [entry for entry in before if "/exchange" not in str(entry)]
        client.expect(channel.Guard("restore-1", [threading.get_native_id()], guarded, []), channel.Done)
        (top / "create" / "mine").touch()
        assert os.write(owned, b"mine") == 4
        (top / "chmod").chmod(0o611)
        assert Call((top / "mkdir" / "new").mkdir).wait() == errno.EBUSY
    os.close(owned)
    with files.connect() as client:
        assert client.welcome.guard == "restore-1"
        assert Call((top / "mkdir" / "new").mkdir).wait() == errno.EBUSY
        client.expect(channel.Unguard(), channel.Done)
        assert Call((top / "mkdir" / "new").mkdir).wait() == 0


def test_guard_of_the_replaced_and_the_moved(worker: MountedWorker, client: WorkerClient) -> None:
    top = worker.mountpoint
    for name in ("guarded", "other"):
        (top / name).write_text(name)
    client.expect(channel.Guard("r", [0], [(top / "guarded").stat().st_ino], []), channel.Done)
    assert Call(lambda: os.rename(top / "other", top / "guarded")).wait() == errno.EBUSY
    assert Call(lambda: os.rename(top / "guarded", top / "elsewhere")).wait() == errno.EBUSY
    assert Call((top / "guarded").unlink).wait() == errno.EBUSY
    assert Call(lambda: os.rename(top / "other", top / "elsewhere")).wait() == 0
    client.expect(channel.Unguard(), channel.Done)


def test_a_pinned_directory_stays_where_it_is_and_may_change_inside(
    worker: MountedWorker, client: WorkerClient
) -> None:
    top = worker.mountpoint
    for name in ("pinned", "other", "empty"):
        (top / name).mkdir()
    pinned = [(top / name).stat().st_ino for name in ("pinned", "empty")]
    client.expect(channel.Guard("r", [0], [], pinned), channel.Done)
    assert Call(lambda: os.rename(top / "pinned", top / "elsewhere")).wait() == errno.EBUSY
    assert Call(lambda: os.rename(top / "other", top / "empty")).wait() == errno.EBUSY
    assert Call((top / "empty").rmdir).wait() == errno.EBUSY
    assert Call((top / "pinned" / "new").touch).wait() == 0
    assert Call((top / "beside").touch).wait() == 0
    client.expect(channel.Unguard(), channel.Done)
    assert Call(lambda: os.rename(top / "pinned", top / "elsewhere")).wait() == 0


def test_what_the_owner_makes_is_guarded_and_what_others_make_is_not(
    worker: MountedWorker, client: WorkerClient
) -> None:
    top = worker.mountpoint
    (top / "guarded").mkdir()
    gone = (top / "guarded").stat().st_ino
    # As if the numbers that are free next had been those of files that the restore has deleted.
    freed = [*range(gone, gone + 50)]
    client.expect(channel.Guard("r", [threading.get_native_id()], freed, []), channel.Done)
    (top / "new").mkdir()
    (top / "new" / "file").touch()
    assert Call((top / "new" / "other").touch).wait() == errno.EBUSY
    assert Call(lambda: (top / "new" / "file").write_text("foreign")).wait() == errno.EBUSY
    assert Call(lambda: os.rename(top / "new", top / "elsewhere")).wait() == errno.EBUSY

    def work() -> None:
        (top / "theirs").mkdir()
        (top / "theirs" / "file").write_text("foreign")
        (top / "theirs" / "file").chmod(0o600)
        (top / "theirs" / "link").symlink_to("file")
        (top / "theirs" / "link").unlink()

    assert Call(work).wait() == 0
    client.expect(channel.Unguard(), channel.Done)
    assert Call((top / "new" / "other").touch).wait() == 0


def test_read_only(files: MountedWorker, client: WorkerClient) -> None:
    calls_of = mutations(files.mountpoint)
    before = state(files.root)
    client.expect(channel.SetReadOnly("the disk is full"), channel.Done)
    with files.connect() as second:
        assert second.welcome.read_only == "the disk is full"
        errors = {name: Call(call).wait() for name, call in calls_of.items()}
        assert errors == dict.fromkeys(calls_of, errno.EROFS)
        assert state(files.root) == before
        assert (files.mountpoint / "chmod").read_text() == "content"
        second.expect(channel.Guard("r", [threading.get_native_id()], [], []), channel.Done)
        (files.mountpoint / "owner").touch()
        second.expect(channel.Unguard(), channel.Done)
        second.expect(channel.SetReadOnly(""), channel.Done)
    (files.mountpoint / "again").touch()


def test_handles(worker: MountedWorker, client: WorkerClient) -> None:
    path = worker.mountpoint / "d" / "f"
    path.parent.mkdir()
    path.write_text("x")
    code = "import os,sys; os.open(sys.argv[1], os.O_RDWR); print('open', flush=True); sys.stdin.read()"
    since = time.time_ns()
    with (
        subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        path.open() as reader,
        os.scandir(path.parent) as listing,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        next(listing)
        handles = {(handle.pid, handle.directory): handle for handle in self_and(client)}
        writer = handles[process.pid, False]
        assert (writer.path, writer.writable, writer.deleted) == (b"d/f", True, False)
        assert writer.command == Path(f"/proc/{process.pid}/comm").read_text().strip()
        assert since <= writer.since_ns <= time.time_ns()
        mine = handles[threading.get_native_id(), False]
        assert (mine.inode, mine.writable) == (os.fstat(reader.fileno()).st_ino, False)
        assert handles[threading.get_native_id(), True].path == b"d"
        path.unlink()
        assert {(handle.path, handle.deleted) for handle in self_and(client) if not handle.directory} == {
            (b"d/f", True)
        }
        process.stdin.close()
        process.wait(180)
    deadline = time.monotonic() + 180
    while self_and(client) and time.monotonic() < deadline:  # the kernel releases in the background
        time.sleep(0.02)
    assert self_and(client) == []


def self_and(client: WorkerClient) -> list[channel.OpenHandle]:
    return client.expect(channel.ListHandles(), channel.Handles).handles


def test_welcome(worker: MountedWorker, client: WorkerClient) -> None:
    welcome = client.welcome
    assert (welcome.version, welcome.workspace_id, welcome.worker_pid) == (
        (channel.PROTOCOL_VERSION, "w1", worker.process.pid)
    )
    assert (welcome.root, welcome.mountpoint) == (os.fsencode(worker.root), os.fsencode(worker.mountpoint))
    assert welcome.device == worker.mountpoint.stat().st_dev
    (worker.mountpoint / "f").write_text("x")
    assert os.listdir(client.root_fd) == ["f"]
    assert os.fstat(client.root_fd).st_ino == worker.mountpoint.stat().st_ino


def test_descriptor_leads_below_an_in_place_mount(start: Start) -> None:
    worker = start(in_place=True)
    (worker.mountpoint / "f").write_text("x")
    with worker.connect() as client:
        assert os.fstat(client.root_fd).st_dev != client.welcome.device
        fd = os.open("f", os.O_RDONLY, dir_fd=client.root_fd)
        assert os.read(fd, 10) == b"x"
        os.close(fd)
    assert worker.unmount() == 0
    assert (worker.root / "f").read_text() == "x"


def test_stats(worker: MountedWorker, client: WorkerClient) -> None:
    for _ in range(10):
        with pytest.raises(FileNotFoundError):
            (worker.mountpoint / os.urandom(8).hex()).stat()
    (worker.mountpoint / "f").write_text("x")
    stats = client.stats()
    lookups = next(operation for operation in stats.operations if operation.name == "lookup")
    assert lookups.count >= 10
    assert sum(lookups.buckets) == lookups.count
    assert lookups.total_ns > 0
    assert (stats.dirty_files, stats.dirty_directories) == (1, 1)


def test_other_version_is_told_and_sent_away(start: Start) -> None:
    worker = start(faulty=True)
    with worker.connect() as first:
        with WorkerClient(worker.socket, version=channel.PROTOCOL_VERSION + 1) as client:
            assert client.welcome.version == channel.PROTOCOL_VERSION
            assert client.socket.recv(10) == b""
        first.resume()


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 100,
        struct.pack(">I", 5) + b"junk!",
        struct.pack(">I", channel.MAX_FRAME + 1),
        channel.encode(channel.RequestFrame(1, channel.Resume())),
    ],
)
def test_junk_ends_the_connection_only(start: Start, junk: bytes) -> None:
    worker = start(faulty=True)
    with worker.connect() as client:
        client.freeze()
        call = Call((worker.mountpoint / "f").touch)
        assert call.parked()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(worker.socket))
            stranger.settimeout(180)
            stranger.sendall(junk)
            assert stranger.recv(10) == b""
        assert call.parked()
        client.socket.sendall(struct.pack(">I", 3) + b"abc")
        assert client.socket.recv(10) == b""
        assert call.wait() == 0
    with worker.connect() as client:
        client.resume()
    assert len(worker.errors()) == 2


def test_bad_requests_are_answered(worker: MountedWorker, client: WorkerClient) -> None:
    assert client.expect(channel.Committed(99), channel.Failed).errno == errno.EINVAL
    assert client.expect(channel.Guard("", [], [], []), channel.Failed).errno == errno.EINVAL
    client.resume()


def test_requests_under_way_together(worker: MountedWorker, client: WorkerClient) -> None:
    numbers = [client.send(channel.ListHandles()) for _ in range(50)]
    assert all(isinstance(client.receive(number), channel.Handles) for number in numbers)


def test_channel_is_served_during_a_storm(worker: MountedWorker, client: WorkerClient) -> None:
    """Requests that never cease do not keep the control process waiting."""
    code = "import os,sys\nwhile True:\n os.path.lexists(sys.argv[1] + '/' + os.urandom(8).hex())"
    storms = [subprocess.Popen([sys.executable, "-c", code, worker.mountpoint]) for _ in range(3)]
    try:
        for number in range(20):
            (worker.mountpoint / str(number)).touch()
            assert client.checkpoint().directories[0].names == [b"%d" % number]
    finally:
        for storm in storms:
            storm.kill()
            storm.wait()
