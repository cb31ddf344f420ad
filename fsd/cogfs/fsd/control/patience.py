"""How long the daemon waits for runs: for their tool calls to end, and for their holders to come back.

Must not know what waits, nor where it is said (``settings``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    #: For tool calls of runs that were stopped, for the holders of leases, and for commands after SIGTERM.
    tool_settle: float = 10.0
    #: In which a holder opens its stream, also after a restart of the daemon.
    grace: float = 30.0
