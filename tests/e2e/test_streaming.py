"""The changes of a restore and a rewind, piece by piece: the same as in one report, and no message grows with them."""

from __future__ import annotations

import os

import pytest

from cogfs.client import Client, Corrupt, IOFailed
from cogfs.v1 import common_pb2, snapshot_pb2
from tests.e2e.support.site import Site, wait_for
from tests.support.tree import describe, differences

_FILES = 3000


class Taken:
    """The pieces that came."""

    def __init__(self) -> None:
        self.pieces: list[common_pb2.RestoreChanges] = []

    def __call__(self, piece: common_pb2.RestoreChanges) -> None:
        self.pieces.append(piece)

    @property
    def files(self) -> list[common_pb2.FileChange]:
        return [file for piece in self.pieces for file in piece.files]

    @property
    def kept(self) -> list[common_pb2.PathReason]:
        return [one for piece in self.pieces for one in piece.kept]


def _changed(here: Site) -> None:
    """A file that is made, one that goes, one of another kind, and many that are written; and what is left alone."""
    for number in range(_FILES):
        (here.project / f"file{number}").write_text("one\ntwo\n")
    (here.project / "new").write_text("new\n")
    (here.project / "gone").unlink()
    (here.project / "kind").unlink()
    (here.project / "kind").mkdir()
    os.mkfifo(here.project / "fifo")


def _before(here: Site) -> None:
    for number in range(_FILES):
        (here.project / f"file{number}").write_text("one\n")
    (here.project / "gone").write_text("gone\n")
    (here.project / "kind").write_text("a file\n")


@pytest.mark.parametrize("way", ["restore", "rewind"])
def test_pieces_and_report_say_the_same(here: Site, way: str) -> None:
    _before(here)
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        entry = thread.user_message("hello")
        snapshot = cog.snapshot(entry.file_checkpoint.snapshot_id)
        before = describe(here.project)
        _changed(here)

        def go(taken: Taken | None, *, dry_run: bool) -> common_pb2.RestoreReport:
            if way == "restore":
                return snapshot.restore(dry_run=dry_run, changes=taken)
            return thread.rewind(entry.id, files=True, dry_run=dry_run, changes=taken).files.restore

        whole = go(None, dry_run=True)
        assert {len(whole.restored), whole.restored_count} == {_FILES + 2}
        assert (list(whole.deleted), whole.deleted_count) == ([b"new"], 1)
        assert [(one.path, one.reason) for one in whole.kept] == [(b"fifo", "special")] and whole.kept_count == 1
        assert (whole.insertions, whole.deletions) == (_FILES + 1, 2)
        for dry_run in (True, False):
            taken = Taken()
            report = go(taken, dry_run=dry_run)
            assert taken.files == list(whole.files) and taken.kept == list(whole.kept)
            assert len(taken.pieces) > 2 and max(piece.ByteSize() for piece in taken.pieces) < 200_000
            assert not (report.files or report.restored or report.deleted or report.kept)
            assert (report.insertions, report.deletions) == (whole.insertions, whole.deletions)
            assert (report.restored_count, report.deleted_count, report.kept_count) == (_FILES + 2, 1, 1)
        assert not differences(describe(here.project), before, [b"fifo"])
        # An undo is told in one report.
        undone = here.workspace(cog).undo().files
        assert len(undone.files) == _FILES + 3 == undone.restored_count + undone.deleted_count


def test_a_client_that_goes_away_does_not_end_it(here: Site) -> None:
    _before(here)
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        entry = thread.user_message("hello")
        before = describe(here.project)
        _changed(here)
        last = thread.append("assistant", "done").id

    class Enough(Exception):
        pass

    def leave(progress: snapshot_pb2.RestoreProgress) -> None:
        if progress.phase == snapshot_pb2.RestoreProgress.APPLYING:
            raise Enough

    with here.client() as cog, pytest.raises(Enough):
        cog.thread("chat").rewind(entry.id, files=True, progress=leave)
    with here.client() as cog:
        wait_for("the conversation has gone back", lambda: cog.thread("chat").message.leaf_id != last)
        assert not differences(describe(here.project), before, [b"fifo"])


def test_a_forced_rewind_that_cannot_be_made_is_found_out_before_anything_is_stopped(here: Site) -> None:
    content = os.urandom(50_000)
    (here.project / "precious").write_bytes(content)
    here.mount()
    with here.client() as cog:
        thread = cog.create_thread("chat", workspace=here.workspace(cog))
        entry = thread.user_message("hello", wait_for="sealed")
        (here.project / "precious").write_bytes(b"changed")
        _damage(here, content)
        with thread.run() as run:
            with pytest.raises((Corrupt, IOFailed)):
                thread.rewind(entry.id, files=True, force=True)
            run.append("assistant", "goes on")
        assert (here.project / "precious").read_bytes() == b"changed"


def test_what_goes_has_to_be_in_the_safety_snapshot(here: Site) -> None:
    """A content that is damaged in the store, and would be there alone after the restore, refuses it."""
    content = os.urandom(50_000)
    (here.project / "precious").write_bytes(b"before")
    here.mount()
    with here.client() as cog:
        workspace = here.workspace(cog)
        first = workspace.checkpoint(wait_for="sealed")
        (here.project / "precious").write_bytes(content)
        workspace.checkpoint(wait_for="sealed")
        _damage(here, content)
        with pytest.raises((Corrupt, IOFailed)):
            first.restore()
        assert (here.project / "precious").read_bytes() == content
        _still_there(cog, here)


def _damage(here: Site, content: bytes) -> None:
    packs = (here.state / "store" / "packs").iterdir()
    (pack,) = (path for path in packs if content[:500] in path.read_bytes())
    at = pack.read_bytes().index(content[:500]) + 250
    with pack.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[250] ^ 0xFF]))


def _still_there(cog: Client, here: Site) -> None:
    """It is served, and not read-only."""
    here.settled(cog)
    (here.project / "more").write_text("more\n")
