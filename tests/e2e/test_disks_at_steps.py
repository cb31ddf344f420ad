"""The disk of the store fills up, or becomes read-only, at each labelled step of checkpoint, preserve and seal.

The daemon is stopped at the step, the disk is changed, and the daemon goes on. Whatever the step: a snapshot that was
answered is right or FAILED with the reason, a message is saved or refused with the reason, and the program in the mount
writes on. When the disk is well again, the next checkpoint is right.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cogfs.client import CogfsError, Snapshot, Workspace
from cogfs.v1 import snapshot_pb2
from tests.e2e.support.disks import ext4, fill, loop_of, make_read_only, shut_down, xfs
from tests.e2e.support.site import Aside, Site, mounts_below, wait_for
from tests.e2e.support.writing import running
from tests.support.stopping import FAILING, UNSEALED, Stopped, labels
from tests.support.tree import Tree, describe, differences, of_snapshot

#: Of a start, a restore, a fork, a collection, a repack and a repair, which are tried elsewhere.
_ELSEWHERE = {
    *("store.create", "store.format", "store.upgrade", "index.create", "index.upgrade"),
    *("pack.recover", "pack.renew", "pack.truncate", "pack.discard", "pack.remove", "pack.removed"),
}
_ELSEWHERE_ALL = ("restore.", "fork.", "gc.", "repack.", "compact.", "repair.")
LABELS = [label for label in labels("fsd", "store") if label not in _ELSEWHERE and not label.startswith(_ELSEWHERE_ALL)]
#: The passing at which it stops, where later ones are of something else: of the boundary first, then of the seal.
_PASSINGS = [(label, 1) for label in LABELS] + [("index.commit", 2), ("index.committed", 2), ("pack.append", 5)]
_MORE = {"preserve.captured": UNSEALED, "seal.failed": FAILING}
_DONE = (snapshot_pb2.Snapshot.SEALED, snapshot_pb2.Snapshot.FAILED)
_FULL, _READ_ONLY, _BROKEN, _BROKEN_XFS = "full", "read-only", "broken", "broken xfs"
_WHY = {
    _FULL: ("space", "test has it fail"),
    _READ_ONLY: ("read-only", "input/output error", "test has it fail", "went down"),
    _BROKEN: ("input/output error", "read-only", "structure needs cleaning", "test has it fail"),
    _BROKEN_XFS: ("input/output error", "structure needs cleaning", "test has it fail"),
}
#: Bytes of a file that the undo log does not take, so that it is captured before it is cut off.
_LARGE = 1_200_000
#: Seconds in which any write in the mount has to be done.
_PATIENCE = 60.0


def test_the_labels_are_known() -> None:
    """A step that is new in the code is tried here from then on."""
    assert {
        *("checkpoint.frozen", "checkpoint.committed", "checkpoint.recorded", "preserve.captured"),
        *("seal.recorded", "seal.committed", "seal.failed", "index.write", "index.commit", "index.committed"),
        *("pack.create", "pack.header", "pack.append", "pack.appended", "pack.sync", "pack.directory"),
    } <= set(LABELS)


def _write(place: Path, large: bool = False) -> None:
    for number in range(30):
        (place / f"f{number}").write_bytes(os.urandom(4_000))
    if large:
        (place / "large").write_bytes(os.urandom(_LARGE))


def _tree(place: Path) -> Tree:
    """Without the root, and what a program writes meanwhile."""
    return _kept(describe(place))


def _kept(tree: Tree) -> Tree:
    return {path: node for path, node in tree.items() if path and not path.startswith(b"pair")}


class _Store:
    """The store's disk, and what becomes of it."""

    def __init__(self, here: Site, kind: str) -> None:
        self._here = here
        self.kind = kind
        self._image = here.base / "state.img"
        self._make = xfs if kind == _BROKEN_XFS else ext4
        self._stack = ExitStack()
        self._stack.enter_context(self._make(self._image, here.state))
        self._ballast: Path | None = None

    def close(self) -> None:
        self._stack.close()

    def spoil(self) -> None:
        # As after a while: a page that was written out has to be asked for again by who stores into a map of it.
        subprocess.run(["sync", "--file-system", str(self._here.state)], check=True, timeout=60)
        if self.kind == _FULL:
            self._ballast = fill(self._here.state)
        elif self.kind == _READ_ONLY:
            make_read_only(self._here.state)
        else:
            shut_down(self._here.state)

    def heal(self) -> None:
        """A full disk gets room, and the same daemon goes on. Any other cannot be written any more by those who have it
        open, and has to be mounted anew, for a new daemon."""
        here = self._here
        if self._ballast is not None:
            self._ballast.unlink()
            return
        here.ctl("daemon", "stop")
        assert not mounts_below(here.project) and not mounts_below(here.base / "at")
        self._stack.close()
        # Nobody has anything of it open.
        wait_for("the loop device ends", lambda: not loop_of(self._image))
        self._stack.enter_context(self._make(self._image, here.state))


