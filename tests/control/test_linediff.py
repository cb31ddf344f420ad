"""Line counts and unified diffs, against a patch program and plain counting."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cogfs.fsd.control.linediff import MAX_BYTES, compare, is_binary

LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"a\r\n", b"\x0bx\n", b"longer line\n"]), max_size=30)
TEXT = st.tuples(LINES, st.sampled_from([b"", b"end without newline"])).map(lambda parts: b"".join(parts[0]) + parts[1])


def _count(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


@given(TEXT, TEXT)
def test_counts_balance(old: bytes, new: bytes) -> None:
    change = compare(old, new, unified=True)
    assert _count(old) - change.deletions + change.insertions == _count(new)
    assert (change.insertions == change.deletions == 0) == (old == new)
    plain = compare(old, new)
    assert (plain.insertions, plain.deletions) == (change.insertions, change.deletions)


@given(old=TEXT, new=TEXT)
@settings(max_examples=60, deadline=None)
def test_a_unified_diff_patches_the_old_into_the_new(
    tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes
) -> None:
    change = compare(old, new, unified=True)
    directory: Path = tmp_path_factory.mktemp("patch")
    (directory / "file").write_bytes(old)
    if change.hunks:
        patch = b"--- a/file\n+++ b/file\n" + change.hunks
        done = subprocess.run(
            ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"],
            check=False,
            input=patch,
            cwd=directory,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        found = (directory / "file").read_bytes() if (directory / "file").exists() else b""
    else:
        found = old
    assert found == new


def test_binary_is_said_so() -> None:
    assert compare(b"a\0b", b"text\n").binary
    assert compare(b"text\n", b"x" * 9000 + b"\0").binary is False
    assert is_binary(b"x" * (MAX_BYTES + 1))


def test_a_file_that_appears_counts_whole() -> None:
    assert compare(b"", b"a\nb\nc").insertions == 3
    assert compare(b"a\nb\nc", b"").deletions == 3
