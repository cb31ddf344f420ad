"""Mount, unmount, and the lives and deaths of workers and daemons."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cogfs.fsd.control import mounts
from cogfs.v1 import workspace_pb2
from cogfs.v1.common_pb2 import BusyBy
from cogfs.v1.reasons import Reason
from tests.control.harness import PATIENCE, Daemon, cogfs_mounts, processes, refused, wait_for

ACTIVE = workspace_pb2.Workspace.ACTIVE
DETACHED = workspace_pb2.Workspace.DETACHED
DEAD = workspace_pb2.Workspace.DEAD


@contextmanager
def program(*command: str, cwd: Path | str = "/") -> Iterator[subprocess.Popen[str]]:
    """A program that runs until the end of the block; it has said one line when the block begins."""
    process = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def holder(path: Path, mode: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"f = open({str(path)!r}, {mode!r}); print('open', flush=True); input()")


#: Counts up in a file, by a new file renamed over it each time, and checks what it reads; says so at the end.
WRITER = """
import os, sys
print("begun", flush=True)
os.set_blocking(0, False)
count = 0
while not sys.stdin.buffer.read():
    count += 1
    with open("count.new", "w") as file:
        file.write(str(count))
    os.rename("count.new", "count")
    with open("count") as file:
        assert file.read() == str(count)
    with open("log", "a") as file:
        file.write(f"{count}\\n")
print(count, flush=True)
"""


@contextmanager
def working(directory: Path) -> Iterator[None]:
    """A program works in ``directory`` throughout the block, and none of its calls fails."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        seen = directory / "log"
        wait_for("the first write", seen.exists)
        yield
        before = seen.stat().st_size
        wait_for("another write", lambda: seen.stat().st_size > before)
        output, _ = process.communicate("stop\n", timeout=PATIENCE)
        assert process.returncode == 0
        count = int(output)
        assert (directory / "count").read_text() == str(count)
        assert (directory / "log").read_text() == "".join(f"{number}\n" for number in range(1, count + 1))
    finally:
        process.kill()
        process.wait(PATIENCE)


def nothing_left(daemon: Daemon) -> None:
    wait_for("no worker is left", lambda: not processes(daemon.base))
    assert not cogfs_mounts(daemon.base)
    assert not list((daemon.runtime / "workers").iterdir())


def test_mount_and_unmount_in_place(daemon: Daemon, project: Path) -> None:
    inode = (project / "src" / "a.txt").stat().st_ino
    workspace = daemon.mount(project)
    assert workspace.state == ACTIVE
    assert workspace.mountpoint == workspace.root == os.fsencode(project)
    assert processes(daemon.base) == [workspace.worker_pid]
    assert cogfs_mounts(daemon.base) == [os.fsencode(project)]
    assert (project / "src" / "a.txt").stat().st_ino == inode
    (project / "src" / "b.txt").write_text("two\n")
    assert daemon.get(project / "src" / "b.txt").id == workspace.id

    with refused(Reason.ALREADY_EXISTS):
        daemon.mount(project)
    with refused(Reason.ALREADY_EXISTS):
        daemon.workspaces.CreateWorkspace(workspace_pb2.CreateWorkspaceRequest(root=os.fsencode(project)))
    with refused(Reason.BUSY):
        daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest(workspace_id=workspace.id))

    answer = daemon.unmount(project)
    assert answer.state == DETACHED
    assert answer.worker_pid == 0
    nothing_left(daemon)
    assert (project / "src" / "b.txt").read_text() == "two\n"
    with refused(Reason.VALIDATION_ERROR):
        daemon.unmount(project)

    again = daemon.mount(project)
    assert again.id == workspace.id
    assert again.worker_pid != workspace.worker_pid
    daemon.unmount(project)
    daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest(workspace_id=workspace.id))
    nothing_left(daemon)


