"""A daemon that stops at a labelled step until it is told to go on, so that a test can do something just then."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from tests.e2e.support.site import Site, wait_for
from tests.support.crashes import start

_REPOSITORY = Path(__file__).parents[2]
#: Packs so small that new ones are begun all the time. Nothing of this is in the daemon: it is given to it from here.
_PROGRAM = """
import os, runpy, threading, time
from cogfs.store import packs
packs.PACK_LIMIT = 40_000
from cogfs.store import steps
from cogfs.fsd.control import sealer

label, left, place = {label!r}, {count}, {place!r}
lock = threading.Lock()

def hook(passed):
    global left
    if passed != label or not os.path.exists(place + "/armed"):
        return
    with lock:
        left -= 1
        if left:
            return
    os.mkdir(place + "/reached")
    while not os.path.exists(place + "/go"):
        time.sleep(0.005)

{more}
with steps.on_step(hook):
    runpy.run_module("cogfs.fsd.control.main", run_name="__main__")
"""
#: Nothing is sealed before the daemon has stopped: so a file that is overwritten has to be captured before.
UNSEALED = """
seal = sealer.Sealer._seal
def wait_and_seal(self, row):
    while os.path.exists(place + "/armed") and not os.path.exists(place + "/reached"):
        time.sleep(0.005)
    seal(self, row)
sealer.Sealer._seal = wait_and_seal
"""
#: Nothing is read ahead of its boundary, nor before the daemon goes on.
UNREAD = """
from cogfs.fsd.control import ahead
ahead._QUIET = 3600.0
record = sealer.Sealer._record
def wait_and_record(self, *arguments):
    while os.path.exists(place + "/armed") and not os.path.exists(place + "/go"):
        time.sleep(0.005)
    return record(self, *arguments)
sealer.Sealer._record = wait_and_record
"""
#: The files of one snapshot cannot be captured.
FAILING = """
record = sealer.Sealer._record
def fail(self, *arguments):
    if os.path.exists(place + "/armed") and not os.path.exists(place + "/go"):
        raise OSError(5, "a test has it fail")
    return record(self, *arguments)
sealer.Sealer._record = fail
"""


def labels(*parts: str) -> list[str]:
    """The labels of all steps in the source of these parts of the project."""
    found = set()
    for part in parts:
        for path in (_REPOSITORY / part).rglob("*.py"):
            found |= set(re.findall(r"""\bstep\("([a-z.]+)"\)""", path.read_text()))
    return sorted(found)


class Stopped:
    """A daemon of a site, started anew, that will stop at the ``count``-th passing of a step after ``arm``."""

    def __init__(self, here: Site, label: str, count: int = 1, more: str = "") -> None:
        self._place = here.base / "stop"
        self._place.mkdir()
        program = _PROGRAM.format(label=label, count=count, place=str(self._place), more=more)
        self.label = label
        start(here, program=("-c", program))

    def arm(self) -> None:
        (self._place / "armed").touch()

    def wait(self) -> None:
        """Until it has stopped."""
        wait_for(f"the step {self.label}", lambda: self.reached)

    @property
    def reached(self) -> bool:
        """It has stopped, or had."""
        return (self._place / "reached").exists()

    def go_on(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._place / "armed").unlink()
        (self._place / "go").touch()
