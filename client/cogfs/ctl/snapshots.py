"""The commands about snapshots, and the way back to one."""

from __future__ import annotations

import base64
import os
import stat
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import Directory, DryRun, Force, Json, Yes, invocation, retention

if TYPE_CHECKING:
    from cogfs.client import Client, Snapshot
    from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2

SnapshotId = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot's id.")]
_PATHS = "below the workspace's root, or an absolute path in it"


def checkpoint(
    context: typer.Context,
    directory: Directory,
    label: Annotated[str, typer.Option("--label", metavar="L", help="A name for it.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Answer when all of its content is in the store.")] = False,
    json: Json = False,
) -> None:
    """Take a snapshot of a workspace's files as they are."""
    with invocation(context).client() as cog:
        snapshot = cog.workspace(directory).checkpoint(label, wait_for="sealed" if wait else None)
    _show(context, snapshot.message)


def snapshots(context: typer.Context, directory: Directory, json: Json = False) -> None:
    """List the snapshots of a workspace, the newest first."""
    call = invocation(context)
    with call.client() as cog:
        found = [snapshot.message for snapshot in cog.workspace(directory).snapshots()]
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"snapshots": [documents.document(snapshot) for snapshot in found]})
        return
    screen.table(
        ("ID", "STATE", "ORIGIN", "TIME", "FILES", "SIZE", "LABEL"),
        [
            (
                snapshot.id,
                screen.name(snapshot, "state"),
                screen.name(snapshot, "origin"),
                screen.time(snapshot.created_at),
                str(snapshot.stats.files),
                screen.size(snapshot.stats.bytes),
                snapshot.label,
            )
            for snapshot in found
        ],
    )


def show(context: typer.Context, snapshot: SnapshotId, json: Json = False) -> None:
    """Show one snapshot: its state, what it left out, and what it cost."""
    with invocation(context).client() as cog:
        found = cog.snapshot(snapshot)
    _show(context, found.message)


def diff(
    context: typer.Context,
    snapshot: SnapshotId,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="SNAPSHOT|PATH", help=f"To which snapshot, and which paths: {_PATHS}."),
    ] = None,
    stat: Annotated[bool, typer.Option("--stat", help="Counts of lines instead of diffs.")] = False,
    json: Json = False,
) -> None:
    """Show what changed from a snapshot to another, or to the files as they are now.

    A second argument that is no snapshot's id is a path.
    """
    from cogfs.client import NotFound, ValidationError

    call = invocation(context)
    arguments = list(more or ())
    with call.client() as cog:
        source = cog.snapshot(snapshot)
        target = None
        if arguments:
            try:
                target = cog.snapshot(arguments[0])
                del arguments[0]
            except (NotFound, ValidationError):
                target = None
        changes = source.diff(target, _below(cog, source, arguments), unified=not stat)
        from cogfs.ctl import documents, screen

        if call.json:
            files = [documents.document(change) for change in changes]
            documents.write(
                {
                    "files": files,
                    "insertions": sum(file["insertions"] for file in files),
                    "deletions": sum(file["deletions"] for file in files),
                }
            )
        elif stat:
            screen.changes(changes)
        else:
            for change in changes:
                screen.unified(change)


def cat(
    context: typer.Context,
    snapshot: SnapshotId,
    path: Annotated[str, typer.Argument(metavar="PATH", help=f"A file {_PATHS}.")],
    json: Json = False,
) -> None:
    """Write a file, as it was in a snapshot, to standard output.

    With --json its content is in "data", in base64.
    """
    call = invocation(context)
    with call.client() as cog:
        found = cog.snapshot(snapshot)
        (where,) = _below(cog, found, [path])
        pieces = found.cat(where)
        if call.json:
            from cogfs.ctl import documents, screen

            data = b"".join(pieces)
            documents.write(
                {
                    "snapshot_id": found.id,
                    "path": screen.path(where),
                    "size": len(data),
                    "data": base64.b64encode(data).decode("ascii"),
                }
            )
            return
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def ls(
    context: typer.Context,
    snapshot: SnapshotId,
    path: Annotated[str, typer.Argument(metavar="PATH", help=f"A directory {_PATHS}.")] = ".",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All below it.")] = False,
    json: Json = False,
) -> None:
    """List a directory as it was in a snapshot."""
    call = invocation(context)
    with call.client() as cog:
        found = cog.snapshot(snapshot)
        (where,) = _below(cog, found, [path])
        entries = list(found.ls(where, recursive=recursive))
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"entries": [documents.document(entry) for entry in entries]})
        return
    width = max((len(str(entry.size)) for entry in entries), default=0)
    for entry in entries:
        screen.line(f"{_mode(entry)} {entry.size:>{width}} {_named(entry)}")


