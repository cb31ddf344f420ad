"""What takes the space of a store: what each snapshot and each workspace needs alone, and what it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cogfs.store.database import Database
from cogfs.store.errors import StoreError
from cogfs.store.hashing import HASH_SIZE
from cogfs.store.naming import Root, roots
from cogfs.store.objects import Objects
from cogfs.store.reach import Interrupted, children
from cogfs.store.records import NO_BASE
from cogfs.store.schema import Hash, ObjectKind

_ROWS = 5000
#: The owner of what more than one needs.
_SHARED = -1
#: The record of an object that names others: its name and this.
_RECORD = b"#"
#: Objects between two looks whether to go on.
_STRIDE = 500


@dataclass
class Use:
    """Bytes in the packs that something needs."""

    #: Nothing else needs them.
    unique: int = 0
    shared: int = 0


@dataclass
class WorkspaceUse(Use):
    """Of a workspace: what its snapshots need, what is recorded of it, and its undo log."""

    snapshots: dict[str, Use] = field(default_factory=dict)


@dataclass
class Usage:
    """Of a whole store."""

    #: Bytes of all objects, and what they take in the packs.
    raw: int = 0
    stored: int = 0
    #: Of these, what anything needs.
    needed: int = 0
    workspaces: dict[str, WorkspaceUse] = field(default_factory=dict)


def use(
    database: Database, objects: Objects, more_roots: Callable[[], Iterable[Root]], goes_on: Callable[[], bool]
) -> Usage:
    """Looks at all objects. What cannot be read needs nothing more. Interrupted; Corrupt."""
    usage = Usage()
    start = b""
    while part := objects.located(start, _ROWS):
        start = part[-1][0] + b"\0"
        usage.raw += sum(where.raw for _, where in part)
        usage.stored += sum(where.size for _, where in part)
    found = [*roots(database), *more_roots()]
    graph = _Graph(objects, goes_on)

    # A workspace first: it needs what its snapshots need, and what is recorded.
    names = {root.workspace_id: number for number, root in enumerate(found)}
    owned = graph.owners((root.name, names[root.workspace_id]) for root in found)
    usage.needed = sum(graph.size(name) for name in owned)
    unique = _sum_up(graph, owned)
    for workspace_id, number in names.items():
        total = graph.reached(root.name for root in found if root.workspace_id == workspace_id)
        mine = unique.get(number, 0)
        usage.workspaces[workspace_id] = WorkspaceUse(mine, total - mine)

    # What is recorded of a workspace is needed by something else than its snapshots.
    keys = {(root.workspace_id, root.snapshot_id): number for number, root in enumerate(found)}
    unique = _sum_up(graph, graph.owners((root.name, keys[root.workspace_id, root.snapshot_id]) for root in found))
    for root in found:
        if root.snapshot_id:
            mine = unique.get(keys[root.workspace_id, root.snapshot_id], 0)
            total = graph.below(root.name)
            usage.workspaces[root.workspace_id].snapshots[root.snapshot_id] = Use(mine, max(0, total - mine))
    return usage


def too_many(
    database: Database,
    objects: Objects,
    oldest_first: Sequence[str],
    limit: int,
    more_roots: Callable[[], Iterable[Root]],
    goes_on: Callable[[], bool],
) -> tuple[list[str], int]:
    """Which of some snapshots have to go for what is left to need ``limit`` bytes of the packs at most: as few as
    possible, the oldest first, or all of them. And what is needed then.

    Interrupted; Corrupt.
    """
    may_go = set(oldest_first)
    named: dict[str, Hash] = {}
    graph = _Graph(objects, goes_on)
    seen: set[Hash] = set()
    needed = 0
    for root in (*roots(database), *more_roots()):
        if root.snapshot_id in may_go:
            named[root.snapshot_id] = root.name
        else:
            needed += graph.reach(root.name, seen)
    for number in range(len(oldest_first) - 1, -1, -1):
        name = named.get(oldest_first[number])
        more = graph.reach(name, seen) if name is not None else 0
        if needed + more > limit:
            return list(oldest_first[: number + 1]), needed
        needed += more
    return [], needed


def _sum_up(graph: _Graph, owners: dict[Hash, int]) -> dict[int, int]:
    unique: dict[int, int] = {}
    for name, owner in owners.items():
        unique[owner] = unique.get(owner, 0) + graph.size(name)
    return unique


class _Graph:
    """The objects and what they name, each looked up once.

    What names others (a directory, a list of chunks) has its record as a node of its own, so that one that is stored
    against it needs that and not what it names.
    """

    def __init__(self, objects: Objects, goes_on: Callable[[], bool]) -> None:
        self._objects = objects
        self._goes_on = goes_on
        self._left = _STRIDE
        self._sizes: dict[Hash, int] = {}
        #: Of those that name any.
        self._named: dict[Hash, tuple[Hash, ...]] = {}
        self._below: dict[Hash, int] = {}

    def size(self, name: Hash) -> int:
        """Bytes of its record; 0 when it is not there."""
        return self._sizes.get(name, 0)

    def named(self, name: Hash) -> tuple[Hash, ...]:
        """What it names, each once."""
        if name not in self._sizes:
            self._look(name)
        return self._named.get(name, ())

    def _look(self, name: Hash) -> None:
        self._left -= 1
        if not self._left:
            self._left = _STRIDE
            if not self._goes_on():
                raise Interrupted
        self._sizes[name] = 0
        record = name.removesuffix(_RECORD) if len(name) > HASH_SIZE else name
        try:
            location = self._objects.locate(record)
            names_more = location.kind != ObjectKind.BLOB
            if names_more and record == name:
                below = {child for child, _ in children(self._objects, name, location.kind)}
                self._named[name] = (*below, name + _RECORD)
                return
        except StoreError:
            return
        self._sizes[name] = location.size
        if location.base != NO_BASE:
            self._named[name] = (location.base + _RECORD if names_more else location.base,)

    def owners(self, roots_: Iterable[tuple[Hash, int]]) -> dict[Hash, int]:
        """For each object that is reached from roots of one owner that owner, else ``_SHARED``.

        What a shared object names is shared, and what one names that an owner has, that owner has or it is shared. So
        each is looked at twice at most.
        """
        owned: dict[Hash, int] = {}
        for root, owner in roots_:
            waiting = [(root, owner)]
            while waiting:
                name, by = waiting.pop()
                known = owned.get(name)
                if known in (by, _SHARED):
                    continue
                owned[name] = now = by if known is None else _SHARED
                waiting += [(child, now) for child in self.named(name)]
        return owned

    def reached(self, names: Iterable[Hash]) -> int:
        """Bytes of all that is reached, each once."""
        seen: set[Hash] = set()
        return sum(self.reach(name, seen) for name in names)

    def reach(self, root: Hash, seen: set[Hash]) -> int:
        """Bytes of what is reached and was not ``seen`` yet, which it is then."""
        found = 0
        waiting = [root]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += self.named(name)
                found += self.size(name)
        return found

    def below(self, root: Hash) -> int:
        """Bytes of an object and all below it; what comes in several directories counts in each."""
        waiting = [root]
        while waiting:
            name = waiting[-1]
            missing = [child for child in self.named(name) if child not in self._below]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            self._below[name] = self.size(name) + sum(self._below[child] for child in self.named(name))
        return self._below[root]
