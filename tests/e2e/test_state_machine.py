"""Random operations, checkpoints and ways back in a real mount, and without one, the same ones in each run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.state_machine import Machine, Session


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


@pytest.mark.parametrize("scanned", [False, True], ids=["mounted", "scanned"])
def test_ways_back_lead_to_what_was_there(session: Session, scanned: bool) -> None:
    class Committed(Machine):
        pass

    Committed.session = session
    Committed.scanned = scanned
    run_state_machine_as_test(
        Committed,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
