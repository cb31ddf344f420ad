"""Fixtures that mount for real."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.worker_client import MountedWorker, WorkerClient

Start = Callable[..., MountedWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers, which end with the test. A worker that logged an error fails it, unless ``faulty``."""
    started: list[tuple[MountedWorker, bool]] = []

    def start(
        *arguments: str,
        in_place: bool = False,
        faulty: bool = False,
        python: str = "",
        user: int | None = None,
        undo_log: bool = False,
    ) -> MountedWorker:
        worker = MountedWorker(*arguments, in_place=in_place, python=python, user=user, undo_log=undo_log)
        started.append((worker, faulty))
        return worker

    problems: list[str] = []
    try:
        yield start
    finally:
        for worker, faulty in started:
            if not faulty:
                problems += worker.errors()
            worker.stop()
    assert problems == []


@pytest.fixture
def worker(start: Start) -> MountedWorker:
    """One worker."""
    return start()


@pytest.fixture
def client(worker: MountedWorker) -> Iterator[WorkerClient]:
    """A client of ``worker``."""
    with worker.connect() as client:
        yield client


class Places(NamedTuple):
    """A mounted directory, and a plain one to compare with."""

    mounted: Path
    plain: Path


@pytest.fixture
def places(worker: MountedWorker) -> Places:
    """The same calls are made in both."""
    plain = worker.directory / "plain"
    plain.mkdir()
    return Places(worker.mountpoint, plain)
