"""When a message takes a checkpoint, and of what: what the levels of policy come to together.

The levels are runtime, agent, thread and run, from the least specific. What a run says comes with its messages. Knows
rows, and no workspace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cogfs.store.rows import Reader
from cogfs.store.schema import PolicyRow


@dataclass(frozen=True, slots=True)
class Effective:
    """What all levels come to."""

    enabled: bool = True
    #: On top of the workspace's own.
    exclude: tuple[str, ...] = ()
    #: -1: no limit; None: the workspace's.
    max_file_bytes: int | None = None
    rewind_files: bool = False


def combine(levels: Iterable[PolicyRow | None]) -> Effective:
    """What ``levels``, from the least specific on, come to; None says nothing."""
    enabled = True
    exclude: dict[str, None] = {}
    max_file_bytes: int | None = None
    rewind_files = False
    for level in levels:
        if level is None:
            continue
        enabled = level.enabled
        # Also those of a level that is overruled: what somebody wants left out never gets in by another's word.
        exclude.update(dict.fromkeys(level.exclude))
        if level.max_file_bytes is not None:
            max_file_bytes = level.max_file_bytes
        if level.rewind_files is not None:
            rewind_files = level.rewind_files
    return Effective(enabled, tuple(exclude), max_file_bytes, rewind_files)


def effective(
    reader: Reader, agent: str = "", thread: PolicyRow | None = None, run: PolicyRow | None = None
) -> Effective:
    """What holds for an agent, with a thread and a run of it where they say something."""
    return combine((reader.policy(), reader.policy(agent) if agent else None, thread, run))