@contextmanager
def _store(here: Site, kind: str) -> Iterator[_Store]:
    store = _Store(here, kind)
    try:
        yield store
        here.ctl("daemon", "stop")
    finally:
        here.close_processes()
        store.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("label", "passing"), _PASSINGS)
@pytest.mark.parametrize("kind", [_FULL, _READ_ONLY])
def test_a_disk_that_is_spoiled_at_a_step(here: Site, kind: str, label: str, passing: int) -> None:
    _try(here, kind, label, passing)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("label", ["checkpoint.frozen", "pack.append", "index.commit", "seal.recorded"])
@pytest.mark.parametrize("kind", [_BROKEN, _BROKEN_XFS])
def test_a_disk_that_breaks_at_a_step(here: Site, kind: str, label: str) -> None:
    _try(here, kind, label, 1)


def _try(here: Site, kind: str, label: str, passing: int) -> None:
    # Only a project whose bare directory is there for everybody is read before a checkpoint is answered.
    at_once = label == "checkpoint.recorded"
    large = label == "preserve.captured"
    place = here.base / "at" if at_once else here.project
    with _store(here, kind) as store:
        stopped = Stopped(here, label, passing, _MORE.get(label, ""))
        here.ctl("mount", here.project, *(("--at", place) if at_once else ()))
        _write(place)
        with here.client() as cog, running("pair", place / "pair"):
            workspace = here.workspace(cog)
            thread = cog.create_thread("chat", workspace=workspace)
            first = cog.snapshot(thread.user_message("first", wait_for="sealed").file_checkpoint.snapshot_id)
            was_first = _tree(place)
            _write(place, large)
            was = _tree(place)
            stopped.arm()
            message = Aside(lambda: thread.append_entry("user", "second", id="second"))
            wait_for("the message is saved, or the step", lambda: message.result is not None or stopped.reached)
            # What is of the boundary is changed while it is captured.
            changing = [Aside(lambda: _write(place, large))] if message.result is not None else []
            stopped.wait()
            store.spoil()
            stopped.go_on()
            message.join()
            changing += [Aside(lambda: _change(place))] if not changing else []
            for one in changing:
                one.join(_PATIENCE)
            Aside(lambda: _change(place)).join(_PATIENCE)
            second = _answered(message, kind)
            third, was_third = _further(workspace, kind), _tree(place)
        pid = here.daemon_pid()
        store.heal()
        if kind != _FULL:
            # The workspace is mounted again by it.
            here.ctl("daemon", "start")
        with here.client() as cog:
            here.settled(cog)
            assert (here.daemon_pid() == pid) == (kind == _FULL)
            last = here.workspace(cog).checkpoint(wait_for="sealed")
            assert not differences(_kept(of_snapshot(last)), _tree(place)), here.log_tail()
            assert not differences(_kept(of_snapshot(cog.snapshot(first.id))), was_first)
            for snapshot_id, then in ((second, was), (third, was_third)):
                if snapshot_id:
                    _check(here, cog.snapshot(snapshot_id), then)
            assert here.ctl("daemon", "status").code == 0


def _change(place: Path) -> None:
    _write(place)
    (place / "made").mkdir()
    (place / "made" / "file").write_text("made\n")
    (place / "made").rename(place / "moved")
    (place / "moved" / "file").unlink()
    (place / "moved").rmdir()
    (place / "f1").unlink()


def _answered(message: Aside, kind: str) -> str:
    """The snapshot of the message, where it got one; else it says why not."""
    if message.error is not None:
        assert _says(str(message.error), kind), message.error
        assert kind == _FULL or "cogfsctl daemon stop" in str(message.error)
        return ""
    answer = message.result
    assert answer is not None
    entry = getattr(answer, "entry")  # noqa: B009
    if entry.HasField("file_checkpoint"):
        return str(entry.file_checkpoint.snapshot_id)
    error = str(getattr(answer, "checkpoint_error"))  # noqa: B009
    assert _says(error, kind), error
    return ""


def _further(workspace: Workspace, kind: str) -> str:
    """A further snapshot, on the disk as it is then, or why there is none."""
    try:
        return workspace.checkpoint().id
    except CogfsError as error:
        assert _says(str(error), kind), error
        return ""


def _check(here: Site, snapshot: Snapshot, was: Tree) -> None:
    """What was answered is right, or has failed and says why."""
    wait_for("it is captured or has failed", lambda: snapshot.refresh().message.state in _DONE)
    message = snapshot.message
    if message.state == snapshot_pb2.Snapshot.SEALED:
        assert not differences(_kept(of_snapshot(snapshot)), was), here.log_tail()
    else:
        assert message.reason, message


def _says(text: str, kind: str) -> bool:
    """Why there is none: what is wrong with the disk, in words that are no traceback."""
    return any(why in text.lower() for why in _WHY[kind]) and "internal" not in text
