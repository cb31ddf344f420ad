"""Crashes between a boundary and its seal: runs of changes, messages and ``kill -9``, each the same for the same seed
as far as the machine lets it be.

A *round* is a project directory of its own with a conversation, and some runs in it. In a run, a thread changes files
and sends messages that take checkpoints, without waiting for the seals, and something is killed meanwhile. Then there
is a daemon again, the thread comes to its end, and every snapshot is compared with what a walk found right before its
message was sent: one that was answered must be SEALED and that; one whose answer was lost must be that, or absent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cogfs.client import AlreadyExists, CogfsError, Snapshot, Unavailable
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Site, kill, wait_for
from tests.support.churn import NAMES, Churn
from tests.support.tree import LEFT_OUT, Tree, describe, differences, of_snapshot

#: Steps at which a control process kills itself, and up to which passing. (``seal.failed`` is passed only where a
#: snapshot has failed, and none may here.)
LABELS = {
    "checkpoint.frozen": 2,
    "checkpoint.committed": 2,
    "index.write": 4,
    "index.commit": 4,
    "index.committed": 4,
    "pack.append": 12,
    "pack.appended": 12,
    "pack.sync": 3,
    "preserve.captured": 8,
    "seal.recorded": 2,
    "seal.committed": 2,
}
RUNS_IN_A_ROUND = 10
#: The daemon as it is.
PRODUCT = ("-m", "cogfs.fsd.control.main")
#: Directories and files to begin with.
_MANY, _FEW = (9, 60), (4, 20)
_LARGE = (2 << 20, 6 << 20)
#: Seconds until the thread of a run has to end once everything is served again.
_PATIENCE = 240.0
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


@dataclass(frozen=True)
class Plan:
    """What is killed in a run, and when."""

    #: "control", "worker" or "both".
    victim: str
    #: Where the control process kills itself; empty: at ``moment``.
    label: str
    #: Seconds after the thread has begun.
    moment: float
    #: Seconds for which there is no control process.
    away: float
    #: Where the next control process kills itself, too, or empty.
    again: str

    @staticmethod
    def of(dice: random.Random) -> Plan:
        label, again = "", ""
        if dice.random() < 0.6:
            label = dice.choice(list(LABELS))
            label += f":{dice.randint(1, LABELS[label])}"
        victim = dice.choice(("control", "both") if label else ("control", "control", "worker", "both"))
        if victim != "worker" and dice.random() < 0.25:
            again = dice.choice(
                ("seal.recorded", "seal.committed", "preserve.captured", "pack.appended", "index.commit")
            )
        return Plan(victim, label, dice.uniform(0, 0.3), dice.choice((0.0, 0.0, 0.2, 0.6)), again)

    @property
    def kind(self) -> str:
        return f"{self.victim} at {self.label.partition(':')[0] or 'any time'}"


@dataclass
class Taken:
    """A message that was sent, and what a walk found before."""

    entry_id: str
    files: Tree
    #: Of the snapshot; empty when there was no answer.
    snapshot_id: str = ""


class Disagreement(AssertionError):
    """A snapshot is not what it has to be."""


@dataclass
class Counts:
    """What was done and seen."""

    runs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    #: Labels at which a process really died.
    fired: Counter[str] = field(default_factory=Counter)
    #: Snapshots, by whether they were answered and what became of them.
    snapshots: Counter[str] = field(default_factory=Counter)
    #: Runs in which a call of the thread found the mount dead.
    disconnected: int = 0

    def __str__(self) -> str:
        lines = [f"{self.runs} runs; in {self.disconnected} of them the files were away for a moment"]
        for title, counter in (("planned", self.kinds), ("died at", self.fired), ("snapshots", self.snapshots)):
            lines += [f"  {title} {name}: {count}" for name, count in sorted(counter.items())]
        return "\n".join(lines)


def files_of(tree: Tree) -> Tree:
    """Without the root's own entry, which has no name in a snapshot."""
    return {path: node for path, node in tree.items() if path and not LEFT_OUT.intersection(path.split(b"/"))}


def answers(site: Site) -> bool:
    """Whether there is a daemon."""
    try:
        # It costs next to nothing while there is none.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(site.runtime / "cogfsd.sock"))
    except OSError:
        return False
    try:
        with site.client() as cog:
            cog.daemon(1)
    except CogfsError:
        return False
    return True


def start(site: Site, crash_at: str = "", program: Sequence[str] = PRODUCT) -> None:
    """A daemon that answers, unless it dies at once."""
    process = spawn(site, crash_at, program)
    wait_for("the daemon answers", lambda: answers(site) or process.poll() is not None)
    with contextlib.suppress(CogfsError):
        site.daemon_pid()  # so that it ends with the site


def spawn(site: Site, crash_at: str = "", program: Sequence[str] = PRODUCT) -> subprocess.Popen[bytes]:
    """A daemon that begins; not by ``cogfsctl``, which would take as long as the rest of a run."""
    site.state.mkdir(mode=0o700, exist_ok=True)
    with (site.state / "cogfsd.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", *program],
            env={**site.environ, "COGFS_CRASH_AT": crash_at},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()
    return process


