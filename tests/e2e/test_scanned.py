"""Scanned workspaces: everything that works with a mount, by the command line and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cogfs.client import Busy, Client, Unavailable
from cogfs.v1 import workspace_pb2
from tests.e2e.ctl import TIMEOUT, Ctl, mounts_below
from tests.e2e.support.site import Aside, Site, as_root
from tests.support.tree import describe, differences, of_snapshot

_NOBODY = 65534
_HIDE = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 444 /dev/urandom c 1 9 && "
_HOLD = """
import os, sys, time
how, path = sys.argv[1:]
file = open(path, "r+")
if how == "write":
    # However busy the machine is, it gets its turn during each reading.
    os.nice(-20)
print("ready", flush=True)
while how == "write":
    file.seek(0)
    file.write(str(time.time_ns()))
    file.flush()
    time.sleep(0.0005)
sys.stdin.read()
"""
_NAMES = (
    b"not utf-8 \xff\xfe",
    b" leading and trailing ",
    b"line\nbreak",
    b"quotes \"'`$(x)\\",
    b"-rf",
    "\u6587\u5b57 \U0001f4c1".encode(),
    b"x" * 255,
)


@contextmanager
def _holding(path: Path, how: str = "hold") -> Iterator[int]:
    """A process that has ``path`` open for writing, or writes it all the time."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, how, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def scanned(daemon: Ctl, project: Path) -> Path:
    """The project, scanned."""
    daemon("mount", project, "--scan")
    return project


def test_the_whole_way(daemon: Ctl, project: Path) -> None:
    made = daemon.json("mount", project, "--scan")
    assert (made["mode"], made["state"], made["worker_pid"]) == ("scanned", "active", 0)
    assert made["mountpoint"] == made["root"] == str(project)
    assert mounts_below(daemon.base) == []
    daemon("thread", "new", "chat", "--workspace", project)
    begin = daemon.json("message", "chat", "Be careful", "--kind", "system")["id"]
    first = daemon.json("message", "chat", "Refactor the parser")
    snapshot = first["file_checkpoint"]["snapshot_id"]
    before = describe(project)
    (project / "src" / "main.py").write_text("one\nchanged\nthree\n")
    (project / "README").unlink()
    (project / "new").mkdir()
    (project / "new" / "file").write_text("new\n")
    (project / "tool").chmod(0o700)
    after = describe(project)
    second = daemon.json("message", "chat", "And then")
    daemon("message", "chat", "Done.", "--kind", "assistant")

    changed = {change["path"] for change in daemon.json("diff", snapshot)["files"]}
    assert changed == {"src/main.py", "README", "new", "new/file", "tool"}
    assert daemon("cat", snapshot, "src/main.py") == "one\ntwo\nthree\n"
    assert {entry["path"] for entry in daemon.json("ls", snapshot)["entries"]} == {"README", "link", "src", "tool"}
    shown = daemon.json("show", second["file_checkpoint"]["snapshot_id"])
    assert (shown["state"], shown["skipped"]) == ("sealed", [])

    plan = daemon.json("restore", snapshot, "--dry-run")
    assert not differences(describe(project), after)
    done = daemon.json("restore", snapshot, "--yes")
    assert (plan["restored"], plan["deleted"]) == (done["restored"], done["deleted"])
    assert not differences(describe(project), before)
    daemon("undo", project, "--yes")
    assert not differences(describe(project), after)
    daemon("restore", snapshot, "src", "--yes")
    assert (project / "src" / "main.py").read_text() == "one\ntwo\nthree\n"
    assert not (project / "README").exists()
    daemon("undo", project, "--yes")

    daemon("rewind", "chat", begin, "--files", "--yes")
    assert not differences(describe(project), before)
    assert [entry["id"] for entry in daemon.json("log", "chat")["entries"]] == [begin]
    daemon("undo", project, "--yes")
    assert not differences(describe(project), after)
    assert len(daemon.json("log", "chat")["entries"]) == 4
    daemon("rewind", "chat", second["id"], "--files", "--dry-run")

    status = daemon.json("status", project / "src")
    assert (status["mode"], status["state"], status["bypassed_by"]) == ("scanned", "active", [])
    assert "scanned" in daemon("status", project)
    assert "scanned" in daemon("workspaces")
    with _holding(project / "tool") as pid:
        assert [handle["pid"] for handle in daemon.json("handles", project)["handles"]] == [pid]

    gone = daemon.json("unmount", project)
    assert (gone["mode"], gone["state"]) == ("scanned", "detached")
    daemon.fails("UNAVAILABLE", 20, "checkpoint", project)
    daemon.fails("VALIDATION_ERROR", 10, "unmount", project)
    daemon.fails("VALIDATION_ERROR", 10, "handles", project)
    # What was recorded stays readable.
    assert daemon("cat", snapshot, "README") == "read me\n"


