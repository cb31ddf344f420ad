"""What the tests of the store share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
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


def _descriptors() -> Counter[str]:
    """What the descriptors of this process are of, as far as a store may have opened them: others have some, too."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        # Gone meanwhile, or of a file deeper than a path may be long.
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    # Those of gRPC, which come and go by themselves, are of no file.
    return Counter({target: count for target, count in found.items() if target.startswith("/")})


@pytest.fixture(autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    before = _descriptors()
    yield
    # A store fixture of this test is closed by now, or was made before this one and still has its files.
    leaked = _descriptors() - before
    assert not leaked, f"descriptors were leaked: {leaked}"
