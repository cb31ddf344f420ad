"""Other processes in the way of a restore: refused by name before it, kept out while it runs, and never a deadlock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.client import Busy, Unavailable, WorkspaceBusy
from tests.e2e.support.site import PATIENCE, Aside, Site
from tests.support.tree import describe, differences, of_snapshot

#: Does one kind of thing over and over in a directory, until its input ends; then tells how often each errno came.
_HAMMER = """
import collections, json, os, select, sys, time
kind, directory, me = sys.argv[1:4]
counts = collections.Counter()
number = 0
os.write(1, b"ready\\n")
while not select.select([0], [], [], 0)[0]:
    number += 1
    names = sorted(os.listdir(directory)) if number % 50 == 1 else names
    name = os.path.join(directory, names[number % len(names)]) if names else directory
    mine = os.path.join(directory, f"foreign-{me}-{number % 8}")
    try:
        if kind == "create":
            with open(mine, "w") as file:
                file.write("foreign")
            os.unlink(mine)
        elif kind == "rename":
            with open(mine, "w") as file:
                file.write("foreign")
            os.rename(mine, mine + "-moved")
            os.unlink(mine + "-moved")
        elif kind == "mkdir":
            os.mkdir(mine)
            os.rmdir(mine)
        elif kind == "move":
            os.rename(name, name + "~")
            os.rename(name + "~", name)
        elif kind == "read":
            with open(name) as file:
                file.read()
        elif kind == "chmod":
            os.chmod(mine, 0o600) if number % 2 else os.stat(name)
        counts["done"] += 1
    except OSError as error:
        counts[error.errno] += 1
for rest in os.listdir(directory):
    if rest.startswith(f"foreign-{me}-"):
        try:
            os.unlink(os.path.join(directory, rest))
        except IsADirectoryError:
            os.rmdir(os.path.join(directory, rest))
sys.stdout.write(json.dumps(counts))
"""

#: Opens a file in a mode, tells so, and writes to it and ends when its input does.
_HOLDER = """
import os, sys
os.chdir(sys.argv[3])
file = open(sys.argv[1], sys.argv[2]) if sys.argv[1] else None
os.write(1, b"ready\\n")
sys.stdin.read()
if file is not None and "r" not in sys.argv[2]:
    file.write("written later\\n")
    file.flush()
"""


@contextlib.contextmanager
def program(code: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready, and is ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[bytes]) -> bytes:
    """End its input; what it said. It has to end."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    return out


def plant(root: Path, text: str) -> None:
    for number in range(150):
        path = root / "busy" / f"d{number % 3}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text * (number % 5 + 1))