def test_mount_elsewhere(daemon: Daemon, project: Path) -> None:
    at = daemon.base / "at"
    workspace = daemon.mount(project, at)
    assert workspace.mountpoint == os.fsencode(at)
    (at / "src" / "b.txt").write_text("two\n")
    assert (project / "src" / "b.txt").read_text() == "two\n"
    for path in (at, at / "src", project, project / "src"):
        assert daemon.get(path).id == workspace.id
    for root in (at / "src", at):
        with refused(Reason.ALREADY_EXISTS if root == at else Reason.VALIDATION_ERROR):
            daemon.workspaces.CreateWorkspace(workspace_pb2.CreateWorkspaceRequest(root=os.fsencode(root)))
    with refused(Reason.ALREADY_EXISTS):
        daemon.mount(project)
    daemon.unmount(at)
    nothing_left(daemon)
    # The mountpoint of the past is nobody's.
    with refused(Reason.NOT_FOUND):
        daemon.get(at)
    other = daemon.mount(at)
    assert other.id != workspace.id
    assert daemon.mount(project).mountpoint == os.fsencode(project)


def test_a_root_in_a_mount_of_another_daemon(daemon: Daemon, project: Path) -> None:
    at = daemon.base / "at"
    daemon.mount(project, at)
    other = Daemon(daemon.base / "other")
    other.base.mkdir()
    try:
        other.start()
        for root, text in ((at, "in a mount of cogfs"), (at / "src", "in a mount of cogfs"), (at.parent, "holds")):
            with refused(Reason.VALIDATION_ERROR) as found:
                other.mount(root)
            assert text in found[0].message
        assert other.terminate() == 0
    finally:
        other.close()
    assert daemon.get(project).state == ACTIVE


def test_options_of_a_mount_take_the_place_of_the_old(daemon: Daemon, project: Path) -> None:
    request = workspace_pb2.MountRequest(
        root=os.fsencode(project), options=workspace_pb2.WorkspaceOptions(exclude=["*.log"], max_file_bytes=7)
    )
    workspace = daemon.workspaces.Mount(request)
    assert list(workspace.options.exclude) == ["*.log"]
    daemon.unmount(project)
    assert list(daemon.mount(project).options.exclude) == ["*.log"]
    with refused(Reason.ALREADY_EXISTS):
        daemon.workspaces.Mount(
            workspace_pb2.MountRequest(workspace_id=workspace.id, options=workspace_pb2.WorkspaceOptions())
        )
    assert list(daemon.get(project).options.exclude) == ["*.log"]


