"""Snapshots are answered at their boundary and captured afterwards, while everything goes on changing."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Site
from tests.support.churn import Churn
from tests.support.tree import Tree, describe, differences, of_snapshot

#: What is left out by rule is no part of a snapshot; the root's own entry has no name there.
_LEFT_OUT = b"node_modules"


def files_of(tree: Tree) -> Tree:
    return {
        path: node
        for path, node in tree.items()
        if path and path != _LEFT_OUT and not path.startswith(_LEFT_OUT + b"/")
    }


@pytest.mark.parametrize("seed", range(12))
def test_each_snapshot_is_what_the_files_were(here: Site, seed: int) -> None:
    dice = random.Random(seed)
    churn = Churn(here.project, dice)
    churn.fill(12, 80)
    here.mount()
    taken: list[tuple[str, Tree]] = []
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        for turn in range(6):
            before = files_of(describe(here.project))
            checkpoint = thread.user_message(f"turn {turn}").file_checkpoint
            assert checkpoint is not None
            taken.append((checkpoint.snapshot_id, before))
            churn.run(dice.choice((0, 5, 60)))
        for turn, (snapshot_id, before) in enumerate(taken):
            snapshot = cog.snapshot(snapshot_id)
            found = files_of(of_snapshot(snapshot))
            assert not differences(found, before), (turn, cog.snapshot(snapshot_id))


_LARGE = 8_000_000


def _fill(project: Path) -> None:
    (project / "d").mkdir()
    for number in range(40):
        (project / "d" / f"f{number}").write_bytes(os.urandom(3000))
    (project / "large").write_bytes(os.urandom(_LARGE))


def test_what_did_not_change_is_read_once(here: Site) -> None:
    _fill(here.project)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        taken = [workspace.checkpoint() for _ in range(4)]
        (here.project / "d" / "f3").write_bytes(b"other")
        taken += [workspace.checkpoint() for _ in range(2)]
        last = workspace.checkpoint(wait_for="sealed")
        assert last.message.state == snapshot_pb2.Snapshot.SEALED
        # It is sealed after all before it.
        stats = [cog.snapshot(snapshot.id).message for snapshot in taken]
        assert {message.state for message in stats} == {snapshot_pb2.Snapshot.SEALED}
        assert stats[0].stats.hashed == 41
        assert [message.stats.hashed for message in stats[1:4]] == [0, 0, 0]
        assert stats[4].stats.hashed <= 1 and stats[5].stats.hashed == last.message.stats.hashed == 0
        assert len({bytes(message.root_hash) for message in stats[:4]}) == 1


def test_who_asks_for_a_snapshot_that_is_not_captured_waits(here: Site) -> None:
    """By every way that there is; each is asked while several are not captured."""
    _fill(here.project)
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        thread = cog.create_thread("chat", workspace=workspace)
        target = here.project / "d" / "f1"

        def turn(text: str) -> tuple[str, str]:
            target.write_text(text)
            (here.project / "large").write_bytes(text[:1].encode() * _LARGE)
            entry = thread.user_message(text)
            target.write_text(f"after {text}")
            return entry.id, entry.file_checkpoint.snapshot_id

        _, one = turn("one")
        _, two = turn("two")
        assert b"".join(cog.snapshot(two).cat("d/f1")) == b"two"
        assert b"".join(cog.snapshot(one).cat("d/f1")) == b"one"
        _, three = turn("three")
        assert len(list(cog.snapshot(three).ls("d"))) == 40
        _, four = turn("four")
        assert {change.path for change in cog.snapshot(four).diff(three)} >= {b"d/f1", b"large"}
        _, five = turn("five")
        workspace.restore(five)
        assert target.read_text() == "five"
        message, _ = turn("six")
        turn("seven")
        # Files as they were at the end of that turn: when the next message came.
        thread.rewind(message, files=True)
        assert target.read_text() == "seven"
        assert (here.project / "large").read_bytes() == b"s" * _LARGE
        workspace.undo()
        assert target.read_text() == "after seven"