def test_what_is_refused(daemon: Ctl, scanned: Path) -> None:
    daemon.fails("ALREADY_EXISTS", 12, "mount", scanned, "--scan")
    assert "unmount it first" in daemon.fails("ALREADY_EXISTS", 12, "mount", scanned)["message"]
    daemon.fails("VALIDATION_ERROR", 10, "mount", scanned / "src", "--scan")
    daemon.fails("VALIDATION_ERROR", 10, "mount", daemon.base, "--scan")
    daemon.fails("VALIDATION_ERROR", 10, "mount", "/", "--scan")
    daemon.fails("VALIDATION_ERROR", 10, "mount", scanned / "missing", "--scan")
    other = daemon.base / "other"
    other.mkdir()
    daemon.fails("VALIDATION_ERROR", 10, "mount", other, "--scan", "--at", daemon.base / "place")
    assert len(daemon.json("workspaces")["workspaces"]) == 1
    daemon("mount", other)
    daemon.fails("ALREADY_EXISTS", 12, "mount", other, "--scan")
    assert daemon.json("status", other)["mode"] == "mounted"
    daemon("unmount", other)


def test_from_scanned_to_mounted_and_back(daemon: Ctl, project: Path) -> None:
    """What was recorded in one way holds in the other: nothing is read twice."""
    time.sleep(2.1)
    modes = ("scanned", "mounted", "scanned", "mounted")
    snapshots = []
    for number, mode in enumerate(modes):
        arguments = ["--scan"] if mode == "scanned" else []
        assert daemon.json("mount", project, *arguments)["mode"] == mode
        assert mounts_below(daemon.base) == ([str(project)] if mode == "mounted" else [])
        taken = daemon.json("checkpoint", project)
        assert mode == "mounted" or taken["state"] == "sealed"
        daemon("unmount", project)
        snapshot = daemon.json("show", taken["id"])
        assert (snapshot["state"], snapshot["stats"]["hashed"]) == ("sealed", 3 if number == 0 else 0)
        snapshots.append(snapshot)
    assert len({snapshot["root_hash"] for snapshot in snapshots}) == 1
    daemon("mount", project, "--scan")
    (project / "README").write_text("changed\n")
    daemon("restore", snapshots[1]["id"], "--yes")
    assert (project / "README").read_text() == "read me\n"


def test_a_file_that_is_written_all_the_time(here: Site) -> None:
    log = here.project / "log"
    log.write_text("0" * 19)
    here.ctl("mount", here.project, "--scan")
    first = here.json("checkpoint", here.project)["id"]
    with _holding(log, "write") as pid:
        error = here.json("restore", first, "--yes", code=15)["error"]
        assert error["reason"] == "BUSY"
        assert f"pid {pid}" in error["message"]
        snapshot = here.json("checkpoint", here.project)
        for _ in range(20):
            if snapshot["skipped"]:
                break
            # The writer did not get its turn on a busy machine: then the file is whole.
            assert len(here.ctl("cat", snapshot["id"], "log").out) == 19
            snapshot = here.json("checkpoint", here.project)
        assert [(one["path"], one["reason"]) for one in snapshot["skipped"]] == [("log", "changing")]
        assert "changing" in here.ctl("show", snapshot["id"]).out
        here.ctl("restore", snapshot["id"], "--yes")
    assert here.json("checkpoint", here.project)["skipped"] == []
    # It was there, and what it was is not known: it stays.
    kept = here.json("restore", snapshot["id"], "--dry-run")["kept"]
    assert [(one["path"], one["reason"]) for one in kept] == [("log", "changing")]
    here.daemon_pid()


