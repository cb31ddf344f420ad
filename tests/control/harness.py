"""Daemons in directories of their own, as processes, and what tests ask of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cogfs.fsd.control import mounts
from cogfs.v1 import workspace_pb2
from cogfs.v1.admin_pb2_grpc import AdminServiceStub
from cogfs.v1.reasons import DOMAIN, Reason
from cogfs.v1.snapshot_pb2_grpc import SnapshotServiceStub
from cogfs.v1.workspace_pb2_grpc import WorkspaceServiceStub

#: Longest wait for anything; reached only when something is wrong.
PATIENCE = 240.0
_CHECKOUT = Path(__file__).resolve().parents[2]


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@dataclass(frozen=True)
class Refusal:
    """An error of the API."""

    reason: str
    code: grpc.StatusCode
    message: str
    metadata: dict[str, str]


@contextlib.contextmanager
def refused(reason: Reason) -> Iterator[list[Refusal]]:
    """The call within is refused with that reason and its status; yields a list that then holds the refusal."""
    found: list[Refusal] = []
    try:
        yield found
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        status = rpc_status.from_call(error)
        assert status is not None, f"no details: {error}"
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.reason, error.code(), info.domain) == (reason.name, reason.status, DOMAIN), status.message
        assert "Traceback" not in status.message
        assert "\n" not in status.message
        found.append(Refusal(info.reason, error.code(), status.message, dict(info.metadata)))
    else:
        raise AssertionError(f"not refused with {reason.name}")


class Daemon:
    """``cogfsd`` with its state below ``base``; started and ended as often as a test likes."""

    def __init__(self, base: Path, module: str = "cogfs.fsd.control.main") -> None:
        self.base = base
        self.state = base / "state"
        self.runtime = base / "run"
        self.log = base / "cogfsd.log"
        self.socket = self.runtime / "cogfsd.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.environ = {
            **os.environ,
            "COGFS_STATE_DIR": str(self.state),
            "COGFS_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": str(_CHECKOUT),
            "PYTHONFAULTHANDLER": "1",
        }
        self._module = module
        self._channel: grpc.Channel | None = None

    def spawn(self, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*prefix, sys.executable, "-m", self._module, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )

    def start(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        before = self.log.stat().st_size if self.log.exists() else 0
        self.process = self.spawn(*arguments, prefix=prefix)

        def ready() -> bool:
            assert self.process is not None
            written = self.log.read_bytes()[before:]
            assert self.process.poll() is None, written.decode()
            return b'"event": "ready"' in written

        wait_for("the daemon is ready", ready)

    def terminate(self) -> int:
        assert self.process is not None
        self._forget_channel()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            # It writes into its log where each of its threads is.
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(PATIENCE)
            raise AssertionError(f"it does not end: {self.log.read_text(errors='replace')[-20000:]}") from None

    def kill(self) -> None:
        assert self.process is not None
        self._forget_channel()
        self.process.kill()
        self.process.wait(PATIENCE)

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = grpc.insecure_channel(
                f"unix:{self.socket}", options=[("grpc.max_receive_message_length", -1)]
            )
        return self._channel

    @property
    def workspaces(self) -> WorkspaceServiceStub:
        return WorkspaceServiceStub(self.channel)

    @property
    def admin(self) -> AdminServiceStub:
        return AdminServiceStub(self.channel)

    @property
    def snapshots(self) -> SnapshotServiceStub:
        return SnapshotServiceStub(self.channel)

    def mount(self, root: Path, at: Path | None = None) -> workspace_pb2.Workspace:
        return self.workspaces.Mount(
            workspace_pb2.MountRequest(root=os.fsencode(root), at=os.fsencode(at) if at else b""), timeout=PATIENCE
        )

    def unmount(self, root: Path, *, force: bool = False) -> workspace_pb2.Workspace:
        return self.workspaces.Unmount(
            workspace_pb2.UnmountRequest(root=os.fsencode(root), force=force), timeout=PATIENCE
        )

    def get(self, path: Path) -> workspace_pb2.Workspace:
        return self.workspaces.GetWorkspace(workspace_pb2.GetWorkspaceRequest(path=os.fsencode(path)), timeout=PATIENCE)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._forget_channel()

    def _forget_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def cogfs_mounts(base: Path) -> list[bytes]:
    below = os.fsencode(base)
    return [
        entry.mountpoint
        for entry in mounts.table()
        if entry.fstype == mounts.FSTYPE and mounts.is_within(entry.mountpoint, below)
    ]


def processes(base: Path) -> list[int]:
    """The workers that were started for anything below ``base``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if b"cogfs.fsd.mount" in arguments and any(
                    argument.startswith(os.fsencode(base) + b"/") for argument in arguments
                ):
                    found.append(int(name))
    return found


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A directory that is gone afterwards, with all mounts and workers below it."""
    base = Path(tempfile.mkdtemp(prefix="cogfs-")).resolve()
    try:
        yield base
    finally:
        for mountpoint in reversed(cogfs_mounts(base)):
            mounts.unmount(mountpoint, lazy=True)
        for pid in processes(base):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base)
