"""What is to be captured of a boundary, as it is kept with the snapshot until that is sealed: what a worker handed
over, and what was read at once."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

from cogfs.fsd.channel import DirtyDirectory, DirtyFile
from cogfs.fsd.control.beneath import split
from cogfs.fsd.undolog import Was
from cogfs.store.errors import Corrupt


class Listed(msgspec.Struct, array_like=True, frozen=True):
    """Begins as ``channel.Changes`` does, so that what a worker handed over need not be taken apart to be kept."""

    directories: list[DirtyDirectory]
    files: list[DirtyFile]
    #: Files that were changed by a name elsewhere, and were read when the boundary was made: the worker protects none.
    seen: list[Was] = []
    #: Of these files and directories only a boundary before this one lists anything, which could not be captured: they
    #: are where that says, or were removed before this one.
    earlier: list[int] = []


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
    files = with_content(listed.files, read)
    return _encoder.encode(Listed(listed.directories, files, list(read.values()), listed.earlier))


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

    A directory or file that both name is named as the second does, with what the first says of it in addition. One that
    the second does not name is where it was, unless it was removed, or left for where nothing is recorded.
    """
    before, after = decode(first), decode(second)
    now_directories, now_files = ({one.inode for one in listed} for listed in (after.directories, after.files))
    changed = {(one.inode, name) for one in after.directories for name in one.names or ()}
    # A number may have been given to something else.
    directories = {
        one.inode: one
        for one in before.directories
        if one.inode in now_directories
        or (one.inode not in now_files and (one.parent, split(one.path)[1]) not in changed)
    }
    for one in after.directories:
        other = directories.get(one.inode)
        directories[one.inode] = one if other is None or one.made else _joined(other, one)
    files = {one.inode: _without(one, changed) for one in before.files if one.inode not in now_directories}
    for file in after.files:
        known = files.get(file.inode)
        content = file.content or (known is not None and known.content)
        files[file.inode] = msgspec.structs.replace(file, content=content)
    # What was read at the first, and changed until the second, is listed by that, and read as of that.
    seen = [was for was in before.seen if was.status.inode not in now_files] + after.seen
    earlier = (directories.keys() | files.keys()) - now_directories - now_files
    return _encoder.encode(Listed(list(directories.values()), list(files.values()), seen, sorted(earlier)))


def _without(file: DirtyFile, changed: AbstractSet[tuple[int, bytes]]) -> DirtyFile:
    """The file without the names that became something else."""
    kept = [
        (path, parent)
        for path, parent in zip(file.paths, file.parents, strict=True)
        if (parent, split(path)[1]) not in changed
    ]
    return msgspec.structs.replace(file, paths=[path for path, _ in kept], parents=[parent for _, parent in kept])


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