def test_a_racy_file(daemon: Ctl, scanned: Path) -> None:
    """Changed within two seconds of its record, with its size and its modification time as they were."""
    for number in range(5):
        status = (scanned / "README").stat()
        text = f"{number} ok me\n"[:8]
        (scanned / "README").write_text(text)
        os.utime(scanned / "README", ns=(status.st_atime_ns, status.st_mtime_ns))
        snapshot = daemon.json("checkpoint", scanned)
        assert daemon("cat", snapshot["id"], "README") == text


def test_busy(daemon: Ctl, scanned: Path) -> None:
    snapshot = daemon.json("checkpoint", scanned)["id"]
    (scanned / "README").write_text("changed\n")
    with _holding(scanned / "README") as pid:
        plan = daemon.json("restore", snapshot, "--dry-run")
        assert plan["busy"]
        assert [(one["pid"], one["path"], one["access"]) for one in plan["busy_by"]] == [(pid, "README", "write")]
        assert f"pid {pid}" in daemon.fails("BUSY", 15, "restore", snapshot, "--yes")["message"]
        assert (scanned / "README").read_text() == "changed\n"
        daemon("restore", snapshot, "--yes", "--force")
        assert (scanned / "README").read_text() == "read me\n"


def test_odd_names(daemon: Ctl, scanned: Path, cog: Client) -> None:
    root = os.fsencode(scanned)
    for name in _NAMES:
        os.mkdir(os.path.join(root, name))
        Path(os.fsdecode(os.path.join(root, name, name))).write_text("one\n")
    before = describe(scanned)
    workspace = cog.workspace(scanned)
    snapshot = workspace.checkpoint()
    assert not differences(of_snapshot(snapshot), before, [b""])
    for name in _NAMES:
        Path(os.fsdecode(os.path.join(root, name, name))).unlink()
        Path(os.fsdecode(os.path.join(root, name, name[::-1] + b"2")[:250])).write_text("two\n")
    workspace.restore(snapshot.id)
    assert not differences(describe(scanned), before)


def test_a_root_with_an_odd_name(daemon: Ctl) -> None:
    root = daemon.base / os.fsdecode(b"odd \xff\n name")
    root.mkdir()
    (root / "file").write_text("one\n")
    snapshot = daemon.json("mount", root, "--scan") and daemon.json("checkpoint", root)["id"]
    (root / "file").write_text("two\n")
    with _holding(root / "file"):
        daemon.fails("BUSY", 15, "restore", snapshot, "--yes")
    daemon("restore", snapshot, "--yes")
    assert (root / "file").read_text() == "one\n"


def test_a_directory_that_is_moved_away(daemon: Ctl, scanned: Path) -> None:
    aside = scanned.with_name("aside")
    snapshot = daemon.json("checkpoint", scanned)["id"]
    scanned.rename(aside)
    status = daemon.json("status", scanned)
    assert status["state"] == "dead"
    assert "not at" in status["reason"]
    daemon.fails("UNAVAILABLE", 20, "checkpoint", scanned)
    daemon.fails("VALIDATION_ERROR", 10, "mount", scanned, "--scan")
    assert daemon.json("status", scanned)["state"] == "dead"
    aside.rename(scanned)
    daemon("mount", scanned, "--scan")
    (scanned / "README").write_text("changed\n")
    daemon("restore", snapshot, "--yes")
    # Another directory in its place is not what was scanned, until somebody says so.
    scanned.rename(aside)
    scanned.mkdir()
    daemon.fails("UNAVAILABLE", 20, "checkpoint", scanned)
    assert daemon.json("mount", scanned, "--scan")["state"] == "active"
    daemon("restore", snapshot, "--yes")
    assert (scanned / "README").read_text() == "read me\n"


