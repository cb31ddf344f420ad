"""What a snapshot leaves out by rule: the default names, globs, the size limit, and files with several names.

Knows paths, sizes and counts of links only, never a filesystem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Protocol

import pathspec

from cogfs.fsd.control.errors import CogfsError
from cogfs.v1.reasons import Reason

#: Left out at any depth, whatever the globs say.
DEFAULT_NAMES = frozenset({b".git", b"node_modules", b".cogfs"})

#: A file that a restore is writing, until it is renamed into place. Never recorded, removed by recovery.
TEMPORARY_PREFIX = b".cogfs.tmp."
_TEMPORARY = re.compile(rb"\.cogfs\.tmp\.[0-9a-z]{26}\.[0-9]+\Z")


def is_temporary(name: bytes) -> bool:
    """Whether ``name`` is one that a restore gives to its own temporary files."""
    return name.startswith(TEMPORARY_PREFIX) and _TEMPORARY.match(name) is not None


class Source(Protocol):
    """A row that has rules: options of a workspace, a snapshot, what is recorded of a workspace."""

    @property
    def exclude(self) -> tuple[str, ...]: ...

    @property
    def max_file_bytes(self) -> int: ...

    @property
    def refuse_hard_links(self) -> bool: ...


class Rules:
    """The rules of one workspace or snapshot. Immutable.

    ``exclude`` are globs in gitignore syntax, relative to the root; VALIDATION_ERROR when one cannot be read.
    ``max_file_bytes``: larger files are left out; negative: none is. ``refuse_hard_links``: files with more than one
    name are, and are never read.
    """

    __slots__ = ("_spec", "by_place", "exclude", "max_file_bytes", "refuse_hard_links")

    def __init__(self, exclude: Sequence[str], max_file_bytes: int, refuse_hard_links: bool = False) -> None:
        self.exclude = tuple(exclude)
        self.max_file_bytes = max_file_bytes
        self.refuse_hard_links = refuse_hard_links
        #: Whether a glob names places: what lies below a directory may be left out in one place and not in another.
        self.by_place = any("/" in glob.rstrip("/") for glob in self.exclude)
        try:
            self._spec = pathspec.GitIgnoreSpec.from_lines(self.exclude) if self.exclude else None
        except ValueError as error:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"an exclude is not a glob: {error}; use the syntax of gitignore"
            ) from error

    @classmethod
    def of(cls, source: Source, more: Sequence[str] = (), max_file_bytes: int | None = None) -> Rules:
        """Those of a row; with ``more`` excludes, and another limit when one is given."""
        exclude = tuple(dict.fromkeys((*source.exclude, *more))) if more else source.exclude
        limit = source.max_file_bytes if max_file_bytes is None else max_file_bytes
        return cls(exclude, limit, source.refuse_hard_links)

    def excludes(self, path: bytes, name: bytes, *, directory: bool) -> bool:
        """Whether the entry itself is left out; what is above it is the caller's to ask about."""
        if name in DEFAULT_NAMES:
            return True
        if self._spec is None:
            return False
        text = os.fsdecode(path)
        return self._spec.match_file(text + "/" if directory else text)

    def excludes_beneath(self, path: bytes) -> bool:
        """Whether directory ``path`` or one above it is left out."""
        if not path:
            return False
        above = b""
        for name in path.split(b"/"):
            above = above + b"/" + name if above else name
            if self.excludes(above, name, directory=True):
                return True
        return False

    def too_large(self, size: int) -> bool:
        return 0 <= self.max_file_bytes < size

    def refuses(self, links: int) -> bool:
        """Whether a file with so many names is left out."""
        return self.refuse_hard_links and links > 1

    def same_as(self, source: Source) -> bool:
        return (
            self.exclude == tuple(source.exclude)
            and self.max_file_bytes == source.max_file_bytes
            and self.refuse_hard_links == source.refuse_hard_links
        )
