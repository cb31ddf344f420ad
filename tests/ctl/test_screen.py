"""What a person sees, without a terminal."""

from __future__ import annotations

import pytest

from cogfs.ctl import screen
from cogfs.ctl.snapshots import show_snapshot
from cogfs.v1 import common_pb2, snapshot_pb2, thread_pb2, workspace_pb2


def _report(**fields: object) -> common_pb2.RestoreReport:
    report = common_pb2.RestoreReport(snapshot_id="s1", unchanged=7, **fields)  # type: ignore[arg-type]
    report.restored_count, report.deleted_count = len(report.restored), len(report.deleted)
    report.kept_count = len(report.kept)
    return report


def test_table_is_aligned_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table(("ID", "NAME", "LAST"), [("1", "文件", "x" * 300), ("22", "a\nb", "")])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "ID  NAME  LAST"
    assert second == f"1   文件  {'x' * 300}"
    assert third == "22  a b"


def test_empty_table_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table(("ID",), [])
    assert capsys.readouterr().out == ""


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    screen.restore(
        _report(
            dry_run=True,
            restored=[b"a\n", b"b"],
            deleted=[b"c"],
            insertions=3,
            deletions=1,
            busy=True,
            files=[
                common_pb2.FileChange(path=b"a\n", change=common_pb2.MODIFIED, insertions=3, deletions=1),
                common_pb2.FileChange(path=b"b", change=common_pb2.CREATED, binary=True),
                common_pb2.FileChange(path=b"c", change=common_pb2.DELETED),
            ],
            kept=[common_pb2.PathReason(path=b"big", reason="too-large")],
            busy_by=[
                common_pb2.BusyBy(path=b"c", pid=12, command="vim", access=common_pb2.BusyBy.WRITE),
                common_pb2.BusyBy(path=b"", pid=13, kind=common_pb2.BusyBy.WORKING_DIRECTORY),
                common_pb2.BusyBy(id="cmd_1", pid=14, command="make", kind=common_pb2.BusyBy.COMMAND),
                common_pb2.BusyBy(id="run_1", command="shell", kind=common_pb2.BusyBy.TOOL_CALL),
                common_pb2.BusyBy(id="run_1", command="coder", kind=common_pb2.BusyBy.RUN),
            ],
        )
    )
    assert capsys.readouterr().out.splitlines() == [
        "  modified  a\\x0a  +3 -1",
        "  created   b  binary",
        "  deleted   c",
        "left alone:",
        "  too-large        big",
        "in the way:",
        "  write     c  by vim (pid 12)",
        "  stands in .  by a process (pid 13)",
        "  command   make (pid 14)  of cmd_1",
        "  tool call shell  of run run_1",
        "  run       run_1  of coder",
        "2 would be restored, 1 would be deleted, 7 unchanged (lines added since: 3, deleted since: 1)",
    ]


def test_runs_of_a_rewind_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen.runs(thread_pb2.RunsReport(going=["r1"], paused=["r2"], durable=["r3"]), True)
    screen.runs(
        thread_pb2.RunsReport(going=["r1", "r3"], interrupted=["r1", "r3"], paused=["r2"], durable=["r3"]), False
    )
    assert capsys.readouterr().out.splitlines() == [
        "run r1 goes on",
        "run r2 would be dropped",
        "run r3 would be dropped",
        "run r1 was stopped",
        "run r3 was stopped",
        "run r2 was dropped",
    ]


def test_report_names_the_way_back(capsys: pytest.CaptureFixture[str]) -> None:
    screen.restore(_report(restored=[b"a"], safety_snapshot_id="s2"))
    assert "snapshot s2" in capsys.readouterr().out


def test_nothing_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert not screen.changes_anything(_report())
    screen.restore(_report())
    assert capsys.readouterr().out.startswith("nothing to change: 7 paths")


def test_long_plan_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    files = [common_pb2.FileChange(path=b"%d" % number, change=common_pb2.CREATED) for number in range(1000)]
    screen.restore(_report(files=files, restored=[change.path for change in files]))
    out = capsys.readouterr().out
    assert "and 960 more" in out
    assert len(out.splitlines()) < 50


def test_diff_goes_into_a_pipe_as_it_is(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    diff = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\xff\n+\x1b[0m\n"
    screen.unified(common_pb2.FileChange(path=b"x", diff=diff))
    assert capfdbinary.readouterr().out == diff


def test_change_without_a_diff_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    screen.unified(common_pb2.FileChange(path=b"x", change=common_pb2.METADATA))
    assert capsys.readouterr().out == "  metadata  x\n"


def test_nothing_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.line("a\x1b[2Jb")
    screen.note("a\x1b[2Jb")
    screen.fields([("x", "\x9b1m"), ("empty", "")])
    shown = capsys.readouterr()
    assert not {"\x1b", "\x9b"} & set(shown.out + shown.err)
    assert "empty" not in shown.out


def test_names_of_enums() -> None:
    assert screen.name(thread_pb2.Entry(kind=thread_pb2.Entry.SESSION_EVENT), "kind") == "session-event"
    assert screen.name(thread_pb2.Entry(), "kind") == ""
    assert screen.name(common_pb2.FileChange.FromString(b"\x10\x63"), "change") == "99"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (10 << 20, "10.0 MiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert screen.size(count) == shown


def test_no_progress_without_a_terminal() -> None:
    with screen.progress(True) as step:
        assert step is None


def test_time_that_is_unset() -> None:
    assert screen.time(snapshot_pb2.Snapshot().created_at) == ""


@pytest.mark.parametrize(
    ("count", "seconds", "nanos", "shown"),
    [
        (0, 0, 0, ""),
        (200, 0, 0, "the 200 newest"),
        (0, 1209600, 0, "none older than 14 days"),
        (3, 5400, 0, "the 3 newest, none older than 90 minutes"),
        (0, 7200, 0, "none older than 2 hours"),
        (0, 61, 500_000_000, "none older than 61.5 s"),
    ],
)
def test_retention(count: int, seconds: int, nanos: int, shown: str) -> None:
    retain = workspace_pb2.Retention(count=count)
    retain.max_age.seconds, retain.max_age.nanos = seconds, nanos
    assert screen.retention(retain) == shown


def test_snapshot_names_what_it_skipped_and_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ["too-large", "changing", "unreadable", "hard-link", "unsupported-name"]
    snapshot = snapshot_pb2.Snapshot(
        id="s1",
        exclude=["*.log", "dist/"],
        refuse_hard_links=True,
        skipped=[common_pb2.PathReason(path=f"of {reason}\n".encode(), reason=reason) for reason in reasons],
        stats=snapshot_pb2.SnapshotStats(
            files=5, bytes=2048, hashed=2, reused=3, stored_bytes=1024, duration_ms=12.34, directories=4, symlinks=1
        ),
    )
    show_snapshot(snapshot)
    out = capsys.readouterr().out
    for reason in reasons:
        assert f"  {reason:16} of {reason}\\x0a\n" in out
    assert "holds       5 files (2.0 KiB), 4 directories, 1 links\n" in out
    assert "cost        12.3 ms, 2 files read, 3 not read, 1.0 KiB stored\n" in out
    assert "excludes    *.log, dist/\n" in out
    assert "hard links  not recorded\n" in out
