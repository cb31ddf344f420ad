"""What programs in the mount feel of checkpoints: latencies of small operations, idle and while snapshots are captured.

``python -m tests.bench.workload [--rounds N] [--base DIR] [--json]``. One program makes, writes, reads and removes
small files, one after another, and times each operation. The figures, medians of the rounds:

- the 99th percentile of an operation when nothing is captured, and while a checkpoint of 256 MiB in 2,000 files is;
- the longest operation around a freeze with 5,000 dirty files;
- how long a write waits for a pending file of 1 GiB, beside how long reading that file takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cogfs.client import Client, Workspace, connect
from tests.bench.peers import site

_PIECE = 1 << 20
_GIB_PIECES = 1024
_FILES = 2000
_FILE_SIZE = 128 << 10
_DIRTY = 5000


class _Program:
    """Small operations until it is told to stop; its latencies in microseconds."""

    def __init__(self, root: Path) -> None:
        self.latencies: list[float] = []
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return self.latencies

    def _time(self, act: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        act()
        self.latencies.append((time.perf_counter_ns() - start) / 1000)

    def _run(self) -> None:
        number = 0
        data = b"x" * 500
        while not self._stop.is_set():
            path = self._root / f"w{number % 100}"
            number += 1
            self._time(lambda path=path: path.write_bytes(data))  # type: ignore[misc]
            self._time(lambda path=path: path.read_bytes())  # type: ignore[misc]
            self._time(path.stat)
            if number % 100 > 50:
                self._time(path.unlink)


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _seal(workspace: Workspace) -> None:
    workspace.checkpoint(wait_for="sealed")


def _fill(root: Path, turn: int) -> None:
    directory = root / f"many{turn}"
    directory.mkdir()
    piece = os.urandom(_FILE_SIZE)
    for number in range(_FILES):
        (directory / str(number)).write_bytes(piece[number % 1000 :] + piece[: number % 1000])


def _during_capture(workspace: Workspace, root: Path, small: Path, turn: int) -> tuple[float, float]:
    """99th percentile idle, and during a capture."""
    program = _Program(small)
    time.sleep(3)
    idle = program.stop()
    _fill(root, turn)
    program = _Program(small)
    _seal(workspace)
    busy = program.stop()
    shutil.rmtree(root / f"many{turn}")
    return _percentile(idle, 0.99), _percentile(busy, 0.99)


def _around_freeze(workspace: Workspace, root: Path, small: Path, turn: int) -> float:
    """The longest operation, in microseconds."""
    directory = root / f"dirty{turn}"
    directory.mkdir()
    for number in range(_DIRTY):
        (directory / str(number)).write_bytes(b"dirty")
    program = _Program(small)
    time.sleep(0.3)
    workspace.checkpoint()
    time.sleep(0.1)
    longest = max(program.stop())
    _seal(workspace)
    return longest


def _pending_write(workspace: Workspace, root: Path) -> tuple[float, float]:
    """Milliseconds of a write to a pending file, and of reading it."""
    path = root / "large"
    with open(path, "wb") as file:
        for _ in range(_GIB_PIECES):
            file.write(os.urandom(_PIECE))
    start = time.perf_counter()
    with open(path, "rb") as file:
        while file.read(_PIECE):
            pass
    reading = (time.perf_counter() - start) * 1000
    workspace.checkpoint()
    start = time.perf_counter()
    with open(path, "r+b") as file:
        file.write(b"changed")
    waited = (time.perf_counter() - start) * 1000
    _seal(workspace)
    return waited, reading


def measure(cog: Client, base: Path, rounds: int) -> dict[str, float]:
    """Each figure by name."""
    root = base / "project"
    small = root / "small"
    small.mkdir(parents=True)
    workspace = cog.mount(root, max_file_bytes=-1)
    _seal(workspace)
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for turn in range(rounds):
        idle, busy = _during_capture(workspace, root, small, turn)
        note("99th percentile idle, µs", idle)
        note("99th percentile during capture, µs", busy)
        note("ratio", busy / idle)
        note("longest operation at a freeze, ms", _around_freeze(workspace, root, small, turn) / 1000)
        waited, reading = _pending_write(workspace, root)
        note("write to a pending GiB, ms", waited)
        note("reading that GiB, ms", reading)
    workspace.unmount()
    return {name: statistics.median(values) for name, values in figures.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", type=Path, help="directory for the tree and the store; better on a quiet disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("at least one round is needed")
    with site(options.base) as base, connect(start=True) as cog:
        figures = measure(cog, base, options.rounds)
    if options.json:
        print(json.dumps(figures))
        return 0
    for name, value in figures.items():
        print(f"{name:<40}{value:>12.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
