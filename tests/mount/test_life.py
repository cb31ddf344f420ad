"""Start, end, and what does not end a worker."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pyfuse3
import pytest
import trio

from cogfs.fsd.mount.loop import BurstLoop, supported
from tests.mount.conftest import Start
from tests.support.worker_client import MountedWorker, unmount


def test_unmount_ends_the_worker(worker: MountedWorker) -> None:
    assert stat.S_IMODE(worker.socket.stat().st_mode) == 0o600
    (worker.mountpoint / "f").write_text("x")
    assert worker.unmount() == 0
    assert not worker.socket.exists()
    assert (worker.root / "f").read_text() == "x"
    assert os.listdir(worker.mountpoint) == []


def test_sigterm_unmounts(worker: MountedWorker) -> None:
    worker.process.terminate()
    assert worker.process.wait(180) == 0
    assert not os.path.ismount(worker.mountpoint)
    assert not worker.socket.exists()


def test_sigterm_leaves_a_mount_in_use(worker: MountedWorker) -> None:
    with (worker.mountpoint / "f").open("w") as file:
        worker.process.terminate()
        with worker.connect() as client:
            client.resume()
        file.write("still served")
        file.flush()
        assert (worker.root / "f").read_text() == "still served"
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(0.3)
    worker.process.terminate()
    assert worker.process.wait(180) == 0


def test_lazy_unmount_serves_to_the_last(worker: MountedWorker) -> None:
    with (worker.mountpoint / "f").open("w+") as file:
        unmount(worker.mountpoint, lazy=True)
        file.write("x")
        file.flush()
        assert worker.process.poll() is None
    assert worker.process.wait(180) == 0
    assert (worker.root / "f").read_text() == "x"


def test_killed_worker_is_replaced(worker: MountedWorker) -> None:
    """What was written is there; the socket and the dead mount are taken away."""
    (worker.mountpoint / "f").write_text("written")
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(180)
    with pytest.raises(OSError) as caught:
        (worker.mountpoint / "f").read_text()
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert worker.socket.exists()
    unmount(worker.mountpoint, lazy=True)
    worker.start()
    assert (worker.mountpoint / "f").read_text() == "written"
    with worker.connect() as client:
        assert not client.freeze().complete
        client.resume()


@pytest.mark.parametrize(
    ("argument", "value", "number"),
    [
        ("root", "missing", errno.ENOENT),
        ("root", "file", errno.ENOTDIR),
        ("root", "link", errno.ENOTDIR),
        ("mountpoint", "file", errno.ENOTDIR),
        ("mountpoint", "missing", errno.ENOTDIR),
        ("socket", "file", errno.EADDRINUSE),
        ("socket", "taken", errno.EADDRINUSE),
    ],
)
def test_start_that_fails_says_why(start: Start, tmp_path: Path, argument: str, value: str, number: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("dir")
    worker = start(faulty=True)
    assert worker.unmount() == 0
    setattr(worker, argument, tmp_path / value)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "taken"))
        other.listen()
        process, ready = worker.spawn()
        assert process.wait(180) == 1
    assert (ready["ok"], ready["errno"]) == (False, number)
    assert str(tmp_path / value) in str(ready["message"])
    worker.mountpoint = worker.directory / "mount"
    assert not os.path.ismount(worker.mountpoint)


def test_a_fault_in_a_handler_is_an_error_of_that_call_only(start: Start, tmp_path: Path) -> None:
    """Whatever a handler raises becomes EIO and a log record with its traceback, and the mount goes on."""
    broken = tmp_path / "python"
    code = (
        "import sys; from cogfs.fsd.mount import tree, worker\n"
        "def fail(*_): raise ZeroDivisionError('on purpose')\n"
        "tree.Tree.make_link = tree.Tree.read_link = fail\n"
        "sys.exit(worker.main(sys.argv[3:]))"
    )
    (tmp_path / "code.py").write_text(code)
    broken.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/code.py" "$@"\n')
    broken.chmod(0o755)
    worker = start(faulty=True, python=str(broken))
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            (worker.mountpoint / "l").symlink_to("x")
        assert caught.value.errno == errno.EIO
    (worker.mountpoint / "f").write_text("still served")
    assert (worker.mountpoint / "f").read_text() == "still served"
    assert worker.errors() == ["the handler of symlink failed"] * 3
    assert "on purpose" in worker.log()


@pytest.mark.parametrize("arguments", [[], ["--stock-loop"]])
def test_both_loops_serve_many_at_once(start: Start, arguments: list[str]) -> None:
    worker = start(*arguments)
    script = 'for i in $(seq 40); do echo $i > "$0/$1-$i"; cat "$0/$1-$i" > /dev/null; ls "$0" > /dev/null; done'
    shells = [subprocess.Popen(["sh", "-c", script, worker.mountpoint, str(number)]) for number in range(6)]
    assert [shell.wait(180) for shell in shells] == [0] * 6
    assert len(os.listdir(worker.root)) == 240


def test_killed_callers_do_not_stop_the_mount(worker: MountedWorker) -> None:
    """A request whose caller dies may vanish between the poll and the read."""
    code = "import os,sys\nwhile True: os.path.lexists(sys.argv[1] + '/' + os.urandom(6).hex())"
    for _ in range(15):
        callers = [subprocess.Popen([sys.executable, "-S", "-c", code, worker.mountpoint]) for _ in range(3)]
        (worker.mountpoint / "f").write_text("x")
        for caller in callers:
            caller.kill()
        for caller in callers:
            caller.wait(180)
    with worker.connect() as client:
        client.resume()


def test_the_seam_is_as_expected() -> None:
    """The burst loop rests on these; another pyfuse3 must be looked at before it is used."""
    assert supported()
    loop = BurstLoop()
    try:
        loop.install()
        assert not supported()
        assert getattr(pyfuse3, "trio") is loop  # noqa: B009 (the stubs do not have it)
    finally:
        loop.uninstall()
    assert getattr(pyfuse3, "trio") is trio  # noqa: B009 (the stubs do not have it)
    for name in ("Lock", "ClosedResourceError", "open_nursery", "lowlevel"):
        assert hasattr(loop, name)
    for name in ("wait_readable", "current_task", "current_trio_token", "notify_closing"):
        assert hasattr(loop.lowlevel, name)


def test_burst_loop_is_used(worker: MountedWorker) -> None:
    assert "its own loop is used" not in worker.log()


def test_a_large_file_is_let_go_in_the_end(worker: MountedWorker) -> None:
    """Its descriptors are closed by a thread, so nothing says when."""
    path = worker.mountpoint / "f"
    for size in (1 << 20, 9 << 20):
        data = bytes(size)
        for _ in range(3):
            path.write_bytes(data)
        _comes_to_hold_nothing(worker)
        with open(path, "rb") as held:
            path.unlink()
            assert len(held.read()) == size
        _comes_to_hold_nothing(worker)
        path.write_bytes(data)
        path.unlink()
        path.touch()
        _comes_to_hold_nothing(worker)
    path.write_bytes(bytes(9 << 20))
    assert worker.unmount() == 0


def _comes_to_hold_nothing(worker: MountedWorker) -> None:
    """No descriptor of a file, removed or not."""
    top = os.fsencode(worker.root / "f")
    end = time.monotonic() + 20
    while True:
        held = []
        for name in os.listdir(f"/proc/{worker.process.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                held.append(os.readlink(os.fsencode(f"/proc/{worker.process.pid}/fd/{name}")))
        if not any(one.startswith(top) for one in held):
            return
        assert time.monotonic() < end, held
        time.sleep(0.01)
