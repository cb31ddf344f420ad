"""Random conversations, memories, runs, rewinds, restores, forks, undos and prunes, the same ones in each run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.state_machine import Session
from tests.support.talk_machine import TalkMachine


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_threads_are_what_the_model_says(session: Session) -> None:
    class Committed(TalkMachine):
        pass

    Committed.session = session
    run_state_machine_as_test(
        Committed,
        settings=settings(
            max_examples=8,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
