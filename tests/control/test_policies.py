"""What the levels of policy come to."""

from __future__ import annotations

import pytest

from cogfs.fsd.control.policies import Effective, combine, effective
from cogfs.store.schema import PolicyRow
from tests.control.files import Directory

ON, OFF = PolicyRow(), PolicyRow(enabled=False)
GLOBS = PolicyRow(exclude=("dist/**",))


@pytest.mark.parametrize(
    ("runtime", "agent", "run", "on"),
    [
        (None, None, None, True),
        (OFF, None, None, False),
        (ON, OFF, None, False),
        (OFF, ON, None, True),
        (ON, OFF, ON, True),
        (OFF, ON, OFF, False),
        # A policy that says anything else says that they are on.
        (OFF, GLOBS, None, True),
        (GLOBS, OFF, None, False),
        (None, OFF, GLOBS, True),
    ],
)
def test_the_most_specific_that_says_anything_wins(
    runtime: PolicyRow | None, agent: PolicyRow | None, run: PolicyRow | None, on: bool
) -> None:
    assert combine((runtime, agent, run)).enabled is on


def test_excludes_add_up_whoever_wins() -> None:
    levels = (
        PolicyRow(exclude=("a", "b"), max_file_bytes=5, rewind_files=True),
        PolicyRow(enabled=False, exclude=("c", "a"), max_file_bytes=-1),
        PolicyRow(exclude=("d",)),
    )
    assert combine(levels) == Effective(True, ("a", "b", "c", "d"), -1, True)
    assert combine(levels[:2]) == Effective(False, ("a", "b", "c"), -1, True)


def test_levels_are_found_by_name(place: Directory) -> None:
    with place.store.write() as writer:
        writer.put_policy(PolicyRow(exclude=("runtime",)))
        writer.put_policy(PolicyRow(exclude=("coder",)), "coder")
        writer.put_policy(PolicyRow(enabled=False), "writer")
    with place.store.read() as reader:
        assert effective(reader).exclude == ("runtime",)
        assert effective(reader, "nobody") == effective(reader)
        assert effective(reader, "coder").exclude == ("runtime", "coder")
        assert not effective(reader, "writer").enabled
        whole = effective(reader, "writer", PolicyRow(exclude=("thread",)), PolicyRow(exclude=("run",)))
        assert whole == Effective(True, ("runtime", "thread", "run"))
