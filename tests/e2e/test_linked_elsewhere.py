"""Files of a mounted workspace that have a further name where no worker sees it written: outside the root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cogfs.client import Snapshot, Workspace
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.site import Aside, Site
from tests.e2e.test_bypass import unsealed
from tests.support.tree import Tree, describe, differences, of_snapshot


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Closes what a test opens."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def outside(here: Site) -> Path:
    """A file "linked" in a project that is not mounted yet, by its name outside."""
    (here.project / "src" / "deep").mkdir(parents=True)
    for name in ("plain", "src/plain"):
        (here.project / name).write_text(f"{name}\n")
    inside = here.project / "src" / "deep" / "linked"
    inside.write_text("first\n")
    path = here.base / "outside"
    os.link(inside, path)
    # What is younger than two seconds is not told by its stat, and read again.
    for one in (inside, here.project / "plain"):
        os.utime(one, (1, 1))
    return path


def _tree(project: Path) -> Tree:
    return {path: node for path, node in describe(project).items() if path}


def _content(snapshot: Snapshot, path: str) -> bytes:
    return b"".join(snapshot.cat(path))


def _taken(here: Site, clients: ExitStack) -> tuple[Workspace, Snapshot]:
    """The project mounted, and its first snapshot sealed."""
    here.mount()
    workspace = here.workspace(clients.enter_context(here.client()))
    return workspace, workspace.checkpoint(wait_for="sealed")


def _written_with_the_same_times(path: Path) -> None:
    _rewrite(path, "FIRST\n" if path.read_text() == "first\n" else "first\n")


def _rewrite(path: Path, content: str) -> None:
    status = path.stat()
    path.write_text(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("second\n"),
        _written_with_the_same_times,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 2_000_000 if path.stat().st_size < 2_000_000 else 1),
        lambda path: path.chmod(0o600),
    ],
    ids=["content", "content, and the times are set back", "cut off", "longer", "mode"],
)
def test_what_is_written_by_a_name_outside_is_in_the_next_snapshot(
    here: Site, clients: ExitStack, outside: Path, change: Callable[[Path], object]
) -> None:
    workspace, before = _taken(here, clients)
    was = outside.read_bytes()
    for _ in range(2):
        change(outside)
        after = workspace.checkpoint(wait_for="sealed")
        assert _content(after, "src/deep/linked") == outside.read_bytes()
        entry = next(one for one in after.ls("src/deep"))
        assert entry.mode & 0o777 == outside.stat().st_mode & 0o777
        assert _content(before, "src/deep/linked") == was
    # Only that file was looked at.
    (here.project / "plain").write_text("other\n")
    assert workspace.checkpoint(wait_for="sealed").message.stats.hashed <= 2


def test_a_file_that_is_too_large_and_is_cut_off_outside(here: Site, clients: ExitStack, outside: Path) -> None:
    os.truncate(outside, 11 << 20)
    workspace, first = _taken(here, clients)
    assert [(one.path, one.reason) for one in first.message.skipped] == [(b"src/deep/linked", "too-large")]
    os.truncate(outside, 10)
    second = workspace.checkpoint(wait_for="sealed")
    assert not second.message.skipped
    assert _content(second, "src/deep/linked") == outside.read_bytes()
    os.truncate(outside, 11 << 20)
    third = workspace.checkpoint(wait_for="sealed")
    assert third.message.skipped == first.message.skipped


def test_every_name_in_the_project_has_it(here: Site, clients: ExitStack, outside: Path) -> None:
    os.link(outside, here.project / "other")
    workspace, _ = _taken(here, clients)
    os.rename(here.project / "src", here.project / "sources")
    outside.write_text("second\n")
    after = workspace.checkpoint(wait_for="sealed")
    assert _content(after, "sources/deep/linked") == _content(after, "other") == b"second\n"
    # Through the mount it gets one more and loses one, and outside it is written again.
    os.link(here.project / "other", here.project / "third")
    (here.project / "other").unlink()
    outside.write_text("third\n")
    last = workspace.checkpoint(wait_for="sealed")
    assert _content(last, "sources/deep/linked") == _content(last, "third") == b"third\n"
    assert b"other" not in {entry.path for entry in last.ls()}


@pytest.mark.parametrize("change", ["rename", "chmod", "link"])
def test_what_is_written_outside_while_its_attributes_change_through_the_mount(
    here: Site, clients: ExitStack, outside: Path, change: str
) -> None:
    """Content of the same length, and the times are set back: nothing but the change through the mount can be seen."""
    workspace, _ = _taken(here, clients)
    inside = here.project / "src" / "deep" / "linked"
    name = "src/deep/linked"
    for content in ("SECOND\n"[:6], "THIRD\n"):
        _rewrite(outside, content)
        if change == "rename":
            inside = inside.rename(inside.with_name(f"renamed{content[0]}"))
            name = f"src/deep/{inside.name}"
        elif change == "chmod":
            inside.chmod(0o600 if content.startswith("S") else 0o644)
        else:
            os.link(inside, here.project / content.strip())
        assert _content(workspace.checkpoint(wait_for="sealed"), name).decode() == content


def test_it_is_kept_as_it_was_at_the_boundary(here: Site, clients: ExitStack, outside: Path) -> None:
    """Written outside before the boundary, and through the mount and outside after it, before anything is captured."""
    _taken(here, clients)
    inside = here.project / "src" / "deep" / "linked"
    outside.write_text("of the boundary\n")
    taken: list[Snapshot] = []

    def go_on() -> None:
        inside.write_text("later, through the mount\n")
        inside.rename(here.project / "moved")
        (here.project / "src" / "deep").rename(here.project / "deep")

    with unsealed(here, clients, taken):
        outside.write_text("later, outside\n")
        later = Aside(go_on)
    later.join()
    (snapshot,) = taken
    assert snapshot.message.state == snapshot_pb2.Snapshot.SEALED, snapshot.message
    assert _content(snapshot, "src/deep/linked") == b"of the boundary\n"
    with here.client() as cog:
        after = here.workspace(cog).checkpoint(wait_for="sealed")
        assert _content(after, "moved") == b"later, through the mount\n"
        outside.write_text("last\n")
        assert _content(here.workspace(cog).checkpoint(wait_for="sealed"), "moved") == b"last\n"


def test_several_boundaries_before_any_is_captured(here: Site, clients: ExitStack, outside: Path) -> None:
    workspace, _ = _taken(here, clients)
    inside = here.project / "src" / "deep" / "linked"
    large = here.project / "large"
    large.write_bytes(os.urandom(9 << 20))
    taken = []
    for number in range(6):
        # Neither is forgotten for the other: what the worker lists, and what it does not.
        if number % 3 == 1:
            inside.write_text(f"{number} through the mount\n")
        else:
            outside.write_text(f"{number} outside\n")
        if number == 3:
            (here.project / "src").rename(here.project / "sources")
            inside = here.project / "sources" / "deep" / "linked"
        taken.append((workspace.checkpoint(), outside.read_bytes(), str(inside.relative_to(here.project))))
        large.write_bytes(os.urandom(9 << 20))
    for snapshot, content, path in taken:
        workspace.checkpoint(wait_for="sealed")
        message = snapshot.refresh().message
        if message.state == snapshot_pb2.Snapshot.FAILED:
            # It was written outside after it had been protected, and before it was read.
            assert {one.path for one in message.failed} == {os.fsencode(path)}, message
        else:
            assert _content(snapshot, path) == content


def test_the_next_daemon_finds_it(here: Site, clients: ExitStack, outside: Path) -> None:
    _taken(here, clients)
    here.kill_daemon()
    outside.write_text("while there is none\n")
    here.start()
    with here.client() as cog:
        here.settled(cog)
        workspace = here.workspace(cog)
        after = workspace.checkpoint(wait_for="sealed")
        assert _content(after, "src/deep/linked") == b"while there is none\n"
        assert after.message.stats.hashed <= 1


def test_a_file_that_comes_out_of_a_place_that_is_left_out(here: Site, clients: ExitStack) -> None:
    """As package managers make them: a store outside, and links to it in node_modules."""
    store, module = here.base / "a.js", here.project / "node_modules" / "a" / "index.js"
    module.parent.mkdir(parents=True)
    store.write_text("one\n")
    os.link(store, module)
    workspace, _ = _taken(here, clients)
    os.link(module, here.project / "patched.js")
    assert _content(workspace.checkpoint(wait_for="sealed"), "patched.js") == b"one\n"
    for name, path in (("outside", store), ("in node_modules", module), ("inside", here.project / "patched.js")):
        path.write_text(f"{name}\n")
        assert _content(workspace.checkpoint(wait_for="sealed"), "patched.js").decode() == f"{name}\n"
    module.parent.rename(here.project / "vendored")
    assert _content(workspace.checkpoint(wait_for="sealed"), "vendored/index.js") == b"inside\n"
    store.write_text("outside again\n")
    last = workspace.checkpoint(wait_for="sealed")
    assert _content(last, "vendored/index.js") == _content(last, "patched.js") == b"outside again\n"


def test_a_snapshot_that_fails_hands_it_on(here: Site, clients: ExitStack, outside: Path) -> None:
    """What was read at a boundary that cannot be captured is of the next one, unless that has it as something else."""
    (here.project / "plain").unlink()
    os.link(here.base / "outside", here.project / "plain")
    victim, bare = here.project / "src" / "plain", here.base / "bare"
    os.link(victim, bare)
    _taken(here, clients)
    outside.write_text("of the first boundary\n")
    victim.write_text("through the mount\n")
    taken: list[Snapshot] = []
    with unsealed(here, clients, taken):
        bare.write_text("past the mount\n")
    (snapshot,) = taken
    assert snapshot.message.state == snapshot_pb2.Snapshot.FAILED
    assert {one.path for one in snapshot.message.failed} == {b"src/plain"}
    with here.client() as cog:
        after = here.workspace(cog).checkpoint(wait_for="sealed")
        assert _content(after, "plain") == _content(after, "src/deep/linked") == b"of the first boundary\n"
        assert _content(after, "src/plain") == b"past the mount\n"


def test_a_restore_does_not_lose_it(here: Site, clients: ExitStack, outside: Path) -> None:
    workspace, first = _taken(here, clients)
    outside.write_text("second\n")
    report = first.restore()
    assert list(report.restored) == [b"src/deep/linked"]
    assert (here.project / "src" / "deep" / "linked").read_text() == "first\n"
    # It is written under the other name by nobody.
    assert (outside.read_text(), outside.stat().st_nlink) == ("second\n", 1)
    workspace.undo()
    assert (here.project / "src" / "deep" / "linked").read_text() == "second\n"


def test_a_name_outside_that_goes_is_seen(here: Site, clients: ExitStack, outside: Path) -> None:
    """Files with more than one name are refused: with the other name gone it has only one."""
    here.ctl("mount", here.project, "--refuse-hard-links")
    workspace = here.workspace(clients.enter_context(here.client()))
    first = workspace.checkpoint(wait_for="sealed")
    assert [(one.path, one.reason) for one in first.message.skipped] == [(b"src/deep/linked", "hard-link")]
    outside.write_text("not to be read\n")
    second = workspace.checkpoint(wait_for="sealed")
    assert second.message.skipped == first.message.skipped
    outside.unlink()
    third = workspace.checkpoint(wait_for="sealed")
    assert not third.message.skipped
    assert _content(third, "src/deep/linked") == b"not to be read\n"


def test_a_writer_outside_that_never_rests(here: Site, clients: ExitStack, outside: Path) -> None:
    """Each snapshot has one of its states whole, or names the file."""
    workspace, _ = _taken(here, clients)
    written, stop = [0], False

    def write() -> None:
        while not stop:
            beside = str(written[0] + 1).encode() * 40_000
            with outside.open("r+b") as file:
                file.write(beside[:40_000])
            written[0] += 1

    writer = Aside(write)
    try:
        for number in range(8):
            (here.project / "plain").write_text(f"{number}\n")
            message = workspace.checkpoint(wait_for="sealed").message
            assert message.state == snapshot_pb2.Snapshot.SEALED
            skipped = {one.path: one.reason for one in message.skipped}
            assert skipped in ({}, {b"src/deep/linked": "changing"})
    finally:
        stop = True
        writer.join()
    after = workspace.checkpoint(wait_for="sealed")
    assert _content(after, "src/deep/linked") == outside.read_bytes()
    assert not differences(
        {path: node for path, node in of_snapshot(after).items() if path.endswith(b"plain")},
        {path: node for path, node in _tree(here.project).items() if path.endswith(b"plain")},
    )
