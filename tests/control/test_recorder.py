"""Recording: what is read again, what is not, and what an update of changed names comes to."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control import capture, recorder
from cogfs.fsd.control.asof import AsOf
from cogfs.fsd.control.capture import Captured, capture_file
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.planner import find, walk
from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import RACY_NS, Recorded, Recorder
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.undolog import EntryWas, InodeWas, Status, UndoLog, UndoLogWriter, Was
from cogfs.store.schema import Kind, OpaqueReason, RecordState, TreeEntry
from cogfs.store.store import Store
from tests.control.files import ANY_SIZE, Directory

#: By which files with several names are left out.
REFUSING = Rules((), ANY_SIZE, refuse_hard_links=True)


def _age(path: Path) -> None:
    """Set a file's times back, and wait until its change time is old enough to be believed."""
    then = time.time_ns() - 100_000_000_000
    os.utime(path, ns=(then, then))


def test_what_did_not_change_is_not_read_again(place: Directory) -> None:
    for number in range(20):
        (place.root / f"f{number}").write_text(str(number))
    assert place.scan().hashed == 20
    # Changed just before it was recorded: it may have changed again within the same tick of the clock.
    assert place.scan().hashed == 20
    time.sleep(RACY_NS / 1e9 + 0.1)
    assert place.scan().hashed == 20
    assert place.scan().hashed == 0
    (place.root / "f3").write_text("other")
    assert place.scan().hashed == 1


def test_a_change_of_the_same_length_and_time_is_seen(place: Directory) -> None:
    path = place.root / "file"
    path.write_text("aaaa")
    _age(path)
    times = path.stat()
    first = place.record()
    path.write_text("bbbb")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = place.record()
    assert first.hash != second.hash


def test_every_kind_is_recorded(place: Directory) -> None:
    root = os.fsencode(place.root)
    names = [
        b"with space",
        b"new\nline",
        "文件".encode(),
        b"not utf-8 \xff\xfe",
        b" lead",
        b'"quote"',
        b"\\back",
        b"-dash",
    ]
    for name in names:
        with open(os.path.join(root, name), "wb") as file:
            file.write(name)
    os.symlink(b"to \xff", os.path.join(root, b"link"))
    os.mkdir(os.path.join(root, b"empty"), 0o711)
    os.mkfifo(os.path.join(root, b"fifo"))
    os.setxattr(os.path.join(root, b"-dash"), b"user.a", b"1")
    entries = {entry.name: entry for entry in place.store.read_tree(place.record().hash).entries}
    assert set(entries) == {*names, b"link", b"empty", b"fifo"}
    for name in names:
        assert place.store.read_blob(entries[name].hash) == name
    assert entries[b"link"].target == b"to \xff"
    assert (entries[b"empty"].kind, entries[b"empty"].mode) == (Kind.DIRECTORY, 0o711)
    assert entries[b"fifo"].target == OpaqueReason.SPECIAL.encode()
    assert entries[b"-dash"].xattrs == ((b"user.a", b"1"),)


def test_excluded_and_large_files_are_named_and_not_read(place: Directory) -> None:
    (place.root / "sub" / "node_modules" / "x").mkdir(parents=True)
    (place.root / "sub" / "a.log").write_text("l")
    (place.root / "sub" / "big").write_bytes(b"b" * 11)
    (place.root / "sub" / "fits").write_bytes(b"b" * 10)
    recorded = place.scan(Rules(("*.log",), 10))
    found = {path: (entry.kind, entry.target) for path, entry in walk(place.store, recorded.root.hash)}
    assert found == {
        b"sub": (Kind.DIRECTORY, b""),
        b"sub/node_modules": (Kind.OPAQUE, b"excluded"),
        b"sub/a.log": (Kind.OPAQUE, b"excluded"),
        b"sub/big": (Kind.OPAQUE, b"too-large"),
        b"sub/fits": (Kind.FILE, b""),
    }
    assert recorded.hashed == 1
    assert (recorded.sums.files, recorded.sums.bytes, recorded.sums.skipped) == (1, 10, 1)


def test_a_submount_is_not_entered(place: Directory) -> None:
    inside = place.root / "mounted"
    inside.mkdir()
    assert os.system(f"mount -t tmpfs none '{inside}'") == 0
    try:
        (inside / "secret").write_text("s")
        entry = find(place.store, place.record(), b"mounted")
    finally:
        os.system(f"umount '{inside}'")
    assert entry is not None and entry.target == OpaqueReason.SUBMOUNT.encode()


