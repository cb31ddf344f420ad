"""A daemon of a user without any privilege: mounts by fusermount3, in a mount namespace with a /dev/fuse for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.v1 import workspace_pb2
from cogfs.v1.reasons import Reason
from tests.control.harness import PATIENCE, Daemon, processes, refused, wait_for

USER = 65534
DEVICES = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 444 /dev/urandom c 1 9 && "
DEVICES += "mknod -m 666 /dev/fuse c 10 229 && "
DROP = f"setpriv --reuid={USER} --regid={USER} --clear-groups"


class Inside:
    """Programs of the daemon's user, in the daemon's mount namespace."""

    def __init__(self, daemon: Daemon) -> None:
        assert daemon.process is not None
        self._base = daemon.base
        self._prefix = ["nsenter", "-t", str(daemon.process.pid), "-m", *DROP.split()]

    def run(self, script: str) -> str:
        done = subprocess.run(
            [*self._prefix, "sh", "-ec", script], check=True, capture_output=True, text=True, timeout=PATIENCE
        )
        return done.stdout

    def hold(self, path: Path) -> subprocess.Popen[str]:
        script = f"import os; f = open({str(path)!r}, 'r+'); print(os.getpid(), flush=True); input()"
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def mounts(self) -> list[str]:
        return [line for line in self.run("cat /proc/self/mountinfo").splitlines() if f" {self._base}/" in line]


@pytest.fixture
def users(idle: Daemon, project: Path) -> Iterator[Daemon]:
    subprocess.run(["chown", "-R", f"{USER}:{USER}", str(idle.base)], check=True)
    idle.log.touch()
    idle.start(prefix=("unshare", "-m", "--propagation", "slave", "sh", "-c", DEVICES + f'exec {DROP} "$@"', "sh"))
    yield idle
    for pid in processes(idle.base):
        os.kill(pid, signal.SIGKILL)


def test_the_whole_life_of_a_mount(users: Daemon, project: Path) -> None:
    inside = Inside(users)
    file = project / "src" / "a.txt"
    workspace = users.mount(project)
    assert workspace.state == workspace_pb2.Workspace.ACTIVE
    assert len(inside.mounts()) == 1
    assert inside.run(f"cat {file}; echo two >> {file}; cat {file}") == "one\none\ntwo\n"

    holder = inside.hold(file)
    try:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        with refused(Reason.BUSY) as found:
            users.unmount(project)
        (who,) = json.loads(found[0].metadata["busy_by"])
        assert (who["pid"], who["path"], who["access"]) == (pid, "src/a.txt", "WRITE")

        os.kill(workspace.worker_pid, signal.SIGKILL)
        again = users.mount(project)
        assert again.worker_pid not in (0, workspace.worker_pid)
        assert len(inside.mounts()) == 1
        assert inside.run(f"cat {file}") == "one\ntwo\n"
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE)

    holder = inside.hold(file)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        users.unmount(project, force=True)
        assert not inside.mounts()
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE)
    wait_for("the worker ends", lambda: not processes(users.base))

    users.mount(project)
    assert users.unmount(project).state == workspace_pb2.Workspace.DETACHED
    assert not inside.mounts()
    assert not processes(users.base)
    assert users.terminate() == 0
    assert file.read_text() == "one\ntwo\n"
