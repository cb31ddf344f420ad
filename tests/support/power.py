"""Loss of power while snapshots are taken: a filesystem that is cut off, and what a daemon finds after the next boot.

``run`` has to be called in a mount namespace of its own (``unshare --mount --propagation private``), where another
file stands in the place of the kernel's boot id.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cogfs.client import AlreadyExists, CogfsError, Snapshot, Workspace
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import PATIENCE, Site, kill, unmount_all, wait_for
from tests.support import image
from tests.support.churn import NAMES, Churn
from tests.support.crashes import files_of, start
from tests.support.image import Image
from tests.support.tree import Tree, describe, differences, of_snapshot

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SIZE = 1 << 30
#: Of a file that takes a moment to capture.
_LARGE = (2 << 20, 6 << 20)
_OUTER_SIZE = 6 << 30
_QUIET_SIZE = 20_000
#: Seconds after which what is recorded of a file is believed by its stat, and a little more.
_QUIET = 2.2
#: A daemon for which nothing is ever synced: what is found must be wrong then, or the tests find nothing.
WITHOUT_SYNC = (
    "-c",
    """
import os, lmdb
plain = lmdb.open
lmdb.open = lambda *a, **k: plain(*a, **{**k, "sync": False})
os.fsync = os.fdatasync = lambda fd: None
from cogfs.fsd.control import sealer
sealer.syncfs = lambda fd: None
import runpy
runpy.run_module("cogfs.fsd.control.main", run_name="__main__")
""",
)
#: One that believes what was recorded by its stat, whether it was on the disk or not.
CREDULOUS = (
    "-c",
    """
