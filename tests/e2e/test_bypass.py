"""Changes that reach a mounted project past the mount, by processes that were in it before."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from cogfs.client import CogfsError, Snapshot
from cogfs.v1 import snapshot_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.ctl import TIMEOUT, Ctl
from tests.e2e.support.site import Aside, Site, as_root, wait_for
from tests.support.tree import Tree, describe, differences, of_snapshot


@contextmanager
def shell_in(directory: Path) -> Iterator[IO[str]]:
    """The input of a shell whose working directory is ``directory`` as it is now."""
    with subprocess.Popen(["sh"], cwd=directory, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.stdin.close()
            assert process.wait(TIMEOUT) == 0


def _tell(shell: IO[str], command: str, done: Path) -> None:
    """Have a shell run a command, and wait for it."""
    shell.write(f"{command}\nln -s done {done}\n")
    shell.flush()
    while not done.is_symlink():
        pass
    done.unlink()


def test_a_shell_from_before_the_mount_is_told_of_and_its_changes_are_recorded(daemon: Ctl, project: Path) -> None:
    done = daemon.base / "done"
    with shell_in(project) as shell:
        mounted = daemon.run("mount", project)
        assert mounted.returncode == 0
        assert b"past the mount" in mounted.stderr
        state = daemon.json("status", project)
        assert [(one["kind"], one["path"], one["command"]) for one in state["bypassed_by"]] == [
            ("working_directory", "", "sh")
        ]
        daemon("checkpoint", project, "--label", "before")
        _tell(shell, "echo four >> src/main.py; echo new > made; rm README", done)
        second = daemon.json("checkpoint", project, "--label", "after")
        assert daemon("cat", second["id"], "src/main.py") == "one\ntwo\nthree\nfour\n"
        assert daemon("cat", second["id"], "made") == "new\n"
        assert daemon.run("cat", second["id"], "README").returncode != 0
        # Once it stands in the mount, the worker sees all that it does.
        _tell(shell, 'cd "$PWD"', done)
        assert daemon.json("status", project)["bypassed_by"] == []
        # Once more everything is looked at: it may have done something between the last checkpoint and that.
        daemon("checkpoint", project, "--wait")
        _tell(shell, "echo five >> src/main.py", done)
        third = daemon.json("checkpoint", project, "--wait")
        assert daemon("cat", third["id"], "src/main.py").endswith("five\n")
        assert third["stats"]["hashed"] == 1


def test_a_file_opened_before_the_mount_is_watched(daemon: Ctl, project: Path) -> None:
    with open(project / "README", "a") as held:
        daemon("mount", project)
        daemon("checkpoint", project)
        held.write("more\n")
        held.flush()
        assert [one["path"] for one in daemon.json("status", project)["bypassed_by"]] == ["README"]
        second = daemon.json("checkpoint", project)
        assert daemon("cat", second["id"], "README") == "read me\nmore\n"
    assert daemon.json("status", project)["bypassed_by"] == []


def test_a_project_mounted_elsewhere_is_looked_at_whole(daemon: Ctl, project: Path) -> None:
    place = daemon.base / "elsewhere"
    daemon("mount", project, "--at", place)
    daemon("checkpoint", project)
    (project / "src" / "main.py").write_text("changed in the bare directory\n")
    (place / "README").write_text("changed in the mount\n")
    second = daemon.json("checkpoint", project)
    assert daemon("cat", second["id"], "src/main.py") == "changed in the bare directory\n"
    assert daemon("cat", second["id"], "README") == "changed in the mount\n"


def test_what_a_shell_did_before_it_ended_is_in_the_next_snapshot(daemon: Ctl, project: Path) -> None:
    with shell_in(project) as shell:
        daemon("mount", project)
        daemon("checkpoint", project, "--wait")
        _tell(
            shell,
            "echo four >> src/main.py; rm README; mkdir -p late/below; echo new > late/below/file",
            daemon.base / "done",
        )
    assert daemon.json("status", project)["bypassed_by"] == []
    second = daemon.json("checkpoint", project, "--wait")
    assert daemon("cat", second["id"], "src/main.py") == "one\ntwo\nthree\nfour\n"
    assert daemon("cat", second["id"], "late/below/file") == "new\n"
    assert daemon.run("cat", second["id"], "README").returncode != 0


def test_what_was_done_past_the_mount_is_found_by_the_next_daemon(here: Site) -> None:
    (here.project / "file").write_text("one\n")
    with shell_in(here.project) as shell:
        here.mount()
        here.ctl("checkpoint", here.project, "--wait")
        _tell(shell, "echo two >> file", here.base / "done")
    here.kill_daemon()
    here.start()
    here.ctl("status", here.project)
    second = here.json("checkpoint", here.project, "--wait")
    assert here.ctl("cat", second["id"], "file").out == "one\ntwo\n"


def test_a_descriptor_that_a_child_inherited(daemon: Ctl, project: Path) -> None:
    """The shell that opened the file has ended; what it started after the mount writes on."""
    steps = [daemon.base / name for name in ("mounted", "go", "end")]
    for step in steps:
        os.mkfifo(step)
    mounted, go, end = steps
    done = daemon.base / "done"
    child = f"read -r _ < {go}; echo more >&3; ln -s done {done}; read -r _ < {end}"
    script = f"exec 3>> {project}/README; read -r _ < {mounted}; ({child}) > /dev/null 2>&1 &"
    with subprocess.Popen(["sh", "-c", script], cwd="/") as parent:
        while str(project / "README") not in _paths_held(parent.pid):
            pass
        daemon("mount", project)
        daemon("checkpoint", project, "--wait")
        mounted.write_text("\n")
        assert parent.wait(TIMEOUT) == 0
    assert [one["path"] for one in daemon.json("status", project)["bypassed_by"]] == ["README"]
    go.write_text("\n")
    while not done.is_symlink():
        pass
    second = daemon.json("checkpoint", project, "--wait")
    assert daemon("cat", second["id"], "README") == "read me\nmore\n"
    end.write_text("\n")
    while daemon.json("status", project)["bypassed_by"]:
        pass


def _paths_held(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def test_a_directory_that_was_opened_before_the_mount(daemon: Ctl, project: Path) -> None:
    held = os.open(project / "src", os.O_RDONLY)
    try:
        daemon("mount", project)
        daemon("checkpoint", project, "--wait")
        (told,) = daemon.json("status", project)["bypassed_by"]
        assert (told["kind"], told["path"], told["pid"]) == ("handle", "src", os.getpid())
        fd = os.open("main.py", os.O_WRONLY | os.O_APPEND, dir_fd=held)
        os.write(fd, b"four\n")
        os.close(fd)
        second = daemon.json("checkpoint", project, "--wait")
        assert daemon("cat", second["id"], "src/main.py") == "one\ntwo\nthree\nfour\n"
    finally:
        os.close(held)


# --- between a boundary and its capture -------------------------------------------------------------------------------


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Closes what a test opens."""
    with ExitStack() as stack:
        yield stack


