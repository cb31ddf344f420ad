"""What the burst loop saves: three small operations on two real mounts, with it and with pyfuse3's own loop.

``python tests/bench/burst_loop.py [--rounds N] [--operations N] [--base DIR] [--json]``. Both mounts have the same
handlers and are measured in turn; a figure is the median of its rounds, in microseconds for one operation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.worker_client import MountedWorker

Operation = Callable[[Path, str, int], None]


def negative_lookup(directory: Path, prefix: str, count: int) -> None:
    """Names that are not there and were not asked for before, so that no cache answers."""
    for number in range(count):
        if os.path.lexists(f"{directory}/{prefix}{number}"):
            raise AssertionError("the name should not be there")


def create_write_close(directory: Path, prefix: str, count: int) -> None:
    """New files of 100 bytes."""
    data = b"x" * 100
    for number in range(count):
        fd = os.open(f"{directory}/{prefix}{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, data)
        os.close(fd)


def open_read_close(directory: Path, prefix: str, count: int) -> None:
    """One small file, again and again."""
    path = f"{directory}/read"
    for _ in range(count):
        fd = os.open(path, os.O_RDONLY)
        if len(os.read(fd, 4096)) != 4:
            raise AssertionError("the file should have four bytes")
        os.close(fd)


OPERATIONS: dict[str, Operation] = {
    "negative lookup": negative_lookup,
    "create + write + close": create_write_close,
    "open + read + close": open_read_close,
}


def measure(rounds: int, count: int, base: Path | None) -> dict[str, tuple[float, float]]:
    """Microseconds of each operation as (burst loop, stock loop)."""
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in OPERATIONS}
    workers: list[MountedWorker] = []
    try:
        workers.append(MountedWorker(base=base))
        workers.append(MountedWorker("--stock-loop", base=base))
        for worker in workers:
            (worker.mountpoint / "read").write_bytes(b"read")
        for turn in range(rounds + 1):
            for name, operation in OPERATIONS.items():
                for worker, figure in zip(workers, figures[name], strict=True):
                    directory = worker.mountpoint / f"{turn}-{name}"
                    directory.mkdir()
                    start = time.perf_counter_ns()
                    operation(worker.mountpoint if operation is open_read_close else directory, f"{turn}-", count)
                    elapsed = time.perf_counter_ns() - start
                    if turn:  # the first one warms up
                        figure.append(elapsed / count / 1000)
    finally:
        for worker in workers:
            worker.stop()
    return {name: (statistics.median(burst), statistics.median(stock)) for name, (burst, stock) in figures.items()}


def _default_base() -> Path | None:
    """Memory where there is some: a disk that others use would be measured too."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--operations", type=int, default=400, help="operations in a round")
    parser.add_argument("--base", type=Path, default=_default_base(), help="directory for both; better one in memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1 or options.operations < 1:
        parser.error("rounds and operations must be positive")
    figures = measure(options.rounds, options.operations, options.base)
    if options.json:
        document = {
            name: {"burst_us": round(burst, 2), "stock_us": round(stock, 2), "ratio": round(burst / stock, 3)}
            for name, (burst, stock) in figures.items()
        }
        print(json.dumps(document))
        return 0
    print(f"{'operation':<24}{'burst µs':>10}{'stock µs':>10}{'ratio':>8}")
    for name, (burst, stock) in figures.items():
        print(f"{name:<24}{burst:>10.1f}{stock:>10.1f}{burst / stock:>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
