"""``kill -9`` of cogfsd at any moment of a restore, a rewind or a checkpoint: one of two states, and it says which."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.client import Client, Unavailable
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Aside, Site, kill, site, unmount_all, wait_for
from tests.support.tree import describe, differences, of_snapshot

_KILLS = 50
_MANY = 1000


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
            before = describe(here.project)
            change(here.project, files)
            second = workspace.checkpoint("second").id
            after = describe(here.project)
            # So that there is a restore to undo from the beginning.
            workspace.restore(first)
            assert not differences(describe(here.project), before)
        self.snapshots = (first, second)
        self.trees = (before, after)
        #: Which of the two the workspace is now.
        self.now = 0

    def outcome(self, cog: Client, previous: workspace_pb2.Recovery, snapshot: str = "") -> int:
        """After a recovery from a restore of the other state, by ``snapshot`` if it was not its first: which it is,
        having checked that it says so."""
        here, target = self.here, 1 - self.now
        snapshot = snapshot or self.snapshots[target]
        state = here.settled(cog)
        found = describe(here.project)
        is_target = not differences(found, self.trees[target])
        as_it_was = not differences(found, self.trees[self.now])
        assert is_target != as_it_was, (
            differences(found, self.trees[target])[:5],
            differences(found, self.trees[self.now])[:5],
            here.log_tail(),
        )
        workspace = here.workspace(cog)
        recovery = state.last_recovery
        if recovery != previous:
            assert recovery.target_snapshot_id == snapshot
            assert recovery.outcome == (workspace_pb2.Recovery.FORWARD if is_target else workspace_pb2.Recovery.BACK), (
                recovery
            )
        if recovery == previous or len(found) < _MANY:
            # Not begun or quite finished; the record of the last restore says which. (Its report of many files takes
            # long, and need not be had when the recovery has said it.)
            undo = workspace.undo(dry_run=True)
            assert (undo.undone_snapshot_id == snapshot) == is_target, here.log_tail()
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


@pytest.mark.timeout(1800)
def test_fifty_moments_of_a_restore(here: Site) -> None:
    pair = Pair(here, 1500)
    with here.client() as cog:
        begun = time.monotonic()
        report = here.workspace(cog).restore(pair.snapshots[1])
        duration = time.monotonic() - begun
        pair.now = 1
    assert len(report.files) > 2000
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


@pytest.fixture(scope="module")
def small() -> Iterator[Pair]:
    with site() as place:
        yield Pair(place, 48)


def armed(here: Site, crash_at: str) -> None:
    """Another daemon takes the place of the one that runs; it will kill itself at a step."""
    here.kill_daemon()
    assert here.start(crash_at) is not None, here.log_tail()


def died(here: Site) -> bool:
    with here.client() as cog:
        try:
            cog.daemon(2)
        except Unavailable:
            return True
    return False


@pytest.mark.parametrize(
    "step",
    [
        "restore.safe",
        "restore.journalled",
        "restore.delete:9",
        "restore.mkdir",
        "restore.write:11",
        "restore.rename:17",
        "restore.link",
        "restore.chmod",
        "restore.applied",
        "restore.synced",
        "restore.finished",
    ],
)
def test_a_step_of_a_rewind(small: Pair, step: str) -> None:
    """Files and conversation move together or not at all."""
    here, was = small.here, 0
    here.ctl("status", here.project)
    with here.client() as cog:
        here.workspace(cog).restore(small.snapshots[was])
        thread = cog.create_thread(workspace=here.workspace(cog))
        first = thread.append("system", "begin").id
        checkpoint = thread.user_message("one").file_checkpoint.snapshot_id
        thread.append("assistant", "done")
        here.workspace(cog).restore(small.snapshots[1 - was])
        small.now = 1 - was
        last = thread.user_message("two").id
        previous = recovery_of(here, cog)
    armed(here, step)
    with here.client() as cog:
        rewind = Aside(lambda: cog.thread(thread.id).rewind(first, files=True))
        rewind.join()
    assert isinstance(rewind.error, Unavailable), rewind.error
    assert died(here)
    here.ctl("status", here.project)
    with here.client() as cog:
        small.now = small.outcome(cog, previous, checkpoint)
        leaf = cog.thread(thread.id).message.leaf_id
        assert leaf == (first if small.now == was else last), step
        assert small.now == (1 - was if step == "restore.safe" else was)
        # The thread goes on from there.
        entry = cog.thread(thread.id).user_message("three")
        assert not differences(
            of_snapshot(cog.snapshot(entry.file_checkpoint.snapshot_id)), describe(here.project), [b""]
        )


@pytest.mark.parametrize(
    "step",
    [
        "index.write",
        "index.commit",
        "index.commit:2",
        "index.commit:3",
        "index.committed",
        "index.committed:3",
        "checkpoint.committed",
    ],
)
def test_a_step_of_the_store_in_a_restore(small: Pair, step: str) -> None:
    here = small.here
    here.ctl("status", here.project)
    with here.client() as cog:
        previous = recovery_of(here, cog)
    # Something that no snapshot holds yet, so that the store has something to write.
    (here.project / "package05" / "news").write_text(step)
    small.trees[small.now][b"package05/news"] = describe(here.project)[b"package05/news"]
    armed(here, step)
    with here.client() as cog:
        workspace = here.workspace(cog)
        restore = Aside(lambda: workspace.restore(small.snapshots[1 - small.now]))
        restore.join()
    assert isinstance(restore.error, Unavailable), restore.error
    assert died(here)
    here.ctl("status", here.project)
    with here.client() as cog:
        here.settled(cog)
        there = here.project / "package05" / "news"
        if there.exists():
            assert there.read_text() == step
            there.unlink()
        del small.trees[small.now][b"package05/news"]
        small.now = small.outcome(cog, previous)


@pytest.mark.parametrize(
    "step",
    [
        "checkpoint.frozen",
        "index.commit",
        "index.committed",
        "checkpoint.committed",
        "pack.append",
        "pack.appended",
        "seal.recorded",
        "pack.sync",
        "index.write",
        "seal.committed",
    ],
)
def test_a_step_of_a_message(small: Pair, step: str) -> None:
    """The entry is there if and only if its snapshot is, and nothing that was written is missed afterwards."""
    here = small.here
    here.ctl("status", here.project)
    with here.client() as cog:
        thread = cog.create_thread(workspace=here.workspace(cog))
        thread.append("system", "begin")
    extra = here.project / "package06" / "extra"
    extra.mkdir()
    armed(here, step)
    try:
        for number in range(5):
            (extra / f"{number}").write_text(f"{step} {number}\n" * 100)
        with here.client() as cog:
            message = Aside(lambda: cog.thread(thread.id).user_message("hello", id="the-message"))
            message.join()
        assert isinstance(message.error, Unavailable | None), message.error
        # What the snapshot still needs is not changed before there is a daemon to keep it.
        meanwhile = Aside(lambda: change_what_is_pending(extra))
        wait_for("the daemon dies", lambda: died(here))
        here.ctl("status", here.project)
        meanwhile.join()
        assert meanwhile.error is None
        with here.client() as cog:
            here.settled(cog)
            entries = [entry for entry in cog.thread(thread.id).entries() if entry.id == "the-message"]
            labelled = [one for one in here.workspace(cog).snapshots() if one.message.label == "the-message"]
            labelled = [one for one in labelled if one.id not in _seen]
            _seen.update(one.id for one in labelled)
            assert len(entries) == len(labelled)
            assert bool(entries) == (step not in ("checkpoint.frozen", "index.commit"))
            assert message.error is not None or entries
            for entry, snapshot in zip(entries, labelled, strict=True):
                assert entry.file_checkpoint.snapshot_id == snapshot.id
                assert b"".join(snapshot.cat("package06/extra/1")) == f"{step} 1\n".encode() * 100
                assert [one.path for one in snapshot.ls("package06/extra")] == [
                    f"package06/extra/{number}".encode() for number in range(5)
                ]
            after = cog.thread(thread.id).user_message("again")
            taken = of_snapshot(cog.snapshot(after.file_checkpoint.snapshot_id))
            assert not differences(taken, describe(here.project), [b""])
    finally:
        here.ctl("status", here.project)  # what is pending cannot be removed without a daemon
        for path in extra.iterdir():
            path.unlink()
        extra.rmdir()


_seen: set[str] = set()


def change_what_is_pending(extra: Path) -> None:
    (extra / "1").write_text("meanwhile")
    (extra / "2").unlink()


def test_a_recovery_that_is_killed_too(here: Site) -> None:
    """Each daemon that takes up the restore dies further on; others are kept out all the while, and only of that."""
    (here.project / "aside").mkdir()
    pair = Pair(here, 120)
    with here.client() as cog:
        previous = recovery_of(here, cog)
    armed(here, "restore.delete:7")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(pair.snapshots[1])
    for step in ("restore.delete:3", "restore.mkdir:2", "restore.rename:2", "restore.rename:9", "restore.applied"):
        with pytest.raises(OSError, match="busy"):
            (here.project / "package05" / "module5" / "foreign").write_text("x")
        with pytest.raises(OSError, match="busy"):
            (here.project / "package06").rename(here.project / "elsewhere")
        (here.project / "aside" / step).write_text(step)
        assert here.start(step) is None, step
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        assert here.settled(cog).last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        assert recovery_of(here, cog) != previous
        found = describe(here.project)
        made = {path for path in found if path.startswith(b"aside/")}
        assert len(made) == 5
        assert not differences(found, pair.trees[1], made), here.log_tail()
        plan = here.workspace(cog).restore(pair.snapshots[1], dry_run=True)
        assert {file.path for file in plan.files} == made
        (here.project / "package05" / "module5" / "foreign").write_text("x")
        (here.project / "package05" / "module5" / "foreign").unlink()
        here.workspace(cog).undo()
        assert not differences(describe(here.project), pair.trees[0], made)


def test_changes_of_the_bare_directory_before_the_recovery(here: Site) -> None:
    """Nobody serves it: what is changed there meanwhile gives way to the restore, and is kept in a snapshot."""
    for number in range(60):
        (here.project / f"d{number % 3}").mkdir(exist_ok=True)
        (here.project / f"d{number % 3}" / f"f{number}").write_text("one\n")
        (here.project / f"d{number % 3}" / f"same{number}").write_text("same\n")
    here.mount()
    with here.client() as cog:
        first = here.workspace(cog).checkpoint().id
        for number in range(60):
            (here.project / f"d{number % 3}" / f"f{number}").write_text("two\n")
        worker = here.worker_pid()
    armed(here, "restore.rename:20")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    kill(worker)
    unmount_all(here.base)
    (here.project / "d0" / "f3").write_text("mine, of no snapshot\n")
    (here.project / "d1" / "f4").unlink()
    (here.project / "d0" / "f6").unlink()
    (here.project / "d0" / "f6").symlink_to("of no snapshot")
    (here.project / "d1" / "f7").unlink()
    (here.project / "d1" / "f7" / "deep").mkdir(parents=True)
    (here.project / "d1" / "f7" / "deep" / "file").write_text("nor this\n")
    (here.project / "d1" / "new").write_text("new\n")
    (here.project / "d2").rename(here.project / "renamed")
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        state = here.settled(cog)
        assert state.last_recovery.outcome == workspace_pb2.Recovery.FORWARD
        for number in range(60):
            assert (here.project / f"d{number % 3}" / f"f{number}").read_text() == "one\n"
        assert (here.project / "d1" / "new").read_text() == "new\n"
        assert (here.project / "renamed" / "same2").read_text() == "same\n"
        assert (here.project / "renamed" / "f2").read_text() in ("one\n", "two\n")
        kept = [one for one in here.workspace(cog).snapshots() if one.message.label.startswith("found when")]
        assert b"".join(kept[0].cat("d0/f3")) == b"mine, of no snapshot\n"
        assert b"".join(kept[0].cat("d1/f7/deep/file")) == b"nor this\n"
        assert {entry.path: entry.symlink_target for entry in kept[0].ls("d0")}[b"d0/f6"] == b"of no snapshot"
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), describe(here.project), [b""])
