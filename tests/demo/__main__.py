"""The demo: a session in a real project, the way back in it, and the proof that nothing differs."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from tests.demo.play import Demo, Different
from tests.support.installation import CommandFailed, Installation

#: The project, a copy of it at each message, and the store.
_SPACE = 4 << 30
_TOOLS = ("bash", "cp", "find", "git", "grep", "sed", "sort", "truncate", "xargs")


class Stopped(BaseException):
    """A signal asked for the end."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the random order"
    )
    seed = parser.parse_args().seed
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _stop)
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return _failed(console, f"the demo needs {', '.join(missing)} on PATH")
    base = _roomy()
    if base is None:
        return _failed(
            console, f"the demo needs {_SPACE >> 30} GB of free space: set TMPDIR to a directory that has it"
        )
    started = time.monotonic()
    try:
        with _ended(Installation(base, "cogfs-demo-")) as installation:
            Demo(console, installation, random.Random(seed), seed).play()
    except (CommandFailed, Different) as error:
        return _failed(console, str(error))
    except Stopped as stop:
        return _failed(console, f"stopped by {stop}; nothing is left behind", 130)
    console.print(f"[bold green]Nothing differs, and nothing is left behind[/] ({time.monotonic() - started:.0f} s).")
    return 0


@contextlib.contextmanager
def _ended(installation: Installation) -> Iterator[Installation]:
    """The installation, and its end, which no second signal interrupts."""
    try:
        yield installation
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        installation.close()


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def _roomy() -> Path | None:
    for directory in (tempfile.gettempdir(), "/var/tmp", str(Path.home())):
        with contextlib.suppress(OSError):
            if os.access(directory, os.W_OK | os.X_OK) and shutil.disk_usage(directory).free >= _SPACE:
                return Path(directory)
    return None


def _failed(console: Console, sentence: str, code: int = 1) -> int:
    console.print(f"The demo failed: {sentence}", style="bold red", markup=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
