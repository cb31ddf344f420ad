"""What the tests of the store share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.store.store import Store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "state" / "store"


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    with Store.open(place) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    # A store fixture of this test is closed by now, or was made before this one and still has its files.
    after = len(os.listdir("/proc/self/fd"))
    assert after <= before, f"{after - before} descriptors were leaked"
