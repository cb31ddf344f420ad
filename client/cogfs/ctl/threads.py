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
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="NAME", help="The agent whose policy of checkpoints holds in it.")
    ] = None,
    json: Json = False,
) -> None:
    """Begin a conversation. Without a workspace its messages take no checkpoints."""
    call = invocation(context)
    with call.client() as cog:
        made = cog.create_thread(
            thread, workspace=None if workspace is None else cog.workspace(workspace), agent=agent
        ).message
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write(documents.document(made))
        return
    screen.fields([("thread", made.id), ("workspace", made.workspace_id or "none"), ("agent", made.agent)])


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
    """Show a conversation, the oldest entry first; [files] marks those with a checkpoint.

    [files pruned]: the checkpoint was deleted since, and the files cannot be taken back to there.
    """
    call = invocation(context)
    with call.client() as cog:
        entries = list(cog.thread(thread).entries(all_branches=all_branches))
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"entries": [documents.document(entry) for entry in entries]})
        return
    for entry in entries:
        mark = f"  {_mark(entry)}".rstrip()
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
    checkpoints: Annotated[
        bool | None,
        typer.Option(
            "--checkpoints/--no-checkpoints", help="Take one or not, whatever the policies say.", show_default=False
        ),
    ] = None,
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
            checkpoints=checkpoints,
        )
    from cogfs.ctl import documents, screen

    if answer.checkpoint_error:
        screen.note(f"the message was saved without a checkpoint: {answer.checkpoint_error}")
    if call.json:
        documents.write({**documents.document(answer.entry), "checkpoint_error": answer.checkpoint_error})
        return
    entry = answer.entry
    screen.fields([("entry", entry.id), ("checkpoint", entry.file_checkpoint.snapshot_id)])


def policy(
    context: typer.Context,
    thread: Annotated[str | None, typer.Option("--thread", metavar="THREAD", help="That of a thread.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="NAME", help="That of an agent.")] = None,
    checkpoints: Annotated[
        bool | None, typer.Option("--on/--off", help="Take checkpoints, or take none.", show_default=False)
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help="Leave out what matches, as in .gitignore. Can be repeated."),
    ] = None,
    max_file_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-file-bytes", metavar="N", max=2**63 - 1, help="Leave out larger files; -1: no limit, 0: 10 MiB."
        ),
    ] = None,
    rewind_files: Annotated[
        bool | None,
        typer.Option(
            "--rewind-files/--no-rewind-files",
            help="Whether a rewind that does not say takes the files back; of the runtime alone.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Say nothing at this level any more.")] = False,
    json: Json = False,
) -> None:
    """Show or set when user messages take checkpoints, and what these leave out.

    For a thread, an agent, or, without either, the runtime: this daemon. The most specific that says anything turns
    them on or off; what all of them exclude adds up with the workspace's excludes. Who gives an option sets all of that
    level anew, and it is on unless --off is given. Without any, the level is shown.
    """
    if thread is not None and agent is not None:
        raise UsageError("give --thread or --agent, not both")
    said: dict[str, object] = {
        name: value
        for name, value in (
            ("enabled", checkpoints),
            ("exclude", exclude or None),
            ("max_file_bytes", max_file_bytes),
            ("rewind_files", rewind_files),
        )
        if value is not None
    }
    if clear and said:
        raise UsageError("--clear takes away what the level says: give nothing with it")
    call = invocation(context)
    with call.client() as cog:
        level = None if thread is None else cog.thread(thread)
        if said or clear:
            wanted = said or None
            found = cog.set_policy(wanted, agent=agent) if level is None else level.set_policy(wanted)
        else:
            found = cog.policy(agent=agent) if level is None else level.policy()
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write(documents.document(found))
        return
    whose = f"thread {thread}" if thread is not None else f"agent {agent}" if agent is not None else "the runtime"
    own = found.checkpoints if found.HasField("checkpoints") else None
    screen.line(f"{whose} says: {_said(own)}")
    screen.line(f"what holds: {_said(found.effective)}", "bold")


def _said(policy: thread_pb2.CheckpointPolicy | None) -> str:
    """A policy on one line."""
    from cogfs.ctl import screen

    if policy is None:
        return "nothing"
    parts = ["checkpoints on" if policy.enabled else "checkpoints off"]
    if policy.exclude:
        parts.append(f"without {', '.join(policy.exclude)}")
    if policy.HasField("max_file_bytes"):
        limit = policy.max_file_bytes
        parts.append("files of any size" if limit < 0 else f"files up to {screen.size(limit)}")
    if policy.HasField("rewind_files"):
        parts.append("a rewind takes the files back" if policy.rewind_files else "a rewind leaves the files")
    return ", ".join(parts)


