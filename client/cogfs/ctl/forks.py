"""The command that forks a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import DryRun, Force, Json, UsageError, Yes, invocation
from cogfs.ctl.snapshots import agree, refuse_busy
from cogfs.ctl.threads import ThreadId

if TYPE_CHECKING:
    from cogfs.v1 import thread_pb2


def fork(
    context: typer.Context,
    thread: ThreadId,
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="The last entry of the fork, on any branch.")],
    new: Annotated[
        str | None,
        typer.Option("--thread", metavar="ID", help="The new thread's id; without it the daemon chooses."),
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Bring files to what they were there, too.")] = False,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="Where the files go: a workspace, or a directory that does not exist or is empty and becomes one.",
        ),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            "--agent",
            metavar="NAME",
            help="Of several workspaces in which it ran, that of this agent. Can be given again.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Begin a conversation with all that another one holds up to an entry, and what it remembers by that.

    With --files, the files of a workspace are brought to what they were there, and the new conversation is about
    them: those of --into, without it those of the workspace in which they were. Then the plan is shown first, and you
    are asked; a fork without files changes nothing that there is.
    """
    call = invocation(context)
    if into is not None and not files:
        raise UsageError("--into names where the files go: give --files")
    if agent and not files:
        raise UsageError("--agent names whose files are meant: give --files")
    if force and not files:
        raise UsageError("--force is about files: give --files")
    if files:
        call.check_consent(dry_run, yes)
    elif dry_run and yes:
        raise UsageError("give --dry-run or --yes, not both")
    from cogfs.client import Fork
    from cogfs.ctl import documents

    with call.client() as cog:
        source = cog.thread(thread)

        def go(dry: bool) -> thread_pb2.ForkThreadReport:
            found = source.fork(entry, id=new, files=files, into=into, agents=agent or (), dry_run=dry, force=force)
            return found.report if isinstance(found, Fork) else found

        if dry_run or (files and not yes):
            plan = go(True)
            if call.json:
                documents.write(documents.document(plan))
                return
            _show(plan)
            if dry_run:
                return
            refuse_busy(plan.files.restore, force)
            agree("Fork?")
        report = go(False)
    if call.json:
        documents.write(documents.document(report))
    else:
        _show(report)


def _show(report: thread_pb2.ForkThreadReport) -> None:
    from cogfs.ctl import screen

    would = "would be " if report.dry_run else ""
    if report.HasField("files"):
        files = report.files
        how = "exactly as they were there" if files.exact else "the nearest checkpoint at or before it"
        screen.line(f"files: those of entry {files.entry_id}, {how}", "bold")
        screen.restore(files.restore)
    if report.workspace_made:
        screen.line(f"workspace {would}made: {screen.path(report.workspace_made)}")
    counts = [
        f"{report.entries_copied} entries",
        f"{report.memories_copied} memories" if report.memories_copied else "",
        f"{report.snapshots_copied} snapshots" if report.snapshots_copied else "",
    ]
    named = report.thread.id or "of an id that the daemon chooses"
    screen.line(f"thread {named}: {', '.join(count for count in counts if count)} {would}copied", "bold")
