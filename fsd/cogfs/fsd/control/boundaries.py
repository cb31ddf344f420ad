"""What a worker handed over at a boundary, as it is kept with the snapshot until that is sealed."""

from __future__ import annotations

import msgspec

from cogfs.fsd.channel import Changes, DirtyDirectory, changes_decoder, pack
from cogfs.store.errors import Corrupt


def decode(data: bytes) -> Changes:
    """What ``Frozen.packed`` said. Corrupt when it cannot be read."""
    try:
        return changes_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the changes of a boundary cannot be read: {error}") from error


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
    return bytes(pack(list(directories.values()), list(files.values())))


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