def bare(here: Site) -> Path:
    """The project past its mount, by a way that nobody can see; made before the mount."""
    place = here.base / "bare"
    place.mkdir()
    for arguments in (("--bind", str(here.project), str(place)), ("--make-private", str(place))):
        subprocess.run([*as_root(), "mount", *arguments], check=True, timeout=TIMEOUT)
    return place


@contextmanager
def unsealed(here: Site, clients: ExitStack, taken: list[Snapshot]) -> Iterator[None]:
    """A snapshot of which nothing is captured before the block has ended; it is put into the list when it is captured,
    or has failed. A call that has to wait for a capture waits for longer than the block."""
    here.kill_daemon()
    assert here.start("checkpoint.committed") is not None
    died = here.ctl("checkpoint", here.project, code=None)
    assert died.code == Reason.UNAVAILABLE.exit_code, died
    yield
    here.start()
    cog = clients.enter_context(here.client())
    here.settled(cog)
    snapshot = next(here.workspace(cog).snapshots())
    wait_for("it is captured", lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN)
    taken.append(snapshot)


def _tree(project: Path) -> Tree:
    """Without the root, which a snapshot does not list."""
    return {path: node for path, node in describe(project).items() if path}


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _change_everything(place: Path) -> None:
    (place / "overwritten").write_text("other\n")
    _append(place / "appended", "more\n")
    os.truncate(place / "cut", 0)
    (place / "removed").unlink()
    (place / "beside").write_text("beside\n")
    (place / "beside").rename(place / "replaced")
    (place / "chmodded").chmod(0o600)
    (place / "link").unlink()
    (place / "link").symlink_to("elsewhere")
    (place / "gone" / "below" / "file").unlink()
    (place / "gone" / "below").rmdir()
    (place / "gone").rmdir()
    (place / "moved").rename(place / "elsewhere")
    (place / "thinned" / "one").unlink()


