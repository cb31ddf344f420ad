"""What the way back costs, at the client, beside what is done without cogfs.

``python -m tests.bench.rewind [--files N] [--rounds N] [--entries N] [--changed N…] [--base DIR] [--json]``.

1. In a tree of ``--files``: nine files are changed and one is made, and that is taken back; in turn by a rewind with
   files (after its dry run), and in a bare copy of the tree by ``git stash -u``, and by ``git checkout -f`` with
   ``git clean -fd``, in a shadow repository. Only the rewind and the stash can be taken back.
2. A thread of ``--entries`` is forked without files.
3. A plan (dry run) over each of ``--changed`` files: until the first changes are there, and in all; and how much memory
   it takes at its peak, of the daemon and of the client, which is a process of its own. Once piece by piece, and once
   with everything in one report.

Milliseconds, the medians of the rounds; memory in MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cogfs.client import Client, Thread, Workspace, connect
from cogfs.v1 import common_pb2
from tests.bench.checkpoint import Figures, change, make, sealed
from tests.bench.peers import output, site

_MIB = 1 << 20


class _Shadow:
    """A repository beside the tree, whose only commit is where the way back leads."""

    def __init__(self, tree: Path, place: Path) -> None:
        self._environment = {
            "GIT_DIR": str(place),
            "GIT_WORK_TREE": str(tree),
            "GIT_AUTHOR_NAME": "bench",
            "GIT_AUTHOR_EMAIL": "bench@localhost",
            "GIT_COMMITTER_NAME": "bench",
            "GIT_COMMITTER_EMAIL": "bench@localhost",
        }
        self._tree = tree
        self._git("init", "-q")
        self._git("add", "-A")
        self._git("commit", "-q", "-m", "first")

    def _git(self, *command: str) -> None:
        output("git", "-C", str(self._tree), *command, **self._environment)

    def stash(self) -> None:
        self._git("stash", "push", "-q", "-u")

    def drop(self) -> None:
        self._git("stash", "drop", "-q")

    def checkout_and_clean(self) -> None:
        self._git("checkout", "-q", "-f", ".")
        self._git("clean", "-q", "-f", "-d")


def _change(root: Path, files: list[Path], turn: int) -> None:
    """Nine files are changed, and one is made."""
    change(root, files, turn, 9)
    (root / f"new-{turn}.txt").write_text("new\n" * 40)


def small_changes(cog: Client, base: Path, count: int, rounds: int) -> dict[str, float]:
    """Ten changed files in a tree of ``count``."""
    root, bare = base / "mounted", base / "bare"
    for place in (root, bare):
        place.mkdir()
        make(place, count)
    files = sorted(path.relative_to(bare) for path in bare.rglob("*.txt"))
    shadow = _Shadow(bare, base / "shadow")
    workspace = cog.mount(root)
    thread = cog.create_thread("small", workspace=workspace)
    thread.user_message("first")
    last = thread.append("assistant", "done").id
    thread.user_message("second")
    sealed(workspace)
    figures = Figures()
    for turn in range(rounds):
        _change(root, files, turn)
        thread.append("note", "what is cut")
        figures.note("rewind, dry run", lambda: thread.rewind(last, files=True, dry_run=True))
        figures.note("rewind", lambda: thread.rewind(last, files=True))
        _change(bare, files, turn)
        figures.note("git stash -u", shadow.stash)
        shadow.drop()
        _change(bare, files, turn)
        figures.note("git checkout -f, git clean -fd", shadow.checkout_and_clean)
    workspace.unmount()
    for place in (root, bare):
        shutil.rmtree(place)
    return figures.medians()


def forks(cog: Client, entries: int, rounds: int) -> dict[str, float]:
    """Forks of a thread of ``entries``, without files."""
    thread = cog.create_thread("long")
    for number in range(entries):
        last = thread.append("user" if number % 2 else "assistant", f"message {number}").id
    figures = Figures()
    for _ in range(rounds):
        figures.note(f"fork of {entries} entries", lambda: thread.fork(last))
        figures.note("the same, dry run", lambda: thread.fork(last, dry_run=True))
    return figures.medians()


def plan(cog: Client, thread: Thread, entry: str, streamed: bool) -> dict[str, float]:
    """One dry run, by this process: what it took, and how many changes it told of."""
    cog.thread(thread.id)
    # The peak so far is that of what is here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory(os.getpid(), "VmRSS")
    told = first = 0
    begun = time.perf_counter_ns()

    def take(piece: common_pb2.RestoreChanges) -> None:
        nonlocal told, first
        told += len(piece.files)
        first = first or time.perf_counter_ns() - begun

    report = thread.rewind(entry, files=True, dry_run=True, changes=take if streamed else None)
    whole = time.perf_counter_ns() - begun
    told = told or len(report.files.restore.files)
    return {
        "files": told,
        "first changes": (first or whole) / 1e6,
        "all": whole / 1e6,
        "client, MiB": _memory(os.getpid(), "VmHWM") - before,
    }


def _memory(pid: int, what: str) -> float:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / _MIB


def _planned(workspace: Workspace, thread: Thread, entry: str, how: str) -> dict[str, float]:
    """``plan`` in a process of its own, and the memory of the daemon meanwhile: another one, which has none left over
    from what the last one did."""
    with connect() as cog:
        os.kill(cog.daemon().pid, signal.SIGKILL)
    with connect(start=True) as cog:
        pid = cog.daemon().pid
        while workspace.status().state != workspace.message.ACTIVE:
            time.sleep(0.05)
        thread.rewind(thread.message.leaf_id, files=True, dry_run=True)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before, mapped = _memory(pid, "VmRSS"), _mapped(pid)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.rewind", "--plan", thread.id, entry, how],
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, float] = json.loads(done.stdout)
    # What it has mapped of the store's index counts as its memory, and is the kernel's to take back.
    mapped = _mapped(pid) - mapped
    return {**found, "daemon, MiB": _memory(pid, "VmHWM") - before - mapped, "mapped, MiB": mapped}


def _mapped(pid: int) -> float:
    return _memory(pid, "RssFile") + _memory(pid, "RssShmem")


def large_plans(cog: Client, base: Path, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Plans over so many changed files, by their names."""
    root = base / "changed"
    root.mkdir()
    make(root, max(sizes))
    workspace = cog.mount(root)
    thread = cog.create_thread("large", workspace=workspace)
    first = thread.user_message("first").id
    thread.append("assistant", "done")
    sealed(workspace)
    files = sorted(root.rglob("*.txt"))
    figures = {}
    for size in sorted(sizes):
        for file in files[:size]:
            with open(file, "a") as out:
                out.write(f"changed among {size}\n")
        _settled(workspace, thread)
        for how in ("streamed", "whole"):
            found = _planned(workspace, thread, first, how)
            assert found["files"] == size, found
            figures[f"{size:,} files, {how}"] = found
    workspace.unmount()
    shutil.rmtree(root)
    return figures


