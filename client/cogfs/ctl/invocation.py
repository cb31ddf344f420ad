"""One call of ``cogfsctl``: the options that commands share, and the way to the daemon. Imports no gRPC by itself."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cogfs.client import Client


class UsageError(Exception):
    """What was typed makes no sense; exit code 2."""


@dataclass
class Invocation:
    """What was typed before and beside a command's own arguments."""

    json: bool = False
    start: bool = True

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """A client of the daemon, which is started first when none answers and ``--no-start`` was not given."""
        from cogfs.client import connect

        with connect(start=self.start) as client:
            yield client

    def check_consent(self, dry_run: bool, yes: bool) -> None:
        """UsageError when the command would have to ask and cannot."""
        if dry_run and yes:
            raise UsageError("give --dry-run or --yes, not both")
        if dry_run or yes:
            return
        if self.json:
            raise UsageError("with --json nothing is asked: give --yes, or --dry-run to see what would change")
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask on: give --yes, or --dry-run to see what would change")


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(text: str | None) -> float | None:
    """An age as it is typed ("90s", "12h", "14d"), in seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not seconds <= 100 * 366 * 86400:
        raise UsageError(f"{text!r} is no age: give a number and one of s, m, h, d, w (seconds to weeks), like 14d")
    return seconds


def retention(count: int | None, max_age: str | None) -> dict[str, float | int] | None:
    """What two options say of the snapshots that remain; None when neither was given."""
    seconds = age(max_age)
    if count is None and seconds is None:
        return None
    return {"count": count or 0, "max_age": seconds or 0.0}


def invocation(context: typer.Context) -> Invocation:
    """The invocation to which a command belongs."""
    found = context.obj
    assert isinstance(found, Invocation)
    return found


def _set_json(context: typer.Context, value: bool) -> bool:
    invocation(context).json = value
    return value


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", callback=_set_json, is_eager=True, show_default=False)
]
Directory = Annotated[str, typer.Argument(metavar="DIR", help="A directory or file in the workspace.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force = Annotated[
    bool, typer.Option("--force", help="Go past open files, whose holders keep the old ones; stop runs and commands.")
]
