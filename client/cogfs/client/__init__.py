"""The Python client of cogfs. It needs grpcio and protobuf, and no daemon in the same environment.

>>> from cogfs.client import connect
>>> with connect() as cog:
...     ws = cog.mount("./project")
...     thread = cog.create_thread("chat", workspace=ws)
...     entry = thread.user_message("Refactor the parser")

Methods answer the messages of ``cogfs.v1`` as they are, or thin objects around them (Workspace, Snapshot, Thread).
Paths in messages are bytes, as the filesystem has them.
"""

from cogfs.client.agent_session import (
    AgentSession,
    RewindFileFailure,
    RewindFilesResult,
    RewindResult,
    RewindScope,
    RewindStatus,
)
from cogfs.client.agent_settings import SettingsWarning
from cogfs.client.client import Client, connect
from cogfs.client.errors import (
    AlreadyExists,
    Busy,
    CogfsError,
    Corrupt,
    Denied,
    IOFailed,
    NoSpace,
    NotFound,
    RunInterrupted,
    ThreadBusy,
    Unavailable,
    ValidationError,
    WorkspaceBusy,
)
from cogfs.client.run import Run
from cogfs.client.snapshot import Snapshot
from cogfs.client.thread import CheckpointWarning, Fork, Thread
from cogfs.client.workspace import Workspace

__all__ = [
    "AgentSession",
    "AlreadyExists",
    "Busy",
    "CheckpointWarning",
    "Client",
    "CogfsError",
    "Corrupt",
    "Denied",
    "Fork",
    "IOFailed",
    "NoSpace",
    "NotFound",
    "RewindFileFailure",
    "RewindFilesResult",
    "RewindResult",
    "RewindScope",
    "RewindStatus",
    "Run",
    "RunInterrupted",
    "SettingsWarning",
    "Snapshot",
    "Thread",
    "ThreadBusy",
    "Unavailable",
    "ValidationError",
    "Workspace",
    "WorkspaceBusy",
    "connect",
]
