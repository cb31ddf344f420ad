"""The commands about workspaces and their mounts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import Directory, Json, invocation, retention

if TYPE_CHECKING:
    from cogfs.v1 import workspace_pb2


def mount(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The project's directory.")],
    at: Annotated[str | None, typer.Option("--at", metavar="PATH", help="Mount there, not over DIR itself.")] = None,
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
    retain_count: Annotated[
        int | None,
        typer.Option("--retain-count", metavar="N", min=0, help="Keep the N newest snapshots; 0: any number."),
    ] = None,
    retain_age: Annotated[
        str | None,
        typer.Option(
            "--retain-age", metavar="AGE", help="Keep no snapshot that is older (90s, 12h, 14d, 2w); 0s: any."
        ),
    ] = None,
    refuse_hard_links: Annotated[
        bool, typer.Option("--refuse-hard-links", help="Neither read nor keep files that have more than one name.")
    ] = False,
    force_root: Annotated[
        bool, typer.Option("--force-root", help="Accept the root of the filesystem or a home directory.")
    ] = False,
    scan: Annotated[
        bool,
        typer.Option(
            "--scan", help="Do not mount it (where there is no FUSE, say): each checkpoint looks at all files."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Mount a project directory, so that its history is kept.

    The mount covers DIR itself: paths stay as they are. A directory that is no workspace yet becomes one. --exclude,
    --max-file-bytes, --retain-count, --retain-age and --refuse-hard-links together are the workspace's options: who
    gives one of them sets all anew, who gives none changes none. A dead mount that is found is cleared.

    With --scan nothing is mounted. Each checkpoint looks at all files instead, and reads those whose size, times, inode
    or mode are not what was recorded. All commands work as with a mount, and unmount ends it.
    """
    call = invocation(context)
    with call.client() as cog:
        # Typer gives an empty list for an option that was not typed.
        workspace = cog.mount(
            directory,
            at,
            exclude=exclude or None,
            max_file_bytes=max_file_bytes,
            retain=retention(retain_count, retain_age),
            # An option that was not typed leaves the workspace's as they are.
            refuse_hard_links=refuse_hard_links or None,
            force_root=force_root,
            scan=scan,
        ).message
    _show(context, workspace)
    if not call.json and _stands_below(workspace):
        from cogfs.ctl import screen

        screen.note('this shell still stands in the directory below the mount: `cd "$PWD"` enters the mount')


def unmount(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The workspace's directory.")],
    force: Annotated[
        bool, typer.Option("--force", help="Detach it although it is used: processes keep what they have open.")
    ] = False,
    json: Json = False,
) -> None:
    """Take a mount away, or end the scanning of a workspace that is not mounted. The files and their history stay."""
    with invocation(context).client() as cog:
        workspace = cog.unmount(directory, force=force).message
    _show(context, workspace)


def workspaces(context: typer.Context, json: Json = False) -> None:
    """List all workspaces."""
    call = invocation(context)
    with call.client() as cog:
        found = [workspace.message for workspace in cog.workspaces()]
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"workspaces": [documents.document(workspace) for workspace in found]})
        return
    screen.table(
        ("ID", "MODE", "STATE", "SNAPSHOTS", "ROOT"),
        [
            (
                workspace.id,
                screen.name(workspace, "mode"),
                _state(workspace),
                str(workspace.snapshot_count),
                screen.path(workspace.root),
            )
            for workspace in found
        ],
    )


def status(
    context: typer.Context,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A directory or file in the workspace; without it, this directory.")
    ] = ".",
    json: Json = False,
) -> None:
    """Show the state of a workspace."""
    with invocation(context).client() as cog:
        workspace = cog.workspace(directory).message
    _show(context, workspace)


def handles(context: typer.Context, directory: Directory, json: Json = False) -> None:
    """List the open files of a workspace, and who holds them.

    Of a workspace that is scanned these are what /proc tells: those of processes that the daemon may look at.
    """
    call = invocation(context)
    with call.client() as cog:
        found = cog.workspace(directory).handles()
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write({"handles": [documents.document(handle) for handle in found]})
        return
    screen.table(
        ("PID", "COMMAND", "ACCESS", "SINCE", "PATH"),
        [
            (
                str(handle.pid),
                handle.command,
                screen.name(handle, "access"),
                screen.time(handle.since),
                (screen.path(handle.path) or ".")
                + ("/" if handle.directory and handle.path else "")
                + (" (deleted)" if handle.deleted else ""),
            )
            for handle in found
        ],
    )


def _stands_below(workspace: workspace_pb2.Workspace) -> bool:
    """Whether the working directory is one that the mount now covers: it was entered before."""
    try:
        return workspace.mountpoint == workspace.root and os.stat(".").st_dev != os.stat(os.getcwd()).st_dev
    except OSError:
        return False


def _state(workspace: workspace_pb2.Workspace) -> str:
    from cogfs.ctl import screen

    return screen.name(workspace, "state")


def _show(context: typer.Context, workspace: workspace_pb2.Workspace) -> None:
    from cogfs.ctl import documents, screen

    if invocation(context).json:
        documents.write(documents.document(workspace))
        return
    limit = workspace.options.max_file_bytes
    recovery = workspace.last_recovery
    outcome = screen.name(recovery, "outcome")
    dirty = f"{workspace.dirty_files} files, {workspace.dirty_directories} directories"
    screen.fields(
        [
            ("workspace", workspace.id),
            ("root", screen.path(workspace.root)),
            ("mode", screen.name(workspace, "mode")),
            ("state", _state(workspace)),
            ("reason", workspace.reason),
            ("mounted at", screen.path(workspace.mountpoint) if workspace.worker_pid else ""),
            ("worker", f"process {workspace.worker_pid}" if workspace.worker_pid else ""),
            ("excludes", ", ".join([".git", "node_modules", ".cogfs", *workspace.options.exclude])),
            ("largest file", "no limit" if limit < 0 else screen.size(limit or 10 * 1024 * 1024)),
            ("hard links", "not recorded" if workspace.options.refuse_hard_links else ""),
            ("retention", screen.retention(workspace.options.retain)),
            ("snapshots", str(workspace.snapshot_count)),
            ("last snapshot", workspace.last_snapshot_id),
            ("changed since", dirty if workspace.worker_pid else ""),
            (
                "last recovery",
                f"{outcome} at {screen.time(recovery.at)}: target {recovery.target_snapshot_id}, "
                f"safety snapshot {recovery.safety_snapshot_id}" + (f"; {recovery.reason}" if recovery.reason else "")
                if outcome
                else "",
            ),
        ]
    )
    for one in workspace.bypassed_by:
        if one.pid == os.getpid():
            continue
        where = screen.path(one.path) or "the root"
        screen.note(
            f"{one.command} (process {one.pid}) reaches {where} past the mount, as it was there before it: each "
            f'checkpoint looks at all files while it does; in a shell, run cd "$PWD"'
        )
