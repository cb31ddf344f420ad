"""Programs that change a directory without end, each in a way that holds an invariant at every moment.

Run as ``python -m tests.support.writers NAME DIRECTORY``: it makes its files, says so by a line on stdout, and goes on
until its stdin ends. It ends with 0 when no call failed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

#: Files of ``counters``.
COUNTERS = 200
#: Bytes of each file of ``exchange``; more than are written or read at once.
SIZE = 300_000
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

#: Makes the files when it is first asked, and changes them once each time after that.
Writer = Iterator[None]


def exchange(place: Path) -> Writer:
    """``left`` and ``right`` are one full of a and one full of b, exchanged by one call again and again."""
    libc = ctypes.CDLL(None, use_errno=True)
    left, right = place / "left", place / "right"
    left.write_bytes(b"a" * SIZE)
    right.write_bytes(b"b" * SIZE)
    while True:
        yield
        names = os.fsencode(left), os.fsencode(right)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), "renameat2")


def pair(place: Path) -> Writer:
    """``first`` is written before ``second``, both in place: the second is never ahead, and at most one behind."""
    names = [place / "first", place / "second"]
    number = 0
    while True:
        for name in names:
            # One call, so that no moment has a part of it.
            fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(fd, b"%010d\n" % number, 0)
            os.close(fd)
        yield
        number += 1


def replaced(place: Path) -> Writer:
    """The same, each written beside and renamed over."""
    names = [place / "one", place / "two"]
    number = 0
    while True:
        for name in names:
            beside = name.with_suffix(".new")
            beside.write_bytes(b"%010d\n" % number)
            beside.rename(name)
        yield
        number += 1


def counters(place: Path) -> Writer:
    """File i is never behind file i + 1, and the first never more than one ahead of the last."""
    files = []
    for number in range(COUNTERS):
        below = place / f"c{number % 10}"
        below.mkdir(exist_ok=True)
        files.append(os.open(below / f"{number:03}", os.O_WRONLY | os.O_CREAT, 0o644))
    count = 0
    while True:
        for fd in files:
            os.pwrite(fd, b"%010d\n" % count, 0)
        yield
        count += 1


def moves(place: Path) -> Writer:
    """A directory with two files that moves between two places: at every moment it is in one of them, whole."""
    places = [place / "here", place / "there"]
    for one in places:
        one.mkdir()
    (places[0] / "bag").mkdir()
    for name in ("x", "y"):
        (places[0] / "bag" / name).write_text(name)
    while True:
        yield
        (places[0] / "bag").rename(places[1] / "bag")
        places.reverse()


def database(place: Path) -> Writer:
    """Each transaction writes its number into two tables."""
    connection = sqlite3.connect(place / "base.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA wal_autocheckpoint=20")
    connection.execute("CREATE TABLE one (n INTEGER PRIMARY KEY, filler BLOB)")
    connection.execute("CREATE TABLE two (n INTEGER PRIMARY KEY)")
    number = 0
    while True:
        yield
        number += 1
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO one VALUES (?, randomblob(700))", (number,))
        connection.execute("INSERT INTO two VALUES (?)", (number,))
        connection.execute("COMMIT")


def shared_map(place: Path) -> Writer:
    """A counter in a shared map, which is never synced; on a page of its own, the number of passes."""
    path = place / "map"
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    number = 0
    while True:
        yield
        number += 1
        for page in range(8):
            view[page * mmap.PAGESIZE : page * mmap.PAGESIZE + 8] = number.to_bytes(8, "little")


WRITERS: dict[str, Callable[[Path], Writer]] = {
    writer.__name__: writer for writer in (exchange, pair, replaced, counters, moves, database, shared_map)
}


def main(name: str, place: str) -> None:
    writer = WRITERS[name](Path(place))
    next(writer)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        next(writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
