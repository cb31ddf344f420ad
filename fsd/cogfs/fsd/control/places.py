"""Where the daemon keeps things: state and runtime directories, and the endpoint of the API.

Owns the rules that find them, which are those of ``cogfs.client.places``, and the check that they are ours alone. Must
not know what is kept in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cogfs.fsd.control.errors import CogfsError, from_os_error
from cogfs.v1.reasons import Reason

#: ``sun_path`` holds 108 bytes, the last of them zero.
SOCKET_PATH_MAX = 107


@dataclass(frozen=True)
class Places:
    """The directories of one daemon. Nothing exists before ``make``."""

    state: Path
    runtime: Path
    #: Socket of the API.
    socket: Path

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def store(self) -> Path:
        return self.state / "store"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def undo_logs(self) -> Path:
        """What files were at boundaries that are not captured, one log for each workspace."""
        return self.state / "undo"

    @property
    def workers(self) -> Path:
        """Holds the socket of each worker."""
        return self.runtime / "workers"

    @property
    def lock(self) -> Path:
        """Held by the one daemon of this runtime directory."""
        return self.runtime / "cogfsd.lock"

    def worker_socket(self, workspace_id: str) -> Path:
        return self.workers / f"{workspace_id}.sock"

    def worker_mark(self, workspace_id: str) -> Path:
        """A file that the workspace's worker has open for as long as it runs."""
        return self.workers / f"{workspace_id}.worker"

    def worker_log(self, workspace_id: str) -> Path:
        return self.logs / f"{workspace_id}.log"

    def undo_log(self, workspace_id: str) -> Path:
        return self.undo_logs / f"{workspace_id}.log"

    def make(self) -> None:
        """Create what is missing, owner-only. DENIED when something is not ours, VALIDATION_ERROR when the socket's
        path is too long."""
        length = len(os.fsencode(self.socket))
        if length > SOCKET_PATH_MAX:
            raise CogfsError(
                Reason.VALIDATION_ERROR,
                f"the socket's path has {length} bytes and the system allows {SOCKET_PATH_MAX}: "
                f"set COGFS_RUNTIME_DIR to a shorter directory than {self.socket.parent}",
            )
        for directory in (self.state, self.runtime, self.logs, self.undo_logs, self.workers):
            _make_private(directory)
        if self.socket.parent != self.runtime:
            _make_private(self.socket.parent)


def find(environ: Mapping[str, str], uid: int) -> Places:
    """The places for a user with that environment. VALIDATION_ERROR when the environment makes no sense."""
    chosen_state = _directory(environ, "COGFS_STATE_DIR")
    if uid == 0:
        state, runtime = chosen_state or Path("/var/lib/cogfs"), Path("/run/cogfs")
    else:
        state_home = _xdg(environ, "XDG_STATE_HOME") or _home(environ) / ".local" / "state"
        state = chosen_state or state_home / "cogfs"
        session = _xdg(environ, "XDG_RUNTIME_DIR")
        # Without a login session there is no runtime directory; the state directory outlives any session.
        runtime = session / "cogfs" if session is not None and session.is_dir() else state / "run"
    runtime = _directory(environ, "COGFS_RUNTIME_DIR") or runtime
    return Places(state, runtime, _endpoint(environ) or runtime / "cogfsd.sock")


def _xdg(environ: Mapping[str, str], name: str) -> Path | None:
    """A variable of the XDG base directories, which counts as unset when it is not absolute."""
    value = environ.get(name, "")
    return Path(value) if value.startswith("/") else None


def _directory(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name, "")
    if not value:
        return None
    if not value.startswith("/"):
        raise CogfsError(Reason.VALIDATION_ERROR, f"{name} must be an absolute path, not {value!r}")
    return Path(os.path.normpath(value))


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    return Path(home) if home.startswith("/") else Path("~").expanduser()


def _endpoint(environ: Mapping[str, str]) -> Path | None:
    value = environ.get("COGFS_ENDPOINT", "")
    if not value:
        return None
    parts = urlsplit(value)
    path = unquote(parts.path)
    if parts.scheme != "unix" or parts.netloc or not path.startswith("/"):
        raise CogfsError(
            Reason.VALIDATION_ERROR,
            f"cogfsd serves on a Unix socket: COGFS_ENDPOINT must be like unix:///run/cogfs/cogfsd.sock, not {value!r}",
        )
    return Path(os.path.normpath(path))


def _make_private(directory: Path) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            pass
        found = directory.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            # Also after mkdir: a strange umask may have taken the owner's own bits.
            if stat.S_IMODE(found.st_mode) != 0o700:
                directory.chmod(0o700)
            return
    except OSError as error:
        raise from_os_error(error, f"make the directory {directory}") from error
    if stat.S_ISLNK(found.st_mode):
        what = "is a symbolic link"
    elif not stat.S_ISDIR(found.st_mode):
        what = "is not a directory"
    else:
        what = f"belongs to user {found.st_uid}"
    raise CogfsError(
        Reason.DENIED, f"{directory} {what}: cogfs keeps its files only in directories of its own user ({os.geteuid()})"
    )
