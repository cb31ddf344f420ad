"""Tells the service manager how the daemon stands (the protocol of ``sd_notify``)."""

from __future__ import annotations

import os
import socket

import structlog

_log = structlog.get_logger(__name__)


def notify(state: str) -> None:
    """Send ``state``, such as ``READY=1``, when a service manager wants to know; never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(5)
            # A name that begins with @ is in the abstract namespace.
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(state.encode())
    except OSError as error:
        _log.warning("service manager not told", state=state, error=str(error))
