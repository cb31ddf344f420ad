"""Ids of rows: ordered by time, unique without asking anyone.

An id is a prefix, an underscore, and 26 digits of base 32 (0-9a-z without i, l, o, u): 48 bits of milliseconds since
the epoch, then 80 random bits. Ids made by one process ascend strictly, also when the clock stands still or goes back.
"""

from __future__ import annotations

import os
import threading
import time

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80

_lock = threading.Lock()
_last = 0


def _next_value() -> int:
    global _last  # noqa: PLW0603
    fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | int.from_bytes(os.urandom(_RANDOM_BITS // 8))
    with _lock:
        # Within one millisecond, or with a clock set back, count on from the last one.
        _last = fresh if fresh >> _RANDOM_BITS > _last >> _RANDOM_BITS else _last + 1
        return _last


def new_id(prefix: str) -> str:
    """A new id, for example ``snap_01k9w3…`` for the prefix ``snap``."""
    value = _next_value()
    return prefix + "_" + "".join(_DIGITS[value >> shift & 31] for shift in range(125, -1, -5))
