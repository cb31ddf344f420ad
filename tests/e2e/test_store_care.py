"""Check, repair and stats by a daemon that goes on with its work, with bytes of its store damaged for real."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cogfs.client import Client, CogfsError
from tests.e2e.ctl import Ctl
from tests.support.tree import describe


def _packs(daemon: Ctl) -> list[Path]:
    return sorted((daemon.base / "state" / "store" / "packs").iterdir())


def _wipe(path: Path, start: int = 20) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(path.stat().st_size - start))


def test_what_files_still_have_comes_back(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project)
    gone = random.Random(1).randbytes(50_000)
    (project / "changed").write_bytes(gone)
    (project / "same").write_bytes(random.Random(2).randbytes(6_000_000))
    first = workspace.checkpoint("first", wait_for="sealed")
    (project / "changed").write_text("something else")
    assert daemon.json("check", "--data")["ok"]
    assert "all is well" in daemon("check") or daemon.run("check").stderr
    for path in _packs(daemon):
        _wipe(path)
    found = daemon.run("check", "--data", "--json")
    assert found.returncode == daemon.run("check").returncode != 0
    assert b"affected" in found.stdout
    done = daemon.json("repair")
    assert done["objects_lost"] == 1
    assert [(one["snapshot_id"], one["path"]) for one in done["affected"] if one["snapshot_id"]] == [
        (first.id, "changed")
    ]
    assert done["objects_remade"] >= 5
    # All but that can be read, and the next checkpoints are whole.
    assert b"".join(first.cat("same")) == (project / "same").read_bytes()
    with pytest.raises(CogfsError):
        b"".join(first.cat("changed"))
    second = workspace.checkpoint("second", wait_for="sealed")
    tree = describe(project)
    (project / "same").write_text("changed")
    (project / "README").unlink()
    workspace.restore(second.id)
    assert describe(project) == tree
    # The lost content comes again with the file.
    (project / "changed").write_bytes(gone)
    workspace.checkpoint("third", wait_for="sealed")
    assert b"".join(first.cat("changed")) == gone
    assert daemon.json("check", "--data")["ok"]
    assert daemon.json("gc", "--grace", "0s", "--thorough")["deferred"] == ""
    assert daemon.json("check", "--data")["ok"]


def test_a_collection_names_what_it_cannot_read(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project)
    first = workspace.checkpoint("first", wait_for="sealed")
    for path in _packs(daemon):
        _wipe(path)
    done = daemon.json("gc", "--grace", "0s")
    assert "repair" in done["deferred"]
    assert first.id in {one["snapshot_id"] for one in done["unreadable"]}
    assert first.id in daemon("gc", "--grace", "0s")
    daemon("repair")
    assert daemon.json("gc", "--grace", "0s")["deferred"] == ""


def test_what_takes_the_space(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project)
    (project / "large").write_bytes(random.Random(1).randbytes(500_000))
    first = workspace.checkpoint("first", wait_for="sealed")
    (project / "large").write_bytes(random.Random(2).randbytes(300_000))
    second = workspace.checkpoint("second", wait_for="sealed")
    (project / "text").write_text("again and again\n" * 20_000)
    third = workspace.checkpoint("third", wait_for="sealed")
    found = daemon.json("stats")
    (mine,) = found["workspaces"]
    assert mine["snapshot_count"] == 3
    assert mine["shared_bytes"] == 0
    by_id = {one["snapshot_id"]: one for one in mine["snapshots"]}
    assert 500_000 < by_id[first.id]["unique_bytes"] < 505_000
    assert by_id[second.id]["unique_bytes"] < 5_000
    assert by_id[second.id]["shared_bytes"] > 300_000
    # What is recorded of the workspace needs it, too.
    assert by_id[third.id]["unique_bytes"] == 0
    assert found["ratio"] > 1.2
    assert found["unneeded_bytes"] < 5_000
    first.delete()
    assert daemon.json("stats")["unneeded_bytes"] > 500_000
    shown = daemon("stats", "--snapshots")
    assert str(project) in shown
    assert second.id in shown
