"""Inodes, names and what the kernel is shown of them."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import Start
from tests.support.worker_client import MountedWorker


def test_numbers_stay_over_a_remount(start: Start) -> None:
    worker = start()
    (worker.mountpoint / "d").mkdir()
    (worker.mountpoint / "d" / "f").write_text("x")
    paths = [worker.mountpoint, worker.mountpoint / "d", worker.mountpoint / "d" / "f"]
    before = [(path.stat().st_ino, path.stat().st_ctime_ns) for path in paths]
    assert worker.unmount() == 0
    worker.start()
    assert [(path.stat().st_ino, path.stat().st_ctime_ns) for path in paths] == before


def test_number_of_a_held_file_is_not_reused(worker: MountedWorker) -> None:
    """While a removed file is open, no new file gets its number, and both are served."""
    held = [os.open(worker.mountpoint / f"f{number}", os.O_CREAT | os.O_RDWR) for number in range(50)]
    for number, fd in enumerate(held):
        os.write(fd, b"old%d" % number)
        os.unlink(worker.mountpoint / f"f{number}")
    made = []
    for number in range(50):
        path = worker.mountpoint / f"g{number}"
        path.write_bytes(b"new%d" % number)
        made.append(path.stat().st_ino)
    assert not {os.fstat(fd).st_ino for fd in held} & set(made)
    for number, fd in enumerate(held):
        assert os.pread(fd, 10, 0) == b"old%d" % number
        assert (worker.mountpoint / f"g{number}").read_bytes() == b"new%d" % number
        assert os.fstat(fd).st_nlink == 0
        os.close(fd)
    assert made == [(worker.root / f"g{number}").stat().st_ino for number in range(50)]


def test_numbers_are_the_backing_numbers_after_much_reuse(worker: MountedWorker) -> None:
    path = worker.mountpoint / "f"
    for _ in range(300):
        path.write_text("x")
        assert path.stat().st_ino == (worker.root / "f").stat().st_ino
        path.unlink()


def test_removed_open_file_is_fully_served(worker: MountedWorker) -> None:
    path = worker.mountpoint / "f"
    with path.open("w+b") as file:
        file.write(b"before")
        file.flush()
        path.unlink()
        fd = file.fileno()
        os.pwrite(fd, b"after!", 0)
        os.fchmod(fd, 0o640)
        os.fchown(fd, 1, 2)
        os.utime(fd, ns=(5, 6))
        os.setxattr(fd, b"user.x", b"y")
        os.ftruncate(fd, 5)
        status = os.fstat(fd)
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_size, status.st_nlink) == (
            (0o640, 1, 2, 5, 0)
        )
        os.utime(fd, ns=(5, 6))
        assert os.fstat(fd).st_mtime_ns == 6
        assert os.getxattr(fd, b"user.x") == b"y"
        assert os.pread(fd, 10, 0) == b"after"
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert os.read(again, 10) == b"after"
        os.close(again)
        assert not path.exists()


def test_removed_path_descriptor_is_served(worker: MountedWorker) -> None:
    """Known to the kernel through ``O_PATH`` only, which opens no handle here."""
    path = worker.mountpoint / "f"
    path.write_bytes(b"content")
    fd = os.open(path, os.O_PATH)
    path.unlink()
    assert os.fstat(fd).st_nlink == 0
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert os.read(again, 10) == b"content"
    os.fchmod(again, 0o600)
    assert stat.S_IMODE(os.fstat(again).st_mode) == 0o600
    os.close(again)
    os.close(fd)


def test_replaced_open_file_is_served(worker: MountedWorker) -> None:
    old, new = worker.mountpoint / "old", worker.mountpoint / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with old.open("r+b", buffering=0) as file:
        os.rename(new, old)
        assert file.read() == b"old"
        assert file.write(b"more") == 4
        assert os.fstat(file.fileno()).st_nlink == 0
    assert old.read_bytes() == b"new"


def test_removed_working_directory(worker: MountedWorker) -> None:
    directory = worker.mountpoint / "d"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    directory.rmdir()
    assert os.fstat(fd).st_nlink == 0
    assert os.listdir(fd) == []
    with pytest.raises(OSError) as caught:
        os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    assert caught.value.errno == errno.ENOENT
    directory.mkdir()
    assert directory.stat().st_ino != os.fstat(fd).st_ino
    os.close(fd)


def test_names_of_one_file_share_everything(worker: MountedWorker) -> None:
    first, second = worker.mountpoint / "first", worker.mountpoint / "d" / "second"
    second.parent.mkdir()
    first.write_text("1")
    os.link(first, second)
    assert first.stat() == second.stat()
    second.write_text("two")
    second.chmod(0o600)
    assert first.stat() == second.stat()
    first.unlink()
    assert second.stat().st_nlink == 1
    assert second.stat().st_ctime_ns == (worker.root / "d" / "second").stat().st_ctime_ns
    other = worker.mountpoint / "other"
    other.write_text("other")
    third = worker.mountpoint / "third"
    os.link(second, third)
    os.rename(other, second)
    assert third.stat().st_nlink == 1
    assert third.read_text() == "two"


def test_link_known_by_one_name_only(worker: MountedWorker) -> None:
    """After a remount the kernel knows one of two names; removing it leaves the file alive."""
    (worker.mountpoint / "a").write_text("x")
    os.link(worker.mountpoint / "a", worker.mountpoint / "b")
    assert worker.unmount() == 0
    worker.start()
    with (worker.mountpoint / "a").open("r+b", buffering=0) as file:
        os.unlink(worker.mountpoint / "a")
        assert os.fstat(file.fileno()).st_nlink == 1
        os.fchmod(file.fileno(), 0o751)
        number = os.fstat(file.fileno()).st_ino
        assert (worker.mountpoint / "b").stat().st_ino == number
        assert stat.S_IMODE((worker.mountpoint / "b").stat().st_mode) == 0o751


def test_parents_attributes_are_current(worker: MountedWorker) -> None:
    """The kernel keeps attributes for an hour: those that an operation changes on the side must not be kept."""
    top, below = worker.mountpoint / "top", worker.mountpoint / "top" / "below"

    def check() -> None:
        for path in (worker.mountpoint, top):
            seen, backing = path.stat(), (worker.root / path.relative_to(worker.mountpoint)).stat()
            assert (seen.st_nlink, seen.st_mtime_ns, seen.st_ctime_ns) == (
                (backing.st_nlink, backing.st_mtime_ns, backing.st_ctime_ns)
            )

    top.mkdir()
    check()
    below.mkdir()
    check()
    os.rename(below, worker.mountpoint / "moved")
    check()
    os.rename(worker.mountpoint / "moved", below)
    check()
    (top / "f").write_text("x")
    check()
    os.link(top / "f", top / "g")
    check()
    (top / "f").unlink()
    check()
    below.rmdir()
    check()


def test_names_come_and_go(worker: MountedWorker) -> None:
    """No entry, present or absent, is remembered wrongly."""
    path = worker.mountpoint / "name"
    for _ in range(3):
        assert not path.exists()
        path.write_text("file")
        assert path.is_file()
        path.unlink()
        assert not path.exists()
        path.mkdir()
        assert path.is_dir()
        path.rmdir()
        path.symlink_to("nowhere")
        assert path.is_symlink()
        os.rename(path, worker.mountpoint / "other")
        assert not path.is_symlink()
        (worker.mountpoint / "other").unlink()


def test_rename_moves_what_is_below(worker: MountedWorker) -> None:
    deep = worker.mountpoint / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "f").write_text("x")
    with (deep / "f").open() as file:
        number = os.fstat(file.fileno()).st_ino
        os.rename(worker.mountpoint / "a", worker.mountpoint / "z")
        moved = worker.mountpoint / "z" / "b" / "c" / "f"
        assert moved.stat().st_ino == number
        (moved.parent / "g").write_text("new")
        assert sorted(os.listdir(worker.root / "z" / "b" / "c")) == ["f", "g"]
        assert not (worker.mountpoint / "a").exists()


def test_many_directories_with_few_descriptors(start: Start, tmp_path: Path) -> None:
    """More directories than the worker may hold open, each used again after its descriptor was closed."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 128\nexec "{sys.executable}" "$@"\n')
    limited.chmod(0o755)
    worker = start(python=str(limited))
    for number in range(300):
        (worker.mountpoint / f"d{number}" / "e").mkdir(parents=True)
    for _ in range(2):
        for number in range(300):
            with (worker.mountpoint / f"d{number}" / "e" / "f").open("a") as file:
                file.write("x")
    for number in range(0, 300, 2):
        os.rename(worker.mountpoint / f"d{number}" / "e" / "f", worker.mountpoint / f"d{number + 1}" / "g")
    assert (worker.mountpoint / "d299" / "g").read_text() == "xx"
    with worker.connect() as client:
        assert client.stats().descriptors < 64
    assert subprocess.run(["rm", "-rf", *worker.mountpoint.iterdir()], timeout=180, check=False).returncode == 0
    assert os.listdir(worker.mountpoint) == []


def test_forgotten_nodes_leave_the_table(worker: MountedWorker) -> None:
    for number in range(100):
        (worker.mountpoint / f"d{number}").mkdir()
        (worker.mountpoint / f"d{number}" / "f").write_text("x")
    subprocess.run(["rm", "-rf", *worker.mountpoint.iterdir()], timeout=180, check=True)
    with worker.connect() as client:
        client.checkpoint()
        stats = client.stats()
    assert (stats.nodes, stats.handles, stats.descriptors) == (1, 0, 1)
