"""Scanned workspaces in this process: what a scan sees while others change things, and what a restore leaves them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cogfs.fsd.channel import Freeze, Frozen, GetStats, Handles, ListHandles, Stats
from cogfs.fsd.control.completion import Phase
from cogfs.fsd.control.engine import Engine
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.openers import mapped
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.restoration import Request, Restoration
from cogfs.fsd.control.scanned import ScannedLink, Scans
from cogfs.fsd.control.sealer import boot_id
from cogfs.fsd.control.settings import Settings
from cogfs.fsd.control.workspace import Workspace
from cogfs.fsd.undolog import UndoLogWriter
from cogfs.store.ids import new_id
from cogfs.store.schema import BoundaryRow, SnapshotOrigin, SnapshotRow, SnapshotState, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from cogfs.v1 import common_pb2
from cogfs.v1.reasons import Reason

_HOLDER = """
import mmap, os, sys
path, how = sys.argv[1:]
if how == "cwd":
    os.chdir(path)
elif how == "map":
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, 0)
    os.close(fd)
else:
    file = open(path, how)
print("ready", flush=True)
for line in sys.stdin:
    memory[:1] = line[:1].encode()
    print("ready", flush=True)
"""


class Scanned:
    """A directory that is scanned by an engine of the test's own."""

    def __init__(self, store: Store, root: Path) -> None:
        self.root = root
        state = root.parent / "state"
        self.places = Places(state, state, state / "cogfsd.sock")
        self.engine = Engine(store, self.places, Settings())
        self.store = store
        self.id = new_id("ws")
        with store.write() as writer:
            writer.put_workspace(WorkspaceRow(self.id, os.fsencode(root), b"", WorkspaceOptions(), 0))
        self.scans = Scans(self.engine)
        self.scans.begin(self.id, os.fsencode(root))

    @property
    def undo_log(self) -> Path:
        """That of a worker, if there had been one."""
        path = self.places.undo_log(self.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def workspace(self) -> Workspace:
        return self.engine.workspace(self.id)

    @property
    def link(self) -> ScannedLink:
        link = self.scans.link(self.id)
        assert link is not None
        return link

    def checkpoint(self) -> SnapshotRow:
        return self.workspace.checkpoint("", "{}", SnapshotOrigin.MANUAL)

    def content(self, snapshot: SnapshotRow, path: str) -> bytes:
        entry = snapshot.root
        assert entry is not None
        for name in os.fsencode(path).split(b"/"):
            (entry,) = (one for one in self.store.read_tree(entry.hash).entries if one.name == name)
        return b"".join(self.store.read_file(entry.hash))

    def restore(
        self, snapshot: SnapshotRow, meanwhile: Callable[[], object] | None = None, *, force: bool = False
    ) -> common_pb2.RestoreReport:
        """``meanwhile``: what somebody does once, after the plan was made and before it is carried out."""
        todo = [meanwhile] if meanwhile is not None else []

        def progress(phase: object, done: int, total: int) -> None:
            if phase == Phase.VERIFYING and todo:
                todo.pop()()

        return Restoration(self.workspace).restore(Request(snapshot.id, force=force), progress).whole(self.store)

    def close(self) -> None:
        self.scans.end(self.id)
        self.engine.close()


@pytest.fixture
def scanned(tmp_path: Path) -> Iterator[Scanned]:
    root = tmp_path / "root"
    root.mkdir()
    with Store.open(tmp_path / "store") as store:
        made = Scanned(store, root)
        yield made
        made.close()


@contextmanager
def holding(path: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ``path`` open, mapped, or as its working directory."""
    command = [sys.executable, "-c", _HOLDER, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process


def settle() -> None:
    """Longer than the time in which a record is not trusted."""
    time.sleep(2.1)


# What is answered where there is no worker.


def test_a_link_without_a_worker(scanned: Scanned) -> None:
    link = scanned.link
    assert link.alive
    assert not link.watched
    answer = link.call(Freeze())
    assert isinstance(answer, Frozen)
    assert (answer.complete, answer.directories, answer.files) == (False, [], [])
    assert isinstance(link.call(GetStats()), Stats)
    aside = scanned.root.with_name("aside")
    scanned.root.rename(aside)
    assert not link.alive
    scanned.root.mkdir()
    assert not link.alive
    with pytest.raises(CogfsError, match=r"not at .* any more") as caught:
        scanned.checkpoint()
    assert caught.value.reason is Reason.UNAVAILABLE
    scanned.root.rmdir()
    aside.rename(scanned.root)
    assert link.alive
    scanned.checkpoint()


def test_handles_are_those_of_proc(scanned: Scanned) -> None:
    for name in ("written", "read", "mapped", "gone"):
        (scanned.root / name).write_text("one\n")
    with (
        holding(scanned.root / "written", "r+"),
        holding(scanned.root / "read", "r"),
        holding(scanned.root / "mapped", "map"),
        holding(scanned.root / "gone", "r+"),
    ):
        (scanned.root / "gone").unlink()
        answer = scanned.link.call(ListHandles())
        assert isinstance(answer, Handles)
        found = {handle.path: (handle.writable, handle.deleted) for handle in answer.handles}
        assert found == {
            b"written": (True, False),
            b"read": (False, False),
            b"mapped": (True, False),
            b"gone": (True, True),
        }
        assert mapped(os.fsencode(scanned.root)) == {(scanned.root / "mapped").stat().st_ino}


# What a mount has left.


@pytest.mark.parametrize("changed", [False, True])
def test_a_boundary_of_an_earlier_mount(scanned: Scanned, changed: bool) -> None:
    (scanned.root / "file").write_text("one\n")
    first = scanned.checkpoint()
    scanned.scans.end(scanned.id)
    (scanned.root / "file").write_text("two\n")
    frozen = msgspec.structs.replace(first, id=new_id("snap"), root=None, state=SnapshotState.FROZEN)
    settle()
    with scanned.store.write() as writer:
        writer.put_snapshot(frozen)
        writer.put_boundary(BoundaryRow(frozen.id, scanned.id, 7, 1, time.time_ns(), boot_id(), True, b""))
    # The worker that made it had a log, and wrote nothing into it.
    UndoLogWriter(scanned.undo_log).close()
    if changed:
        (scanned.root / "file").write_text("three\n")
    scanned.scans.begin(scanned.id, os.fsencode(scanned.root))
    latest = scanned.checkpoint()
    assert scanned.content(latest, "file") == (b"three\n" if changed else b"two\n")
    if changed:
        with pytest.raises(CogfsError, match="changed past the mount"):
            scanned.workspace.sealed(frozen.id)
    else:
        assert scanned.content(scanned.workspace.sealed(frozen.id), "file") == b"two\n"
    with scanned.store.read() as reader:
        assert reader.generations(scanned.id) == []


# What is read.


def test_what_did_not_change_is_not_read_again(scanned: Scanned) -> None:
    for number in range(40):
        (scanned.root / f"f{number}").write_text(f"{number}\n")
    settle()
    assert scanned.checkpoint().stats.hashed == 40
    assert scanned.checkpoint().stats.hashed == 0
    (scanned.root / "f7").write_text("changed\n")
    assert scanned.checkpoint().stats.hashed == 1
    # It had changed less than two seconds before it was recorded.
    assert scanned.checkpoint().stats.hashed == 1
    settle()
    assert scanned.checkpoint().stats.hashed == 1
    assert scanned.checkpoint().stats.hashed == 0


@pytest.mark.parametrize("attribute", ["size", "mtime", "ctime", "inode", "mode"])
def test_each_part_of_the_stat_counts(scanned: Scanned, attribute: str) -> None:
    file = scanned.root / "file"
    file.write_text("one\n")
    settle()
    scanned.checkpoint()
    before = file.stat()
    wanted = b"two\n"
    match attribute:
        case "size":
            file.write_text("longer\n")
            wanted = b"longer\n"
        case "mtime":
            file.write_text("two\n")
        case "ctime":
            # All that can be set back is.
            file.write_text("two\n")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "inode":
            (scanned.root / ".new").write_text("two\n")
            os.utime(scanned.root / ".new", ns=(before.st_atime_ns, before.st_mtime_ns))
            (scanned.root / ".new").rename(file)
        case "mode":
            file.chmod(0o755)
            wanted = b"one\n"
    snapshot = scanned.checkpoint()
    assert snapshot.stats.hashed == 1
    assert scanned.content(snapshot, "file") == wanted


def test_a_file_that_changes_right_after_its_record(scanned: Scanned) -> None:
    file = scanned.root / "file"
    for number in range(200):
        text = f"{number:03}\n"
        file.write_text(text)
        os.utime(file, ns=(0, 0))
        assert scanned.content(scanned.checkpoint(), "file") == text.encode()


def test_a_store_into_a_page_that_was_dirty_already(scanned: Scanned) -> None:
    """It moves no times, on a filesystem in memory never, elsewhere until the page was written out."""
    file = scanned.root / "file"
    file.write_bytes(b"a" * mmap.PAGESIZE)
    with holding(file, "map") as process:
        assert process.stdin is not None and process.stdout is not None
        for letter in (b"b", b"c"):
            process.stdin.write(letter + b"\n")
            process.stdin.flush()
            process.stdout.readline()
            if letter == b"b":
                settle()
            assert scanned.content(scanned.checkpoint(), "file")[:1] == letter


@pytest.mark.parametrize(("changes", "reads"), [(4, 5), (5, 5), (100, 5)])
def test_a_file_that_changes_while_it_is_read(
    scanned: Scanned, monkeypatch: pytest.MonkeyPatch, changes: int, reads: int
) -> None:
    (scanned.root / "calm").write_text("calm\n")
    log = scanned.root / "log"
    log.write_text("x")
    inode, put_file, seen = log.stat().st_ino, scanned.store.put_file, []

    def changing(fd: int, size_hint: int, base: bytes) -> tuple[bytes, int]:
        found = put_file(fd, size_hint, base)
        if os.fstat(fd).st_ino == inode:
            seen.append(found)
            if len(seen) <= changes:
                with log.open("ab") as file:
                    file.write(b"x")
        return found

    monkeypatch.setattr(scanned.store, "put_file", changing)
    snapshot = scanned.checkpoint()
    assert len(seen) == reads
    assert scanned.content(snapshot, "calm") == b"calm\n"
    if changes < reads:
        assert not snapshot.skipped
        assert scanned.content(snapshot, "log") == b"x" * 5
    else:
        assert [(one.path, one.reason) for one in snapshot.skipped] == [(b"log", "changing")]
        monkeypatch.undo()
        assert not scanned.checkpoint().skipped


def test_a_tree_in_turmoil(scanned: Scanned) -> None:
    """Directories and files come, go and change places all the while; what stays as it is, is in each snapshot."""
    still = scanned.root / "still"
    still.mkdir()
    for number in range(20):
        (still / f"f{number}").write_text(f"{number}\n")
    ended = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        number = 0
        try:
            while not ended.is_set():
                number += 1
                here, there = scanned.root / f"d{number % 5}", scanned.root / f"d{(number + 2) % 5}"
                (here / "sub" / "deep").mkdir(parents=True, exist_ok=True)
                (here / "sub" / f"f{number % 3}").write_text(str(number))
                if there.exists():
                    shutil.rmtree(there)
                here.rename(there)
                swapped = scanned.root / "swapped"
                if number % 2:
                    swapped.mkdir()
                    swapped.rmdir()
                    swapped.symlink_to("still")
                    swapped.unlink()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            snapshot = scanned.checkpoint()
            assert scanned.content(snapshot, "still/f7") == b"7\n"
    finally:
        ended.set()
        thread.join()
    assert not failures
    first = scanned.checkpoint()
    assert not first.skipped
    assert not scanned.restore(first).files


# Restores among others.


def plant(scanned: Scanned) -> SnapshotRow:
    for number in range(6):
        (scanned.root / "d").mkdir(exist_ok=True)
        (scanned.root / "d" / f"f{number}").write_text(f"one {number}\n")
    snapshot = scanned.checkpoint()
    for number in range(6):
        (scanned.root / "d" / f"f{number}").write_text(f"two {number}\n")
    return snapshot


def write(path: Path, text: str) -> Callable[[], object]:
    return lambda: path.write_text(text)


@pytest.mark.parametrize("change", ["written", "replaced", "made", "over a deletion", "link", "directory"])
def test_a_change_between_plan_and_step_stays(scanned: Scanned, change: str) -> None:
    first = plant(scanned)
    directory = scanned.root / "d"
    wanted: dict[str, str | None] = {f"f{number}": f"two {number}\n" for number in range(6)}
    (directory / "new").write_text("new\n")
    wanted["new"] = "new\n"

    def act() -> None:
        match change:
            case "written":
                (directory / "f4").write_text("mine\n")
                wanted["f4"] = "mine\n"
            case "replaced":
                (scanned.root / "beside").write_text("mine, too\n")
                (scanned.root / "beside").rename(directory / "f4")
                wanted["f4"] = "mine, too\n"
            case "over a deletion":
                (directory / "new").write_text("mine\n")
                wanted["new"] = "mine\n"
            case "made":
                (directory / "f5").write_text("mine\n")
                wanted["f5"] = "mine\n"
            case "link":
                (directory / "f4").unlink()
                (directory / "f4").symlink_to("f0")
                wanted["f4"] = "two 0\n"
            case "directory":
                (directory / "f4").unlink()
                (directory / "f4").mkdir()
                (directory / "f4" / "mine").write_text("mine\n")
                wanted["f4"] = None

    if change == "made":
        (directory / "f5").unlink()
    with pytest.raises(CogfsError) as caught:
        scanned.restore(first, act)
    if change != "directory":
        assert caught.value.reason is Reason.BUSY
        assert "another program changed" in str(caught.value)
    assert {path.name: path.read_text() if path.is_file() else None for path in directory.iterdir()} == wanted
    if change == "directory":
        assert (directory / "f4" / "mine").read_text() == "mine\n"
    report = scanned.restore(first)
    assert b"d/f0" in report.restored
    assert {path.name: path.read_text() for path in directory.iterdir()} == {
        f"f{number}": f"one {number}\n" for number in range(6)
    }
    with scanned.store.read() as reader:
        safety = reader.snapshot(report.safety_snapshot_id)
    # What the other program made is in the safety snapshot like anything else.
    if change != "directory":
        scanned.restore(safety)
        assert {path.name: path.read_text() for path in directory.iterdir()} == wanted


def test_a_file_that_somebody_deletes_meanwhile(scanned: Scanned) -> None:
    first = plant(scanned)
    scanned.restore(first, (scanned.root / "d" / "f3").unlink)
    assert (scanned.root / "d" / "f3").read_text() == "one 3\n"


@pytest.mark.parametrize(("how", "access"), [("r+", "WRITE"), ("map", "WRITE"), ("r", "READ")])
def test_who_is_in_the_way(scanned: Scanned, how: str, access: str) -> None:
    (scanned.root / "other").write_text("not of the plan\n")
    first = plant(scanned)
    with holding(scanned.root / "d" / "f3", how) as process, holding(scanned.root / "other", "r+"):
        if access == "READ":
            report = scanned.restore(first)
            assert [(one.pid, one.path) for one in report.busy_by] == [(process.pid, b"d/f3")]
            return
        with pytest.raises(CogfsError) as caught:
            scanned.restore(first)
        assert caught.value.reason is Reason.BUSY
        assert f"(pid {process.pid})" in str(caught.value)
        assert (scanned.root / "d" / "f3").read_text() == "two 3\n"
        report = scanned.restore(first, force=True)
        assert {one.pid for one in report.forced} == {process.pid}
        assert (scanned.root / "d" / "f3").read_text() == "one 3\n"


def test_a_forced_restore_goes_past_who_writes_on(scanned: Scanned) -> None:
    first = plant(scanned)
    with (scanned.root / "d" / "f3").open("r+") as file, holding(scanned.root / "d" / "f3", "r+"):
        scanned.restore(first, lambda: print("late", file=file, flush=True), force=True)
        assert (scanned.root / "d" / "f3").read_text() == "one 3\n"


def test_a_working_directory_that_would_go(scanned: Scanned) -> None:
    first = plant(scanned)
    (scanned.root / "made" / "deep").mkdir(parents=True)
    with (
        holding(scanned.root / "made" / "deep", "cwd") as process,
        pytest.raises(CogfsError, match=f"pid {process.pid}"),
    ):
        scanned.restore(first)
    scanned.restore(first)
    assert not (scanned.root / "made").exists()
