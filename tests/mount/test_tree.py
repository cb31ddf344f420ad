"""The passthrough and its tables without a mount: what the kernel would keep from happening, and what it would hide."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cogfs.fsd.mount.closer import Closer
from cogfs.fsd.mount.dirty import DirtyTable
from cogfs.fsd.mount.handles import HandleTable
from cogfs.fsd.mount.identity import Identity
from cogfs.fsd.mount.nodes import ALTERNATIVE, Node, NodeTable
from cogfs.fsd.mount.tree import Tree


class Caller(NamedTuple):
    uid: int = os.geteuid()
    gid: int = os.getegid()
    pid: int = os.getpid()


CALLER = Caller()


class Rig:
    """A tree over a temporary directory."""

    def __init__(self, root: Path, max_descriptors: int = 64, excluded: tuple[bytes, ...] = ()) -> None:
        self.path = root
        self.closer = Closer()
        self.nodes = NodeTable(os.open(root, os.O_PATH), max_descriptors, self.closer)
        self.dirty = DirtyTable(self.nodes, excluded)
        self.handles = HandleTable(self.closer)
        self.tree = Tree(self.nodes, self.handles, self.dirty, Identity())
        self.root = self.nodes.root

    def node(self, path: str) -> Node:
        """The node at a path, looked up step by step."""
        node = self.root
        for name in path.split("/"):
            found = self.tree.lookup(node, name.encode())
            assert found is not None
            node = found[0]
        return node


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    root = tmp_path / "root"
    root.mkdir()
    yield Rig(root)


def refused(call: object, number: int = errno.ESTALE) -> None:
    assert callable(call)
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == number


def set_mode(rig: Rig, node: Node, mode: int) -> None:
    rig.tree.set_attributes(node, None, CALLER, size=None, uid=None, gid=None, mode=mode, atime_ns=None, mtime_ns=None)


def test_a_link_in_the_place_of_a_file_is_not_followed(rig: Rig, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("outside")
    outside.chmod(0o644)
    (rig.path / "f").write_text("inside")
    node = rig.node("f")
    os.rename(rig.path / "f", rig.path / "kept")  # so that its number is not given to the link
    os.symlink(outside, rig.path / "f")
    with pytest.raises(OSError):
        rig.tree.open(node, os.O_RDWR | os.O_TRUNC, CALLER)
    refused(lambda: set_mode(rig, node, 0o777))
    refused(lambda: rig.tree._truncate(node, None, 0))
    refused(lambda: rig.tree.link(node, rig.root, b"another"))
    assert outside.read_text() == "outside"
    assert outside.stat().st_mode & 0o777 == 0o644
    assert not (rig.path / "another").exists()


def test_a_link_in_the_place_of_a_directory_is_not_followed(rig: Rig, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("outside")
    (rig.path / "d").mkdir()
    node = rig.node("d")
    rig.nodes.close_descriptors(100)
    os.rename(rig.path / "d", rig.path / "kept")
    os.symlink(outside, rig.path / "d")
    with pytest.raises(OSError):
        rig.tree.lookup(node, b"f")
    with pytest.raises(OSError):
        rig.tree.unlink(node, b"f")
    assert (outside / "f").exists()


def test_another_directory_in_its_place_is_refused(rig: Rig) -> None:
    (rig.path / "d").mkdir()
    node = rig.node("d")
    rig.nodes.close_descriptors(100)
    os.rename(rig.path / "d", rig.path / "kept")
    (rig.path / "d").mkdir()
    refused(lambda: rig.tree.make_directory(node, b"x", 0o755, CALLER))
    assert os.listdir(rig.path / "d") == []


def test_a_file_that_was_made_behind_the_mount_is_opened_and_cut(rig: Rig) -> None:
    """The kernel asks to create what it remembers as absent, and leaves the rest to us."""
    path = rig.path / "file"
    path.write_text("much longer")
    inode = path.stat().st_ino
    with pytest.raises(FileExistsError):
        rig.tree.create(rig.root, b"file", 0o644, os.O_WRONLY | os.O_EXCL, CALLER)
    handle, (node, stat) = rig.tree.create(rig.root, b"file", 0o644, os.O_WRONLY, CALLER)
    assert (node.ino, stat.st_size) == (inode, 11)
    rig.tree.release(handle.fd)
    handle, (node, stat) = rig.tree.create(rig.root, b"file", 0o644, os.O_WRONLY | os.O_TRUNC, CALLER)
    assert (node.ino, stat.st_size) == (inode, 0)
    rig.tree.write(handle, 0, b"short")
    assert path.read_bytes() == b"short"
    _, _, directories, files = rig.dirty.hand_over()
    assert [one.names for one in directories] == [[b"file"]]
    assert [(one.paths, one.content) for one in files] == [([b"file"], True)]
    os.mkfifo(rig.path / "fifo")
    refused(lambda: rig.tree.create(rig.root, b"fifo", 0o644, os.O_RDWR, CALLER), errno.EEXIST)


def test_a_number_the_kernel_still_holds_is_not_given_out(rig: Rig) -> None:
    """Where no pin keeps the inode (there may be too many), the new file gets an id of its own."""
    (rig.path / "f").write_text("x")
    node = rig.node("f")
    rig.nodes.pin(node, -1, True)
    rig.nodes.remove_name(node, rig.root, b"f")
    again = rig.node("f")
    assert again is not node
    assert again.id >= ALTERNATIVE
    assert again.ino == node.ino
    assert rig.node("f") is again
    rig.nodes.forget(node.id, 1)
    assert rig.node("f") is again
    rig.nodes.forget(again.id, again.lookups)
    assert rig.node("f").id == node.ino


def test_unknown_nodes_and_handles(rig: Rig) -> None:
    refused(lambda: rig.nodes.get(12345))
    refused(lambda: rig.handles.get(12345), errno.EBADF)
    rig.nodes.forget(12345, 1)


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_descriptors=16)
    for number in range(100):
        (tmp_path / f"d{number}").mkdir()
    nodes = [rig.node(f"d{number}") for number in range(100)]
    for node in nodes * 2:
        rig.tree.make_directory(node, os.urandom(8).hex().encode(), 0o755, CALLER)
        assert rig.nodes.descriptors <= 17
    for first, second in itertools.pairwise(nodes):
        (tmp_path / first.name.decode() / "f").touch()
        rig.tree.rename(first, b"f", second, b"g", 0)
        assert (tmp_path / second.name.decode() / "g").exists()


def test_a_deep_tree_is_reached_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_descriptors=16)
    node = rig.root
    for _ in range(300):
        node = rig.tree.make_directory(node, b"d" * 50, 0o755, CALLER)[0]
    rig.nodes.close_descriptors(1000)
    handle, _ = rig.tree.create(node, b"f", 0o644, os.O_WRONLY, CALLER)
    assert rig.tree.write(handle, 0, b"deep") == 4
    assert len(node.path()) == 300 * 51 - 1
    _, _, directories, files = rig.dirty.hand_over()
    assert len(directories) == 301
    assert [len(path) for file in files for path in file.paths] == [300 * 51 + 1]
    rig.tree.release(handle.fd)


def test_changes_are_forgotten_with_their_nodes(rig: Rig) -> None:
    """A node that the kernel forgot stays while its change is not committed, and no longer."""
    made, _ = rig.tree.make_directory(rig.root, b"d", 0o755, CALLER)
    handle, (file, _) = rig.tree.create(made, b"f", 0o644, os.O_WRONLY, CALLER)
    rig.tree.release(handle.fd)
    rig.nodes.forget(file.id, 1)
    rig.nodes.forget(made.id, 1)
    assert len(rig.nodes) == 3
    number, _, directories, files = rig.dirty.hand_over()
    assert [file.paths for file in files] == [[b"d/f"]]
    assert [directory.path for directory in directories] == [b"", b"d"]
    assert len(rig.nodes) == 3
    rig.dirty.take_back()
    number, _, directories, files = rig.dirty.hand_over()
    assert (len(directories), len(files)) == (2, 1)
    committed = rig.dirty.commit(number)
    assert committed is not None
    rig.dirty.release(committed.changes)
    assert len(rig.nodes) == 1
    assert rig.dirty.hand_over()[2:] == ([], [])


def test_a_commit_of_what_was_not_handed_over(rig: Rig) -> None:
    with pytest.raises(ValueError, match="not handed over"):
        rig.dirty.commit(rig.dirty.generation)


def test_too_many_open_files(rig: Rig) -> None:
    """Directories give their descriptors up before a file cannot be opened."""
    for number in range(20):
        (rig.path / f"d{number}").mkdir()
        rig.tree.make_directory(rig.node(f"d{number}"), b"x", 0o755, CALLER)
    (rig.path / "f").touch()
    node = rig.node("f")
    before = rig.nodes.descriptors
    attempts = []

    def call() -> int:
        attempts.append(rig.nodes.descriptors)
        if len(attempts) == 1:
            raise OSError(errno.EMFILE, "too many")
        return rig.nodes.open(node, os.O_RDONLY)

    os.close(rig.tree._descriptor(call))
    assert attempts == [before, 1]
