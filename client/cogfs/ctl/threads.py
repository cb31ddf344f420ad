"""The commands about conversations, and the way back in one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import DryRun, Force, Json, UsageError, Yes, invocation
from cogfs.ctl.snapshots import agree, refuse_busy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cogfs.v1 import thread_pb2

ThreadId = Annotated[str, typer.Argument(metavar="THREAD", help="The thread's id.")]


def new(
    context: typer.Context,
    thread: Annotated[str, typer.Argument(metavar="ID", help="Its id: 1 to 128 of the characters A-Z a-z 0-9 . _ : -")],
    workspace: Annotated[
        str | None,
        typer.Option("--workspace", metavar="DIR", help="The files that it is about: a directory in a workspace."),
    ] = None,
    json: Json = False,
) -> None:
    """Begin a conversation. Without a workspace its messages take no checkpoints."""
    call = invocation(context)
    with call.client() as cog:
        made = cog.create_thread(thread, workspace=None if workspace is None else cog.workspace(workspace)).message
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write(documents.document(made))
        return
    screen.fields([("thread", made.id), ("workspace", made.workspace_id or "none")])


def threads(context: typer.Context, json: Json = False) -> None:
    """List all conversations, the most recently used first."""
    call = invocation(context)
    with call.client() as cog:
        found = [thread.message for thread in cog.threads()]
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"threads": [documents.document(thread) for thread in found]})
        return
    screen.table(
        ("ID", "ENTRIES", "USED", "WORKSPACE"),
        [(thread.id, str(thread.entry_count), screen.time(thread.updated_at), thread.workspace_id) for thread in found],
    )


def log(
    context: typer.Context,
    thread: ThreadId,
    all_branches: Annotated[bool, typer.Option("--all", help="Every branch, not the active one alone.")] = False,
    json: Json = False,
) -> None:
    """Show a conversation, the oldest entry first; [files] marks those with a checkpoint."""
    call = invocation(context)
    with call.client() as cog:
        entries = list(cog.thread(thread).entries(all_branches=all_branches))
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"entries": [documents.document(entry) for entry in entries]})
        return
    for entry in entries:
        mark = "  [files]" if entry.HasField("file_checkpoint") else ""
        branch = "  (another branch)" if all_branches and not entry.active else ""
        screen.line(f"{entry.id}  {_kind(entry)}  {screen.time(entry.created_at)}{mark}{branch}", "bold")
        for row in entry.content.splitlines():
            screen.line(f"    {row}")


def message(
    context: typer.Context,
    thread: ThreadId,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What it says; without it, standard input is read.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option("--kind", metavar="KIND", help="user, assistant, tool, system, note, session_event or summary."),
    ] = "user",
    entry_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The entry's id; without it the daemon chooses.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Answer when the checkpoint is all in the store.")] = False,
    require_checkpoint: Annotated[
        bool, typer.Option("--require-checkpoint", help="Fail, and save nothing, when the checkpoint fails.")
    ] = False,
    json: Json = False,
) -> None:
    """Add a message to a conversation. A user's message takes a checkpoint of the files first.

    The newline that ends standard input is not part of the text. A checkpoint that fails is a warning.
    """
    call = invocation(context)
    content = _standard_input() if text is None else text
    with call.client() as cog:
        answer = cog.thread(thread).append_entry(
            kind,
            content,
            id=entry_id,
            require_checkpoint=require_checkpoint,
            wait_for="sealed" if wait else None,
        )
    from cogfs.ctl import documents, screen

    if answer.checkpoint_error:
        screen.note(f"the message was saved without a checkpoint: {answer.checkpoint_error}")
    if call.json:
        documents.write({**documents.document(answer.entry), "checkpoint_error": answer.checkpoint_error})
        return
    entry = answer.entry
    screen.fields([("entry", entry.id), ("checkpoint", entry.file_checkpoint.snapshot_id)])


def rewind(
    context: typer.Context,
    thread: ThreadId,
    entry: Annotated[
        str | None, typer.Argument(metavar="ENTRY", help="Where to go back to; without it, the branch is listed.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Take the files back too.")] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Leave the conversation and its memory; with --files.")
    ] = False,
    workspace: Annotated[
        str | None, typer.Option("--workspace", metavar="DIR", help="A workspace other than the thread's.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take a conversation, and with --files the files, back to an entry.

    Without ENTRY: lists the active branch, and marks the entries with checkpoints [files]. Else shows the plan, asks,
    then acts.
    """
    call = invocation(context)
    if entry is None:
        if files or no_memory or workspace is not None or dry_run or yes or force:
            raise UsageError("give the entry to go back to; `rewind THREAD` alone lists them")
        _list_branch(context, thread)
        return
    if no_memory and not files:
        raise UsageError("--no-memory without --files changes nothing: give --files")
    if workspace is not None and not files:
        raise UsageError("--workspace names where files are taken back: give --files")
    call.check_consent(dry_run, yes)
    from cogfs.ctl import documents

    with call.client() as cog:
        found = cog.thread(thread)
        where = None if workspace is None else cog.workspace(workspace)

        def go(dry: bool) -> thread_pb2.RewindReport:
            return found.rewind(entry, files=files, memory=not no_memory, workspace=where, dry_run=dry, force=force)

        if not yes:
            plan = go(True)
            if call.json:
                documents.write(documents.document(plan))
                return
            _show_rewind(plan)
            if dry_run:
                return
            refuse_busy(plan.files.restore, force)
            agree("Go back?")
        report = go(False)
    if call.json:
        documents.write(documents.document(report))
    else:
        _show_rewind(report)


def _standard_input() -> str:
    from cogfs.client import ValidationError

    try:
        content = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ValidationError("the text is not valid UTF-8") from None
    return content.removesuffix("\n")


def _kind(entry: thread_pb2.Entry) -> str:
    from cogfs.ctl import screen

    return screen.name(entry, "kind")


def _list_branch(context: typer.Context, thread: str) -> None:
    call = invocation(context)
    with call.client() as cog:
        entries = list(cog.thread(thread).entries())
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"entries": [documents.document(entry) for entry in entries]})
        return
    screen.table(("ENTRY", "KIND", "TIME", "", "TEXT"), _branch_rows(entries))


def _branch_rows(entries: Iterable[thread_pb2.Entry]) -> list[tuple[str, ...]]:
    from cogfs.ctl import screen

    return [
        (
            entry.id,
            _kind(entry),
            screen.time(entry.created_at),
            "[files]" if entry.HasField("file_checkpoint") else "",
            entry.content.split("\n", 1)[0],
        )
        for entry in entries
    ]


def _show_rewind(report: thread_pb2.RewindReport) -> None:
    from cogfs.ctl import screen

    screen.conversation(report.conversation, report.dry_run)
    if report.HasField("files"):
        files = report.files
        how = "exactly as they were there" if files.exact else "the nearest checkpoint at or before it"
        screen.line(f"files: those of entry {files.entry_id}, {how}", "bold")
        screen.restore(files.restore)
    would = "would go" if report.dry_run else "went"
    screen.line(f"thread {report.thread_id} {would} back to entry {report.to_entry_id}")
