from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.store.store import Store
from tests.control import harness
from tests.control.files import Directory
from tests.control.harness import Daemon


@pytest.fixture
def base() -> Iterator[Path]:
    with harness.place() as directory:
        yield directory


@pytest.fixture
def project(base: Path) -> Path:
    root = base / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.txt").write_text("one\n")
    return root


@pytest.fixture
def idle(base: Path) -> Iterator[Daemon]:
    """A daemon that has not been started."""
    daemon = Daemon(base)
    try:
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def plain(base: Path) -> Iterator[Daemon]:
    """A running daemon of the plain engine, with a service that fails as told."""
    daemon = Daemon(base, "tests.control.plain")
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def daemon(idle: Daemon) -> Daemon:
    idle.start()
    return idle


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Directory]:
    """A directory and a store of its own, without a daemon."""
    root = tmp_path / "root"
    root.mkdir()
    with Store.open(tmp_path / "store") as store:
        directory = Directory(store, root)
        yield directory
        directory.close()