def _settled(workspace: Workspace, thread: Thread) -> None:
    thread.user_message("another")
    sealed(workspace)
    thread.refresh()


def _table(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{title:<34}" + "".join(f"{name:>16}" for name in columns))
    for name, row in rows.items():
        print(f"{name:<34}" + "".join(f"{row[column]:>16,.1f}" for column in columns))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--changed", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--base", type=Path, help="directory for the trees and the store; better on a quiet disk")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        thread_id, entry, how = options.plan
        with connect() as cog:
            print(json.dumps(plan(cog, cog.thread(thread_id), entry, how == "streamed")))
        return 0
    figures = {}
    with site(options.base) as base, connect(start=True) as cog:
        parts: dict[str, Callable[[], dict[str, dict[str, float]]]] = {
            f"ten changed files among {options.files:,}": lambda: _columns(
                small_changes(cog, base, options.files, options.rounds)
            ),
            "threads": lambda: _columns(forks(cog, options.entries, options.rounds)),
            "plans": lambda: large_plans(cog, base, options.changed) if options.changed else {},
        }
        for title, measure in parts.items():
            figures[title] = measure()
            if not options.json:
                _table(title, figures[title])
                sys.stdout.flush()
    if options.json:
        print(json.dumps(figures))
    return 0


def _columns(figures: dict[str, float]) -> dict[str, dict[str, float]]:
    return {name: {"milliseconds": figure} for name, figure in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
