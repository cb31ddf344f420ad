"""Crashes in the middle of rewinds, restores, undos and forks: runs of ``kill -9``, each the same for the same seed as
far as the machine lets it be.

A *round* is some threads about two mounted directories, with memory and runs, and some runs in it. In a run the threads
grow and the files change; then something is asked for that takes them back or forks them, and the daemon is killed
meanwhile, at times with the mount worker, at times again while it recovers. Then everything that can be asked for is
compared with the model as it was before and as it is afterwards (``talks``), the files by a walk of their own: it is
the whole of the one or the whole of the other, and the latter when the call was answered.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cogfs.client import AlreadyExists, Client, CogfsError, Unavailable, Workspace, connect
from cogfs.v1 import workspace_pb2
from tests.e2e.support.site import Aside, Site, kill, mounts_below, wait_for
from tests.support.accounts import Account, Asked, disagreements, learn, of_world, undos_of_world
from tests.support.churn import Churn
from tests.support.crashes import PRODUCT, answers, files_of, spawn, start
from tests.support.installation import remove
from tests.support.joint_operations import Operation, Operations
from tests.support.talks import KINDS, Talk, Work, World
from tests.support.tree import Tree, describe, differences, of_snapshot

#: Steps at which a daemon kills itself, and up to which passing.
LABELS = {
    "restore.safe": 1,
    "restore.journalled": 1,
    "restore.delete": 20,
    "restore.mkdir": 3,
    "restore.write": 20,
    "restore.rename": 30,
    "restore.link": 2,
    "restore.chmod": 3,
    "restore.applied": 1,
    "restore.synced": 1,
    "restore.finished": 1,
    "fork.checked": 1,
    "fork.registered": 1,
    "fork.made": 1,
    "fork.mounted": 1,
    "fork.written": 1,
    "index.write": 5,
    "index.commit": 8,
    "index.committed": 8,
    "pack.appended": 4,
    "pack.sync": 2,
}
#: Those of a recovery.
AGAIN = {
    "restore.delete": 9,
    "restore.mkdir": 2,
    "restore.write": 9,
    "restore.rename": 9,
    "restore.applied": 1,
    "restore.synced": 1,
    "restore.finished": 1,
    "fork.unmounted": 1,
    "fork.removed": 1,
    "index.commit": 5,
    "index.committed": 5,
}
RUNS_IN_A_ROUND = 10
_MOST_PLACES, _MOST_TALKS = 4, 8
_DIRECTORIES, _FILES = 12, 90
#: Runs and their holders are not what is tried: nobody is late, and nobody is waited for.
_ENVIRON = {"COGFS_RUN_GRACE": "3600", "COGFS_TOOL_SETTLE": "0"}
#: Seconds that an operation takes before one was seen: of threads alone, and of files.
_SHORT, _LONG = 0.01, 0.15
_PATIENCE = 240.0
#: A daemon that is wrong: when it recovers, it finishes the files of a rewind and leaves the conversation as it is.
FILES_ALONE = (
    "-c",
    """
import runpy
import msgspec
from cogfs.fsd.control import completion
finish = completion.Completion._finish
def files_alone(self, link, journal, recovery, more=None):
    if recovery is not None:
        journal = msgspec.structs.replace(journal, thread=None)
    finish(self, link, journal, recovery, more)
