"""Several users of one mount, and a worker that is not root."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import Start
from tests.support.worker_client import MountedWorker

ROOT = Path(__file__).resolve().parents[2]
USER, GROUP, OTHER_GROUP = 1234, 2345, 3456
#: fusermount3 serves users with a name only.
NOBODY = 65534


def run_as(code: str, *arguments: object, groups: tuple[int, ...] = (), uid: int = USER, gid: int = GROUP) -> str:
    """Run Python code as another user."""
    done = subprocess.run(
        [sys.executable, "-c", "import os,sys\nd=sys.argv[1]\n" + code, *map(str, arguments)],
        user=uid,
        group=gid,
        extra_groups=list(groups),
        umask=0o022,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def shared(start: Start) -> MountedWorker:
    worker = start("--allow-other")
    worker.mountpoint.chmod(0o777)
    return worker


MAKE = """
open(d + '/file', 'w').write('x')
os.mkdir(d + '/dir')
os.symlink('x', d + '/link')
os.mkfifo(d + '/fifo')
"""


@pytest.mark.parametrize("place", ["mountpoint", "plain"])
def test_new_files_belong_to_the_caller(shared: MountedWorker, place: str) -> None:
    directory = shared.mountpoint if place == "mountpoint" else shared.directory / "plain"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)
    run_as(MAKE, directory)
    for name, mode in (("file", 0o644), ("dir", 0o755), ("link", 0o777), ("fifo", 0o644)):
        status = (directory / name).lstat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (USER, GROUP, mode), name
    (directory / "roots").touch()
    assert (directory / "roots").stat().st_uid == os.geteuid()


def test_supplementary_groups_count(shared: MountedWorker) -> None:
    directory = shared.mountpoint / "d"
    directory.mkdir()
    os.chown(directory, 0, OTHER_GROUP)
    directory.chmod(0o2770)
    run_as(MAKE, directory, groups=(OTHER_GROUP,))
    status = (directory / "file").stat()
    assert (status.st_uid, status.st_gid) == (USER, OTHER_GROUP)
    assert (directory / "dir").stat().st_mode & stat.S_ISGID
    denied = "try: open(d + '/no', 'w')\nexcept PermissionError: print('denied')"
    assert run_as(denied, directory) == "denied"


def test_permissions_are_the_kernels(shared: MountedWorker) -> None:
    secret = shared.mountpoint / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    checks = """
for call in (lambda: open(d + '/secret'), lambda: os.chmod(d + '/secret', 0o777), lambda: os.truncate(d + '/secret', 0),
             lambda: os.chown(d + '/secret', os.getuid(), -1)):
    try: call(); print('allowed')
    except PermissionError: pass
"""
    assert run_as(checks, shared.mountpoint) == ""
    shared.mountpoint.chmod(0o1777)
    sticky = "try: os.unlink(d + '/secret')\nexcept PermissionError: print('denied')"
    assert run_as(sticky, shared.mountpoint) == "denied"


@pytest.mark.parametrize(
    "change",
    [
        "fd = os.open(d + '/f', os.O_WRONLY); os.write(fd, b'new')",
        "os.truncate(d + '/f', 1)",
        "os.open(d + '/f', os.O_WRONLY | os.O_TRUNC)",
        "os.ftruncate(os.open(d + '/f', os.O_RDWR), 2)",
    ],
)
def test_write_by_another_takes_privileges_away(shared: MountedWorker, change: str) -> None:
    plain = shared.directory / "plain"
    plain.mkdir()
    modes = []
    for directory in (shared.mountpoint, plain):
        file = directory / "f"
        file.write_bytes(b"program")
        file.chmod(0o6777)
        file.stat()
        run_as(change, directory)
        modes.append((oct(file.stat().st_mode), file.read_bytes()))
    assert modes[0] == modes[1]
    assert oct((shared.root / "f").stat().st_mode) == modes[1][0]


def test_write_by_root_keeps_privileges(shared: MountedWorker) -> None:
    plain = shared.directory / "plain"
    plain.mkdir()
    modes = []
    for directory in (shared.mountpoint, plain):
        file = directory / "f"
        file.write_bytes(b"program")
        file.chmod(0o6755)
        with file.open("r+b") as opened:
            opened.write(b"new")
        modes.append(file.stat().st_mode)
    assert modes[0] == modes[1]


def test_others_do_not_get_in_unasked(worker: MountedWorker) -> None:
    worker.mountpoint.chmod(0o777)
    assert run_as("try: os.listdir(d)\nexcept PermissionError: print('denied')", worker.mountpoint) == "denied"


def unprivileged() -> None:
    """A session of a worker that is not root: called below, where the device is open to all."""
    worker = MountedWorker(user=NOBODY)
    try:
        printed = run_as(UNPRIVILEGED, worker.mountpoint, uid=NOBODY, gid=NOBODY)
        assert printed.split() == ["['name']", "denied", "denied", "x", "denied"], printed
        assert (worker.root / "listed" / "h").stat().st_uid == NOBODY
        assert stat.S_IMODE(Path(worker.socket).stat().st_mode) == 0o600
        worker.process.terminate()
        assert worker.process.wait(180) == 0
        assert worker.errors() == []
        assert not os.path.ismount(worker.mountpoint)
    finally:
        worker.stop()


UNPRIVILEGED = """
open(d + '/f', 'w').write('x')
os.mkdir(d + '/listed')
open(d + '/listed/name', 'w').close()
os.chmod(d + '/listed', 0o444)
print(str(os.listdir(d + '/listed')).replace(' ', ''))
try: os.stat(d + '/listed/name')
except PermissionError: print('denied')
os.chmod(d + '/listed', 0o755)
os.stat(d + '/listed/name')
os.chmod(d + '/f', 0)
try: open(d + '/f')
except PermissionError: print('denied')
os.chmod(d + '/f', 0o600)
os.link(d + '/f', d + '/g')
os.rename(d + '/g', d + '/listed/h')
os.unlink(d + '/f')
print(open(d + '/listed/h').read())
try: os.chown(d + '/listed', 0, 0)
except PermissionError: print('denied')
"""


def test_worker_without_privileges(tmp_path: Path) -> None:
    """In a mount namespace of its own, with a device that every user may open, as udev makes it."""
    # Temporary files may lie where no device can be opened, as in the tmpfs that systemd mounts at /tmp.
    prepare = 'mount -t tmpfs -o mode=755,dev tmpfs "$1" && mknod "$1/fuse" c 10 229 && chmod 666 "$1/fuse" && '
    prepare += 'mount --bind "$1/fuse" /dev/fuse && exec "$2" -c "$3"'
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from tests.mount.test_identity import unprivileged; unprivileged()"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", prepare, "sh", tmp_path, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
