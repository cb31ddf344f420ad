"""``kill -9`` of cogfsd at each step of a fork: there is the whole of it, or nothing."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogfs.client import Client, CogfsError, NotFound, ThreadBusy, Unavailable
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Aside, Site, kill, mounts_below, site, wait_for
from tests.support.tree import Tree, describe, differences

_KILLS = 12


def plant(root: Path, files: int) -> None:
    for number in range(files):
        directory = root / f"d{number % 5}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{number}").write_text(f"content of {number}\n" * (number % 30 + 1))
    (root / "soft").symlink_to("d1")
    os.link(root / "d1" / "f1", root / "hard")


def change(root: Path, files: int) -> None:
    for number in range(0, files, 2):
        (root / f"d{number % 5}" / f"f{number}").write_text("changed\n")
    for number in range(1, files, 4):
        (root / f"d{number % 5}" / f"f{number}").unlink()
    (root / "soft").unlink()
    (root / "soft").mkdir()
    (root / "soft" / "new").write_text("new\n")


class Stage:
    """A thread whose second message is to be forked from, and a workspace beside it."""

    def __init__(self, here: Site, files: int, *, scan: bool = False) -> None:
        self.here = here
        self.scan = scan
        plant(here.project, files)
        self.second = here.base / "second"
        self.second.mkdir()
        (self.second / "own").write_text("own\n")
        (self.second / "d1").write_text("a file here\n")
        scanned = ["--scan"] if scan else []
        here.ctl("mount", here.project, *scanned)
        here.ctl("mount", self.second, *scanned)
        here.daemon_pid()
        with here.client() as cog:
            thread = cog.create_thread("chat", workspace=here.workspace(cog))
            thread.user_message("one", id="m1")
            thread.append("assistant", "did it", id="a1")
            thread.put_memory("x", ["a1"], id="x")
            change(here.project, files)
            self.wanted = describe(here.project)
            thread.user_message("two", id="m2")
            (here.project / "d0" / "f0").unlink()
            (here.project / "d2" / "later").write_text("later\n")
        self.now = describe(here.project)
        self.was = describe(self.second)

    def into(self, where: str) -> Path:
        return {"new": self.here.base / "fork", "empty": self.here.base / "empty"}.get(where, self.second)

    def check_whole(self, cog: Client, name: str, place: Path) -> None:
        """The fork is there, with all that belongs to it."""
        fork = cog.thread(name)
        assert [entry.id for entry in fork.entries()] == ["m1", "a1"]
        assert [memory.id for memory in fork.memory(active_only=True)] == ["x"]
        assert name in [link.thread_id for link in cog.thread("chat").message.forks]
        workspace = cog.workspace(place)
        assert fork.workspace_id == workspace.id
        assert not differences(describe(place), self.wanted)
        report = fork.rewind("a1", files=True)
        assert report.files.exact and not report.files.restore.files
        held = {snapshot.id for snapshot in workspace.snapshots()}
        assert {entry.file_checkpoint.snapshot_id for entry in fork.entries() if entry.HasField("file_checkpoint")} <= (
            held
        )

    def check_nothing(self, cog: Client, name: str, where: str, copies: int) -> None:
        """There is no fork, and nothing that was made for it."""
        with pytest.raises(NotFound):
            cog.thread(name)
        assert name not in [link.thread_id for link in cog.thread("chat").message.forks]
        place = self.into(where)
        if where == "second":
            assert not differences(describe(place), self.was), self.here.log_tail()
            workspace = cog.workspace(place)
            assert sum(bool(snapshot.message.copied_from) for snapshot in workspace.snapshots()) == copies
            return
        with pytest.raises(NotFound):
            cog.workspace(place)
        assert str(place) not in mounts_below(self.here.base)
        assert place.exists() == (where == "empty"), self.here.log_tail()
        if where == "empty":
            assert list(place.iterdir()) == []

    def check_the_rest(self, cog: Client) -> None:
        """What was forked from is as it was."""
        assert not differences(describe(self.here.project), self.now)
        assert cog.thread("chat").message.leaf_id == "m2"
        assert {memory.id for memory in cog.thread("chat").memory(active_only=True)} == {"x"}


def copies_in(cog: Client, place: Path) -> int:
    return sum(bool(snapshot.message.copied_from) for snapshot in cog.workspace(place).snapshots())


@pytest.fixture(scope="module", params=[False, True], ids=["mounted", "scanned"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with site() as place:
        yield Stage(place, 60, scan=request.param)


def killed(here: Site, step: str, stage: Stage, name: str, place: Path) -> None:
    """A daemon that kills itself at a step gets a fork to make; another one takes its place."""
    here.kill_daemon()
    assert here.start(step) is not None, here.log_tail()
    with here.client() as cog:
        fork = Aside(lambda: cog.thread("chat").fork("a1", id=name, files=True, into=place))
        fork.join()
        assert isinstance(fork.error, Unavailable), (step, fork.error)
    here.ctl("status", here.project)
    here.daemon_pid()


#: The steps in their order, up to the transaction that completes the fork.
_MAKING = ["fork.registered", "fork.made", "fork.mounted"]
_RESTORING = [
    "restore.safe",
    "restore.journalled",
    "restore.mkdir",
    "restore.write:7",
    "restore.rename:9",
    "restore.applied",
    "restore.synced",
    "fork.written",
]


@pytest.mark.parametrize("step", ["fork.checked", *_MAKING, *_RESTORING])
def test_a_fork_into_a_new_directory_that_is_not_completed_is_not_there(stage: Stage, step: str) -> None:
    here, name = stage.here, f"new-{step.replace(':', '-')}"
    killed(here, step, stage, name, stage.into("new"))
    with here.client() as cog:
        stage.check_nothing(cog, name, "new", 0)
        stage.check_the_rest(cog)


@pytest.mark.parametrize("step", ["fork.mounted", "restore.rename:9", "fork.written"])
def test_nor_one_into_an_empty_directory(stage: Stage, step: str) -> None:
    here, name, place = stage.here, f"empty-{step.replace(':', '-')}", stage.into("empty")
    place.mkdir(exist_ok=True)
    killed(here, step, stage, name, place)
    with here.client() as cog:
        stage.check_nothing(cog, name, "empty", 0)
        stage.check_the_rest(cog)


@pytest.mark.parametrize("step", [*_RESTORING, "restore.delete"])
def test_nor_one_into_a_workspace(stage: Stage, step: str) -> None:
    here, name = stage.here, f"second-{step.replace(':', '-')}"
    with here.client() as cog:
        before = copies_in(cog, stage.second)
    killed(here, step, stage, name, stage.second)
    with here.client() as cog:
        state = cog.workspace(stage.second).message
        assert state.state == workspace_pb2.Workspace.ACTIVE
        if step not in ("restore.safe",):
            assert state.last_recovery.outcome == workspace_pb2.Recovery.BACK
            assert name in state.last_recovery.reason
        stage.check_nothing(cog, name, "second", before)
        stage.check_the_rest(cog)
        # Others are kept from nothing any more.
        (stage.second / "d1").write_text("a file here\n")


def test_one_that_was_completed_is_there(stage: Stage) -> None:
    """The transaction was committed, and the answer was not given."""
    here, place = stage.here, stage.into("new")
    killed(here, "restore.finished", stage, "done", place)
    with here.client() as cog:
        here.settled(cog)
        stage.check_whole(cog, "done", place)
        stage.check_the_rest(cog)
        workspace = cog.workspace(place)
        workspace.unmount()
        cog.thread("done").delete()
        workspace.delete()
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    place.rmdir()


def test_taking_back_is_killed_too(stage: Stage) -> None:
    here, place, name = stage.here, stage.into("new"), "twice"
    here.kill_daemon()
    assert here.start("restore.rename:9") is not None
    with here.client() as cog, pytest.raises(Unavailable):
        cog.thread("chat").fork("a1", id=name, files=True, into=place)
    for step in ("restore.delete:3", "restore.applied", "restore.synced", "fork.unmounted", "fork.removed"):
        assert here.start(step) is None, (step, here.log_tail())
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        stage.check_nothing(cog, name, "new", 0)
        stage.check_the_rest(cog)


def test_at_any_moment(stage: Stage) -> None:
    """The whole, or nothing, whatever the moment; and a fork that was answered is there."""
    here, place = stage.here, stage.second
    chance = random.Random(77)
    with here.client() as cog:
        begun = time.monotonic()
        cog.thread("chat").fork("a1", id="timed", files=True, into=place)
        duration = time.monotonic() - begun
        cog.workspace(place).undo()
    assert not differences(describe(place), stage.was)
    whole = nothing = 0
    for number in range(_KILLS):
        name = f"moment{number}"
        pid = here.daemon_pid()
        with here.client() as cog:
            copies = copies_in(cog, place)
            fork = Aside(lambda: cog.thread("chat").fork("a1", id=name, files=True, into=place))  # noqa: B023
            time.sleep((number + chance.random()) / _KILLS * duration * 1.2)
            kill(pid)
            fork.join()
        here.ctl("status", here.project)
        here.daemon_pid()
        with here.client() as cog:
            here.settled(cog)
            try:
                cog.thread(name)
            except NotFound:
                assert fork.error is not None
                stage.check_nothing(cog, name, "second", copies)
                nothing += 1
            else:
                stage.check_whole(cog, name, place)
                restore_to(cog, stage, place)
                whole += 1
            stage.check_the_rest(cog)
    assert nothing, (whole, nothing)


def restore_to(cog: Client, stage: Stage, place: Path) -> None:
    """Bring the workspace beside back to what it was."""
    workspace = cog.workspace(place)
    for snapshot in workspace.snapshots():
        held: set[bytes] = {entry.path for entry in snapshot.ls()}
        if held == {b"own", b"d1"}:
            workspace.restore(snapshot.id)
            break
    assert not differences(describe(place), stage.was)


def test_what_others_put_there_meanwhile_stays(here: Site) -> None:
    """A workspace that somebody has begun to use is not taken away with the fork."""
    stage = Stage(here, 30, scan=True)
    place = stage.into("new")
    here.kill_daemon()
    assert here.start("restore.applied") is not None
    with here.client() as cog, pytest.raises(Unavailable):
        cog.thread("chat").fork("a1", id="branch", files=True, into=place)
    # Where there is a mount, nobody could.
    (place / "mine").write_text("mine\n")
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        with pytest.raises(NotFound):
            cog.thread("branch")
        assert {path.name for path in place.iterdir()} == {"mine"}
        workspace = cog.workspace(place)
        assert workspace.root == bytes(place)
        assert workspace.message.state == workspace_pb2.Workspace.DETACHED
        workspace.mount(scan=True)
        assert (place / "mine").read_text() == "mine\n"
        stage.check_the_rest(cog)


def test_files_that_fail_take_everything_back(here: Site) -> None:
    """The store has lost what the restore needs; found before anything in the new workspace is changed."""
    content = os.urandom(40_000)
    (here.project / "precious").write_bytes(content)
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        thread.user_message("one", id="m1", wait_for="sealed")
        (pack,) = [path for path in (here.state / "store" / "packs").iterdir() if content[:500] in path.read_bytes()]
        at = pack.read_bytes().index(content[:500]) + 250
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[250] ^ 0xFF]))
        place = here.base / "fork"
        tree: Tree = describe(here.project)
        with pytest.raises(CogfsError, match="object"):
            thread.fork("m1", id="branch", files=True, into=place)
        with pytest.raises(NotFound):
            cog.thread("branch")
        assert not place.exists()
        assert [workspace.root for workspace in cog.workspaces()] == [bytes(here.project)]
        assert not thread.refresh().message.forks
        assert not differences(describe(here.project), tree)


def test_while_a_rewind_of_the_thread_is_not_finished(here: Site) -> None:
    """Neither its memory nor its forks are made from what is neither before nor after."""
    (here.project / "file").write_text("one\n")
    here.ctl("mount", here.project, "--scan")
    here.daemon_pid()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        thread.user_message("one", id="m1")
        (here.project / "file").write_text("two\n")
        thread.user_message("two", id="m2")
        (here.project / "file").write_text("three\n")
    here.kill_daemon()
    assert here.start("restore.applied") is not None
    with here.client() as cog, pytest.raises(Unavailable):
        cog.thread("chat").rewind("m1", files=True)
    away = here.base / "away"
    here.project.rename(away)
    here.ctl("daemon", "start")
    here.daemon_pid()
    with here.client() as cog:
        thread = cog.thread("chat")
        calls: list[Callable[[], object]] = [
            lambda: thread.put_memory("x", ["m1"]),
            lambda: thread.fork("m1", id="branch"),
            lambda: thread.fork("m1", id="branch", dry_run=True),
            lambda: thread.fork("m1", id="branch", files=True, into=here.base / "fork"),
            thread.delete,
        ]
        for call in calls:
            with pytest.raises(ThreadBusy, match="not finished"):
                call()
        assert thread.refresh().message.leaf_id == "m2" and not list(thread.memory())
        with pytest.raises(NotFound):
            cog.thread("branch")
        assert not (here.base / "fork").exists()
        away.rename(here.project)
        here.ctl("mount", here.project, "--scan")
        here.settled(cog)
        assert thread.refresh().message.leaf_id == "m1"
        assert (here.project / "file").read_text() == "two\n"
        thread.put_memory("x", ["m1"])
        assert [memory.content for memory in thread.fork("m1").memory()] == ["x"]


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.3])
def test_the_worker_of_the_new_workspace_is_killed(here: Site, wait: float) -> None:
    stage = Stage(here, 400)
    place = stage.into("new")
    with here.client() as cog:
        fork = Aside(lambda: cog.thread("chat").fork("a1", id="branch", files=True, into=place))
        workers: list[int] = []

        def served() -> bool:
            workers[:] = [one.message.worker_pid for one in cog.workspaces() if one.root == bytes(place)]
            return bool(workers and workers[0]) or fork.result is not None or fork.error is not None

        wait_for("the workspace has a worker", served)
        time.sleep(wait)
        if workers and workers[0]:
            kill(workers[0])
        fork.join()
        if fork.error is not None:
            stage.check_nothing(cog, "branch", "new", 0)
        else:
            wait_for("it is back", lambda: cog.workspace(place).message.state == workspace_pb2.Workspace.ACTIVE)
            stage.check_whole(cog, "branch", place)
        stage.check_the_rest(cog)
        # The same can be had now.
        if fork.error is not None:
            cog.thread("chat").fork("a1", id="branch", files=True, into=place)
            stage.check_whole(cog, "branch", place)
