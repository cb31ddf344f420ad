"""What a failed call raises, over a real connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cogfs.client import CogfsError, IOFailed, Unavailable, ValidationError, connect
from cogfs.client.connection import Connection
from cogfs.client.errors import CLASSES
from cogfs.v1 import admin_pb2, snapshot_pb2
from cogfs.v1.reasons import DOMAIN, Reason
from tests.client.server import serving


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


def _abort(context: Any, code: grpc.StatusCode, message: str, *details: Any) -> admin_pb2.Daemon:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort returned")


def _raised(endpoint: str) -> CogfsError:
    with connect(endpoint) as cog, pytest.raises(CogfsError) as caught:
        cog.daemon(timeout=180)
    return caught.value


def test_each_reason_has_one_class() -> None:
    assert set(CLASSES) == set(Reason)
    assert len(set(CLASSES.values())) == len(Reason)
    assert len({reason.exit_code for reason in Reason}) == len(Reason)


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_reason_becomes_its_class(endpoint: str, reason: Reason) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason.name, domain=DOMAIN, metadata={"busy_by": "[]"})
    with serving(endpoint, lambda context: _abort(context, reason.status, "do this", info)):
        error = _raised(endpoint)
    assert type(error) is CLASSES[reason]
    assert error.reason is reason
    assert error.message == str(error) == "do this"
    assert error.metadata == {"busy_by": "[]"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, Reason.UNAVAILABLE),
        (grpc.StatusCode.INVALID_ARGUMENT, Reason.VALIDATION_ERROR),
        (grpc.StatusCode.PERMISSION_DENIED, Reason.DENIED),
        (grpc.StatusCode.UNKNOWN, Reason.IO),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.IO),
    ],
)
def test_status_without_reason(endpoint: str, code: grpc.StatusCode, reason: Reason) -> None:
    with serving(endpoint, lambda context: _abort(context, code, "just so")):
        error = _raised(endpoint)
    assert error.reason is reason
    assert "just so" in error.message


def test_reason_of_another_domain_or_version_is_not_believed(endpoint: str) -> None:
    foreign = error_details_pb2.ErrorInfo(reason="BUSY", domain="elsewhere")
    unknown = error_details_pb2.ErrorInfo(reason="TOO_LATE", domain=DOMAIN)
    with serving(endpoint, lambda context: _abort(context, grpc.StatusCode.NOT_FOUND, "x", foreign, unknown)):
        assert _raised(endpoint).reason is Reason.NOT_FOUND


def test_exception_in_the_daemon_is_no_traceback_here(endpoint: str) -> None:
    def answer(context: Any) -> admin_pb2.Daemon:
        raise RuntimeError("lost")

    with serving(endpoint, answer):
        error = _raised(endpoint)
    assert type(error) is IOFailed
    assert "\n" not in error.message


def test_nobody_answers(endpoint: str) -> None:
    error = _raised(endpoint)
    assert type(error) is Unavailable
    assert "cogfsctl daemon start" in error.message
    assert endpoint in error.message


def test_no_answer_in_time(endpoint: str) -> None:
    release = threading.Event()

    def answer(context: Any) -> admin_pb2.Daemon:
        release.wait()
        return admin_pb2.Daemon()

    with serving(endpoint, answer), connect(endpoint) as cog:
        try:
            with pytest.raises(Unavailable):
                cog.daemon(timeout=0.2)
        finally:
            release.set()


def test_call_that_the_daemon_does_not_know(endpoint: str) -> None:
    with serving(endpoint, lambda context: admin_pb2.Daemon()), connect(endpoint) as cog:
        with pytest.raises(Unavailable, match="another version"):
            cog.workspaces()
        with pytest.raises(Unavailable, match="another version"):
            list(cog.threads())


def test_stream_that_fails(endpoint: str) -> None:
    with serving(endpoint, lambda context: admin_pb2.Daemon()):
        connection = Connection(endpoint)
        try:
            with pytest.raises(Unavailable, match="another version"):
                list(connection.stream(connection.snapshots.ListTree, snapshot_pb2.ListTreeRequest()))
        finally:
            connection.close()


def test_large_answers_pass(endpoint: str) -> None:
    size = 20 << 20
    with serving(endpoint, lambda context: admin_pb2.Daemon(store=b"x" * size)), connect(endpoint) as cog:
        assert len(cog.daemon().store) == size


@pytest.mark.parametrize("name", ["d" * 120, "a b", "50%", "名字"])
def test_socket_where_grpc_or_the_kernel_would_not_go(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        with (
            serving(f"unix:///proc/self/fd/{descriptor}/s", lambda context: admin_pb2.Daemon(pid=7)),
            connect(f"unix://{str(directory).replace('%', '%25')}/s") as cog,
        ):
            assert cog.daemon(timeout=180).pid == 7
    finally:
        os.close(descriptor)


def test_connection_leaves_no_descriptor(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()

    def open_here() -> Iterator[str]:
        for name in os.listdir("/proc/self/fd"):
            try:
                yield os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                pass

    cog = connect(f"unix://{directory}/s")
    assert str(directory) in open_here()
    cog.close()
    cog.close()
    assert str(directory) not in open_here()


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="daemon start"):
        connect(f"unix://{tmp_path}/{'d' * 120}/s")


@pytest.mark.parametrize("endpoint", ["", "nonsense", "host", "http://host:1/x y", "unix:relative"])
def test_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="unix:///PATH"):
        Connection(endpoint)
