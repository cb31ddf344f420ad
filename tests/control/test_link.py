"""The channel to a real worker, from the control process's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cogfs.fsd.channel import Committed, Done, Freeze, Frozen, GetStats, Resume, Stats
from cogfs.fsd.control import mounts, places, worker
from cogfs.fsd.control import workspace as workspace_module
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.link import OtherVersion, WorkerGone, WorkerLink, WorkerRefused, WorkerSilent
from cogfs.fsd.control.worker import WorkerProcess
from cogfs.fsd.control.workspace import Workspace
from cogfs.store.schema import WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from cogfs.v1 import workspace_pb2
from cogfs.v1.reasons import Reason
from tests.control.harness import PATIENCE, Daemon, cogfs_mounts, processes, refused, wait_for

#: A worker as it is, of another version of the channel.
OTHER = (
    "from cogfs.fsd import channel; channel.PROTOCOL_VERSION += 1\n"
    "from cogfs.fsd.mount.worker import main; raise SystemExit(main())"
)


@pytest.fixture
def at(base: Path) -> places.Places:
    found = places.find({"COGFS_STATE_DIR": str(base / "state"), "COGFS_RUNTIME_DIR": str(base / "run")}, 0)
    found.make()
    return found


@pytest.fixture
def process(at: places.Places, project: Path) -> Iterator[WorkerProcess]:
    started = worker.start(at, "ws_1", os.fsencode(project), os.fsencode(project), generation=1, boundaries=[])
    try:
        yield started
    finally:
        started.kill()
        assert started.wait(PATIENCE)
        assert "SIGKILL" in started.how_it_ended()
        started.close()


@pytest.fixture
def link(at: places.Places, process: WorkerProcess, project: Path) -> Iterator[WorkerLink]:
    connected = WorkerLink.connect(at.worker_socket("ws_1"), os.fsencode(project))
    try:
        yield connected
    finally:
        connected.close()
        connected.close()


def test_the_greeting(link: WorkerLink, process: WorkerProcess, project: Path) -> None:
    assert link.welcome.workspace_id == "ws_1"
    assert link.welcome.worker_pid == process.pid
    assert link.mountpoint == os.fsencode(project)
    # Other tests have a workspace of this id too, at the same time.
    (entry,) = (entry for entry in mounts.of_workspace("ws_1") if entry.mountpoint == os.fsencode(project))
    assert entry.device == link.welcome.device
    # The descriptor is of the backing directory, not of the mount.
    assert os.fstat(link.root_fd).st_dev != link.welcome.device
    assert os.listdir(link.root_fd) == ["src"]
    assert not os.get_inheritable(link.root_fd)


def test_calls_of_many_threads_get_their_own_answers(link: WorkerLink) -> None:
    wrong: list[object] = []

    def ask(kind: int) -> None:
        for _ in range(50):
            answer = link.call(GetStats() if kind % 2 else Resume())
            if not isinstance(answer, Stats if kind % 2 else Done):
                wrong.append(answer)

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not wrong


def test_a_refusal_says_why(link: WorkerLink) -> None:
    with pytest.raises(WorkerRefused) as caught:
        link.call(Committed(7))
    assert caught.value.errno
    assert caught.value.why in str(caught.value)
    assert isinstance(link.call(GetStats()), Stats)


def test_a_worker_that_dies_within_a_call(link: WorkerLink, process: WorkerProcess) -> None:
    ended = threading.Event()
    link.on_end(ended.set)
    os.kill(process.pid, signal.SIGSTOP)
    results: list[str] = []

    def ask() -> None:
        try:
            link.call(GetStats())
        except WorkerGone as error:
            results.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    process.kill()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [f"the mount worker {process.pid} is gone"] * 3
    assert ended.wait(PATIENCE)
    assert not link.alive
    with pytest.raises(WorkerGone):
        link.call(GetStats())
    late = threading.Event()
    link.on_end(late.set)
    assert late.wait(PATIENCE)


def test_a_silent_worker_is_not_waited_for(link: WorkerLink, process: WorkerProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerSilent):
            link.call(GetStats(), timeout=1.5)
        assert link.alive
    finally:
        os.kill(process.pid, signal.SIGCONT)
    # The late answer is nobody's, and confuses nothing.
    assert isinstance(link.call(Freeze()), Frozen)
    assert isinstance(link.call(Resume()), Done)


def test_close_is_not_an_end_by_itself(at: places.Places, process: WorkerProcess, project: Path) -> None:
    connected = WorkerLink.connect(at.worker_socket("ws_1"), os.fsencode(project))
    ended = threading.Event()
    connected.on_end(ended.set)
    before = len(os.listdir("/proc/self/fd"))
    connected.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2
    assert not ended.is_set()
    with pytest.raises(WorkerGone):
        connected.call(GetStats())


def test_nobody_there(at: places.Places) -> None:
    with pytest.raises(WorkerGone):
        WorkerLink.connect(at.worker_socket("ws_1"), b"/")


def test_a_worker_that_cannot_mount_says_why(at: places.Places, base: Path) -> None:
    with pytest.raises(CogfsError) as caught:
        worker.start(
            at, "ws_1", os.fsencode(base / "missing"), os.fsencode(base / "missing"), generation=1, boundaries=[]
        )
    assert caught.value.reason is Reason.UNAVAILABLE
    assert "No such file" in str(caught.value)
    assert caught.value.metadata["log"] == str(at.worker_log("ws_1"))
    assert not processes(base)


def test_a_worker_of_another_version(daemon: Daemon, project: Path) -> None:
    workspace = daemon.mount(project)
    daemon.kill()
    mounts.unmount(os.fsencode(project), lazy=False)
    wait_for("the worker ends", lambda: not processes(daemon.base))
    path = daemon.runtime / "workers" / f"{workspace.id}.sock"
    ready, ready_in_worker = os.pipe()
    other = subprocess.Popen(
        [
            *(sys.executable, "-c", OTHER, "--workspace-id", workspace.id, "--allow-other"),
            *("--root", str(project), "--mountpoint", str(project)),
            *("--socket", str(path), "--ready-fd", str(ready_in_worker)),
        ],
        pass_fds=[ready_in_worker],
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(ready_in_worker)
        assert b'"ok": true' in os.read(ready, 1000)
        with pytest.raises(OtherVersion):
            WorkerLink.connect(path, os.fsencode(project))
        daemon.start()
        found = daemon.get(project)
        assert found.state == workspace_pb2.Workspace.DEAD
        assert "version" in found.reason
        # It goes on serving who works there, and is in nobody's way who wants it gone.
        with (project / "src" / "a.txt").open() as file:
            assert file.read() == "one\n"
            with refused(Reason.BUSY) as who:
                daemon.unmount(project)
            assert f"(pid {os.getpid()})" in who[0].message
        again = daemon.mount(project)
        assert again.state == workspace_pb2.Workspace.ACTIVE
        assert other.wait(PATIENCE) == 0
        assert cogfs_mounts(daemon.base) == [os.fsencode(project)]
        daemon.kill()
        daemon.start()
        assert daemon.get(project).worker_pid == again.worker_pid
    finally:
        os.close(ready)
        other.kill()
        other.wait(PATIENCE)


@pytest.fixture
def workspace(base: Path, project: Path) -> Iterator[Workspace]:
    with Store.open(base / "store") as store, ThreadPoolExecutor(1) as pool:
        with store.write() as writer:
            writer.put_workspace(WorkspaceRow("ws_1", os.fsencode(project), b"", WorkspaceOptions(), 0))
        found = Workspace(store, pool, pool, "ws_1", base / "undo.log", lambda: None)
        yield found
        found.sealer.close()


@pytest.mark.parametrize("request_", ["freeze", "guard"])
def test_what_a_worker_carries_out_too_late_does_not_stay(
    request_: str,
    workspace: Workspace,
    link: WorkerLink,
    process: WorkerProcess,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that was stopped while nobody had the patience to wait for it: the mount goes on with it."""
    (project / "file").write_text("one")
    monkeypatch.setattr(workspace_module, "_FREEZE_PATIENCE", 0.3)
    monkeypatch.setattr(workspace_module, "_GUARD_PATIENCE", 0.3)
    monkeypatch.setattr(workspace_module, "_SILENT_PATIENCE", 0.1)
    monkeypatch.setattr(Workspace, "_flush_maps", lambda *_: os.kill(process.pid, signal.SIGSTOP))
    inodes = {(project / "file").stat().st_ino}
    if request_ == "freeze":
        with pytest.raises(WorkerSilent), workspace.frozen(link):
            pass
    else:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerSilent):
            workspace.guard(link, "restore_1", inodes, set())
    os.kill(process.pid, signal.SIGCONT)
    # Its turn comes when all that was asked before is done.
    assert isinstance(link.call(GetStats()), Stats)
    done = subprocess.run(["sh", "-c", 'echo two > "$0/file"', project], timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert (project / "file").read_text() == "two\n"
