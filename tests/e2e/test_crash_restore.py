"""``kill -9`` of cogfsd at any moment of a restore, a rewind or a checkpoint: one of two states, and it says which."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.client import Client, CogfsError, Thread
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Aside, Site, kill, site
from tests.support.compare import Tree, differences, of_snapshot, walk

_KILLS = 50


@pytest.fixture
def here() -> Iterator[Site]:
    with site() as place:
        yield place


def plant(root: Path, files: int) -> None:
    """A tree of about ``files`` files with everything in it that a snapshot records."""
    for number in range(files):
        directory = root / f"package{number % 20:02}" / f"module{number % 7}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file{number}.txt").write_text(f"content of {number}\n" * (number % 40 + 1))
    for number in range(0, files, 50):
        os.link(root / f"package{number % 20:02}" / f"module{number % 7}" / f"file{number}.txt", root / f"hard{number}")
        (root / f"soft{number}").symlink_to(f"hard{number}")
        (root / f"empty{number}").mkdir()
    (root / "closed").mkdir(mode=0o500)
    (root / os.fsdecode(b"na\xffme\n\xe6\x96\x87")).write_bytes(b"\0" * 70_000)


def change(root: Path, files: int) -> None:
    """Change nearly all of it, in every way."""
    for number in range(files):
        path = root / f"package{number % 20:02}" / f"module{number % 7}" / f"file{number}.txt"
        match number % 8:
            case 0:
                path.write_text("changed\n")
            case 1:
                path.unlink()
            case 2:
                path.chmod(0o600 if number % 3 else 0o755)
            case 3:
                path.unlink()
                path.symlink_to("elsewhere")
            case 4:
                path.unlink()
                path.mkdir()
                (path / "inside").write_text(f"{number}\n")
            case 5:
                path.rename(path.with_suffix(".moved"))
            case 6:
                path.with_suffix(".new").write_text("new\n")
            case _:
                with path.open("a") as file:
                    file.write("appended\n")
    for number in range(0, files, 50):
        (root / f"hard{number}").unlink()
        os.link(root / f"soft{number}", root / f"hard{number}", follow_symlinks=False)
        (root / f"empty{number}").rmdir()
        (root / f"empty{number}").write_text("a file now\n")
    (root / "package03").rename(root / "moved03")
    (root / "closed").chmod(0o700)
    (root / "closed" / "within").write_text("x\n")
    (root / "closed").chmod(0o555)


class Pair:
    """Two states of one workspace, each with a snapshot and what is in it."""

    def __init__(self, here: Site, files: int) -> None:
        self.here = here
        plant(here.project, files)
        here.mount()
        with here.client() as cog:
            workspace = here.workspace(cog)
            first = workspace.checkpoint("first").id
            before = walk(here.project)
            change(here.project, files)
            second = workspace.checkpoint("second").id
            after = walk(here.project)
            # So that there is a restore to undo from the beginning.
            workspace.restore(first)
            assert not differences(walk(here.project), before)
        self.snapshots = (first, second)
        self.trees = (before, after)
        #: Which of the two the workspace is now.
        self.now = 0

    def outcome(self, cog: Client, previous: workspace_pb2.Recovery) -> int:
        """After a recovery from a restore of the other state: which it is, having checked that it says so."""
        here, target = self.here, 1 - self.now
        state = here.settled(cog)
        found = walk(here.project)
        is_target = not differences(found, self.trees[target])
        as_it_was = not differences(found, self.trees[self.now])
        assert is_target != as_it_was, (
            differences(found, self.trees[target])[:5],
            differences(found, self.trees[self.now])[:5],
            here.log_tail(),
        )
        workspace = here.workspace(cog)
        undo = workspace.undo(dry_run=True)
        assert (undo.undone_snapshot_id == self.snapshots[target]) == is_target, here.log_tail()
        recovery = state.last_recovery
        if recovery != previous:
            assert recovery.target_snapshot_id == self.snapshots[target]
            assert recovery.outcome == (
                workspace_pb2.Recovery.FORWARD if is_target else workspace_pb2.Recovery.BACK
            ), recovery
            assert undo.files.busy is False
        plan = workspace.restore(self.snapshots[target if is_target else self.now], dry_run=True)
        assert not plan.files, plan.files[:5]
        # Nobody is kept from anything any more, not even where the restore was at work.
        for path in (here.project / "hard0", here.project / "package05" / "probe"):
            path.with_name("probe").write_text("x")
            path.with_name("probe").unlink()
        return target if is_target else self.now


def recovery_of(here: Site, cog: Client) -> workspace_pb2.Recovery:
    found = workspace_pb2.Recovery()
    found.CopyFrom(here.workspace(cog).message.last_recovery)
    return found


@pytest.mark.timeout(600)
def test_fifty_moments_of_a_restore(here: Site) -> None:
    pair = Pair(here, 2000)
    with here.client() as cog:
        begun = time.monotonic()
        here.workspace(cog).restore(pair.snapshots[1])
        duration = time.monotonic() - begun
        pair.now = 1
    chance = random.Random(1414)
    fell: dict[str, int] = {"forward": 0, "before": 0, "after": 0}
    for number in range(_KILLS):
        with here.client() as cog:
            workspace = here.workspace(cog)
            previous = recovery_of(here, cog)
            pid = here.daemon_pid()
            restore = Aside(lambda: workspace.restore(pair.snapshots[1 - pair.now]))  # noqa: B023
            time.sleep((number + chance.random()) / _KILLS * duration)
            kill(pid)
            restore.join()
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            reached = pair.outcome(cog, previous)
            if recovery_of(here, cog) != previous:
                fell["forward"] += 1
            else:
                fell["before" if reached == pair.now else "after"] += 1
            if restore.error is None:
                assert reached != pair.now, "a restore that was answered is not there"
            pair.now = reached
    # Otherwise the moments were not what they are meant to be.
    assert fell["forward"] >= _KILLS // 4, fell
