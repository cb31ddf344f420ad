"""Where the daemon keeps its state and listens, from the environment. Touches nothing but to look; knows no gRPC.

The daemon and its clients follow the same rules, so that they meet without a word:

* state: ``COGFS_STATE_DIR``, else ``/var/lib/cogfs`` for root, else ``$XDG_STATE_HOME/cogfs``, else
  ``~/.local/state/cogfs``;
* runtime: ``COGFS_RUNTIME_DIR``, else ``/run/cogfs`` for root, else ``$XDG_RUNTIME_DIR/cogfs`` when that directory
  exists, else ``run`` below the state directory (there is no login session, or it has ended);
* endpoint: ``COGFS_ENDPOINT`` (``unix:///…``, with unusual characters as in a URL, or ``host:port``), else
  ``cogfsd.sock`` in the runtime directory.

A variable that is empty counts as unset, and so does an XDG variable that is not absolute.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

SOCKET = "cogfsd.sock"
LOG = "cogfsd.log"


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(os.path.abspath(value)) if value else None


def _xdg(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value and os.path.isabs(value) else None


def state_dir() -> Path:
    """The directory of the store, of what must outlive a reboot, and of the daemon's log."""
    chosen = _variable("COGFS_STATE_DIR")
    if chosen:
        return chosen
    if os.geteuid() == 0:
        return Path("/var/lib/cogfs")
    return (_xdg("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cogfs"


def runtime_dir() -> Path:
    """The directory of the sockets."""
    chosen = _variable("COGFS_RUNTIME_DIR")
    if chosen:
        return chosen
    if os.geteuid() == 0:
        return Path("/run/cogfs")
    session = _xdg("XDG_RUNTIME_DIR")
    if session and session.is_dir():
        return session / "cogfs"
    return state_dir() / "run"


def log_file() -> Path:
    """Where a daemon that was started in the background writes."""
    return state_dir() / LOG


def socket_endpoint() -> str:
    """The endpoint of the daemon that belongs to these directories."""
    return f"unix://{quote(os.fsencode(runtime_dir() / SOCKET))}"


def default_endpoint() -> str:
    """The endpoint that a client uses when it is given none."""
    return os.environ.get("COGFS_ENDPOINT") or socket_endpoint()


def socket_path(endpoint: str) -> str | None:
    """The path in a ``unix:`` endpoint; None for any other."""
    for scheme in ("unix://", "unix:"):
        if endpoint.startswith(f"{scheme}/"):
            return os.fsdecode(unquote_to_bytes(endpoint.removeprefix(scheme)))
    return None
