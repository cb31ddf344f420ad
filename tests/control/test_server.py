"""What every call has in common."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cogfs.v1 import admin_pb2, snapshot_pb2, workspace_pb2
from cogfs.v1.reasons import Reason
from tests.control.harness import PATIENCE, Daemon, place, refused

FAULTS = [
    ("cogfs", Reason.WORKSPACE_BUSY, "said so"),
    ("corrupt", Reason.CORRUPT, "the object is damaged"),
    ("full", Reason.NO_SPACE, "the disk is full"),
    ("denied", Reason.DENIED, "Permission denied"),
    ("no-space", Reason.NO_SPACE, "No space left"),
    ("unforeseen", Reason.IO, "internal error, see the log of cogfsd"),
]


def test_every_exception_has_a_reason(plain: Daemon) -> None:
    for name, reason, text in FAULTS:
        with refused(reason) as found:
            plain.snapshots.GetSnapshot(snapshot_pb2.GetSnapshotRequest(snapshot_id=name))
        assert text in found[0].message
    log = plain.log.read_text()
    assert "ZeroDivisionError: division by zero" in log
    assert "Traceback" in log


def test_a_stream_fails_with_a_reason_after_what_it_gave(plain: Daemon) -> None:
    for name, reason, text in FAULTS:
        received = []
        with refused(reason) as found:
            for response in plain.snapshots.ReadFile(snapshot_pb2.ReadFileRequest(snapshot_id=name)):
                received.append(len(response.data))
        # Larger than gRPC's own limit of a message.
        assert received == [8 << 20]
        assert text in found[0].message


def test_metadata_of_an_error_is_passed_on(plain: Daemon) -> None:
    with refused(Reason.WORKSPACE_BUSY) as found:
        plain.snapshots.GetSnapshot(snapshot_pb2.GetSnapshotRequest(snapshot_id="cogfs"))
    assert found[0].metadata == {"busy_by": "[]"}


@pytest.mark.parametrize("bad", ["a/b", "x" * 129, "white space", "ws_\n", "ü"])
def test_malformed_ids_are_found_before_the_service(plain: Daemon, bad: str) -> None:
    with refused(Reason.VALIDATION_ERROR) as found:
        plain.snapshots.GetSnapshot(snapshot_pb2.GetSnapshotRequest(snapshot_id=bad))
    assert "snapshot_id" in found[0].message
    with refused(Reason.VALIDATION_ERROR):
        list(plain.snapshots.ReadFile(snapshot_pb2.ReadFileRequest(snapshot_id=bad)))
    with refused(Reason.VALIDATION_ERROR):
        plain.workspaces.GetWorkspace(workspace_pb2.GetWorkspaceRequest(workspace_id=bad))


@pytest.mark.parametrize("size", [-1, 1001])
def test_page_sizes_of_nowhere(plain: Daemon, size: int) -> None:
    with refused(Reason.VALIDATION_ERROR):
        plain.snapshots.ListSnapshots(snapshot_pb2.ListSnapshotsRequest(workspace_id="ws_1", page_size=size))


def test_an_unknown_call_is_unimplemented(daemon: Daemon) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = daemon.channel.unary_unary("/cogfs.v1.NoService/NoCall")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_health_and_reflection(daemon: Daemon) -> None:
    check = daemon.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for name in ("", "cogfs.v1.WorkspaceService", "cogfs.v1.SnapshotService", "cogfs.v1.AdminService"):
        answer = check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    listing = daemon.channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in next(listing).list_services_response.service}
    assert {"cogfs.v1.WorkspaceService", "cogfs.v1.AdminService", "grpc.health.v1.Health"} <= names


def test_get_daemon(daemon: Daemon) -> None:
    answer = daemon.admin.GetDaemon(admin_pb2.GetDaemonRequest())
    assert daemon.process is not None
    assert answer.pid == daemon.process.pid
    assert answer.endpoint == f"unix://{daemon.socket}"
    assert os.fsdecode(answer.store) == str(daemon.state / "store")
    assert answer.version
    assert answer.started_at.seconds > 0


def test_everything_is_the_owners_alone(idle: Daemon) -> None:
    before = os.umask(0)
    try:
        idle.start()
    finally:
        os.umask(before)
    for directory in (idle.state, idle.runtime, idle.runtime / "workers", idle.state / "logs", idle.state / "store"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    assert stat.S_IMODE(idle.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE((idle.runtime / "cogfsd.lock").stat().st_mode) == 0o600


def test_a_second_daemon_at_the_same_place_leaves_at_once(daemon: Daemon) -> None:
    second = daemon.spawn()
    assert second.wait(PATIENCE) == 0
    assert "already running" in daemon.log.read_text()
    daemon.admin.GetDaemon(admin_pb2.GetDaemonRequest())


def test_a_second_daemon_on_the_same_store_is_refused(daemon: Daemon) -> None:
    other = Daemon(daemon.base)
    other.environ["COGFS_RUNTIME_DIR"] = str(daemon.base / "other-run")
    assert other.spawn().wait(PATIENCE) == Reason.UNAVAILABLE.exit_code
    assert "Traceback" not in daemon.log.read_text()
    daemon.admin.GetDaemon(admin_pb2.GetDaemonRequest())


def test_two_daemons_do_not_meet(daemon: Daemon, project: Path) -> None:
    daemon.workspaces.CreateWorkspace(workspace_pb2.CreateWorkspaceRequest(root=os.fsencode(project)))
    with place() as elsewhere:
        other = Daemon(elsewhere)
        try:
            other.start()
            assert not other.workspaces.ListWorkspaces(workspace_pb2.ListWorkspacesRequest()).workspaces
            assert other.terminate() == 0
        finally:
            other.close()
    assert len(daemon.workspaces.ListWorkspaces(workspace_pb2.ListWorkspacesRequest()).workspaces) == 1


def test_foreign_directories_are_refused(idle: Daemon) -> None:
    (idle.base / "elsewhere").mkdir()
    idle.state.symlink_to(idle.base / "elsewhere")
    assert idle.spawn().wait(PATIENCE) == Reason.DENIED.exit_code
    idle.state.unlink()
    idle.state.mkdir()
    os.chown(idle.state, 12345, 12345)
    assert idle.spawn().wait(PATIENCE) == Reason.DENIED.exit_code
    assert not list((idle.base / "elsewhere").iterdir())
    lines = idle.log.read_text().splitlines()
    assert len(lines) == 2
    assert "is a symbolic link" in lines[0]
    assert "belongs to user 12345" in lines[1]


def test_a_path_too_long_for_a_socket_is_one_sentence(idle: Daemon) -> None:
    idle.environ["COGFS_RUNTIME_DIR"] = str(idle.base / ("long" * 30))
    assert idle.spawn().wait(PATIENCE) == Reason.VALIDATION_ERROR.exit_code
    assert "shorter directory" in idle.log.read_text()


def test_a_stop_removes_the_socket(daemon: Daemon) -> None:
    assert daemon.terminate() == 0
    assert not daemon.socket.exists()
    daemon.start()
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    daemon.admin.GetDaemon(admin_pb2.GetDaemonRequest())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_whichever_thread_gets_it(daemon: Daemon, number: signal.Signals) -> None:
    """As when it comes just before the main thread waits: that one is not interrupted in its wait."""
    assert daemon.process is not None
    pid = daemon.process.pid
    thread = max(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    assert thread != pid
    assert ctypes.CDLL(None).tgkill(pid, thread, int(number)) == 0
    assert daemon.process.wait(PATIENCE) == 0
    assert not daemon.socket.exists()


def test_usage_is_exit_code_2(idle: Daemon) -> None:
    assert idle.spawn("--no-such-option").wait(PATIENCE) == 2


def test_help_has_an_example(idle: Daemon) -> None:
    assert idle.spawn("--help").wait(PATIENCE) == 0
    assert "example: cogfsd" in idle.log.read_text()
