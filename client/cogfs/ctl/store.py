"""The commands about the store as a whole."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import Json, age, invocation

if TYPE_CHECKING:
    from cogfs.v1 import admin_pb2


def gc(
    context: typer.Context,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="AGE", help="Keep what came in no longer ago, needed or not: 0s, 30m, 1h (1h)."
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Rewrite every file of the store of which anything goes, not a quarter."),
    ] = False,
    json: Json = False,
) -> None:
    """Drop what no snapshot needs any more, and give back its space.

    The daemon does this by itself some minutes after snapshots were deleted. Files are rewritten one at a time, so it
    takes no more room than one of them (64 MiB). Whoever works in the meantime may go on.
    """
    from cogfs.ctl import documents, screen

    call = invocation(context)
    seconds = age(grace)
    with call.client() as cog:
        done = cog.collect(grace=None if seconds is None else timedelta(seconds=seconds), thorough=thorough)
    if call.json:
        documents.write(documents.document(done))
        return
    screen.fields(
        [
            ("dropped", f"{done.objects_dropped} objects, {done.packs_removed} files of the store"),
            ("freed", screen.size(done.bytes_freed)),
            ("kept", f"{done.objects_kept} objects"),
            (
                "of no use",
                f"{screen.size(done.bytes_wasted)}, in files of which most is needed" if done.bytes_wasted else "",
            ),
            ("left", done.deferred),
        ]
    )
    _unreadable(done)


def _unreadable(done: admin_pb2.CollectResponse) -> None:
    from cogfs.ctl import screen

    if done.unreadable:
        screen.line("cannot be read:", "bold")
    for one in done.unreadable:
        what = one.snapshot_id or (f"what is recorded of {one.workspace_id}" if one.workspace_id else "an object")
        screen.line(f"  {what}: {one.reason}")
