"""Commands whose processes come and go while they are looked for."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.fsd.control import processes
from cogfs.fsd.control.commands import Commands
from cogfs.fsd.control.holds import Holds
from cogfs.fsd.control.processes import Stat
from cogfs.store.schema import WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Of a store with one workspace."""
    with Store.open(tmp_path / "store") as store:
        with store.write() as writer:
            writer.put_workspace(WorkspaceRow("ws", os.fsencode(tmp_path), b"", WorkspaceOptions(), 0))
        holds = Holds()
        found = Commands(store, holds)
        yield found
        holds.close()
        found.close()


@pytest.mark.parametrize("grouped", [True, False], ids=["in a group of its own", "without one"])
def test_the_last_ends_while_it_is_looked_for_and_has_begun_another(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    if not grouped:
        monkeypatch.setattr("cogfs.fsd.control.cgroups.make", lambda pid, name: "")
    everything = processes.all_of_them
    # Not one of our own children, which are no commands.
    script = "setsid -w sh -c 'echo $$; read x; sleep 1000 > /dev/null & echo $!'; true"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        to_it, from_it = shell.stdin, shell.stdout
        assert to_it is not None and from_it is not None
        registered = int(from_it.readline())
        left = 0

        def seen_before() -> dict[int, Stat]:
            """The first time, what runs as of a moment ago; the last of the command has ended when it is looked at."""
            nonlocal left
            stats = everything()
            if not left:
                to_it.write("go\n")
                to_it.flush()
                left = int(from_it.readline())
                shell.wait()
                stats.pop(registered, None)
                stats.pop(left, None)
            return stats

        commands.register("ws", "", "", registered, "")
        monkeypatch.setattr(processes, "all_of_them", seen_before)
        try:
            for _ in range(2):
                assert [[one.pid for one in each.processes] for each in commands.running()] == [[left]]
        finally:
            os.kill(left, signal.SIGKILL)