completion.Completion._finish = files_alone
runpy.run_module("cogfs.fsd.control.main", run_name="__main__")
""",
)


class Torn(AssertionError):
    """What is there is neither what was before nor what had to be afterwards."""


@dataclass(frozen=True)
class Plan:
    """What is killed in a run, and when."""

    #: "control", "worker" or "both".
    victim: str
    #: Where the control process kills itself; empty: at ``moment``.
    label: str
    #: Of the time that the operation takes.
    moment: float
    #: Where the next control process kills itself, a number of seconds after which it is killed, or empty.
    again: str

    @staticmethod
    def of(dice: random.Random, *, fork: bool) -> Plan:
        label, again = "", ""
        if dice.random() < 0.3:
            labels = [one for one in LABELS if fork or not one.startswith("fork.")]
            label = dice.choice(labels)
            label += f":{dice.randint(1, LABELS[label])}"
        victim = dice.choices(("control", "both", "worker"), (6, 2, 0 if label else 1))[0]
        if victim != "worker" and dice.random() < 0.35:
            again = dice.choice(list(AGAIN))
            again = f"{again}:{dice.randint(1, AGAIN[again])}" if dice.random() < 0.6 else f"{dice.uniform(0, 0.5):.3f}"
        return Plan(victim, label, dice.uniform(0, 1), again)

    @property
    def kind(self) -> str:
        return f"{self.victim} at {'a step' if self.label else 'any time'}"


@dataclass
class Counts:
    """What was done and seen."""

    runs: int = 0
    #: Runs in which something was killed at a random time.
    timed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    #: Labels at which a process really died.
    fired: Counter[str] = field(default_factory=Counter)
    #: Operations by what became of them.
    outcomes: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.runs} runs, {self.timed} of them at random times"]
        titles = ("planned", "died at", "operations:", "recoveries")
        counters = (self.kinds, self.fired, self.outcomes, self.recoveries)
        for title, counter in zip(titles, counters, strict=True):
            lines += [f"  {title} {name}: {count}" for name, count in sorted(counter.items())]
        return "\n".join(lines)


class Round:
    """Runs with the same threads and directories. ``close`` leaves nothing of them."""

    def __init__(self, site: Site, seed: int, counts: Counts, program: Sequence[str]) -> None:
        self.site = site
        self._program = program
        self.seed = seed
        self.counts = counts
        self.dice = random.Random(seed)
        self.prefix = f"j{seed}-"
        self.base = site.base / f"joint-{seed}"
        self.number = 0
        self._made = 0
        self._durations: dict[str, float] = {}
        self._calls = contextlib.ExitStack()
        self._holder = self._calls.enter_context(connect(f"unix://{site.runtime}/cogfsd.sock"))
        self.roots = [self.base / "one", self.base / "two"]
        self._churns = []
        scan = self.dice.random() < 0.25
        for root in self.roots:
            root.mkdir(parents=True)
            self._churns.append(self._churn(root))
            self._churns[-1].fill(_DIRECTORIES, _FILES)
        with site.client() as cog:
            cog.mount(self.roots[0])
            cog.mount(self.roots[1], scan=scan)
            self.world: World[Tree] = World([describe(root) for root in self.roots])
            for name, place in (("first", 0), ("second", 1), ("none", -1)):
                workspace = cog.workspace(self.roots[place]) if place >= 0 else None
                talk = self.world.begin(cog.create_thread(f"{self.prefix}{name}", workspace=workspace).id, place)
                self._say(cog, talk, "user")
                self._say(cog, talk, "assistant")

    @property
    def over(self) -> bool:
        """There is enough in it."""
        full = len(self.world.files) > _MOST_PLACES or len(self.world.talks) > _MOST_TALKS
        return full or self.number >= RUNS_IN_A_ROUND

    def close(self) -> None:
        with contextlib.suppress(CogfsError), self.site.client() as cog:
            self._calls.close()
            for run in list(cog.runs()):
                if run.id.startswith(self.prefix):
                    cog.run(run.id).end()
            for thread in list(cog.threads()):
                if thread.id.startswith(self.prefix):
                    thread.delete()
            for workspace in cog.workspaces():
                if Path(os.fsdecode(workspace.root)).is_relative_to(self.base):
                    workspace.unmount(force=True)
                    workspace.delete()
        if not mounts_below(self.base):
            remove(self.base)

    def _churn(self, root: Path) -> Churn:
        return Churn(root, random.Random(self.dice.random()))

    def _name(self, what: str) -> str:
        self._made += 1
        return f"{self.prefix}{what}{self._made}"

    # --- before the crash ---------------------------------------------------------------------------------------------

    def _say(self, cog: Client, talk: Talk[Tree], kind: str) -> None:
        kept = None
        if kind == "user" and talk.place >= 0:
            self.world.files[talk.place] = describe(self.roots[talk.place])
        entry = cog.thread(talk.id).append(kind, "said", id=self._name("e"), require_checkpoint=kind == "user")
        if kind == "user" and talk.place >= 0:
            kept = self.world.keep(entry.file_checkpoint.snapshot_id, talk.place)
        self.world.say(talk.id, entry.id, kind, kept)

    def _remember(self, cog: Client, talk: Talk[Tree]) -> None:
        """On the last entry alone, on others too, or on nothing."""
        dice = self.dice
        kind = dice.choice(("item", "item", "item", "summary", "file"))
        branch = talk.ids()
        on = dice.choice(([branch[-1]], [branch[-1]], [branch[-1], dice.choice(branch)], []))
        if kind != "item":
            on = on[:1]
        name = f"n{dice.randint(0, 1)}" if kind == "file" else ""
        memory = cog.thread(talk.id).put_memory("x", on, kind=kind, name=name or None, id=self._name("m"))
        self.world.remember(talk.id, memory.id, kind, name, tuple(dict.fromkeys(on)))

    def _begin_work(self, cog: Client, talk: Talk[Tree], how: str) -> None:
        durable = how in ("lapsed", "durable") or (how == "paused" and self.dice.random() < 0.5)
        lease = 1.0 if how == "lapsed" else 3000.0
        run = cog.thread(talk.id).run(id=self._name("r"), durable=durable, lease=lease if durable else None)
        work = self.world.works[run.id] = Work(run.id, talk.id, talk.place, durable)
        if how == "paused":
            run.pause()
        elif how == "ended":
            run.end()
        elif how == "lapsed":
            wait_for("the lease runs out", lambda: run.refresh().state == "lapsed")
        if how in ("paused", "ended", "lapsed"):
            work.state = how
        if how == "calling":
            # Its tool call never ends.
            call = self._calls.enter_context(self._holder.run(run.id).tool_call("shell", id=self._name("c")))
            work.calls.add(call.id)

    def _grow(self, cog: Client) -> None:
        """Some turns, most of them in the first thread."""
        dice, talks = self.dice, list(self.world.talks.values())
        for _ in range(dice.choice((1, 1, 2, 3))):
            talk = dice.choice([talks[0], talks[0], *talks])
            if talk.place >= 0:
                self._change(talk.place)
            self._say(cog, talk, "user")
            for _ in range(dice.choice((0, 1, 2))):
                self._say(cog, talk, dice.choice(KINDS[2:]))
                if dice.random() < 0.5:
                    self._remember(cog, talk)
            if dice.random() < 0.6:
                self._remember(cog, talk)
        if dice.random() < 0.7:
            talk = dice.choice([talks[0], talks[0], *talks])
            how = dice.choice(("paused", "paused", "ended", "going", "lapsed"))
            if talk.place < 0 and dice.random() < 0.5:
                how = dice.choice(("calling", "durable"))
            self._begin_work(cog, talk, how)
        # What no snapshot holds yet.
        for place in range(len(self.roots)):
            if dice.random() < 0.7:
                self._change(place)
        self.world.files[:] = [describe(root) for root in self.roots]

    def _change(self, place: int) -> None:
        """A few changes of every kind, and many of the common ones."""
        dice, share = self.dice, self.dice.choice((0, 0.1, 0.6))
        self._churns[place].run(dice.choice((1, 5)))
        for path in self._churns[place].files():
            if dice.random() < share:
                what = dice.randrange(6)
                if what < 3 or path.is_symlink():
                    path.unlink()
                if what == 0:
                    path.mkdir()
                    (path / "inside").write_text(self._name("x"))
                elif what in (1, 3):
                    path.write_text(self._name("x") * dice.randrange(1, 200))
                elif what == 4 and path.exists():
                    path.chmod(dice.choice((0o600, 0o644, 0o755)))
                elif what == 5 and path.exists():
                    path.rename(path.with_name(self._name("n")))

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One run. Torn; AssertionError when something hangs or fails."""
        self.number += 1
        self.counts.runs += 1
        self._doing = "growing"
        try:
            self._run()
        except (AssertionError, CogfsError, OSError) as error:
            raise Torn(
                f"run {self.number} of the round with seed {self.seed}, {self._doing}: {error!r}\n"
                f"again: python -m tests.soak.joint --seed {self.seed} --runs {self.number}\n"
                f"the end of the daemon's log:\n{self.site.log_tail()}"
            ) from error

    def _run(self) -> None:
        with self.site.client() as cog:
            self._grow(cog)
            operation = Operations(self.world, self.roots, self.base, self.dice, self._name).any()
            plan = Plan.of(self.dice, fork=operation.fork)
            self._doing = f"{operation.kind} with {plan}"
            self.counts.kinds[plan.kind] += 1
            recoveries = self._recoveries(cog)
            worker = cog.workspace(self.roots[max(operation.place, 0)]).message.worker_pid
        if plan.label:
            self.site.kill_daemon()
            start(self.site, plan.label, self._program)
        aside = self._crash(operation, plan, worker)
        self._recover(operation, plan)
        aside.join(_PATIENCE)
        self._serve()
        with self.site.client() as cog:
            self._judge(cog, operation, plan, aside)
            for root, recovery in self._recoveries(cog).items():
                if recovery and recovery != recoveries.get(root, b""):
                    outcome = workspace_pb2.Recovery.FromString(recovery).outcome
                    self.counts.recoveries[workspace_pb2.Recovery.Outcome.Name(outcome).lower()] += 1
            self._look_further(cog)

    def _crash(self, operation: Operation, plan: Plan, worker: int) -> Aside:
        """Begin the operation, and kill what the plan says."""

        def act() -> object:
            with self.site.client() as cog:
                begun = time.monotonic()
                answer = operation.call(cog)
                self._durations[operation.kind] = time.monotonic() - begun
                return answer

        aside = Aside(act)
        if plan.label:
            wait_for(
                "it dies, or is not going to",
                lambda: aside.error is not None or aside.result is not None or not answers(self.site),
            )
            if not answers(self.site):
                self.counts.fired[plan.label.partition(":")[0]] += 1
        else:
            self.counts.timed += 1
            time.sleep(plan.moment * self._durations.get(operation.kind, _LONG if operation.place >= 0 else _SHORT))
        if plan.victim != "control" and worker:
            kill(worker)
        if plan.victim != "worker":
            self.site.kill_daemon()
        else:
            # The daemon lives, and answers.
            aside.join(_PATIENCE)
        return aside

    def _recover(self, operation: Operation, plan: Plan) -> None:
        """A daemon that stays, after one that may be killed while it recovers."""
        if plan.victim == "worker":
            return
        if plan.again and ":" in plan.again:
            start(self.site, plan.again, self._program)
            self._serve()
            if not answers(self.site):
                self.counts.fired[f"{plan.again.partition(':')[0]}, in a recovery"] += 1
        elif plan.again:
            process = spawn(self.site, program=self._program)
            time.sleep(float(plan.again))
            kill(process.pid)
        self.site.kill_daemon()
        start(self.site, program=self._program)
        self._peek(operation)

    def _ours(self, cog: Client) -> list[Workspace]:
        return [one for one in cog.workspaces() if Path(os.fsdecode(one.root)).is_relative_to(self.base)]

    def _recoveries(self, cog: Client) -> dict[bytes, bytes]:
        return {one.root: one.message.last_recovery.SerializeToString() for one in self._ours(cog)}

    def _serve(self) -> None:
        """Until every workspace is served, or the daemon has died."""

        def served() -> bool:
            try:
                with self.site.client() as cog:
                    return all(self._served(one) for one in self._ours(cog))
            except Unavailable:
                return not answers(self.site)

        wait_for("the workspaces are served", served)

    @staticmethod
    def _served(workspace: Workspace) -> bool:
        if workspace.message.state == workspace_pb2.Workspace.ACTIVE:
            return True
        with contextlib.suppress(AlreadyExists):
            workspace.mount(scan=workspace.message.mode == workspace_pb2.Workspace.SCANNED)
        return workspace.status().state == workspace_pb2.Workspace.ACTIVE

    # --- after the crash ----------------------------------------------------------------------------------------------

    def _states(self, operation: Operation) -> dict[str, World[Tree]]:
        """What there may be, by its name."""
        states = {"before": self.world}
        if self.world.in_the_way(operation.talk, operation.place, of_runs=operation.of_runs).anything:
            # What is in the way is stopped first, and stays so.
            states["before, with runs stopped"] = stopped = self.world.copy()
            stopped.clear(operation.talk, operation.place, of_runs=operation.of_runs)
        states["after"] = after = (states.get("before, with runs stopped") or self.world).copy()
        operation.apply(after)
        return states

    def _peek(self, operation: Operation) -> None:
        """Conversations, memory and runs are one or the other from the first answer on, whatever the files are."""
        states = self._states(operation)
        with self.site.client() as cog:
            first, second = (_of_threads(Asked(cog, self.prefix, self.base, self.world).account()) for _ in range(2))
        if first != second:
            return  # A recovery ended in between.
        wrong = {
            name: disagreements(_of_threads(of_world(world, self._roots(operation))), first)
            for name, world in states.items()
        }
        if all(wrong.values()):
            raise Torn(f"the first answers are neither: {_shown(wrong)}")

    def _roots(self, operation: Operation) -> list[Path]:
        return [*self.roots, operation.into] if operation.into is not None else self.roots

    def _judge(self, cog: Client, operation: Operation, plan: Plan, aside: Aside) -> None:
        """Which of the states it is, in every part; that is the model from now on."""
        states, roots = self._states(operation), self._roots(operation)
        told = Asked(cog, self.prefix, self.base, self.world).account()
        files = {root: describe(root) for root in roots if root.exists()}
        wrong: dict[str, list[str]] = {}
        for name, world in states.items():
            wrong[name] = disagreements(of_world(world, roots), told)
            for root, tree in zip(roots, world.files, strict=False):
                wrong[name] += [f"{root}: {one}" for one in differences(tree, files.get(root, {}))]
            if operation.into is not None and len(world.files) < len(roots):
                wrong[name] += self._left(operation)
        fitting = [name for name, found in wrong.items() if not found]
        if not fitting:
            raise Torn(f"it is neither, and was answered by {aside.error or 'its report'!r}: {_shown(wrong)}")
        name = fitting[0]
        if aside.error is None and name != "after":
            raise Torn(f"it was answered, and is {name}: {wrong['after'][:8]}")
        final = not isinstance(aside.error, Unavailable) or (operation.fork and plan.victim == "worker")
        if aside.error is not None and final and name == "after":
            raise Torn(f"it was refused, and is after: {aside.error!r}")
        if plan.victim == "control" and not isinstance(aside.error, Unavailable | None):
            raise Torn(f"it was refused: {aside.error!r}")
        answer = "answered" if aside.error is None else "not answered"
        self.counts.outcomes[f"{operation.kind}, {answer}, {name}"] += 1
        self.world = states[name]
        if operation.into is not None and name == "after":
            self.roots.append(operation.into)
            self._churns.append(self._churn(operation.into))
        learn(cog, self.world)

    def _left(self, operation: Operation) -> list[str]:
        """What is left of the directory of a fork that is not there."""
        into = operation.into
        assert into is not None
        found = []
        if str(into) in mounts_below(self.base):
            found.append(f"{into} is mounted")
        if into.exists() != operation.kind.endswith("empty directory"):
            found.append(f"{into} is {'there' if into.exists() else 'not there'}")
        elif into.exists() and list(into.iterdir()):
            found.append(f"{into} has something in it")
        return found

    def _look_further(self, cog: Client) -> None:
        """What can be undone; that what is recorded is what is there; that the store is whole."""
        told = Asked(cog, self.prefix, self.base, self.world).undos()
        wrong = disagreements(undos_of_world(self.world, self.roots), told)
        if wrong:
            raise Torn(f"what can be undone: {wrong}")
        for place, files in enumerate(self.world.files):
            kept = next((one for one in reversed(self.world.kept) if one.place == place and one.files == files), None)
            if kept is not None:
                plan = cog.snapshot(kept.id).restore(dry_run=True)
                if plan.restored or plan.deleted:
                    raise Torn(f"{self.roots[place]} is {kept.id}, and a restore of it would change {plan}")
        if self.dice.random() < 0.3:
            place = self.dice.randrange(len(self.roots))
            snapshot = cog.workspace(self.roots[place]).checkpoint()
            found = differences(files_of(of_snapshot(snapshot)), files_of(self.world.files[place]))
            if found:
                raise Torn(f"the next snapshot of {self.roots[place]}: {found[:8]}")
        check = cog.check()
        if not check.ok:
            raise Torn(f"the store is not whole: {check}")
        # Those that go on have nothing to do with the next run.
        for work in self.world.works.values():
            if work.state == "going" and not work.calls and self.dice.random() < 0.5:
                cog.run(work.id).end()
                work.state = "ended"


def _of_threads(account: Account) -> Account:
    """What is not of workspaces."""
    return {key: value for key, value in account.items() if not key.startswith(("workspaces", "snapshots of"))}


def _shown(wrong: dict[str, list[str]]) -> str:
    return "".join(f"\n  it is not {name}: {found[:8]}" for name, found in wrong.items())


def rounds(
    site: Site,
    seed: int,
    counts: Counts,
    runs: int,
    more: Callable[[], bool] = lambda: True,
    program: Sequence[str] = PRODUCT,
) -> Iterator[int]:
    """Carry out so many runs, in rounds whose seeds begin with ``seed``, as long as there is ``more`` time; after each
    run its number."""
    site.environ |= _ENVIRON
    start(site, program=program)
    done = 0
    while done < runs and more():
        around = Round(site, seed, counts, program)
        try:
            while not around.over and done < runs and more():
                around.run()
                done += 1
                yield done
        finally:
            around.close()
        seed += 1
