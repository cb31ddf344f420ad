"""A few runs of ``kill -9`` in the middle of rewinds, restores, undos and forks: all of it or nothing of it."""

from __future__ import annotations

from tests.e2e.support.site import Site
from tests.support.joint import Counts, rounds

_RUNS = 3


def test_a_few_kills(here: Site) -> None:
    """``python -m tests.soak.joint`` does the same for as long as one likes."""
    counts = Counts()
    for _ in rounds(here, 2, counts, _RUNS):
        pass
    assert counts.outcomes.total() == _RUNS, counts
