"""Files that have names elsewhere: what a boundary keeps of them, and that nothing is done where there are none."""

from __future__ import annotations

import os
from pathlib import Path

from cogfs.fsd.channel import DirtyFile, pack
from cogfs.fsd.control import boundaries
from cogfs.fsd.control.elsewhere import Elsewhere
from cogfs.fsd.control.scanned import ScannedLink
from cogfs.fsd.undolog import Status, Was
from cogfs.store.store import Store


def _was(inode: int, content: bytes) -> Was:
    return Was(Status(inode, 0o100644, 0, 0, 2, 1, 1, 1), hash=content * 32)


def _file(inode: int, *, content: bool) -> DirtyFile:
    return DirtyFile(inode, [b"name"], [1], content)


def test_where_there_are_none_nothing_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    link = ScannedLink("ws", os.fsencode(tmp_path / "root"))
    link.close()  # Whoever looks meets an error.
    with Store.open(tmp_path / "store") as store:
        elsewhere = Elsewhere(store, "ws")
        assert elsewhere.changed(link) == []
        assert elsewhere.unrecorded(link) == []


def test_what_a_worker_handed_over_is_kept_as_it_came() -> None:
    packed = bytes(pack([], [_file(5, content=False)]))
    assert boundaries.with_seen(packed, []) == packed
    assert boundaries.decode(packed) == boundaries.Listed([], [_file(5, content=False)], [])


def test_what_was_read_at_once_is_listed_with_its_names() -> None:
    packed = boundaries.with_seen(bytes(pack([], [_file(5, content=False)])), [_was(5, b"a"), _was(6, b"b")])
    listed = boundaries.decode(packed)
    assert listed.files == [_file(5, content=True), DirtyFile(6, [], [], True)]
    assert listed.seen == [_was(5, b"a"), _was(6, b"b")]


def test_a_boundary_that_failed_hands_on_what_was_read() -> None:
    """But not where the next one has it as something else: read again, or changed through the mount."""
    first = boundaries.with_seen(bytes(pack([], [])), [_was(5, b"a"), _was(6, b"b"), _was(7, b"c")])
    second = boundaries.with_seen(bytes(pack([], [_file(6, content=False)])), [_was(7, b"d")])
    merged = boundaries.decode(boundaries.merge(first, second))
    assert merged.seen == [_was(5, b"a"), _was(7, b"d")]
    assert {file.inode: file.content for file in merged.files} == {5: True, 6: True, 7: True}
