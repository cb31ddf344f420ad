"""The same calls in the mount and in a plain directory have the same results."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cogfs.fsd.mount import syscalls
from tests.mount.conftest import Places
from tests.support.worker_client import MountedWorker

Step = Callable[[Path], object]


def outcome(step: Step, directory: Path) -> object:
    """What a step returns, or the errno with which it fails."""
    try:
        return step(directory)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def shape(path: Path) -> list[object]:
    """What a walk from ``path`` shows, without what depends on where and when it is: names, kinds, modes, links,
    content."""
    found: list[object] = []
    numbers: dict[int, int] = {}

    def visit(directory: Path) -> None:
        for name in sorted(os.listdir(os.fsencode(directory))):
            place = Path(os.fsdecode(os.path.join(os.fsencode(directory), name)))
            status = place.lstat()
            group = numbers.setdefault(status.st_ino, len(numbers))
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            entry: list[object] = [name, status.st_mode, status.st_nlink, status.st_uid, status.st_gid, size, group]
            if stat.S_ISLNK(status.st_mode):
                entry.append(os.readlink(place))
            elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o400:
                entry.append(place.read_bytes())
            found.append(entry)
            if stat.S_ISDIR(status.st_mode):
                visit(place)

    visit(path)
    return found


def write(path: Path, data: bytes, flags: int = os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode: int = 0o644) -> int:
    fd = os.open(path, flags, mode)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def renamed(flags: int) -> Step:
    def step(directory: Path) -> None:
        fd = os.open(directory, os.O_PATH)
        try:
            syscalls.rename(fd, b"from", fd, b"to", flags)
        finally:
            os.close(fd)

    return step


ODD_NAMES = [
    b" leading",
    b"trailing ",
    b"new\nline",
    b"tab\t",
    b"'quotes\"",
    b"\xff\xfe invalid",
    "漢字かな".encode(),
    b"-rf",
    b"...",
    b"back\\slash",
    b"\x01\x7f",
    b"%s%d",
]

STEPS: dict[str, list[Step]] = {
    "create": [
        lambda d: write(d / "f", b"one"),
        lambda d: write(d / "f", b"two", os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        lambda d: write(d / "f", b"+", os.O_APPEND | os.O_WRONLY),
        lambda d: write(d / "g", b"", mode=0o7755),
        lambda d: write(d / "missing" / "f", b"x"),
        lambda d: write(d / "f" / "below", b"x"),
        lambda d: (d / ("n" * 255)).touch(),
        lambda d: (d / ("n" * 256)).touch(),
        lambda d: (d / ("n" * 256)).stat(),
        lambda d: os.mknod(d / "fifo", 0o600 | stat.S_IFIFO),
        lambda d: os.mknod(d / "sock", 0o600 | stat.S_IFSOCK),
        lambda d: os.mknod(d / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
        lambda d: (d / "zero").stat().st_rdev,
        lambda d: os.mknod(d / "regular", 0o640),
    ],
    "directories": [
        lambda d: (d / "a").mkdir(0o750),
        lambda d: (d / "a").mkdir(),
        lambda d: (d / "a" / "b").mkdir(),
        lambda d: (d / "a").stat().st_nlink,
        lambda d: (d / "a").rmdir(),
        lambda d: (d / "a").unlink(),
        lambda d: (d / "a" / "b").rmdir(),
        lambda d: (d / "a").stat().st_nlink,
        lambda d: (d / "a").rmdir(),
        lambda d: (d / "a").stat(),
        lambda d: (d / "a").symlink_to("nowhere"),
        lambda d: os.readlink(d / "a"),
        lambda d: (d / "a").rmdir(),
        lambda d: (d / "a").unlink(),
        lambda d: (d / "a").mkdir(),
    ],
    "links": [
        lambda d: write(d / "f", b"shared"),
        lambda d: os.link(d / "f", d / "g"),
        lambda d: os.link(d / "f", d / "g"),
        lambda d: [(d / n).stat().st_nlink for n in "fg"],
        lambda d: write(d / "g", b"changed"),
        lambda d: (d / "f").read_bytes(),
        lambda d: (d / "f").unlink(),
        lambda d: (d / "g").stat().st_nlink,
        lambda d: os.rename(d / "g", d / "f"),
        lambda d: os.link(d / "f", d / "h"),
        lambda d: os.rename(d / "f", d / "h"),
        lambda d: write(d / "other", b"o"),
        lambda d: os.rename(d / "other", d / "h"),
        lambda d: (d / "f").stat().st_nlink,
        lambda d: (d / "sub").mkdir(),
        lambda d: os.link(d / "sub", d / "sub2"),
        lambda d: (d / "s").symlink_to("f"),
        lambda d: os.link(d / "s", d / "s2", follow_symlinks=False),
        lambda d: (d / "s").lstat().st_nlink,
    ],
    "rename": [
        lambda d: (d / "from").mkdir(),
        lambda d: (d / "from" / "x").mkdir(),
        lambda d: write(d / "from" / "x" / "f", b"deep"),
        lambda d: os.rename(d / "from", d / "from" / "x" / "y"),
        lambda d: (d / "to").mkdir(),
        lambda d: (d / "to" / "full").touch(),
        lambda d: os.rename(d / "from", d / "to"),
        renamed(syscalls.RENAME_NOREPLACE),
        renamed(syscalls.RENAME_EXCHANGE),
        lambda d: (d / "to" / "x" / "f").read_bytes(),
        lambda d: os.rename(d / "to" / "x", d / "x"),
        lambda d: (d.stat().st_nlink, (d / "to").stat().st_nlink),
        lambda d: os.rename(d / "missing", d / "to"),
        lambda d: (d / "from" / "full").unlink(),
        lambda d: os.rename(d / "x", d / "from"),
        lambda d: write(d / "file", b"f"),
        lambda d: os.rename(d / "file", d / "from"),
        lambda d: os.rename(d / "from", d / "file"),
        lambda d: (d / "to").rmdir(),
        renamed(syscalls.RENAME_NOREPLACE),
        renamed(8),
    ],
    "attributes": [
        lambda d: write(d / "f", b"0123456789"),
        lambda d: (d / "f").chmod(0o4711),
        lambda d: os.truncate(d / "f", 4),
        lambda d: os.truncate(d / "f", 8),
        lambda d: (d / "f").read_bytes(),
        lambda d: os.truncate(d, 0),
        lambda d: os.truncate(d / "f", -1),
        lambda d: os.chown(d / "f", 12, 34),
        lambda d: (d / "s").symlink_to("f"),
        lambda d: os.chown(d / "s", 56, 78, follow_symlinks=False),
        lambda d: (
            os.utime(d / "f", ns=(1_000_000_001, 2_000_000_002)),
            (d / "f").stat().st_atime_ns,
            (d / "f").stat().st_mtime_ns,
        ),
        lambda d: os.utime(d / "s", ns=(3, -4), follow_symlinks=False),
        # Not its access time: whoever reads the link moves it.
        lambda d: (d / "s").lstat().st_mtime_ns,
        lambda d: (d / "f").stat().st_mtime_ns,
        lambda d: d.chmod(0o1777),
        lambda d: write(d / "f", b"", os.O_WRONLY | os.O_TRUNC),
    ],
    "xattrs": [
        lambda d: write(d / "f", b""),
        lambda d: os.setxattr(d / "f", b"user.a", b"1\0\xff"),
        lambda d: os.setxattr(d / "f", b"user.a", b"2", os.XATTR_CREATE),
        lambda d: os.setxattr(d / "f", b"user.b", b"2", os.XATTR_REPLACE),
        lambda d: os.getxattr(d / "f", b"user.a"),
        lambda d: os.listxattr(d / "f"),
        lambda d: os.getxattr(d / "f", b"user.none"),
        lambda d: os.removexattr(d / "f", b"user.none"),
        lambda d: os.removexattr(d / "f", b"user.a"),
        lambda d: os.listxattr(d / "f"),
        lambda d: os.setxattr(d, b"user.dir", b"x" * 1000),
        lambda d: os.getxattr(d, b"user.dir"),
        lambda d: os.setxattr(d / "f", b"nonsense", b""),
        lambda d: (d / "s").symlink_to("f"),
        lambda d: os.setxattr(d / "s", b"user.a", b"", follow_symlinks=False),
        lambda d: os.setxattr(d / "s", b"trusted.a", b"t", follow_symlinks=False),
        lambda d: os.listxattr(d / "s", follow_symlinks=False),
        lambda d: os.setxattr(d / "f", b"user.big", b"x" * 100_000),
    ],
    "names": [
        lambda d: [write(Path(os.fsdecode(os.fsencode(d) + b"/" + name)), name) for name in ODD_NAMES],
        lambda d: sorted(os.listdir(os.fsencode(d))),
        lambda d: [os.rename(os.fsencode(d) + b"/" + name, os.fsencode(d) + b"/" + name + b"~") for name in ODD_NAMES],
        lambda d: os.symlink(b"\xff\xfe/\n", os.fsencode(d) + b"/link"),
        lambda d: os.readlink(os.fsencode(d) + b"/link"),
    ],
}


@pytest.mark.parametrize("name", STEPS)
def test_same_as_plain(places: Places, name: str) -> None:
    for number, step in enumerate(STEPS[name]):
        assert outcome(step, places.mounted) == outcome(step, places.plain), f"step {number}"
        assert shape(places.mounted) == shape(places.plain), f"after step {number}"


def test_dots_are_listed(worker: MountedWorker) -> None:
    listed = subprocess.run(["ls", "-a", worker.mountpoint], capture_output=True, check=True, timeout=180).stdout
    assert listed.split() == [b".", b".."]


def test_backing_shows_the_same(worker: MountedWorker) -> None:
    directory = worker.mountpoint / "d"
    directory.mkdir()
    (directory / "f").write_text("x")
    for path in (worker.mountpoint, directory, directory / "f"):
        seen, backing = path.stat(), (worker.root / path.relative_to(worker.mountpoint)).stat()
        for field in ("st_ino", "st_mode", "st_nlink", "st_size", "st_mtime_ns", "st_ctime_ns"):
            assert getattr(seen, field) == getattr(backing, field), field


def test_statfs(worker: MountedWorker) -> None:
    seen, backing = os.statvfs(worker.mountpoint), os.statvfs(worker.root)
    assert (seen.f_bsize, seen.f_frsize, seen.f_blocks, seen.f_files, seen.f_namemax) == (
        (backing.f_bsize, backing.f_frsize, backing.f_blocks, backing.f_files, backing.f_namemax)
    )


def test_two_appenders(worker: MountedWorker) -> None:
    """Lines that two processes append at the same time are all there, whole."""
    code = "import os,sys\nfd=os.open(sys.argv[1],os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o644)\n"
    code += "for i in range(500): os.write(fd,(sys.argv[2]*30+'\\n').encode())"
    log = worker.mountpoint / "log"
    writers = [subprocess.Popen([sys.executable, "-c", code, log, letter]) for letter in "ab"]
    assert [writer.wait(180) for writer in writers] == [0, 0]
    lines = log.read_text().split()
    assert sorted(lines) == ["a" * 30] * 500 + ["b" * 30] * 500


def test_large_file(places: Places) -> None:
    """More than one request for a read or a write, and holes."""
    data = os.urandom(5_000_001)
    for place in places:
        with open(place / "f", "w+b") as file:
            file.write(data)
            file.seek(9_000_000)
            file.write(b"end")
            file.seek(4_000_000)
            assert file.read(1_500_000) == (data[4_000_000:] + bytes(1_500_000))[:1_500_000]
    assert (places.mounted / "f").read_bytes() == (places.plain / "f").read_bytes()


def test_shared_map_is_written(worker: MountedWorker) -> None:
    path = worker.mountpoint / "f"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as shared:
        shared[5000:5005] = b"after"
        os.fsync(file.fileno())
        assert (worker.root / "f").read_bytes()[5000:5005] == b"after"
        shared[0:1] = b"z"
    os.sync()
    assert (worker.root / "f").read_bytes()[:1] == b"z"


def test_sync_flags_write(worker: MountedWorker) -> None:
    for number, flag in enumerate((os.O_SYNC, os.O_DSYNC, os.O_DIRECT)):
        path = worker.mountpoint / str(number)
        with mmap.mmap(-1, 4096) as aligned:
            aligned[:] = b"s" * 4096
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | flag, 0o644)
            assert os.write(fd, aligned) == 4096
            os.close(fd)
        assert (worker.root / str(number)).read_bytes() == b"s" * 4096


def test_sync_of_files_and_directories(worker: MountedWorker) -> None:
    path = worker.mountpoint / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    os.write(fd, b"x")
    os.fsync(fd)
    os.fdatasync(fd)
    os.close(fd)
    directory = os.open(worker.mountpoint, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    with worker.connect() as client:
        counts = client.counts()
    assert (counts["fsync"], counts["fsyncdir"]) == (2, 1)
