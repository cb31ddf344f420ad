"""Snapshots and the way back to them, from the command line."""

from __future__ import annotations

import base64
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cogfs.client.names import unescape
from tests.e2e.ctl import TIMEOUT, Ctl


@pytest.fixture
def snapshot(daemon: Ctl, mounted: Path) -> str:
    """A snapshot of the project, which was changed since."""
    made: dict[str, Any] = daemon.json("checkpoint", mounted, "--label", "before", "--wait")
    assert made["state"] == "sealed"
    (mounted / "src" / "main.py").write_text("one\n2\nthree\nfour\n")
    (mounted / "README").unlink()
    (mounted / "new").write_text("new\n")
    (mounted / "tool").chmod(0o644)
    return str(made["id"])


def _files(root: Path) -> dict[str, tuple[object, ...]]:
    """What stands below ``root``: kinds, modes, contents and targets."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: object = os.readlink(path) if os.path.islink(path) else Path(os.fsdecode(path)).read_bytes()
            found[os.fsdecode(os.path.relpath(path, os.fsencode(root)))] = (status.st_mode, content)
    return found


def test_snapshots_are_listed_the_newest_first(daemon: Ctl, mounted: Path) -> None:
    made = [daemon.json("checkpoint", mounted, "--label", f"l{number}")["id"] for number in range(3)]
    listed = daemon.json("snapshots", mounted / "src")["snapshots"]
    assert [snapshot["id"] for snapshot in listed] == made[::-1]
    assert [snapshot["label"] for snapshot in listed] == ["l2", "l1", "l0"]
    assert {snapshot["origin"] for snapshot in listed} == {"manual"}
    text = daemon("snapshots", mounted)
    assert text.index(made[2]) < text.index(made[0])


def test_show(daemon: Ctl, snapshot: str) -> None:
    shown = daemon.json("show", snapshot)
    assert shown["label"] == "before"
    assert shown["stats"]["files"] == 3
    assert shown["stats"]["symlinks"] == 1
    assert len(bytes.fromhex(shown["root_hash"])) == 32
    assert snapshot in daemon("show", snapshot)


def test_show_tells_what_a_snapshot_took_and_skipped(daemon: Ctl, project: Path) -> None:
    (project / "big").write_bytes(b"x" * 2000)
    (project / "some.log").write_text("log\n")
    daemon("mount", project, "--max-file-bytes", "1000", "--exclude", "*.log")
    first = daemon.json("checkpoint", project, "--wait")
    took = first["stats"]
    assert (took["files"], took["directories"], took["symlinks"]) == (3, 1, 1)
    assert took["bytes"] == sum((project / name).stat().st_size for name in ("README", "tool", "src/main.py"))
    assert (took["hashed"], took["reused"]) == (3, 0)
    assert took["stored_bytes"] > 0 and took["duration_ms"] > 0
    (project / "README").write_text("changed\n")
    took = daemon.json("checkpoint", project, "--wait")["stats"]
    assert (took["hashed"], took["reused"]) == (1, 2)
    assert took["stored_bytes"] > 0
    nothing = daemon.json("checkpoint", project, "--wait")
    took = nothing["stats"]
    assert (took["files"], took["hashed"], took["reused"], took["stored_bytes"]) == (3, 0, 3, 0)
    # What is skipped is told each time; what a glob names is not.
    for snapshot in (first, nothing):
        assert snapshot["skipped"] == [{"path": "big", "reason": "too-large"}]
    shown = daemon("show", nothing["id"])
    assert f"  {'too-large':16} big\n" in shown
    assert "0 files read, 3 not read, 0 B stored" in shown
    assert "excludes   *.log\n" in shown


def test_diff(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    changed = {file["path"]: file for file in daemon.json("diff", snapshot)["files"]}
    assert {path: file["change"] for path, file in changed.items()} == {
        "src/main.py": "modified",
        "README": "deleted",
        "new": "created",
        "tool": "metadata",
    }
    main = changed["src/main.py"]
    assert (main["insertions"], main["deletions"]) == (2, 1)
    assert "\n-two\n+2\n" in main["diff"]
    assert daemon.json("diff", snapshot, "--stat", "src")["insertions"] == 2
    text = daemon("diff", snapshot, mounted / "src" / "main.py")
    assert "\n-two\n+2\n" in text
    assert "README" not in text
    assert "+2 -1" in daemon("diff", snapshot, "--stat")


def test_diff_of_two_snapshots(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    second = daemon.json("checkpoint", mounted, "--wait")["id"]
    (mounted / "later").write_text("not in either\n")
    paths = {file["path"] for file in daemon.json("diff", snapshot, second)["files"]}
    assert paths == {"src/main.py", "README", "new", "tool"}
    assert {file["path"] for file in daemon.json("diff", snapshot, second, "README")["files"]} == {"README"}
    assert daemon.json("diff", second, second)["files"] == []


def test_diff_that_a_program_can_apply(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    patch = daemon.run("diff", snapshot, "src").stdout
    work = daemon.base / "work"
    (work / "src").mkdir(parents=True)
    (work / "src" / "main.py").write_text("one\ntwo\nthree\n")
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True, timeout=TIMEOUT)
    subprocess.run(["git", "apply", "-p1", "-"], cwd=work, input=patch, check=True, timeout=TIMEOUT)
    assert (work / "src" / "main.py").read_bytes() == (mounted / "src" / "main.py").read_bytes()


def test_cat(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    assert daemon.run("cat", snapshot, "src/main.py").stdout == b"one\ntwo\nthree\n"
    assert daemon.run("cat", snapshot, mounted / "README").stdout == b"read me\n"
    document = daemon.json("cat", snapshot, "./README")
    assert base64.b64decode(document["data"]) == b"read me\n"
    assert (document["path"], document["size"]) == ("README", 8)
    daemon.fails("NOT_FOUND", 11, "cat", snapshot, "new")
    daemon.fails("VALIDATION_ERROR", 10, "cat", snapshot, "src")
    daemon.fails("VALIDATION_ERROR", 10, "cat", snapshot, "../outside")
    daemon.fails("VALIDATION_ERROR", 10, "cat", snapshot, "/etc/passwd")


def test_ls(daemon: Ctl, snapshot: str) -> None:
    entries = {entry["path"]: entry for entry in daemon.json("ls", snapshot)["entries"]}
    assert {path: entry["kind"] for path, entry in entries.items()} == {
        "src": "directory",
        "README": "file",
        "tool": "file",
        "link": "symlink",
    }
    assert entries["tool"]["mode"] == 0o755
    assert entries["link"]["symlink_target"] == "src/main.py"
    assert entries["README"]["size"] == 8
    below = {entry["path"] for entry in daemon.json("ls", snapshot, "--recursive")["entries"]}
    assert below == {*entries, "src/main.py"}
    assert "-rwxr-xr-x" in daemon("ls", snapshot)
    assert "link -> src/main.py" in daemon("ls", snapshot)


def test_names_of_any_bytes(daemon: Ctl, mounted: Path) -> None:
    names = [b"caf\xe9", b"new\nline", "文件".encode(), b" space ", b"back\\slash", b"-dash", b"\x1b[31m"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(mounted), name))).write_bytes(name)
    made = daemon.json("checkpoint", mounted, "--wait")["id"]
    listed = {unescape(entry["path"]) for entry in daemon.json("ls", made)["entries"]}
    assert listed >= set(names)
    for name in names:
        assert daemon.run("cat", made, "--", name).stdout == name
        os.unlink(os.path.join(os.fsencode(mounted), name))
    assert "\x1b" not in daemon("ls", made)
    report = daemon.json("restore", made, "--yes", "--", *names)
    assert {unescape(path) for path in report["restored"]} == set(names)
    for name in names:
        assert Path(os.fsdecode(os.path.join(os.fsencode(mounted), name))).read_bytes() == name


def test_dry_run_is_what_the_restore_does_and_undo_takes_it_back(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    before = _files(mounted)
    plan = daemon.json("restore", snapshot, "--dry-run")
    assert plan["dry_run"] is True
    assert plan["busy"] is False
    assert plan["deleted"] == ["new"]
    assert set(plan["restored"]) == {"src/main.py", "README", "tool"}
    assert (plan["insertions"], plan["deletions"]) == (3, 2)
    assert plan["safety_snapshot_id"] == ""
    assert _files(mounted) == before

    report = daemon.json("restore", snapshot, "--yes")
    assert report["dry_run"] is False
    for field in ("restored", "deleted", "unchanged", "insertions", "deletions", "files", "kept"):
        assert report[field] == plan[field], field
    assert (mounted / "src" / "main.py").read_text() == "one\ntwo\nthree\n"
    assert (mounted / "README").read_text() == "read me\n"
    assert (mounted / "tool").stat().st_mode & 0o777 == 0o755
    assert not (mounted / "new").exists()
    restored = _files(mounted)

    assert daemon.json("undo", mounted, "--dry-run")["undone_snapshot_id"] == snapshot
    assert _files(mounted) == restored
    undone = daemon.json("undo", mounted, "--yes")
    assert undone["files"]["snapshot_id"] == report["safety_snapshot_id"]
    assert _files(mounted) == before
    daemon("undo", mounted, "--yes")
    assert _files(mounted) == restored


def test_restore_of_nothing_changes_nothing(daemon: Ctl, mounted: Path) -> None:
    made = daemon.json("checkpoint", mounted, "--wait")["id"]
    before = {path: path.lstat().st_ctime_ns for path in mounted.rglob("*")}
    report = daemon.json("restore", made, "--yes")
    assert (report["restored"], report["deleted"], report["safety_snapshot_id"]) == ([], [], "")
    assert "nothing to change" in daemon("restore", made, "--yes")
    assert {path: path.lstat().st_ctime_ns for path in mounted.rglob("*")} == before


def test_restore_of_paths(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    report = daemon.json("restore", snapshot, mounted / "README", "src", "--yes")
    assert set(report["restored"]) == {"README", "src/main.py"}
    assert (mounted / "new").exists()
    daemon.fails("NOT_FOUND", 11, "restore", snapshot, "never", "--yes")
    daemon.fails("VALIDATION_ERROR", 10, "restore", snapshot, "../x", "--yes")


def test_question_is_asked_on_a_terminal(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    before = _files(mounted)

    def answered(text: bytes) -> subprocess.CompletedProcess[bytes]:
        leader, follower = pty.openpty()
        try:
            os.write(leader, text)
            return subprocess.run(
                daemon.command("restore", snapshot),
                env=daemon.environment,
                stdin=follower,
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
            )
        finally:
            os.close(leader)
            os.close(follower)

    done = answered(b"\n")
    assert done.returncode == 1
    assert b"modified  src/main.py  +2 -1" in done.stdout
    assert b"[y/N]" in done.stderr
    assert b"nothing was changed" in done.stderr
    assert _files(mounted) == before
    done = answered(b"y\n")
    assert done.returncode == 0, done.stderr
    assert not (mounted / "new").exists()


def test_interrupt_at_the_question_changes_nothing(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    before = _files(mounted)
    leader, follower = pty.openpty()
    try:
        asking = subprocess.Popen(
            daemon.command("restore", snapshot),
            env=daemon.environment,
            stdin=follower,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with asking:
            assert asking.stderr is not None
            assert asking.stderr.read(len("Change these files? [y/N]")) == b"Change these files? [y/N]"
            asking.send_signal(signal.SIGINT)
            assert asking.wait(TIMEOUT) == 130
            assert b"Traceback" not in asking.stderr.read()
    finally:
        os.close(leader)
        os.close(follower)
    assert _files(mounted) == before


def test_what_is_open_for_writing_is_in_the_way(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    before = _files(mounted)
    code = "import sys; file = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(mounted / "src" / "main.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        plan = daemon.json("restore", snapshot, "--dry-run")
        assert plan["busy"] is True
        (busy,) = [by for by in plan["busy_by"] if by["access"] == "write"]
        assert (busy["path"], busy["pid"]) == ("src/main.py", holder.pid)
        daemon.fails("BUSY", 15, "restore", snapshot, "--yes")
        assert _files(mounted) == before
        report = daemon.json("restore", snapshot, "--yes", "--force")
        assert [by["pid"] for by in report["forced"]] == [holder.pid]
        assert (mounted / "src" / "main.py").read_text() == "one\ntwo\nthree\n"


def test_ids_that_are_none(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    unknown = snapshot[:-1] + ("0" if snapshot[-1] != "0" else "1")
    for arguments in (["show"], ["ls"], ["diff"]):
        daemon.fails("NOT_FOUND", 11, *arguments, unknown)
    daemon.fails("NOT_FOUND", 11, "restore", unknown, "--yes")
    for malformed in ("x/y", "\x01", "é" * 300):
        assert daemon.run("show", malformed).returncode in (10, 11)


def test_nothing_to_undo(daemon: Ctl, mounted: Path) -> None:
    daemon.fails("VALIDATION_ERROR", 10, "undo", mounted, "--yes")


def test_undo_of_a_path_that_has_gone_since(daemon: Ctl, mounted: Path, snapshot: str) -> None:
    assert daemon.json("restore", snapshot, "README", "--yes")["restored"] == ["README"]
    (mounted / "README").unlink()
    report = daemon.json("undo", mounted, "--yes")
    assert (report["files"]["restored"], report["files"]["deleted"]) == ([], [])
    assert not (mounted / "README").exists()


def test_files_that_were_one_stay_two(daemon: Ctl, mounted: Path) -> None:
    names = [mounted / name for name in "abcd"]
    names[0].write_text("one\n")
    for name in names[1:]:
        os.link(names[0], name)
    together = daemon.json("checkpoint", mounted)["id"]
    for name in names[:2]:
        name.unlink()
    daemon.json("restore", together, "a", "b", "--yes")
    names[0].write_text("two\n")
    apart = daemon.json("checkpoint", mounted)["id"]
    for name in names:
        name.unlink()
    daemon.json("restore", apart, "--yes")
    assert [name.read_text() for name in names] == ["two\n", "two\n", "one\n", "one\n"]
    inodes = [name.stat().st_ino for name in names]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


def test_undo_of_one_name_makes_it_one_file_with_the_other_again(daemon: Ctl, mounted: Path) -> None:
    first, second = mounted / "first", mounted / "second"
    first.write_text("one\n")
    os.link(first, second)
    snapshot = daemon.json("checkpoint", mounted)["id"]
    first.write_text("two\n")
    daemon.json("restore", snapshot, "second", "--yes")
    assert (first.read_text(), second.read_text()) == ("two\n", "one\n")
    daemon.json("undo", mounted, "--yes")
    assert second.read_text() == "two\n"
    assert first.stat().st_ino == second.stat().st_ino
    daemon.json("undo", mounted, "--yes")
    assert (first.read_text(), second.read_text()) == ("two\n", "one\n")
