"""What a message with its checkpoint costs, at the client, beside what is done without cogfs.

``python -m tests.bench.checkpoint [--sizes N…] [--rounds N] [--base DIR] [--json]``. For each size of the tree: the
first checkpoint, then in turn ten files are changed and each side records them: ``AppendEntry`` of a user message, and
``git add -A && git write-tree`` in a shadow repository of the same tree. A figure is the median of its rounds, in
milliseconds. Then the same ten files are changed again, and taken back: a rewind with files, and its dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cogfs.client import Client, connect

_FILES_IN_A_DIRECTORY = 50


def _make(root: Path, count: int) -> None:
    for number in range(count):
        directory = root / f"d{number // _FILES_IN_A_DIRECTORY // 20}" / f"e{number // _FILES_IN_A_DIRECTORY}"
        if number % _FILES_IN_A_DIRECTORY == 0:
            directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}.txt").write_text(f"file {number}\n" * 40)


def _change(root: Path, files: list[Path], turn: int) -> None:
    for file in files[turn % 7 :: max(1, len(files) // 10)][:10]:
        with open(root / file, "a") as out:
            out.write(f"turn {turn}\n")


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - start) / 1e6


class _Shadow:
    """A repository beside the tree, as agents keep one."""

    def __init__(self, tree: Path, place: Path) -> None:
        self._environment = {**os.environ, "GIT_DIR": str(place), "GIT_WORK_TREE": str(tree)}
        self._git("init", "-q")

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], env=self._environment, check=True, stdout=subprocess.DEVNULL)

    def record(self) -> None:
        self._git("add", "-A")
        self._git("write-tree")


def measure(cog: Client, base: Path, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each step in a tree of ``count`` files."""
    root, bare = base / f"mounted-{count}", base / f"bare-{count}"
    for place in (root, bare):
        place.mkdir()
        _make(place, count)
    files = sorted(path.relative_to(bare) for path in bare.rglob("*.txt"))
    shadow = _Shadow(bare, base / f"shadow-{count}")
    workspace = cog.mount(root)
    thread = cog.create_thread(f"bench-{count}", workspace=workspace)
    found: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        found.setdefault(name, []).append(_milliseconds(act))

    note("first checkpoint", lambda: thread.user_message("first"))
    note("first shadow git", shadow.record)
    for turn in range(rounds):
        last = thread.append("assistant", "done")
        _change(root, files, turn)
        _change(bare, files, turn)
        note("checkpoint", lambda turn=turn: thread.user_message(f"turn {turn}"))  # type: ignore[misc]
        note("shadow git", shadow.record)
        _change(root, files, turn)
        note("rewind, dry run", lambda last=last: thread.rewind(last.id, files=True, dry_run=True))  # type: ignore[misc]
        note("rewind", lambda last=last: thread.rewind(last.id, files=True))  # type: ignore[misc]
    workspace.unmount()
    return {name: statistics.median(figures) for name, figures in found.items()}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", type=Path, help="directory for the trees and the store; better on a quiet disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.sizes) < 10:
        parser.error("at least one round and ten files are needed")
    base = Path(tempfile.mkdtemp(prefix="cogfs-bench-", dir=options.base))
    os.environ["COGFS_STATE_DIR"] = str(base / "state")
    os.environ["COGFS_RUNTIME_DIR"] = str(base / "run")
    os.environ.pop("COGFS_ENDPOINT", None)
    figures: dict[int, dict[str, float]] = {}
    try:
        with connect(start=True) as cog:
            for count in options.sizes:
                figures[count] = measure(cog, base, count, options.rounds)
    finally:
        subprocess.run(
            [sys.executable, "-m", "cogfs.ctl.main", "daemon", "stop"], check=False, stdout=subprocess.DEVNULL
        )
        shutil.rmtree(base, ignore_errors=True)
    if options.json:
        print(json.dumps(figures))
        return 0
    print(f"{'files':>8}" + "".join(f"{name:>20}" for name in next(iter(figures.values()))))
    for count, row in figures.items():
        print(f"{count:>8}" + "".join(f"{value:>17.1f} ms" for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
