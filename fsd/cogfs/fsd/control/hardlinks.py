"""Hard links in a recording: which directories hold names of a file, and the names that the worker does not know.

Knows rows. How a file is found out of which a recorded name alone is known is the recorder's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from cogfs.fsd.control.recordbook import RecordBook, is_linked, sum_of
from cogfs.store.schema import DirectoryRow, Kind, StatRow
from cogfs.store.store import Store


class HardLinks:
    """Those of one recording."""

    def __init__(self, store: Store, book: RecordBook, capture: Callable[[int, StatRow], StatRow]) -> None:
        """``capture`` finds out what the file of a row in the directory of an inode is."""
        self._store = store
        self._book = book
        self._capture = capture
        #: Files that were recorded, by inode.
        self._recorded: dict[int, StatRow] = {}

    def follow(
        self, directory: int, rows: Sequence[StatRow], before: Iterable[StatRow], looked: Collection[bytes]
    ) -> None:
        """A directory has ``rows`` in the place of those ``before``, and the names ``looked`` were looked at."""
        now = set()
        for row in rows:
            if _is_linkable(row):
                now.add(row.inode)
            if is_linked(row):
                group = row.entry.link_group or self._book.group(row.inode)
                self._book.add_link(row.inode, group, directory)
                if row.entry.name in looked:
                    self._recorded[row.inode] = row
        for row in before:
            if _is_linkable(row) and row.inode not in now:
                self._book.remove_link(row.inode, directory)

    def renew(self, inodes: Iterable[int], root_inode: int) -> None:
        """Files that changed have names which were not looked at: in them they are the same."""
        for inode in inodes:
            link = self._book.link(inode)
            for directory in link[1] if link is not None else ():
                recorded = self._book.directory(directory)
                if recorded is None:
                    continue
                rows = tuple(
                    self._as_recorded(directory, row) if row.inode == inode and _is_linkable(row) else row
                    for row in recorded.rows
                )
                if rows != recorded.rows:
                    self._put_rows(directory, recorded, rows)
                    self.renew_above(directory, root_inode)

    def _as_recorded(self, directory: int, row: StatRow) -> StatRow:
        """A name of a file, as the file is by its other names."""
        known = self._recorded.get(row.inode)
        if known is None:
            known = self._recorded[row.inode] = self._capture(directory, row)
        return msgspec.structs.replace(known, entry=msgspec.structs.replace(known.entry, name=row.entry.name))

    def _put_rows(self, inode: int, recorded: DirectoryRow, rows: tuple[StatRow, ...]) -> None:
        tree_hash = self._store.put_tree([row.entry for row in rows], recorded.tree_hash)
        self._book.put_directory(
            inode, msgspec.structs.replace(recorded, tree_hash=tree_hash, rows=rows, sums=sum_of(rows))
        )

    def renew_above(self, inode: int, root_inode: int) -> None:
        """A directory was recorded anew after those above it: so are they."""
        while inode != root_inode:
            below = self._book.directory(inode)
            above = self._book.directory(below.parent) if below is not None else None
            if below is None or above is None:
                return
            rows = tuple(
                msgspec.structs.replace(
                    row, entry=msgspec.structs.replace(row.entry, hash=below.tree_hash), sums=below.sums
                )
                if row.inode == inode and row.entry.kind is Kind.DIRECTORY
                else row
                for row in above.rows
            )
            self._put_rows(below.parent, above, rows)
            inode = below.parent


def _is_linkable(row: StatRow) -> bool:
    """Whether the row is of a regular file, one with several names that is not kept among them."""
    return row.entry.kind is Kind.FILE or is_linked(row)
