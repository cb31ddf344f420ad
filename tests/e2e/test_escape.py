"""Restores that somebody races to lead them out of their root; ``tests.soak.escape`` is the same for long."""

from __future__ import annotations

import os

import pytest

from tests.e2e.support.site import Site
from tests.support.escape import Escape


@pytest.mark.skipif(os.geteuid() != 0, reason="the canaries are looked at without leaving a trace, and mounts are made")
@pytest.mark.parametrize("scanned", [False, True], ids=["mounted", "scanned"])
def test_nothing_outside_is_touched(here: Site, scanned: bool) -> None:
    escape = Escape(here, scanned=scanned)
    try:
        escape.begin()
        for tries in escape.rounds(7, 150):
            assert tries == escape.tries
        assert escape.tries >= 150 and escape.tricks.total(), (escape.outcomes, escape.tricks)
    finally:
        escape.clear()
