"""Every benchmark, one after another: ``python -m tests.bench``."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("bulk", "burst_loop", "checkpoint", "history", "rewind", "workload")


def main() -> int:
    """Each in a process of its own; the number of those that failed."""
    failed = 0
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