def test_daemons_come_and_go(here: Site) -> None:
    (here.project / "file").write_text("one\n")
    here.ctl("mount", here.project, "--scan")
    first = here.json("checkpoint", here.project)["id"]
    here.ctl("daemon", "stop")
    assert here.json("status", here.project)["state"] == "active"
    here.kill_daemon()
    (here.project / "file").write_text("two\n")
    here.ctl("restore", first, "--yes")
    assert (here.project / "file").read_text() == "one\n"
    # A daemon that finds no directory waits for it to be put back.
    here.ctl("daemon", "stop")
    here.project.rename(here.base / "aside")
    assert here.json("status", here.project)["state"] == "dead"
    (here.base / "aside").rename(here.project)
    here.ctl("mount", here.project, "--scan")
    here.ctl("unmount", here.project)
    here.ctl("daemon", "stop")
    assert here.json("status", here.project)["state"] == "detached"
    here.daemon_pid()


def _plant(root: Path, text: str, numbers: range) -> None:
    for number in numbers:
        (root / f"d{number % 4}").mkdir(exist_ok=True)
        (root / f"d{number % 4}" / f"f{number}").write_text(f"{text} {number}\n")


@pytest.mark.parametrize(
    "step",
    [
        "restore.safe",
        "restore.journalled",
        "restore.delete:5",
        "restore.write:7",
        "restore.rename:9",
        "restore.applied",
        "restore.synced",
        "restore.finished",
    ],
)
def test_a_restore_that_is_killed(here: Site, step: str) -> None:
    _plant(here.project, "one", range(30))
    here.ctl("mount", here.project, "--scan")
    thread = here.json("thread", "new", "chat", "--workspace", here.project)["id"]
    begin = here.json("message", thread, "begin", "--kind", "system")["id"]
    here.ctl("message", thread, "one")
    trees = [describe(here.project)]
    for number in range(10):
        (here.project / f"d{number % 4}" / f"f{number}").unlink()
    _plant(here.project, "two", range(10, 40))
    (here.project / "made" / "deep").mkdir(parents=True)
    (here.project / "made" / "deep" / "file").write_text("made\n")
    trees.append(describe(here.project))
    last = here.json("message", thread, "two")
    here.ctl("daemon", "stop")
    assert here.start(step) is not None
    with here.client() as cog:
        rewind = Aside(lambda: cog.thread(thread).rewind(begin, files=True))
        rewind.join()
    assert isinstance(rewind.error, Unavailable), rewind.error
    # No mount brings it back: the next daemon does.
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        state = here.settled(cog)
        assert (state.mode, state.worker_pid) == (workspace_pb2.Workspace.SCANNED, 0)
        moved = step != "restore.safe"
        assert not differences(describe(here.project), trees[0 if moved else 1]), here.log_tail()
        assert cog.thread(thread).message.leaf_id == (begin if moved else last["id"])
        if step not in ("restore.safe", "restore.finished"):
            assert state.last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        assert not list(here.project.rglob(".cogfs*"))
        workspace = here.workspace(cog)
        if moved:
            workspace.undo()
            assert not differences(describe(here.project), trees[1])
            assert cog.thread(thread).message.leaf_id == last["id"]


def test_a_recovery_beside_a_writer(here: Site) -> None:
    """Nobody can be kept out: what another program writes meanwhile is in a snapshot, or the recovery waits for it."""
    _plant(here.project, "one", range(12))
    here.ctl("mount", here.project, "--scan")
    first = here.json("checkpoint", here.project)["id"]
    _plant(here.project, "two", range(12))
    here.ctl("daemon", "stop")
    assert here.start("restore.rename:6") is not None
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    with _holding(here.project / "d3" / "f11", "write"):
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            stuck = here.workspace(cog).message
    # On a busy machine the writer may not get its turn, and the recovery need not wait.
    if stuck.state != workspace_pb2.Workspace.ACTIVE:
        assert stuck.state == workspace_pb2.Workspace.READ_ONLY, stuck
        assert "d3/f11" in stuck.reason
        here.ctl("mount", here.project, "--scan")
    with here.client() as cog:
        assert here.settled(cog).last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        if stuck.state == workspace_pb2.Workspace.READ_ONLY:
            kept = [one for one in here.workspace(cog).snapshots() if one.message.label.startswith("found when")]
            assert b"".join(kept[0].cat("d3/f11"))[:19].isdigit()
    for number in range(12):
        assert (here.project / f"d{number % 4}" / f"f{number}").read_text() == f"one {number}\n"


