"""Changes that reach a mounted project past the mount, by processes that were in it before."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.e2e.ctl import TIMEOUT, Ctl
from tests.e2e.support.site import Site


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
