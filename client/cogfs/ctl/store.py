"""The commands about the store as a whole."""

from __future__ import annotations

from collections.abc import Iterable
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
        typer.Option(
            "--thorough",
            help="Rewrite every file of the store of which anything goes, and pack what is like each other.",
        ),
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


def check(
    context: typer.Context,
    data: Annotated[bool, typer.Option("--data", help="Read and hash every object, too.")] = False,
    json: Json = False,
) -> None:
    """Look whether the store is whole, and change nothing.

    Everything that rows name is looked for, and directories are read. With --data all contents are read, too, which
    takes as long as reading the store. The exit code is that of CORRUPT when something is wrong; then see repair.
    """
    from cogfs.ctl import documents, screen
    from cogfs.v1.reasons import Reason

    call = invocation(context)
    with call.client() as cog:
        found = cog.check(data=data)
    if call.json:
        documents.write(documents.document(found))
    else:
        read = f", {screen.size(found.bytes_read)} read" if data else ""
        screen.line(f"{found.objects} objects, {found.snapshots} snapshots{read}")
        for problem in found.problems:
            screen.line(f"  {problem.check:14} {problem.text}")
        if found.problems_untold:
            screen.line(f"  and {found.problems_untold} more")
        _affected(found.affected, "cannot be read:")
        screen.note("all is well" if found.ok else "run cogfsctl repair")
    if not found.ok:
        raise typer.Exit(Reason.CORRUPT.exit_code)


def repair(context: typer.Context, json: Json = False) -> None:
    """Bring back all of the store that is intact, and drop what is damaged.

    What the index says wrong is made right from the files of the store. Contents that are lost are taken again from the
    workspace where a file still has them. What is lost for good is named by snapshot and path, and can be deleted with
    the snapshots; the rest of these stays.
    """
    from cogfs.ctl import documents, screen

    call = invocation(context)
    with call.client() as cog:
        done = cog.repair()
    if call.json:
        documents.write(documents.document(done))
        return
    screen.fields(
        [
            ("intact", f"{done.objects_intact} objects"),
            ("found", f"{done.objects_found} objects elsewhere in the store"),
            ("remade", f"{done.objects_remade} objects, from what is recorded or from files"),
            ("lost", f"{done.objects_lost} objects"),
        ]
    )
    for row in done.rows_dropped:
        screen.line(f"  dropped from the index: {row}")
    _affected(done.affected, "lost:")


def stats(
    context: typer.Context,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Show each snapshot, too.")] = False,
    json: Json = False,
) -> None:
    """Show what takes the store's space.

    "Alone" is what nothing else needs, and what is given back, by and by, when it is deleted.
    """
    from cogfs.ctl import documents, screen

    call = invocation(context)
    with call.client() as cog:
        found = cog.stats()
    if call.json:
        documents.write(documents.document(found))
        return
    screen.fields(
        [
            ("holds", f"{found.objects} objects, {screen.size(found.raw_bytes)}"),
            (
                "takes",
                f"{screen.size(found.pack_bytes)} in {found.packs} files, {screen.size(found.index_bytes)} index",
            ),
            ("ratio", f"{found.ratio:.2f}"),
            ("of no use", screen.size(found.unneeded_bytes)),
            ("budget", screen.size(found.max_bytes) if found.max_bytes else ""),
        ]
    )
    if found.full:
        screen.note(f"no checkpoints are taken: {found.full}")
    rows = []
    for one in found.workspaces:
        name = screen.path(one.root) or one.workspace_id
        rows.append((name, str(one.snapshot_count), screen.size(one.unique_bytes), screen.size(one.shared_bytes)))
        if snapshots:
            rows += [
                (f"  {mine.snapshot_id}", "", screen.size(mine.unique_bytes), screen.size(mine.shared_bytes))
                for mine in one.snapshots
            ]
    screen.table(("workspace", "snapshots", "alone", "shared"), rows)


def _affected(paths: Iterable[admin_pb2.AffectedPath], heading: str) -> None:
    from cogfs.ctl import screen

    named = list(paths)
    if named:
        screen.line(heading, "bold")
    for one in named:
        if one.snapshot_id:
            screen.line(f"  {one.snapshot_id}  {screen.path(one.path) or 'all of it'}")
        else:
            screen.line(f"  what is recorded of {one.workspace_id}, which the next checkpoint makes anew")


def _unreadable(done: admin_pb2.CollectResponse) -> None:
    from cogfs.ctl import screen

    if done.unreadable:
        screen.line("cannot be read:", "bold")
    for one in done.unreadable:
        what = one.snapshot_id or (f"what is recorded of {one.workspace_id}" if one.workspace_id else "an object")
        screen.line(f"  {what}: {one.reason}")
