"""Files of an unsealed snapshot that are overwritten in part, while nobody captures them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogfs.client import Snapshot
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Aside, Site, wait_for
from tests.support.crashes import files_of
from tests.support.tree import Tree, describe, differences, of_snapshot

_SIZE = 5_000_003


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Site, list[Path], Tree]]:
    """A project with large files, a snapshot that is answered and not captured, no control process; and its state."""
    site = Site(tmp_path)
    try:
        source = random.Random(7)
        paths = [site.project / str(number) for number in range(3)]
        for path in paths:
            path.write_bytes(source.randbytes(_SIZE))
        os.link(paths[0], site.base / "outside")
        site.mount()
        before = describe(site.project)
        site.kill_daemon()
        site.start("checkpoint.committed")
        with site.client() as cog:
            checkpoint = Aside(lambda: site.workspace(cog).checkpoint("cut"))
            checkpoint.join()
        assert checkpoint.error is not None
        yield site, paths, before
    finally:
        site.close()


def write(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)


def captured(site: Site, look: Callable[[Snapshot], None]) -> None:
    """Start the daemon, and look at the snapshot when it is captured."""
    site.start()
    with site.client() as cog:
        site.settled(cog)
        (snapshot,) = [one for one in site.workspace(cog).snapshots() if one.message.label == "cut"]
        wait_for("it is captured", lambda: snapshot.refresh().message.state != snapshot_pb2.Snapshot.FROZEN)
        look(snapshot)


def test_nobody_waits_and_nothing_is_lost(frozen: tuple[Site, list[Path], Tree]) -> None:
    """Writes need no control process; what is cut off or removed waits for one."""
    site, (first, second, third), before = frozen
    write(first, 0, b"at the beginning")
    write(first, 1_000_000, b"in the middle" * 1000)
    write(first, _SIZE - 3, b"at the end, and beyond it")
    write(second, 2_000_000, b"before it is removed")
    write(third, 2_000_000, b"before it is cut")
    removal = Aside(second.unlink)
    cut = Aside(lambda: os.truncate(third, 100))

    def look(snapshot: Snapshot) -> None:
        assert not differences(files_of(of_snapshot(snapshot)), files_of(before)), snapshot.message

    captured(site, look)
    for call in (removal, cut):
        call.join()
        assert call.error is None
    assert first.read_bytes()[:16] == b"at the beginning"
    assert not second.exists()
    assert third.stat().st_size == 100


@pytest.mark.parametrize("between", [True, False], ids=["and the mount writes again", "last of all"])
def test_what_is_written_past_the_mount_is_found_out(frozen: tuple[Site, list[Path], Tree], between: bool) -> None:
    """By a link from outside, into a part that the log does not have."""
    site, (first, second, _), _ = frozen
    outside = site.base / "outside"
    write(first, 0, b"through the mount")
    write(second, 0, b"through the mount, and by nobody else")
    write(outside, 3_000_000, b"past the mount")
    if between:
        write(first, 100, b"through the mount again")

    def look(snapshot: Snapshot) -> None:
        assert snapshot.message.state == snapshot_pb2.Snapshot.FAILED
        assert [one.path for one in snapshot.message.failed] == [b"0"]

    captured(site, look)
