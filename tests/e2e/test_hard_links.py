"""Files with more than one name, where the workspace refuses them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cogfs.client import Client, Denied, Workspace
from cogfs.v1 import workspace_pb2
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Aside, Site

_SECRET = "of somebody else: 7f4c1e5b\n"


@pytest.fixture
def outside(daemon: Ctl, project: Path) -> Path:
    """A file that has one more name in the project, "linked", from before the mount: through it none can be made."""
    path = daemon.base / "outside"
    path.write_text(_SECRET)
    os.link(path, project / "linked")
    return path


@pytest.fixture
def ws(cog: Client, project: Path, outside: Path) -> Workspace:
    return cog.mount(project, refuse_hard_links=True)


def _skipped(ws: Workspace) -> dict[bytes, str]:
    message = ws.checkpoint(wait_for="sealed").message
    assert message.refuse_hard_links
    return {one.path: one.reason for one in message.skipped}


def test_they_are_skipped_and_kept(daemon: Ctl, ws: Workspace, project: Path, outside: Path) -> None:
    os.rename(project / "linked", project / "aside")
    before = ws.checkpoint(wait_for="sealed")
    os.rename(project / "aside", project / "linked")
    assert _skipped(ws) == {b"linked": "hard-link"}
    os.link(project / "tool", project / "tool2")
    assert _skipped(ws) == {b"linked": "hard-link", b"tool": "hard-link", b"tool2": "hard-link"}
    snapshot = ws.checkpoint(wait_for="sealed")
    shown = daemon("show", snapshot.id)
    assert "hard-link" in shown and "hard links  not recorded" in shown
    entry = next(one for one in snapshot.ls() if one.path == b"linked")
    assert (entry.reason, entry.hash) == ("hard-link", b"")
    # The restore of a snapshot that has no such name leaves it, and one that skipped it does, too.
    for target in (before, snapshot):
        (project / "README").write_text("changed\n")
        report = target.restore(["README", "linked"])
        assert list(report.restored) == [b"README"]
        assert {one.path: one.reason for one in report.kept}[b"linked"] == "hard-link"
        assert (project / "linked").read_text() == _SECRET
        assert outside.stat().st_nlink == 2
    (project / "tool2").unlink()
    assert _skipped(ws) == {b"linked": "hard-link"}
    outside.unlink()
    # Nobody saw that go; the file itself is looked at when something is done with it.
    os.chmod(project / "linked", 0o600)
    assert _skipped(ws) == {}


def test_a_restore_replaces_one_without_reading_it(ws: Workspace, project: Path, outside: Path) -> None:
    before = ws.checkpoint(wait_for="sealed")
    os.rename(project / "linked", project / "README")
    plan = before.restore(dry_run=True)
    assert (list(plan.restored), plan.files[0].binary) == ([b"README"], True)
    report = before.restore()
    assert list(report.restored) == [b"README"]
    assert (project / "README").read_text() == "read me\n"
    assert (outside.read_text(), outside.stat().st_nlink) == (_SECRET, 1)
    # What was not read cannot come back; its other names have it.
    undone = ws.undo()
    assert {one.path: one.reason for one in undone.files.kept} == {b"README": "hard-link"}
    assert (project / "README").read_text() == "read me\n"


def test_a_rewind_that_could_not_be_undone_is_refused(cog: Client, ws: Workspace, project: Path, outside: Path) -> None:
    thread = cog.create_thread("chat", workspace=ws)
    entry = thread.user_message("go")
    os.rename(project / "linked", project / "README")
    for dry_run in (True, False):
        with pytest.raises(Denied, match=r"README.*hard-link"):
            thread.rewind(entry.id, files=True, dry_run=dry_run)
    assert (project / "README").read_text() == _SECRET


def test_the_last_name_is_never_replaced(ws: Workspace, project: Path) -> None:
    before = ws.checkpoint(wait_for="sealed")
    (project / "README").write_text("mine, under two names\n")
    (project / "tool").unlink()
    os.link(project / "README", project / "tool")
    with pytest.raises(Denied, match="every name"):
        before.restore()
    assert (project / "tool").read_text() == "mine, under two names\n"
    # One of them alone keeps the other.
    before.restore(["README"])
    assert (project / "README").read_text() == "read me\n"
    assert (project / "tool").read_text() == "mine, under two names\n"


def test_the_option_taken_away(cog: Client, ws: Workspace, project: Path) -> None:
    os.link(project / "tool", project / "tool2")
    assert _skipped(ws) == {b"linked": "hard-link", b"tool": "hard-link", b"tool2": "hard-link"}
    ws.unmount()
    ws = cog.mount(project, refuse_hard_links=False)
    message = ws.checkpoint(wait_for="sealed").message
    assert (list(message.skipped), message.refuse_hard_links) == ([], False)


def test_a_message_is_answered_before_its_files_are_captured(
    cog: Client, ws: Workspace, project: Path, outside: Path
) -> None:
    """A file that gets or loses a name right after a message is in its snapshot as it was."""
    thread = cog.create_thread("chat", workspace=ws)
    for number in range(12):
        (project / f"f{number}").write_text(str(number))
    taken = []
    for number in range(12):
        path = project / f"f{number}"
        entry = thread.user_message("x")
        os.link(path, project / f"g{number}")
        after = thread.user_message("y")
        (project / f"g{number}").unlink()
        path.write_text("written\n")
        taken.append((entry.file_checkpoint.snapshot_id, after.file_checkpoint.snapshot_id))
    for number, (first, second) in enumerate(taken):
        assert b"".join(cog.snapshot(first).cat(f"f{number}")) == str(number).encode()
        found = {one.path: one.reason for one in cog.snapshot(second).ls() if one.path.endswith(b"%d" % number)}
        assert {found[b"f%d" % number], found[b"g%d" % number]} == {"hard-link"}


@pytest.mark.parametrize("step", ["restore.journalled", "restore.write", "restore.rename", "restore.applied"])
def test_a_crash_while_one_is_replaced(here: Site, step: str) -> None:
    """The restore is finished, and the file that is not to be read is under its other name as it was."""
    outside = here.base / "outside"
    outside.write_text(_SECRET)
    os.link(outside, here.project / "linked")
    (here.project / "README").write_text("read me\n")
    here.ctl("mount", here.project, "--refuse-hard-links")
    here.daemon_pid()
    with here.client() as cog:
        before = here.workspace(cog).checkpoint(wait_for="sealed").id
    os.rename(here.project / "linked", here.project / "README")
    here.kill_daemon()
    here.start(step)
    with here.client() as cog:
        here.settled(cog)
        restore = Aside(lambda: cog.snapshot(before).restore(["README"]))
        restore.join()
    assert restore.error is not None
    here.start()
    with here.client() as cog:
        workspace = here.settled(cog)
        assert workspace.last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        assert (here.project / "README").read_text() == "read me\n"
        assert (outside.read_text(), outside.stat().st_nlink) == (_SECRET, 1)
        newest = next(here.workspace(cog).snapshots())
        assert {one.reason for one in newest.ls() if one.path == b"README"} == {"hard-link"}
