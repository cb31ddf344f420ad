"""What a real history takes on disk, and in time, beside what others make of it.

``python -m tests.bench.history [--repository DIR] [--commits N] [--peers NAME…] [--base DIR] [--json]``. The last N
commits of a git repository (its first parents; by default the one that this file is in, with all that it has) are
checked out one after another into one directory, and after each of them every side records it: cogfs as it records a
directory without a mount (look at all files, read what changed, build the trees, one durable transaction); git by
``git add -A`` and ``git commit-tree``, its objects loose; restic; borg. At the end git packs what it has, with
``gc --aggressive``, and cogfs repacks. Some snapshots of cogfs are compared with the trees of their commits, before and
after that.

Of each side: seconds for all commits, bytes of its files, and bytes that these take on disk. A peer that is not
installed is left out. Of cogfs also: how long reading the files of the newest and of the oldest snapshot takes, all of
them and ten, from a store that was just opened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cogfs.fsd.control.recordbook import RecordBook
from cogfs.fsd.control.recorder import Recorder
from cogfs.fsd.control.rules import Rules
from cogfs.store.ids import new_id
from cogfs.store.schema import (
    Kind,
    SnapshotOrigin,
    SnapshotRow,
    SnapshotState,
    SnapshotStats,
    TreeEntry,
    WorkspaceOptions,
    WorkspaceRow,
)
from cogfs.store.store import Store
from tests.bench.peers import BACKUPS, Peer, output

_HERE = Path(__file__).parents[2]
_COMMITS = 500
_WORKSPACE = "bench"


class Cogfs:
    """A store, and a recording of the directory into it for each commit."""

    def __init__(self, tree: Path, place: Path) -> None:
        self._tree = tree
        self._pool = ThreadPoolExecutor(2)
        self._snapshots: dict[str, str] = {}
        self.store = Store.open(place)
        with self.store.write() as rows:
            rows.put_workspace(WorkspaceRow(_WORKSPACE, os.fsencode(tree), b"", WorkspaceOptions(), 0))

    def record(self, commit: str) -> None:
        book = RecordBook(self.store, _WORKSPACE)
        fd = os.open(self._tree, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = Recorder(self.store, book, fd, Rules((), 1 << 40), self._pool).scan()
        finally:
            os.close(fd)
        self._snapshots[commit] = name = new_id("snap")
        row = SnapshotRow(
            name, _WORKSPACE, found.root, "", "{}", SnapshotState.SEALED, "", (), -1, (), SnapshotStats(), 0,
            SnapshotOrigin.MANUAL,
        )  # fmt: skip
        with self.store.write() as rows:
            book.write(rows)
            rows.put_snapshot(row)

    def read(self, commit: str) -> dict[bytes, bytes]:
        """All files of a snapshot."""
        return {entry.name: b"".join(self.store.read_file(entry.hash)) for entry in self._entries(commit)}

    def _entries(self, commit: str) -> list[TreeEntry]:
        """The files of a snapshot, each with its path for a name."""
        with self.store.read() as reader:
            root = reader.snapshot(self._snapshots[commit]).root
        assert root is not None
        found = []
        waiting = [(b"", root.hash)]
        while waiting:
            where, tree = waiting.pop()
            for entry in self.store.read_tree(tree).entries:
                path = where + entry.name
                if entry.kind is Kind.DIRECTORY:
                    waiting.append((path + b"/", entry.hash))
                elif entry.kind is Kind.FILE:
                    found.append(TreeEntry(path, Kind.FILE, hash=entry.hash))
        return found

    def time_reads(self, commit: str) -> tuple[float, float]:
        """Seconds for all files of a snapshot, and then, by a store that was just opened, for ten of them."""
        self._open_again()
        start = time.perf_counter()
        self.read(commit)
        every = time.perf_counter() - start
        names = [entry.hash for entry in self._entries(commit)]
        self._open_again()
        start = time.perf_counter()
        for name in random.Random(1).sample(names, min(10, len(names))):
            self.store.verify_file(name)
        return every, time.perf_counter() - start

    def _open_again(self) -> None:
        place = self.store.path
        self.store.close()
        self.store = Store.open(place)

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()


class Git:
    """A repository beside the tree, whose objects stay loose until ``pack``."""

    def __init__(self, tree: Path, place: Path) -> None:
        self._environment = {"GIT_DIR": str(place), "GIT_WORK_TREE": str(tree)}
        for who in ("AUTHOR", "COMMITTER"):
            self._environment |= {f"GIT_{who}_NAME": "bench", f"GIT_{who}_EMAIL": "bench@localhost"}
        output("git", "init", "-q", **self._environment)
        output("git", "config", "gc.auto", "0", **self._environment)
        self._parent: tuple[str, ...] = ()

    def record(self, commit: str) -> None:
        output("git", "add", "-A", "-f", **self._environment)
        tree = output("git", "write-tree", **self._environment)
        made = output("git", "commit-tree", "-m", commit, *self._parent, tree, **self._environment)
        self._parent = ("-p", made)

    def pack(self) -> None:
        """All of it into one pack, as small as git makes it."""
        output("git", "update-ref", "refs/heads/all", self._parent[1], **self._environment)
        output("git", "gc", "-q", "--aggressive", "--prune=now", **self._environment)


_PEERS: dict[str, Callable[[Path, Path], Peer]] = {"git": Git, **BACKUPS}


def _sizes(place: Path) -> tuple[int, int]:
    """Bytes of all files below a directory, and bytes that they take on disk."""
    length = taken = 0
    for where, _, names in os.walk(place):
        for name in names:
            status = os.lstat(os.path.join(where, name))
            length += status.st_size
            taken += status.st_blocks * 512
    return length, taken


class History:
    """The commits of a repository, and one directory into which they are checked out."""

    def __init__(self, repository: Path, base: Path, count: int) -> None:
        self.tree = base / "tree"
        self.tree.mkdir()
        clone = base / "clone"
        output("git", "clone", "-q", "--bare", "--shared", str(repository), str(clone))
        self._environment = {"GIT_DIR": str(clone), "GIT_WORK_TREE": str(self.tree)}
        output("git", "config", "core.bare", "false", **self._environment)
        listed = output("git", "rev-list", "--first-parent", "--reverse", "HEAD", **self._environment).split()
        self.commits = listed[-count:]

    def show(self, commit: str) -> None:
        """Make the directory that of a commit."""
        output("git", "checkout", "-q", "-f", "--detach", commit, **self._environment)

    def files(self) -> dict[bytes, bytes]:
        """All regular files of the directory as it is."""
        found = {}
        for where, _, names in os.walk(os.fsencode(self.tree)):
            for name in names:
                path = os.path.join(where, name)
                if not os.path.islink(path):
                    with open(path, "rb") as file:
                        found[os.path.relpath(path, os.fsencode(self.tree))] = file.read()
        return found


def measure(history: History, base: Path, peers: list[str]) -> dict[str, tuple[float, int, int]]:
    """Seconds, bytes, and bytes on disk of each side."""
    places = {name: base / name for name in ("cogfs", *peers)}
    cogfs = Cogfs(history.tree, places["cogfs"])
    sides: dict[str, Peer] = {"cogfs": cogfs, **{name: _PEERS[name](history.tree, places[name]) for name in peers}}
    seconds = dict.fromkeys(sides, 0.0)
    for number, commit in enumerate(history.commits):
        history.show(commit)
        for name, side in sides.items():
            start = time.perf_counter()
            side.record(commit)
            seconds[name] += time.perf_counter() - start
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(history.commits)}", end="", file=sys.stderr, flush=True)
    _compare(cogfs, history)
    found = {name: (seconds[name], *_sizes(places[name])) for name in sides}
    _tell_reads("before", cogfs, history)
    start = time.perf_counter()
    cogfs.store.repack(grace=0)
    found["cogfs, packed"] = (time.perf_counter() - start, *_sizes(places["cogfs"]))
    _compare(cogfs, history)
    _tell_reads("after", cogfs, history)
    cogfs.close()
    git = sides.get("git")
    if isinstance(git, Git):
        start = time.perf_counter()
        git.pack()
        found["git, packed"] = (time.perf_counter() - start, *_sizes(places["git"]))
    return found


def _compare(cogfs: Cogfs, history: History) -> None:
    """AssertionError when cogfs has something else than the commits."""
    for commit in history.commits[:: max(1, len(history.commits) // 20)]:
        history.show(commit)
        if cogfs.read(commit) != history.files():
            raise AssertionError(f"snapshot {commit} is not what was recorded")
    problems = cogfs.store.check(data=True).problems
    if problems:
        raise AssertionError(f"the store is damaged: {problems[0].text}")


def _tell_reads(when: str, cogfs: Cogfs, history: History) -> None:
    """Says how long reading takes, the best of some times."""
    for name, commit in (("newest", history.commits[-1]), ("oldest", history.commits[0])):
        times = [cogfs.time_reads(commit) for _ in range(5)]
        every, ten = (min(one[number] for one in times) * 1e3 for number in (0, 1))
        print(
            f"{when} the repack, {name} snapshot: {every:.1f} ms for all files, {ten:.2f} ms for ten", file=sys.stderr
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, default=_HERE)
    parser.add_argument("--commits", type=int, default=_COMMITS)
    parser.add_argument("--peers", nargs="*", choices=sorted(_PEERS), default=sorted(_PEERS))
    parser.add_argument("--base", type=Path, help="where to work; a directory of its own is made in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not shutil.which("git"):
        print("git is not installed, and the history comes from it: nothing is measured")
        return 0
    for name in [name for name in options.peers if not shutil.which(name)]:
        print(f"{name} is not installed: it is left out")
        options.peers.remove(name)
    with tempfile.TemporaryDirectory(dir=options.base) as made:
        base = Path(made)
        os.environ["BORG_BASE_DIR"] = str(base / "borg-home")
        os.environ["RESTIC_CACHE_DIR"] = str(base / "restic-cache")
        try:
            history = History(options.repository, base, options.commits)
        except subprocess.CalledProcessError as error:
            print(f"{options.repository} is no repository with a history: {error.stderr.decode().strip()}")
            return 0
        found = measure(history, base, options.peers)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{len(history.commits)} commits")
    print(f"{'':14}{'seconds':>10}{'bytes':>14}{'on disk':>14}")
    for name, (seconds, length, taken) in found.items():
        print(f"{name:14}{seconds:10.1f}{length:14,}{taken:14,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
