"""A directory tree as plain facts, read by a walk that shares nothing with the product; what differs between two."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field, replace

#: Never recorded, at any depth.
LEFT_OUT = frozenset((b".git", b"node_modules", b".cogfs"))

_PIECE = 1 << 20


@dataclass(frozen=True)
class Node:
    """One name in a tree: all that a snapshot keeps of it."""

    #: "file", "directory" or "link".
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


def describe(root: str | bytes | os.PathLike[str]) -> dict[bytes, Node]:
    """Every name below ``root`` by its path from there; the root itself is under ``b""``.

    Links are not followed. What is never recorded, and sockets, fifos and devices, are left out.
    """
    top = os.fsencode(root)
    nodes: dict[bytes, Node] = {b"": _node(top, os.lstat(top))}
    names_of: dict[tuple[int, int], list[bytes]] = {}
    pending = [b""]
    while pending:
        directory = pending.pop()
        with os.scandir(os.path.join(top, directory)) as entries:
            found = [entry.name for entry in entries]
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
    for names in names_of.values():
        if len(names) > 1:
            group = tuple(sorted(names))
            for path in names:
                nodes[path] = replace(nodes[path], group=group)
    return nodes


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
    return tuple((name, os.getxattr(path, name)) for name in sorted(names) if name.startswith("user."))


def differences(a: dict[bytes, Node], b: dict[bytes, Node]) -> list[str]:
    """One sentence for each name that is not the same in both; empty when the trees are equal."""
    found = []
    for path in sorted(a.keys() | b.keys()):
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
