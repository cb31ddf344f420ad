"""Snapshots are answered at their boundary and captured afterwards, while everything goes on changing."""

from __future__ import annotations

import random

import pytest

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
