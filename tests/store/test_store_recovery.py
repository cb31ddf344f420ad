"""What was put and not committed is there after a kill: verified, synced before it is named, and nothing torn."""

from __future__ import annotations

import errno
import io
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cogfs.store import chunking, codec, steps
from cogfs.store.errors import StoreIO
from cogfs.store.hashing import hash_object
from cogfs.store.objects import Recovered
from cogfs.store.records import PACK_HEADER_SIZE, RECORD_HEADER_SIZE, pack_header, record_header
from cogfs.store.schema import ObjectKind, ThreadRow
from cogfs.store.store import Store

PROGRAM = Path(__file__).with_name("store_program.py")
_program = runpy.run_path(str(PROGRAM))
open_store: Callable[[Path], Store] = _program["open_store"]
item: Callable[[int], bytes] = _program["item"]

RECOVERING = ("pack.recover", "pack.renew", "pack.truncate", "pack.discard")
COMMITTING = ("pack.sync", "pack.directory", "index.write", "index.commit", "index.committed")


def name_of(data: bytes) -> bytes:
    return hash_object(ObjectKind.BLOB, data)


def record(data: bytes, name: bytes | None = None) -> bytes:
    return record_header(ObjectKind.BLOB, codec.Codec.RAW, name or name_of(data), len(data), data) + data


def pack(place: Path, number: int) -> Path:
    return place / "packs" / f"{number:08x}.pack"


