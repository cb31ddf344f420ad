"""What a user who is not root meets: directories of their own that they closed, to others and to themselves.

A program, as it has to run as that user: ``python -m tests.e2e.support.unprivileged BASE``.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from cogfs.client import CogfsError, Denied, Unavailable
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Site
from tests.support.tree import describe, differences

_STEPS = ["restore.open", "restore.open:2", "restore.write:2", "restore.rename:9", "restore.delete", "restore.applied"]


def plant(project: Path, text: str, names: range) -> None:
    for directory in (project / "closed", project / "outer" / "inner", project / "plain"):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        for old in directory.iterdir():
            old.unlink()
        for number in names:
            (directory / f"f{number}").write_text(text * number)
    (project / "closed").chmod(0o500)
    (project / "outer" / "inner").chmod(0o500)
    (project / "outer").chmod(0o500)


def open_up(project: Path) -> None:
    for path in (project / "closed", project / "outer", project / "outer" / "inner"):
        path.chmod(0o700)


def closed_directories(here: Site) -> None:
    """Restores go into directories that are closed to writing and give them their mode afterwards, crash or not."""
    project = here.project
    plant(project, "one\n", range(12))
    secret = project / "secret"
    secret.mkdir()
    (secret / "file").write_text("secret\n")
    secret.chmod(0)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        snapshot = workspace.checkpoint(wait_for="sealed")
        assert [(one.path, one.reason) for one in snapshot.message.skipped] == [(b"secret", "unreadable")]
        snapshots, trees = [snapshot.id], [describe(project)]
        open_up(project)
        plant(project, "two\n", range(4, 20))
        snapshots.append(workspace.checkpoint().id)
        trees.append(describe(project))
        report = workspace.restore(snapshots[0])
        assert not differences(describe(project), trees[0])
        assert report.deleted and report.restored
        workspace.undo()
        assert not differences(describe(project), trees[1])
    now = 1
    for step in _STEPS:
        here.kill_daemon()
        assert here.start(step) is not None
        with here.client() as cog:
            try:
                here.workspace(cog).restore(snapshots[1 - now])
            except Unavailable:
                pass
            else:
                raise AssertionError(f"{step} was not passed")
        here.ctl("status", project)
        here.daemon_pid()
        with here.client() as cog:
            assert here.settled(cog).last_recovery.outcome == workspace_pb2.Recovery.FORWARD, here.log_tail()
            assert not differences(describe(project), trees[1 - now]), (
                step,
                differences(describe(project), trees[1 - now]),
            )
        now = 1 - now
    secret.chmod(0o700)
    assert (secret / "file").read_text() == "secret\n"
    secret.chmod(0)


def unreadable_files(here: Site) -> None:
    """What cannot be read cannot be kept, so a restore that would change it is refused before anything changes."""
    hidden = here.project / "hidden"
    hidden.write_text("one\n")
    (here.project / "aside").write_text("one\n")
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        hidden.write_text("two\n")
        (here.project / "aside").write_text("two\n")
        hidden.chmod(0)
        for dry_run in (True, False):
            try:
                workspace.restore(first, dry_run=dry_run)
            except Denied as error:
                assert "hidden" in str(error)
            else:
                raise AssertionError("the restore was not refused")
        assert (here.project / "aside").read_text() == "two\n"
        assert stat.S_IMODE(hidden.stat().st_mode) == 0
        hidden.chmod(0o600)
        assert hidden.read_text() == "two\n"
        workspace.restore(first)
        assert hidden.read_text() == "one\n"


def attributes_of_root(here: Site) -> None:
    """What only root may give back is refused before anything changes, by name; the rest can be restored without."""
    capable = here.project / "capable"
    aside = here.project / "aside"
    aside.write_text("one\n")
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        assert os.listxattr(capable) == ["security.capability"]
        capable.write_text("two\n")
        aside.write_text("two\n")
        for dry_run in (True, False):
            try:
                workspace.restore(first, dry_run=dry_run)
            except Denied as error:
                assert "restore capable:" in str(error) and "security.capability" in str(error), error
            else:
                raise AssertionError("the restore was not refused")
        assert (capable.read_text(), aside.read_text()) == ("two\n", "two\n")
        workspace.restore(first, ["aside"])
        assert aside.read_text() == "one\n"


def main() -> None:
    assert os.geteuid() != 0
    here = Site(Path(sys.argv[1]))
    try:
        closed_directories(here)
        unreadable_files(here)
        attributes_of_root(here)
    finally:
        try:
            here.ctl("daemon", "stop", code=None)
        except CogfsError:
            pass


if __name__ == "__main__":
    main()
