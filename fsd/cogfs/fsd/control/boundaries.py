"""What is to be captured of a boundary, as it is kept with the snapshot until that is sealed: what a worker handed
over, and what was read at once."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.undolog import Was
from cogfs.store.errors import Corrupt


class Listed(msgspec.Struct, array_like=True, frozen=True):
    """Begins as ``channel.Changes`` does, so that what a worker handed over need not be taken apart to be kept."""

    directories: list[DirtyDirectory]
    files: list[DirtyFile]
    #: Files that were changed by a name elsewhere, and were read when the boundary was made: the worker protects none.
    seen: list[Was] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Listed)


def decode(data: bytes) -> Listed:
    """Corrupt when it cannot be read."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the changes of a boundary cannot be read: {error}") from error


def with_seen(data: bytes, seen: Iterable[Was]) -> bytes:
    """The same, and these files were read at once."""
    listed = decode(data)
    read = {was.status.inode: was for was in (*listed.seen, *seen)}
    if not read:
        return data
    return _encoder.encode(Listed(listed.directories, with_content(listed.files, read), list(read.values())))


def with_content(files: Iterable[DirtyFile], inodes: Iterable[int]) -> list[DirtyFile]:
    """The same files, and those of ``inodes``: their content changed, whoever saw it. Of what the worker did not list
    the recorded names still stand, and are found by the inode."""
    by_inode = {file.inode: file for file in files}
    for inode in inodes:
        known = by_inode.get(inode) or DirtyFile(inode, [], [], True)
        by_inode[inode] = msgspec.structs.replace(known, content=True)
    return list(by_inode.values())


def merge(first: bytes, second: bytes) -> bytes:
    """The changes of two boundaries, as of the second.

    A directory or file that both name is named as the second does, with what the first says of it in addition.
    """
    before, after = decode(first), decode(second)
    directories = {one.inode: one for one in before.directories}
    for one in after.directories:
        other = directories.get(one.inode)
        directories[one.inode] = one if other is None or one.made else _joined(other, one)
    files = {one.inode: one for one in before.files}
    for file in after.files:
        earlier = files.get(file.inode)
        content = file.content or (earlier is not None and earlier.content)
        files[file.inode] = msgspec.structs.replace(file, content=content)
    # What was read at the first, and changed until the second, is listed by that, and read as of that.
    again = {one.inode for one in after.files}
    seen = [was for was in before.seen if was.status.inode not in again] + after.seen
    return _encoder.encode(Listed(list(directories.values()), list(files.values()), seen))


def _joined(first: DirtyDirectory, second: DirtyDirectory) -> DirtyDirectory:
    names = None
    if first.names is not None and second.names is not None:
        names = sorted({*first.names, *second.names})
    return msgspec.structs.replace(
        second,
        names=names,
        made=first.made,
        attributes=first.attributes or second.attributes,
        subtree=first.subtree or second.subtree,
    )
