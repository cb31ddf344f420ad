"""Disks that are full, that break, or that do not give back what they hold: the store's, the undo log's, the project's.

Each time the state of a snapshot is clear: captured and right, without what cannot be read, FAILED with the reason, or
not taken with the reason. It is never something else, and the programs in the mount go on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from cogfs.client import Client, CogfsError, NoSpace, Snapshot
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.disks import ext4, fill, keepers, mounted, shut_down, xfs
from tests.e2e.support.site import Aside, Site, as_root, kill, unmount_all, wait_for
from tests.e2e.support.writing import running
from tests.support.stopping import UNREAD, Stopped
from tests.support.tree import Tree, describe, differences, of_snapshot

_DONE = (snapshot_pb2.Snapshot.SEALED, snapshot_pb2.Snapshot.FAILED)


def _tree(project: Path) -> Tree:
    """Without the root, which a snapshot does not list, and what a program writes meanwhile."""
    return {path: node for path, node in describe(project).items() if path and not path.startswith(b"pair")}


def _check(here: Site, cog: Client, snapshot: Snapshot, was: Tree, why: str) -> bool:
    """A snapshot that was answered is right or FAILED, and then no target. Whether it is right."""
    wait_for("it is captured", lambda: snapshot.refresh().message.state in _DONE)
    message = snapshot.message
    if message.state == snapshot_pb2.Snapshot.SEALED:
        found = {path: node for path, node in of_snapshot(snapshot).items() if not path.startswith(b"pair")}
        assert not differences(found, was), here.log_tail()
        return True
    assert why in message.reason or any(why in one.reason for one in message.failed), message
    with pytest.raises(CogfsError, match="has failed"):
        here.workspace(cog).restore(snapshot.id)
    with pytest.raises(CogfsError, match="has failed"):
        list(snapshot.ls())
    return False


def _write_files(project: Path) -> None:
    for number in range(30):
        (project / f"f{number}").write_bytes(os.urandom(10_000))


@pytest.mark.parametrize("leave", [0, 8192, 40_000, 150_000, 500_000])
def test_room_that_ends_while_a_snapshot_is_captured(here: Site, leave: int) -> None:
    """So much is left when the snapshot is asked for; it needs about 300,000 bytes."""
    with mounted(here.state, "-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        _write_files(here.project)
        here.mount()
        with here.client() as cog, running("pair", here.project / "pair"):
            workspace = here.workspace(cog)
            thread = cog.create_thread("chat", workspace=workspace)
            thread.user_message("first", wait_for="sealed")
            answered: list[tuple[Snapshot, Tree]] = []
            for turn in range(3):
                _write_files(here.project)
                was = _tree(here.project)
                ballast = fill(here.state, leave)
                _message(cog, turn, was, answered)
                # What is to be captured is changed at once.
                _write_files(here.project)
                (here.project / "f3").unlink()
                (here.project / "f4").rename(here.project / "moved")
                (here.project / "moved").rename(here.project / "f4")
                ballast.unlink()
            for snapshot, was in answered:
                _check(here, cog, snapshot, was, "space")
            # There is room again, and all is well.
            assert _check(here, cog, workspace.checkpoint(wait_for="sealed"), _tree(here.project), "")
        here.ctl("daemon", "stop")


def _message(cog: Client, turn: int, was: Tree, answered: list[tuple[Snapshot, Tree]]) -> None:
    """A message is saved with its checkpoint, or with why there is none, or refused."""
    thread = cog.thread("chat")
    try:
        answer = thread.append_entry("user", "text", id=f"m{turn}")
    except NoSpace:
        assert f"m{turn}" not in [entry.id for entry in thread.entries()]
        return
    if answer.entry.HasField("file_checkpoint"):
        answered.append((cog.snapshot(answer.entry.file_checkpoint.snapshot_id), was))
    else:
        assert answer.checkpoint_error, answer


@pytest.mark.parametrize("leave", [0, 100, 300])
def test_an_undo_log_without_room(here: Site, leave: int) -> None:
    """What is changed before it is captured can be written down no more: the change is made, and the snapshot fails."""
    log = here.state / "undo"
    with mounted(log, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        for number in range(20):
            (here.project / f"d{number}").mkdir()
            (here.project / f"d{number}" / "file").write_text(f"{number}\n")
        here.mount()
        here.ctl("checkpoint", here.project, "--wait")
        with running("pair", here.project / "pair") as program:
            for number in range(20):
                (here.project / f"d{number}" / "new").write_text("new\n")
            was = _tree(here.project)
            ballast = fill(log, leave)
            here.kill_daemon()
            here.start("checkpoint.committed")
            here.ctl("checkpoint", here.project, code=None)
            for number in range(20):
                # None of these waits for a capture, and none fails.
                (here.project / f"d{number}").rename(here.project / f"e{number}")
                (here.project / f"made{number}").mkdir()
            assert program.poll() is None
            here.start()
            with here.client() as cog:
                here.settled(cog)
                snapshot = next(here.workspace(cog).snapshots())
                assert not _check(here, cog, snapshot, was, "undo log"), snapshot.message
                # The next ones are right or say why not, as long as there is no room.
                for number in range(3):
                    (here.project / f"made{number}" / "file").write_text("made\n")
                    now = _tree(here.project)
                    again = here.workspace(cog).checkpoint()
                    (here.project / f"made{number}").rename(here.project / f"renamed{number}")
                    _check(here, cog, again, now, "undo log")
                ballast.unlink()
                last = here.workspace(cog).checkpoint()
                now = _tree(here.project)
                (here.project / "made9").rename(here.project / "renamed9")
                assert _check(here, cog, last, now, ""), last.message
        here.ctl("daemon", "stop")


def test_a_store_whose_disk_breaks(here: Site) -> None:
    """Snapshots that were answered before, and are not captured, fail or are right; programs do not notice."""
    image = here.base / "state.img"
    with ext4(image, here.state):
        _write_files(here.project)
        here.mount()
        worker = here.worker_pid()
        with here.client() as cog, running("pair", here.project / "pair"):
            workspace = here.workspace(cog)
            thread = cog.create_thread("chat", workspace=workspace)
            first = thread.user_message("first", wait_for="sealed").file_checkpoint.snapshot_id
            was_first = _tree(here.project)
            _write_files(here.project)
            was = _tree(here.project)
            second = thread.user_message("second").file_checkpoint.snapshot_id
            shut_down(here.state)
            _write_files(here.project)
            (here.project / "d").mkdir()
            (here.project / "f1").unlink()
            for call in (lambda: thread.user_message("third"), workspace.checkpoint):
                with pytest.raises(CogfsError) as caught:
                    call()
                assert "internal" not in str(caught.value)
            _write_files(here.project)
        here.kill_daemon()
        kill(worker)
        unmount_all(here.project)
    _end_loop(image)
    with ext4(image, here.state):
        here.mount()
        with here.client() as cog:
            here.settled(cog)
            assert _check(here, cog, cog.snapshot(first), was_first, "")
            _check(here, cog, cog.snapshot(second), was, "")
            assert _check(here, cog, here.workspace(cog).checkpoint(wait_for="sealed"), _tree(here.project), "")
        here.ctl("daemon", "stop")


@pytest.mark.parametrize(("make", "why"), [(ext4, "does not work"), (xfs, "put/output error")])
def test_a_project_whose_disk_goes_before_it_is_captured(
    here: Site, make: Callable[[Path, Path], AbstractContextManager[Path]], why: str
) -> None:
    """Each of its files says what a damaged one says; they are not left out for that."""
    image = here.base / "project.img"
    with make(image, here.project), mounted(here.base / "beneath", "--bind", str(here.project)) as beneath:
        _write_files(here.project)
        stopped = Stopped(here, "checkpoint.committed", more=UNREAD)
        here.mount()
        with here.client() as cog:
            workspace = here.workspace(cog)
            first = workspace.checkpoint(wait_for="sealed")
            was_first = _tree(here.project)
            for number in range(5):
                (here.project / f"new{number}").write_bytes(os.urandom(5_000))
            was = _tree(here.project)
            # On the disk, and so not even the names are missing.
            subprocess.run(["sync", "--file-system", str(here.project)], check=True, timeout=180)
            stopped.arm()
            second = Aside(workspace.checkpoint)
            stopped.wait()
            shut_down(beneath)
            stopped.go_on()
            second.join()
            assert isinstance(second.result, Snapshot), second.error
            assert not _check(here, cog, second.result, was, why), second.result.message
            assert not differences(_tree_of(first), was_first)
        here.ctl("daemon", "stop")


def _tree_of(snapshot: Snapshot) -> Tree:
    return {path: node for path, node in of_snapshot(snapshot).items() if path}


def _end_loop(image: Path) -> None:
    def attached() -> bool:
        done = subprocess.run([*as_root(), "losetup", "-j", str(image)], capture_output=True, check=True, timeout=180)
        return bool(done.stdout)

    try:
        wait_for("the loop device ends", lambda: not attached())
    except AssertionError as error:
        raise AssertionError(f"{error}; it is kept by {keepers(image)}") from None


@contextmanager
def _damaged(here: Site) -> Iterator[None]:
    """The project on a disk on which one file's inode, one directory's names and one file below cannot be read."""
    image = here.base / "project.img"
    with ext4(image, here.project):
        for name in ("good", "bad", "sub/good", "sub/bad", "lost/file", "whole/file"):
            (here.project / name).parent.mkdir(exist_ok=True)
            (here.project / name).write_text(f"{name}\n")
    _end_loop(image)
    blocks = subprocess.run(
        ["debugfs", "-R", "blocks /lost", str(image)], capture_output=True, check=True, timeout=180, text=True
    )
    with image.open("r+b") as file:
        file.seek(int(blocks.stdout.split()[0]) * _block_size(image))
        file.write(b"\xff" * 1024)
    for name in ("/bad", "/sub/bad"):
        subprocess.run(
            ["debugfs", "-w", "-R", f"set_inode_field {name} checksum 0x1234", str(image)],
            capture_output=True,
            check=True,
            timeout=180,
        )
    with ext4(image, here.project):
        yield


def _block_size(image: Path) -> int:
    done = subprocess.run(
        ["debugfs", "-R", "stats -h", str(image)], capture_output=True, check=True, timeout=180, text=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Block size:"))
    return int(line.split()[-1])


def test_a_project_on_a_disk_with_damages(here: Site) -> None:
    """What the disk does not give is left out, by name, and the rest is recorded and restored."""
    with _damaged(here):
        for name in ("bad", "sub/bad"):
            with pytest.raises(OSError, match=r"."):
                (here.project / name).read_bytes()
        here.mount()
        with here.client() as cog:
            workspace = here.workspace(cog)
            first = workspace.checkpoint(wait_for="sealed")
            assert {(one.path, one.reason) for one in first.message.skipped} == {
                (b"bad", "unreadable"),
                (b"sub/bad", "unreadable"),
                (b"lost", "unreadable"),
            }
            assert [entry.path for entry in first.ls(recursive=True) if entry.kind == entry.FILE] == [
                b"good",
                b"sub/good",
                b"whole/file",
            ]
            (here.project / "sub" / "good").write_text("other\n")
            (here.project / "good").unlink()
            second = workspace.checkpoint(wait_for="sealed")
            assert second.message.skipped == first.message.skipped
            workspace.restore(first.id)
            assert (here.project / "sub" / "good").read_text() == "sub/good\n"
            assert (here.project / "good").read_text() == "good\n"
        here.ctl("daemon", "stop")
