"""Many clients at once: runs, tool calls, messages, rewinds and restores, with and without force. Every call is
answered, for a reason that there is, and nothing is left."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter

import pytest

from cogfs.client import Client, CogfsError
from cogfs.v1 import run_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.support.site import PATIENCE, Site, wait_for

_CLIENTS = 8
_ROUNDS = 12
_ALLOWED = {
    Reason.BUSY,
    Reason.THREAD_BUSY,
    Reason.WORKSPACE_BUSY,
    Reason.RUN_INTERRUPTED,
    # A point that another one has cut off meanwhile, and an undo with nothing to undo.
    Reason.VALIDATION_ERROR,
    # The snapshot of a safety copy that was dropped, and tool calls of a run whose holder was let go.
    Reason.NOT_FOUND,
}


class Crowd:
    """What its clients do, and what came of it."""

    def __init__(self, here: Site, threads: list[str], snapshots: list[str]) -> None:
        self.here = here
        self.threads = threads
        self.snapshots = snapshots
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def live(self, seed: int) -> None:
        try:
            chance = random.Random(seed)
            with self.here.client() as cog:
                for _ in range(_ROUNDS):
                    self._once(cog, chance)
        except BaseException as error:
            self.wrong.append(f"{seed}: {error!r}")

    def _once(self, cog: Client, chance: random.Random) -> None:
        act = chance.choice(
            (self._work, self._work, self._write, self._rewind, self._rewind, self._restore, self._undo)
        )
        try:
            act(cog, chance)
            self.outcomes[act.__name__] += 1
        except CogfsError as error:
            if error.reason not in _ALLOWED:
                self.wrong.append(f"{act.__name__}: {error.reason.name}: {error}")
            self.outcomes[f"{act.__name__} {error.reason.name}"] += 1

    def _work(self, cog: Client, chance: random.Random) -> None:
        thread = cog.thread(chance.choice(self.threads))
        with thread.run(durable=chance.random() < 0.3, strategy=chance.choice(("wait", "reject"))) as run:
            run.user_message("work")
            with run.tool_call("write"), contextlib.suppress(OSError):
                (self.here.project / f"f{chance.randrange(4)}").write_text(f"{chance.random()}\n")
            run.append("assistant", "done")
            if chance.random() < 0.2:
                run.pause()

    def _write(self, cog: Client, chance: random.Random) -> None:
        cog.thread(chance.choice(self.threads)).append("note", "by hand")

    def _rewind(self, cog: Client, chance: random.Random) -> None:
        thread = cog.thread(chance.choice(self.threads))
        entries = list(thread.entries())
        files = chance.random() < 0.6
        thread.rewind(
            chance.choice(entries).id, files=files, force=chance.random() < 0.5, dry_run=chance.random() < 0.2
        )

    def _restore(self, cog: Client, chance: random.Random) -> None:
        self.here.workspace(cog).restore(chance.choice(self.snapshots), force=chance.random() < 0.5)

    def _undo(self, cog: Client, chance: random.Random) -> None:
        self.here.workspace(cog).undo(force=chance.random() < 0.5)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd_is_answered(here: Site, seed: int) -> None:
    here.environ["COGFS_TOOL_SETTLE"] = "5"
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        threads = [cog.create_thread(f"t{number}", workspace=workspace) for number in range(2)]
        snapshots = []
        for number in range(4):
            (here.project / f"f{number}").write_text("first\n")
            snapshots.append(threads[number % 2].user_message("begin").file_checkpoint.snapshot_id)
        crowd = Crowd(here, [thread.id for thread in threads], snapshots)
        clients = [
            threading.Thread(target=crowd.live, args=(seed * 1000 + number,), daemon=True) for number in range(_CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join(2 * PATIENCE)
            assert not client.is_alive(), "a call is not answered"
        assert not crowd.wrong, crowd.wrong
        # Which calls get through while all want the same is a matter of luck.
        assert any(" " not in outcome for outcome in crowd.outcomes), crowd.outcomes
        # Nothing goes on, and nobody has anything for himself.
        wait_for("no run goes on", lambda: not any(run.state == run_pb2.Run.GOING for run in cog.runs()))
        for thread in threads:
            with thread.run(strategy="reject") as run, run.tool_call():
                pass
            # The conversation is a tree of whole branches.
            entries = list(thread.entries())
            assert [entry.parent_id for entry in entries] == ["", *(entry.id for entry in entries[:-1])]
        workspace.restore(snapshots[-1])
        assert {(here.project / f"f{number}").read_text() for number in range(4)} == {"first\n"}
