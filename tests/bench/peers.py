"""Others that record a directory, each into a place of its own, and where a benchmark runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Peer(Protocol):
    """One that records the directory again and again."""

    def record(self, name: str) -> None:
        """``name`` is one that was not given before."""
        ...


def output(*command: str, **environment: str) -> str:
    """What a command, which has to succeed, prints."""
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
    return done.stdout.decode().strip()


class Shadow:
    """A git repository beside the tree, as agents keep one."""

    def __init__(self, tree: Path, place: Path) -> None:
        self._environment = {"GIT_DIR": str(place), "GIT_WORK_TREE": str(tree)}
        output("git", "init", "-q", **self._environment)
        output("git", "config", "gc.auto", "0", **self._environment)

    def record(self, _name: str) -> None:
        output("git", "add", "-A", **self._environment)
        output("git", "write-tree", **self._environment)


class Restic:
    def __init__(self, tree: Path, place: Path) -> None:
        self._tree = str(tree)
        self._environment = {"RESTIC_REPOSITORY": str(place), "RESTIC_PASSWORD": "bench"}
        output("restic", "init", "-q", **self._environment)

    def record(self, name: str) -> None:
        output("restic", "backup", "-q", "--tag", name, self._tree, **self._environment)


class Borg:
    def __init__(self, tree: Path, place: Path) -> None:
        self._tree, self._place = str(tree), str(place)
        output("borg", "init", "-e", "none", self._place)

    def record(self, name: str) -> None:
        output("borg", "create", f"{self._place}::{name}", self._tree)


def installed() -> list[str]:
    """Those of the backup programs that can be run here."""
    return [name for name in ("restic", "borg") if shutil.which(name)]


BACKUPS: dict[str, Callable[[Path, Path], Peer]] = {"restic": Restic, "borg": Borg}


@contextmanager
def site(parent: Path | None) -> Iterator[Path]:
    """A directory below ``parent`` in which the daemon of this process has its places; it is stopped at the end, and
    the directory removed."""
    base = Path(tempfile.mkdtemp(prefix="cogfs-bench-", dir=parent))
    os.environ["COGFS_STATE_DIR"] = str(base / "state")
    os.environ["COGFS_RUNTIME_DIR"] = str(base / "run")
    os.environ.pop("COGFS_ENDPOINT", None)
    try:
        yield base
    finally:
        subprocess.run(
            [sys.executable, "-m", "cogfs.ctl.main", "daemon", "stop"], check=False, stdout=subprocess.DEVNULL
        )
        shutil.rmtree(base, ignore_errors=True)