def test_without_dev_fuse(ctl: Ctl, project: Path) -> None:
    """The daemon runs where there is no such device, as in a container."""
    hidden = ("unshare", "-m", "--propagation", "slave", "sh", "-c", _HIDE + 'exec "$@"', "sh")
    failed = subprocess.run(
        [*hidden, *ctl.command("mount", project)],
        env=ctl.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert failed.returncode == 20, failed
    sentence = failed.stderr.decode()
    assert "there is no /dev/fuse" in sentence
    assert "mount --scan" in sentence
    assert sentence.count("\n") == 1
    assert ctl.json("workspaces")["workspaces"] == []
    ctl("mount", project, "--scan")
    snapshot = ctl.json("checkpoint", project)["id"]
    (project / "README").write_text("changed\n")
    ctl("restore", snapshot, "--yes")
    assert (project / "README").read_text() == "read me\n"
    ctl("unmount", project)
    assert "mount --scan" in ctl.fails("UNAVAILABLE", 20, "mount", project)["message"]


def test_a_user_without_privileges() -> None:
    here = Site(Path(tempfile.mkdtemp(prefix="cogfs-e2e-")))
    try:
        here.base.chmod(0o755)
        for path in (here.state, here.runtime):
            path.mkdir()
        project = here.project
        (project / "closed").mkdir()
        (project / "closed" / "file").write_text("one\n")
        (project / "open").write_text("one\n")
        (project / "secret").mkdir()
        own = [str(path) for path in (here.state, here.runtime, project)]
        subprocess.run([*as_root(), "chown", "-R", str(_NOBODY), *own], check=True)
        (project / "secret").chmod(0o700)
        os.chown(project / "secret", 0, 0)
        (project / "closed").chmod(0o500)
        here.environ["HOME"] = str(here.state)
        here.prefix = here.prefix_as(_NOBODY, _NOBODY)
        here.ctl("mount", project, "--scan")
        snapshot = here.json("checkpoint", project)
        assert [(one["path"], one["reason"]) for one in snapshot["skipped"]] == [("secret", "unreadable")]
        (project / "closed" / "file").write_text("two\n")
        (project / "closed" / "new").write_text("two\n")
        (project / "open").write_text("two\n")
        here.ctl("restore", snapshot["id"], "--yes")
        assert (project / "closed" / "file").read_text() == "one\n"
        assert (project / "open").read_text() == "one\n"
        assert not (project / "closed" / "new").exists()
        assert (project / "closed").stat().st_mode & 0o777 == 0o500
        here.ctl("undo", project, "--yes")
        assert (project / "closed" / "new").read_text() == "two\n"
        here.ctl("unmount", project)
        here.ctl("daemon", "stop")
    finally:
        here.close()


def test_by_the_sdk(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project, scan=True)
    assert workspace.message.mode == workspace_pb2.Workspace.SCANNED
    thread = cog.create_thread("chat", workspace=workspace)
    entry = thread.user_message("Refactor the parser")
    (project / "README").write_text("changed\n")
    with _holding(project / "README"), pytest.raises(Busy):
        workspace.restore(entry.file_checkpoint.snapshot_id)
    thread.rewind(entry.id, files=True)
    assert (project / "README").read_text() == "read me\n"
    workspace.undo()
    assert (project / "README").read_text() == "changed\n"
    workspace.unmount()
    workspace.mount(scan=True)
    assert workspace.status().state == workspace_pb2.Workspace.ACTIVE
