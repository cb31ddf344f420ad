"""The entry of ``cogfsctl``: its commands by name, and what becomes of an error. Importing it imports no gRPC."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cogfs.ctl import daemon, forks, runs, snapshots, store, threads, workspaces
from cogfs.ctl.invocation import Invocation, UsageError

USAGE_EXIT = 2
#: A fault of cogfsctl itself, or an answer of "no" to its question.
FAULT_EXIT = 1

_SETTINGS = {"terminal_width": 100, "max_content_width": 100, "help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="cogfsctl",
    help="Keeps the history of project directories, and brings files and conversations back.",
    epilog="Example: cogfsctl mount ~/project",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=_SETTINGS,
)
thread_app = typer.Typer(help="Begin conversations.", no_args_is_help=True, rich_markup_mode=None)
daemon_app = typer.Typer(help="Start, stop and look at the daemon.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def root(
    context: typer.Context,
    no_start: Annotated[bool, typer.Option("--no-start", help="Do not start the daemon when none answers.")] = False,
) -> None:
    """Keeps the history of project directories, and brings files and conversations back."""
    context.obj.start = not no_start


def _add(group: typer.Typer, name: str, command: Callable[..., Any], example: str) -> None:
    group.command(name, epilog=f"Example: cogfsctl {example}", context_settings=_SETTINGS)(command)


_add(app, "mount", workspaces.mount, "mount ~/project --exclude '*.log'")
_add(app, "unmount", workspaces.unmount, "unmount ~/project")
_add(app, "workspaces", workspaces.workspaces, "workspaces --json")
_add(app, "status", workspaces.status, "status ~/project")
_add(app, "handles", workspaces.handles, "handles ~/project")
_add(thread_app, "new", threads.new, "thread new chat --workspace ~/project")
app.add_typer(thread_app, name="thread")
_add(app, "threads", threads.threads, "threads")
_add(app, "log", threads.log, "log chat")
_add(app, "message", threads.message, "message chat 'Refactor the parser'")
_add(app, "checkpoint", snapshots.checkpoint, "checkpoint ~/project --label before-upgrade")
_add(app, "snapshots", snapshots.snapshots, "snapshots ~/project")
_add(app, "show", snapshots.show, "show SNAPSHOT")
_add(app, "diff", snapshots.diff, "diff SNAPSHOT src --stat")
_add(app, "cat", snapshots.cat, "cat SNAPSHOT src/main.py")
_add(app, "ls", snapshots.ls, "ls SNAPSHOT src")
_add(app, "restore", snapshots.restore, "restore SNAPSHOT src --dry-run")
_add(app, "prune", snapshots.prune, "prune ~/project --count 50 --max-age 14d")
_add(app, "gc", store.gc, "gc")
_add(app, "check", store.check, "check --data")
_add(app, "repair", store.repair, "repair")
_add(app, "stats", store.stats, "stats --snapshots")
_add(app, "undo", snapshots.undo, "undo ~/project")
_add(app, "policy", threads.policy, "policy --agent coder --exclude 'dist/**'")
_add(app, "exec", runs.execute, "exec chat -- make test")
_add(app, "runs", runs.runs, "runs ~/project")
_add(app, "rewind", threads.rewind, "rewind chat ENTRY --files")
_add(app, "fork", forks.fork, "fork chat ENTRY --files --into ~/project-fork")
_add(daemon_app, "start", daemon.start, "daemon start")
_add(daemon_app, "stop", daemon.stop, "daemon stop")
_add(daemon_app, "status", daemon.status, "daemon status --json")
_add(daemon_app, "run", daemon.run, "daemon run")
app.add_typer(daemon_app, name="daemon")
_add(app, "version", daemon.version, "version")


def main() -> None:
    """Runs the command line and exits. An error is one quiet sentence, never a traceback (COGFS_DEBUG=1 shows it)."""
    call = Invocation()
    # gRPC's own log is not for people.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(obj=call, prog_name="cogfsctl")
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else FAULT_EXIT
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if os.environ.get("COGFS_DEBUG"):
            raise
        code = _failed(call, error)
    sys.exit(_flushed(code))


def _failed(call: Invocation, error: Exception) -> int:
    """Says what went wrong; the exit code."""
    from cogfs.client.errors import CogfsError
    from cogfs.ctl import documents
    from cogfs.v1.reasons import Reason

    metadata: dict[str, str] = {}
    if isinstance(error, UsageError):
        reason, code, message = "USAGE", USAGE_EXIT, str(error)
    elif isinstance(error, CogfsError):
        reason, code, message = error.reason.name, error.reason.exit_code, error.message
        metadata = error.metadata
    elif isinstance(error, OSError):
        if error.errno == errno.EPIPE:
            return FAULT_EXIT
        reason, code, message = Reason.IO.name, Reason.IO.exit_code, str(error)
    else:
        reason, code = "FAULT", FAULT_EXIT
        message = f"a fault of cogfsctl: {type(error).__name__}: {error} (COGFS_DEBUG=1 shows where)"
    try:
        if call.json:
            documents.write({"error": {"reason": reason, "message": message, "metadata": metadata}})
        else:
            from cogfs.client.names import printable

            print(f"cogfsctl: {printable(message)}", file=sys.stderr)
            for holder in _holders(metadata.get("busy_by", "")):
                print(f"  {printable(holder)}", file=sys.stderr)
    except BrokenPipeError:
        pass
    return code


def _holders(busy_by: str) -> list[str]:
    """Who is in the way, from the metadata of an error: one line each."""
    try:
        holders = json.loads(busy_by) if busy_by else []
        return [_holder(holder) for holder in holders]
    except (ValueError, TypeError, KeyError):
        return [busy_by]


def _holder(holder: dict[str, Any]) -> str:
    if holder["kind"] in ("RUN", "TOOL_CALL"):
        return f"{holder['kind'].lower().replace('_', ' ')} {holder['command']} ({holder['id']})"
    return f"{holder['command']} (pid {holder['pid']}): {holder['path'] or '.'}"


def _flushed(code: int) -> int:
    """Writes out what is buffered. A reader that went away is no news."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or FAULT_EXIT
    return code


if __name__ == "__main__":
    main()
