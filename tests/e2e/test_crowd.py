"""Sixteen clients for some seconds; ``tests.soak.crowd`` is the same for as long as one likes."""

from __future__ import annotations

from tests.e2e.support.site import Site
from tests.support.crowd import Crowd


def test_a_crowd_leaves_what_its_answers_say(here: Site) -> None:
    crowd = Crowd(here, 1)
    crowd.begin()
    crowd.work(4.0, 0)
    crowd.check()
    assert crowd.outcomes["rewind"] and crowd.outcomes["restore"] and crowd.outcomes["message"], crowd.outcomes
