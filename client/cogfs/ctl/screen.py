"""What a person sees: tables, plans and reports on stdout, notes, questions and progress on stderr. Calls no daemon.

Lines are never cut or wrapped, so that what is piped is whole. Colours and progress are for terminals alone.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cogfs.client.names import escape, printable
from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2, workspace_pb2

#: Paths of one kind that a plan shows before it counts the rest.
_SHOWN = 40

_CHANGES = {
    common_pb2.CREATED: ("created", "green"),
    common_pb2.MODIFIED: ("modified", "yellow"),
    common_pb2.DELETED: ("deleted", "red"),
    common_pb2.METADATA: ("metadata", "cyan"),
    common_pb2.TYPE: ("type", "magenta"),
}


def _console(stderr: bool = False) -> Console:
    return Console(file=sys.stderr if stderr else sys.stdout, highlight=False, markup=False, emoji=False)


def line(text: str = "", style: str = "") -> None:
    """One line, or several, on stdout."""
    _console().print(Text(printable(text), style=style), soft_wrap=True)


def note(text: str) -> None:
    """One line on stderr."""
    _console(stderr=True).print(Text(f"cogfsctl: {printable(text)}", style="yellow"), soft_wrap=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is free."""
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        return
    widths = [max(cell_len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    console = _console()
    for number, row in enumerate([list(header), *cells]):
        padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        console.print(Text("  ".join(padded).rstrip(), style="bold" if number == 0 else ""), soft_wrap=True)


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line; a pair without a value is left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        _console().print(Text.assemble((f"{name.ljust(width)}  ", "bold"), printable(value)), soft_wrap=True)


def time(stamp: Timestamp) -> str:
    """A time in the local zone, to the second; empty when it is unset."""
    if not (stamp.seconds or stamp.nanos):
        return ""
    return stamp.ToDatetime(tzinfo=datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(count: int) -> str:
    """A number of bytes for reading."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def age(seconds: float) -> str:
    """A length of time in the largest unit that makes it a whole number."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"


def retention(retain: workspace_pb2.Retention) -> str:
    """Which snapshots remain; empty for all."""
    seconds = retain.max_age.seconds + retain.max_age.nanos / 1e9
    parts = [f"the {retain.count} newest" if retain.count else "", f"none older than {age(seconds)}" if seconds else ""]
    return ", ".join(part for part in parts if part)


def name(message: Message, field: str) -> str:
    """The value of an enum field by its name, in lower case; empty for the unset one."""
    value = getattr(message, field)
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    if not value or kind is None:
        return ""
    known = kind.values_by_number.get(value)
    return known.name.lower().replace("_", "-") if known else str(value)


def path(name: bytes) -> str:
    """A path below a root, for reading."""
    return escape(name)


class First:
    """The first changes of a restore as they come, as many as are shown. The rest is counted in the report."""

    def __init__(self) -> None:
        self._files: list[common_pb2.FileChange] = []
        self._kept: list[common_pb2.PathReason] = []

    def take(self, piece: common_pb2.RestoreChanges) -> None:
        """One more piece."""
        self._files += piece.files[: _SHOWN - len(self._files)]
        self._kept += piece.kept[: _SHOWN - len(self._kept)]

    def into(self, report: common_pb2.RestoreReport) -> None:
        """``report`` as ``restore`` shows it."""
        report.files.extend(self._files)
        report.kept.extend(self._kept)


def changes(files: Iterable[common_pb2.FileChange]) -> None:
    """One line for each changed path, with its counts of lines."""
    console = _console()
    for change in files:
        what, style = _CHANGES.get(change.change, ("changed", ""))
        counts = "  binary" if change.binary else ""
        if change.insertions or change.deletions:
            counts = f"  +{change.insertions} -{change.deletions}"
        console.print(Text.assemble((f"  {what:9} ", style), path(change.path), (counts, "dim")), soft_wrap=True)


def _more(count: int) -> None:
    if count > _SHOWN:
        line(f"  … and {count - _SHOWN} more (--json shows all)", "dim")


def unified(change: common_pb2.FileChange) -> None:
    """The diff of one file: as it is into a pipe, made safe and coloured on a terminal."""
    if not change.diff:
        changes([change])
        return
    if not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.write(change.diff)
        sys.stdout.buffer.flush()
        return
    console = _console()
    for row in printable(change.diff.decode("utf-8", "replace")).splitlines():
        style = {"+": "green", "-": "red", "@": "cyan"}.get(row[:1], "")
        console.print(Text(row, style="bold" if row.startswith(("+++", "---")) else style), soft_wrap=True)


def busy(holders: Iterable[common_pb2.BusyBy], heading: str) -> None:
    """Who is in the way, or was gone past."""
    rows = [_holder(holder) for holder in holders]
    if rows:
        line(heading, "bold")
    for row in rows:
        line(f"  {row}")


def _holder(holder: common_pb2.BusyBy) -> str:
    what = holder.command or "a process"
    match holder.kind:
        case common_pb2.BusyBy.RUN:
            return f"run       {holder.id}  of {holder.command or 'nobody with a name'}"
        case common_pb2.BusyBy.TOOL_CALL:
            return f"tool call {holder.command}  of run {holder.id}"
        case common_pb2.BusyBy.COMMAND:
            return f"command   {what} (pid {holder.pid})  of {holder.id}"
    return f"{name(holder, 'access') or 'stands in':9} {escape(holder.path) or '.'}  by {what} (pid {holder.pid})"


def restore(report: common_pb2.RestoreReport) -> None:
    """A plan, or what a restore did."""
    changes(report.files[:_SHOWN])
    _more(report.restored_count + report.deleted_count)
    if report.kept:
        line("left alone:", "bold")
        for kept in report.kept[:_SHOWN]:
            line(f"  {kept.reason:16} {path(kept.path)}")
        _more(report.kept_count)
    busy(report.busy_by, "in the way:" if report.busy else "open for reading:")
    busy(report.forced, "went past:")
    line(restore_summary(report), "bold")
    if report.safety_snapshot_id:
        line(f"the files as they were: snapshot {report.safety_snapshot_id} (`cogfsctl undo` goes back)")


def restore_summary(report: common_pb2.RestoreReport) -> str:
    """A plan or a report in one line."""
    if not changes_anything(report):
        return f"nothing to change: {report.unchanged} paths are as they were in snapshot {report.snapshot_id}"
    would = "would be " if report.dry_run else ""
    return (
        f"{report.restored_count} {would}restored, {report.deleted_count} {would}deleted, {report.unchanged} unchanged"
        f" (lines added since: {report.insertions}, deleted since: {report.deletions})"
    )


def changes_anything(report: common_pb2.RestoreReport) -> bool:
    return bool(report.restored_count or report.deleted_count)


def conversation(report: thread_pb2.ConversationReport, dry_run: bool) -> None:
    """What a rewind or an undo does to a conversation."""
    if not report.cut:
        return
    would = "would leave" if dry_run else "left"
    line(f"conversation: {len(report.cut)} entries {would} the active branch", "bold")
    for entry_id in report.cut[:_SHOWN]:
        line(f"  {entry_id}")
    _more(len(report.cut))


def runs(report: thread_pb2.RunsReport, dry_run: bool) -> None:
    """What a rewind finds of runs, and does to them."""
    stopped = set(report.interrupted)
    going = [run for run in report.going if run not in stopped]
    dropped = [run for run in (*report.paused, *report.durable) if run not in stopped]
    would = "would be" if dry_run else "was"
    for run in going:
        line(f"run {run} goes on")
    for run in report.interrupted:
        line(f"run {run} was stopped")
    for run in dropped:
        line(f"run {run} {would} dropped")


def memory(report: thread_pb2.MemoryReport, dry_run: bool) -> None:
    """What a rewind or an undo does to what a thread remembers."""
    for ids, what in ((report.stale, "stale"), (report.hidden, "not seen any more"), (report.active, "valid again")):
        if ids:
            be = "would be" if dry_run else "is now"
            line(f"memory that {be} {what}: {len(ids)}", "bold")
        for memory_id in ids[:_SHOWN]:
            line(f"  {memory_id}")
        _more(len(ids))


def confirm(question: str) -> bool:
    """Asks on the terminal. No answer is no."""
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextlib.contextmanager
def progress(wanted: bool) -> Iterator[Callable[[snapshot_pb2.RestoreProgress], None] | None]:
    """A bar on stderr that follows a restore; None when there is no terminal or it is not wanted."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=_console(True), transient=True
    ) as bar:
        task = bar.add_task("restoring", total=None)

        def step(event: snapshot_pb2.RestoreProgress) -> None:
            phase = name(event, "phase")
            bar.update(task, description=phase, completed=event.done, total=event.total or None)

        yield step
