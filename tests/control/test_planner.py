"""What a restore changes and what it leaves alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.planner import Action, Planner, changes, find, normal_path, patched, walk
from cogfs.fsd.control.rules import Rules
from cogfs.store.schema import Kind
from cogfs.v1.reasons import Reason
from tests.control.files import ANY_SIZE, Directory
from tests.support.tree import describe, differences


def test_nothing_changed_is_an_empty_plan(place: Directory) -> None:
    (place.root / "a").write_text("a")
    (place.root / "d").mkdir()
    target = place.record()
    before = os.stat(place.root / "a")
    plan = place.restore(target)
    assert plan.empty
    after = os.stat(place.root / "a")
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def test_files_that_are_right_keep_inode_and_times(place: Directory) -> None:
    (place.root / "same").write_text("same")
    (place.root / "other").write_text("one")
    target = place.record()
    before = os.stat(place.root / "same")
    (place.root / "other").write_text("two")
    plan = place.restore(target)
    assert [step.path for step in plan.steps] == [b"other"]
    after = os.stat(place.root / "same")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (place.root / "other").read_text() == "one"


KINDS = ("nothing", "file", "link", "directory", "full", "hard link")


def _make(root: Path, kind: str) -> None:
    path = root / "it"
    match kind:
        case "file":
            path.write_bytes(b"content\n")
            path.chmod(0o751)
        case "link":
            path.symlink_to("no/where")
        case "directory":
            path.mkdir(mode=0o750)
        case "full":
            (path / "inner" / "most").mkdir(parents=True)
            (path / "file").write_bytes(b"in it")
            (path / "inner" / "file").write_bytes(b"deeper")
            (path / "inner").chmod(0o700)
        case "hard link":
            (root / "other").write_bytes(b"shared")
            os.link(root / "other", path)


def _clear(root: Path) -> None:
    for name in ("it", "other"):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            os.system(f"rm -rf '{path}'")
        elif path.is_symlink() or path.exists():
            path.unlink()


@pytest.mark.parametrize("now", KINDS)
@pytest.mark.parametrize("then", KINDS)
def test_every_kind_becomes_every_other(place: Directory, then: str, now: str) -> None:
    _make(place.root, then)
    wanted = describe(place.root)
    target = place.record()
    _clear(place.root)
    _make(place.root, now)
    plan = place.plan(target)
    place.execute(plan)
    assert not differences(describe(place.root), wanted)
    # What is done can be done again, as after a crash.
    place.execute(plan)
    assert not differences(describe(place.root), wanted)
    assert place.plan(target).empty


def test_modes_and_attributes_alone_are_set_in_place(place: Directory) -> None:
    path = place.root / "tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o4755)
    os.setxattr(path, "user.kind", b"tool")
    target = place.record()
    path.chmod(0o600)
    os.setxattr(path, "user.kind", b"other")
    os.setxattr(path, "user.more", b"x")
    inode = path.stat().st_ino
    plan = place.restore(target)
    assert [step.action for step in plan.steps] == [Action.METADATA]
    assert path.stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o4755
    assert os.getxattr(path, "user.kind") == b"tool"
    assert os.listxattr(path) == ["user.kind"]


def test_a_file_linked_from_outside_is_never_written_in_place(place: Directory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    path = place.root / "inside"
    path.write_text("then")
    path.chmod(0o644)
    target = place.record()
    path.unlink()
    outside.write_text("then")
    os.link(outside, path)
    outside.chmod(0o600)
    place.restore(target)
    assert path.read_text() == "then"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(outside.stat().st_mode) == 0o600
    assert outside.stat().st_nlink == 1


def test_hard_links_come_back_as_links(place: Directory) -> None:
    (place.root / "d").mkdir()
    (place.root / "a").write_text("shared")
    os.link(place.root / "a", place.root / "b")
    os.link(place.root / "a", place.root / "d" / "c")
    wanted = describe(place.root)
    target = place.record()
    (place.root / "b").unlink()
    (place.root / "b").write_text("shared")
    place.restore(target)
    assert not differences(describe(place.root), wanted)
    (place.root / "a").unlink()
    (place.root / "d" / "c").write_text("changed through another name")
    place.restore(target)
    assert not differences(describe(place.root), wanted)


def test_a_name_restored_alone_takes_nothing_from_names_that_are_not(place: Directory) -> None:
    (place.root / "a").write_text("then")
    os.link(place.root / "a", place.root / "b")
    target = place.record()
    for name in ("a", "b"):
        (place.root / name).unlink()
        (place.root / name).write_text(f"now in {name}")
    place.restore(target, paths=(b"b",))
    assert (place.root / "a").read_text() == "now in a"
    assert (place.root / "b").read_text() == "then"
    assert place.plan(target, paths=(b"b",)).empty


@pytest.mark.parametrize("more", ["", "other content", "other mode"])
def test_a_name_that_was_restored_alone_goes_back_to_the_others_as_they_were(place: Directory, more: str) -> None:
    """What is not in the filter is linked to where it is what it was."""
    root = place.root
    (root / "d").mkdir()
    (root / "d" / "a").write_text("then")
    os.link(root / "d" / "a", root / "b")
    target, was = place.record(), describe(root)
    (root / "b").unlink()
    (root / "b").write_text("a file of its own")
    if more == "other content":
        (root / "d" / "a").write_text("now")
    elif more:
        (root / "d" / "a").chmod(0o600)
    other = describe(root)[b"d/a"]
    place.restore(target, paths=(b"b",), back=True)
    now = describe(root)
    assert now[b"b"].content == was[b"b"].content
    if more:
        assert now[b"d/a"] == other and not now[b"b"].group
    else:
        assert not differences(now, was)
    assert place.plan(target, paths=(b"b",), back=True).empty


_PIECE = 64 * 1024


@pytest.mark.parametrize(
    "parts",
    [
        [(0, b"x"), (40 * _PIECE, b"y")],
        [(3 * _PIECE + 5, b"in the middle"), (20 * _PIECE - 1, b"")],
        [(0, b"z" * _PIECE), (2 * _PIECE, b"z" * (_PIECE + 1)), (9 * _PIECE, b"")],
        [(7 * _PIECE, b"")],
        [(100, b"")],
    ],
)
def test_a_file_with_holes_takes_no_more_room_than_before(place: Directory, parts: list[tuple[int, bytes]]) -> None:
    path = place.root / "holes"
    with path.open("wb") as file:
        for offset, data in parts:
            file.seek(offset)
            file.write(data)
        file.truncate(max(offset + len(data) for offset, data in parts))
    content, blocks = path.read_bytes(), path.stat().st_blocks
    target = place.record()
    path.unlink()
    place.restore(target)
    assert path.read_bytes() == content
    # What is less than a piece is written.
    assert path.stat().st_blocks * 512 <= blocks * 512 + 2 * len(parts) * _PIECE


def test_a_name_that_cannot_come_back_is_no_difference_to_the_others(place: Directory) -> None:
    (place.root / "a").write_text("then")
    os.link(place.root / "a", place.root / "b")
    os.link(place.root / "a", place.root / "c")
    target = place.record()
    for name in "abc":
        (place.root / name).unlink()
    (place.root / "c" / ".git").mkdir(parents=True)
    plan = place.restore(target)
    assert plan.restored() == [b"a", b"b"]
    assert (place.root / "a").stat().st_ino == (place.root / "b").stat().st_ino
    assert place.plan(target).empty


def test_links_that_were_apart_are_apart_again(place: Directory) -> None:
    (place.root / "a").write_text("same")
    (place.root / "b").write_text("same")
    wanted = describe(place.root)
    target = place.record()
    (place.root / "b").unlink()
    os.link(place.root / "a", place.root / "b")
    place.restore(target)
    assert not differences(describe(place.root), wanted)


def test_the_number_of_a_link_group_is_no_difference(place: Directory) -> None:
    (place.root / "a").write_text("x")
    os.link(place.root / "a", place.root / "b")
    other = Directory(place.store, place.root)
    target = other.record()
    other.close()
    assert place.record().hash != target.hash
    assert place.plan(target).empty


def test_what_the_snapshot_left_out_is_kept(place: Directory) -> None:
    rules = Rules(("*.log", "build/"), 100)
    (place.root / "source").write_text("then")
    (place.root / "large").write_bytes(b"x" * 200)
    target = place.record(rules)
    (place.root / "source").write_text("now")
    (place.root / "large").write_bytes(b"y" * 300)
    (place.root / "larger").write_bytes(b"z" * 101)
    (place.root / "new.log").write_text("log")
    (place.root / "build").mkdir()
    (place.root / "build" / "output").write_text("o")
    (place.root / ".git").mkdir()
    (place.root / ".git" / "HEAD").write_text("ref")
    os.mkfifo(place.root / "fifo")
    (place.root / "mixed").mkdir()
    (place.root / "mixed" / "node_modules").mkdir()
    (place.root / "mixed" / "gone").write_text("g")
    plan = place.restore(target, rules)
    assert dict(plan.kept) == {
        b".git": "excluded",
        b"build": "excluded",
        b"fifo": "special",
        b"larger": "too-large",
        b"mixed/node_modules": "excluded",
        b"new.log": "excluded",
    }
    assert plan.deleted() == [b"mixed/gone"]
    assert (place.root / "source").read_text() == "then"
    assert (place.root / "large").read_bytes() == b"y" * 300
    assert (place.root / "mixed" / "node_modules").is_dir()
    assert not (place.root / "mixed" / "gone").exists()


def test_a_directory_that_is_left_out_does_not_give_way_to_a_file_of_its_name(place: Directory) -> None:
    rules = Rules(("build/",), ANY_SIZE)
    (place.root / "build").write_text("a script")
    (place.root / "other").write_text("one")
    target = place.record(rules)
    (place.root / "build").unlink()
    (place.root / "build").mkdir()
    (place.root / "build" / "out").write_text("made")
    (place.root / "other").write_text("two")
    plan = place.restore(target, rules)
    assert plan.kept == [(b"build", "excluded")]
    assert (place.root / "other").read_text() == "one"
    assert (place.root / "build" / "out").read_text() == "made"


def test_a_directory_with_something_kept_does_not_give_way_to_a_file(place: Directory) -> None:
    (place.root / "it").write_text("file")
    target = place.record()
    (place.root / "it").unlink()
    (place.root / "it").mkdir()
    (place.root / "it" / ".git").mkdir()
    (place.root / "it" / "mine").write_text("m")
    plan = place.restore(target)
    assert plan.empty
    assert (b"it/.git", "excluded") in plan.kept
    assert (place.root / "it" / "mine").read_text() == "m"


def test_a_filter_restores_only_its_paths(place: Directory) -> None:
    (place.root / "a" / "b").mkdir(parents=True)
    (place.root / "a" / "b" / "one").write_text("then")
    (place.root / "a" / "two").write_text("then")
    target = place.record()
    (place.root / "a" / "b" / "one").write_text("now")
    (place.root / "a" / "two").write_text("now")
    (place.root / "a" / "b" / "three").write_text("new")
    plan = place.restore(target, paths=(b"a/b",))
    assert [step.path for step in plan.steps] == [b"a/b/one", b"a/b/three"]
    assert (place.root / "a" / "two").read_text() == "now"


def test_a_filter_below_a_directory_that_is_gone_makes_it_again(place: Directory) -> None:
    (place.root / "a" / "b").mkdir(parents=True)
    (place.root / "a" / "b" / "one").write_text("then")
    (place.root / "a" / "other").write_text("then")
    target = place.record()
    os.system(f"rm -rf '{place.root / 'a'}'")
    place.restore(target, paths=(b"a/b/one",))
    assert set(describe(place.root)) == {b"", b"a", b"a/b", b"a/b/one"}


@pytest.mark.parametrize("path", [b"/etc", b"../x", b"a/../../x", b"a\0b"])
def test_a_filter_stays_inside(path: bytes) -> None:
    with pytest.raises(CogfsError) as caught:
        normal_path(path)
    assert caught.value.reason is Reason.VALIDATION_ERROR


def test_normal_path() -> None:
    assert normal_path(b"a//b/./c/") == b"a/b/c"
    assert normal_path(b".") == b""


def test_changes_are_the_plain_difference(place: Directory) -> None:
    (place.root / "gone").write_text("g")
    (place.root / "d").mkdir()
    (place.root / "d" / "kept").write_text("k")
    (place.root / "d" / "changed").write_text("1")
    old = place.record()
    (place.root / "gone").unlink()
    (place.root / "d" / "changed").write_text("22")
    (place.root / "new").mkdir()
    (place.root / "new" / "file").write_text("n")
    new = place.record()
    found = {step.path: step.action for step in changes(place.store, old, new)}
    assert found == {
        b"gone": Action.DELETE,
        b"d/changed": Action.REPLACE,
        b"new": Action.CREATE,
        b"new/file": Action.CREATE,
    }
    assert [step.path for step in changes(place.store, old, new, (b"new/file", b"d"))] == [b"d/changed", b"new/file"]


def test_patched_replaces_one_path_and_nothing_else(place: Directory) -> None:
    (place.root / "a" / "b").mkdir(parents=True)
    (place.root / "a" / "b" / "f").write_text("1")
    (place.root / "a" / "g").write_text("2")
    root = place.record()
    entry = find(place.store, root, b"a/g")
    assert entry is not None and entry.kind is Kind.FILE
    again = patched(place.store, root, {b"a/b/f": entry})
    assert {path for path, _ in walk(place.store, again.hash)} == {b"a", b"a/b", b"a/b/f", b"a/g"}
    changed = find(place.store, again, b"a/b/f")
    assert changed is not None and changed.hash == entry.hash and changed.name == b"f"
    assert patched(place.store, root, {b"a/g": entry}) == root
    without = patched(place.store, root, {b"a/g": None})
    assert find(place.store, without, b"a/g") is None


def test_files_with_several_names_are_kept_where_the_snapshot_refused_them(place: Directory, tmp_path: Path) -> None:
    """Those that it skipped, and those made since, which it could not have kept."""
    rules = Rules((), ANY_SIZE, refuse_hard_links=True)
    for name in ("then", "alone"):
        (tmp_path / name).write_text(name)
    os.link(tmp_path / "then", place.root / "then")
    (place.root / "file").write_text("file")
    target = place.record(rules)
    os.link(tmp_path / "then", place.root / "since")
    (place.root / "then").unlink()
    os.link(tmp_path / "alone", place.root / "then")
    # Recorded with the refusal, and after it was taken away.
    for current in (rules, Rules((), ANY_SIZE)):
        now = place.record(current)
        plan = Planner(place.store, rules).plan(now, target)
        assert plan.empty
        assert plan.kept == [(b"since", "hard-link"), (b"then", "hard-link")]


def test_a_file_with_several_names_gives_way_to_what_the_snapshot_has(place: Directory, tmp_path: Path) -> None:
    rules = Rules((), ANY_SIZE, refuse_hard_links=True)
    path, outside = place.root / "file", tmp_path / "outside"
    path.write_text("kept")
    target = place.record(rules)
    outside.write_text("of somebody else")
    path.unlink()
    os.link(outside, path)
    plan = place.restore(target, rules)
    assert [step.path for step in plan.uncaptured()] == [b"file"]
    assert path.read_text() == "kept"
    assert (outside.read_text(), outside.stat().st_nlink) == ("of somebody else", 1)
