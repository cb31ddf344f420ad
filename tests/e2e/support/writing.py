"""Programs that write while something else is tested; see ``tests.support.writers``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.support.site import PATIENCE


@contextmanager
def running(name: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A writer, once it has made its files; it must end well."""
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.writers", name, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()
            code = process.wait(PATIENCE)
    assert code == 0, "a program in the mount met an error"