def test_a_restore_in_directories_that_others_hammer(here: Site) -> None:
    """No deadlock; a foreign call is done or gets EBUSY; the result is the target, and others' work elsewhere."""
    plant(here.project, "one\n")
    (here.project / "aside").mkdir()
    here.mount()
    allowed = {errno.EBUSY, errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(here.project / "busy")
        plant(here.project, "two\n")
        for number in range(40):
            (here.project / "busy" / "d0" / f"new{number}").write_text("new")
        second = workspace.checkpoint().id
        after = describe(here.project / "busy")
        busy_calls = 0
        with contextlib.ExitStack() as stack:
            hammers = [
                stack.enter_context(program(_HAMMER, kind, here.project / "busy" / f"d{number % 3}", str(number)))
                for number, kind in enumerate(["create", "rename", "mkdir", "read"])
            ]
            aside = stack.enter_context(program(_HAMMER, "create", here.project / "aside", "aside"))
            done = 0
            for snapshot in (first, second, first):
                # Files that others make at the very moment of the plan have a writer: that is a refusal, not a fault.
                deadline = time.monotonic() + PATIENCE
                while True:
                    restore = Aside(lambda s=snapshot: workspace.restore(s, [b"busy"], force=True))  # type: ignore[misc]
                    restore.join()
                    if restore.error is None:
                        break
                    assert isinstance(restore.error, Busy), restore.error
                    assert time.monotonic() < deadline
                done += 1
            for hammer in (*hammers, aside):
                counts = json.loads(finish(hammer))
                assert counts.pop("done") > 0, counts
                busy_calls += counts.get(str(errno.EBUSY), 0)
                if hammer is aside:
                    # What the restore does not touch goes on as ever.
                    assert not counts
                assert {int(number) for number in counts} <= allowed, counts
        assert done == 3
        assert busy_calls > 0
        found = describe(here.project / "busy")
        strangers = {path for path in found if b"foreign-" in path}
        assert not differences(found, before, strangers), here.log_tail()
        # Whoever came before the restore's cut and was in nobody's snapshot is gone or was there after it; none stays.
        workspace.restore(first, [b"busy"], force=True)
        assert not differences(describe(here.project / "busy"), before)
        workspace.restore(second, [b"busy"])
        assert not differences(describe(here.project / "busy"), after)
        assert not differences(of_snapshot(workspace.checkpoint()), describe(here.project), [b""])


def test_a_create_that_is_held_where_the_restore_renames(here: Site) -> None:
    """Threads that are always within a create, in the one directory in which everything is restored."""
    directory = here.project / "d"
    directory.mkdir()
    for number in range(400):
        (directory / f"f{number}").write_text("one")
    here.mount()
    outcomes: set[int] = set()
    ended = threading.Event()

    def create(me: int) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            path = directory / f"foreign-{me}-{number}"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                os.unlink(path)
                outcomes.add(0)
            except OSError as error:
                assert error.errno is not None
                outcomes.add(error.errno)
                # It could be made and not be removed any more, or the restore has removed it.
                with contextlib.suppress(OSError):
                    os.unlink(path)

    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        before = describe(here.project)
        for number in range(400):
            (directory / f"f{number}").write_text("two")
        others = [Aside(lambda n=me: create(n)) for me in range(4)]  # type: ignore[misc]
        try:
            restore = Aside(lambda: workspace.restore(first, force=True))
            restore.join()
        finally:
            ended.set()
        for other in others:
            other.join()
        assert restore.error is None, restore.error
        assert outcomes <= {0, errno.EBUSY, errno.ENOENT}
        assert 0 in outcomes
        found = describe(here.project)
        assert not differences(found, before, [path for path in found if b"foreign-" in path])
        workspace.restore(first)
        assert not differences(describe(here.project), before)


#: Makes files in a directory as soon as it is there, and tells which it made, until its input ends.
_MAKER = """
import os, select, sys
os.write(1, b"ready\\n")
made = set()
while not select.select([0], [], [], 0)[0]:
    for number in range(0, 1000, 3):
        try:
            with open(os.path.join(sys.argv[1], f"f{number}"), "x") as file:
                file.write("foreign")
            made.add(number)
        except OSError:
            pass
sys.stdout.write(" ".join(map(str, sorted(made))))
"""


def test_nothing_that_others_make_in_a_directory_that_the_restore_makes_is_lost(here: Site) -> None:
    new = here.project / "new"
    new.mkdir()
    for number in range(1000):
        (new / f"f{number}").write_text("ours")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint()
        for path in new.iterdir():
            path.unlink()
        new.rmdir()
        workspace.checkpoint()
        with program(_MAKER, new) as maker:
            report = workspace.restore(first.id)
            made = finish(maker).split()
        assert made == []
        assert len(report.restored) == 1001
        assert not differences(describe(here.project), of_snapshot(first), [b""])


def test_work_elsewhere_goes_on_while_a_restore_frees_inode_numbers() -> None:
    """A filesystem like ext4 gives the number of a file that was just deleted to the next one that is made."""
    base = Path(tempfile.mkdtemp(prefix="cogfs-e2e-"))
    place = Site(base)
    try:
        for name in ("d", "aside"):
            (place.project / name).mkdir()
        place.mount()
        with place.client() as cog:
            workspace = place.workspace(cog)
            first = workspace.checkpoint()
            for number in range(600):
                (place.project / "d" / f"f{number}").touch()
            with program(_HAMMER, "create", place.project / "aside", "aside") as hammer:
                workspace.restore(first.id, [b"d"])
                counts = json.loads(finish(hammer))
        assert set(counts) == {"done"}
    finally:
        place.close()


def test_nobody_opens_a_file_for_writing_that_is_being_replaced(here: Site) -> None:
    """Otherwise it would write into the old file, and the restore would have said that nobody did."""
    for number in range(50):
        (here.project / f"f{number}").write_text("one\n")
    (here.project / "same").write_text("same\n")
    here.mount()
    with here.client() as cog:
        first = here.workspace(cog).checkpoint().id
        for number in range(50):
            (here.project / f"f{number}").write_text("two\n")
    here.kill_daemon()
    here.start("restore.rename:20")
    with here.client() as cog, pytest.raises(Unavailable):
        here.workspace(cog).restore(first)
    # The daemon is gone in the midst of it, and the guard stands.
    old = [number for number in range(50) if (here.project / f"f{number}").read_text() == "two\n"]
    assert 20 < len(old) < 40
    for number in old:
        with pytest.raises(OSError, match="busy"):
            os.open(here.project / f"f{number}", os.O_WRONLY | os.O_APPEND)
    with (here.project / "same").open("a") as file:
        file.write("and more\n")
    here.ctl("status", here.project)
    here.daemon_pid()
    with here.client() as cog:
        here.settled(cog)
        assert {(here.project / f"f{number}").read_text() for number in range(50)} == {"one\n"}
        assert (here.project / "same").read_text() == "same\nand more\n"
        with (here.project / "f9").open("a") as file:
            file.write("and more\n")
        assert (here.project / "f9").read_text() == "one\nand more\n"


@pytest.mark.parametrize("then", ["changed", "deleted"])
def test_a_writer_is_named_and_refuses(here: Site, then: str) -> None:
    (here.project / "src").mkdir()
    held = here.project / "src" / "held.txt"
    if then == "changed":
        held.write_text("one\n")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        thread = cog.create_thread(workspace=workspace)
        thread.append("system", "begin")
        message = thread.user_message("one")
        before = describe(here.project)
        held.write_text("two\n")
        with program(_HOLDER, held, "a", "/") as holder:
            after = describe(here.project)
            plan = workspace.restore(message.file_checkpoint.snapshot_id, dry_run=True)
            assert plan.busy
            (one,) = plan.busy_by
            assert (one.path, one.pid) == (b"src/held.txt", holder.pid)
            assert one.command.startswith("python")
            outcome = here.ctl(
                "restore", message.file_checkpoint.snapshot_id, "--yes", "--json", code=Busy.reason.exit_code
            )
            assert f"{holder.pid}" in outcome.out + outcome.err
            assert "src/held.txt" in outcome.out + outcome.err
            with pytest.raises(WorkspaceBusy):
                thread.rewind(message.parent_id, files=True)
            assert thread.refresh().message.leaf_id == message.id
            assert not differences(describe(here.project), after)
            report = workspace.restore(message.file_checkpoint.snapshot_id, force=True)
            assert [(forced.path, forced.pid) for forced in report.forced] == [(b"src/held.txt", holder.pid)]
            assert not differences(describe(here.project), before)
            finish(holder)
        # What it wrote went to the file that it held, not to the one that stands there now.
        assert not differences(describe(here.project), before)
        (here.project / "src").rename(here.project / "src2")
        (here.project / "src2").rename(here.project / "src")
        workspace.undo()
        assert not differences(describe(here.project), after)


def test_a_reader_is_told_of_and_does_not_refuse(here: Site) -> None:
    held = here.project / "held.txt"
    held.write_text("one\n")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        held.write_text("two\n")
        with program(_HOLDER, held, "r", "/") as holder:
            plan = workspace.restore(first, dry_run=True)
            assert not plan.busy
            assert [one.pid for one in plan.busy_by] == [holder.pid]
            workspace.restore(first)
            assert held.read_text() == "one\n"


def test_a_working_directory_that_would_go_refuses(here: Site) -> None:
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        inner = here.project / "new" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text("x")
        before = describe(here.project)
        with program(_HOLDER, "", "r", inner) as sitter:
            plan = workspace.restore(first, dry_run=True)
            assert plan.busy
            assert [(one.path, one.pid) for one in plan.busy_by] == [(b"new/inner", sitter.pid)]
            with pytest.raises(Busy, match="python"):
                workspace.restore(first)
            assert not differences(describe(here.project), before)
        workspace.restore(first)
        assert not list(here.project.iterdir())


def test_a_shared_map_counts_as_a_writer(here: Site) -> None:
    held = here.project / "mapped"
    held.write_bytes(b"a" * 8192)
    here.mount()
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "view = mmap.mmap(fd, 8192)\n"
        "os.close(fd)\n"
        "view[:4] = b'mmap'\n"
        "os.write(1, b'ready\\n')\n"
        "sys.stdin.read()\n"
    )
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint().id
        with program(code, held) as holder:
            taken = workspace.checkpoint()
            assert b"".join(taken.cat("mapped")).startswith(b"mmap")
            with pytest.raises(Busy, match=r"mapped|python"):
                workspace.restore(first)
            assert [one.pid for one in workspace.restore(first, dry_run=True).busy_by] == [holder.pid]
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
        workspace.restore(first)
        assert held.read_bytes() == b"a" * 8192
