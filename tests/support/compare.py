"""What is in a directory, found by a walk of its own, and how two such findings differ."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cogfs.client import Snapshot
from cogfs.v1 import snapshot_pb2

#: Never recorded, at any depth.
LEFT_OUT = frozenset({b".git", b"node_modules", b".cogfs"})


@dataclass(frozen=True)
class Found:
    """One path, without times."""

    kind: str
    mode: int
    #: Digest of a file's content, target of a symlink.
    content: bytes = b""
    #: All paths of the same file, when there are several.
    names: frozenset[bytes] = frozenset()


Tree = dict[bytes, Found]


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def walk(root: Path | bytes) -> Tree:
    """Everything below ``root``, and the root itself as ``b""``; without what is never recorded."""
    top = os.fsencode(root)
    found: Tree = {b"": Found("directory", stat.S_IMODE(os.lstat(top).st_mode))}
    names: defaultdict[int, set[bytes]] = defaultdict(set)
    inodes: dict[bytes, int] = {}
    waiting = [b""]
    while waiting:
        directory = waiting.pop()
        try:
            entries = list(os.scandir(os.path.join(top, directory)))
        except PermissionError:
            found[directory] = Found("unreadable", found[directory].mode)
            continue
        for entry in entries:
            if entry.name in LEFT_OUT:
                continue
            path = os.path.join(directory, entry.name)
            status = entry.stat(follow_symlinks=False)
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                found[path] = Found("directory", mode)
                waiting.append(path)
            elif stat.S_ISLNK(status.st_mode):
                found[path] = Found("symlink", 0, os.readlink(entry.path))
            elif stat.S_ISREG(status.st_mode):
                with open(entry.path, "rb") as file:
                    found[path] = Found("file", mode, digest(file.read()))
                inodes[path] = status.st_ino
                names[status.st_ino].add(path)
            else:
                found[path] = Found("special", mode)
    return _with_names(found, inodes, names)


def of_snapshot(snapshot: Snapshot) -> Tree:
    """The same of what a snapshot holds, by listing and reading it through the API."""
    found: Tree = {}
    names: defaultdict[int, set[bytes]] = defaultdict(set)
    groups: dict[bytes, int] = {}
    contents: dict[bytes, bytes] = {}
    for entry in snapshot.ls(recursive=True):
        if entry.kind == snapshot_pb2.TreeEntry.DIRECTORY:
            found[entry.path] = Found("directory", entry.mode)
        elif entry.kind == snapshot_pb2.TreeEntry.SYMLINK:
            found[entry.path] = Found("symlink", 0, entry.symlink_target)
        elif entry.kind == snapshot_pb2.TreeEntry.FILE:
            if entry.hash not in contents:
                contents[entry.hash] = digest(b"".join(snapshot.cat(entry.path)))
            found[entry.path] = Found("file", entry.mode, contents[entry.hash])
            if entry.link_group:
                groups[entry.path] = entry.link_group
                names[entry.link_group].add(entry.path)
    return _with_names(found, groups, names)


def _with_names(found: Tree, groups: dict[bytes, int], names: defaultdict[int, set[bytes]]) -> Tree:
    for path, group in groups.items():
        if len(names[group]) > 1:
            one = found[path]
            found[path] = Found(one.kind, one.mode, one.content, frozenset(names[group]))
    return found


def differences(one: Tree, other: Tree, but: Iterable[bytes] = ()) -> list[str]:
    """A line for each path that is not the same in both, the first twenty; paths in ``but`` are passed over."""
    passed_over = set(but)
    lines = []
    for path in sorted(one.keys() | other.keys()):
        if path not in passed_over and one.get(path) != other.get(path):
            lines.append(f"{os.fsdecode(path)!r}: {one.get(path)} / {other.get(path)}")
    return lines[:20]
