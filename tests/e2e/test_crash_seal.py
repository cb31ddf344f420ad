"""``kill -9`` between a boundary and its seal, on a filesystem that gives inode numbers away again at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support.site import Aside, Site
from tests.support import image
from tests.support.crashes import Counts, files_of, rounds
from tests.support.tree import describe, differences, of_snapshot

_ROOM = 1 << 30

pytestmark = pytest.mark.skipif(bool(image.missing()), reason=image.missing())


@pytest.fixture
def there() -> Iterator[Site]:
    """A daemon with store and project on ext4."""
    with image.filesystem("ext4", _ROOM) as place:
        base = place / "site"
        base.mkdir()
        site = Site(base)
        try:
            yield site
        finally:
            site.close()


def test_crashes(there: Site) -> None:
    counts = Counts()
    for _ in rounds(there, 2026, counts, 25):
        pass
    assert counts.fired, counts


@pytest.mark.parametrize("unlisted", [True, False])
def test_numbers_that_are_given_away_again(there: Site, unlisted: bool) -> None:
    """A directory goes after the boundary and another one gets its number, before anybody has looked at either."""
    top = there.project / "top"
    for name in ("empty", "full/inner", "busy"):
        (top / name).mkdir(parents=True)
    (top / "full" / "link").symlink_to("elsewhere")
    (top / "moved").mkdir()
    (top / "moved" / "old").mkdir()
    there.mount()
    if not unlisted:
        with there.client() as cog:
            there.workspace(cog).checkpoint()
        for name in ("empty", "full", "busy"):
            # So that the boundary lists the name, which is not there.
            (top / name / "made later").mkdir()
            (top / name / "made later").rmdir()
    before = files_of(describe(there.project))
    there.kill_daemon()
    there.start("checkpoint.committed")
    with there.client() as cog:
        checkpoint = Aside(lambda: there.workspace(cog).checkpoint("cut"))
        checkpoint.join()
    assert checkpoint.error is not None
    numbers = {(top / name).stat().st_ino for name in ("empty", "full", "busy")}
    again = set()
    for name in ("empty", "full", "busy"):
        _remove(top / name)
    for name in ("empty", "other", "third", "fourth"):
        (top / name).mkdir()
        again.add((top / name).stat().st_ino)
        os.rename(top / "moved" / "old", top / name / "made later")
        (top / name / "link").symlink_to("of now")
        os.rename(top / name / "made later", top / "moved" / "old")
        (top / name / "made later").mkdir()
    os.rename(top / "moved" / "old", top / "other" / "inner")
    assert numbers & again, "no number was given away again"
    there.start()
    with there.client() as cog:
        there.settled(cog)
        (snapshot,) = [one for one in there.workspace(cog).snapshots() if one.message.label == "cut"]
        assert not differences(files_of(of_snapshot(snapshot)), before), snapshot.refresh().message


def _remove(directory: Path) -> None:
    """A tree without files, whose removal waits for nobody."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_symlink():
            path.unlink()
        else:
            path.rmdir()
    directory.rmdir()
