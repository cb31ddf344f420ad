"""The commands about the daemon's process, and the version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import Json, invocation

if TYPE_CHECKING:
    from cogfs.v1 import admin_pb2

LeaveMounts = Annotated[
    bool, typer.Option("--leave-mounts", help="Leave the mounts when it is told to stop; the next one adopts them.")
]


def start(context: typer.Context, leave_mounts: LeaveMounts = False, json: Json = False) -> None:
    """Start the daemon in the background, unless one answers."""
    from cogfs.client.lifecycle import ensure_daemon
    from cogfs.ctl import documents, screen

    daemon, started = ensure_daemon(leave_mounts=leave_mounts)
    if invocation(context).json:
        documents.write({**documents.document(daemon), "started": started})
        return
    what = "started" if started else "already running"
    screen.line(f"{what}: process {daemon.pid} at {daemon.endpoint}")


def stop(context: typer.Context, json: Json = False) -> None:
    """Tell the daemon to stop, and wait until it is gone."""
    from cogfs.client.lifecycle import stop_daemon
    from cogfs.ctl import documents, screen

    pid = stop_daemon()
    if invocation(context).json:
        documents.write({"stopped": pid is not None, "pid": pid or 0})
        return
    screen.line("no daemon runs" if pid is None else f"stopped: process {pid}")


def status(context: typer.Context, json: Json = False) -> None:
    """Show the daemon that answers; exit code 20 when none does."""
    from cogfs.client import connect
    from cogfs.ctl import documents, screen

    with connect() as cog:
        daemon = cog.daemon()
    if invocation(context).json:
        documents.write(documents.document(daemon))
        return
    screen.fields(
        [
            ("process", str(daemon.pid)),
            ("endpoint", daemon.endpoint),
            ("version", daemon.version),
            ("started", screen.time(daemon.started_at)),
            ("store", screen.path(daemon.store)),
            ("holds", f"{daemon.store_objects} objects, {screen.size(daemon.store_bytes)}"),
        ]
    )


def run(leave_mounts: LeaveMounts = False) -> None:
    """Run the daemon in the foreground, in place of this process."""
    from cogfs.client.lifecycle import daemon_command, daemon_environment
    from cogfs.client.places import default_endpoint

    command = daemon_command(("--leave-mounts",) if leave_mounts else ())
    os.execve(command[0], command, daemon_environment(default_endpoint()))


def version(context: typer.Context, json: Json = False) -> None:
    """Show the version of this command, and of the daemon if one answers."""
    import importlib.metadata

    from cogfs.client.lifecycle import find_daemon
    from cogfs.ctl import documents, screen

    own = importlib.metadata.version("cogfs")
    daemon: admin_pb2.Daemon | None = find_daemon()
    if invocation(context).json:
        documents.write({"version": own, "daemon_version": daemon.version if daemon else None})
        return
    screen.fields([("cogfsctl", own), ("cogfsd", daemon.version if daemon else "not running")])