_CHANGED = {
    *("overwritten", "appended", "cut", "removed", "replaced", "chmodded", "link"),
    *("gone", "moved", "thinned"),
}
_REMOVED = {"removed", "gone", "moved"}


def _fill(place: Path) -> None:
    for name in ("overwritten", "appended", "cut", "removed", "replaced", "chmodded", "kept"):
        (place / name).write_text(f"{name}\n")
    (place / "link").symlink_to("target")
    for name in ("gone/below/file", "moved/file", "thinned/one", "thinned/two"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)


@pytest.mark.parametrize("first", [True, False], ids=["everything is captured", "what changed is captured"])
def test_what_is_changed_past_the_mount_before_it_is_captured_is_named(
    here: Site, clients: ExitStack, first: bool
) -> None:
    place = bare(here)
    if first:
        _fill(here.project)
        here.mount()
    else:
        here.mount()
        here.ctl("checkpoint", here.project, "--wait")
        _fill(here.project)
    taken: list[Snapshot] = []
    with unsealed(here, clients, taken):
        _change_everything(place)
    (snapshot,) = taken
    assert snapshot.message.state == snapshot_pb2.Snapshot.FAILED, here.log_tail()
    named = {os.fsdecode(one.path).split("/")[0] for one in snapshot.message.failed}
    # Of a directory that is listed to be captured, it cannot be told which names it had.
    assert named >= (_CHANGED - _REMOVED | {"."} if first else _CHANGED), snapshot.message
    assert "kept" not in named
    # It is never a target, and the next snapshot is right.
    sentence = here.ctl("restore", snapshot.id, "--yes", code=None)
    assert sentence.code != 0 and "has failed" in sentence.err and "(it " in sentence.err
    shown = here.ctl("show", snapshot.id).out
    assert "failed" in shown and "overwritten: it was changed past the mount" in shown
    assert "failed" in here.ctl("snapshots", here.project).out
    with here.client() as cog:
        again = here.workspace(cog).checkpoint(wait_for="sealed")
        assert not differences(of_snapshot(again), _tree(place)), here.log_tail()


def test_a_message_whose_snapshot_failed_is_no_target(here: Site, clients: ExitStack) -> None:
    place = bare(here)
    _fill(here.project)
    here.mount()
    cog = clients.enter_context(here.client())
    thread = cog.create_thread("chat", workspace=here.workspace(cog))
    thread.user_message("one", id="m1", wait_for="sealed")
    (here.project / "kept").write_text("two\n")
    here.kill_daemon()
    here.start("checkpoint.committed")
    here.ctl("message", "chat", "two", "--id", "m2", code=None)
    (place / "kept").write_text("past the mount\n")
    here.start()
    later = clients.enter_context(here.client())
    here.settled(later)
    thread = later.thread("chat")
    assert [entry.id for entry in thread.entries()] == ["m1", "m2"]
    before = describe(here.project)
    snapshot = later.snapshot(thread.entry("m2").file_checkpoint.snapshot_id)
    wait_for("it is captured", lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN)
    assert snapshot.message.state == snapshot_pb2.Snapshot.FAILED, here.log_tail()
    # The end of the first turn is when the second message came.
    for dry_run in (True, False):
        with pytest.raises(CogfsError, match=r"has failed.*kept \(it was changed past the mount\)"):
            thread.rewind("m1", files=True, dry_run=dry_run)
    assert [entry.id for entry in thread.entries()] == ["m1", "m2"]
    assert not differences(describe(here.project), before)
    # Nor of a fork; one that goes on after it has the failure, too.
    place_of_fork = here.base / "fork"
    for dry_run in (True, False):
        with pytest.raises(CogfsError, match=r"has failed.*kept \(it was changed past the mount\)"):
            thread.fork("m1", files=True, into=place_of_fork, dry_run=dry_run)
    assert not place_of_fork.exists() and not thread.refresh().message.forks
    thread.user_message("three", id="m3", wait_for="sealed")
    fork = thread.fork("m3", files=True, into=place_of_fork)
    copy = later.snapshot(fork.entry("m2").file_checkpoint.snapshot_id).message
    assert copy.copied_from == snapshot.id and copy.workspace_id == fork.workspace_id
    assert copy.state == snapshot_pb2.Snapshot.FAILED and copy.failed == snapshot.message.failed
    with pytest.raises(CogfsError, match="has failed"):
        fork.rewind("m1", files=True)
    with pytest.raises(CogfsError, match="has failed"):
        later.workspace(place_of_fork).copy_snapshot(snapshot)
    # The snapshot before it can be had.
    here.workspace(later).restore(thread.entry("m1").file_checkpoint.snapshot_id)
    assert (here.project / "kept").read_text() == "kept\n"


