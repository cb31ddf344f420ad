"""What a person does to files, as plain data, and what a restore has to make of them. Knows nothing of the product."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from tests.support.tree import LEFT_OUT, Tree

#: An operation's name, and what it needs to choose its paths and contents.
Operation = tuple[str, int, int, int, bytes]

NAMES = (
    b"a",
    b"b",
    b"c",
    b"two words",
    b"two\nlines",
    b"\xff\xfe",
    "日本語".encode(),
    b"-rf",
    b"back\\slash",
    b"node_modules",
    b".git",
)
#: The last two are never recorded: rarely chosen.
_COMMON = len(NAMES) - 2
_TARGETS = (b"a", b"../b", b"nowhere", b"/nowhere/at/all", b"\xff\xfe", b".", b"a/b")
_FILE_MODES = (0o644, 0o600, 0o755, 0o444, 0o4755, 0o666)
_DIRECTORY_MODES = (0o755, 0o700, 0o2755, 0o1777, 0o711)
_WEIGHTED = (
    *("create",) * 5,
    *("write",) * 4,
    *("append",) * 2,
    *("truncate",) * 2,
    *("rename",) * 5,
    *("exchange",),
    *("unlink",) * 2,
    *("remove",) * 2,
    *("mkdir",) * 4,
    *("symlink",) * 2,
    *("link",) * 3,
    *("chmod",) * 3,
    *("xattr",) * 2,
    *("map",),
    *("touch",),
    *("sneak",),
    *("orphan",),
    *("fifo",),
    *("exclude",),
)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)

_numbers = st.integers(0, 999)
_pieces = st.sampled_from((b"", b"one line\n", b"first\nsecond\n", b"\0binary\xff", b"x"))
_contents = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda piece, times: piece * times, _pieces, st.sampled_from((1, 20, 500, 9000))),
)
operations: st.SearchStrategy[Operation] = st.tuples(
    st.sampled_from(_WEIGHTED), _numbers, _numbers, _numbers, _contents
)


class Choice:
    """What there is to choose from in a tree, the same for every tree that looks the same."""

    def __init__(self, root: bytes) -> None:
        self.directories: list[bytes] = [b""]
        self.files: list[bytes] = []
        self.others: list[bytes] = []
        for place in self.directories:
            with os.scandir(os.path.join(root, place)) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                path = os.path.join(place, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    self.directories.append(path)
                elif entry.is_file(follow_symlinks=False):
                    self.files.append(path)
                else:
                    self.others.append(path)

    @property
    def all(self) -> list[bytes]:
        return self.directories[1:] + self.files + self.others


def carry_out(root: bytes, choice: Choice, operation: Operation) -> None:
    """Does it below ``root``. OSError, as the system says; nothing when there is nothing to do it to."""
    what, first, second, third, content = operation
    directory = _pick(choice.directories, first)
    assert directory is not None
    new = os.path.join(root, directory, _name(second))
    file, anything = _pick(choice.files, third), _pick(choice.all, third)
    match what:
        case "create":
            # Neither through a link, which may lead out of the tree, nor into a fifo, which nobody reads.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(new, flags, 0o644), "wb") as handle:
                handle.write(content)
        case "mkdir":
            os.mkdir(new)
        case "symlink":
            os.symlink(_TARGETS[third % len(_TARGETS)], new)
        case "fifo":
            if first % 4 == 0:
                os.mkfifo(new)
        case "exclude":
            place = os.path.join(root, directory, NAMES[_COMMON + second % 2])
            os.mkdir(place)
            with open(os.path.join(place, b"kept"), "wb") as handle:
                handle.write(content)
        case "chmod":
            if third % 3 == 0 and directory:
                os.chmod(os.path.join(root, directory), _DIRECTORY_MODES[second % len(_DIRECTORY_MODES)])
            elif file is not None:
                os.chmod(os.path.join(root, file), _FILE_MODES[second % len(_FILE_MODES)])
        case "xattr":
            place = os.path.join(root, directory if first % 3 == 0 or file is None else file)
            if second % 4 == 0:
                os.removexattr(place, "user.note")
            else:
                os.setxattr(place, "user.note", content[:100])
        case "remove":
            if directory:
                _remove(os.path.join(root, directory))
        case "rename":
            if anything is not None:
                os.rename(os.path.join(root, anything), new)
        case "unlink":
            if anything is not None and anything not in choice.directories:
                os.unlink(os.path.join(root, anything))
        case "exchange":
            other = _pick(choice.all, second)
            if anything is not None and other is not None:
                _exchange(os.path.join(root, anything), os.path.join(root, other))
        case _:
            if file is not None:
                _change(what, os.path.join(root, file), new, second, content)


def _change(what: str, path: bytes, new: bytes, number: int, content: bytes) -> None:
    """Operations on a file."""
    match what:
        case "write":
            with open(path, "r+b") as handle:
                handle.seek(number % (os.path.getsize(path) + 20))
                handle.write(content)
        case "append":
            with open(path, "ab") as handle:
                handle.write(content)
        case "truncate":
            os.truncate(path, number * 37 % 5000)
        case "link":
            os.link(path, new)
        case "map":
            with open(path, "r+b") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size:
                    with mmap.mmap(handle.fileno(), size) as view:
                        view[number % size] = content[0] if content else 0
        case "touch":
            os.utime(path, ns=(number, number * 10**9))
        case "sneak":
            # Another content of the same size, and the time set back.
            status = os.stat(path)
            if status.st_size:
                with open(path, "r+b") as handle:
                    handle.seek(number % status.st_size)
                    handle.write(content[:1] or b"s")
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "orphan":
            # Its last words come when it has no name any more, or one less.
            with open(path, "r+b") as handle:
                os.unlink(path)
                handle.write(content)
        case _:
            raise AssertionError(what)


def _pick(choices: list[bytes], number: int) -> bytes | None:
    return choices[number % len(choices)] if choices else None


def _name(number: int) -> bytes:
    return NAMES[number % len(NAMES)] if number % 10 == 0 else NAMES[number % _COMMON]


def _remove(directory: bytes) -> None:
    for place, directories, files in os.walk(directory, topdown=False):
        for name in files:
            os.unlink(os.path.join(place, name))
        for name in directories:
            path = os.path.join(place, name)
            if os.path.islink(path):
                os.unlink(path)
            else:
                os.rmdir(path)
    os.rmdir(directory)


def _exchange(one: bytes, other: bytes) -> None:
    if _libc.renameat2(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LeftAlone:
    """What a restore may not touch in a tree: what is never recorded, special files, and the directories above.

    Large files (``limit`` bytes are the most that is recorded; None: no limit) are left alone unless the target has
    something in their place.
    """

    def __init__(self, root: bytes, limit: int | None = None) -> None:
        self._limit = limit
        self.special: set[bytes] = set()
        self.large: set[bytes] = set()
        self.directories: set[bytes] = set()
        #: What is at and below what is never recorded: kind, mode, and the content of files.
        self.content: dict[bytes, tuple[int, bytes]] = {}
        self._walk(root, b"", inside=False)

    def _walk(self, root: bytes, directory: bytes, *, inside: bool) -> None:
        for name in sorted(os.listdir(os.path.join(root, directory))):
            path = os.path.join(directory, name)
            status = os.lstat(os.path.join(root, path))
            mode = status.st_mode
            kind = stat.S_IFMT(mode)
            hidden = inside or name in LEFT_OUT
            special = kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
            if hidden or special:
                self.content[path] = (mode, _content(os.path.join(root, path), kind))
            if special and not hidden:
                self.special.add(path)
            large = kind == stat.S_IFREG and self._limit is not None and status.st_size > self._limit
            if large and not hidden:
                self.large.add(path)
            if (hidden or special) and not inside:
                self.directories |= _above(path)
            if kind == stat.S_IFDIR:
                self._walk(root, path, inside=hidden)


def _content(path: bytes, kind: int) -> bytes:
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:
            return file.read()
    return os.readlink(path) if kind == stat.S_IFLNK else b""


def _above(path: bytes) -> set[bytes]:
    found = set()
    while path:
        path = os.path.dirname(path)
        found.add(path)
    return found


def restored(
    current: Tree,
    target: Tree,
    left: LeftAlone,
    target_special: Iterable[bytes],
    paths: Iterable[bytes] = (),
) -> tuple[Tree, bool]:
    """What the files have to be after a restore of ``target``, or of ``paths`` in it.

    ``target_special``: special and large files of the target, which its snapshot does not hold. Also whether some of
    ``current`` stays, so that what is linked to what is not said.
    """
    wanted = list(paths)

    def concerned(path: bytes) -> bool:
        return not wanted or any(_within(path, one) for one in wanted)

    result = {path: node for path, node in target.items() if concerned(path)}
    stays = {path for path in current if not concerned(path)}
    large = {path for path in left.large if path not in target and concerned(path)}
    stays |= large
    for path in left.directories.union(*map(_above, large)):
        # Another kind cannot take the place of a directory that holds something.
        if concerned(path) and path in target and target[path].kind != "directory":
            stays |= {other for other in current if _within(other, path)}
        elif concerned(path) and path not in target:
            stays.add(path)
    for path in left.special:
        result = {other: node for other, node in result.items() if not _within(other, path)}
    for path in target_special:
        if concerned(path):
            stays |= {other for other in current if _within(other, path)}
    result |= {path: current[path] for path in stays}
    for path in wanted:
        if path in result:
            result |= {above: target[above] for above in _above(path) if above not in result}
    return result, bool(stays)


def _within(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory + b"/")


def without(nodes: Tree, paths: set[bytes]) -> Tree:
    """All others, whose groups hold what is left."""
    left = {path: node for path, node in nodes.items() if path not in paths}
    for path, node in left.items():
        group = tuple(one for one in node.group if one in left)
        left[path] = replace(node, group=group if len(group) > 1 else ())
    return left


def without_groups(nodes: Tree) -> Tree:
    """The same, whatever is linked to what."""
    return {path: replace(node, group=()) for path, node in nodes.items()}
