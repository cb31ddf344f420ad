"""Boundaries that are captured late: several more were made, and names and files have changed again, by then."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cogfs.client import Snapshot
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Site, kill, unmount_all, wait_for
from tests.support.crashes import files_of
from tests.support.stopping import UNREAD, Stopped
from tests.support.tree import Tree, describe, differences, of_snapshot


def _captured(snapshot: Snapshot) -> Tree:
    wait_for("it is captured", lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN)
    assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
    return files_of(of_snapshot(snapshot))


def _make(place: Path) -> None:
    for name in ("first", "second", "third"):
        (place / name).write_text(f"{name}\n")
    os.link(place / "first", place / "other")
    os.link(place / "second", place / "second too")


def _append(place: Path) -> None:
    with (place / "first").open("a") as file:
        file.write("more\n")


def _replace(place: Path) -> None:
    os.replace(place / "second", place / "other")


@pytest.mark.parametrize("known", [True, False], ids=["a name that the worker knows", "one that it does not"])
@pytest.mark.parametrize(
    "again",
    [
        lambda place: (place / "other").unlink(),
        lambda place: os.replace(place / "other", place / "elsewhere"),
        lambda place: os.replace(place / "third", place / "other"),
    ],
    ids=["removed", "moved", "replaced again"],
)
def test_the_other_name_of_a_file_that_changed_is_replaced_twice(
    here: Site, known: bool, again: Callable[[Path], object]
) -> None:
    """The first boundary lists the file by another name, and the second one lists the name."""
    model = here.base / "model"
    model.mkdir()
    for place in (here.project, model):
        _make(place)
    stopped = Stopped(here, "seal.failed", more=UNREAD)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        workspace.checkpoint(wait_for="sealed")
        if known:
            (here.project / "other").lstat()
        taken: list[tuple[Snapshot, Tree]] = []
        stopped.arm()
        for act in (_append, _replace, again):
            for place in (here.project, model):
                act(place)
            taken.append((workspace.checkpoint(), files_of(describe(model))))
        stopped.go_on()
        for snapshot, was in taken:
            assert not differences(_captured(snapshot), was)


def test_what_is_in_a_directory_that_came_back_is_changed_before_it_is_captured(here: Site) -> None:
    """One from where nothing is recorded, so that the worker cannot list what is in it."""
    back = here.project / "back"
    below = here.project / "node_modules" / "below"
    (below / "deep").mkdir(parents=True)
    for name in ("removed", "replaced", "written", "deep/removed"):
        (below / name).write_text(f"{name}\n")
    stopped = Stopped(here, "seal.failed", more=UNREAD)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        workspace.checkpoint(wait_for="sealed")
        stopped.arm()
        below.rename(back)
        was = files_of(describe(here.project))
        snapshot = workspace.checkpoint()
        (back / "removed").unlink()
        (back / "new").write_text("new\n")
        os.replace(back / "new", back / "replaced")
        (back / "written").write_text("again\n")
        shutil.rmtree(back / "deep")
        workspace.checkpoint()
        (back / "replaced").unlink()
        stopped.go_on()
        assert not differences(_captured(snapshot), was)


#: The first of the boundaries that wait cannot be captured, and the second has to have what it lists.
_FIRST_FAILS = """
record = sealer.Sealer._record
failed = []
def wait_and_fail(self, *arguments):
    waited = False
    while os.path.exists(place + "/armed") and not os.path.exists(place + "/go"):
        time.sleep(0.005)
        waited = True
    if waited and not failed:
        failed.append(True)
        raise OSError(5, "a test has it fail")
    return record(self, *arguments)
sealer.Sealer._record = wait_and_fail
"""


def _touch(place: Path) -> None:
    with (place / "file").open("a") as file:
        file.write("more\n")
    (place / "directory").chmod(0o700)
    (place / "directory" / "below").write_text("more\n")
    (place / "made").mkdir()
    (place / "made" / "below").write_text("new\n")


def _leave(place: Path, name: str) -> None:
    os.replace(place / name, place / "node_modules" / name)


def _leave_and_put(place: Path, name: str, other: str) -> None:
    _leave(place, name)
    os.replace(place / other, place / name)


def _leave_and_come_back(place: Path, name: str) -> None:
    _leave(place, name)
    os.replace(place / "node_modules" / name, place / f"{name} again")


@pytest.mark.parametrize(
    "between",
    [
        lambda place: _leave(place, "file"),
        lambda place: _leave_and_put(place, "file", "other"),
        lambda place: _leave_and_put(place, "file", "other directory"),
        lambda place: _leave_and_come_back(place, "file"),
        lambda place: os.replace(place / "other", place / "file"),
        lambda place: (place / "file").unlink(),
        lambda place: shutil.rmtree(place / "made"),
        lambda place: shutil.rmtree(place / "directory"),
    ],
    ids=[
        "a file leaves",
        "and another one comes",
        "and a directory comes",
        "a file leaves and comes back",
        "a file is replaced",
        "a file is removed",
        "a new directory is removed",
        "a directory is removed",
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["as it is", "changed again before it is captured"])
def test_what_a_failed_one_lists_has_left_its_place_before_the_next(
    here: Site, between: Callable[[Path], object], later: bool
) -> None:
    """A directory waits with leaving until no boundary needs it, and a file does not."""
    model = here.base / "model"
    model.mkdir()
    for place in (here.project, model):
        for name in ("directory", "other directory", "node_modules"):
            (place / name).mkdir()
        for name in ("file", "other", "directory/below", "other directory/inside"):
            (place / name).write_text(f"{name}\n")
    stopped = Stopped(here, "restore.finished", more=_FIRST_FAILS)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        workspace.checkpoint(wait_for="sealed")
        describe(here.project)
        stopped.arm()
        for place in (here.project, model):
            _touch(place)
        first = workspace.checkpoint()
        for place in (here.project, model):
            between(place)
        second = workspace.checkpoint()
        was = files_of(describe(model))
        if later:
            for path in sorted(here.project.iterdir()):
                if path.is_file():
                    path.write_text("later\n")
                elif path.name != "node_modules":
                    shutil.rmtree(path)
        stopped.go_on()
        assert not differences(_captured(second), was)
        assert first.refresh().message.state == snapshot_pb2.Snapshot.FAILED


# --- what was not protected all the time ------------------------------------------------------------------------------

#: Nothing is sealed while there is a file "held".
_HELD = """
seal = sealer.Sealer._seal
def wait_and_seal(self, row):
    while os.path.exists(place + "/held") and not self._closed:
        time.sleep(0.005)
    seal(self, row)