# --- over the border of what is left out ------------------------------------------------------------------------------


def test_a_directory_that_moves_to_where_a_glob_leaves_it_out(here: Site, clients: ExitStack) -> None:
    for name in ("src/a", "src/deep/b", "kept"):
        (here.project / name).parent.mkdir(parents=True, exist_ok=True)
        (here.project / name).write_text(f"{name}\n")
    here.ctl("mount", here.project, "--exclude", "build/", "--exclude", "*.log")
    for number in range(2):
        before = _tree(here.project)
        taken: list[Snapshot] = []
        with unsealed(here, clients, taken):
            (here.project / "src").rename(here.project / "build")
            later = Aside(lambda: _rewrite(here.project / "build"))
        later.join()
        (snapshot,) = taken
        assert not differences(of_snapshot(snapshot), before), (number, snapshot.message)
        with here.client() as cog:
            after = here.workspace(cog).checkpoint(wait_for="sealed")
            assert {entry.path for entry in after.ls(recursive=True)} == {b"kept", b"build"}
        shutil.rmtree(here.project / "build")
        for name in ("src/a", "src/deep/b"):
            (here.project / name).parent.mkdir(parents=True, exist_ok=True)
            (here.project / name).write_text(f"{name} again\n")


def _rewrite(place: Path) -> None:
    (place / "a").write_text("other\n")
    (place / "deep" / "b").unlink()
    (place / "deep" / "c").write_text("new\n")


@pytest.mark.parametrize("name", ["build", "node_modules"])
def test_a_directory_that_comes_from_where_it_was_left_out(here: Site, clients: ExitStack, name: str) -> None:
    for path in ("a", "deep/b"):
        (here.project / name / path).parent.mkdir(parents=True, exist_ok=True)
        (here.project / name / path).write_text(f"{path}\n")
    here.ctl("mount", here.project, "--exclude", "build/")
    here.ctl("checkpoint", here.project, "--wait")
    (here.project / name).rename(here.project / "src")
    before = _tree(here.project)
    taken: list[Snapshot] = []
    with unsealed(here, clients, taken):
        later = Aside(lambda: _rewrite(here.project / "src"))
    later.join()
    (snapshot,) = taken
    assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
    assert not differences(of_snapshot(snapshot), before)
    with here.client() as cog:
        after = here.workspace(cog).checkpoint(wait_for="sealed")
        assert not differences(of_snapshot(after), _tree(here.project))


def test_a_directory_that_moves_into_node_modules(here: Site, clients: ExitStack) -> None:
    for name in ("src/a", "src/deep/b", "node_modules/x"):
        (here.project / name).parent.mkdir(parents=True, exist_ok=True)
        (here.project / name).write_text(f"{name}\n")
    here.mount()
    here.ctl("checkpoint", here.project, "--wait")
    (here.project / "src" / "a").write_text("changed\n")
    before = _tree(here.project)
    taken: list[Snapshot] = []

    def move() -> None:
        (here.project / "src").rename(here.project / "node_modules" / "src")
        _rewrite(here.project / "node_modules" / "src")

    with unsealed(here, clients, taken):
        later = Aside(move)
    later.join()
    (snapshot,) = taken
    assert not differences(of_snapshot(snapshot), before), snapshot.message


# --- hard links -------------------------------------------------------------------------------------------------------


