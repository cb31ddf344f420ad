"""How long the daemon waits for runs: for their tool calls to end, and for their holders to come back.

Owns the two settings and where they are read from. Must not know what waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cogfs.fsd.control.errors import invalid

_TOOL_SETTLE = 10.0
_GRACE = 30.0
_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    #: For tool calls of runs that were stopped, for the holders of leases, and for commands after SIGTERM.
    tool_settle: float = _TOOL_SETTLE
    #: In which a holder opens its stream, also after a restart of the daemon.
    grace: float = _GRACE

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Patience:
        """What COGFS_TOOL_SETTLE and COGFS_RUN_GRACE say. VALIDATION_ERROR when one is no number of seconds."""
        return cls(_seconds(environ, "COGFS_TOOL_SETTLE", _TOOL_SETTLE), _seconds(environ, "COGFS_RUN_GRACE", _GRACE))


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX:
        raise invalid(f"{name} must be a number of seconds from 0 to {_MAX:.0f}, not {text!r}")
    return value
