"""Collections by a daemon that goes on with its work: space comes back, and what snapshots hold stays right."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from cogfs.client import Client, Workspace
from cogfs.store.records import PACK_HEADER_SIZE
from tests.e2e.ctl import Ctl
from tests.e2e.support.site import Site
from tests.support.tree import Tree, describe, of_snapshot

NOW = timedelta(0)


def _packs(daemon: Ctl) -> int:
    return sum(path.stat().st_size for path in (daemon.base / "state" / "store" / "packs").iterdir())


def _contents(tree: Tree) -> dict[bytes, str]:
    return {path: node.content for path, node in tree.items() if node.kind == "file"}


def test_what_was_pruned_gives_its_space_back(daemon: Ctl, project: Path, cog: Client) -> None:
    workspace = cog.mount(project)
    trees = {}
    for number in range(8):
        (project / "large").write_bytes(random.Random(number).randbytes(1_000_000))
        (project / f"own{number}").write_bytes(random.Random(-number).randbytes(100_000))
        snapshot = workspace.checkpoint(str(number), wait_for="sealed")
        trees[snapshot.id] = describe(project)
    before = _packs(daemon)
    assert before > 8_000_000
    deleted = workspace.prune({"count": 3}).deleted
    assert len(deleted) == 5
    # It came in within the last hour.
    assert daemon.json("gc")["objects_dropped"] == 0
    done = daemon.json("gc", "--grace", "0s")
    # Their directories may be what later ones are stored against.
    assert done["objects_dropped"] >= 5
    assert done["deferred"] == ""
    # But for the header of the pack that took what stays.
    assert before - _packs(daemon) == done["bytes_freed"] - PACK_HEADER_SIZE > 4_000_000
    assert "freed" in daemon("gc", "--grace", "0s", "--thorough")

    kept = {name: tree for name, tree in trees.items() if name not in deleted}
    for name, tree in kept.items():
        assert _contents(of_snapshot(cog.snapshot(name))) == _contents(tree)
    oldest = min(kept)
    workspace.restore(oldest)
    assert describe(project) == kept[oldest]
    workspace.undo()
    assert describe(project) == kept[max(kept)]
    assert daemon.fails("VALIDATION_ERROR", 10, "gc", "--grace", "400d")["message"]


def test_while_others_work(daemon: Ctl, project: Path, cog: Client) -> None:
    """Two threads change, checkpoint, prune and restore, and nothing that a collection may drop in between is missing
    afterwards."""
    other = daemon.base / "other"
    other.mkdir()
    ended = threading.Event()
    collected = []

    def work(root: Path, seed: int) -> int:
        chance = random.Random(seed)
        workspace: Workspace = cog.mount(root)
        trees: dict[str, Tree] = {}
        for round_ in range(25):
            for _ in range(6):
                # Contents come back after they were pruned.
                data = random.Random(chance.randrange(40)).randbytes(chance.choice([0, 900, 20_000]))
                path = root / f"{chance.randrange(4)}" / f"f{chance.randrange(12)}"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            if chance.random() < 0.3:
                os.rename(path, root / f"moved{chance.randrange(5)}")
            snapshot = workspace.checkpoint(str(round_), wait_for=chance.choice(["sealed", None]))
            trees[snapshot.id] = describe(root)
            if chance.random() < 0.3:
                alive = [one.id for one in workspace.snapshots()]
                target = chance.choice([name for name in alive if name in trees])
                workspace.restore(target)
                assert _contents(describe(root)) == _contents(trees[target])
            if round_ % 4 == 3:
                workspace.prune({"count": 3})
        for one in workspace.snapshots():
            if one.id in trees:
                assert _contents(of_snapshot(one)) == _contents(trees[one.id])
        return len(trees)

    def collect() -> None:
        while not ended.is_set():
            collected.append(cog.collect(grace=NOW, thorough=True))

    with ThreadPoolExecutor(3) as pool:
        collector = pool.submit(collect)
        workers = [pool.submit(work, root, seed) for seed, root in enumerate((project, other))]
        try:
            assert [worker.result() for worker in workers] == [25, 25]
        finally:
            ended.set()
        collector.result()
    done = [one for one in collected if not one.deferred]
    assert len(done) > 3
    assert sum(one.objects_dropped for one in done) > 20
    assert not any(one.unreadable for one in collected)


def test_killed_while_it_collects(here: Site) -> None:
    trees = {}
    here.start()
    here.mount()
    root = here.project
    with here.client() as cog:
        workspace = here.workspace(cog)
        for number in range(6):
            (root / "file").write_bytes(random.Random(number).randbytes(300_000))
            snapshot = workspace.checkpoint(str(number), wait_for="sealed")
            trees[snapshot.id] = describe(root)
        workspace.prune({"count": 2})
    for label in ("gc.marked", "gc.copied", "index.commit", "gc.given-up", "pack.removed"):
        here.kill_daemon()
        here.start(crash_at=label)
        here.ctl("gc", "--grace", "0s", "--thorough", code=None)
        here.kill_daemon()
        here.start()
        with here.client() as cog:
            for one in here.workspace(cog).snapshots():
                assert _contents(of_snapshot(one)) == _contents(trees[one.id])
    with here.client() as cog:
        assert cog.collect(grace=NOW, thorough=True).deferred == ""
        assert len(list(here.workspace(cog).snapshots())) == 2
    size = sum(path.stat().st_size for path in (here.base / "state" / "store" / "packs").iterdir())
    assert size < 3 * 310_000