class Round:
    """Runs in one project directory. ``close`` unmounts it."""

    def __init__(self, site: Site, seed: int, counts: Counts) -> None:
        self.site = site
        self.seed = seed
        self.counts = counts
        self.dice = random.Random(seed)
        self.project = site.base / f"project-{seed}"
        self.project.mkdir()
        self.taken: list[Taken] = []
        self.number = 0
        # Few files among which names go round, or more of them.
        names = self.dice.random() < 0.5
        self._churn = Churn(self.project, random.Random(self.dice.random()), NAMES if names else None)
        self._churn.fill(*(_FEW if names else _MANY))
        site.mount(self.project)
        with site.client() as cog:
            self.thread_id = cog.create_thread(workspace=cog.workspace(self.project)).id
        self._mounted = threading.Event()
        self._mounted.set()

    def close(self) -> None:
        self.site.ctl("unmount", "--force", self.project, code=None)

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """One run. Disagreement; AssertionError when something hangs."""
        plan = Plan.of(self.dice)
        self.number += 1
        self.counts.runs += 1
        self.counts.kinds[plan.kind] += 1
        try:
            self._run(plan)
        except Exception as error:
            if not isinstance(error, AssertionError):
                raise
            raise type(error)(
                f"run {self.number} of the round with seed {self.seed}, {plan}: {error}\n"
                f"again: python -m tests.soak.crashes --seed {self.seed} --runs {self.number}\n"
                f"the end of the daemon's log:\n{self.site.log_tail()}"
            ) from error

    def _run(self, plan: Plan) -> None:
        site = self.site
        acts = self._acts()
        if plan.label:
            self._restart(plan.label)
        worker = self._worker()
        first = len(self.taken)
        thread = _Aside(lambda: self._act(acts))
        begun = time.monotonic()
        if plan.label:
            # Until it has died, or is not going to.
            until = begun + 3.0
            while time.monotonic() < until and self._answers():
                if not thread.alive:
                    until = min(until, time.monotonic() + 0.5)
                time.sleep(0.03)
        else:
            time.sleep(plan.moment)
        if plan.victim != "control" and worker:
            self._mounted.clear()
            kill(worker)
        if plan.victim != "worker":
            if plan.label and not self._answers():
                self.counts.fired[plan.label.partition(":")[0]] += 1
            site.kill_daemon()
            time.sleep(plan.away)
            if plan.again:
                self._restart(plan.again)
                until = time.monotonic() + 1.0
                while time.monotonic() < until and self._answers():
                    time.sleep(0.05)
                if not self._answers():
                    self.counts.fired[f"{plan.again}, after a crash"] += 1
            self._restart()
        self._serve()
        thread.join(_PATIENCE)
        self._check(self.taken[first:])
        self._check_present()

    def _restart(self, crash_at: str = "") -> None:
        self.site.kill_daemon()
        start(self.site, crash_at)

    def _serve(self) -> None:
        """A daemon that stays, and a mount."""
        with self.site.client() as cog:
            with contextlib.suppress(AlreadyExists):
                cog.mount(self.project)
            wait_for("the workspace is served", lambda: cog.workspace(self.project).message.worker_pid)
        self._mounted.set()

    def _answers(self) -> bool:
        return answers(self.site)

    def _worker(self) -> int:
        try:
            with self.site.client() as cog:
                return cog.workspace(self.project).message.worker_pid
        except CogfsError:
            return 0

    def wait_mounted(self) -> bool:
        """Whether there is a mount again, after one that died."""
        return self._mounted.wait(_PATIENCE)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _acts(self) -> list[tuple[str, int]]:
        dice = self.dice
        acts: list[tuple[str, int]] = []
        if dice.random() < 0.2:
            acts.append(("large", dice.randint(*_LARGE)))
        acts.append(("churn", dice.choice((0, 3, 30))))
        for _ in range(dice.choice((1, 1, 2, 3))):
            acts.append(("hold", dice.randrange(1000)))
            acts.append(("message", 0))
            acts.append(("write", dice.randrange(1, 3000)))
            acts.append(("churn", dice.choice((2, 10, 60))))
        return acts

    def _act(self, acts: list[tuple[str, int]]) -> None:
        with contextlib.closing(_Program(self)) as program:
            for what, number in acts:
                program.carry_out(what, number)

    def message(self, top: Path) -> None:
        """A message, which need not be answered, after a walk through ``top``."""
        taken = Taken(f"m{self.seed}-{len(self.taken)}", files_of(describe(top)))
        self.taken.append(taken)
        try:
            with self.site.client() as cog:
                entry = cog.thread(self.thread_id).user_message("well", id=taken.entry_id, require_checkpoint=True)
        except Unavailable:
            return
        if entry.file_checkpoint is not None and entry.file_checkpoint.snapshot_id:
            taken.snapshot_id = entry.file_checkpoint.snapshot_id

    # --- what has to be -----------------------------------------------------------------------------------------------

    def _check(self, taken: list[Taken]) -> None:
        with self.site.client() as cog:
            there = {
                one.message.label: one.id
                for one in cog.workspace(self.project).snapshots()
                if one.message.label.startswith(f"m{self.seed}-")
            }
            for one in taken:
                answered = bool(one.snapshot_id)
                snapshot_id = one.snapshot_id or there.get(one.entry_id, "")
                name = "answered" if answered else "not answered"
                if not snapshot_id:
                    self.counts.snapshots[f"{name}, absent"] += 1
                    continue
                one.snapshot_id = snapshot_id
                self._compare(cog.snapshot(snapshot_id), one.files, f"{name} {one.entry_id}")
                self.counts.snapshots[f"{name}, right"] += 1
            if len(taken) and self.dice.random() < 0.1:
                # Whatever came later has changed nothing of what is sealed.
                for one in self.taken:
                    if one.snapshot_id:
                        self._compare(cog.snapshot(one.snapshot_id), one.files, f"the older {one.entry_id}")

    def _check_present(self) -> None:
        """The next snapshot is right, too, whatever was recorded or lost."""
        files = files_of(describe(self.project))
        with self.site.client() as cog:
            snapshot = cog.workspace(self.project).checkpoint()
            self._compare(snapshot, files, "the next snapshot")
        self.counts.snapshots["after the run, right"] += 1

    @staticmethod
    def _compare(snapshot: Snapshot, files: Tree, what: str) -> None:
        try:
            found = files_of(of_snapshot(snapshot))
        except CogfsError as error:
            raise Disagreement(f"{what}, {snapshot.id}: {error}; it is {snapshot.refresh()}") from error
        wrong = differences(found, files)
        if wrong:
            raise Disagreement(f"{what}, {snapshot.id} (first) is not what the files were (second): {wrong[:8]}")
        state = snapshot.refresh().message.state
        if state != snapshot_pb2.Snapshot.SEALED:
            raise Disagreement(f"{what}, {snapshot.id}: {snapshot}")


