"""Changes that reach a mounted project past the mount, by processes that were in it before."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.e2e.ctl import TIMEOUT, Ctl


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
