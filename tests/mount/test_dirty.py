"""What a freeze hands over."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cogfs.fsd import channel
from tests.mount.conftest import Start
from tests.support.worker_client import MountedWorker, WorkerClient

Seen = tuple[dict[bytes, tuple[list[bytes] | None, bool, bool]], dict[tuple[bytes, ...], bool]]


def seen(frozen: channel.Frozen) -> Seen:
    """Directories as path → (names, attributes, subtree), files as paths → content."""
    return (
        {found.path: (found.names, found.attributes, found.subtree) for found in frozen.directories},
        {tuple(sorted(found.paths)): found.content for found in frozen.files},
    )


@pytest.fixture
def top(worker: MountedWorker, client: WorkerClient) -> Path:
    """A mount with a few files, all committed."""
    path = worker.mountpoint
    for directory in ("a", "a/b", "c"):
        (path / directory).mkdir()
    for file in ("f", "a/f", "a/b/f", "c/f"):
        (path / file).write_text(file)
    client.checkpoint()
    return path


def overwrite(path: Path) -> None:
    with path.open("r+") as file:
        file.write("x")


CASES: dict[str, tuple[Callable[[Path], object], Seen]] = {
    "nothing": (lambda t: (t / "a" / "b" / "f").read_text(), ({}, {})),
    "write": (lambda t: overwrite(t / "a" / "b" / "f"), ({}, {(b"a/b/f",): True})),
    "truncate": (lambda t: os.truncate(t / "f", 1), ({}, {(b"f",): True})),
    "cut on open": (lambda t: os.close(os.open(t / "f", os.O_WRONLY | os.O_TRUNC)), ({}, {(b"f",): True})),
    "mode": (lambda t: (t / "f").chmod(0o600), ({}, {(b"f",): False})),
    "owner": (lambda t: os.chown(t / "f", 1, 1), ({}, {(b"f",): False})),
    "times": (lambda t: os.utime(t / "f", (1, 1)), ({}, {(b"f",): False})),
    "xattr": (lambda t: os.setxattr(t / "f", b"user.a", b""), ({}, {(b"f",): False})),
    "directory's mode": (lambda t: (t / "a").chmod(0o700), ({b"a": ([], True, False)}, {})),
    "directory's xattr": (lambda t: os.setxattr(t, b"user.a", b""), ({b"": ([], True, False)}, {})),
    "create": (lambda t: (t / "a" / "new").touch(), ({b"a": ([b"new"], False, False)}, {(b"a/new",): True})),
    "symlink": (lambda t: (t / "l").symlink_to("f"), ({b"": ([b"l"], False, False)}, {(b"l",): True})),
    "mkdir": (
        lambda t: (t / "a" / "new").mkdir(),
        ({b"a": ([b"new"], False, False), b"a/new": ([], True, False)}, {}),
    ),
    "unlink": (lambda t: (t / "f").unlink(), ({b"": ([b"f"], False, False)}, {(): False})),
    "made and removed": (
        lambda t: ((t / "new").write_text("x"), (t / "new").unlink()),
        ({b"": ([b"new"], False, False)}, {}),
    ),
    "directory made and removed": (
        lambda t: ((t / "new").mkdir(), (t / "new").rmdir()),
        ({b"": ([b"new"], False, False)}, {}),
    ),
    "link": (
        lambda t: os.link(t / "f", t / "a" / "g"),
        ({b"a": ([b"g"], False, False)}, {(b"a/g", b"f"): False}),
    ),
    "write by another name": (
        lambda t: (os.link(t / "f", t / "a" / "g"), (t / "f").unlink(), (t / "a" / "g").write_text("x")),
        ({b"": ([b"f"], False, False), b"a": ([b"g"], False, False)}, {(b"a/g",): True}),
    ),
    "rename": (
        lambda t: os.rename(t / "f", t / "c" / "g"),
        ({b"": ([b"f"], False, False), b"c": ([b"g"], False, False)}, {(b"c/g",): False}),
    ),
    "rename over": (
        lambda t: os.rename(t / "f", t / "c" / "f"),
        ({b"": ([b"f"], False, False), b"c": ([b"f"], False, False)}, {(b"c/f",): False}),
    ),
    "replace as editors do": (
        lambda t: ((t / "f~").write_text("new"), os.rename(t / "f~", t / "f")),
        ({b"": ([b"f", b"f~"], False, False)}, {(b"f",): True}),
    ),
    "directory moved, then written below": (
        lambda t: (os.rename(t / "a", t / "z"), (t / "z" / "b" / "f").write_text("x")),
        ({b"": ([b"a", b"z"], False, False), b"z": ([], True, False)}, {(b"z/b/f",): True}),
    ),
    "written, then directory moved": (
        lambda t: ((t / "a" / "b" / "f").write_text("x"), os.rename(t / "a", t / "c" / "a")),
        (
            {b"": ([b"a"], False, False), b"c": ([b"a"], False, False), b"c/a": ([], True, False)},
            {(b"c/a/b/f",): True},
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_change_is_handed_over(top: Path, client: WorkerClient, name: str) -> None:
    change, expected = CASES[name]
    change(top)
    directories, files = seen(client.checkpoint())
    # A removed file is named by no path; whether it is there at all is no matter.
    files.pop((), None)
    expected_files = {paths: content for paths, content in expected[1].items() if paths}
    assert (directories, files) == (expected[0], expected_files)
    assert seen(client.checkpoint()) == ({}, {})


def test_map_is_noticed(top: Path, client: WorkerClient) -> None:
    with (top / "f").open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        client.checkpoint()
        shared[0:1] = b"M"
        reader = os.open(top / "f", os.O_RDONLY)
        os.fsync(reader)
        os.close(reader)
        assert seen(client.checkpoint()) == ({}, {(b"f",): True})


def test_written_without_a_known_name(start: Start) -> None:
    """Of a file with two names the worker knows one, which is removed: the change is handed over all the same."""
    worker = start()
    (worker.mountpoint / "a").write_text("x")
    os.link(worker.mountpoint / "a", worker.mountpoint / "b")
    assert worker.unmount() == 0
    worker.start()
    with worker.connect() as client:
        client.checkpoint()
        with (worker.mountpoint / "a").open("r+b", buffering=0) as file:
            (worker.mountpoint / "a").unlink()
            file.write(b"y")
            number = os.fstat(file.fileno()).st_ino
        found = client.checkpoint()
        assert [(entry.inode, entry.paths, entry.content) for entry in found.files] == [(number, [], True)]


@pytest.fixture
def excluding(start: Start) -> MountedWorker:
    worker = start("--exclude-name", ".git", "--exclude-name", "node_modules")
    (worker.mountpoint / ".git" / "objects").mkdir(parents=True)
    (worker.mountpoint / "sub").mkdir()
    with worker.connect() as client:
        client.checkpoint()
    return worker


def test_excluded_places_are_not_watched(excluding: MountedWorker) -> None:
    top = excluding.mountpoint
    with excluding.connect() as client:
        (top / ".git" / "objects" / "x").write_text("x")
        (top / ".git" / "objects" / "d").mkdir()
        (top / ".git" / "objects" / "x").chmod(0o600)
        os.rename(top / ".git" / "objects" / "x", top / ".git" / "y")
        (top / ".git" / "y").unlink()
        (top / ".git").chmod(0o700)
        assert seen(client.checkpoint()) == ({}, {})
        (top / "sub" / "node_modules" / "p").mkdir(parents=True)
        (top / "sub" / "node_modules" / "p" / "f").touch()
        assert seen(client.checkpoint()) == ({b"sub": ([b"node_modules"], False, False)}, {})


def test_link_out_of_an_excluded_place_is_watched(excluding: MountedWorker) -> None:
    top = excluding.mountpoint
    inside, outside = top / ".git" / "f", top / "sub" / "f"
    inside.write_text("x")
    with excluding.connect() as client:
        client.checkpoint()
        os.link(inside, outside)
        assert seen(client.checkpoint()) == (({b"sub": ([b"f"], False, False)}, {(b".git/f", b"sub/f"): False}))
        inside.write_text("changed")
        assert seen(client.checkpoint()) == ({}, {(b".git/f", b"sub/f"): True})


def test_out_of_an_excluded_place(excluding: MountedWorker) -> None:
    top = excluding.mountpoint
    (top / ".git" / "d" / "e").mkdir(parents=True)
    (top / ".git" / "f").write_text("x")
    with excluding.connect() as client:
        client.checkpoint()
        os.rename(top / ".git" / "d", top / "sub" / "d")
        os.rename(top / ".git" / "f", top / "f")
        assert seen(client.checkpoint()) == (
            (
                {b"": ([b"f"], False, False), b"sub": ([b"d"], False, False), b"sub/d": (None, True, True)},
                {(b"f",): True},
            )
        )
        (top / "sub" / "d" / "e" / "new").touch()
        assert seen(client.checkpoint()) == ({b"sub/d/e": ([b"new"], False, False)}, {(b"sub/d/e/new",): True})


def test_into_an_excluded_place_and_out_again(excluding: MountedWorker) -> None:
    top = excluding.mountpoint
    (top / "sub" / "e").mkdir()
    with excluding.connect() as client:
        client.checkpoint()
        for boundary in (False, True):
            os.rename(top / "sub", top / ".git" / "sub")
            (top / ".git" / "sub" / "e" / f"unseen{boundary}").touch()
            if boundary:
                assert seen(client.checkpoint())[0][b""] == ([b"sub"], False, False)
            os.rename(top / ".git" / "sub", top / "sub")
            directories, _ = seen(client.checkpoint())
            assert directories[b"sub"] == (None, True, True)
            assert directories[b""] == ([b"sub"], False, False)


def test_renamed_from_an_excluded_name(excluding: MountedWorker) -> None:
    top = excluding.mountpoint
    with excluding.connect() as client:
        os.rename(top / ".git", top / "plain")
        directories, _ = seen(client.checkpoint())
        assert directories[b"plain"] == (None, True, True)
        os.rename(top / "plain", top / ".git")
        assert seen(client.checkpoint())[0][b""] == ([b".git", b"plain"], False, False)
