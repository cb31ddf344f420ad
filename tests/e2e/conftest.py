"""A daemon that runs for real, in directories of its own, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfs.client import Client, connect
from tests.e2e.ctl import TIMEOUT, Ctl, mounts_below, processes_of
from tests.e2e.support.site import Site, site


def _settled(base: Path) -> dict[int, object]:
    """The processes that are left once those that are just ending had their time."""
    deadline = time.monotonic() + 180
    while True:
        left: dict[int, object] = dict(processes_of(base))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@pytest.fixture
def ctl() -> Iterator[Ctl]:
    """The command line, and no daemon yet. Whatever was started is stopped; a leftover fails the test."""
    base = Path(tempfile.mkdtemp(prefix="cogfs-e2e-")).resolve()
    command = Ctl(base)
    try:
        yield command
        stopped = command.run("daemon", "stop")
        mounts, processes = mounts_below(base), _settled(base)
    finally:
        for point in mounts_below(base):
            subprocess.run(["umount", "--lazy", point], timeout=TIMEOUT, check=False)
        for pid in processes_of(base):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)
    assert stopped.returncode == 0, stopped.stderr
    assert mounts == [], "a mount was left behind"
    assert processes == {}, "a process was left behind"


@pytest.fixture
def daemon(ctl: Ctl) -> Ctl:
    """The command line of a daemon that runs."""
    ctl("daemon", "start")
    return ctl


@pytest.fixture
def project(ctl: Ctl) -> Path:
    """A small project that is not mounted yet."""
    root = ctl.base / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "main.py").write_text("one\ntwo\nthree\n")
    (root / "README").write_text("read me\n")
    (root / "tool").write_text("#!/bin/sh\n")
    (root / "tool").chmod(0o755)
    (root / "link").symlink_to("src/main.py")
    return root


@pytest.fixture
def mounted(daemon: Ctl, project: Path) -> Path:
    """The project, mounted over itself."""
    daemon("mount", project)
    return project


@pytest.fixture
def cog(daemon: Ctl) -> Iterator[Client]:
    """A client of the daemon."""
    with connect(f"unix://{daemon.base}/run/cogfsd.sock") as client:
        yield client


@pytest.fixture
def here() -> Iterator[Site]:
    """A daemon that is killed as the test likes, and its project, not mounted yet."""
    with site() as place:
        yield place
