"""What can be reached from names: marking it, and finding what is reached through something that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cogfs.store import trees
from cogfs.store.errors import Corrupt, StoreError
from cogfs.store.objects import Objects
from cogfs.store.records import NO_BASE
from cogfs.store.schema import NO_HASH, Hash, Kind, ObjectKind

#: Names between two looks whether to go on.
_STRIDE = 500


class Interrupted(Exception):
    """It was told to stop."""


class Reach:
    """Marks what is reached. ``live`` has it, ``bad`` what of it cannot be read or is not there, and why.

    What others are stored against is live for its bytes alone: what a directory named that is the base of another one
    is not reached by that.
    """

    def __init__(self, objects: Objects, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._objects = objects
        self._goes_on = goes_on
        self.live: set[Hash] = set()
        self.bad: dict[Hash, str] = {}
        #: Of ``live`` what is there as a base only.
        self._bases: set[Hash] = set()

    def mark(self, names: Iterable[Hash]) -> None:
        """Adds all that is reached from ``names``. Interrupted."""
        left = _STRIDE
        for root in names:
            waiting = [root]
            while waiting:
                name = waiting.pop()
                if name in self.live:
                    if name not in self._bases:
                        continue
                    self._bases.discard(name)
                self.live.add(name)
                waiting += self._named_by(name)
                left -= 1
                if not left:
                    left = _STRIDE
                    if not self._goes_on():
                        raise Interrupted

    def mark_base(self, name: Hash) -> None:
        """Adds what objects are stored against, and what that is stored against in turn."""
        while name != NO_BASE and name not in self.live:
            self.live.add(name)
            self._bases.add(name)
            try:
                name = self._objects.locate(name).base
            except StoreError as error:
                self.bad[name] = str(error)
                return

    def _named_by(self, name: Hash) -> list[Hash]:
        try:
            location = self._objects.locate(name)
            if location.base != NO_BASE:
                self.mark_base(location.base)
                broken = self._objects.broken(name, location)
                if broken:
                    raise Corrupt(f"object {name.hex()} is damaged: {broken}", name)
            if location.kind == ObjectKind.BLOB:
                return []
            return [
                one
                for one, _ in children(self._objects, name, location.kind)
                if one not in self.live or one in self._bases
            ]
        except StoreError as error:
            self.bad[name] = str(error)
            return []


def children(objects: Objects, name: Hash, kind: ObjectKind) -> Iterator[tuple[Hash, bytes]]:
    """The objects that one names, each with its name as a file or directory, where it has one. Store errors."""
    if kind == ObjectKind.BLOB:
        return
    data = objects.read(name, kind)
    try:
        if kind == ObjectKind.CHUNKS:
            for piece, _ in trees.decode_chunks(data).pieces:
                yield piece, b""
        else:
            for entry in trees.decode_tree(data).entries:
                if entry.kind in (Kind.FILE, Kind.DIRECTORY) and entry.hash != NO_HASH:
                    yield entry.hash, entry.name
    except ValueError as error:
        raise Corrupt(f"object {name.hex()} is damaged: {error}", name) from error


class Affected:
    """Finds the paths at which something bad is reached."""

    def __init__(self, objects: Objects, bad: Iterable[Hash]) -> None:
        self._objects = objects
        self._bad = set(bad)
        #: What reaches nothing bad.
        self._clean: set[Hash] = set()

    def paths(self, root: Hash) -> Iterator[bytes]:
        """The paths below ``root`` whose own object, or a piece of it, is bad or cannot be read; empty for the root
        itself. A path may come more than once."""
        # Each with its path, what is below it, and whether something bad was found there.
        frames: list[_Frame] = []
        if self._enter(frames, root, b""):
            yield b""
        while frames:
            frame = frames[-1]
            child = next(frame.below, None)
            if child is None:
                frames.pop()
                if not frame.hit:
                    self._clean.add(frame.name)
                elif frames:
                    frames[-1].hit = True
                continue
            name, step_name = child
            where = b"/".join(part for part in (frame.path, step_name) if part)
            if self._enter(frames, name, where):
                frame.hit = True
                yield where

    def _enter(self, frames: list[_Frame], name: Hash, path: bytes) -> bool:
        """Go into an object, unless nothing bad is there; whether it is itself bad."""
        if name in self._clean:
            return False
        if name in self._bad:
            return True
        try:
            location = self._objects.locate(name)
            below = list(children(self._objects, name, location.kind))
        except StoreError:
            return True
        frames.append(_Frame(name, path, iter(below)))
        return False


class _Frame:
    """An object that is being looked at."""

    __slots__ = ("below", "hit", "name", "path")

    def __init__(self, name: Hash, path: bytes, below: Iterator[tuple[Hash, bytes]]) -> None:
        self.name = name
        self.path = path
        self.below = below
        #: Something below it is bad.
        self.hit = False
