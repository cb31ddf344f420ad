"""Processes by number and start, who came of whom, and signals that reach no other process.

Reads ``/proc/PID/stat`` alone, which waits for no lock of the process it tells of. Must not know what they run for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cogfs.store.schema import ProcessRow

_KERNEL_THREAD = 0x00200000
#: Ended, and not waited for.
_ENDED = frozenset(b"ZXx")


@dataclass(frozen=True, slots=True)
class Stat:
    """One process that runs."""

    process: ProcessRow
    parent: int
    group: int
    session: int
    kernel: bool


def look(pid: int) -> Stat | None:
    """The process, or None when none of that number runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0][0] in _ENDED:
        return None
    parent, group, session = (int(field) for field in fields[1:4])
    return Stat(
        ProcessRow(pid, int(fields[19])), parent, group, session, bool(int(fields[6]) & _KERNEL_THREAD) or parent == 2
    )


def all_of_them() -> dict[int, Stat]:
    """All that run now, by number."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := look(int(name))) is not None:
            found[stat.process.pid] = stat
    return found


def family(known: Iterable[ProcessRow], stats: Mapping[int, Stat]) -> set[ProcessRow]:
    """``known`` and all that came of them, as far as they run: by parents, and by the process groups and sessions that
    one of them leads or led."""
    known = set(known)
    # A number that has another process now leads nothing of ours: the kernel gives it out only when its group is empty.
    leaders = {one.pid for one in known if one.pid not in stats or stats[one.pid].process == one}
    found = {one for one in known if one.pid in stats and stats[one.pid].process == one}
    while True:
        parents = {one.pid for one in found}
        led = leaders | parents
        more = {
            stat.process
            for stat in stats.values()
            if stat.parent in parents or stat.group in led or stat.session in led
        } - found
        if not more:
            return found
        found |= more


def is_program(pid: int) -> bool:
    """It is a process of a program, and none of the kernel's, nor the first of all."""
    stat = look(pid)
    return stat is not None and not stat.kernel and pid != 1 and os.path.isdir(f"/proc/{pid}/task/{pid}")


def send(process: ProcessRow, number: signal.Signals) -> None:
    """A signal to that very process; nothing when it has ended, or may not be sent one."""
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            stat = look(process.pid)
            if stat is not None and stat.process == process:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def name(pid: int) -> str:
    """The name of its program; empty when it has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return ""
