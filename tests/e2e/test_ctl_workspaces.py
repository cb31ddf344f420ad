"""Mounting, and what is said of workspaces, from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.ctl import Ctl, mounts_below

_HOLD = "import sys; file = open(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"


@contextmanager
def _holding(path: Path, cwd: Path | None = None) -> Iterator[int]:
    """A process that has ``path`` open for writing."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        yield holder.pid


def test_mount_and_unmount(daemon: Ctl, project: Path) -> None:
    made = daemon.json("mount", project)
    assert made["root"] == str(project)
    assert made["mountpoint"] == str(project)
    assert made["state"] == "active"
    assert made["mode"] == "mounted"
    assert mounts_below(daemon.base) == [str(project)]
    assert (project / "src" / "main.py").read_text() == "one\ntwo\nthree\n"
    assert [workspace["id"] for workspace in daemon.json("workspaces")["workspaces"]] == [made["id"]]
    gone = daemon.json("unmount", project)
    assert gone["id"] == made["id"]
    assert gone["state"] == "detached"
    assert mounts_below(daemon.base) == []
    assert (project / "src" / "main.py").read_text() == "one\ntwo\nthree\n"
    assert daemon.json("mount", project)["id"] == made["id"]


def test_names_that_are_not_utf8_in_errors(daemon: Ctl) -> None:
    project = daemon.base / os.fsdecode(b"not utf-8 \xff")
    project.mkdir()
    daemon("mount", project)
    snapshot = daemon.json("checkpoint", project)["id"]
    missing = os.fsdecode(b"gone\xfe")
    assert "gone\\xfe" in daemon.fails("NOT_FOUND", 11, "cat", snapshot, missing)["message"]
    assert "gone\\xfe" in daemon.fails("NOT_FOUND", 11, "restore", snapshot, missing, "--yes")["message"]
    daemon("unmount", project)
    assert "utf-8 \\xff" in daemon.fails("UNAVAILABLE", 20, "checkpoint", project)["message"]


def test_relative_directory_and_link_to_it(daemon: Ctl, project: Path) -> None:
    made = daemon.json("mount", "project", cwd=daemon.base)
    assert made["root"] == str(project)
    (daemon.base / "alias").symlink_to("project")
    assert daemon.json("status", daemon.base / "alias")["id"] == made["id"]


def test_status_of_any_path_inside(daemon: Ctl, mounted: Path) -> None:
    wanted = daemon.json("status", mounted)["id"]
    assert daemon.json("status", mounted / "src")["id"] == wanted
    assert daemon.json("status", mounted / "src" / "main.py")["id"] == wanted
    assert daemon.json("status", cwd=mounted / "src")["id"] == wanted
    assert wanted in daemon("status", mounted)
    daemon.fails("NOT_FOUND", 11, "status", daemon.base)


def test_status_counts_what_changed(daemon: Ctl, mounted: Path) -> None:
    snapshot = daemon.json("checkpoint", mounted, "--wait")["id"]
    before = daemon.json("status", mounted)
    assert before["last_snapshot_id"] == snapshot
    assert before["dirty_files"] == 0
    (mounted / "README").write_text("changed\n")
    assert daemon.json("status", mounted)["dirty_files"] == 1


def test_options(daemon: Ctl, project: Path) -> None:
    made = daemon.json("mount", project, "--exclude", "*.log", "--exclude", "build/", "--max-file-bytes", "100")
    assert made["options"] == {
        "exclude": ["*.log", "build/"],
        "max_file_bytes": 100,
        "retain": None,
        "refuse_hard_links": False,
    }
    (project / "big").write_bytes(b"x" * 101)
    (project / "a.log").write_text("log\n")
    snapshot = daemon.json("checkpoint", project, "--wait")
    assert {skipped["path"]: skipped["reason"] for skipped in snapshot["skipped"]}["big"] == "too-large"
    recorded = {entry["path"] for entry in daemon.json("ls", snapshot["id"])["entries"] if entry["kind"] == "file"}
    assert recorded == {"README", "tool"}


def test_mount_elsewhere(daemon: Ctl, project: Path) -> None:
    place = daemon.base / "elsewhere"
    place.mkdir()
    made = daemon.json("mount", project, "--at", place)
    assert made["mountpoint"] == str(place)
    (place / "new").write_text("through the mount\n")
    assert (project / "new").read_text() == "through the mount\n"
    assert daemon.json("unmount", project)["state"] == "detached"


def test_mounted_twice(daemon: Ctl, mounted: Path) -> None:
    daemon.fails("ALREADY_EXISTS", 12, "mount", mounted)
    assert mounts_below(daemon.base) == [str(mounted)]


@pytest.mark.parametrize("name", ["missing", "README", "project/src", "/", "base", "state"])
def test_root_that_cannot_be(daemon: Ctl, mounted: Path, name: str) -> None:
    root = {
        "missing": mounted.parent / "missing",
        "README": mounted / "README",
        "project/src": mounted / "src",
        "/": Path("/"),
        "base": daemon.base,
        "state": daemon.base / "state",
    }[name]
    daemon.fails("VALIDATION_ERROR", 10, "mount", root)
    assert mounts_below(daemon.base) == [str(mounted)]
    assert len(daemon.json("workspaces")["workspaces"]) == 1


def test_home_directory_needs_to_be_meant(daemon: Ctl, project: Path) -> None:
    # What a home directory is comes from the user database: this one is its user's.
    home = Path("~").expanduser().resolve()
    daemon.fails("VALIDATION_ERROR", 10, "mount", home)
    assert daemon.json("workspaces") == {"workspaces": []}


def test_handles_name_who_holds_what(daemon: Ctl, mounted: Path) -> None:
    assert daemon.json("handles", mounted) == {"handles": []}
    with _holding(mounted / "README") as pid:
        (handle,) = daemon.json("handles", mounted)["handles"]
        assert handle["path"] == "README"
        assert handle["pid"] == pid
        assert handle["access"] == "write"
        assert handle["deleted"] is False
        assert str(pid) in daemon("handles", mounted)


def test_unmount_that_is_in_use(daemon: Ctl, mounted: Path) -> None:
    with _holding(mounted / "README") as pid:
        error = daemon.fails("BUSY", 15, "unmount", mounted)
        assert str(pid) in error["metadata"]["busy_by"]
        assert os.path.ismount(mounted)
        assert daemon.json("unmount", mounted, "--force")["state"] == "detached"


def test_nothing_to_unmount(daemon: Ctl, project: Path) -> None:
    daemon.fails("NOT_FOUND", 11, "unmount", project)


def test_shell_in_the_directory_below_is_told(daemon: Ctl, project: Path) -> None:
    done = daemon.run("mount", ".", cwd=project)
    assert done.returncode == 0
    assert b'cd "$PWD"' in done.stderr