def restore(
    context: typer.Context,
    snapshot: SnapshotId,
    paths: Annotated[list[str] | None, typer.Argument(metavar="PATH", help=f"Only these: {_PATHS}.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Bring the files back to a snapshot.

    Shows the plan, asks, then acts. The files as they were are kept in a safety snapshot, to which `undo` goes back.
    """
    call = invocation(context)
    call.check_consent(dry_run, yes)
    with call.client() as cog:
        found = cog.snapshot(snapshot)
        where = _below(cog, found, paths or [])
        from cogfs.ctl import documents, screen

        if not yes:
            if call.json:
                documents.write(documents.document(found.restore(where, dry_run=True, force=force)))
                return
            first = screen.First()
            plan = found.restore(where, dry_run=True, force=force, changes=first.take)
            first.into(plan)
            screen.restore(plan)
            if dry_run or not screen.changes_anything(plan):
                return
            refuse_busy(plan, force)
            agree("Change these files?")
        if call.json:
            documents.write(documents.document(found.restore(where, force=force)))
            return
        first = screen.First()
        with screen.progress(True) as progress:
            report = found.restore(where, force=force, progress=progress, changes=first.take)
        first.into(report)
        screen.restore(report)


def prune(
    context: typer.Context,
    directory: Directory,
    count: Annotated[
        int | None, typer.Option("--count", metavar="N", min=1, help="Keep so many snapshots, the newest.")
    ] = None,
    max_age: Annotated[
        str | None, typer.Option("--max-age", metavar="AGE", help="Keep none that is older: 90s, 12h, 14d, 2w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    json: Json = False,
) -> None:
    """Delete old snapshots of a workspace.

    Without --count and --max-age, those that the retention of the workspace does not keep (see mount). Whatever they
    say, these remain: the newest snapshot, those that are not captured yet, and those that an undo or a restore needs.
    A rewind with files to a message whose snapshot is deleted is not possible any more; `log` marks it.
    """
    call = invocation(context)
    wanted = retention(count, max_age)
    with call.client() as cog:
        report = cog.workspace(directory).prune(wanted, dry_run=dry_run)
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write(documents.document(report))
        return
    for snapshot_id in report.deleted:
        screen.line(f"  {snapshot_id}")
    would = "would be " if report.dry_run else ""
    would_remain = "would remain" if report.dry_run else "remain"
    screen.line(f"{len(report.deleted)} snapshots {would}deleted, {report.remaining} {would_remain}", "bold")


def undo(
    context: typer.Context,
    directory: Directory,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take back the last restore or rewind of a workspace.

    A rewind is taken back whole, files and conversation, when nothing was added to its thread since; else its files
    alone, and the report says so. Shows the plan, asks, then acts.
    """
    from cogfs.ctl import documents

    call = invocation(context)
    call.check_consent(dry_run, yes)
    with call.client() as cog:
        workspace = cog.workspace(directory)
        report = workspace.undo(dry_run=not yes, force=force)
        if not yes and not call.json:
            _show_undo(report)
            if not dry_run:
                refuse_busy(report.files, force)
                agree("Take it back?")
                report = workspace.undo(force=force)
                _show_undo(report)
    if call.json:
        documents.write(documents.document(report))
    elif yes:
        _show_undo(report)


def refuse_busy(plan: common_pb2.RestoreReport, force: bool) -> None:
    """Busy when something is in the way of a plan: there is no use in asking."""
    if not plan.busy or force:
        return
    from cogfs.client import Busy

    raise Busy(
        "something is in the way of the change: end it, or give --force to go past open files and to stop the rest"
    )


def agree(question: str) -> None:
    """Asks, and ends the command with exit code 1 when the answer is no."""
    from cogfs.ctl import screen

    if not screen.confirm(question):
        screen.note("nothing was changed")
        raise typer.Exit(1)


def _below(cog: Client, snapshot: Snapshot, paths: list[str]) -> list[bytes]:
    """Typed paths as paths below the root of the snapshot's workspace."""
    from cogfs.client import ValidationError
    from cogfs.client.arguments import relative

    names = [os.fsencode(path) for path in paths]
    if not any(name.startswith(b"/") for name in names):
        return [relative(name) for name in names]
    workspace = cog.workspace(id=snapshot.workspace_id)
    below = []
    for name in names:
        if not name.startswith(b"/"):
            below.append(relative(name))
            continue
        # The last component may be a link that the snapshot holds: only what leads to it is resolved.
        parent, last = os.path.split(os.path.normpath(name))
        candidates = (os.path.normpath(name), os.path.join(os.path.realpath(parent), last))
        for base in (workspace.root, workspace.mountpoint):
            inside = [path for path in candidates if base and (path == base or path.startswith(base + b"/"))]
            if inside:
                below.append(inside[0][len(base) + 1 :])
                break
        else:
            from cogfs.client.names import escape

            raise ValidationError(f"{escape(name)} is not in the workspace {escape(workspace.root)}")
    return below


def _mode(entry: snapshot_pb2.TreeEntry) -> str:
    from cogfs.v1 import snapshot_pb2

    kinds = {
        snapshot_pb2.TreeEntry.FILE: stat.S_IFREG,
        snapshot_pb2.TreeEntry.DIRECTORY: stat.S_IFDIR,
        snapshot_pb2.TreeEntry.SYMLINK: stat.S_IFLNK,
    }
    if entry.kind not in kinds:
        return "?---------"
    return stat.filemode(kinds[entry.kind] | entry.mode)


def _named(entry: snapshot_pb2.TreeEntry) -> str:
    from cogfs.ctl import screen
    from cogfs.v1 import snapshot_pb2

    path = screen.path(entry.path)
    if entry.kind == snapshot_pb2.TreeEntry.SYMLINK:
        return f"{path} -> {screen.path(entry.symlink_target)}"
    if entry.kind == snapshot_pb2.TreeEntry.DIRECTORY:
        return f"{path}/"
    return f"{path}  ({entry.reason}, not recorded)" if entry.reason else path


def _show(context: typer.Context, snapshot: snapshot_pb2.Snapshot) -> None:
    from cogfs.ctl import documents

    if invocation(context).json:
        documents.write(documents.document(snapshot))
    else:
        show_snapshot(snapshot)


def show_snapshot(snapshot: snapshot_pb2.Snapshot) -> None:
    """All that is said of a snapshot."""
    from cogfs.ctl import screen

    stats = snapshot.stats
    screen.fields(
        [
            ("snapshot", snapshot.id),
            ("workspace", snapshot.workspace_id),
            ("label", snapshot.label),
            ("state", screen.name(snapshot, "state")),
            ("reason", snapshot.reason),
            ("origin", screen.name(snapshot, "origin")),
            ("taken", screen.time(snapshot.created_at)),
            ("after", snapshot.parent_id),
            ("root", snapshot.root_hash.hex()),
            ("excludes", ", ".join(snapshot.exclude)),
            ("hard links", "not recorded" if snapshot.refuse_hard_links else ""),
            (
                "holds",
                f"{stats.files} files ({screen.size(stats.bytes)}), {stats.directories} directories, "
                f"{stats.symlinks} links",
            ),
            (
                "cost",
                f"{stats.duration_ms:.1f} ms, {stats.hashed} files read, {stats.reused} not read, "
                f"{screen.size(stats.stored_bytes)} stored",
            ),
        ]
    )
    if snapshot.skipped:
        screen.line("not recorded:", "bold")
    for skipped in snapshot.skipped:
        screen.line(f"  {skipped.reason:16} {screen.path(skipped.path)}")
    if snapshot.failed:
        screen.line("not captured:", "bold")
    for failed in snapshot.failed:
        screen.line(f"  {screen.path(failed.path)}: {failed.reason}")


def _show_undo(report: thread_pb2.UndoReport) -> None:
    from cogfs.ctl import screen

    screen.line(f"takes back the restore of snapshot {report.undone_snapshot_id}", "bold")
    screen.restore(report.files)
    if report.thread_id:
        screen.line(f"thread {report.thread_id} goes back with the files")
        screen.conversation(report.conversation, report.dry_run)
        screen.memory(report.memory, report.dry_run)
    if report.files_only_reason:
        screen.note(f"the files alone: {report.files_only_reason}")
