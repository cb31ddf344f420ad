"""What the undo log tells of a boundary."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cogfs.fsd.control.before import put_content
from cogfs.fsd.undolog import (
    LOST,
    TOO_LARGE,
    ContentWas,
    DirectoryMade,
    EntryWas,
    InodeWas,
    Status,
    UndoLog,
    UndoLogWriter,
    Was,
)
from cogfs.store.store import Store


def test_a_number_that_several_directories_had(tmp_path: Path) -> None:
    """Records of the new directory say nothing of the one that had its number before, nor the other way round."""
    writer = UndoLogWriter(tmp_path / "log")
    log = UndoLog(tmp_path / "log")
    old = EntryWas(3, 10, b"old", 11, stat.S_IFLNK)
    writer.append(old, DirectoryMade(3, 10))
    log.refresh()
    assert log.entry(10, b"old", 3) == old
    assert (log.replaced(10, 3), log.replaced(10, 4), log.replaced(12, 3)) == (True, False, False)
    # At boundary 5 the new one had a name, which is removed, and it goes, and a third one comes.
    new = EntryWas(5, 10, b"new", 12, stat.S_IFLNK)
    writer.append(new, DirectoryMade(6, 10))
    log.refresh()
    assert (log.names(10, 3), log.names(10, 5), log.names(10, 7)) == ([b"old"], [b"new"], [])
    assert (log.entry(10, b"new", 3), log.entry(10, b"new", 5), log.entry(10, b"new", 7)) == (None, new, None)
    assert (log.replaced(10, 3), log.replaced(10, 5), log.replaced(10, 7)) == (True, True, False)
    log.close()
    writer.close()


@pytest.mark.parametrize("reason", [LOST, TOO_LARGE])
def test_what_the_log_has_of_a_file_is_all_of_it(tmp_path: Path, reason: str) -> None:
    """Whatever the file was at a later boundary, at which it could not be kept."""

    def nowhere() -> int:
        raise AssertionError("the file itself is not looked at")

    writer = UndoLogWriter(tmp_path / "log")
    before = Status(7, stat.S_IFREG | 0o644, 0, 0, 1, 6, 1, 1)
    later = Status(7, stat.S_IFREG | 0o644, 0, 0, 1, 1 << 40, 2, 2)
    writer.append(InodeWas(1, Was(before, logged=True)), ContentWas(1, 7, 0, b"first\n"))
    writer.append(InodeWas(2, Was(later, reason=reason)))
    log = UndoLog(tmp_path / "log")
    log.refresh()
    with Store.open(tmp_path / "state" / "store") as store:
        found = put_content(store, log.content(7, 1), nowhere)
        assert isinstance(found.content, bytes)
        assert b"".join(store.read_file(found.content)) == b"first\n"
        assert not found.in_place
    log.close()
    writer.close()
