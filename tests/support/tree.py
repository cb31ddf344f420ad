"""Trees of files as plain facts, and what differs between two.

A directory's are found by a walk that shares nothing with the product, a snapshot's through its API.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cogfs.client import Snapshot
from cogfs.v1 import snapshot_pb2

#: Never recorded, at any depth.
LEFT_OUT = frozenset((b".git", b"node_modules", b".cogfs"))

_PIECE = 1 << 20


@dataclass(frozen=True)
class Node:
    """One name in a tree: all that a snapshot keeps of it."""

    #: "file", "directory", "link", or "unreadable": a directory that may not be listed.
    kind: str
    #: Permission bits with set-id and sticky bits; zero for links, which have none of their own.
    mode: int = 0
    size: int = 0
    #: SHA-256 of a file's content.
    content: str = ""
    #: A link's target.
    target: bytes = b""
    #: All names of the file in this tree, sorted, when it has more than one.
    group: tuple[bytes, ...] = ()
    xattrs: tuple[tuple[str, bytes], ...] = field(default=())


#: Nodes by their path from the root; the root itself is under ``b""``.
Tree = dict[bytes, Node]


def describe(root: str | bytes | os.PathLike[str]) -> Tree:
    """Everything at and below ``root``.

    Links are not followed. What is never recorded, and sockets, fifos and devices, are left out.
    """
    top = os.fsencode(root)
    nodes: Tree = {b"": _node(top, os.lstat(top))}
    names_of: dict[tuple[int, int], list[bytes]] = {}
    pending = [b""]
    while pending:
        directory = pending.pop()
        try:
            found = os.listdir(os.path.join(top, directory))
        except PermissionError:
            nodes[directory] = replace(nodes[directory], kind="unreadable")
            continue
        for name in found:
            if name in LEFT_OUT:
                continue
            path = os.path.join(directory, name)
            status = os.lstat(os.path.join(top, path))
            kind = stat.S_IFMT(status.st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                continue
            nodes[path] = _node(os.path.join(top, path), status)
            if kind == stat.S_IFDIR:
                pending.append(path)
            elif kind == stat.S_IFREG and status.st_nlink > 1:
                names_of.setdefault((status.st_dev, status.st_ino), []).append(path)
    _group(nodes, names_of.values())
    return nodes


def of_snapshot(snapshot: Snapshot) -> Tree:
    """The same of what a snapshot holds, listed and read through the API: without the root, which is not listed."""
    nodes: Tree = {}
    names_of: dict[int, list[bytes]] = {}
    digests: dict[bytes, str] = {}
    for entry in snapshot.ls(recursive=True):
        if entry.kind == snapshot_pb2.TreeEntry.DIRECTORY:
            nodes[entry.path] = Node("directory", entry.mode, xattrs=_user(entry.xattrs))
        elif entry.kind == snapshot_pb2.TreeEntry.SYMLINK:
            nodes[entry.path] = Node("link", target=entry.symlink_target)
        elif entry.kind == snapshot_pb2.TreeEntry.FILE:
            if entry.hash not in digests:
                digests[entry.hash] = hashlib.sha256(b"".join(snapshot.cat(entry.path))).hexdigest()
            nodes[entry.path] = Node("file", entry.mode, entry.size, digests[entry.hash], xattrs=_user(entry.xattrs))
            if entry.link_group:
                names_of.setdefault(entry.link_group, []).append(entry.path)
    _group(nodes, names_of.values())
    return nodes


def _group(nodes: Tree, files: Iterable[list[bytes]]) -> None:
    """Give each of a file's names all of them."""
    for names in files:
        if len(names) > 1:
            group = tuple(sorted(names))
            for path in names:
                nodes[path] = replace(nodes[path], group=group)


def _node(path: bytes, status: os.stat_result) -> Node:
    if stat.S_ISLNK(status.st_mode):
        return Node("link", target=os.readlink(path))
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return Node("directory", mode, xattrs=_xattrs(path))
    digest, size = _content(path)
    return Node("file", mode, size, digest, xattrs=_xattrs(path))


def _content(path: bytes) -> tuple[str, int]:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def _xattrs(path: bytes) -> tuple[tuple[str, bytes], ...]:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        # A filesystem without them.
        return ()
    return _user({name: os.getxattr(path, name) for name in names if name.startswith("user.")})


def _user(xattrs: Mapping[str, bytes]) -> tuple[tuple[str, bytes], ...]:
    """Those that every user can set; what others there are depends on the machine."""
    return tuple((name, xattrs[name]) for name in sorted(xattrs) if name.startswith("user."))


def differences(a: Tree, b: Tree, but: Iterable[bytes] = ()) -> list[str]:
    """One sentence for each path but those in ``but`` that is not the same in both; empty when the trees are equal."""
    found = []
    for path in sorted((a.keys() | b.keys()) - set(but)):
        one, other = a.get(path), b.get(path)
        if one == other:
            continue
        if one is None or other is None:
            node = one or other
            assert node is not None
            found.append(f"{path!r}: a {node.kind} in the {'second' if one is None else 'first'} tree alone")
            continue
        facets = [
            f"{facet} {_shown(before)} against {_shown(after)}"
            for facet in ("kind", "mode", "size", "content", "target", "group", "xattrs")
            if (before := getattr(one, facet)) != (after := getattr(other, facet))
        ]
        found.append(f"{path!r}: {', '.join(facets)}")
    return found


def _shown(value: object) -> str:
    return oct(value) if isinstance(value, int) else repr(value)
