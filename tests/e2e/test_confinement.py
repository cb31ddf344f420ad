"""Nothing outside the root is read, written or removed by a restore, and nothing that no snapshot holds is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from cogfs.client import CogfsError, Unavailable
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Aside, Site, State, kill, unmount_all, wait_for
from tests.support.tree import Tree, describe, differences, of_snapshot

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def outside(here: Site) -> Path:
    """Files that are none of the workspace's business."""
    place = here.base / "outside"
    (place / "d").mkdir(parents=True)
    for name in ("f0", "f1", "d/f2"):
        (place / name).write_text(f"outside {name}\n")
        (place / name).chmod(0o640)
    return place


def with_times(root: Path) -> tuple[Tree, dict[str, tuple[int, int, int]]]:
    status = {str(path): path.lstat() for path in root.rglob("*")}
    return describe(root), {path: (one.st_ino, one.st_mtime_ns, one.st_mode) for path, one in status.items()}


def test_symlinks_in_place_of_directories(here: Site, outside: Path) -> None:
    project = here.project
    for name in ("f0", "f1", "d/f2"):
        (project / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "src" / name).write_text("inside\n")
    here.mount()
    untouched = with_times(outside)
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(project)
        shutil.rmtree(project / "src")
        (project / "src").symlink_to(outside)
        (project / "also").symlink_to(outside / "d")
        after = describe(project)
        second = workspace.checkpoint().id
        workspace.restore(first)
        assert not differences(describe(project), before)
        workspace.restore(second)
        assert not differences(describe(project), after)
        with pytest.raises(CogfsError):
            workspace.restore(first, ["src/d/f2"])
        assert not differences(describe(project), after)
    assert with_times(outside) == untouched


@pytest.mark.parametrize("scanned", [False, True], ids=["mounted", "scanned"])
@pytest.mark.parametrize("what", ["link", "file"])
def test_something_else_in_place_of_a_directory_when_it_is_finished(
    here: Site, outside: Path, scanned: bool, what: str
) -> None:
    """A restore is interrupted, and until it is finished somebody moves a directory away in which it was at work."""
    project = here.project
    (project / "d" / "sub").mkdir(parents=True)
    for number in range(20):
        (project / "d" / "sub" / f"f{number}").write_text("one\n")
    here.ctl("mount", project, *(("--scan",) if scanned else ()))
    here.daemon_pid()
    with here.client() as cog:
        first = here.workspace(cog).checkpoint(wait_for="sealed").id
        for number in range(20):
            (project / "d" / "sub" / f"f{number}").write_text("two\n")
    untouched = with_times(outside)
    worker = 0 if scanned else here.worker_pid()
    here.kill_daemon()
    here.start("restore.rename:9")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    if not scanned:
        # In the mount, the guard keeps everybody from it.
        kill(worker)
        unmount_all(project)
    (project / "d" / "sub").rename(project / "moved")
    if what == "link":
        (project / "d" / "sub").symlink_to(outside / "d")
    else:
        (project / "d" / "sub").write_text("precious\n")
    here.ctl("status", project)
    here.daemon_pid()
    if not scanned:
        here.ctl("mount", project)
    with here.client() as cog:
        state = here.settled(cog)
        assert state.last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        assert {(project / "d" / "sub" / f"f{number}").read_text() for number in range(20)} == {"one\n"}
        kept = {one.message.label: one for one in here.workspace(cog).snapshots()}
        found = kept[f"found when the restore of {first} was finished"]
        (entry,) = (one for one in found.ls(recursive=True) if one.path == b"d/sub")
        if what == "link":
            assert entry.symlink_target == os.fsencode(outside / "d")
        else:
            assert b"".join(found.cat("d/sub")) == b"precious\n"
    assert with_times(outside) == untouched


