"""Whatever step fails, or the process dies at: what was committed is there, and the store goes on."""

from __future__ import annotations

import errno
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from cogfs.store import steps
from cogfs.store.errors import Corrupt, NoSpace, StoreError, StoreIO
from cogfs.store.schema import ThreadRow
from cogfs.store.store import Store

PROGRAM = Path(__file__).with_name("store_program.py")
_program = runpy.run_path(str(PROGRAM))
open_store: Callable[[Path], Store] = _program["open_store"]
check_rounds: Callable[[Store], int] = _program["check"]

LABELS = steps.STORE_STEPS
#: Steps that are passed only when something was left behind.
CLEANING = ("pack.recover", "pack.renew", "pack.truncate", "pack.discard")

#: A row's worth of inode numbers: about 1,000 bytes.
WIDE = tuple(range(2**40, 2**40 + 111))


def run(*arguments: str, crash_at: str = "") -> tuple[int, list[str]]:
    environment = dict(os.environ, COGFS_CRASH_AT=crash_at)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr.decode()
    return done.returncode, done.stdout.decode().split("\n")


def check(place: Path, output: list[str]) -> None:
    done = sum(line.startswith("done ") for line in output)
    with open_store(place) as store:
        # The commit may have come through before the process could say so.
        assert check_rounds(store) in {done, done + 1}


@pytest.mark.parametrize("passing", [1, 2, 7])
@pytest.mark.parametrize("label", [label for label in LABELS if label not in CLEANING])
def test_killed_at_a_step(place: Path, label: str, passing: int) -> None:
    status, output = run("work", str(place), "6", crash_at=f"{label}:{passing}")
    once = label.startswith("store.") or label == "index.create"
    # The rounds fill three packs.
    per_pack = label in {"pack.create", "pack.header", "pack.directory"}
    assert status == (0 if passing > (1 if once else 3 if per_pack else 7) else -signal.SIGKILL)
    check(place, output)
    assert not list(place.glob("*.new"))
    # Another process goes on from there.
    status, output = run("work", str(place), "2")
    assert status == 0
    with open_store(place) as store:
        assert check_rounds(store) >= 2


def test_every_label_is_passed_and_known(place: Path) -> None:
    passed: list[str] = []
    with steps.on_step(passed.append), open_store(place) as store:
        store.put_blob(b"x")
        store.sync()
        store.put_blob(b"y")
    (place / "packs" / "00000007.pack").write_bytes(b"left behind")
    with (place / "packs" / "00000001.pack").open("ab") as file:
        file.write(b"torn")
    with steps.on_step(passed.append), open_store(place):
        pass
    assert set(passed) == set(LABELS)


@pytest.mark.parametrize("label", CLEANING)
def test_killed_while_cleaning_up(place: Path, label: str) -> None:
    status, output = run("work", str(place), "3", crash_at="pack.sync:4")
    assert status == -signal.SIGKILL
    for number in (70, 71):
        (place / "packs" / f"{number:08x}.pack").write_bytes(b"left behind")
    with (place / "packs" / "00000001.pack").open("ab") as file:
        file.write(b"torn")
    status, _ = run("work", str(place), "1", crash_at=label)
    assert status == -signal.SIGKILL
    check(place, output)
    assert not (place / "packs" / "00000047.pack").exists()


def test_killed_at_any_moment(place: Path) -> None:
    chance = random.Random(4)
    total = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, str(PROGRAM), "work", str(place), "500"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        rounds = 0
        for _ in range(chance.randrange(1, 12)):
            if process.stdout.readline().startswith(b"done "):
                rounds += 1
        process.send_signal(signal.SIGKILL)
        rounds += process.stdout.read().count(b"done ")
        process.wait(180)
        process.stdout.close()
        with open_store(place) as store:
            found = check_rounds(store)
        assert total + rounds <= found <= total + rounds + 1
        total = found
    assert total > 12


class Failing:
    """Fails at the n-th passing of a label, once."""

    def __init__(self, label: str, passing: int, number: int) -> None:
        self.label, self.left, self.number = label, passing, number

    def __call__(self, label: str) -> None:
        if label == self.label:
            self.left -= 1
            if self.left == 0:
                raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("passing", [1, 2])
