"""Planning a restore: what has to change so that the files become those of a snapshot, and what is left alone.

A pure function of two trees, the target's rules and a path filter; reads trees from the store, touches no filesystem.
So the plan of an interrupted restore can be made again from its two snapshots.
"""

from __future__ import annotations

import enum
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cogfs.fsd.control.beneath import join, split
from cogfs.fsd.control.errors import CogfsError, show
from cogfs.fsd.control.rules import Rules
from cogfs.store.schema import Hash, Kind, OpaqueReason, TreeEntry
from cogfs.store.store import Store
from cogfs.v1.reasons import Reason


class Action(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    DELETE = "delete"
    #: Content is right; mode, owner, attributes or hard links are not.
    METADATA = "metadata"


@dataclass(frozen=True, slots=True)
class Step:
    """One path that changes: what is there (None: nothing) and what is to be there (None: nothing)."""

    path: bytes
    before: TreeEntry | None
    after: TreeEntry | None

    @property
    def action(self) -> Action:
        if self.before is None:
            return Action.CREATE
        if self.after is None:
            return Action.DELETE
        if self.before.kind is self.after.kind and same_content(self.before, self.after):
            return Action.METADATA
        return Action.REPLACE


@dataclass(slots=True)
class Plan:
    """All steps, parents before what is in them, and what the restore leaves alone."""

    steps: list[Step] = field(default_factory=list)
    kept: list[tuple[bytes, str]] = field(default_factory=list)
    #: Paths below both trees that are already right.
    unchanged: int = 0
    #: For each hard-link group of the target that has a step: all paths of it.
    groups: dict[int, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.steps

    def paths(self) -> set[bytes]:
        return {step.path for step in self.steps}

    def restored(self) -> list[bytes]:
        return [step.path for step in self.steps if step.after is not None]

    def deleted(self) -> list[bytes]:
        """Paths that go: those that have no place in the target, and those below a directory that a file replaces."""
        return [step.path for step in self.steps if step.after is None]

    def uncaptured(self) -> list[Step]:
        """Steps that change something which the current tree does not hold."""
        return [step for step in self.steps if step.before is not None and step.before.kind is Kind.OPAQUE]


def same_content(one: TreeEntry, other: TreeEntry) -> bool:
    """Whether two entries of one kind have the same content, whatever their attributes; all directories do."""
    if one.kind is Kind.FILE:
        return one.hash == other.hash and one.size == other.size
    if one.kind is Kind.SYMLINK:
        return one.target == other.target
    return True


def same_attributes(one: TreeEntry, other: TreeEntry) -> bool:
    """Whether mode, owner and extended attributes agree; an owner that was not recorded agrees with any."""
    return (
        one.mode == other.mode
        and one.xattrs == other.xattrs
        and (one.uid == other.uid or one.uid < 0 or other.uid < 0)
        and (one.gid == other.gid or one.gid < 0 or other.gid < 0)
    )


def normal_path(path: bytes) -> bytes:
    """A path of a filter without doubled or closing slashes. VALIDATION_ERROR: it is absolute or leaves the root."""
    if path.startswith(b"/") or b"\0" in path:
        raise CogfsError(Reason.VALIDATION_ERROR, "a path must be relative to the workspace's root")
    names = [name for name in path.split(b"/") if name not in (b"", b".")]
    if b".." in names:
        raise CogfsError(Reason.VALIDATION_ERROR, "a path must not leave the workspace's root")
    return b"/".join(names)


class Planner:
    """Makes plans for one target."""

    def __init__(self, store: Store, rules: Rules, paths: Sequence[bytes] = (), *, back: bool = False) -> None:
        """``rules``: those that the target was taken by. ``paths``: normal; only they and what is below change.
        ``back``: the target is what the files were before a restore, which is taken back."""
        self._back = back
        self._store = store
        self._rules = rules
        self._paths = tuple(paths)

    def plan(self, current: TreeEntry, target: TreeEntry) -> Plan:
        """Both are directories at the root. Store errors when a tree cannot be read."""
        plan = Plan()
        if not self._paths or b"" in self._paths:
            if not same_attributes(current, target):
                plan.steps.append(Step(b"", current, target))
            self._directory(plan, b"", current.hash, target.hash)
        else:
            self._filtered(plan, b"", current.hash, target.hash)
        self._settle_links(plan, current, target)
        return plan

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _filtered(self, plan: Plan, path: bytes, current: Hash, target: Hash) -> None:
        """Descend to the paths of the filter."""
        ours = self._entries(current)
        theirs = self._entries(target)
        prefix = path + b"/" if path else b""
        names = set()
        for wanted in self._paths:
            if wanted.startswith(prefix):
                names.add(wanted[len(prefix) :].split(b"/", 1)[0])
        for name in sorted(names):
            where = join(path, name)
            before, after = ours.get(name), theirs.get(name)
            if where in self._paths:
                self._name(plan, where, before, after)
            elif before is not None and after is not None and before.kind is after.kind is Kind.DIRECTORY:
                self._filtered(plan, where, before.hash, after.hash)
            elif after is not None and after.kind is Kind.DIRECTORY and before is None:
                # What is wanted needs the directories above it.
                plan.steps.append(Step(where, None, after))
                self._filtered(plan, where, b"", after.hash)
            elif before is not None and before.kind is Kind.DIRECTORY and after is None:
                self._filtered(plan, where, before.hash, b"")
            elif before is not None or after is not None:
                inside = next(other for other in self._paths if other.startswith(where + b"/"))
                raise CogfsError(
                    Reason.VALIDATION_ERROR,
                    f"cannot restore {show(inside)} alone: {show(where)} is a directory on one side only; "
                    "restore that instead",
                )

    def _directory(self, plan: Plan, path: bytes, current: Hash, target: Hash) -> None:
        if current == target:
            return
        ours = self._entries(current)
        theirs = self._entries(target)
        for name in sorted(ours.keys() | theirs.keys()):
            self._name(plan, join(path, name), ours.get(name), theirs.get(name))

    def _name(self, plan: Plan, path: bytes, before: TreeEntry | None, after: TreeEntry | None) -> None:
        if before is not None and before == after:
            return
        if after is None:
            if before is not None:
                self._remove(plan, path, before)
            return
        if after.kind is Kind.OPAQUE:
            if before is not None:
                plan.kept.append((path, after.target.decode()))
            return
        if before is None:
            self._create(plan, path, after)
            return
        if before.kind is Kind.OPAQUE:
            self._over_opaque(plan, path, before, after)
            return
        if before.kind is after.kind is Kind.DIRECTORY:
            if not same_attributes(before, after):
                plan.steps.append(Step(path, before, after))
            self._directory(plan, path, before.hash, after.hash)
        elif before.kind is after.kind:
            if not (
                same_content(before, after) and same_attributes(before, after) and before.link_group == after.link_group
            ):
                plan.steps.append(Step(path, before, after))
        elif before.kind is Kind.DIRECTORY:
            self._replace_directory(plan, path, before, after)
        else:
            plan.steps.append(Step(path, before, after))
            if after.kind is Kind.DIRECTORY:
                self._create_below(plan, path, after.hash)

    def _create(self, plan: Plan, path: bytes, after: TreeEntry) -> None:
        plan.steps.append(Step(path, None, after))
        if after.kind is Kind.DIRECTORY:
            self._create_below(plan, path, after.hash)

    def _create_below(self, plan: Plan, path: bytes, target: Hash) -> None:
        for entry in self._store.read_tree(target).entries:
            if entry.kind is not Kind.OPAQUE:
                self._create(plan, join(path, entry.name), entry)

    def _remove(self, plan: Plan, path: bytes, before: TreeEntry) -> bool:
        """Plan the removal of what the target does not have. Whether all of it goes."""
        reason = self._unkeepable(path, before)
        if reason is not None:
            plan.kept.append((path, reason))
            return False
        if before.kind is not Kind.DIRECTORY:
            plan.steps.append(Step(path, before, None))
            return True
        place = len(plan.steps)
        if not self._remove_below(plan, path, before.hash):
            return False
        plan.steps.insert(place, Step(path, before, None))
        return True

    def _remove_below(self, plan: Plan, path: bytes, current: Hash) -> bool:
        whole = True
        for entry in self._store.read_tree(current).entries:
            whole = self._remove(plan, join(path, entry.name), entry) and whole
        return whole

    def _replace_directory(self, plan: Plan, path: bytes, before: TreeEntry, after: TreeEntry) -> None:
        """A directory gives way to a file or link, unless it holds something that is left alone."""
        trial = Plan()
        if self._remove_below(trial, path, before.hash):
            plan.steps.append(Step(path, before, after))
            plan.steps.extend(trial.steps)
        else:
            plan.kept.append((path, "holds what is kept"))
            plan.kept.extend(trial.kept)

    def _over_opaque(self, plan: Plan, path: bytes, before: TreeEntry, after: TreeEntry) -> None:
        """The target has a path where something stands that the current tree does not hold."""
        reason = before.target.decode()
        directory = stat.S_ISDIR(before.mode)
        left_out = self._rules.excludes(path, path.rpartition(b"/")[2], directory=directory)
        if left_out or reason in (OpaqueReason.SPECIAL, OpaqueReason.SUBMOUNT):
            # Left out by the target's own rules: a glob like "build/" takes a directory and not a file of that name.
            plan.kept.append((path, reason))
        elif directory and reason == OpaqueReason.UNREADABLE:
            if after.kind is Kind.DIRECTORY and after.hash:
                raise CogfsError(
                    Reason.DENIED,
                    f"cannot restore into {show(path)}: the directory cannot be read; make it readable first",
                )
            plan.kept.append((path, reason))
        else:
            plan.steps.append(Step(path, before, after))
            if after.kind is Kind.DIRECTORY:
                self._create_below(plan, path, after.hash)

    def _unkeepable(self, path: bytes, before: TreeEntry) -> str | None:
        """Why the target could not have held a path that it does not have; None when it could have."""
        if before.kind is Kind.OPAQUE:
            return before.target.decode()
        name = path.rpartition(b"/")[2]
        if self._rules.excludes(path, name, directory=before.kind is Kind.DIRECTORY):
            return OpaqueReason.EXCLUDED.value
        if before.kind is Kind.FILE and self._rules.too_large(before.size):
            return OpaqueReason.TOO_LARGE.value
        if before.kind is Kind.FILE and before.link_group and self._rules.refuse_hard_links:
            return OpaqueReason.HARD_LINK.value
        return None

    def _entries(self, tree: Hash) -> dict[bytes, TreeEntry]:
        if not tree:
            return {}
        return {entry.name: entry for entry in self._store.read_tree(tree).entries}

    # --- hard links ---------------------------------------------------------------------------------------------------

    def _settle_links(self, plan: Plan, current: TreeEntry, target: TreeEntry) -> None:
        """Compare hard links by which paths share a file, not by the numbers of their groups.

        Steps whose only difference was the number go; a step of one name of a file brings its other names with it.
        With a filter, a name is linked to names in it alone: what the others hold now is no concern of the restore. On
        the way back it is linked to those, too, that are still what they were.
        """
        involved = [
            step
            for step in plan.steps
            if (step.before is not None and step.before.link_group)
            or (step.after is not None and step.after.link_group)
        ]
        if not involved:
            return
        ours, our_entries = self._members(current)
        theirs, their_entries = self._members(target)

        def ours_of(path: bytes, entry: TreeEntry | None) -> frozenset[bytes]:
            group = entry.link_group if entry is not None else 0
            return frozenset(ours.get(group, ())) if group else frozenset((path,))

        planned = plan.paths()

        def possible(path: bytes) -> bool:
            """Whether a name of the target is one after the restore: not where something is left alone."""
            if self.in_filter(path):
                return path in our_entries or path in planned
            if not self._back:
                return False
            there, wanted = our_entries.get(path), their_entries[path]
            return there is not None and same_content(there, wanted) and same_attributes(there, wanted)

        def right(path: bytes, before: TreeEntry, after: TreeEntry) -> bool:
            members = frozenset(theirs.get(after.link_group, ())) if after.link_group else frozenset((path,))
            return ours_of(path, before) in (members, frozenset(filter(possible, members)))

        steps = []
        for step in plan.steps:
            before, after = step.before, step.after
            if (
                before is not None
                and after is not None
                and before.kind is after.kind is Kind.FILE
                and same_content(before, after)
                and same_attributes(before, after)
                and right(step.path, before, after)
            ):
                continue
            steps.append(step)
        have = {step.path for step in steps}
        for group in {step.after.link_group for step in steps if step.after is not None and step.after.link_group}:
            members = tuple(sorted(filter(possible, theirs.get(group, ()))))
            plan.groups[group] = members
            for path in members:
                before, after = our_entries.get(path), their_entries[path]
                if path in have or before is None or right(path, before, after):
                    continue
                steps.append(Step(path, before, after))
                have.add(path)
        steps.sort(key=lambda step: step.path.split(b"/"))
        plan.steps = steps

    def _members(self, root: TreeEntry) -> tuple[dict[int, list[bytes]], dict[bytes, TreeEntry]]:
        groups: dict[int, list[bytes]] = {}
        entries: dict[bytes, TreeEntry] = {}
        for path, entry in walk(self._store, root.hash):
            if entry.kind is Kind.FILE:
                if entry.link_group:
                    groups.setdefault(entry.link_group, []).append(path)
                entries[path] = entry
        return groups, entries

    def in_filter(self, path: bytes) -> bool:
        """Whether the filter takes a path."""
        return not self._paths or any(
            not wanted or path == wanted or path.startswith(wanted + b"/") for wanted in self._paths
        )


def walk(store: Store, tree: Hash, path: bytes = b"") -> Iterator[tuple[bytes, TreeEntry]]:
    """All entries below a tree with their paths, parents first."""
    waiting = [(path, tree)]
    while waiting:
        where, current = waiting.pop()
        below = []
        for entry in store.read_tree(current).entries:
            here = join(where, entry.name)
            yield here, entry
            if entry.kind is Kind.DIRECTORY:
                below.append((here, entry.hash))
        waiting.extend(reversed(below))


def find(store: Store, root: TreeEntry, path: bytes) -> TreeEntry | None:
    """The entry at a normal path below a root, or None."""
    entry = root
    for name in path.split(b"/") if path else ():
        if entry.kind is not Kind.DIRECTORY:
            return None
        found = next((child for child in store.read_tree(entry.hash).entries if child.name == name), None)
        if found is None:
            return None
        entry = found
    return entry


def changes(store: Store, old: TreeEntry, new: TreeEntry, paths: Sequence[bytes] = ()) -> Iterator[Step]:
    """What differs between two trees, as it is: nothing is kept back. Entries that are not recorded are passed over."""
    everything = not paths or b"" in paths
    waiting: list[tuple[bytes, TreeEntry | None, TreeEntry | None]] = [(b"", old, new)]
    while waiting:
        path, before, after = waiting.pop()
        if before == after:
            continue
        if everything or any(path == want or path.startswith(want + b"/") for want in paths):
            if not _equal(before, after):
                yield Step(path, before, after)
        elif not any(want.startswith(path + b"/" if path else b"") for want in paths):
            continue
        ours = _children(store, before)
        theirs = _children(store, after)
        for name in sorted(ours.keys() | theirs.keys(), reverse=True):
            waiting.append((join(path, name), ours.get(name), theirs.get(name)))


def _children(store: Store, entry: TreeEntry | None) -> dict[bytes, TreeEntry]:
    if entry is None or entry.kind is not Kind.DIRECTORY:
        return {}
    return {child.name: child for child in store.read_tree(entry.hash).entries if child.kind is not Kind.OPAQUE}


def _equal(before: TreeEntry | None, after: TreeEntry | None) -> bool:
    if before is None or after is None:
        return before is after
    return before.kind is after.kind and same_content(before, after) and same_attributes(before, after)


def count(store: Store, root: TreeEntry, paths: Iterable[bytes]) -> int:
    """How many recorded entries are at and below some paths of a tree."""
    total = 0
    for path in paths:
        entry = find(store, root, path)
        if entry is None or entry.kind is Kind.OPAQUE:
            continue
        total += 1 if path else 0
        if entry.kind is Kind.DIRECTORY:
            total += sum(child.kind is not Kind.OPAQUE for _, child in walk(store, entry.hash))
    return total


def patched(store: Store, root: TreeEntry, changes: Mapping[bytes, TreeEntry | None]) -> TreeEntry:
    """``root`` with other entries (None: nothing) at some paths below it, whose directories exist in it.

    A directory's entry may come with changes below it, which go into its tree. Each tree is put once.
    """
    waiting: dict[int, dict[bytes, dict[bytes, TreeEntry | None]]] = {}

    def set_entry(path: bytes, entry: TreeEntry | None) -> None:
        parent, name = split(path)
        waiting.setdefault(path.count(b"/"), {}).setdefault(parent, {})[name] = entry

    for path, entry in changes.items():
        set_entry(path, entry)
    for depth in range(max(waiting, default=-1), -1, -1):
        for parent, names in waiting.get(depth, {}).items():
            above = find(store, root, parent)
            assert above is not None and above.kind is Kind.DIRECTORY, parent
            children = {child.name: child for child in store.read_tree(above.hash).entries}
            for name, entry in names.items():
                if entry is None:
                    children.pop(name, None)
                else:
                    children[name] = msgspec.structs.replace(entry, name=name)
            tree = store.put_tree([children[name] for name in sorted(children)], above.hash)
            if not parent:
                return msgspec.structs.replace(root, hash=tree)
            grandparent, name = split(parent)
            planned = waiting.get(depth - 1, {}).get(grandparent, {}).get(name, above)
            assert planned is not None, parent
            set_entry(parent, msgspec.structs.replace(planned, hash=tree))
    return root