def test_rows_written_ahead_make_the_next_recording_a_scan(place: Directory) -> None:
    for number in range(5):
        (place.root / f"d{number}").mkdir()
        (place.root / f"d{number}" / "f").write_text(str(number))
    root = place.record()
    state = RecordState(root, place.root.stat().st_ino, (), ANY_SIZE, worker_started_ns=7)
    with place.store.write() as writer:
        writer.put_record_state(place.id, state)
    book = RecordBook(place.store, place.id, flush_rows=4)
    fd = os.open(place.root, os.O_RDONLY)
    try:
        # It is never committed, as after a crash.
        Recorder(place.store, book, fd, Rules((), ANY_SIZE), place.pool).scan()
    finally:
        os.close(fd)
    with place.store.read() as reader:
        assert reader.record_state(place.id) == msgspec.structs.replace(state, worker_started_ns=0)


class Watched:
    """Changes of a directory, told of as a worker tells of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[bytes, set[bytes]] = {}
        self.new: set[int] = set()
        self.files: dict[int, bool] = {}

    def entry(self, path: str) -> None:
        parent, _, name = os.fsencode(path).rpartition(b"/")
        self.names.setdefault(parent, set()).add(name)

    def made(self, path: str) -> None:
        self.entry(path)
        full = self.root / path
        if full.is_dir() and not full.is_symlink():
            self.names[os.fsencode(path)] = set()
            self.new.add(full.stat().st_ino)
        else:
            self.content(path)

    def content(self, path: str) -> None:
        self.files[os.lstat(self.root / path).st_ino] = True

    def attributes(self, path: str) -> None:
        inode = os.lstat(self.root / path).st_ino
        self.files[inode] = self.files.get(inode, False)

    def moved(self, old: str, new: str) -> None:
        self.entry(old)
        self.entry(new)
        below = os.fsencode(old) + b"/"
        for path in [path for path in self.names if path == os.fsencode(old) or path.startswith(below)]:
            self.names[os.fsencode(new) + path[len(os.fsencode(old)) :]] = self.names.pop(path)

    def dirty(self) -> tuple[list[DirtyDirectory], list[DirtyFile]]:
        directories = []
        for path, names in self.names.items():
            full = os.path.join(os.fsencode(self.root), path)
            if os.path.isdir(full):
                inode = os.stat(full).st_ino
                above = os.stat(os.path.dirname(full) if path else full).st_ino
                made = inode in self.new
                directories.append(DirtyDirectory(inode, above, path, sorted(names), made, made, False))
        paths: dict[int, list[bytes]] = {}
        for parent, below, files in os.walk(os.fsencode(self.root)):
            for name in [*below, *files]:
                full = os.path.join(parent, name)
                paths.setdefault(os.lstat(full).st_ino, []).append(os.path.relpath(full, os.fsencode(self.root)))
        return directories, [self.file(inode, paths.get(inode, []), content) for inode, content in self.files.items()]

    def file(self, inode: int, paths: list[bytes], content: bool) -> DirtyFile:
        parents = [os.stat(os.path.join(os.fsencode(self.root), os.path.dirname(path))).st_ino for path in paths]
        return DirtyFile(inode, paths, parents, content)


def _random_changes(root: Path, watched: Watched, dice: random.Random, *, links: bool = False) -> None:
    def pick(*, directories: bool) -> str | None:
        found = [
            os.path.relpath(os.path.join(parent, name), root)
            for parent, below, files in os.walk(root)
            for name in (below if directories else files)
        ]
        return dice.choice(sorted(found)) if found else None

    for number in range(dice.randrange(1, 12)):
        where = pick(directories=True) if dice.random() < 0.7 else None
        new = f"{where}/n{number}" if where else f"n{number}-{dice.randrange(1000)}"
        action = dice.randrange(10 if links else 8)
        path = pick(directories=False)
        if action == 0:
            if not (root / new).exists():
                (root / new).mkdir()
                watched.made(new)
        elif action in (1, 2):
            if not (root / new).exists():
                (root / new).write_text(str(dice.random()))
                watched.made(new)
        elif action == 3 and path:
            with open(root / path, "a") as file:
                file.write("more")
            watched.content(path)
        elif action == 4 and path:
            if os.lstat(root / path).st_nlink > 1:
                watched.attributes(path)
            os.unlink(root / path)
            watched.entry(path)
        elif action == 5 and path and not (root / new).exists():
            os.rename(root / path, root / new)
            watched.moved(path, new)
            watched.attributes(new)
        elif action == 6 and path:
            os.chmod(root / path, dice.choice((0o600, 0o644, 0o755)))
            watched.attributes(path)
        elif action == 7 and where:
            target = pick(directories=True)
            if target and dice.random() < 0.5:
                for parent, _, files in os.walk(root / target):
                    for name in files:
                        if os.lstat(os.path.join(parent, name)).st_nlink > 1:
                            watched.attributes(os.path.relpath(os.path.join(parent, name), root))
                shutil.rmtree(root / target)
                watched.entry(target)
            elif target and not (where + "/").startswith(target + "/") and not (root / where / "moved").exists():
                os.rename(root / target, root / where / "moved")
                watched.moved(target, f"{where}/moved")
        elif action > 7 and path and not (root / new).exists():
            os.link(root / path, root / new)
            watched.made(new)


@pytest.mark.parametrize("seed", range(40))
def test_an_update_comes_to_what_a_scan_comes_to(place: Directory, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for name in ("a/b/c", "a/d", "e"):
        (place.root / name).mkdir(parents=True)
    for number in range(12):
        (place.root / dice.choice(("a", "a/b", "a/b/c", "a/d", "e", ".")) / f"f{number}").write_text(str(number))
    place.scan()
    for _ in range(6):
        watched = Watched(place.root)
        _random_changes(place.root, watched, dice)
        updated = place.update(*watched.dirty())
        fresh = Directory(place.store, place.root)
        scanned = fresh.scan()
        fresh.close()
        assert dict(walk(place.store, updated.root.hash)) == dict(walk(place.store, scanned.root.hash))
        assert updated.sums == scanned.sums


@pytest.mark.parametrize("seed", range(25))
def test_an_update_refuses_the_hard_links_that_a_scan_refuses(place: Directory, seed: int) -> None:
    dice = random.Random(seed)

    def shown(root: TreeEntry) -> dict[bytes, TreeEntry]:
        """What a group is called does not matter, nor then the names of the trees that hold it."""
        return {
            path: msgspec.structs.replace(entry, link_group=int(entry.link_group != 0), hash=b"")
            if entry.kind is Kind.DIRECTORY or entry.link_group
            else entry
            for path, entry in walk(place.store, root.hash)
        }

    for name in ("a/b", "e"):
        (place.root / name).mkdir(parents=True)
    for number in range(8):
        (place.root / dice.choice(("a", "a/b", "e", ".")) / f"f{number}").write_text(str(number))
    place.scan(REFUSING)
    for _ in range(6):
        watched = Watched(place.root)
        _random_changes(place.root, watched, dice, links=True)
        updated = place.update(*watched.dirty(), REFUSING)
        fresh = Directory(place.store, place.root)
        scanned = fresh.scan(REFUSING)
        fresh.close()
        assert shown(updated.root) == shown(scanned.root)
        assert updated.sums == scanned.sums


def test_an_update_reads_only_what_was_written(place: Directory) -> None:
    (place.root / "a").mkdir()
    (place.root / "b").mkdir()
    for number in range(10):
        (place.root / "a" / f"f{number}").write_text(str(number))
    place.scan()
    watched = Watched(place.root)
    os.rename(place.root / "a", place.root / "b" / "a")
    watched.moved("a", "b/a")
    os.rename(place.root / "b/a/f1", place.root / "g1")
    watched.moved("b/a/f1", "g1")
    watched.attributes("g1")
    os.chmod(place.root / "b/a/f2", 0o600)
    watched.attributes("b/a/f2")
    (place.root / "b/a/f3").write_text("changed")
    watched.content("b/a/f3")
    recorded = place.update(*watched.dirty())
    assert recorded.hashed == 1
    found = find(place.store, recorded.root, b"b/a/f2")
    assert found is not None and found.mode == 0o600
    moved = find(place.store, recorded.root, b"g1")
    assert moved is not None and place.store.read_blob(moved.hash) == b"1"


def _is_delta(place: Directory, root: TreeEntry, path: bytes) -> bool:
    found = find(place.store, root, path)
    assert found is not None
    return place.store._objects.locate(found.hash).is_delta


@pytest.mark.parametrize("scan", [True, False])
def test_what_changed_is_stored_against_what_was_recorded_of_it(place: Directory, scan: bool) -> None:
    texts = {name: random.Random(name).randbytes(3000).hex() for name in ("edited", "replaced", "moved", "d/below")}
    (place.root / "d").mkdir()
    for name, text in texts.items():
        (place.root / name).write_text(text)
    for number in range(40):
        (place.root / "d" / f"{number}").write_text(str(number))
    place.scan()
    watched = Watched(place.root)
    (place.root / "edited").write_text(texts["edited"] + "more")
    watched.content("edited")
    # As editors save.
    (place.root / "new").write_text(texts["replaced"] + "more")
    watched.made("new")
    os.rename(place.root / "new", place.root / "replaced")
    watched.moved("new", "replaced")
    os.rename(place.root / "moved", place.root / "elsewhere")
    watched.moved("moved", "elsewhere")
    (place.root / "elsewhere").write_text(texts["moved"] + "more")
    watched.content("elsewhere")
    # Another directory comes in the place of one.
    shutil.copytree(place.root / "d", place.root / "copy")
    os.rename(place.root / "d", place.root.parent / f"{place.root.name}-gone")
    os.rename(place.root / "copy", place.root / "d")
    (place.root / "d/below").write_text(texts["d/below"] + "more")
    watched.entry("d")
    watched.made("d")
    for path in (place.root / "d").iterdir():
        watched.made(f"d/{path.name}")
    shutil.rmtree(place.root.parent / f"{place.root.name}-gone")
    recorded = place.scan() if scan else place.update(*watched.dirty())
    changed = [b"edited", b"replaced", b"d", b"d/below", *([] if scan else [b"elsewhere"])]
    assert {path: _is_delta(place, recorded.root, path) for path in changed} == dict.fromkeys(changed, True)
    for changed_path, text in (
        (b"edited", texts["edited"]),
        (b"elsewhere", texts["moved"]),
        (b"d/below", texts["d/below"]),
    ):
        found = find(place.store, recorded.root, changed_path)
        assert found is not None
        assert place.store.read_blob(found.hash).decode() == text + "more"


def test_a_directory_that_left_and_came_back_is_looked_at_again(place: Directory) -> None:
    rules = Rules(("out/",), ANY_SIZE)
    (place.root / "d").mkdir()
    (place.root / "d" / "f").write_text("one")
    (place.root / "out").mkdir()
    place.scan(rules)
    watched = Watched(place.root)
    os.rename(place.root / "d", place.root / "out" / "d")
    watched.moved("d", "out/d")
    place.update(*watched.dirty(), rules)
    # Below an excluded path nothing is recorded, whatever the worker tells.
    watched = Watched(place.root)
    (place.root / "out" / "d" / "f").write_text("two")
    watched.content("out/d/f")
    place.update(*watched.dirty(), rules)
    watched = Watched(place.root)
    os.rename(place.root / "out" / "d", place.root / "d")
    watched.moved("out/d", "d")
    recorded = place.update(*watched.dirty(), rules)
    entry = find(place.store, recorded.root, b"d/f")
    assert entry is not None and place.store.read_blob(entry.hash) == b"two"


def test_what_is_left_out_by_its_place_is_found_anew_when_a_directory_above_it_moves(place: Directory) -> None:
    rules = Rules(("src/gen/",), ANY_SIZE)
    for name in ("src/gen", "other/deep/gen"):
        (place.root / name).mkdir(parents=True)
        (place.root / name / "f").write_text(name)
    place.scan(rules)

    def move(old: str, new: str) -> TreeEntry:
        watched = Watched(place.root)
        os.rename(place.root / old, place.root / new)
        watched.moved(old, new)
        return place.update(*watched.dirty(), rules).root

    # Out of the place that is left out: recorded, though nothing in it changed.
    entry = find(place.store, move("src", "lib"), b"lib/gen/f")
    assert entry is not None and place.store.read_blob(entry.hash) == b"src/gen"
    # Into it: left out, whatever was recorded of it before; and what changes there meanwhile is not forgotten.
    entry = find(place.store, move("other/deep", "src"), b"src/gen")
    assert entry is not None and entry.target == OpaqueReason.EXCLUDED.encode()
    watched = Watched(place.root)
    (place.root / "src/gen/f").write_text("changed")
    watched.content("src/gen/f")
    place.update(*watched.dirty(), rules)
    entry = find(place.store, move("src", "other/deep"), b"other/deep/gen/f")
    assert entry is not None and place.store.read_blob(entry.hash) == b"changed"


def test_directories_that_change_places_with_those_above_them(place: Directory) -> None:
    rules = Rules(("a/b/f", "c/a/f"), ANY_SIZE)
    (place.root / "a" / "b").mkdir(parents=True)
    (place.root / "a" / "f").write_text("of a")
    (place.root / "a" / "b" / "f").write_text("of b")
    place.scan(rules)
    watched = Watched(place.root)
    os.rename(place.root / "a" / "b", place.root / "c")
    watched.moved("a/b", "c")
    os.rename(place.root / "a", place.root / "c" / "a")
    watched.moved("a", "c/a")
    for path in ("c", "c/a"):
        watched.names.setdefault(path.encode(), set())
    root = place.update(*watched.dirty(), rules).root
    entry = find(place.store, root, b"c/f")
    assert entry is not None and place.store.read_blob(entry.hash) == b"of b"
    entry = find(place.store, root, b"c/a/f")
    assert entry is not None and entry.target == OpaqueReason.EXCLUDED.encode()


def test_a_hard_link_is_followed_to_names_that_the_worker_does_not_know(place: Directory) -> None:
    (place.root / "a").mkdir()
    (place.root / "b").mkdir()
    (place.root / "a" / "one").write_text("first")
    os.link(place.root / "a" / "one", place.root / "b" / "two")
    os.link(place.root / "a" / "one", place.root / "a" / "three")
    place.scan()
    (place.root / "a" / "one").write_text("second")
    inode = (place.root / "a" / "one").stat().st_ino
    recorded = place.update([], [Watched(place.root).file(inode, [b"a/one"], True)])
    for path in (b"a/one", b"b/two", b"a/three"):
        entry = find(place.store, recorded.root, path)
        assert entry is not None and place.store.read_blob(entry.hash) == b"second"


def test_a_hard_link_in_a_directory_whose_path_another_one_has_taken(place: Directory) -> None:
    (place.root / "a").mkdir()
    (place.root / "a" / "one").write_text("first")
    os.link(place.root / "a" / "one", place.root / "a" / "two")
    place.scan()
    watched = Watched(place.root)
    os.rename(place.root / "a", place.root / "b")
    watched.moved("a", "b")
    (place.root / "a").mkdir()
    watched.made("a")
    os.link(place.root / "b" / "one", place.root / "a" / "one")
    watched.made("a/one")
    (place.root / "a" / "one").write_text("second")
    directories, files = watched.dirty()
    known = [
        watched.file(file.inode, [path for path in file.paths if path != b"b/two"], file.content) for file in files
    ]
    recorded = place.update(directories, known)
    for path in (b"a/one", b"b/one", b"b/two"):
        entry = find(place.store, recorded.root, path)
        assert entry is not None and place.store.read_blob(entry.hash) == b"second"
    assert len({row.link_group for _, row in walk(place.store, recorded.root.hash) if row.kind is Kind.FILE}) == 1


def _reasons(place: Directory, root: TreeEntry) -> dict[bytes, str]:
    return {path: entry.target.decode() for path, entry in walk(place.store, root.hash) if entry.kind is Kind.OPAQUE}


def test_refused_hard_links_are_neither_read_nor_stored(
    place: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").write_text("of somebody else")
    os.link(tmp_path / "outside", place.root / "linked")
    (place.root / "alone").write_text("mine")
    read: list[bytes] = []

    def watched(store: Store, name: bytes, dir_fd: int, **options: Any) -> Captured | OpaqueReason:
        read.append(name)
        return capture_file(store, name, dir_fd, **options)

    monkeypatch.setattr(recorder, "capture_file", watched)
    recorded = place.scan(REFUSING)
    assert _reasons(place, recorded.root) == {b"linked": "hard-link"}
    assert read == [b"alone"]
    assert recorded.sums.skipped == 1
    # Without the refusal it is a file like any other, and with it again it is none.
    assert _reasons(place, place.record()) == {}
    assert _reasons(place, place.record(REFUSING)) == {b"linked": "hard-link"}
    (tmp_path / "outside").unlink()
    assert _reasons(place, place.record(REFUSING)) == {}


def test_a_refused_file_is_kept_again_when_its_other_name_goes(place: Directory) -> None:
    """Also where the worker does not know the name that is left."""
    for name in ("a", "b"):
        (place.root / name).mkdir()
    one, two = place.root / "a" / "one", place.root / "b" / "two"
    one.write_text("content")
    place.scan(REFUSING)
    watched = Watched(place.root)
    os.link(one, two)
    watched.made("b/two")
    directories = watched.dirty()[0]
    recorded = place.update(directories, [watched.file(one.stat().st_ino, [b"a/one", b"b/two"], False)], REFUSING)
    assert _reasons(place, recorded.root) == {b"a/one": "hard-link", b"b/two": "hard-link"}
    assert recorded.root == place.record(REFUSING)
    inode = two.stat().st_ino
    one.unlink()
    root = place.root.stat().st_ino
    gone = DirtyDirectory(one.parent.stat().st_ino, root, b"a", [b"one"], False, False, False)
    recorded = place.update([gone], [watched.file(inode, [], False)], REFUSING)
    assert _reasons(place, recorded.root) == {}
    entry = find(place.store, recorded.root, b"b/two")
    assert entry is not None and place.store.read_blob(entry.hash) == b"content"
    assert entry.link_group == 0


def test_a_file_that_never_holds_still_is_named(place: Directory) -> None:
    # Reading it takes longer than a tick of the clock by which the change is seen.
    (place.root / "log").write_bytes(os.urandom(32 << 20))
    (place.root / "still").write_text("still")
    stop = threading.Event()

    def write() -> None:
        with open(place.root / "log", "r+b") as file:
            while not stop.is_set():
                file.seek(0)
                file.write(os.urandom(16))
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        recorded = place.scan(Rules((), -1))
    finally:
        stop.set()
        writer.join()
    assert _reasons(place, recorded.root) == {b"log": "changing"}
    assert recorded.sums.skipped == 1
    assert _reasons(place, place.record(Rules((), -1))) == {}


def test_files_that_cannot_be_read_are_named(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EACCES, errno.EIO):
        (place.root / errno.errorcode[number]).write_text("x")

    def refuse(name: bytes, dir_fd: int) -> int:
        number = getattr(errno, os.fsdecode(name))
        raise OSError(number, os.strerror(number), name)

    with monkeypatch.context() as patched:
        patched.setattr(capture, "open_for_reading", refuse)
        recorded = place.scan()
    assert _reasons(place, recorded.root) == {b"EACCES": "unreadable", b"EIO": "unreadable"}
    assert recorded.sums.skipped == 2
    assert _reasons(place, place.record()) == {}


def test_a_new_directory_that_has_the_number_of_one_that_is_gone(place: Directory) -> None:
    """What was recorded below the old one is forgotten, or its hard links would be looked for in the new one."""
    (place.root / "old" / "below").mkdir(parents=True)
    (place.root / "old" / "below" / "one").write_text("first")
    (place.root / "old" / "two").write_text("other")
    os.link(place.root / "old" / "below" / "one", place.root / "one")
    os.link(place.root / "old" / "two", place.root / "two")
    place.scan()
    below = (place.root / "old" / "below").stat().st_ino
    linked = {(place.root / name).stat().st_ino for name in ("one", "two")}
    # The worker tells of another directory with the same number.
    shutil.rmtree(place.root / "old" / "below")
    (place.root / "old" / "two").unlink()
    (place.root / "old").rename(place.root / "new")
    watched = Watched(place.root)
    watched.entry("old")
    watched.made("new")
    watched.content("one")
    place.update(*watched.dirty())
    with place.store.read() as reader:
        assert reader.directory(place.id, below) is None
        root = place.root.stat().st_ino
        assert {(reader.link(place.id, inode) or (0, ()))[1] for inode in linked} <= {(root,), ()}
    assert place.record() == place.recorded


def _updated_as_of_boundary(place: Directory, listed: DirtyFile, root: TreeEntry, frozen_ns: int) -> Recorded | None:
    """An update as of boundary 1, of which the log is beside the directory."""
    fd = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY)
    log = UndoLog(place.root.parent / "log")
    asof = AsOf(fd, log=log, boundary=1, frozen_ns=frozen_ns)
    try:
        book = RecordBook(place.store, place.id)
        return Recorder(place.store, book, fd, Rules((), ANY_SIZE), place.pool, asof).update([], [listed], root)
    finally:
        asof.close()
        log.close()
        os.close(fd)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_a_hard_link_of_a_boundary_that_is_removed_before_it_is_looked_at(place: Directory, gone: str) -> None:
    """The name that is left has a link count of one by then, and is still one file with the other."""
    for path in ("a", "b/below"):
        (place.root / path).mkdir(parents=True)
    (place.root / "a" / "x").write_text("one file")
    os.link(place.root / "a" / "x", place.root / "b" / "below" / "x")
    root = place.scan().root
    (place.root / "a" / "x").chmod(0o600)
    status = (place.root / "a" / "x").lstat()
    paths = [b"a/x", b"b/below/x"]
    listed = Watched(place.root).file(status.st_ino, paths, False)
    frozen_ns = time.time_ns()
    content = find(place.store, root, b"a/x")
    assert content is not None
    directory = place.root / ("a" if gone == "a" else "b/below")
    writer = UndoLogWriter(place.root.parent / "log")
    writer.append(
        InodeWas(1, Was(Status.of(status), hash=content.hash)),
        EntryWas(1, directory.stat().st_ino, b"x", status.st_ino, stat.S_IFREG),
    )
    writer.close()
    (directory / "x").unlink()
    recorded = _updated_as_of_boundary(place, listed, root, frozen_ns)
    assert recorded is not None and not recorded.failed
    groups = {entry.link_group for path in paths if (entry := find(place.store, recorded.root, path)) is not None}
    assert len(groups) == 1 and groups != {0}


@pytest.mark.parametrize("listed", [True, False])
def test_what_a_later_boundary_has_of_a_file_is_not_taken_for_an_earlier_one(place: Directory, listed: bool) -> None:
    """A file that the worker does not list is not protected: it was changed, and then listed by the next boundary."""
    path = place.root / "x"
    path.write_text("one")
    os.link(path, place.root / "y")
    root = place.scan().root
    path.write_text("two")
    status = path.lstat()
    frozen_ns = time.time_ns() if listed else status.st_ctime_ns - 1
    file = Watched(place.root).file(status.st_ino, [b"x", b"y"] if listed else [], True)
    with path.open("rb") as opened:
        later, _ = place.store.put_file(opened.fileno(), 3)
    writer = UndoLogWriter(place.root.parent / "log")
    writer.append(InodeWas(2, Was(Status.of(status), hash=later)))
    writer.close()
    path.write_text("three")
    recorded = _updated_as_of_boundary(place, file, root, frozen_ns)
    assert recorded is not None
    assert {one.reason for one in recorded.failed} == (set() if listed else {"it was changed before it was read"})


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o300])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_directory_that_may_not_be_read(place: Directory, mode: int, scan: bool, before: bool) -> None:
    """One that was so at the boundary is left out by name; one that was made so since is never taken for empty."""
    top = place.root / "top"
    (top / "closed").mkdir(parents=True)
    root = place.scan().root
    (top / "closed" / "name").write_text("x")
    for path in (place.root, top, top / "closed", top / "closed" / "name"):
        os.chown(path, 65534, 65534)
    directory = top / "closed"
    changes = [
        DirtyDirectory(directory.stat().st_ino, top.stat().st_ino, b"top/closed", [b"name"], False, before, False)
    ]
    frozen_ns = time.time_ns()
    time.sleep(0.05)
    directory.chmod(mode)
    if before:
        frozen_ns = time.time_ns()
    book = RecordBook(place.store, place.id)
    fd = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY)
    UndoLogWriter(place.root.parent / "log").close()
    log = UndoLog(place.root.parent / "log")
    asof = AsOf(fd, log=log, boundary=1, frozen_ns=frozen_ns)
    asof.refresh()
    os.seteuid(65534)
    try:
        recorder = Recorder(place.store, book, fd, Rules((), ANY_SIZE), place.pool, asof)
        if not before:
            with pytest.raises(CogfsError, match="made unreadable"):
                recorder.scan() if scan else recorder.update(changes, [], root)
        elif scan:
            recorder.scan()
    finally:
        os.seteuid(0)
        asof.close()
        log.close()
        os.close(fd)
