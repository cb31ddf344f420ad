"""What a message with its checkpoint costs, at the client, beside what is done without cogfs.

``python -m tests.bench.checkpoint [--sizes N…] [--rounds N] [--base DIR] [--json]``. For each size of the tree: the
first checkpoint, then in turn ten files are changed and each side records them: ``AppendEntry`` of a user message;
``git add -A && git write-tree`` in a shadow repository of the same tree; restic and borg, where they are installed and
the tree is not too large for them; and a walk of the tree that asks for each file's stat, which is the least that any
of those does. Then the same ten files are changed again, and taken back: a rewind with files, and its dry run. Last, a
checkpoint after 5,000 new files, and after 1 GiB was written to one file. ``fdatasync`` of a small write to the store's
filesystem stands beside them: no checkpoint is answered without one.

A figure is the median of its rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cogfs.client import Client, Thread, Workspace, connect
from tests.bench.peers import BACKUPS, Shadow, installed, site

_FILES_IN_A_DIRECTORY = 50
_NEW_FILES = 5000
_GIB = 1 << 30
#: Sizes above which a peer is left out, since it takes minutes a round.
_PEER_LIMIT = 20_000
_SHADOW_LIMIT = 200_000


def make(root: Path, count: int) -> None:
    """A tree of ``count`` files."""
    for number in range(count):
        directory = root / f"d{number // _FILES_IN_A_DIRECTORY // 20}" / f"e{number // _FILES_IN_A_DIRECTORY}"
        if number % _FILES_IN_A_DIRECTORY == 0:
            directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}.txt").write_text(f"file {number}\n" * 40)


def change(root: Path, files: list[Path], turn: int, count: int = 10) -> None:
    """Append to ``count`` of ``files``."""
    for file in files[turn % 7 :: max(1, len(files) // count)][:count]:
        with open(root / file, "a") as out:
            out.write(f"turn {turn}\n")


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - start) / 1e6


class Figures:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def note(self, name: str, act: Callable[[], object]) -> None:
        self._found.setdefault(name, []).append(_milliseconds(act))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(figures) for name, figures in self._found.items()}


def _walk(root: Path) -> None:
    for where, _, names in os.walk(root):
        for name in names:
            os.lstat(os.path.join(where, name))


def _sync_small(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fdatasync(file.fileno())


def sealed(workspace: Workspace) -> None:
    """Wait until nothing is left to capture, so that one round does not pay for the one before."""
    newest = next(iter(workspace.snapshots()), None)
    while newest is not None and newest.message.state == newest.message.State.FROZEN:
        time.sleep(0.01)
        newest = next(iter(workspace.snapshots()))


def _peers(bare: Path, base: Path, count: int) -> dict[str, Callable[[str], None]]:
    peers: dict[str, Callable[[str], None]] = {"stat walk": lambda _: _walk(bare)}
    if count <= _SHADOW_LIMIT:
        peers["shadow git"] = Shadow(bare, base / f"shadow-{count}").record
    if count <= _PEER_LIMIT:
        for name in installed():
            peers[name] = BACKUPS[name](bare, base / f"{name}-{count}").record
    return peers


def measure(cog: Client, base: Path, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each step in a tree of ``count`` files."""
    root, bare = base / f"mounted-{count}", base / f"bare-{count}"
    for place in (root, bare):
        place.mkdir()
        make(place, count)
    files = sorted(path.relative_to(bare) for path in bare.rglob("*.txt"))
    peers = _peers(bare, base, count)
    workspace = cog.mount(root, max_file_bytes=-1)
    thread = cog.create_thread(f"bench-{count}", workspace=workspace)
    figures = Figures()
    figures.note("first checkpoint", lambda: thread.user_message("first"))
    figures.note("first seal", lambda: sealed(workspace))
    for name, record in peers.items():
        figures.note(f"first {name}", lambda record=record: record("first"))  # type: ignore[misc]
    for turn in range(rounds):
        last = thread.append("assistant", "done")
        change(root, files, turn)
        change(bare, files, turn)
        figures.note("fdatasync", lambda: _sync_small(base / "synced"))
        figures.note("checkpoint", lambda turn=turn: thread.user_message(f"turn {turn}"))  # type: ignore[misc]
        for name, record in peers.items():
            figures.note(name, lambda turn=turn, record=record: record(f"turn{turn}"))  # type: ignore[misc]
        sealed(workspace)
        change(root, files, turn)
        figures.note("rewind, dry run", lambda last=last: thread.rewind(last.id, files=True, dry_run=True))  # type: ignore[misc]
        figures.note("rewind", lambda last=last: thread.rewind(last.id, files=True))  # type: ignore[misc]
    _large_changes(figures, root, base / "synced", workspace, thread, min(rounds, 5))
    workspace.unmount()
    for place in (root, bare):
        shutil.rmtree(place)
    return figures.medians()


def _large_changes(
    figures: Figures, root: Path, synced: Path, workspace: Workspace, thread: Thread, rounds: int
) -> None:
    for turn in range(rounds):
        new = root / f"new-{turn}"
        new.mkdir()
        for number in range(_NEW_FILES):
            (new / str(number)).write_bytes(b"new\n" * 25)
        figures.note(f"after {_NEW_FILES} new files", lambda: thread.user_message("new files"))
        sealed(workspace)
    for turn in range(2 * min(rounds, 5)):
        large = root / f"large-{turn % 2}"
        # ext4 writes nothing of a new file for a while, and at once what takes the place of another.
        for what in ("in a new file", "over a file"):
            _write_large(large)
            # In turn, as the first of the two finds the disk busy with that GiB.
            if turn % 2:
                figures.note(f"fdatasync after 1 GiB {what}", lambda: _sync_small(synced))
            else:
                figures.note(f"after 1 GiB {what}", lambda: thread.user_message("large"))
            sealed(workspace)
        large.unlink()
        thread.user_message("without it")
        sealed(workspace)


def _write_large(path: Path) -> None:
    piece = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for _ in range(_GIB // len(piece)):
            file.write(piece)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--base", type=Path, help="directory for the trees and the store; better on a quiet disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.sizes) < 10:
        parser.error("at least one round and ten files are needed")
    figures: dict[int, dict[str, float]] = {}
    with site(options.base) as base, connect(start=True) as cog:
        for count in options.sizes:
            figures[count] = measure(cog, base, count, options.rounds)
    if options.json:
        print(json.dumps(figures))
        return 0
    names = list(dict.fromkeys(name for row in figures.values() for name in row))
    print(f"{'milliseconds':<34}" + "".join(f"{count:>12,}" for count in figures))
    for name in names:
        print(
            f"{name:<34}" + "".join(f"{row[name]:>12.1f}" if name in row else f"{'':>12}" for row in figures.values())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