def change_inside(directory: Path, name: str) -> None:
    """Write into a file below a directory, unless a symlink is in its place just now."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        file = os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=fd)
        os.write(file, b"changed\n")
        os.close(file)
    finally:
        os.close(fd)


def test_directories_swapped_for_symlinks_all_the_time(here: Site, outside: Path) -> None:
    """Whatever moment a restore meets: it works on directories, or fails; never behind a symlink."""
    project = here.project
    for number in range(120):
        (project / "src" / "d").mkdir(parents=True, exist_ok=True)
        (project / "src" / "d" / f"f{number % 60}").write_text("inside\n")
    (project / "link").symlink_to(outside)
    here.mount()
    untouched = with_times(outside)
    ended = threading.Event()

    def swap() -> None:
        one, other = os.fsencode(project / "src"), os.fsencode(project / "link")
        while not ended.is_set():
            _libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE)

    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(project)
        swapper = Aside(swap)
        try:
            for _ in range(6):
                for number in range(60):
                    change_inside(project / "src", f"d/f{number}")
                restore = Aside(lambda: workspace.restore(first))
                restore.join()
                assert restore.error is None or isinstance(restore.error, CogfsError)
        finally:
            ended.set()
        swapper.join()
        assert with_times(outside) == untouched
        here.settled(cog)
        workspace.restore(first)
        assert not differences(describe(project), before)


def test_hard_links_to_files_outside(here: Site, outside: Path) -> None:
    project = here.project
    os.link(outside / "f0", project / "written")
    os.link(outside / "f1", project / "chmodded")
    os.link(outside / "d" / "f2", project / "removed")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        (project / "written").write_text("changed through the mount\n")
        (project / "chmodded").chmod(0o600)
        (project / "removed").unlink()
        untouched = {path: (path.read_bytes(), path.lstat().st_mode) for path in outside.rglob("*") if path.is_file()}
        workspace.restore(first)
        assert (project / "written").read_text() == "outside f0\n"
        assert stat.S_IMODE((project / "chmodded").stat().st_mode) == 0o640
        assert (project / "removed").read_text() == "outside d/f2\n"
        assert {
            path: (path.read_bytes(), path.lstat().st_mode) for path in outside.rglob("*") if path.is_file()
        } == untouched
        workspace.undo()
        assert (project / "written").read_text() == "changed through the mount\n"
        assert {
            path: (path.read_bytes(), path.lstat().st_mode) for path in outside.rglob("*") if path.is_file()
        } == untouched


@pytest.mark.parametrize("there", ["file", "directory", "link", "in place of a directory"])
def test_what_was_made_past_the_mount_is_in_the_safety_snapshot(here: Site, there: str) -> None:
    """A restore that puts something where the mount knows of nothing, or of something else, looks first."""
    (here.project / "d").mkdir()
    (here.project / "d" / "x").write_text("old")
    past = os.open(here.project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        here.mount()
        with here.client() as cog:
            workspace = here.workspace(cog)
            first = workspace.checkpoint()
            (here.project / "d" / "x").unlink()
            path = "d/x"
            if there == "in place of a directory":
                (here.project / "d" / "x").mkdir()
            workspace.checkpoint()
            if there == "in place of a directory":
                os.rmdir(path, dir_fd=past)
            if there == "directory":
                os.mkdir(path, dir_fd=past)
                path = "d/x/inside"
            if there == "link":
                os.symlink("precious", path, dir_fd=past)
            else:
                with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY, dir_fd=past), "w") as file:
                    file.write("precious")
            report = workspace.restore(first.id)
            assert (here.project / "d" / "x").read_text() == "old"
            safety = {entry.path: entry for entry in cog.snapshot(report.safety_snapshot_id).ls(recursive=True)}
            held = safety[path.encode()]
            if there == "link":
                assert held.symlink_target == b"precious"
            else:
                assert b"".join(cog.snapshot(report.safety_snapshot_id).cat(path)) == b"precious"
            workspace.undo()
            assert (os.readlink if there == "link" else lambda one: Path(one).read_text())(
                here.project / path
            ) == "precious"
    finally:
        os.close(past)


def test_names_like_those_of_a_restore_itself(here: Site) -> None:
    """A file of the user's that is named like a temporary one is not removed by a recovery."""
    names = [".cogfs.tmp.01m8q1p18t4gqee9bzt8scskks.1", ".cogfs.tmp.x", ".cogfs.tmp."]
    for number in range(30):
        (here.project / f"f{number}").write_text("one\n")
    here.mount()
    with here.client() as cog:
        first = here.workspace(cog).checkpoint().id
        for number in range(30):
            (here.project / f"f{number}").write_text("two\n")
    for name in names:
        (here.project / name).write_text(f"mine: {name}\n")
    (here.project / ".cogfs.tmp.01m8q1p18t4gqee9bzt8scskks.2").mkdir()
    here.kill_daemon()
    here.start("restore.rename:9")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    left = [path.name for path in here.project.iterdir() if path.name.startswith(".cogfs.tmp.")]
    assert [name for name in left if name not in names and not name.endswith(".2")], "the crash left no temporary file"
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        state = here.settled(cog)
        assert state.last_recovery.target_snapshot_id == first
        assert {(here.project / f"f{number}").read_text() for number in range(30)} == {"one\n"}
        # The one with a whole name of ours is in no snapshot, so it may not go; the others are restored as any file.
        mine = here.project / names[0]
        assert mine.read_text() == f"mine: {names[0]}\n"
        kept = {path.name for path in here.project.iterdir() if path.name.startswith(".cogfs.tmp.")}
        assert kept == {names[0], ".cogfs.tmp.01m8q1p18t4gqee9bzt8scskks.2"}
        here.workspace(cog).undo()
        for name in names[1:]:
            assert (here.project / name).read_text() == f"mine: {name}\n"


