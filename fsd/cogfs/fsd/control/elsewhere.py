"""Files of a mounted workspace that have more names than are recorded in it: hard links from outside the root, or from
places that are left out.

Who writes by a name outside the root is seen by no worker. So at each boundary these files, and no others, are compared
by their stat with what was recorded of them, or with what they were at the boundary before. What changed and the worker
did not see is read when the boundary is made, since it is protected by nobody (``boundaries.Listed.seen``).

Which files these are follows the records: after each commit of a recording the files whose rows or links it changed are
looked up again. Nothing of it is stored, and a daemon that starts gathers it from the links that are recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from cogfs.fsd.channel import DirtyFile, Locate, Located
from cogfs.fsd.control.beneath import Beneath, beneath, join, split
from cogfs.fsd.control.capture import Vanished, capture_file, read_xattrs
from cogfs.fsd.control.errors import CogfsError
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.recordbook import RecordBook, is_linked
from cogfs.fsd.control.recorder import RACY_NS
from cogfs.fsd.control.rules import Rules
from cogfs.fsd.undolog import Status, Was
from cogfs.store.rows import LinkRow
from cogfs.store.schema import OpaqueReason, StatRow
from cogfs.store.store import Store

_GONE = (FileNotFoundError, NotADirectoryError)


#: Size, modification and change time, mode.
_Key = tuple[int, int, int, int]


class _Look(NamedTuple):
    """What a file was when it was looked at. ``sure``: a change since would be seen in that."""

    key: _Key
    sure: bool

    @classmethod
    def of(cls, key: _Key, at_ns: int) -> _Look:
        return cls(key, max(key[1], key[2]) < at_ns - RACY_NS)


class _Names(NamedTuple):
    """Where a file was recorded: inodes of directories, and names in them."""

    places: tuple[tuple[int, bytes], ...]
    recorded: _Look


class Found(NamedTuple):
    """A file as it is now, at one of its names in the workspace."""

    path: bytes
    status: Status


class Elsewhere:
    """Those of one workspace. Its methods may be called by many threads."""

    def __init__(self, store: Store, workspace_id: str) -> None:
        self._store = store
        self._workspace_id = workspace_id
        #: Guards what is to be looked up again, and is held for moments.
        self._marks = threading.Lock()
        self._everything = True
        self._inodes: set[int] = set()
        #: Guards the fields below.
        self._lock = threading.Lock()
        self._files: dict[int, _Names] = {}
        self._paths: dict[int, bytes] = {}
        #: Each file at one of its names, by directories in the order of their paths; None: to be found out.
        self._order: list[tuple[int, list[tuple[bytes, int]]]] | None = None
        #: Of files that are not recorded as they were at the last boundary.
        self._observed: dict[int, _Look] = {}

    # --- which files --------------------------------------------------------------------------------------------------

    def follow(self, book: RecordBook) -> None:
        """What ``book`` holds was committed."""
        inodes = book.linked()
        with self._marks:
            if inodes is None:
                self._everything = True
            elif not self._everything:
                self._inodes |= inodes

    def catch_up(self) -> None:
        """Look up what was committed since the last time. StoreError."""
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        with self._marks:
            everything, inodes = self._everything, self._inodes
            self._everything, self._inodes = False, set()
        if not everything and not inodes:
            return
        try:
            with self._store.read() as reader:
                if everything:
                    links: dict[int, LinkRow | None] = dict(reader.links(self._workspace_id))
                else:
                    links = {inode: reader.link(self._workspace_id, inode) for inode in inodes}
            files, paths = self._gather(links)
        except BaseException:
            with self._marks:
                self._everything = self._everything or everything
                self._inodes |= inodes
            raise
        if everything:
            self._files, self._paths = files, paths
        else:
            for inode in inodes:
                self._files.pop(inode, None)
            self._files.update(files)
            self._paths.update(paths)
        self._order = None
        self._observed = {inode: look for inode, look in self._observed.items() if inode in self._files}

    def _gather(self, links: dict[int, LinkRow | None]) -> tuple[dict[int, _Names], dict[int, bytes]]:
        """Of these files those with more names than are recorded, and the paths of their directories."""
        by_directory: dict[int, set[int]] = {}
        for inode, link in links.items():
            for directory in link[1] if link is not None else ():
                by_directory.setdefault(directory, set()).add(inode)
        places: dict[int, list[tuple[int, bytes]]] = {}
        rows: dict[int, tuple[StatRow, int]] = {}
        for directory, wanted in by_directory.items():
            with self._store.read() as reader:
                recorded = reader.directory(self._workspace_id, directory)
            for row in recorded.rows if recorded is not None else ():
                # A number that was given away again may be that of anything.
                if row.inode in wanted and is_linked(row):
                    places.setdefault(row.inode, []).append((directory, row.entry.name))
                    if row.inode not in rows or rows[row.inode][0].ctime_ns < row.ctime_ns:
                        assert recorded is not None
                        rows[row.inode] = row, recorded.recorded_ns
        files = {
            inode: _Names(tuple(places[inode]), _Look.of((row.size, row.mtime_ns, row.ctime_ns, row.mode), recorded_ns))
            for inode, (row, recorded_ns) in rows.items()
            if row.nlink > len(places[inode])
        }
        book = RecordBook(self._store, self._workspace_id)
        paths = {}
        for directory in {directory for names in files.values() for directory, _ in names.places}:
            paths[directory] = book.path_of(directory) or b""
        return files, paths

    # --- what changed -------------------------------------------------------------------------------------------------

    def changed(self, link: Link) -> list[Found]:
        """The files that are not what they were at the last boundary, or of which the stat cannot tell, whoever changed
        them. A look at each file, and at no others."""

        def same(inode: int, key: _Key) -> bool:
            recorded = self._files[inode].recorded
            if recorded.sure and recorded.key == key:
                return True
            observed = self._observed.get(inode)
            return observed is not None and observed.sure and observed.key == key

        with self._lock:
            self._catch_up()
            return self._look(link, same)

    def unrecorded(self, link: Link, but: Collection[int] = (), until_ns: int | None = None) -> list[int]:
        """The files that are not what was recorded of them, by inode; only those that were changed last ``until_ns``.
        With ``until_ns`` a stat that cannot tell is believed: it was not, when the boundary was made."""

        def same(inode: int, key: _Key) -> bool:
            recorded = self._files[inode].recorded
            return recorded.key == key and (until_ns is not None or recorded.sure)

        with self._lock:
            self._catch_up()
            return [
                status.inode
                for _, status in self._look(link, same)
                if status.inode not in but and (until_ns is None or status.ctime_ns <= until_ns)
            ]

    def observe(self, found: Iterable[Found]) -> None:
        """So these files were at a boundary that was committed."""
        now = time.time_ns()
        with self._lock:
            for _, status in found:
                self._observed[status.inode] = _Look.of(_key(status), now)

    def _look(self, link: Link, same: Callable[[int, _Key], bool]) -> list[Found]:
        """The files that are not the ``same``, where they are now; without those that are in the workspace no more."""
        if not self._files:
            return []
        found: list[Found] = []
        missed: list[int] = []
        with beneath(link.root_fd) as reach:
            for directory, names in self._in_order():
                path = self._paths[directory]
                try:
                    fd = reach.directory(path)
                except OSError:
                    missed += [inode for _, inode in names]
                    continue
                for name, inode in names:
                    try:
                        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except OSError:
                        missed.append(inode)
                        continue
                    if status.st_ino != inode:
                        missed.append(inode)
                    elif not same(inode, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)):
                        found.append(Found(join(path, name), Status.of(status)))
            if missed:
                moved = self._follow_moves(reach, link, missed)
                found += [one for one in moved if not same(one.status.inode, _key(one.status))]
        return found

    def _in_order(self) -> list[tuple[int, list[tuple[bytes, int]]]]:
        if self._order is None:
            by_directory: dict[int, list[tuple[bytes, int]]] = {}
            for inode, names in self._files.items():
                directory, name = names.places[0]
                by_directory.setdefault(directory, []).append((name, inode))
            # So each directory is opened once.
            self._order = sorted(by_directory.items(), key=lambda one: self._paths[one[0]])
        return self._order

    def _at_names(self, reach: Beneath, inode: int) -> Found | None:
        for directory, name in self._files[inode].places:
            one = _find(reach, join(self._paths[directory], name), inode)
            if one is not None:
                return one
        return None

    def _follow_moves(self, reach: Beneath, link: Link, missed: list[int]) -> Iterator[Found]:
        """Files that are not where they were recorded: the worker holds what was moved since and is not recorded."""
        above = sorted({directory for inode in missed for directory, _ in self._files[inode].places})
        try:
            answer = link.call(Locate([*above, *missed]))
        except CogfsError:
            return  # The checkpoint that asks will fail by itself.
        if not isinstance(answer, Located):
            return
        moved = dict(zip([*above, *missed], answer.paths, strict=True))
        for directory in above:
            path = moved[directory]
            if path is not None:
                self._paths[directory] = path
                self._order = None
        for inode in missed:
            path = moved[inode]
            one = self._at_names(reach, inode) or (_find(reach, path, inode) if path else None)
            if one is not None:
                yield one

    # --- reading it ---------------------------------------------------------------------------------------------------

    def read(self, link: Link, rules: Rules, found: Iterable[Found]) -> list[Was]:
        """All that a snapshot by ``rules`` keeps of files, with their content in the store; without what has gone.
        StoreError, OSError."""
        seen = []
        with beneath(link.root_fd) as reach:
            for one in found:
                was = self._read(reach, rules, one)
                if was is not None:
                    seen.append(was)
        return seen

    def read_again(self, link: Link, rules: Rules, found: Iterable[Found], seen: Iterable[Was]) -> list[Was]:
        """What was read, where that is still what the file is; what is not is read again."""
        before = {was.status.inode: was for was in seen}
        there: list[Found] = []
        missed: list[int] = []
        with beneath(link.root_fd) as reach:
            for one in found:
                at = _find(reach, one.path, one.status.inode)
                if at is None:
                    missed.append(one.status.inode)
                else:
                    there.append(at)
            if missed:
                with self._lock:
                    there += self._follow_moves(reach, link, [inode for inode in missed if inode in self._files])
        now = [before[one.status.inode] for one in there if _is_read(before.get(one.status.inode), one)]
        return now + self.read(link, rules, [one for one in there if not _is_read(before.get(one.status.inode), one)])

    def _read(self, reach: Beneath, rules: Rules, found: Found) -> Was | None:
        parent, name = split(found.path)
        inode = found.status.inode
        try:
            fd = reach.directory(parent)
            status = Status.of(os.stat(name, dir_fd=fd, follow_symlinks=False))
            xattrs = read_xattrs(name, fd)
            if status.inode != inode:
                return None
            if rules.too_large(status.size):
                return Was(status, xattrs, reason=OpaqueReason.TOO_LARGE.value)
            if rules.refuses(status.nlink):
                return Was(status, xattrs, reason=OpaqueReason.HARD_LINK.value)
            content = capture_file(self._store, name, fd, moving=True)
        except (*_GONE, Vanished):
            return None
        if isinstance(content, OpaqueReason):
            return Was(status, xattrs, reason=content.value)
        return Was(Status.of(content.stat), xattrs, hash=content.hash) if content.stat.st_ino == inode else None


def unlisted_by(files: Iterable[DirtyFile], found: Iterable[Found]) -> list[Found]:
    """Those of which the worker did not see what was written."""
    written = {file.inode for file in files if file.content}
    return [one for one in found if one.status.inode not in written]


def _key(status: Status) -> _Key:
    return status.size, status.mtime_ns, status.ctime_ns, status.mode


def _is_read(was: Was | None, found: Found) -> bool:
    return was is not None and was.status == found.status


def _find(reach: Beneath, path: bytes, inode: int) -> Found | None:
    """``inode`` at ``path``, where it is there."""
    parent, name = split(path)
    try:
        status = Status.of(os.stat(name, dir_fd=reach.directory(parent), follow_symlinks=False))
    except OSError:
        return None
    return Found(path, status) if status.inode == inode else None