def numbers(place: Path) -> list[int]:
    return sorted(int(path.stem, 16) for path in (place / "packs").iterdir())


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def run(*arguments: str, crash_at: str = "") -> tuple[int, list[int]]:
    """How the program ended, and the numbers of the items that it had put."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=dict(os.environ, COGFS_CRASH_AT=crash_at),
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr.decode()
    return done.returncode, said(done.stdout)


def said(output: bytes) -> list[int]:
    return [int(line[4:]) for line in output.decode().split("\n")[:-1] if line.startswith("put ")]


def check(store: Store, put: list[int]) -> None:
    """Every item of ``put`` is there, and no pack holds anything that is torn."""
    for number in put:
        assert store.read_blob(name_of(item(number))) == item(number)
    for number in store._packs.numbers():
        list(store._packs.scan(number))


# --- killed


@pytest.mark.parametrize("passing", [1, 2, 5])
@pytest.mark.parametrize("label", ["pack.create", "pack.header", "pack.append", "pack.appended"])
def test_killed_while_putting(place: Path, label: str, passing: int) -> None:
    status, put = run("put", str(place), "60", "0", crash_at=f"{label}:{passing}")
    assert status == -signal.SIGKILL
    with open_store(place) as store:
        check(store, put)
        # The last one may have been written before the process could say so.
        assert store.recovered.objects in {len(put), len(put) + 1}
        store.put_blob(item(1000))
    with open_store(place) as store:
        check(store, [*put, 1000])
        store.sync()
    with open_store(place) as store:
        check(store, [*put, 1000])
        assert store.recovered == Recovered()


def test_killed_at_any_moment_again_and_again(place: Path) -> None:
    chance = random.Random(9)
    put: list[int] = []
    for round_ in range(12):
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "put", str(place), "5000", str(round_ * 5000)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        output = b"".join(process.stdout.readline() for _ in range(chance.randrange(1, 30)))
        process.send_signal(signal.SIGKILL)
        output += process.stdout.read()
        process.wait(180)
        process.stdout.close()
        put += said(output)
        if round_ % 4 == 2:
            with open_store(place) as store:
                check(store, put)
                store.sync()
    assert len(put) > 100
    with open_store(place) as store:
        check(store, put)
        assert len(numbers(place)) > 5


@pytest.mark.parametrize("passing", [1, 3])
@pytest.mark.parametrize("label", RECOVERING + COMMITTING)
def test_killed_while_recovering_or_committing(place: Path, label: str, passing: int) -> None:
    status, put = run("put", str(place), "20", "0")
    assert status == 0
    many = len(numbers(place))
    assert many > 4
    for number in range(1, many + 1):
        with pack(place, number).open("ab") as file:
            file.write(b"torn")
    for number in (70, 71, 72):
        pack(place, number).write_bytes(pack_header(number) + b"left behind")
    status, _ = run("commit", str(place), crash_at=f"{label}:{passing}")
    once = label in {"pack.directory", "index.write", "index.commit", "index.committed"}
    assert status == (0 if once and passing > 1 else -signal.SIGKILL)
    with open_store(place) as store:
        check(store, put)
        assert store.recovered.objects == (0 if label == "index.committed" or status == 0 else len(put))
        store.sync()
    with open_store(place) as store:
        check(store, put)
        assert store.recovered == Recovered()
    assert numbers(place) == list(range(1, many + 1))


def test_a_process_that_ends_without_a_word(place: Path, tmp_path: Path) -> None:
    large = noise(1, 5 * 1024 * 1024)
    (tmp_path / "large").write_bytes(large)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "leave", str(place), str(tmp_path / "large")],
        capture_output=True,
        timeout=600,
        check=True,
    )
    name, tree = map(bytes.fromhex, done.stdout.decode().split())
    with Store.open(place) as store:
        assert store.recovered.objects == 2 + sum(1 for _ in chunking.cut(io.BytesIO(large).read))
        assert b"".join(store.read_file(name)) == large
        assert store.read_tree(tree).entries[0].hash == name


# --- what a start makes of what it finds


def test_tails_of_several_packs_are_synced_before_they_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            call(fd)

        return sync

    monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    datas = [noise(index, 600) for index in range(9)]
    with Store.open(place, pack_limit=1500) as store:
        store.put_blob(datas[0])
        store.sync()
        names = [store.put_blob(data) for data in datas]
    assert numbers(place) == [1, 2, 3, 4, 5]
    assert pack(place, 1).stat().st_size > 1400
    with Store.open(place, pack_limit=2200) as store:
        assert store.recovered == Recovered(8, 8 * (600 + RECORD_HEADER_SIZE))
        assert store.stats().objects == 9
        assert store.stats().pack_bytes == sum(path.stat().st_size for path in (place / "packs").iterdir())
        events.clear()
        with steps.on_step(events.append), store.write() as rows:
            rows.put_thread(ThreadRow("t", "", "", 0, 0, 0))
        wanted = {f"{number:08x}.pack" for number in range(1, 6)} | {"packs"}
        assert wanted <= set(events[: events.index("index.commit")])
        events.clear()
        with store.write() as rows:
            rows.put_thread(ThreadRow("t", "", "", 1, 0, 0))
        assert not events
        # It goes on after the tail of the last pack, and in no other.
        more = store.put_blob(noise(50, 100))
        assert store._objects.locate(more)[:2] == (5, PACK_HEADER_SIZE + 696)
        other = store.put_blob(noise(51, 2100))
        assert store._objects.locate(other).pack == 6
        store.sync()
    passed: list[str] = []
    with steps.on_step(passed.append), Store.open(place) as store:
        # Nothing is read that was committed.
        assert not [label for label in passed if label.startswith("pack.")]
        assert [store.read_blob(name) for name in names] == datas
        assert store.read_blob(more) == noise(50, 100)


def test_damage_ends_the_tail_of_its_pack_alone(place: Path) -> None:
    datas = [noise(index, 400) for index in range(9)]
    with Store.open(place, pack_limit=PACK_HEADER_SIZE + 3 * 496) as store:
        store.put_blob(datas[0])
        store.sync()
        names = [store.put_blob(data) for data in datas]
    assert numbers(place) == [1, 2, 3]
    for number, index in ((1, 2), (2, 1)):
        with pack(place, number).open("r+b") as file:
            file.seek(PACK_HEADER_SIZE + index * 496 + 200)
            file.write(b"damaged")
    with Store.open(place) as store:
        found = [index for index, name in enumerate(names) if store.has(name)]
        assert found == [0, 1, 3, 6, 7, 8]
        assert all(store.read_blob(names[index]) == datas[index] for index in found)
        assert store.recovered == Recovered(5, 5 * 496, 3 * 496)
        assert pack(place, 1).stat().st_size == PACK_HEADER_SIZE + 2 * 496
        assert pack(place, 2).stat().st_size == PACK_HEADER_SIZE + 496
        # What is lost is put again, where packs still grow.
        assert [store.put_blob(data) for data in datas] == names
        assert store._objects.locate(names[2]).pack == 3
        store.sync()
    with Store.open(place) as store:
        assert [store.read_blob(name) for name in names] == datas


def test_what_the_index_has_is_not_taken_twice(place: Path) -> None:
    with Store.open(place) as store:
        store.put_blob(b"known" * 20)
        store.sync()
        known = record(b"known" * 20)
    whole = pack(place, 1).read_bytes()
    new = [record(b"new %d" % index) for index in range(3)]
    pack(place, 1).write_bytes(whole + known + new[0] + known + new[1] + new[0] + known)
    # The same object once more, an object of its own between, and nothing of use.
    pack(place, 4).write_bytes(pack_header(4) + new[1] + new[2] + known)
    pack(place, 6).write_bytes(pack_header(6) + known + new[0] + new[2])
    with Store.open(place) as store:
        assert store.recovered.objects == 3
        assert numbers(place) == [1, 4]
        assert pack(place, 1).read_bytes() == whole + known + new[0] + known + new[1]
        assert pack(place, 4).read_bytes() == pack_header(4) + new[1] + new[2]
        assert [store.read_blob(name_of(b"new %d" % index)) for index in range(3)] == [b"new 0", b"new 1", b"new 2"]
        assert store._objects.locate(store.put_blob(b"more")).pack == 4
        store.sync()
    with Store.open(place) as store:
        assert store.recovered == Recovered()
        assert store.stats().objects == 5


@pytest.mark.parametrize(
    "wrong",
    [
        record(b"another", name_of(b"content")),
        record_header(ObjectKind.TREE, codec.Codec.RAW, name_of(b"kind"), 4, b"kind") + b"kind",
        record_header(ObjectKind.BLOB, codec.Codec.ZSTD, name_of(b"frame"), 5, b"frame") + b"frame",
        record_header(ObjectKind.BLOB, codec.Codec.RAW, name_of(b"length"), 7, b"length") + b"length",
        record_header(ObjectKind.BLOB, codec.Codec.ZSTD, name_of(b"length"), 2**64 - 1, b"length") + b"length",
        record_header(ObjectKind.BLOB, codec.Codec.ZSTD_DELTA, name_of(b"base"), 4, b"base") + b"base",
        record_header(ObjectKind.BLOB, 200, name_of(b"codec"), 5, b"codec") + b"codec",
        bytes(RECORD_HEADER_SIZE * 3),
    ],
)
def test_a_record_that_is_not_what_it_says_ends_the_tail(place: Path, wrong: bytes) -> None:
    with Store.open(place) as store:
        store.put_blob(b"known")
        store.sync()
    whole = pack(place, 1).read_bytes()
    pack(place, 1).write_bytes(whole + record(b"before") + wrong + record(b"after"))
    pack(place, 2).write_bytes(pack_header(2) + wrong + record(b"after"))
    with Store.open(place) as store:
        assert pack(place, 1).read_bytes() == whole + record(b"before")
        assert numbers(place) == [1]
        assert store.read_blob(name_of(b"before")) == b"before"
        assert store.stats().objects == 2
        assert store._objects.locate(store.put_blob(b"after")).pack == 1


@pytest.mark.parametrize("junk", [b"", b"x", pack_header(1)[:-1], pack_header(1), pack_header(2) + record(b"x")])
def test_a_pack_without_anything_is_removed_and_its_number_is_free(place: Path, junk: bytes) -> None:
    with Store.open(place):
        pass
    pack(place, 1).write_bytes(junk)
    with Store.open(place) as store:
        assert numbers(place) == []
        assert store.recovered == Recovered(dropped=len(junk))
        name = store.put_blob(b"data")
        assert store._objects.locate(name).pack == 1
        store.sync()
        assert store.read_blob(name) == b"data"


# --- what fails


class Failing:
    """Fails at every passing of a label."""

    def __init__(self, label: str, number: int) -> None:
        self.label, self.number = label, number

    def __call__(self, label: str) -> None:
        if label == self.label:
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("known", [True, False])
def test_a_tail_that_cannot_be_read_is_left_alone(place: Path, known: bool) -> None:
    with Store.open(place) as store:
        if known:
            store.put_blob(b"known")
            store.sync()
        name = store.put_blob(b"pending")
    whole = pack(place, 1).read_bytes()
    with steps.on_step(Failing("pack.recover", errno.EIO)):
        store = Store.open(place)
    with store:
        assert store.recovered == Recovered(unreadable=(1,))
        assert not store.has(name)
        more = store.put_blob(b"more")
        assert store._objects.locate(more).pack == 2
        store.sync()
        assert pack(place, 1).read_bytes() == whole
    with Store.open(place) as store:
        assert store.recovered.objects == 1
        assert store.read_blob(name) == b"pending"
        assert store.read_blob(more) == b"more"
        assert store._objects.locate(store.put_blob(b"last")).pack == 2


def test_what_can_be_read_of_a_tail_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(place) as store:
        names = [store.put_blob(noise(index, 500)) for index in range(4)]
    whole = pack(place, 1).read_bytes()
    pread = os.pread

    def bad_sector(fd: int, length: int, offset: int) -> bytes:
        if offset >= PACK_HEADER_SIZE + 2 * 596:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, offset)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", bad_sector)
            store = Store.open(place)
        with store:
            assert [store.has(name) for name in names] == [True, True, False, False]
            store.sync()
            assert store.recovered.unreadable == (1,)
            assert pack(place, 1).read_bytes() == whole
    with Store.open(place) as store:
        assert store.recovered == Recovered(2, 2 * 596)
        assert [store.read_blob(name) for name in names] == [noise(index, 500) for index in range(4)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_start_without_means_is_refused_and_changes_nothing(place: Path, number: int) -> None:
    with Store.open(place) as store:
        name = store.put_blob(b"pending")
    whole = pack(place, 1).read_bytes() + b"torn"
    pack(place, 1).write_bytes(whole)
    with steps.on_step(Failing("pack.recover", number)), pytest.raises(StoreIO):
        Store.open(place)
    assert pack(place, 1).read_bytes() == whole
    with Store.open(place) as store:
        assert store.read_blob(name) == b"pending"


@pytest.mark.parametrize("label", ["pack.truncate", "pack.discard"])
def test_a_failure_while_tidying_up_loses_nothing(place: Path, label: str) -> None:
    with Store.open(place) as store:
        name = store.put_blob(b"pending")
    with pack(place, 1).open("ab") as file:
        file.write(b"torn")
    pack(place, 2).write_bytes(b"left behind")
    with steps.on_step(Failing(label, errno.EIO)), pytest.raises(StoreIO):
        Store.open(place)
    with Store.open(place) as store:
        assert store.read_blob(name) == b"pending"
        assert numbers(place) == [1]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_cannot_be_written_over_itself_is_written_elsewhere(place: Path, number: int) -> None:
    with Store.open(place) as store:
        store.put_blob(b"known")
        store.sync()
        names = [store.put_blob(b"pending %d" % index) for index in range(3)]
    with steps.on_step(Failing("pack.renew", number)):
        store = Store.open(place)
    with store:
        assert [store.read_blob(name) for name in names] == [b"pending 0", b"pending 1", b"pending 2"]
        assert {store._objects.locate(name).pack for name in names} == {1}
        with steps.on_step(Failing("pack.append", number)), pytest.raises(Exception, match="writing a pack"):
            store.sync()
        store.sync()
        assert {store._objects.locate(name).pack for name in names} == {2}
    size = pack(place, 1).stat().st_size
    with Store.open(place) as store:
        # The old records are of no use any more.
        assert store.recovered.objects == 0
        assert pack(place, 1).stat().st_size == size - store.recovered.dropped < size
        assert [store.read_blob(name) for name in names] == [b"pending 0", b"pending 1", b"pending 2"]
        assert store.stats().objects == 4


def test_records_are_written_over_themselves_as_they_were(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(place) as store:
        store.put_blob(b"known")
        store.sync()
        for index in range(3):
            store.put_blob(noise(index, 5000))
    whole = pack(place, 1).read_bytes()
    written: list[tuple[int, bytes]] = []
    pwritev = os.pwritev

    def note(fd: int, parts: list[bytes], offset: int) -> int:
        written.append((offset, b"".join(parts)))
        return pwritev(fd, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", note)
        with Store.open(place):
            pass
    start = len(whole) - 3 * 5096
    assert [offset for offset, _ in written] == [start, start + 5096, start + 2 * 5096]
    assert b"".join(data for _, data in written) == whole[start:]
    assert pack(place, 1).read_bytes() == whole


# --- anything


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.booleans()), min_size=1, max_size=12),
    st.lists(
        st.tuples(st.sampled_from(["cut", "flip", "zero", "grow"]), st.integers(0, 7), st.integers(0, 3000)), max_size=3
    ),
)
def test_whatever_happens_to_the_tails(puts: list[tuple[int, bool]], damages: list[tuple[str, int, int]]) -> None:
    """What was committed stays; what is given out of the rest is right; a pack that was not damaged loses nothing."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "store"
        datas = [noise(index, size) + b"%d" % index for index, (size, _) in enumerate(puts)]
        with Store.open(place, pack_limit=1500) as store:
            names = []
            committed = 0
            for data, sync in zip(datas, (sync for _, sync in puts), strict=True):
                names.append(store.put_blob(data))
                if sync:
                    store.sync()
                    committed = len(names)
            ends = dict(store._objects._ends)
            where = [store._objects.locate(name).pack for name in names]
        damaged = set()
        for how, which, offset in damages:
            number = 1 + which % max(where)
            path = pack(place, number)
            content = bytearray(path.read_bytes())
            end = ends.get(number, 0)
            spot = end + offset % (len(content) - end) if len(content) > end else end
            if how == "grow":
                content += noise(offset, offset)
            elif spot < len(content):
                damaged.add(number)
                if how == "flip":
                    content[spot] ^= 0x10
                else:
                    content[spot:] = bytes(len(content) - spot if how == "zero" else 0)
            path.write_bytes(content)
        copy = Path(directory) / "copy"
        shutil.copytree(place, copy)
        for again in (place, copy, place):
            with Store.open(again, pack_limit=1500) as store:
                for index, name in enumerate(names):
                    if store.has(name):
                        assert store.read_blob(name) == datas[index]
                    else:
                        assert index >= committed
                        assert where[index] in damaged
                for number in store._packs.numbers():
                    list(store._packs.scan(number))
                if again == copy:
                    assert [store.put_blob(data) for data in datas] == names
                    store.sync()
                    assert all(store.read_blob(name) == data for name, data in zip(names, datas, strict=True))
