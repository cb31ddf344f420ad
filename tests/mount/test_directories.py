"""Listings: complete, without repetition, whatever happens meanwhile."""

from __future__ import annotations

import os
from collections import Counter

from cogfs.fsd.mount.syscalls import DirectoryReader
from tests.support.worker_client import MountedWorker


def test_changes_during_a_listing(worker: MountedWorker) -> None:
    """5,000 entries of which every third goes while the listing runs, and new ones come: what stays is listed once."""
    directory = worker.mountpoint / "d"
    directory.mkdir()
    for number in range(5000):
        os.close(os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY, 0o644))
    removed: set[str] = set()
    seen: Counter[str] = Counter()
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            seen[entry.name] += 1
            if count % 10 == 0:
                start = count // 10 * 9
                for number in range(start, start + 9, 3):
                    if number < 5000:
                        os.unlink(f"{directory}/{number}")
                        removed.add(str(number))
                os.close(os.open(f"{directory}/new{count}", os.O_CREAT | os.O_WRONLY, 0o644))
    assert [name for name, times in seen.items() if times > 1] == []
    stayed = {str(number) for number in range(5000)} - removed
    assert stayed - set(seen) == set()
    assert sorted(os.listdir(directory)) == sorted(os.listdir(worker.root / "d"))


def test_rewind_and_seek(worker: MountedWorker) -> None:
    directory = worker.mountpoint / "d"
    directory.mkdir()
    for number in range(400):
        (directory / str(number)).touch()
    fd = os.open(directory, os.O_RDONLY)
    try:
        reader = DirectoryReader(fd, 4096)
        first = reader.read()
        rest = []
        while part := reader.read():
            rest += part
        (directory / "late").touch()
        reader.seek(first[-1][1])
        after_seek = []
        while part := reader.read():
            after_seek += part
        assert [entry[0] for entry in after_seek if entry[0] != b"late"] == [entry[0] for entry in rest]
        reader.seek(0)
        everything = []
        while part := reader.read():
            everything += [entry[0] for entry in part]
        assert sorted(everything) == sorted([b".", b"..", b"late", *(b"%d" % number for number in range(400))])
    finally:
        os.close(fd)


def test_types_and_numbers_of_entries(worker: MountedWorker) -> None:
    (worker.mountpoint / "dir").mkdir()
    (worker.mountpoint / "file").touch()
    (worker.mountpoint / "link").symlink_to("file")
    os.mkfifo(worker.mountpoint / "fifo")

    def listing(directory: os.PathLike[str]) -> dict[str, tuple[int, bool, bool, bool]]:
        with os.scandir(directory) as entries:
            return {
                entry.name: (
                    entry.inode(),
                    entry.is_dir(follow_symlinks=False),
                    entry.is_file(follow_symlinks=False),
                    entry.is_symlink(),
                )
                for entry in entries
            }

    assert listing(worker.mountpoint) == listing(worker.root)


def test_listing_gives_current_attributes(worker: MountedWorker) -> None:
    """A listing hands out attributes; they must not be older than what was written before."""
    for number in range(50):
        (worker.mountpoint / str(number)).write_bytes(b"x" * number)
    os.listdir(worker.mountpoint)
    for number in range(50):
        with (worker.mountpoint / str(number)).open("ab") as file:
            file.write(b"more")
    with os.scandir(worker.mountpoint) as entries:
        assert {entry.name: entry.stat().st_size for entry in entries} == {str(n): n + 4 for n in range(50)}
