"""The canonical bytes of directory trees and chunk lists, and what makes one valid.

Both are msgpack with the shortest form of each value, so that equal trees have equal bytes and one hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from cogfs.store.hashing import HASH_SIZE
from cogfs.store.schema import Chunks, Kind, OpaqueReason, Tree, TreeEntry

_encoder = msgspec.msgpack.Encoder()
_tree_decoder = msgspec.msgpack.Decoder(Tree)
_chunks_decoder = msgspec.msgpack.Decoder(Chunks)

_REASONS = frozenset(reason.value.encode() for reason in OpaqueReason)
_MODE_MASK = 0o7777
_TYPE_MASK = 0o170000
# Members of an enumeration are slow to look up, and this is done for each entry of each directory.
_FILE, _DIRECTORY, _SYMLINK, _OPAQUE = Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK, Kind.OPAQUE
_WITH_CONTENT = (_FILE, _DIRECTORY)
_DOTS = frozenset({b".", b".."})


def check_name(name: bytes) -> None:
    """ValueError unless ``name`` can be the name of one entry of a directory."""
    if not name or name in _DOTS or b"/" in name or b"\0" in name:
        raise ValueError(f"{name!r} cannot be the name of an entry")


def check_entry(entry: TreeEntry) -> None:
    """ValueError unless ``entry`` is in its one valid form. Its name is not looked at."""
    has_content = entry.kind in _WITH_CONTENT
    if len(entry.hash) != (HASH_SIZE if has_content else 0):
        raise ValueError(f"{entry.name!r} has a hash of {len(entry.hash)} bytes")
    mask = _MODE_MASK if has_content else _TYPE_MASK if entry.kind == _OPAQUE else 0
    if entry.mode & ~mask:
        raise ValueError(f"{entry.name!r} has the mode {entry.mode:o}")
    if entry.size < 0 or (entry.size and entry.kind != _FILE):
        raise ValueError(f"{entry.name!r} has the size {entry.size}")
    if entry.link_group < 0:
        raise ValueError(f"{entry.name!r} has the link group {entry.link_group}")
    if entry.kind == _SYMLINK:
        if not entry.target or b"\0" in entry.target:
            raise ValueError(f"{entry.name!r} has no valid target")
    elif entry.kind == _OPAQUE:
        if entry.target not in _REASONS:
            raise ValueError(f"{entry.name!r} has the unknown reason {entry.target!r}")
    elif entry.target:
        raise ValueError(f"{entry.name!r} has a target and is no link")
    if entry.xattrs:
        if not has_content:
            raise ValueError(f"{entry.name!r} has extended attributes")
        names = [name for name, _ in entry.xattrs]
        if any(first >= second for first, second in itertools.pairwise(names)):
            raise ValueError(f"{entry.name!r} has extended attributes out of order")


def _check_tree(entries: Sequence[TreeEntry]) -> None:
    last = b""
    for entry in entries:
        check_name(entry.name)
        if entry.name <= last:
            raise ValueError(f"{entry.name!r} comes after {last!r}")
        last = entry.name
        check_entry(entry)


def _check_chunks(chunks: Chunks) -> None:
    if any(len(name) != HASH_SIZE or length <= 0 for name, length in chunks.pieces):
        raise ValueError("a piece has no valid hash or length")
    if chunks.size != sum(length for _, length in chunks.pieces):
        raise ValueError("the lengths of the pieces do not add up")


def encode_tree(entries: Sequence[TreeEntry]) -> bytes:
    """The bytes of a directory. ValueError unless the names are valid and strictly ascending."""
    _check_tree(entries)
    return _encoder.encode(Tree(tuple(entries)))


def decode_tree(data: bytes) -> Tree:
    """The directory that ``data`` describes. ValueError when it is not a valid one."""
    try:
        tree = _tree_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    _check_tree(tree.entries)
    return tree


def encode_chunks(chunks: Chunks) -> bytes:
    """The bytes of a chunk list. ValueError unless it is valid."""
    _check_chunks(chunks)
    return _encoder.encode(chunks)


def decode_chunks(data: bytes) -> Chunks:
    """The chunk list that ``data`` describes. ValueError when it is not a valid one."""
    try:
        chunks = _chunks_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    _check_chunks(chunks)
    return chunks
