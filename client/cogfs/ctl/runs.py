"""The commands about runs: what goes on, and running something so that nothing is restored under it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cogfs.ctl.invocation import Invocation, Json, invocation
from cogfs.ctl.threads import ThreadId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cogfs.v1 import run_pb2

#: What a shell exits with for a command that it cannot run, and for one that it does not find.
_CANNOT, _MISSING = 126, 127
_SIGNALLED = 128
_SET_CHILD_SUBREAPER = 36


def runs(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="A directory in the workspace; without it, all are shown.")
    ] = None,
    ended: Annotated[bool, typer.Option("--all", help="Also the last of the runs that are over.")] = False,
    json: Json = False,
) -> None:
    """List the runs and the commands that go on, and so may be in the way of a restore or a rewind."""
    call = invocation(context)
    with call.client() as cog:
        workspace = None if directory is None else cog.workspace(directory)
        found = list(cog.runs(workspace=workspace, ended=ended))
        commands = cog.commands(workspace)
    from cogfs.ctl import documents, screen

    if call.json:
        documents.write(
            {
                "runs": [documents.document(run) for run in found],
                "commands": [documents.document(command) for command in commands],
            }
        )
        return
    screen.table(("RUN", "THREAD", "KIND", "STATE", "BEGAN", "TOOL CALLS", "HELD BY"), _run_rows(found))
    screen.table(("COMMAND", "THREAD", "BEGAN", "PROCESSES", "WHAT"), _command_rows(commands))


def _run_rows(found: Iterable[run_pb2.Run]) -> list[tuple[str, ...]]:
    from cogfs.ctl import screen

    return [
        (
            run.id,
            run.thread_id,
            screen.name(run, "kind"),
            "stopping" if run.stopping else screen.name(run, "state"),
            screen.time(run.started_at),
            f"{run.tool_calls} ({len(run.open_tool_calls)} go on)" if run.open_tool_calls else str(run.tool_calls),
            " ".join(part for part in (run.agent, run.holder) if part),
        )
        for run in found
    ]


def _command_rows(commands: Iterable[run_pb2.Command]) -> list[tuple[str, ...]]:
    from cogfs.ctl import screen

    return [
        (
            command.id,
            command.thread_id,
            screen.time(command.since),
            " ".join(str(pid) for pid in command.pids),
            command.command,
        )
        for command in commands
    ]


def execute(
    context: typer.Context,
    thread: ThreadId,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, with its arguments.")],
    json: Json = False,
) -> None:
    """Run a command, so that no files of the thread's workspace are restored until it has ended with all it started.

    Give -- before the command. Its exit code is passed on: 128 and the number for a signal; 126 and 127 say that it
    cannot be run, or was not found. What it leaves in the background goes on, and is in the way. While a restore
    changes files it is not started (exit code 15). With --json its output goes to standard error.
    """
    call = invocation(context)
    with call.client() as cog:
        # This process, and so what it starts, from its first moment.
        registered = cog.thread(thread).command(os.getpid(), shlex.join(command))
    from cogfs.v1 import run_pb2

    grouped = registered.tracking == run_pb2.Command.CONTROL_GROUP
    if not grouped:
        _adopt_orphans()
    code, pid = _run(command, sys.stderr.fileno() if call.json else None)
    left = [] if grouped else _register_left(call, registered.id)
    if call.json:
        from cogfs.ctl import documents

        if grouped:
            left = _left(call, registered.id)
        documents.write({**documents.document(registered), "pid": pid, "pids": left, "exit_code": code})
    raise typer.Exit(code)


def _run(command: list[str], stdout: int | None) -> tuple[int, int]:
    """The exit code of a command, and its process."""
    process: subprocess.Popen[bytes] | None = None
    #: Came while the command was being started.
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def leave(number: int, frame: object) -> None:
        """The terminal has sent it to the command as well."""

    # Handlers, which do not outlive the start of a program as an ignored signal would.
    for handler, numbers in ((pass_on, (signal.SIGTERM, signal.SIGHUP)), (leave, (signal.SIGINT, signal.SIGQUIT))):
        for number in numbers:
            # What whoever started this has ignored (nohup) stays ignored, for the command as well.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
    sys.stdout.flush()
    try:
        process = subprocess.Popen(command, stdout=stdout)
    except (FileNotFoundError, NotADirectoryError):
        return _complain(command[0], "there is no such command", _MISSING), 0
    except (OSError, ValueError) as error:
        return _complain(command[0], getattr(error, "strerror", "") or str(error), _CANNOT), 0
    while early:
        process.send_signal(early.pop(0))
    status = process.wait()
    return (status if status >= 0 else _SIGNALLED - status), process.pid


def _complain(name: str, why: str, code: int) -> int:
    from cogfs.ctl import screen

    screen.note(f"cannot run {name}: {why}")
    return code


def _adopt_orphans() -> None:
    """What the command leaves behind becomes a child of this process, wherever it goes, and so can be named."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """The processes whose parent this one is, and which have not ended."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(parent) == os.getpid() and state not in (b"Z", b"X"):
            found.add(int(name))
    return found


def _register_left(call: Invocation, command_id: str) -> list[int]:
    """Has what the command left followed after this process has ended; its processes."""
    from cogfs.client import CogfsError, NotFound
    from cogfs.ctl import screen

    known: set[int] = set()
    while more := _children() - known:
        known |= more
        try:
            with call.client() as cog:
                for pid in sorted(more):
                    try:
                        cog.register_command(pid, command_id=command_id)
                    except NotFound:
                        continue  # It has ended by now.
        except CogfsError as error:
            screen.note(f"what the command left in the background may be missed: {error}")
            break
    return sorted(known & _children())


def _left(call: Invocation, command_id: str) -> list[int]:
    """The processes of a command besides this one."""
    with call.client() as cog:
        pids = [pid for one in cog.commands() if one.id == command_id for pid in one.pids]
    return [pid for pid in pids if pid != os.getpid()]
