"""A snapshot is one moment of all files, whatever programs are at while it is taken and captured.

Programs in processes of their own keep an invariant that holds at every moment; snapshots are taken without a pause
and written out elsewhere, and each holds the invariant.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cogfs.client import Client, Snapshot
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Site
from tests.e2e.support.writing import running
from tests.support.writers import COUNTERS, SIZE

_SNAPSHOTS = 12


def write_out(snapshot: Snapshot, place: Path) -> Path:
    """The files of a snapshot, as its API lists and gives them."""
    place.mkdir()
    for entry in snapshot.ls(recursive=True):
        path = os.path.join(os.fsencode(place), entry.path)
        if entry.kind == snapshot_pb2.TreeEntry.DIRECTORY:
            os.mkdir(path)
        elif entry.kind == snapshot_pb2.TreeEntry.FILE:
            with open(path, "wb") as file:
                for piece in snapshot.cat(entry.path):
                    file.write(piece)
        else:
            raise AssertionError(entry)
    return place


def _take(here: Site, cog: Client, count: int = _SNAPSHOTS) -> list[Snapshot]:
    """Snapshots, one right after another, and now and then one a little later."""
    workspace = here.workspace(cog)
    taken = []
    for number in range(count):
        taken.append(workspace.checkpoint(str(number)))
        if number % 3 == 2:
            time.sleep(0.05)
    return taken


# --- the invariants ---------------------------------------------------------------------------------------------------


def _exchange(place: Path) -> None:
    contents = [(place / name).read_bytes() for name in ("left", "right")]
    assert sorted(contents) == [b"a" * SIZE, b"b" * SIZE]


def _in_order(first: str, second: str) -> Callable[[Path], None]:
    def check(place: Path) -> None:
        one, two = (int((place / name).read_bytes()) for name in (first, second))
        assert two <= one <= two + 1, (one, two)

    return check


def _counters(place: Path) -> None:
    counts = [int((place / f"c{number % 10}" / f"{number:03}").read_bytes()) for number in range(COUNTERS)]
    assert counts == sorted(counts, reverse=True), counts
    assert counts[0] - counts[-1] <= 1, counts


def _moves(place: Path) -> None:
    (bag,) = place.glob("*/bag")
    assert {path.name: path.read_text() for path in bag.iterdir()} == {"x": "x", "y": "y"}


def _database(place: Path) -> None:
    (place / "base.db-shm").unlink(missing_ok=True)
    connection = sqlite3.connect(place / "base.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        one, two = (
            [row[0] for row in connection.execute(f"SELECT n FROM {table} ORDER BY n")] for table in ("one", "two")
        )
    finally:
        connection.close()
    assert one == two == list(range(1, len(one) + 1))


_CHECKS: dict[str, Callable[[Path], None]] = {
    "exchange": _exchange,
    "pair": _in_order("first", "second"),
    "replaced": _in_order("one", "two"),
    "counters": _counters,
    "moves": _moves,
    "database": _database,
}


def _check(here: Site, snapshots: list[Snapshot], names: list[str]) -> None:
    for number, snapshot in enumerate(snapshots):
        place = write_out(snapshot, here.base / f"out{number}")
        message = snapshot.refresh().message
        assert message.state == snapshot_pb2.Snapshot.SEALED, message
        for name in names:
            try:
                _CHECKS[name](place / name)
            except AssertionError as error:
                raise AssertionError(f"snapshot {number}, {name}: {error}\n{here.log_tail()}") from error
        shutil.rmtree(place)


@pytest.mark.parametrize(
    "names", [["exchange", "pair", "replaced", "moves"], ["counters"], ["database"]], ids=lambda names: names[0]
)
def test_every_snapshot_is_one_moment(here: Site, names: list[str]) -> None:
    here.mount()
    with here.client() as cog, ExitStack() as stack:
        for name in names:
            stack.enter_context(running(name, here.project / name))
        snapshots = _take(here, cog)
        stack.close()
        _check(here, snapshots, names)


def test_a_restore_brings_back_one_moment(here: Site) -> None:
    """Into the project itself, once the programs have ended."""
    names = ["pair", "counters", "database"]
    here.mount()
    with here.client() as cog:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(running(name, here.project / name))
            snapshots = _take(here, cog, 4)
        for snapshot in reversed(snapshots):
            here.workspace(cog).restore(snapshot.id)
            for name in names:
                # Looked at elsewhere, as to open a database changes it.
                place = shutil.copytree(here.project / name, here.base / "copy")
                _CHECKS[name](place)
                shutil.rmtree(place)


def test_what_was_stored_in_a_shared_map_before_is_in_the_snapshot(here: Site) -> None:
    """Never synced, by a process that goes on; what it stores meanwhile may be in or not."""
    here.mount()
    path = here.project / "mine"
    path.write_bytes(bytes(mmap.PAGESIZE * 4))
    with here.client() as cog, running("shared_map", here.project / "shared_map"):
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        other = (here.project / "shared_map" / "map").open("rb")
        taken: list[tuple[int, int, Snapshot]] = []
        for number in range(1, _SNAPSHOTS + 1):
            for page in range(4):
                view[page * mmap.PAGESIZE : page * mmap.PAGESIZE + 8] = number.to_bytes(8, "little")
            least = int.from_bytes(os.pread(other.fileno(), 8, 7 * mmap.PAGESIZE), "little")
            taken.append((number, least, here.workspace(cog).checkpoint()))
        other.close()
        view.close()
        for number, least, snapshot in taken:
            mine = b"".join(snapshot.cat("mine"))
            for page in range(4):
                assert int.from_bytes(mine[page * mmap.PAGESIZE :][:8], "little") == number
            theirs = b"".join(snapshot.cat("shared_map/map"))
            for page in range(8):
                assert int.from_bytes(theirs[page * mmap.PAGESIZE :][:8], "little") >= least
