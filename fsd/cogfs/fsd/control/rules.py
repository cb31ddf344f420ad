"""What a snapshot leaves out by rule: the default names, globs and the size limit.

Knows paths and sizes only, never a filesystem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

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


class Rules:
    """The rules of one workspace or snapshot. Immutable.

    ``exclude`` are globs in gitignore syntax, relative to the root; VALIDATION_ERROR when one cannot be read.
    ``max_file_bytes``: larger files are left out; negative: none is.
    """

    __slots__ = ("_spec", "by_place", "exclude", "max_file_bytes")

    def __init__(self, exclude: Sequence[str], max_file_bytes: int) -> None:
        self.exclude = tuple(exclude)
        self.max_file_bytes = max_file_bytes
        #: Whether a glob names places: what lies below a directory may be left out in one place and not in another.
        self.by_place = any("/" in glob.rstrip("/") for glob in self.exclude)
        try:
            self._spec = pathspec.GitIgnoreSpec.from_lines(self.exclude) if self.exclude else None
        except ValueError as error:
            raise CogfsError(
                Reason.VALIDATION_ERROR, f"an exclude is not a glob: {error}; use the syntax of gitignore"
            ) from error

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

    def same_as(self, exclude: Sequence[str], max_file_bytes: int) -> bool:
        return self.exclude == tuple(exclude) and self.max_file_bytes == max_file_bytes