@pytest.mark.parametrize(
    "label",
    ["pack.create", "pack.header", "pack.append", "pack.appended", "pack.sync", "pack.directory", "index.write",
     "index.commit"],
)  # fmt: skip
def test_a_failing_step_loses_nothing_and_is_tried_again(place: Path, label: str, passing: int, number: int) -> None:
    stored: dict[bytes, bytes] = {}
    rows_written: list[int] = []
    failures: list[StoreError] = []
    failing = Failing(label, passing, number)
    with open_store(place) as store:
        with steps.on_step(failing):
            for count in range(8):
                try:
                    data = random.Random(count).randbytes(150_000)
                    stored[store.put_blob(data)] = data
                    with store.write() as rows:
                        rows.put_thread(ThreadRow(f"t{count}", "", "", 0, 0, 0))
                    rows_written.append(count)
                except StoreError as error:
                    failures.append(error)
                assert all(store.read_blob(name) == data for name, data in stored.items())
                with store.read() as reader:
                    assert [row.id for row in reader.threads()] == [f"t{count}" for count in reversed(rows_written)]
        assert len(failures) == 1
        assert type(failures[0]) is (StoreIO if number == errno.EIO else NoSpace)
        assert len(rows_written) == 7
        assert len(stored) >= 7
    with open_store(place) as store:
        assert all(store.read_blob(name) == data for name, data in stored.items())
        with store.read() as reader:
            assert len(reader.threads()) == 7
        for pack in store._packs.numbers():
            list(store._packs.scan(pack))


def test_a_pack_that_can_neither_be_begun_nor_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with Store.open(place) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            with (
                steps.on_step(Failing("pack.header", 1, errno.EIO)),
                pytest.raises(StoreIO, match=os.strerror(errno.EIO)),
            ):
                store.put_blob(b"one" * 1000)
        # It is in nobody's way, in this process or the next one.
        assert (place / "packs").exists() and len(os.listdir(place / "packs")) == 1
        name = store.put_blob(b"one" * 1000)
        store.sync()
    with Store.open(place) as store:
        assert store.read_blob(name) == b"one" * 1000
        assert store._packs.numbers() == [store._objects.locate(name).pack]
        store.put_blob(b"two" * 1000)
        store.sync()


def test_after_a_failed_sync_the_bytes_are_written_anew(place: Path) -> None:
    with Store.open(place) as store:
        old = store.put_blob(b"old" * 1000)
        store.sync()
        name = store.put_blob(b"new" * 1000)
        with steps.on_step(Failing("pack.sync", 1, errno.EIO)), pytest.raises(StoreIO):
            store.sync()
        assert store._objects.locate(name).pack == 1
        store.sync()
        # What the system could not write it may have dropped, so the old place is not trusted.
        assert store._objects.locate(name).pack == 2
        assert store._objects.locate(old).pack == 1
    with Store.open(place) as store:
        assert store.read_blob(name) == b"new" * 1000
        assert store.read_blob(old) == b"old" * 1000


def test_bytes_that_a_failed_sync_lost_are_never_named(place: Path) -> None:
    with Store.open(place) as store:
        name = store.put_blob(b"new" * 1000)
        with steps.on_step(Failing("pack.sync", 1, errno.EIO)), pytest.raises(StoreIO):
            store.sync()
        os.truncate(place / "packs" / "00000001.pack", 60)
        for _ in range(2):
            with pytest.raises(Corrupt) as caught, store.write() as rows:
                rows.put_thread(ThreadRow("t", "", "", 0, 0, 0))
            assert caught.value.object_hash == name
    with Store.open(place) as store:
        assert not store.has(name)
        with store.read() as reader:
            assert reader.threads() == []


