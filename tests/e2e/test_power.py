"""A few cuts of the power; many more are in ``tests.soak.power``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import image

_REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(bool(image.missing()), reason=image.missing())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "arguments",
    [["--cuts=3"], ["--cuts=2", "--two"], ["--cuts=5", "--control=sync"], ["--cuts=12", "--control=trust"]],
)
def test_cuts(arguments: list[str]) -> None:
    # A process of its own, as it needs a mount namespace of its own.
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.power", "--seed=2026", *arguments],
        cwd=_REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout
