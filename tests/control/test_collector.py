"""What undo logs name stays, and a log that cannot be read keeps everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cogfs.fsd.control import boundaries
from cogfs.fsd.control.ahead import Ahead
from cogfs.fsd.control.budget import Budget
from cogfs.fsd.control.collector import Collector
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.workspace import Workspace
from cogfs.fsd.undolog import InodeWas, Status, UndoLogWriter, Was
from cogfs.store.errors import NotFound
from cogfs.store.schema import BoundaryRow, WorkspaceOptions, WorkspaceRow
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(tmp_path / "state", tmp_path / "run", tmp_path / "run" / "socket")
    made.make()
    return made


@pytest.fixture
def store(places: Places) -> Iterator[Store]:
    with Store.open(places.store) as opened:
        yield opened


def _unlimited(store: Store) -> Budget:
    def find(workspace_id: str) -> Workspace:
        raise NotFound(workspace_id)

    return Budget(store, find, 0)


def _collect(store: Store, places: Places) -> int:
    return Collector(store, places, _unlimited(store)).collect(0, thorough=True, goes_on=lambda: True).objects


def _was(name: bytes) -> InodeWas:
    return InodeWas(1, Was(Status(7, 0o100644, 0, 0, 1, 4, 0, 0), hash=name))


def test_what_an_undo_log_names_stays_until_it_is_cleared(store: Store, places: Places) -> None:
    kept, garbage = store.put_blob(b"kept" * 100), store.put_blob(b"garbage" * 100)
    store.sync()
    log = UndoLogWriter(places.undo_log("w"))
    try:
        log.append(_was(kept), InodeWas(1, Was(Status(8, 0o40755, 0, 0, 2, 0, 0, 0))))
        assert _collect(store, places) == 1
        assert store.read_blob(kept) == b"kept" * 100
        assert not store.has(garbage)
        log.clear()
        assert _collect(store, places) == 1
        assert not store.has(kept)
    finally:
        log.close()


def test_what_was_read_at_a_boundary_stays_until_that_is_captured(store: Store, places: Places) -> None:
    kept, garbage = store.put_blob(b"kept" * 100), store.put_blob(b"garbage" * 100)
    store.sync()
    with store.write() as writer:
        writer.put_workspace(WorkspaceRow("w", b"/w", b"/w", WorkspaceOptions(), 0))
        changes = boundaries.with_seen(msgspec.msgpack.encode(boundaries.Listed([], [])), [_was(kept).was])
        writer.put_boundary(BoundaryRow("s", "w", 3, 1, 2, "boot", True, changes))
    assert _collect(store, places) == 1
    assert store.has(kept) and not store.has(garbage)
    with store.write() as writer:
        writer.delete_boundary("w", 3)
    assert _collect(store, places) == 1
    assert not store.has(kept)


def test_a_log_that_cannot_be_read_keeps_everything(store: Store, places: Places) -> None:
    name = store.put_blob(b"garbage" * 100)
    store.sync()
    places.undo_log("w").write_bytes(b"\x00\x00\x00\x02\xc1\xc1")
    with pytest.raises(CogfsError) as caught:
        _collect(store, places)
    assert caught.value.reason is Reason.IO
    assert store.has(name)
    places.undo_log("w").unlink()
    assert _collect(store, places) == 1


def test_what_was_captured_ahead_is_read_again_when_it_is_gone(store: Store, places: Places) -> None:
    name = store.put_blob(b"ahead" * 100)
    ahead = Ahead(store, "w")
    status = Status(7, 0o100644, 0, 0, 1, 500, 1, 1)
    known = ahead._due(status)
    assert known is not None
    known.hash, known.stat = name, (500, 1, 1)
    assert ahead.content(status) == name
    # That was before the collection began, and nobody has put it into a row.
    assert _collect(store, places) == 1
    assert ahead.content(status) is None


def test_a_collector_that_is_closed_ends_what_goes_on(store: Store, places: Places) -> None:
    store.put_blob(b"garbage" * 100)
    collector = Collector(store, places, _unlimited(store))
    collector.start()
    collector.close()
    done = collector.collect(0, thorough=True, goes_on=lambda: True)
    assert done.objects == 0
    assert done.deferred
