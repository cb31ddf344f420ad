"""What the undo log tells of a boundary."""

from __future__ import annotations

import stat
from pathlib import Path

from cogfs.fsd.undolog import DirectoryMade, EntryWas, UndoLog, UndoLogWriter


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