@pytest.fixture(scope="session")
def failing_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = PROGRAM.with_name("failing_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=180)
    return library


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("passing", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("function", ["pwrite", "writev", "pwritev", "fdatasync", "fsync"])
def test_a_failing_call_of_the_system(
    place: Path, failing_calls: Path, function: str, passing: int, number: int
) -> None:
    environment = dict(os.environ, LD_PRELOAD=str(failing_calls), COGFS_FAIL=f"{function}:{passing}:{number}")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "insist", str(place)],
        env=environment,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    expected = b"StoreIO" if number == errno.EIO else b"NoSpace"
    # A store is made with six calls of fsync, and each of the two packs takes one.
    assert done.stdout.split() == ([] if function == "fsync" and passing > 8 else [expected])


def test_the_disk_is_full(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    script = f"mount -t tmpfs -o size=6m none {mount} && exec {sys.executable} {PROGRAM} full {mount}"
    # In a mount namespace of its own, so that nothing stays mounted whatever happens.
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*own, "sh", "-c", script], capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"well\n"


def test_the_map_grows_while_others_read(place: Path) -> None:
    ended = threading.Event()

    def read(store: Store) -> int:
        reads = 0
        while not ended.is_set():
            with store.read() as reader:
                # In one transaction all of a change is there or nothing of it.
                for count in range(40):
                    first = reader.link(f"w{count}", 0)
                    assert (first is None) == (reader.link(f"w{count}", 199) is None)
                    assert first in {None, (count, WIDE)}
                    assert store.read_blob(store.put_blob(b"%d" % (reads % 7))) == b"%d" % (reads % 7)
            reads += 1
        return reads

    with Store.open(place, map_size=64 * 1024) as store, ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, store) for _ in range(3)]
        for count in range(40):
            with store.write() as rows:
                for inode in range(200):
                    rows.put_link(f"w{count}", inode, count, WIDE)
                assert rows.link(f"w{count}", 7) == (count, WIDE)
            for index in range(50):
                store.put_blob(f"{count} {index}".encode())
        ended.set()
        assert all(reader.result() > 0 for reader in readers)
        store.sync()
        assert 2000 < store.stats().objects <= 2007
        with store.read() as reader:
            for count in range(40):
                assert all(reader.link(f"w{count}", inode) is not None for inode in range(200))
    with Store.open(place, map_size=64 * 1024) as store, store.read() as reader:
        assert reader.link("w39", 199) == (39, WIDE)


def test_one_large_change_grows_the_map_in_the_middle(place: Path) -> None:
    with Store.open(place, map_size=64 * 1024) as store:
        with store.write() as rows:
            rows.put_thread(ThreadRow("t", "", "", 0, 0, 0))
            for inode in range(3000):
                rows.put_link("w", inode, inode, (inode % 251, *WIDE * 10))
                if inode % 500 == 499:
                    assert rows.thread("t")
                    rows.delete_link("w", inode - 1)
        with store.read() as reader:
            assert reader.thread("t")
            for inode in range(3000):
                wanted = None if inode % 500 == 498 else (inode, (inode % 251, *WIDE * 10))
                assert reader.link("w", inode) == wanted


def test_an_index_that_can_be_opened_again_only_later(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of its root page failed, so LMDB goes on no more, and the disk cannot be written: once it can, the same
    store is used again."""
    with store.write() as rows:
        rows.put_thread(ThreadRow("t", "", "", 0, 0, 0))
    database = store._database
    opened, panics = lmdb.open, [True]

    class Panicked:
        def begin(self) -> None:
            panics.pop()
            raise lmdb.PanicError("a test")

        def close(self) -> None:
            plain.close()

    def refuse(*_: object, **__: object) -> None:
        raise lmdb.Error("a test: Read-only file system")

    plain = database._environment
    # Not to be put back at the end: by then it has another one, which has to be closed.
    database._environment = Panicked()  # type: ignore[assignment]
    monkeypatch.setattr(lmdb, "open", refuse)
    with pytest.raises(StoreError):
        database.revive()
    assert not panics
    for _ in range(2):
        with pytest.raises(StoreIO, match="opening its index again"), store.read() as reader:
            reader.threads()
        with pytest.raises(StoreIO, match="opening its index again"), store.write() as rows:
            rows.put_thread(ThreadRow("u", "", "", 0, 0, 0))
    monkeypatch.setattr(lmdb, "open", opened)
    with store.write() as rows:
        rows.put_thread(ThreadRow("u", "", "", 0, 0, 0))
    with store.read() as reader:
        assert [thread.id for thread in reader.threads()] == ["u", "t"]


def test_the_lock_of_the_index_stands_in_memory(store: Store) -> None:
    """Or a disk that may not be written any more would kill whoever only reads."""
    assert re.search(r" /dev/shm/cogfs-index-\S+ \(deleted\)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    with store.write() as rows:
        rows.put_thread(ThreadRow("t", "", "", 0, 0, 0))
