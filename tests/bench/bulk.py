"""What large amounts cost: a first import, the way back of a whole tree, and an append to a large file.

``python -m tests.bench.bulk [--small N…] [--gib N] [--rounds N] [--peers NAME…] [--base DIR] [--json]``.

1. A first import: of ``--small`` files of some 600 bytes, and of ``--gib`` GiB in files of 256 MiB of which one half
   cannot be compressed. In turn: a workspace without a mount, and one with, from the request to the seal, with the most
   memory that the daemon had, of which what it maps of its index is the kernel's to take back; ``git add -A`` and
   ``git write-tree`` into a new repository; and the other peers.
2. A tree of the first of ``--small`` files comes back into its emptied directory: a restore without a mount, and one
   with, and a fork into a new directory, beside ``cp -a`` of the tree; as times of that, alternating.
3. A KiB is appended to a file of one GiB: what the store grows by, and what the daemon reads.

Medians of the rounds.
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

from cogfs.client import Client, connect
from tests.bench.checkpoint import make
from tests.bench.peers import BACKUPS, Shadow, installed, output, site

_MIB = 1 << 20
_LARGE = 256 * _MIB
_PIECE = 1 << 20


def _fill(path: Path, size: int, *, random: bool) -> None:
    """A file that cannot be compressed, or lines of text that are all different."""
    with path.open("wb") as file:
        for number in range(size // _PIECE):
            if random:
                file.write(os.urandom(_PIECE))
            else:
                lines = b"".join(b"%d: the quick brown fox jumps %d\n" % (line, number) for line in range(30_000))
                file.write(lines[:_PIECE].ljust(_PIECE, b"."))


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _status(pid: int, name: str) -> float:
    """MiB of one of the figures that the kernel has of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def _new_daemon(cog: Client) -> int:
    """A daemon that has not worked yet; its process."""
    output(sys.executable, "-m", "cogfs.ctl.main", "daemon", "stop")
    output(sys.executable, "-m", "cogfs.ctl.main", "daemon", "start")
    return cog.daemon().pid


def _import(cog: Client, tree: Path, scan: bool) -> tuple[float, float]:
    """Seconds and MiB of the first snapshot of a tree, by a daemon with an empty store for it."""
    pid = _new_daemon(cog)
    workspace = cog.mount(tree, scan=scan, max_file_bytes=-1)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    seconds = _seconds(lambda: workspace.checkpoint(wait_for="sealed"))
    memory = _status(pid, "VmHWM") - _status(pid, "RssFile") - _status(pid, "RssShmem")
    workspace.unmount()
    workspace.delete()
    # The next one is to find none of its content.
    output(sys.executable, "-m", "cogfs.ctl.main", "gc", "--grace", "0s")
    return seconds, memory


def imports(cog: Client, base: Path, title: str, tree: Path, rounds: int, peers: list[str]) -> dict[str, list[float]]:
    """Seconds, and MiB of memory, of each side."""
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for name, scan in (("cogfs, not mounted", True), ("cogfs, mounted", False)):
            found.setdefault(name, []).append(_import(cog, tree, scan))
        for name in ["git", *peers]:
            place = base / f"{name}-{turn}"
            peer = Shadow(tree, place) if name == "git" else BACKUPS[name](tree, place)
            found.setdefault(name, []).append((_seconds(lambda peer=peer: peer.record("first")), 0.0))  # type: ignore[misc]
            shutil.rmtree(place)
    return {
        f"{title}: {name}": [statistics.median(one) for one in zip(*figures, strict=True)]
        for name, figures in found.items()
    }