def test_handles_name_the_process(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    threaded = (
        "import threading, sys\n"
        "def run():\n    f = open('src/a.txt', 'a'); print('open', flush=True); sys.stdin.read()\n"
        "t = threading.Thread(target=run); t.start(); t.join()"
    )
    with program(sys.executable, "-c", threaded, cwd=project) as process:
        handles = daemon.workspaces.ListHandles(workspace_pb2.ListHandlesRequest(workspace_id=workspace.id)).handles
        (handle,) = [item for item in handles if not item.directory]
        assert handle.path == b"src/a.txt"
        assert handle.pid == process.pid
        assert handle.command == Path(f"/proc/{process.pid}/comm").read_text().strip()
        assert handle.access == BusyBy.WRITE
        assert handle.since.seconds > 0
        assert not handle.deleted
        (project / "src" / "a.txt").unlink()
        handles = daemon.workspaces.ListHandles(workspace_pb2.ListHandlesRequest(workspace_id=workspace.id)).handles
        assert [item.deleted for item in handles if not item.directory] == [True]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_unmount_names_who_has_a_file_open(daemon: Daemon, project: Path, mode: str) -> None:
    workspace = daemon.mount(project)
    with program(*holder(project / "src" / "a.txt", mode)) as process:
        with refused(Reason.BUSY) as found:
            daemon.unmount(project)
        assert f"(pid {process.pid})" in found[0].message
        (who,) = json.loads(found[0].metadata["busy_by"])
        assert who["kind"] == "HANDLE"
        assert who["path"] == "src/a.txt"
        assert who["pid"] == process.pid
        assert who["access"] == ("READ" if mode == "r" else "WRITE")
        assert daemon.get(project) == workspace
        assert (project / "src" / "a.txt").read_text() == "one\n"
    wait_for("the file is closed", lambda: not _handles(daemon, workspace.id))
    assert daemon.unmount(project).state == DETACHED
    nothing_left(daemon)


def test_unmount_names_who_works_in_it(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    with program("sh", "-c", "echo here; read line", cwd=project / "src") as process:
        with refused(Reason.BUSY) as found:
            daemon.unmount(project)
        (who,) = json.loads(found[0].metadata["busy_by"])
        assert (who["kind"], who["path"], who["pid"]) == ("WORKING_DIRECTORY", "src", process.pid)
        assert who["command"] == "sh"


def test_a_working_directory_below_the_mount_is_not_in_the_way(daemon: Daemon, project: Path) -> None:
    with program("sh", "-c", "echo here; read line", cwd=project / "src"):
        daemon.mount(project)
        daemon.unmount(project)
    nothing_left(daemon)


def test_unmount_names_a_mount_inside(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(project / "src")], check=True)
    try:
        with refused(Reason.BUSY) as found:
            daemon.unmount(project)
        assert f"tmpfs is mounted at {project / 'src'}" in found[0].message
    finally:
        subprocess.run(["umount", str(project / "src")], check=True)
    daemon.unmount(project)


def test_a_forced_unmount_leaves_users_what_they_have(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    script = (
        "f = open('src/a.txt', 'a+'); print('open', flush=True); input(); f.write('two\\n'); f.flush(); f.seek(0);"
        "print(repr(f.read()), flush=True); input()"
    )
    with program(sys.executable, "-c", script, cwd=project) as process:
        assert daemon.unmount(project, force=True).state == DETACHED
        assert not cogfs_mounts(daemon.base)
        # The workspace can be mounted again at once, while the old worker serves who is left.
        daemon.mount(project)
        assert len(processes(daemon.base)) == 2
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "'one\\ntwo\\n'\n"
    wait_for("the old worker ends with its last user", lambda: len(processes(daemon.base)) == 1)
    # What the old one does at its end takes nothing from the new one.
    daemon.kill()
    daemon.start()
    assert daemon.get(project).worker_pid == processes(daemon.base)[0]
    daemon.unmount(project)
    nothing_left(daemon)


def test_a_killed_worker_is_brought_back_by_itself(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    os.kill(workspace.worker_pid, signal.SIGKILL)
    wait_for("another worker", lambda: daemon.get(project).worker_pid not in (0, workspace.worker_pid))
    assert daemon.get(project).state == ACTIVE
    assert cogfs_mounts(daemon.base) == [os.fsencode(project)]
    assert (project / "src" / "a.txt").read_text() == "one\n"
    (project / "src" / "b.txt").write_text("two\n")
    # Whoever found it dead and asks for it now is not refused for being second, once.
    assert daemon.mount(project).state == ACTIVE
    with refused(Reason.ALREADY_EXISTS):
        daemon.mount(project)
    daemon.unmount(project)
    nothing_left(daemon)


def test_mount_brings_a_killed_worker_back(daemon: Daemon, project: Path) -> None:
    for _ in range(3):
        workspace = daemon.get(project) if cogfs_mounts(daemon.base) else daemon.mount(project)
        os.kill(workspace.worker_pid, signal.SIGKILL)
        again = daemon.mount(project)
        assert again.state == ACTIVE
        assert again.worker_pid != workspace.worker_pid
        assert (project / "src" / "a.txt").read_text() == "one\n"
    assert len(processes(daemon.base)) == 1


def test_a_worker_that_keeps_dying_is_given_up(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    pids = [workspace.worker_pid]
    for _ in range(4):
        os.kill(pids[-1], signal.SIGKILL)

        def settled() -> bool:
            found = daemon.get(project)
            return "4th time" in found.reason or found.worker_pid not in (0, pids[-1])

        wait_for("another worker, or none", settled)
        pids.append(daemon.get(project).worker_pid)
    found = daemon.get(project)
    assert found.state == DEAD
    assert "SIGKILL" in found.reason
    assert not cogfs_mounts(daemon.base)
    assert (project / "src" / "a.txt").read_text() == "one\n"
    assert daemon.mount(project).state == ACTIVE
    assert daemon.get(project).id == workspace.id


def test_a_stopped_worker_is_not_taken_for_dead(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    os.kill(workspace.worker_pid, signal.SIGSTOP)
    try:
        assert daemon.get(project).state == ACTIVE
    finally:
        os.kill(workspace.worker_pid, signal.SIGCONT)
    daemon.unmount(project)
    nothing_left(daemon)


def test_a_stuck_worker_does_not_hold_an_unmount(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    os.kill(workspace.worker_pid, signal.SIGSTOP)
    assert daemon.unmount(project).state == DETACHED
    nothing_left(daemon)
    assert (project / "src" / "a.txt").read_text() == "one\n"


def test_a_stuck_worker_does_not_hold_a_stop(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    with program("sh", "-c", "echo here; read line", cwd=project) as process:
        os.kill(workspace.worker_pid, signal.SIGSTOP)
        try:
            assert daemon.terminate() == 0
            assert not cogfs_mounts(daemon.base)
            assert f"(pid {process.pid})" in daemon.log.read_text()
        finally:
            os.kill(workspace.worker_pid, signal.SIGCONT)
    nothing_left(daemon)


def test_a_killed_daemon_is_not_noticed_in_the_mount(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    with working(project):
        for _ in range(3):
            daemon.kill()
            (project / "while-away").write_text("x")
            daemon.start()
            found = daemon.get(project)
            assert (found.state, found.worker_pid) == (ACTIVE, workspace.worker_pid)
            with refused(Reason.ALREADY_EXISTS):
                daemon.mount(project)
    daemon.unmount(project)
    nothing_left(daemon)


def test_a_daemon_killed_at_any_moment_of_a_mount(daemon: Daemon, project: Path) -> None:
    """Each time the next one has the workspace, with one worker and one mount, or it is not mounted at all."""
    chance = random.Random(1)
    seen: set[object] = set()
    for _ in range(12):
        stub = daemon.workspaces
        call = stub.Mount.future(workspace_pb2.MountRequest(root=os.fsencode(project)))
        time.sleep(chance.uniform(0.0, 0.5))
        daemon.kill()
        call.exception()
        daemon.start()
        rows = daemon.workspaces.ListWorkspaces(workspace_pb2.ListWorkspacesRequest()).workspaces
        seen.update(row.state for row in rows)
        for row in rows:
            assert row.state in (ACTIVE, DETACHED), row.reason
            mounted = row.state == ACTIVE
            assert cogfs_mounts(daemon.base) == [os.fsencode(project)] * mounted
            assert processes(daemon.base) == [row.worker_pid] * mounted
            if mounted:
                daemon.unmount(project)
        assert (project / "src" / "a.txt").read_text() == "one\n"
        nothing_left(daemon)
        for row in rows:
            daemon.workspaces.DeleteWorkspace(workspace_pb2.DeleteWorkspaceRequest(workspace_id=row.id))
    assert ACTIVE in seen


def test_names_of_any_bytes(daemon: Daemon) -> None:
    root = os.fsencode(daemon.base) + b"/caf\xe9 \\040,x\t\n\xff"
    os.mkdir(root)
    workspace = daemon.workspaces.Mount(workspace_pb2.MountRequest(root=root))
    assert (workspace.state, workspace.mountpoint) == (ACTIVE, root)
    assert cogfs_mounts(daemon.base) == [root]
    with open(root + b"/file", "wb") as file:
        file.write(b"x")
        with refused(Reason.BUSY) as found:
            daemon.workspaces.Unmount(workspace_pb2.UnmountRequest(root=root))
        assert json.loads(found[0].metadata["busy_by"])[0]["path"] == "file"
    os.kill(workspace.worker_pid, signal.SIGKILL)
    assert daemon.workspaces.Mount(workspace_pb2.MountRequest(root=root)).state == ACTIVE
    daemon.workspaces.Unmount(workspace_pb2.UnmountRequest(workspace_id=workspace.id))
    nothing_left(daemon)


def test_a_stuck_worker_is_replaced_by_the_next_daemon(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    daemon.kill()
    os.kill(workspace.worker_pid, signal.SIGSTOP)
    daemon.start()
    wait_for("another worker", lambda: daemon.get(project).state == ACTIVE)
    assert processes(daemon.base) == [daemon.get(project).worker_pid] != [workspace.worker_pid]
    assert (project / "src" / "a.txt").read_text() == "one\n"


def test_a_worker_that_died_while_no_daemon_ran(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    daemon.kill()
    os.kill(workspace.worker_pid, signal.SIGKILL)
    wait_for("the mount is dead", lambda: mounts.is_dead(os.fsencode(project)))
    daemon.start()
    found = daemon.get(project)
    assert found.state == ACTIVE
    assert found.worker_pid != workspace.worker_pid
    assert cogfs_mounts(daemon.base) == [os.fsencode(project)]
    assert (project / "src" / "a.txt").read_text() == "one\n"


def test_a_mount_that_is_gone_is_made_again(daemon: Daemon, project: Path) -> None:
    """As after a start of the machine."""
    daemon.mount(project)
    daemon.kill()
    mounts.unmount(os.fsencode(project), lazy=False)
    wait_for("the worker ends", lambda: not processes(daemon.base))
    daemon.start()
    assert daemon.get(project).state == ACTIVE
    daemon.unmount(project)
    daemon.kill()
    daemon.start()
    assert daemon.get(project).state == DETACHED
    nothing_left(daemon)


def test_a_root_that_is_gone_is_told(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    assert daemon.terminate() == 0
    project.rename(daemon.base / "moved")
    daemon.start()
    found = daemon.get(project)
    assert found.state == DEAD
    assert "does not exist" in found.reason
    with refused(Reason.VALIDATION_ERROR):
        daemon.mount(project)
    assert daemon.unmount(project).state == DETACHED
    nothing_left(daemon)


def test_sigterm_unmounts_and_the_next_daemon_mounts_again(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    assert daemon.terminate() == 0
    nothing_left(daemon)
    daemon.start()
    assert daemon.get(project).state == ACTIVE


def test_sigterm_leaves_mounts_when_told(idle: Daemon, project: Path) -> None:
    idle.start("--leave-mounts")
    workspace = idle.mount(project)
    with working(project):
        assert idle.terminate() == 0
        assert cogfs_mounts(idle.base) == [os.fsencode(project)]
        idle.start("--leave-mounts")
        assert idle.get(project).worker_pid == workspace.worker_pid
    idle.unmount(project)
    nothing_left(idle)


def test_sigterm_does_not_wait_for_users(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    with program(*holder(project / "src" / "a.txt", "r+"), cwd=project) as process:
        assert daemon.terminate() == 0
        assert not cogfs_mounts(daemon.base)
        assert f"(pid {process.pid})" in daemon.log.read_text()
    nothing_left(daemon)


def test_a_stop_waits_for_calls_under_way(daemon: Daemon, project: Path) -> None:
    results: list[workspace_pb2.Workspace] = []
    thread = threading.Thread(target=lambda: results.append(daemon.mount(project)))
    thread.start()
    wait_for("the worker is on its way", lambda: processes(daemon.base))
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    thread.join(PATIENCE)
    assert daemon.process.wait(PATIENCE) == 0
    assert results[0].state == ACTIVE
    nothing_left(daemon)


def test_many_mounts_at_once_make_one(daemon: Daemon, project: Path) -> None:
    states: list[object] = []

    def mount() -> None:
        try:
            states.append(daemon.mount(project).state)
        except AssertionError:
            raise
        except Exception as error:
            states.append(type(error).__name__)

    threads = [threading.Thread(target=mount) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert states.count(ACTIVE) == 1
    assert len(states) == 8
    assert len(processes(daemon.base)) == 1
    assert len(daemon.workspaces.ListWorkspaces(workspace_pb2.ListWorkspacesRequest()).workspaces) == 1


def test_a_runtime_directory_too_long_for_workers_sockets(idle: Daemon, project: Path) -> None:
    length = 107 - len("/cogfsd.sock")
    runtime = idle.base / ("r" * (length - len(str(idle.base)) - 1))
    idle.environ["COGFS_RUNTIME_DIR"] = str(runtime)
    idle.runtime = runtime
    idle.socket = runtime / "cogfsd.sock"
    idle.start()
    workspace = idle.mount(project)
    idle.kill()
    idle.start()
    assert idle.get(project).worker_pid == workspace.worker_pid
    idle.unmount(project)
    nothing_left(idle)


def test_the_service_manager_is_told(idle: Daemon) -> None:
    address = idle.base / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(PATIENCE)
        idle.environ["NOTIFY_SOCKET"] = str(address)
        idle.start()
        assert manager.recv(100) == b"READY=1"
        idle.terminate()
        assert manager.recv(100) == b"STOPPING=1"


def test_the_log_is_json(daemon: Daemon, project: Path) -> None:
    daemon.mount(project)
    daemon.terminate()
    events = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert {"ready", "mounted", "stopping", "unmounted", "stopped"} <= {event["event"] for event in events}
    assert all({"level", "timestamp"} <= set(event) for event in events)


def _handles(daemon: Daemon, workspace_id: str) -> list[workspace_pb2.Handle]:
    answer = daemon.workspaces.ListHandles(workspace_pb2.ListHandlesRequest(workspace_id=workspace_id))
    return list(answer.handles)