def test_special_files_open_files_and_long_names(here: Site) -> None:
    project = here.project
    long = "n" * 255
    (project / long).write_text("long\n")
    for name in ("fifo", "socketlike", "gone", "plain"):
        (project / name).write_text(f"{name}\n")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(project)
        with pytest.raises(OSError, match="too long"):
            (project / ("n" * 300)).write_text("x")
        (project / "fifo").unlink()
        os.mkfifo(project / "fifo")
        os.mkfifo(project / "new-fifo")
        (project / long).unlink()
        # Held by this process, and without a name: nothing of the workspace any more.
        with (project / "gone").open("r+") as gone:
            (project / "gone").unlink()
            report = workspace.restore(first)
            kept = {(one.path, one.reason) for one in report.kept}
            assert (b"new-fifo", "special") in kept
            assert (b"fifo", "special") in kept
            gone.write("into nowhere\n")
        assert not differences(describe(project), before, [b"fifo", b"new-fifo"])
        assert stat.S_ISFIFO((project / "fifo").lstat().st_mode)
        (project / "fifo").unlink()
        (project / "new-fifo").unlink()
        workspace.restore(first)
        assert not differences(describe(project), before)


def test_paths_deeper_than_a_path_may_be_long(here: Site) -> None:
    """Far more levels than PATH_MAX holds and than a process usually has descriptors."""
    here.mount()
    depth, name = 1200, "deeper"
    with here.client() as cog:
        workspace = here.workspace(cog)
        empty = workspace.checkpoint().id
        fd = os.open(here.project, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=fd)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        file = os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        os.write(file, b"here")
        os.close(file)
        os.close(fd)
        full = workspace.checkpoint().id
        workspace.restore(empty)
        assert not list(here.project.iterdir())
        workspace.restore(full)
        fd = os.open(here.project, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(depth):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        file = os.open("bottom", os.O_RDONLY, dir_fd=fd)
        assert os.read(file, 10) == b"here"
        os.close(file)
        os.close(fd)
        workspace.restore(empty)
        assert not list(here.project.iterdir())


def test_a_root_that_is_moved_while_it_is_mounted(here: Site) -> None:
    """What is mounted elsewhere stays the same directory; a stranger that takes the root's name is left alone."""
    here.project = here.base / "up" / "project"
    here.project.mkdir(parents=True)
    at = here.base / "at"
    for number in range(40):
        (here.project / f"f{number}").write_text("one\n")
    here.ctl("mount", here.project, "--at", at)
    here.daemon_pid()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(at)
        for number in range(40):
            (at / f"f{number}").write_text("two\n")
        workspace.checkpoint()
        (here.base / "up").rename(here.base / "moved")
        here.project.mkdir(parents=True)
        (here.project / "f1").write_text("a stranger's\n")
        (here.project / "f99").write_text("a stranger's\n")
        stranger = with_times(here.project)
        workspace.restore(first)
        assert not differences(describe(at), before)
        assert not differences(describe(here.base / "moved" / "project"), before)
        assert with_times(here.project) == stranger
        for number in range(40):
            (at / f"f{number}").write_text("three\n")
        workspace.checkpoint()
    # Interrupted, and nobody is left who holds the old directory: the stranger is not what the restore was of.
    worker = here.worker_pid()
    here.kill_daemon()
    here.start("restore.rename:9")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    kill(worker)
    here.ctl("workspaces")
    here.daemon_pid()
    with here.client() as cog:
        wait_for("it is taken up", lambda: cog.workspaces()[0].message.state != State.RECOVERING)
        (message,) = (workspace.message for workspace in cog.workspaces())
        assert message.state == State.DEAD
        assert "another directory" in message.reason
        assert with_times(here.project) == stranger
        here.ctl("mount", here.project, "--at", at, code=Unavailable.reason.exit_code)
        assert with_times(here.project) == stranger
        # The right directory comes back, and the restore is finished.
        shutil.rmtree(here.base / "up")
        (here.base / "moved").rename(here.base / "up")
        here.ctl("mount", here.project, "--at", at)
        assert here.settled(cog).last_recovery.target_snapshot_id == first
        assert not differences(describe(at), before)
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), before, [b""])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("scanned", [False, True], ids=["mounted", "scanned"])
def test_a_bind_mount_of_the_same_filesystem_is_not_entered(here: Site, outside: Path, scanned: bool) -> None:
    """Neither one that was there before, nor one that came later, over a directory or over a file."""
    project = here.project
    for name in ("d/f2", "later/f2", "f0"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("inside\n")
    bound = []

    def bind(what: Path, over: Path) -> None:
        subprocess.run(["mount", "--bind", what, over], check=True)
        bound.append(over)

    try:
        bind(outside / "d", project / "d")
        here.ctl("mount", project, *(("--scan",) if scanned else ()))
        here.daemon_pid()
        with here.client() as cog:
            workspace = here.workspace(cog)
            first = workspace.checkpoint(wait_for="sealed")
            kinds = {entry.path: entry.reason for entry in first.ls(recursive=True)}
            assert kinds[b"d"] == "submount" and b"d/f2" not in kinds
            (project / "later" / "f2").write_text("changed\n")
            (project / "f0").chmod(0o600)
            untouched = with_times(outside)
            bind(outside / "d", project / "later")
            bind(outside / "f0", project / "f0")
            for _ in range(2):
                with contextlib.suppress(CogfsError):
                    workspace.restore(first.id, force=True)
                assert with_times(outside) == untouched
            while len(bound) > 1:
                subprocess.run(["umount", bound.pop()], check=True)
            if here.workspace(cog).message.state == State.READ_ONLY:
                # What could neither be finished nor taken back is finished by the next mount.
                here.ctl("mount", project, *(("--scan",) if scanned else ()))
            here.settled(cog)
            workspace = here.workspace(cog)
            workspace.restore(first.id)
            assert (project / "later" / "f2").read_text() == "inside\n"
            assert stat.S_IMODE((project / "f0").stat().st_mode) == 0o644
            assert with_times(outside) == untouched
    finally:
        for over in reversed(bound):
            subprocess.run(["umount", "-l", over], check=False)