def restores(cog: Client, base: Path, count: int, rounds: int) -> dict[str, float]:
    """Times of ``cp -a``, of each way back."""
    model = base / "model"
    model.mkdir()
    make(model, count)
    places = {"not mounted": base / "scanned", "mounted": base / "mounted"}
    workspaces, snapshots = {}, {}
    for name, place in places.items():
        output("cp", "-a", str(model), str(place))
        workspaces[name] = cog.mount(place, scan=name == "not mounted")
        snapshots[name] = workspaces[name].checkpoint(wait_for="sealed").id
    thread = cog.create_thread("bulk", workspace=workspaces["mounted"])
    entry = thread.user_message("all of it", wait_for="sealed").id
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        copied = _seconds(lambda turn=turn: output("cp", "-a", str(model), str(base / f"copy-{turn}")))  # type: ignore[misc]
        for name, place in places.items():
            for path in place.iterdir():
                shutil.rmtree(path)
            workspace = workspaces[name]
            taken = _seconds(lambda name=name, workspace=workspace: workspace.restore(snapshots[name], force=True))  # type: ignore[misc]
            ratios.setdefault(f"restore, {name}", []).append(taken / copied)
        made = base / f"fork-{turn}"
        taken = _seconds(lambda made=made: thread.fork(entry, files=True, into=made))  # type: ignore[misc]
        ratios.setdefault("fork into a new directory", []).append(taken / copied)
        cog.workspace(made).unmount()
        shutil.rmtree(base / f"copy-{turn}")
        shutil.rmtree(made)
    for workspace in workspaces.values():
        workspace.unmount()
    return {name: statistics.median(figures) for name, figures in ratios.items()}


def append(cog: Client, base: Path) -> dict[str, float]:
    """MiB that a KiB more in a file of one GiB comes to."""
    root = base / "appended"
    root.mkdir()
    _fill(root / "large", 1 << 30, random=True)
    workspace = cog.mount(root, max_file_bytes=-1)
    workspace.checkpoint(wait_for="sealed")
    pid = cog.daemon().pid
    packs = Path(os.environ["COGFS_STATE_DIR"]) / "store" / "packs"
    before, read = _size(packs), _read(pid)
    with (root / "large").open("ab") as file:
        file.write(os.urandom(1024))
    seconds = _seconds(lambda: workspace.checkpoint(wait_for="sealed"))
    found = {"stored, MiB": (_size(packs) - before) / _MIB, "read, MiB": (_read(pid) - read) / _MIB, "seconds": seconds}
    workspace.unmount()
    shutil.rmtree(root)
    return found


def _size(place: Path) -> int:
    return sum(path.stat().st_size for path in place.iterdir())


def _read(pid: int) -> int:
    """Bytes that a process has read so far, from memory or a disk."""
    (line,) = (line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--gib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=list(BACKUPS), default=installed())
    parser.add_argument("--base", type=Path, help="directory for the trees and the store; better on a quiet disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, object] = {}

    def tell(title: str, rows: dict[str, list[float]] | dict[str, float], unit: str) -> None:
        figures[title] = rows
        if options.json:
            return
        print(f"\n{title} ({unit})")
        for name, row in rows.items():
            columns = row if isinstance(row, list) else [row]
            print(f"  {name:<44}" + "".join(f"{figure:>12,.2f}" for figure in columns), flush=True)

    with site(options.base) as base, connect(start=True) as cog:
        for count in options.small:
            tree = base / "small"
            tree.mkdir()
            make(tree, count)
            rows = imports(cog, base, f"{count:,} files", tree, options.rounds, options.peers)
            tell(f"import of {count:,} small files", rows, "seconds, MiB of the daemon")
            shutil.rmtree(tree)
        if options.gib:
            tree = base / "large"
            tree.mkdir()
            for number in range(options.gib * 4):
                _fill(tree / str(number), _LARGE, random=number % 2 == 0)
            rows = imports(cog, base, f"{options.gib} GiB", tree, max(1, options.rounds // 2), options.peers)
            tell(f"import of {options.gib} GiB", rows, "seconds, MiB of the daemon")
            shutil.rmtree(tree)
        if options.small:
            tell("the way back of a whole tree", restores(cog, base, options.small[0], options.rounds), "times cp -a")
        tell("a KiB is appended to a GiB", append(cog, base), "")
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
