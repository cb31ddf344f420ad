"""Plays the session through ``cogfsctl``, goes back in it, and compares. What it shows is for people."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.demo import project
from tests.demo.session import SYSTEM, TURNS, Turn
from tests.support.installation import Installation
from tests.support.tree import Tree, describe, differences

THREAD = "demo"
_PLAN_LINES = 24
_SHOWN = 20
_SCRIPT_TIMEOUT = 300.0


class Different(Exception):
    """Something is not what it has to be."""


@dataclass
class Moment:
    """The files at one moment: the copy that was made of them, and the snapshot that has to hold them."""

    name: str
    copy: Path
    snapshot: str
    #: What a walk finds in the copy.
    tree: Tree
    #: The rows of the database, where there is one.
    rows: int | None
    #: The entry before the message, to which a rewind goes.
    before: str


class Demo:
    def __init__(self, console: Console, installation: Installation, chance: random.Random, seed: int) -> None:
        self._console = console
        self._cogfs = installation
        self._chance = chance
        self._seed = seed
        self._root = installation.directory / "project"
        self._copies = installation.directory / "copies"
        self._scratch = installation.directory / "scratch"

    def play(self) -> None:
        """The whole demo. Different, or CommandFailed."""
        self._copies.mkdir()
        self._scratch.mkdir()
        self._mount()
        moments = self._session()
        self._branch()
        end = self._moment("the end", "", "")
        self._show_plan(moments[len(moments) // 2])
        end.snapshot = self._rewind(moments, end)
        last, before = self._restore([*moments, end], moments[0])
        self._undo(last, before)
        self._unmount(before)

    # What the session is

    def _mount(self) -> None:
        self._title("A real project")
        with self._clock() as spent:
            files, size = project.make(self._root)
        self._say(f"{files:,} files, {_size(size)}, made a git repository at {self._root} ({spent():.1f} s)")
        with self._clock() as spent:
            self._cogfs.text("mount", self._root)
        self._say(f"cogfsctl mount {self._root} ({spent():.1f} s, the daemon's start with it)")
        self._cogfs.text("thread", "new", THREAD, "--workspace", self._root)

    def _session(self) -> list[Moment]:
        self._title("The session")
        table = _table("", "message", "checkpoint", "files", "stored", "work")
        before = self._cogfs.json("message", THREAD, SYSTEM, "--kind", "system")["id"]
        moments = []
        with Live(table, console=self._console):
            for number, turn in enumerate(TURNS, 1):
                copied = self._copy(f"{number:02}")
                with self._clock() as asked:
                    entry = self._cogfs.json("message", THREAD, turn.message)
                if not entry["file_checkpoint"]:
                    raise Different(f"message {number} has no checkpoint: {entry['checkpoint_error']}")
                snapshot = entry["file_checkpoint"]["snapshot_id"]
                moments.append(self._described(f"message {number}", copied, snapshot, before))
                with self._clock() as worked:
                    self._work(turn)
                before = self._cogfs.json("message", THREAD, turn.answer, "--kind", "assistant")["id"]
                stats = self._cogfs.json("show", snapshot)["stats"]
                table.add_row(
                    str(number),
                    turn.message,
                    f"{asked():.2f} s",
                    f"{stats['files']:,}",
                    _size(stats["stored_bytes"]),
                    f"{worked():.1f} s",
                )
        return moments

    def _work(self, turn: Turn) -> None:
        environment = project.environment() | {"PYTHON": sys.executable, "SCRATCH": str(self._scratch)}
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", turn.script],
            cwd=self._root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = shell.communicate(timeout=_SCRIPT_TIMEOUT)
        except BaseException:
            # What it started as well.
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            raise
        if shell.returncode != 0:
            said = output.decode("utf-8", "backslashreplace").strip()
            raise Different(f"the work after {turn.message!r} ended with {shell.returncode}: {said}")

    def _branch(self) -> None:
        self._title("The branch, and its checkpoints")
        self._quote("rewind", THREAD)

    # The way back

    def _show_plan(self, moment: Moment) -> None:
        self._title(f"A plan: back to {moment.name}")
        self._quote("rewind", THREAD, moment.before, "--files", "--dry-run")
        self._quote("diff", moment.snapshot, "lib/ast.py", "lib/heapq.py", "--stat")
        if differences(describe(self._root), self._now()):
            raise Different("a dry run changed files")

    def _rewind(self, moments: list[Moment], end: Moment) -> str:
        """Back through the branch, turn by turn; the snapshot of the files as they were at its end."""
        self._title("Back through the branch, turn by turn")
        table = _table("back to", "restored", "deleted", "unchanged", "plan", "rewind", "exact", "identical")
        first = ""
        with Live(table, console=self._console):
            for moment in reversed(moments):
                arguments = ("rewind", THREAD, moment.before, "--files")
                with self._clock() as planned:
                    plan = self._cogfs.json(*arguments, "--dry-run")
                with self._clock() as spent:
                    report = self._cogfs.json(*arguments, "--yes")
                files = report["files"]
                if not files["exact"]:
                    raise Different(f"the rewind to {moment.name} is not exact")
                self._same_plan(plan["files"]["restore"], files["restore"], moment)
                self._same(moment)
                first = first or files["safety_snapshot_id"]
                table.add_row(
                    moment.name, *_counts(files["restore"]), f"{planned():.2f} s", f"{spent():.2f} s", "yes", "yes"
                )
        left = self._cogfs.json("log", THREAD)["entries"]
        if len(left) != 1 or left[0]["kind"] != "system":
            raise Different(f"{len(left)} entries are left on the branch, where one has to be")
        return first

    def _restore(self, moments: list[Moment], now: Moment) -> tuple[Moment, Moment]:
        """Every snapshot in a random order; the last one, and the one before it."""
        self._title(f"Every snapshot in a random order (seed {self._seed})")
        order = list(moments)
        self._chance.shuffle(order)
        table = _table("snapshot of", "restored", "deleted", "unchanged", "restore", "identical")
        before = now
        with Live(table, console=self._console):
            for moment in order:
                plan = self._cogfs.json("restore", moment.snapshot, "--dry-run")
                with self._clock() as spent:
                    report = self._cogfs.json("restore", moment.snapshot, "--yes")
                self._same_plan(plan, report, moment)
                self._same(moment)
                table.add_row(moment.name, *_counts(report), f"{spent():.2f} s", "yes")
                if report["restored"] or report["deleted"]:
                    # An empty difference is no restore that could be taken back.
                    before, now = now, moment
        return now, before

    def _undo(self, last: Moment, before: Moment) -> None:
        self._title(f"Undo of the last restore: from {last.name} back to {before.name}")
        with self._clock() as spent:
            report = self._cogfs.json("undo", self._root, "--yes")
        self._same(before)
        files = report["files"]
        self._say(f"{len(files['restored'])} restored, {len(files['deleted'])} deleted ({spent():.2f} s): identical")

    def _unmount(self, moment: Moment) -> None:
        self._title("Unmounted: the bare directory")
        self._cogfs.text("unmount", self._root)
        self._same(moment)
        project.git(self._root, "fsck", "--no-progress")
        self._say(f"identical to {moment.name}; git fsck finds nothing")
        store = _usage(self._cogfs.state)
        copies = _usage(self._copies)
        self._say(f"the store holds all {len(TURNS)} checkpoints and the safety snapshots in {_size(store)};")
        self._say(f"the {len(TURNS) + 1} copies by cp -a take {_size(copies)}")

    # Copies and comparisons

    def _copy(self, name: str) -> Path:
        copied = self._copies / name
        subprocess.run(["cp", "-a", "--", self._root, copied], check=True)
        return copied

    def _described(self, name: str, copied: Path, snapshot: str, before: str) -> Moment:
        return Moment(name, copied, snapshot, describe(copied), self._rows(copied), before)

    def _moment(self, name: str, snapshot: str, before: str) -> Moment:
        return self._described(name, self._copy("end"), snapshot, before)

    def _now(self) -> Tree:
        return describe(self._copies / "end")

    def _same(self, moment: Moment) -> None:
        found = differences(moment.tree, describe(self._root))
        if found:
            more = "" if len(found) <= _SHOWN else f"\n  and {len(found) - _SHOWN} more"
            shown = "".join(f"\n  {sentence}" for sentence in found[:_SHOWN])
            raise Different(f"{len(found)} names differ from the copy of {moment.name} (copy first):{shown}{more}")
        rows = self._rows(self._root)
        if rows != moment.rows:
            raise Different(f"the database of {moment.name} has {rows} rows and not {moment.rows}")

    def _same_plan(self, plan: dict[str, Any], report: dict[str, Any], moment: Moment) -> None:
        for part in ("restored", "deleted", "unchanged", "files"):
            if plan[part] != report[part]:
                raise Different(f"the dry run to {moment.name} announced other {part} than were done")

    def _rows(self, root: Path) -> int | None:
        """How many rows the database has, read from a copy of it: a reader writes to the files beside it."""
        if not (root / "data" / "measured.db").exists():
            return None
        place = self._scratch / "database"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for path in (root / "data").glob("measured.db*"):
            shutil.copy(path, place)
        database = sqlite3.connect(place / "measured.db")
        try:
            (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
            if verdict != "ok":
                raise Different(f"the database in {root} is damaged: {verdict}")
            (rows,) = database.execute("SELECT count(*) FROM measured").fetchone()
            return int(rows)
        finally:
            database.close()

    # The screen

    def _title(self, title: str) -> None:
        self._console.print()
        self._console.rule(Text(title, "bold"), align="left")

    def _say(self, sentence: str) -> None:
        self._console.print(sentence, markup=False)

    def _quote(self, *arguments: str) -> None:
        """A command as a person types it, and the beginning of what it says."""
        lines = self._cogfs.text(*arguments).splitlines()
        self._console.print(Text(f"$ cogfsctl {' '.join(arguments)}", "bold cyan"))
        for line in lines[:_PLAN_LINES]:
            self._say(f"  {line}")
        if len(lines) > _PLAN_LINES:
            self._say(f"  … {len(lines) - _PLAN_LINES} more lines")

    @contextmanager
    def _clock(self) -> Iterator[_Elapsed]:
        elapsed = _Elapsed()
        yield elapsed
        elapsed.stop()


class _Elapsed:
    """Seconds since it was made, until it was stopped."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._ended: float | None = None

    def stop(self) -> None:
        self._ended = time.monotonic()

    def __call__(self) -> float:
        return (self._ended or time.monotonic()) - self._began


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for column in columns:
        table.add_column(column, no_wrap=column != "message")
    return table


def _counts(report: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{len(report['restored']):,}",
        f"{len(report['deleted']):,}",
        f"{report['unchanged']:,}",
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:,.1f} kB"


def _usage(directory: Path) -> int:
    """Bytes on the disk."""
    total = 0
    for path, _, files in os.walk(os.fsencode(directory)):
        total += sum(os.lstat(os.path.join(path, name)).st_blocks * 512 for name in files)
    return total