class _Program:
    """What works in the mount, by descriptors: it never comes into the bare directory while the mount is away."""

    def __init__(self, around: Round) -> None:
        self._round = around
        self._fd = -1
        self._held = -1
        self._dice = random.Random(around.dice.random())
        self._churn = Churn(Path("/"), self._dice)
        self._churn.prefix = f"r{around.number}-"
        self._open()

    def close(self) -> None:
        self._let_go()
        if self._fd >= 0:
            os.close(self._fd)

    def _open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._round.project, os.O_RDONLY | os.O_DIRECTORY)
        self._churn.root = self._top

    @property
    def _top(self) -> Path:
        return Path(f"/proc/self/fd/{self._fd}")

    def _let_go(self) -> None:
        if self._held >= 0:
            with contextlib.suppress(OSError):
                os.close(self._held)
            self._held = -1

    def carry_out(self, what: str, number: int) -> None:
        """A step, as often as it takes."""
        for _ in range(number if what == "churn" else 1):
            try:
                self._once(what, number)
            except OSError as error:
                if error.errno not in _DEAD:
                    raise
                self._round.counts.disconnected += 1
                self._let_go()
                assert self._round.wait_mounted(), "the files did not come back"
                self._open()
                if what == "message":
                    self._once(what, number)

    def _once(self, what: str, number: int) -> None:
        match what:
            case "churn":
                self._churn.run(1)
            case "message":
                self._round.message(self._top)
            case "large":
                (self._top / "large").write_bytes(self._dice.randbytes(number))
            case "hold":
                self._let_go()
                files = self._churn.files()
                if files:
                    with contextlib.suppress(FileNotFoundError, OSError):
                        self._held = os.open(files[number % len(files)], os.O_RDWR | os.O_NOFOLLOW)
            case "write":
                if self._held >= 0:
                    os.pwrite(self._held, self._dice.randbytes(number), 0)
                if (self._top / "large").exists() and number % 2:
                    with (self._top / "large").open("r+b") as file:
                        file.seek(number)
                        file.write(b"in the middle")


class _Aside:
    """Something in a thread of its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, args=(act,), daemon=True)
        self._thread.start()

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, patience: float) -> None:
        self._thread.join(patience)
        assert not self._thread.is_alive(), "a call in the mount hangs"
        if self._error is not None:
            raise AssertionError(f"a call in the mount failed: {self._error!r}") from self._error


def rounds(site: Site, seed: int, counts: Counts, runs: int, more: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Carry out so many runs, in rounds whose seeds begin with ``seed``, as long as there is ``more`` time; after each
    run its number."""
    done = 0
    while done < runs and more():
        around = Round(site, seed, counts)
        try:
            for _ in range(min(RUNS_IN_A_ROUND, runs - done)):
                if not more():
                    break
                around.run()
                done += 1
                yield done
        finally:
            around.close()
        seed += 1
