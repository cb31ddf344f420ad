"""Whatever happens after a boundary, the boundary can be told from what is there and from the undo log."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cogfs.fsd import channel
from cogfs.fsd.mount import syscalls
from cogfs.fsd.undolog import UndoLog
from tests.support.boundary import Capturer, Past, State, state_of
from tests.support.worker_client import MountedWorker

PLACES = ["f", "g", "a", "b", "a/f", "a/g", "a/c", "a/c/f", "b/f", "b/c", "b/c/g"]

place = st.sampled_from(PLACES)
two_places = st.tuples(place, place)

#: A name of a call, and where it is made.
operation = st.one_of(
    st.tuples(
        st.sampled_from(["create", "cut", "append", "truncate", "fill", "write", "write", "mkdir", "symlink", "fifo"]),
        two_places,
    ),
    st.tuples(st.sampled_from(["unlink", "rmdir", "rename", "exchange", "link", "remove tree"]), two_places),
    st.tuples(
        st.sampled_from(["chmod", "chown", "setxattr", "removexattr", "utime", "hold", "held", "let go"]), two_places
    ),
)
phase = st.lists(operation, max_size=12)


class Program:
    """Makes calls in the mount."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._held: list[int] = []
        self._count = 0

    def run(self, operations: list[tuple[str, tuple[str, str]]]) -> None:
        """One after another; those that fail are nothing."""
        for name, (one, other) in operations:
            self._count += 1
            with contextlib.suppress(OSError):
                self._call(name, self._top / one, self._top / other)

    def _call(self, name: str, path: Path, other: Path) -> None:
        text = f"{name} {self._count} ".encode()
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: self._write(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, text),
            "cut": lambda: self._write(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK, text),
            "append": lambda: self._write(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK, text),
            "truncate": lambda: os.truncate(path, 3),
            # Several blocks, and a few bytes in one of them.
            "fill": lambda: self._write(path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK, text * 2000),
            "write": lambda: self._write(path, os.O_WRONLY | os.O_NONBLOCK, text, self._count * 7001 % 30_000),
            "mkdir": path.mkdir,
            "symlink": lambda: path.symlink_to(other),
            "fifo": lambda: os.mkfifo(path),
            "unlink": path.unlink,
            "rmdir": path.rmdir,
            "rename": lambda: os.rename(path, other),
            "exchange": lambda: syscalls.rename(
                -100, os.fsencode(path), -100, os.fsencode(other), syscalls.RENAME_EXCHANGE
            ),
            "link": lambda: os.link(path, other, follow_symlinks=False),
            # Of a fifo it would open the fifo, and wait for a writer.
            "remove tree": lambda: shutil.rmtree(path) if path.is_dir() else None,
            "chmod": lambda: path.chmod(0o700 + self._count % 64),
            "chown": lambda: os.lchown(path, self._count, self._count),
            "setxattr": lambda: os.setxattr(path, b"user.a", text, follow_symlinks=False),
            "removexattr": lambda: os.removexattr(path, b"user.a", follow_symlinks=False),
            "utime": lambda: os.utime(path, (1, 1), follow_symlinks=False),
            "hold": lambda: self._held.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)),
            "held": lambda: [os.write(fd, text) for fd in self._held],
            "let go": lambda: os.close(self._held.pop()) if self._held else None,
        }
        calls[name]()

    def _write(self, path: Path, flags: int, text: bytes, offset: int = 0) -> None:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o644)
        try:
            if offset:
                os.lseek(fd, offset, os.SEEK_SET)
            os.write(fd, text)
        finally:
            os.close(fd)

    def end(self) -> None:
        """Close what is open."""
        for fd in self._held:
            os.close(fd)


def clear(top: Path) -> None:
    for path in top.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check(past: Past, then: State, frozen: channel.Frozen, unlisted: bool) -> None:
    """What a snapshot of the boundary needs is found as it was."""
    if unlisted:
        assert past.whole() == then
        return
    for directory in frozen.directories:
        assert directory.names is not None
        for name in directory.names:
            assert past.entry(directory.inode, name) == then.entries.get((directory.inode, name), 0)
        if directory.made:
            assert set(then.names[directory.inode]) <= set(directory.names)
        if directory.made or directory.attributes:
            assert past.inode(directory.inode) == then.inodes[directory.inode]
    for file in frozen.files:
        if file.inode in then.inodes:
            assert file.paths
            assert past.inode(file.inode) == then.inodes[file.inode]


@pytest.fixture(scope="module", params=[-1, 8192, 1 << 20])
def shared(request: pytest.FixtureRequest) -> Iterator[MountedWorker]:
    """With all content captured by the control process, what is more than two blocks, and none."""
    worker = MountedWorker("--content-at-once", str(request.param), undo_log=True)
    try:
        yield worker
        assert worker.errors() == []
    finally:
        worker.stop()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    start=phase,
    phases=st.lists(st.tuples(st.booleans(), phase, phase), min_size=1, max_size=3),
)
def test_boundaries_are_told_from_what_is_there(
    shared: MountedWorker,
    start: list[tuple[str, tuple[str, str]]],
    phases: list[tuple[bool, list[tuple[str, tuple[str, str]]], list[tuple[str, tuple[str, str]]]]],
) -> None:
    worker = shared
    program = Program(worker.mountpoint)
    with worker.connect() as client:
        # An example that failed has left boundaries, and nothing must wait for them.
        client.reconnected([])
        clear(worker.mountpoint)
        boundaries: list[tuple[channel.Frozen, bool, State]] = []
        with Capturer(client, worker.undo_log) as capturer:
            program.run([("mkdir", ("a", "a")), ("mkdir", ("b", "b")), ("mkdir", ("a/c", "f")), *start])
            with capturer.lock:
                client.checkpoint()
            for unlisted, before, after in phases:
                program.run(before)
                with capturer.lock:
                    frozen = client.expect(channel.Freeze(unlisted), channel.Frozen)
                    then = state_of(worker.root)
                    client.expect(channel.Committed(frozen.generation, True), channel.Done)
                    capturer.latest = frozen.generation
                    client.resume()
                boundaries.append((frozen, unlisted, then))
                program.run(after)
                with capturer.lock:
                    # Handed over and taken back in between.
                    client.freeze()
                    client.resume()
            program.end()
            now = state_of(worker.root)
            log = UndoLog(os.fsencode(worker.undo_log))
            log.refresh()
            for frozen, unlisted, then in boundaries:
                check(Past(now, log, capturer.contents, frozen.generation), then, frozen, unlisted)
            log.close()
            with capturer.lock:
                client.expect(channel.Sealed(boundaries[-1][0].generation), channel.Done)
