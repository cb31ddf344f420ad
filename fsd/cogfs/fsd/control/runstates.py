"""The states of runs: what they allow, and how a run is over. Functions of rows alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.store.errors import NotFound
from cogfs.store.rows import Writer
from cogfs.store.schema import RunRow, RunState
from cogfs.v1.reasons import Reason

OVER = frozenset({RunState.ENDED, RunState.INTERRUPTED})
#: Runs that are over and still known.
_REMEMBERED = 200

#: Why a rewind drops a run.
REWOUND = "the conversation was rewound"
#: Why the end of its thread does.
DELETED = "its conversation was deleted"


def refuse_over(row: RunRow) -> None:
    """RUN_INTERRUPTED or VALIDATION_ERROR for a run that cannot go on."""
    if row.state is RunState.ENDED:
        raise invalid(f"the run {row.id} has ended")
    if row.state is RunState.INTERRUPTED or row.stopping:
        raise CogfsError(Reason.RUN_INTERRUPTED, f"the run {row.id} was stopped: {row.why}", why=row.why)
    if row.state is RunState.LAPSED:
        why = "its lease ran out"
        raise CogfsError(Reason.RUN_INTERRUPTED, f"the run {row.id} was stopped: {why}; renew it to go on", why=why)


def drop(writer: Writer, run_ids: Iterable[str], why: str) -> None:
    """Make runs INTERRUPTED, in a transaction with what that is for. Those that are over or unknown are left."""
    for run_id in run_ids:
        with suppress(NotFound):
            row = writer.run(run_id)
            if row.state not in OVER:
                writer.put_run(over(row, RunState.INTERRUPTED, why))


def over(row: RunRow, state: RunState, why: str) -> RunRow:
    """The row of a run that is over from now on."""
    return msgspec.structs.replace(row, state=state, why=why, stopping=False, ended_ns=time.time_ns())


def forget_oldest(writer: Writer) -> None:
    """Of the runs that are over only the last ones stay."""
    over = [row for row in writer.runs() if row.state in OVER]
    busy = {call.run_id for call in writer.tool_calls()}
    over.sort(key=lambda row: row.ended_ns)
    for row in over[: max(0, len(over) - _REMEMBERED)]:
        if row.id not in busy:
            writer.delete_run(row.id)
