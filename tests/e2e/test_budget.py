"""The disk budget of the store: the oldest snapshots go first, what is needed stays, and nothing is taken beyond it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cogfs.client import Client, NoSpace, Snapshot
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Site, wait_for
from tests.support.crashes import files_of
from tests.support.tree import describe, differences, of_snapshot

_MIB = 1 << 20
_BUDGET = 6 * _MIB


def _configure(ctl: Ctl | Site, text: str) -> None:
    file = ctl.base / "config.toml"
    file.write_text(text)
    (ctl.environment if isinstance(ctl, Ctl) else ctl.environ)["COGFS_CONFIG"] = str(file)


def _write(project: Path, number: int) -> None:
    (project / "data").write_bytes(number.to_bytes(4) + os.urandom(_MIB))


def _takes(cog: Client) -> int:
    return cog.daemon().store_bytes


def test_the_oldest_snapshots_go_first(here: Site) -> None:
    _configure(here, f"[store]\nmax_bytes = {_BUDGET}\n")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        thread = cog.create_thread("chat", workspace=workspace)
        taken: list[Snapshot] = []
        for number in range(10):
            _write(here.project, number)
            entry = thread.user_message(f"message {number}", wait_for="sealed")
            taken.append(cog.snapshot(entry.file_checkpoint.snapshot_id))
        was = files_of(describe(here.project))
        # By itself: nobody asks for it.
        wait_for("the store is within its budget", lambda: _takes(cog) <= _BUDGET)
        left = [one.id for one in workspace.snapshots()]
        # The newest remain, as many as there is room for.
        assert left == [one.id for one in reversed(taken)][: len(left)]
        assert 4 <= len(left) <= 6, left
        assert not differences(files_of(of_snapshot(taken[-1])), was)
        entries = list(thread.entries())
        assert [entry.file_checkpoint.pruned for entry in entries] == [number < 10 - len(left) for number in range(10)]
        assert "budget.pruned" in here.log_tail()
        stats = cog.stats()
        assert (stats.max_bytes, stats.full) == (_BUDGET, "")
        assert cog.check(data=True).ok
        # What is left can be gone back to.
        workspace.restore(left[-1])
        assert (here.project / "data").read_bytes()[:4] == (10 - len(left)).to_bytes(4)
    assert f"{_BUDGET / _MIB:.1f} MiB" in here.ctl("stats").out


def test_nothing_is_taken_beyond_it(here: Site) -> None:
    _configure(here, f"[store]\nmax_bytes = {_BUDGET}\n")
    for number in range(8):
        (here.project / f"file{number}").write_bytes(os.urandom(_MIB))
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        thread = cog.create_thread("chat", workspace=workspace)
        first = thread.user_message("first", wait_for="sealed").file_checkpoint.snapshot_id
        wait_for("the budget is used up", lambda: cog.stats().full)
        # The newest snapshot stays, though it is what takes more than there may be.
        assert [one.id for one in workspace.snapshots()] == [first]
        with pytest.raises(NoSpace, match="budget"):
            workspace.checkpoint()
        with pytest.warns(UserWarning, match="budget"):
            second = thread.user_message("second")
        assert not second.HasField("file_checkpoint")
        # Going back is possible all the same.
        was = describe(here.project)
        (here.project / "file0").unlink()
        workspace.restore(first)
        assert not differences(describe(here.project), was)
        for number in range(8):
            (here.project / f"file{number}").unlink()
        here.ctl("daemon", "stop")
    _configure(here, "[store]\nmax_bytes = 0\n")
    here.ctl("daemon", "start")
    with here.client() as cog:
        here.settled(cog)
        assert here.workspace(cog).checkpoint(wait_for="sealed").id


def test_a_configuration_that_makes_no_sense(ctl: Ctl) -> None:
    _configure(ctl, "[store]\nmax_byte = 1\n")
    refused = ctl.run("daemon", "start")
    assert refused.returncode == 10, refused
    assert b"has no key 'max_byte'" in refused.stderr and b"Traceback" not in refused.stderr
    _configure(ctl, "[log]\nlevel = 'debug'\n")
    ctl("daemon", "start")
