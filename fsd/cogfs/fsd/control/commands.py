"""Commands: processes that were registered in a workspace, and all that they left behind, until the last has ended.

The rows are the truth, and each look asks the kernel anew. Knows neither runs nor files.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import structlog

from cogfs.fsd.control import cgroups, processes
from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.fsd.control.holds import Holds, stopping
from cogfs.fsd.control.processes import Stat
from cogfs.fsd.control.sealer import boot_id
from cogfs.store.errors import NotFound, StoreError
from cogfs.store.ids import new_id
from cogfs.store.schema import CommandRow, ProcessRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds between two looks at what commands left behind, where there is no control group.
_LOOK = 0.5
#: Times that what is below a process is moved into its group: what it starts meanwhile is below it again.
_MOVES = 8


@dataclass(frozen=True, slots=True)
class Running:
    """A command of which something runs."""

    row: CommandRow
    processes: tuple[ProcessRow, ...]


class Commands:
    """All commands of the store. Safe from any thread."""

    def __init__(self, store: Store, holds: Holds) -> None:
        """Those of a daemon before, as far as they run, are followed further."""
        self._store = store
        self._holds = holds
        self._lock = holds.changed
        self._boot = boot_id()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="commands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The daemon stops; ``holds`` is closed already. Commands go on."""
        self._wake.set()
        self._thread.join()

    def register(self, workspace_id: str, thread_id: str, run_id: str, pid: int, text: str) -> Running:
        """A process runs in a workspace from now on. The errors are those of RegisterCommand."""
        process = self._process(pid)
        with self._store.read() as reader:
            root = reader.workspace(workspace_id).root
        with self._lock:
            self._admit(root)
            command_id = new_id("cmd")
            row = CommandRow(
                command_id,
                workspace_id,
                thread_id,
                run_id,
                (process,),
                text or processes.name(pid),
                time.time_ns(),
                self._boot,
                cgroups.make(pid, f"cogfs-{command_id}"),
            )
            row = self._moved(row)
            try:
                with self._store.write(objects=False) as writer:
                    writer.put_command(row)
            except BaseException:
                # The process stays in the group, which the kernel keeps for as long.
                cgroups.remove(row.cgroup)
                raise
            self._wake.set()
            return self._running(row, processes.all_of_them())

    def add(self, command_id: str, pid: int) -> Running:
        """One more process of a command. The errors are those of RegisterCommand."""
        process = self._process(pid)
        with self._lock:
            with self._store.read() as reader:
                row = reader.command(command_id)
                root = reader.workspace(row.workspace_id).root
            if process not in self._running(row, processes.all_of_them()).processes:
                # What is of it already is no new one, whoever holds the workspace meanwhile.
                self._admit(root)
            if process not in row.processes:
                row = self._moved(msgspec.structs.replace(row, processes=(*row.processes, process)))
                with self._store.write(objects=False) as writer:
                    writer.put_command(row)
            return self._running(row, processes.all_of_them())

    def _process(self, pid: int) -> ProcessRow:
        if pid <= 0:
            raise invalid(f"{pid} is no number of a process")
        stat = processes.look(pid)
        if stat is None:
            raise NotFound(f"no process {pid} runs")
        if pid == os.getpid() or stat.parent == os.getpid() or not processes.is_program(pid):
            raise invalid(f"the process {pid} is of the system or of cogfs itself, and no command")
        return stat.process

    def _admit(self, root: bytes) -> None:
        if self._holds.closed:
            raise stopping()
        if self._holds.holds("", root):
            raise CogfsError(Reason.BUSY, "a restore changes the files of the workspace: start the command after it")

    def _moved(self, row: CommandRow) -> CommandRow:
        """With all that is below its processes in its group, where it has one."""
        if not row.cgroup:
            return row
        for _ in range(_MOVES):
            inside = set(cgroups.pids(row.cgroup))
            outside = [one for one in processes.family(row.processes, processes.all_of_them()) if one.pid not in inside]
            if not outside:
                return row
            for one in outside:
                cgroups.join(row.cgroup, one.pid)
        # Somebody moves them out again, or they may not be moved.
        return msgspec.structs.replace(row, processes=tuple(dict.fromkeys((*row.processes, *outside))))

    # --- looking ------------------------------------------------------------------------------------------------------

    def running(self, concerns: Callable[[CommandRow], bool] = lambda row: True) -> list[Running]:
        """Those of which something runs now, the oldest first."""
        with self._lock:
            return self._look(concerns)

    def _running(self, row: CommandRow, stats: dict[int, Stat]) -> Running:
        if row.boot_id != self._boot:
            return Running(row, ())
        if row.cgroup:
            # Of those that have come since, nothing is known yet.
            for pid in cgroups.pids(row.cgroup):
                if pid not in stats and (stat := processes.look(pid)) is not None:
                    stats[pid] = stat
        found = processes.family(row.processes, stats)
        if row.cgroup:
            found |= {stats[pid].process for pid in cgroups.pids(row.cgroup) if pid in stats}
        own = os.getpid()
        # A daemon that was started from within a command is no part of it, and neither are its workers.
        kept = [one for one in found if one.pid != own and stats[one.pid].parent != own]
        return Running(row, tuple(sorted(kept, key=lambda one: one.pid)))

    def signal(self, commands: Iterable[Running], number: signal.Signals) -> None:
        """A signal to all processes of commands, as they are now."""
        wanted = {one.row.id for one in commands}
        for command in self.running(lambda row: row.id in wanted):
            for process in command.processes:
                processes.send(process, number)

    # --- following ----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Forget commands that have ended, and note what the others left while its parents are still there."""
        while True:
            with self._lock:
                if self._holds.closed:
                    return
                try:
                    some = bool(self._look())
                except (OSError, StoreError) as error:
                    _log.warning("commands cannot be looked at", error=str(error))
                    some = True
                self._wake.clear()
            self._wake.wait(_LOOK if some else None)

    def _look(self, concerns: Callable[[CommandRow], bool] = lambda row: True) -> list[Running]:
        """Those of which something runs; what has come of them is written down, and what has ended forgotten."""
        with self._store.read() as reader:
            rows = [row for row in reader.commands() if concerns(row)]
        if not rows:
            return []
        stats = processes.all_of_them()
        again: dict[int, Stat] = {}
        found, ended, grown = [], [], []
        for row in rows:
            now = self._running(row, stats)
            if not now.processes:
                # The last may have ended while it was looked for, and have begun another one that was not there before.
                again = again or processes.all_of_them()
                now = self._running(row, again)
            if not now.processes:
                ended.append(row)
                continue
            found.append(now)
            if not row.cgroup and set(now.processes) - set(row.processes):
                # The one that it was registered by stays the first, and who has ended may still lead a group.
                grown.append(msgspec.structs.replace(row, processes=_remembered(row, now, {**stats, **again})))
        if ended or grown:
            with self._store.write(objects=False) as writer:
                for row in ended:
                    writer.delete_command(row.id)
                for row in grown:
                    writer.put_command(row)
            for row in ended:
                if row.cgroup:
                    cgroups.remove(row.cgroup)
            self._lock.notify_all()
        return found


def _remembered(row: CommandRow, now: Running, stats: dict[int, Stat]) -> tuple[ProcessRow, ...]:
    """Those that run, and those that have ended and whose group or session has not."""
    led = {number for one in now.processes for number in (stats[one.pid].group, stats[one.pid].session)}
    ended = [one for one in row.processes[1:] if one.pid in led]
    return tuple(dict.fromkeys((row.processes[0], *ended, *now.processes)))