from cogfs.fsd.control import sealer, workspace
sealer.believed_until = workspace.believed_until = lambda state: None
import runpy
runpy.run_module("cogfs.fsd.control.main", run_name="__main__")
""",
)
PRODUCT = ("-m", "cogfs.fsd.control.main")


class Wrong(AssertionError):
    """Something that was promised is not there after the cut, or is something else."""


@dataclass
class Taken:
    """A checkpoint that was asked for."""

    label: str
    files: Tree
    #: Empty until it was answered.
    snapshot_id: str = ""
    #: A client saw it SEALED.
    sealed: bool = False


class Machine:
    """One machine with its disks, a project on one of them, and the store on the same or on another one."""

    def __init__(self, base: Path, images: Sequence[Image], dice: random.Random, program: Sequence[str]) -> None:
        self.images = images
        self.dice = dice
        self.counts: Counter[str] = Counter()
        self._program = program
        self._boot = base / "boot_id"
        self._taken: list[Taken] = []
        self._number = 0
        self._lock = threading.Lock()
        image.run("mount", "--bind", self._new_boot_id(), _BOOT_ID)
        for one in images:
            one.make(_SIZE)
            one.mount()
        (base / "run").mkdir()
        self.site = Site(base / "run")
        # What is on the disks that are cut: the files and the store.
        self.site.project = images[0].mountpoint / "project"
        self.site.project.mkdir()
        self.site.state = images[-1].mountpoint / "state"
        self.site.environ["COGFS_STATE_DIR"] = str(self.site.state)
        (self.site.project / "busy").mkdir()
        names = NAMES if dice.random() < 0.5 else None
        self._churn = Churn(self.site.project / "busy", random.Random(dice.random()), names)
        self._churn.fill(*((4, 20) if names else (8, 60)))
        #: Files that are changed only where ``_leave_alone`` does.
        self._quiet = [self.site.project / "quiet" / f"q{number}" for number in range(8)]
        self._quiet[0].parent.mkdir()
        for path in self._quiet:
            path.write_bytes(dice.randbytes(_QUIET_SIZE))
        os.sync()
        start(self.site, program=program)

    def _new_boot_id(self) -> Path:
        # In place, since this very file is what is seen of the kernel's.
        self._boot.write_text(f"{uuid.uuid4()}\n")
        return self._boot

    def close(self) -> None:
        self._end_processes()
        for one in self.images:
            image.run("umount", "-l", one.mountpoint, check=False)
        image.run("umount", _BOOT_ID, check=False)

    # --- up to the cut ------------------------------------------------------------------------------------------------

    def cut(self, how: str) -> None:
        """Work for a moment, lose power, and look. Wrong."""
        with self.site.client() as cog, contextlib.suppress(AlreadyExists):
            cog.mount(self.site.project)
        stop, recorded = threading.Event(), threading.Event()
        quiet = self.dice.random() < 0.4
        work = self._leave_alone if quiet else self._work
        threads = [
            threading.Thread(target=work, args=(stop, recorded), daemon=True),
            threading.Thread(target=self._watch, args=(stop,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        if quiet:
            self._expect(recorded.wait(PATIENCE), "nothing was recorded before the cut")
        time.sleep(self.dice.uniform(0, 0.3) if quiet else self.dice.uniform(0.3, 4.8))
        with self._lock:
            before = [Taken(one.label, one.files, one.snapshot_id, one.sealed) for one in self._taken]
        replaced = None
        if how == "copy":
            (one,) = self.images
            replaced = one.file.with_suffix(".cut")
            image.run("cp", "--reflink=always", one.file, replaced)
        else:
            for one in self.dice.sample(list(self.images), len(self.images)):
                one.shut_down()
        stop.set()
        self._end_processes()
        for thread in threads:
            thread.join(180)
            assert not thread.is_alive(), "a call in the mount hangs after the cut"
        for one in self.images:
            one.unmount()
        if replaced is not None:
            os.replace(replaced, self.images[0].file)
        self.counts[how] += 1
        self._boot_again()
        self._check(before)

    def _leave_alone(self, stop: threading.Event, recorded: threading.Event) -> None:
        """Other content in the blocks of files that nobody changes for two seconds then, so that what a checkpoint
        records of them is believed by their stat. That is on the disk with the rows of the store, by the journal they
        share; the content, for which no new block was needed, is not, unless it is synced before the cut."""
        for path in self._quiet:
            with path.open("r+b") as file:
                file.write(self.dice.randbytes(_QUIET_SIZE))
        time.sleep(_QUIET)
        with contextlib.suppress(OSError, CogfsError), self.site.client() as cog:
            self._checkpoint(cog.workspace(self.site.project), wait_for="sealed")
            recorded.set()
        self._work(stop, recorded)

    def _checkpoint(self, workspace: Workspace, wait_for: str | None = None) -> None:
        self._number += 1
        taken = Taken(f"c{self._number}", files_of(describe(self.site.project)))
        with self._lock:
            self._taken.append(taken)
        taken.snapshot_id = workspace.checkpoint(taken.label, wait_for=wait_for).id

    def _work(self, stop: threading.Event, _recorded: threading.Event) -> None:
        churn = self._churn
        with contextlib.suppress(OSError, CogfsError), self.site.client() as cog:
            workspace = cog.workspace(self.site.project)
            self._overwrite(25)
            while not stop.is_set():
                churn.run(self.dice.choice((1, 5, 20)))
                self._overwrite()
                if self.dice.random() < 0.15:
                    (self.site.project / "busy" / "large").write_bytes(self.dice.randbytes(self.dice.randint(*_LARGE)))
                self._checkpoint(workspace)
                churn.run(self.dice.choice((0, 5, 20)))

    def _overwrite(self, count: int = 1) -> None:
        """Other content of the same length in the same blocks: after the cut the stat may be of the new one."""
        for path in self.dice.sample(files, min(count, len(files))) if (files := self._churn.files()) else ():
            if path.is_symlink() or not path.exists():
                continue
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                file.write(self.dice.randbytes(min(size, 100_000)))

    def _watch(self, stop: threading.Event) -> None:
        """See which snapshots are sealed."""
        with contextlib.suppress(OSError, CogfsError), self.site.client() as cog:
            while not stop.is_set():
                with self._lock:
                    waiting = [one for one in self._taken if one.snapshot_id and not one.sealed]
                for one in waiting:
                    one.sealed = cog.snapshot(one.snapshot_id).message.state == snapshot_pb2.Snapshot.SEALED
                time.sleep(0.02)

    def _end_processes(self) -> None:
        workers = self._workers()
        self.site.kill_daemon()
        for pid in {*workers, *self._workers()}:
            kill(pid)
        unmount_all(self.site.project)

    def _workers(self) -> list[int]:
        mark = f"COGFS_STATE_DIR={self.site.state}".encode()
        found = []
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
        return found

    # --- after it -----------------------------------------------------------------------------------------------------

    def _boot_again(self) -> None:
        self._new_boot_id()
        shutil.rmtree(self.site.runtime, ignore_errors=True)
        for one in self.images:
            one.mount()
        self._expect(self.site.project.is_dir(), "the project is gone")
        start(self.site, program=self._program)
        with self.site.client() as cog:
            try:
                wait_for("the workspace is served", lambda: cog.workspace(self.site.project).message.worker_pid)
            except CogfsError as error:
                raise Wrong(f"{error}\n{self.site.log_tail()}") from error

    def _check(self, before: list[Taken]) -> None:
        with self.site.client() as cog:
            workspace = cog.workspace(self.site.project)
            there = {one.message.label: one.id for one in workspace.snapshots()}
            for one in before:
                if one.label not in there:
                    self._expect(not one.snapshot_id, f"{one.label} was answered and is not there")
                    self.counts["not answered, absent"] += 1
                    continue
                self._look(cog.snapshot(there[one.label]), one)
            with self._lock:
                # Of what came after the copy nothing is known; what has failed has been looked at.
                self._taken = [one for one in before if one.sealed][-20:]
            # Whatever is recorded of files that were not on the disk, the next snapshot is what they are.
            files = files_of(describe(self.site.project))
            snapshot = workspace.checkpoint("next", wait_for="sealed")
            wrong = differences(files_of(of_snapshot(snapshot)), files)
            self._expect(not wrong, f"the next snapshot (first) is not what the files are (second): {wrong[:5]}")
            self.counts["the next one, right"] += 1

    def _look(self, snapshot: Snapshot, taken: Taken) -> None:
        wait_for(
            "the snapshot is sealed or failed",
            lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN,
        )
        what = "seen sealed" if taken.sealed else "answered" if taken.snapshot_id else "not answered"
        if snapshot.message.state == snapshot_pb2.Snapshot.SEALED:
            try:
                wrong = differences(files_of(of_snapshot(snapshot)), taken.files)
            except CogfsError as error:
                wrong = [str(error)]
            self._expect(not wrong, f"{taken.label}, {what}, (first) is not what the files were (second): {wrong[:5]}")
            self.counts[f"{what}, right"] += 1
            taken.sealed = True
        else:
            self._expect(not taken.sealed, f"{taken.label} was sealed before the cut and is {snapshot.message}")
            self.counts[f"{what}, FAILED"] += 1

    def _expect(self, condition: bool, why: str) -> None:
        if not condition:
            raise Wrong(f"{why}\n{self.site.log_tail()}")


@contextlib.contextmanager
def _outer() -> Iterator[Path]:
    """A directory for images, on a filesystem that can copy them at one moment."""
    with image.filesystem("xfs", _OUTER_SIZE) as place:
        yield place


def run(
    cuts: int,
    seed: int,
    *,
    two: bool = False,
    program: Sequence[str] = PRODUCT,
    more: Callable[[], bool] = lambda: True,
    progress: Callable[[int], None] = lambda _: None,
) -> Counter[str]:
    """So many cuts of one machine, with project and store on ``two`` filesystems or on one; what was seen. Wrong."""
    dice = random.Random(seed)
    with _outer() as outer, contextlib.ExitStack() as stack:
        # Mountpoints that are there after everything else is gone.
        base = Path(tempfile.mkdtemp(prefix="cogfs-power-"))
        stack.callback(lambda: subprocess.run(["rm", "-rf", "--one-file-system", str(base)], check=False))
        images = [Image(outer / f"{name}.img", base / name) for name in (("files", "store") if two else ("disk",))]
        machine = Machine(base, images, dice, program)
        stack.callback(machine.close)
        for number in range(1, cuts + 1):
            if not more():
                break
            how = "shutdown" if two else dice.choice(("shutdown", "copy"))
            try:
                machine.cut(how)
            except AssertionError as error:
                raise type(error)(f"cut {number} ({how}) with seed {seed}: {error}") from error
            progress(number)
        return machine.counts
