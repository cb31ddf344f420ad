"""``kill -9`` of cogfsd or of a mount worker while programs work in the mount: what they notice, and what is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from cogfs.client import CogfsError
from tests.e2e.support.site import PATIENCE, Aside, Site, State, kill, wait_for
from tests.support.tree import describe, differences, of_snapshot

_FILES = 1500
_LINES = 3000

#: Appends lines to a file, and now and then makes, renames and removes others; fails at the first call that fails.
_WRITER = f"""
import os, sys, time
os.chdir(sys.argv[1])
with open("lines", "a", buffering=1) as file:
    for number in range({_LINES}):
        while number == {_LINES} // 2 and not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        file.write(f"line {{number}}\\n")
        if number % 10 == 0:
            with open(f"made{{number}}", "w") as other:
                other.write("x" * number)
            os.rename(f"made{{number}}", f"kept{{number}}")
        if number % 20 == 0:
            os.unlink(f"kept{{number}}")
            time.sleep(0.01)
"""


def make_archive(base: Path) -> tuple[Path, Path]:
    """A tree of ``_FILES`` files outside any mount, and an archive of it."""
    tree = base / "tree"
    for number in range(_FILES):
        path = tree / f"d{number % 30}" / f"e{number % 11}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(16) * (number % 500))
        path.chmod(0o755 if number % 5 == 0 else 0o644)
        if number % 50 == 0:
            os.link(path, tree / f"hard{number}")
            (tree / f"soft{number}").symlink_to(f"hard{number}")
    archive = base / "tree.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tree, ".")
    return tree, archive


def check_lines(path: Path) -> None:
    assert path.read_text() == "".join(f"line {number}\n" for number in range(_LINES))
    assert sorted(os.listdir(path.parent)) == sorted(
        ["lines", *(f"kept{number}" for number in range(_LINES) if number % 10 == 0 and number % 20)]
    )


def spawn_writer(directory: Path, goes_on: Path = Path("/")) -> subprocess.Popen[bytes]:
    """A program that writes; when it is half done it waits for ``goes_on`` to be there."""
    directory.mkdir()
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(directory), str(goes_on)], stderr=subprocess.PIPE)


def test_programs_do_not_notice_that_the_daemon_is_killed(here: Site) -> None:
    tree, archive = make_archive(here.base)
    (here.project / "old").write_text("old\n")
    here.mount()
    with here.client() as cog:
        first = here.workspace(cog).checkpoint("before")
    worker = here.worker_pid()
    target = here.project / "unpacked"
    target.mkdir()
    tar = subprocess.Popen(["tar", "xpf", str(archive), "-C", str(target)], stderr=subprocess.PIPE)
    goes_on = here.base / "go on"
    writer = spawn_writer(here.project / "written", goes_on)
    try:
        kills = 0
        while tar.poll() is None or writer.poll() is None:
            time.sleep(0.1)
            here.kill_daemon()
            kills += 1
            if kills == 3:
                goes_on.touch()
            # While nobody is there, once; then the next call brings one, which takes the worker over.
            time.sleep(0.2)
            here.ctl("status", here.project)
            with here.client() as cog:
                here.settled(cog)
                here.workspace(cog).checkpoint(f"during {kills}")
        for program in (tar, writer):
            assert program.wait(PATIENCE) == 0, program.communicate()[1].decode()
    finally:
        for program in (tar, writer):
            program.kill()
            program.communicate()
    assert kills >= 3
    assert here.worker_pid() == worker
    assert not differences(describe(target), describe(tree))
    check_lines(here.project / "written" / "lines")
    with here.client() as cog:
        last = here.workspace(cog).checkpoint("after")
        assert not differences(of_snapshot(last), describe(here.project), [b""])
        here.workspace(cog).restore(first.id)
    assert os.listdir(here.project) == ["old"]


def brought_back(here: Site, dead: int, by_hand: bool) -> None:
    """The workspace is served by another worker."""
    if by_hand:
        here.ctl("mount", here.project)

    def served() -> bool:
        with here.client() as cog:
            message = here.workspace(cog).message
        return message.state == State.ACTIVE and message.worker_pid != dead

    wait_for("another worker serves", served)


@pytest.mark.parametrize("by_hand", [False, True], ids=["by-itself", "mount"])
def test_worker_killed_while_idle(here: Site, by_hand: bool) -> None:
    for number in range(300):
        (here.project / f"f{number}").write_text(str(number))
    here.mount()
    with here.client() as cog:
        here.workspace(cog).checkpoint()
    (here.project / "f7").write_text("not in a snapshot yet")
    (here.project / "f8").unlink()
    before = describe(here.project)
    inode = os.stat(here.project / "f1").st_ino
    held = os.open(here.project / "f9", os.O_WRONLY | os.O_APPEND)
    worker = here.worker_pid()
    kill(worker)
    brought_back(here, worker, by_hand)
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.write(held, b"lost")
    with contextlib.suppress(OSError):
        os.close(held)
    assert not differences(describe(here.project), before)
    assert os.stat(here.project / "f1").st_ino == inode
    with here.client() as cog:
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), before, [b""])


def test_worker_and_daemon_killed_together(here: Site) -> None:
    (here.project / "a").write_text("a")
    here.mount()
    with here.client() as cog:
        here.workspace(cog).checkpoint()
    (here.project / "b").write_text("b")
    worker = here.worker_pid()
    here.kill_daemon()
    kill(worker)
    with pytest.raises(OSError):
        os.statvfs(here.project)
    here.ctl("status", here.project)
    here.daemon_pid()
    brought_back(here, worker, by_hand=False)
    with here.client() as cog:
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), describe(here.project), [b""])


def test_worker_killed_while_programs_write(here: Site) -> None:
    """A program sees an error, and what the calls before it wrote is all there."""
    here.mount()
    worker = here.worker_pid()
    writer = spawn_writer(here.project / "written")
    try:
        lines = here.project / "written" / "lines"
        wait_for("it writes", lambda: lines.exists() and lines.stat().st_size > 1000)
        kill(worker)
        assert writer.wait(PATIENCE) != 0
        assert b"[Errno " in writer.communicate()[1]
    finally:
        writer.kill()
        writer.wait()
    brought_back(here, worker, by_hand=False)
    written = lines.read_text().splitlines()
    assert len(written) > 50
    # The last write may have been carried out without an answer; none before it is missing, none is torn.
    assert written == [f"line {number}" for number in range(len(written))]
    for number in range(0, len(written) - 1, 10):
        assert (here.project / "written" / f"kept{number}").exists() == (number % 20 != 0)
    with here.client() as cog:
        assert not differences(of_snapshot(here.workspace(cog).checkpoint()), describe(here.project), [b""])


def test_worker_killed_during_a_checkpoint(here: Site) -> None:
    for number in range(400):
        (here.project / f"f{number}").write_bytes(os.urandom(20_000))
    before = describe(here.project)
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread(workspace=here.workspace(cog))
        for round_ in range(3):
            for number in range(400):
                (here.project / f"f{number}").write_bytes(os.urandom(20_000))
            before = describe(here.project)
            worker = here.worker_pid()
            message = Aside(lambda n=round_: thread.user_message("x", id=f"m{n}", require_checkpoint=True))  # type: ignore[misc]
            time.sleep(0.05 * (round_ + 1))
            kill(worker)
            message.join()
            brought_back(here, worker, by_hand=True)
            # Recorded or not, as it was answered; and what is recorded is right.
            entries = [entry for entry in thread.entries() if entry.id == f"m{round_}"]
            assert bool(entries) == (message.error is None), message.error
            for entry in entries:
                taken = cog.snapshot(entry.file_checkpoint.snapshot_id)
                assert not differences(of_snapshot(taken), before, [b""])
            assert not differences(describe(here.project), before)
            assert not differences(of_snapshot(here.workspace(cog).checkpoint()), before, [b""])


def test_worker_killed_during_a_restore(here: Site) -> None:
    """It is finished, or it was not begun; and what is said of it is so."""
    for number in range(600):
        (here.project / f"d{number % 10}").mkdir(exist_ok=True)
        (here.project / f"d{number % 10}" / f"f{number}").write_text(f"{number}\n" * 50)
    here.mount()
    finished = 0
    with here.client() as cog:
        workspace = here.workspace(cog)
        states = [(workspace.checkpoint().id, describe(here.project))]
        for number in range(600):
            (here.project / f"d{number % 10}" / f"f{number}").write_text("other\n" * (number % 7 + 1))
        states.append((workspace.checkpoint().id, describe(here.project)))
        now = 1
        begun = time.monotonic()
        workspace.restore(states[0][0])
        duration = time.monotonic() - begun
        now = 0
        # Three moments at least, and more of them where none was between the beginning and the end.
        for number, share in enumerate((0.4, 0.6, 0.9, *(0.5, 0.7, 0.8, 0.95, 0.75, 0.85) * 4)):
            if finished and number >= 3:
                break
            snapshot, tree = states[1 - now]
            worker = here.worker_pid()
            # The handles of a client hang in no mount: the call returns whatever becomes of the worker.
            restore = Aside(lambda: workspace.restore(snapshot))  # noqa: B023
            time.sleep(share * duration)
            kill(worker)
            restore.join()
            brought_back(here, worker, by_hand=False)
            found = describe(here.project)
            if differences(found, tree):
                assert not differences(found, states[now][1]), here.log_tail()
                assert isinstance(restore.error, CogfsError)
            else:
                recovery = here.workspace(cog).message.last_recovery
                assert restore.error is None or recovery.target_snapshot_id == snapshot
                finished += restore.error is not None
                now = 1 - now
            assert not differences(of_snapshot(workspace.checkpoint()), found, [b""])
    assert finished, "no restore was interrupted after it had begun"