def rewind(
    context: typer.Context,
    thread: ThreadId,
    entry: Annotated[
        str | None, typer.Argument(metavar="ENTRY", help="Where to go back to; without it, the branch is listed.")
    ] = None,
    files: Annotated[
        bool | None,
        typer.Option(
            "--files/--no-files",
            help="Take the files back too; without either, as the policy of the runtime says: not, unless it was set.",
            show_default=False,
        ),
    ] = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Leave the conversation and its memory; with --files.")
    ] = False,
    workspace: Annotated[
        str | None,
        typer.Option("--workspace", metavar="DIR", help="Of several in which the thread ran, the one to restore."),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="NAME", help="The same, by an agent that worked in it. Can be given again."),
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="To before ENTRY, a message of the user, which goes too.")
    ] = False,
    calling_run: Annotated[
        str | None,
        typer.Option("--calling-run", metavar="RUN", help="The run that asks for it: it cannot take itself back."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take a conversation with its memory, and with --files the files, back to an entry.

    Without ENTRY: lists the active branch, and marks the entries with checkpoints [files]. Else shows the plan, asks,
    then acts.
    """
    call = invocation(context)
    if entry is None:
        if files is not None or no_memory or workspace or agent or before or calling_run or dry_run or yes or force:
            raise UsageError("give the entry to go back to; `rewind THREAD` alone lists them")
        _list_branch(context, thread)
        return
    if no_memory and not files:
        raise UsageError("--no-memory without --files changes nothing: give --files")
    if workspace is not None and not files:
        raise UsageError("--workspace names where files are taken back: give --files")
    if agent and not files:
        raise UsageError("--agent names whose files are taken back: give --files")
    call.check_consent(dry_run, yes)
    from cogfs.client import ThreadBusy
    from cogfs.ctl import documents, screen

    with call.client() as cog:
        found = cog.thread(thread)
        where = None if workspace is None else cog.workspace(workspace)

        def go(dry: bool) -> thread_pb2.RewindReport:
            first = screen.First()
            with screen.progress(not call.json and not dry) as progress:
                report = found.rewind(
                    entry,
                    before=before,
                    files=files,
                    memory=not no_memory,
                    workspace=where,
                    agents=agent or (),
                    dry_run=dry,
                    force=force,
                    calling_run=calling_run,
                    progress=progress,
                    changes=None if call.json else first.take,
                )
            if report.HasField("files"):
                first.into(report.files.restore)
            return report

        if not yes:
            plan = go(True)
            if call.json:
                documents.write(documents.document(plan))
                return
            _show_rewind(plan, before)
            if dry_run:
                return
            refuse_busy(plan.files.restore, force)
            if plan.runs.going and not force:
                raise ThreadBusy("a run goes on in the thread: end it, or give --force to stop it")
            agree("Go back?")
        report = go(False)
    if call.json:
        documents.write(documents.document(report))
    else:
        _show_rewind(report, before)


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


def _mark(entry: thread_pb2.Entry) -> str:
    """Whether an entry has a checkpoint, for reading."""
    named = [entry.file_checkpoint] if entry.HasField("file_checkpoint") else []
    if entry.HasField("file_checkpoint_at"):
        named.append(entry.file_checkpoint_at)
    if not named:
        return ""
    return "[files pruned]" if all(one.pruned for one in named) else "[files]"


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
            _mark(entry),
            entry.content.split("\n", 1)[0],
        )
        for entry in entries
    ]


def _show_rewind(report: thread_pb2.RewindReport, before: bool) -> None:
    from cogfs.ctl import screen

    screen.conversation(report.conversation, report.dry_run)
    screen.memory(report.memory, report.dry_run)
    if report.HasField("files"):
        files = report.files
        how = "exactly as they were there" if files.exact else "the nearest checkpoint at or before it"
        screen.line(f"files: those of entry {files.entry_id}, {how}", "bold")
        screen.restore(files.restore)
    screen.runs(report.runs, report.dry_run)
    would = "would go" if report.dry_run else "went"
    where = "before entry" if before else "entry"
    screen.line(f"thread {report.thread_id} {would} back to {where} {report.to_entry_id}")