def test_a_file_with_a_name_where_it_is_left_out(here: Site, clients: ExitStack) -> None:
    """As package managers make them: one file, in node_modules and in the project."""
    inside, outside = here.project / "packages" / "a.js", here.project / "node_modules" / "a" / "index.js"
    inside.parent.mkdir()
    outside.parent.mkdir(parents=True)
    inside.write_text("one\n")
    os.link(inside, outside)
    here.mount()
    here.ctl("checkpoint", here.project, "--wait")
    contents = ["one\n"]
    for change in (
        lambda: outside.write_text("two\n"),
        lambda: inside.write_text("three\n"),
        lambda: _append(outside, "four\n"),
    ):
        change()
        contents.append(inside.read_text())
        taken: list[Snapshot] = []
        with unsealed(here, clients, taken):
            later = Aside(lambda: outside.write_text("later\n"))
        later.join()
        (snapshot,) = taken
        assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
        assert _content(here, snapshot, "packages/a.js") == contents[-1]
        with here.client() as cog:
            after = here.workspace(cog).checkpoint(wait_for="sealed")
        assert _content(here, after, "packages/a.js") == "later\n"


def test_a_file_that_is_written_by_a_descriptor_and_known_by_no_name(here: Site, clients: ExitStack) -> None:
    inside, outside = here.project / "packages" / "a.js", here.project / "node_modules" / "a.js"
    inside.parent.mkdir()
    outside.parent.mkdir(parents=True)
    inside.write_text("one\n")
    os.link(inside, outside)
    here.mount()
    here.ctl("checkpoint", here.project, "--wait")
    with outside.open("a") as file:
        file.write("two\n")
        file.flush()
        outside.unlink()
        taken: list[Snapshot] = []
        with unsealed(here, clients, taken):

            def write() -> None:
                file.write("three\n")
                file.flush()

            later = Aside(write)
        later.join()
        (snapshot,) = taken
        assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
        assert _content(here, snapshot, "packages/a.js") == "one\ntwo\n"
    with here.client() as cog:
        after = here.workspace(cog).checkpoint(wait_for="sealed")
    assert _content(here, after, "packages/a.js") == "one\ntwo\nthree\n"


def _content(here: Site, snapshot: Snapshot, path: str) -> str:
    return here.ctl("cat", snapshot.id, path).out


_PLACES = {
    "out": "src/file.txt",
    "default": "node_modules/m/file.txt",
    "place": "build/file.txt",
    "glob": "src/file.log",
}


@pytest.mark.parametrize("where", ["default", "place", "glob"])
@pytest.mark.parametrize("inwards", [True, False], ids=["to where it is recorded", "to where it is left out"])
def test_a_file_that_moves_over_the_border_of_what_is_left_out(
    here: Site, clients: ExitStack, where: str, inwards: bool
) -> None:
    """Twice: before the boundary, and after it, before anything of it is captured."""
    source, target = here.project / _PLACES[where], here.project / _PLACES["out"]
    if not inwards:
        source, target = target, source
    for path in (source, target, here.project / "kept"):
        path.parent.mkdir(parents=True, exist_ok=True)
    (here.project / "kept").write_text("kept\n")
    source.write_text("one\n")
    target.write_text("replaced\n")
    here.ctl("mount", here.project, "--exclude", "build/", "--exclude", "*.log")
    here.ctl("checkpoint", here.project, "--wait")
    for content in ("two\n", "three\n"):
        source.rename(target)
        before = _recorded(here.project)
        taken: list[Snapshot] = []

        def go_on(text: str = content) -> None:
            target.rename(source)
            source.write_text(text)

        with unsealed(here, clients, taken):
            later = Aside(go_on)
        later.join()
        (snapshot,) = taken
        assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
        assert not differences(_kept(of_snapshot(snapshot)), before), content
        with here.client() as cog:
            after = here.workspace(cog).checkpoint(wait_for="sealed")
            assert not differences(_kept(of_snapshot(after)), _recorded(here.project)), content


def _recorded(project: Path) -> Tree:
    """What is not left out, as it is."""
    return _kept(describe(project))


def _kept(tree: Tree) -> Tree:
    return {
        path: node
        for path, node in tree.items()
        if path and not path.endswith(b".log") and path.split(b"/")[0] not in (b"node_modules", b"build")
    }