sealer.Sealer._seal = wait_and_seal
"""


class _Held:
    """A daemon that captures nothing before ``let_go``."""

    def __init__(self, here: Site) -> None:
        self._here = here
        self._held = here.base / "stop" / "held"
        Stopped(here, "seal.failed", more=_HELD)

    def hold(self) -> None:
        self._held.touch()

    def let_go(self) -> None:
        self._held.unlink()

    def restart(self, *, worker: int = 0) -> None:
        """Killed, with the worker where that is given; then a daemon that captures."""
        self._here.kill_daemon()
        if worker:
            kill(worker)
            unmount_all(self._here.project)


@contextmanager
def _log_full(worker: int) -> Iterator[None]:
    """The worker can write to no file, as if its disk were full."""
    _, hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (hard, hard))


def _outcome(snapshot: Snapshot, was: Tree) -> str:
    """FAILED, or SEALED and what the files were."""
    wait_for("it is captured", lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN)
    if snapshot.message.state == snapshot_pb2.Snapshot.FAILED:
        assert snapshot.message.reason
        return "FAILED"
    assert not differences(files_of(of_snapshot(snapshot)), was)
    return "SEALED"


def _fill(project: Path) -> None:
    (project / "d" / "sub").mkdir(parents=True)
    for name in ("x", "z", "w", "d/in", "d/sub/keep", "d/sub/x"):
        (project / name).write_text(f"{name}\n")


@pytest.mark.parametrize("first", [True, False], ids=["the first of the project", "a later one"])
@pytest.mark.parametrize("restart", ["", "control", "both"], ids=["", "a daemon that is killed", "all are killed"])
def test_what_was_not_preserved_for_some_time_fails_and_what_builds_upon_it(
    here: Site, first: bool, restart: str
) -> None:
    """The log cannot be written for a moment, and can again for the next boundary."""
    project = here.project
    _fill(project)
    held = _Held(here)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        if not first:
            workspace.checkpoint(wait_for="sealed")
        held.hold()
        with (project / "x").open("a") as file:
            file.write("more\n")
        (project / "d" / "new").write_text("new\n")
        taken = [(workspace.checkpoint().id, files_of(describe(project)))]
        worker = workspace.status().worker_pid
        with _log_full(worker):
            shutil.rmtree(project / "d")
            (project / "z").unlink()
        (project / "y").write_text("y\n")
        taken.append((workspace.checkpoint().id, files_of(describe(project))))
        (project / "y").unlink()
        (project / "x").write_text("again\n")
        taken.append((workspace.checkpoint().id, files_of(describe(project))))
        (project / "x").write_text("and again\n")
    if restart:
        held.restart(worker=worker if restart == "both" else 0)
    held.let_go()
    if restart:
        here.start()
    with here.client() as cog:
        if restart:
            here.settled(cog)
        assert [_outcome(cog.snapshot(id), was) for id, was in taken] == ["FAILED"] * 3
        was = files_of(describe(project))
        assert _outcome(here.workspace(cog).checkpoint(), was) == "SEALED"


def test_what_is_removed_while_nobody_serves_the_files(here: Site) -> None:
    """Two boundaries wait; everything is killed, and what the first one lists goes from the bare directory."""
    project = here.project
    _fill(project)
    held = _Held(here)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        workspace.checkpoint(wait_for="sealed")
        held.hold()
        (project / "new").write_text("new\n")
        (project / "d" / "new").write_text("new\n")
        taken = [workspace.checkpoint().id]
        (project / "w").write_text("again\n")
        taken.append(workspace.checkpoint().id)
        worker = workspace.status().worker_pid
    held.restart(worker=worker)
    held.let_go()
    (project / "new").unlink()
    shutil.rmtree(project / "d")
    here.start()
    with here.client() as cog:
        here.settled(cog)
        assert [_outcome(cog.snapshot(id), {}) for id in taken] == ["FAILED", "FAILED"]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_directory_moves_deeper_after_one_that_failed(here: Site, depth: int) -> None:
    """What is below it was changed before, and is in the snapshots after that."""
    project = here.project
    _fill(project)
    above = project.joinpath(*("abc"[:depth]))
    above.mkdir(parents=True)
    stopped = Stopped(here, "restore.finished", more=_FIRST_FAILS)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        workspace.checkpoint(wait_for="sealed")
        stopped.arm()
        (project / "d" / "sub" / "x").write_text("changed\n")
        first = workspace.checkpoint()
        (project / "d").rename(above / "d")
        second, was = workspace.checkpoint(), files_of(describe(project))
        stopped.go_on()
        assert _outcome(second, was) == "SEALED"
        assert _outcome(first, {}) == "FAILED"
        assert _outcome(workspace.checkpoint(), was) == "SEALED"
