"""A state machine: random operations in a real mount, random checkpoints and ways back, against a plain directory.

Each operation is done twice, in the mount and in a plain directory beside it (the shadow); both have to answer alike
and to look alike. What a snapshot has to hold is what a walk found in the shadow when it was taken.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cogfs.client import Busy, Client, Thread, ValidationError, Workspace, WorkspaceBusy, connect
from cogfs.client.connection import Connection
from cogfs.v1 import common_pb2, thread_pb2
from tests.support.installation import Installation, remove
from tests.support.model import Choice, LeftAlone, Operation, carry_out, operations, restored, without, without_groups
from tests.support.tree import Tree, describe, differences

#: Kinds that a way back to the last entry before a message passes over.
_PASSED_OVER = ("note", "session_event")


@dataclass(frozen=True)
class Kept:
    """What a snapshot has to hold."""

    snapshot: str
    nodes: Tree
    #: What was there and is not held: special files, and large ones.
    special: frozenset[bytes]


@dataclass
class Said:
    """An entry of the thread."""

    id: str
    kind: str
    parent: Said | None
    kept: Kept | None
    follows: bool
    number: int


@dataclass
class Way:
    """The last restore, as an undo has to take it back."""

    before: Kept
    paths: list[bytes]
    #: For a rewind: the leaf before and after it.
    leaves: tuple[Said | None, Said | None] | None
    #: Whether the files followed before it.
    followed: bool = True


class Session:
    """One daemon for many runs of a machine: each has workspaces of its own."""

    def __init__(self) -> None:
        self.installation = Installation(prefix="cogfs-machine-")
        # Who holds a run is never late, and nobody is waited for.
        self.installation.environment |= {"COGFS_RUN_GRACE": "3600", "COGFS_TOOL_SETTLE": "0"}
        self._start()
        self.runs = 0
        #: What was done, for who wants to know how much of it.
        self.counts: Counter[str] = Counter()

    def _start(self) -> None:
        self.installation.text("daemon", "start")
        self.cog: Client = connect(self.installation.endpoint)
        #: For calls that a client has no method of its own for.
        self.connection = Connection(self.installation.endpoint)

    def kill_daemon(self) -> None:
        """``kill -9`` of the control process, and another one."""
        pid = self.cog.daemon().pid
        self._hang_up()
        self.installation.kill(pid)
        self._start()

    def stop_daemon(self) -> None:
        """Its end as a user asks for it, and another one."""
        self._hang_up()
        self.installation.text("daemon", "stop")
        self._start()

    def _hang_up(self) -> None:
        self.cog.close()
        self.connection.close()

    def close(self) -> None:
        self._hang_up()
        self.installation.close()


class Machine(RuleBasedStateMachine):
    """``session`` is set by who runs it, and ``scanned`` where there is to be no mount: what is called the mount below
    is the directory itself then."""

    session: Session
    scanned = False

    def __init__(self) -> None:
        super().__init__()
        self.session.runs += 1
        self.place = self.session.installation.directory / f"run{self.session.runs}"
        self.root = self.place / "root"
        self.shadow = self.place / "shadow"
        for directory in (self.place, self.root, self.shadow):
            directory.mkdir(mode=0o755)
        self.mountpoint = self.root
        self.mounted = False
        self.kept: list[Kept] = []
        self.said: list[Said] = []
        self.leaf: Said | None = None
        self.follows = True
        self.limit: int | None = None
        self.way: Way | None = None
        #: Descriptors of one file, in the mount and in the shadow.
        self.held: list[tuple[int, int]] = []

    # --- set-up and end

    @initialize(
        first=st.lists(operations, max_size=25), in_place=st.booleans(), limit=st.sampled_from((None, None, 3000))
    )
    def begin(self, first: list[Operation], in_place: bool, limit: int | None) -> None:
        self.limit = limit
        for operation in first:
            self._both(operation, self.root)
        if not in_place and not self.scanned:
            self.mountpoint = self.place / "mount"
            self.mountpoint.mkdir()
        self.workspace_id = self.session.cog.mount(
            self.root, self._place_of_mount, max_file_bytes=limit, scan=self.scanned
        ).id
        self.mounted = True
        self.thread_id = self.session.cog.create_thread(workspace=self.workspace_id).id

    def teardown(self) -> None:
        try:
            self._release()
            # Not over the failure of a rule.
            if self.mounted and sys.exc_info()[0] is None:
                self._check()
                self._unmount()
                self._check()
        finally:
            if self.mounted:
                with suppress(Exception):
                    self._workspace.unmount(force=True)
            for point in self.session.installation.mounts():
                if point.is_relative_to(self.place):
                    subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
            remove(self.place)

    @property
    def _place_of_mount(self) -> Path | None:
        return None if self.mountpoint == self.root else self.mountpoint

    @property
    def _workspace(self) -> Workspace:
        return self.session.cog.workspace(id=self.workspace_id)

    @property
    def _thread(self) -> Thread:
        return self.session.cog.thread(self.thread_id)

    # --- files

    @precondition(lambda self: self.mounted)
    @rule(several=st.lists(operations, min_size=1, max_size=12))
    def change(self, several: list[Operation]) -> None:
        for operation in several:
            self._both(operation, self.mountpoint)

    @precondition(lambda self: self.mounted)
    @rule(several=st.lists(operations, min_size=1, max_size=4))
    def change_a_little(self, several: list[Operation]) -> None:
        self.change(several)

    @precondition(lambda self: self.mounted)
    @rule(number=st.integers(0, 999))
    def hold(self, number: int) -> None:
        """Keep a file open for writing over what comes."""
        files = Choice(os.fsencode(self.shadow)).files
        if files and len(self.held) < 3:
            path = files[number % len(files)]
            here, there = (
                os.open(os.path.join(os.fsencode(tree), path), os.O_RDWR) for tree in (self.mountpoint, self.shadow)
            )
            self.held.append((here, there))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), content=st.binary(min_size=1, max_size=30))
    def write_held(self, number: int, content: bytes) -> None:
        here, there = self.held[number % len(self.held)]
        for descriptor in (here, there):
            os.pwrite(descriptor, content, number)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self._release()

    # --- conversation and snapshots

    @precondition(lambda self: self.mounted)
    @rule()
    def user_message(self) -> None:
        self._check()
        nodes, special = self._now()
        entry = self._thread.user_message("again", require_checkpoint=True)
        assert entry.files_follow == self.follows
        kept = self._keep(entry.file_checkpoint.snapshot_id, nodes, special)
        self._say(entry, "user", kept)
        self.follows = True

    @precondition(lambda self: self.mounted)
    @rule(kind=st.sampled_from(("assistant", "note", "tool", "session_event")))
    def other_message(self, kind: str) -> None:
        self._say(self._thread.append(kind, "well"), kind, None)

    @precondition(lambda self: self.mounted)
    @rule()
    def checkpoint(self) -> None:
        self._check()
        nodes, special = self._now()
        self._keep(self._workspace.checkpoint().id, nodes, special)

    @precondition(lambda self: self.kept)
    @rule(number=st.integers(0, 999))
    def look(self, number: int) -> None:
        """What a snapshot says that it holds."""
        kept = self.kept[number % len(self.kept)]
        snapshot = self.session.cog.snapshot(kept.snapshot)
        files = [path for path, node in sorted(kept.nodes.items()) if node.kind == "file"]
        listed = {entry.path: entry for entry in snapshot.ls(recursive=True) if not entry.reason}
        assert listed.keys() == kept.nodes.keys() - {b""}
        for path, entry in listed.items():
            node = kept.nodes[path]
            assert (entry.symlink_target, entry.size) == (node.target, node.size), path
            assert node.kind == "link" or entry.mode == node.mode, path
        if files:
            path = files[number % len(files)]
            assert len(b"".join(snapshot.cat(path))) == kept.nodes[path].size

    @precondition(lambda self: self.mounted and self.kept)
    @rule(number=st.integers(0, 999))
    def differ(self, number: int) -> None:
        """What changed since a snapshot."""
        kept = self.kept[number % len(self.kept)]
        nodes, _ = self._now()
        one, other = without_groups(kept.nodes), without_groups(nodes)
        said = {change.path for change in self.session.cog.snapshot(kept.snapshot).diff()}
        assert said == {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}

    # --- ways back

    @precondition(lambda self: self.mounted and self.kept)
    @rule(number=st.integers(0, 999))
    def restore(self, number: int) -> None:
        kept = self.kept[number % len(self.kept)]
        snapshot = self.session.cog.snapshot(kept.snapshot)
        self._go(kept, [], None, lambda dry: snapshot.restore(dry_run=dry))

    @precondition(lambda self: self.mounted and self.kept)
    @rule(number=st.integers(0, 999), picks=st.lists(st.integers(0, 999), min_size=1, max_size=3))
    def restore_paths(self, number: int, picks: list[int]) -> None:
        kept = self.kept[number % len(self.kept)]
        nodes, special = self._now()
        known = sorted((kept.nodes.keys() | nodes.keys()) - {b""})
        if not known:
            return
        paths = sorted({known[pick % len(known)] for pick in picks})
        snapshot = self.session.cog.snapshot(kept.snapshot)
        try:
            snapshot.restore(paths, dry_run=True)
        except ValidationError:
            # A directory on one side only stands above it.
            assert any(_kinds_differ(kept, nodes, special, path) for path in paths)
            return
        self._go(kept, paths, None, lambda dry: snapshot.restore(paths, dry_run=dry))

    @precondition(lambda self: self.mounted and self.leaf)
    @rule(number=st.integers(0, 999), memory=st.sampled_from((True, True, True, False)))
    def rewind(self, number: int, memory: bool) -> None:
        branch = self._branch()
        entry = branch[number % len(branch)]
        found = self._checkpoint_at(entry)
        if found is None:
            for dry in (True, False):
                try:
                    self._thread.rewind(entry.id, files=True, memory=memory, dry_run=dry)
                except ValidationError:
                    continue
                raise AssertionError("a rewind without a checkpoint was not refused")
            return
        message, exact = found
        assert message.kept is not None
        leaf = entry if memory else self.leaf
        cut = branch[branch.index(entry) + 1 :] if memory else []

        def call(dry: bool) -> common_pb2.RestoreReport:
            report = self._thread.rewind(entry.id, files=True, memory=memory, dry_run=dry)
            assert (report.files.entry_id, report.files.exact) == (message.id, exact)
            assert list(report.conversation.cut) == [one.id for one in cut]
            return report.files.restore

        changed = self._go(message.kept, [], (self.leaf, leaf), call, repeatable=False)
        # Files that were right already still follow, where they did.
        stays = leaf is self.leaf and not changed
        self.follows = (exact and memory) or (stays and self.follows)
        self.leaf = leaf
        self._check_branch()

    @precondition(lambda self: self.mounted and self.leaf)
    @rule(number=st.integers(0, 999))
    def rewind_conversation(self, number: int) -> None:
        branch = self._branch()
        entry = branch[number % len(branch)]
        nodes, _ = self._now()
        report = self._thread.rewind(entry.id)
        assert list(report.conversation.cut) == [one.id for one in branch[branch.index(entry) + 1 :]]
        assert not differences(nodes, self._now()[0])
        if entry is not self.leaf:
            self.follows = False
        self.leaf = entry
        self._check_branch()

    @precondition(lambda self: self.mounted)
    @rule()
    def undo(self) -> None:
        way = self.way
        if way is None:
            try:
                self._workspace.undo()
            except ValidationError:
                return
            raise AssertionError("an undo without a restore was not refused")
        whole = way.leaves is not None and way.leaves[1] is self.leaf
        leaves = way.leaves if whole else None

        def call(dry: bool) -> common_pb2.RestoreReport:
            report = self._workspace.undo(dry_run=dry)
            assert bool(report.files_only_reason) == (way.leaves is not None and not whole)
            return report.files

        self._go(way.before, way.paths, (leaves[1], leaves[0]) if leaves else None, call, repeatable=False)
        if leaves is not None:
            self.leaf = leaves[0]
            self.follows = way.followed
        self._check_branch()

    # --- what happens to daemons and mounts

    @precondition(lambda self: self.mounted)
    @rule(
        what=st.sampled_from(("mount", "mount", "mount", "worker", "daemon")), several=st.lists(operations, max_size=6)
    )
    def disturb(self, what: str, several: list[Operation]) -> None:
        """Unmounted, changed and mounted again; or ``kill -9``."""
        if what == "daemon":
            self.session.kill_daemon()
            return
        if what == "worker":
            if self.scanned:
                return
            self.session.installation.kill(self._workspace.message.worker_pid)
            self._release()
        else:
            self._release()
            self._unmount()
            self._check()
            for operation in several:
                self._both(operation, self.root)
        self._mount()
        self._check()

    # --- how it is done

    def _both(self, operation: Operation, tree: Path) -> None:
        """Do it in the mount (or, while there is none, in the root) and in the shadow."""
        choice = Choice(os.fsencode(self.shadow))
        outcomes = []
        for place in (tree, self.shadow):
            try:
                carry_out(os.fsencode(place), choice, operation)
                outcomes.append("done")
            except OSError as error:
                outcomes.append(f"{type(error).__name__} {error.errno}")
        assert outcomes[0] == outcomes[1], f"{operation}: {outcomes[0]}, and in a plain directory {outcomes[1]}"

    def _now(self) -> tuple[Tree, frozenset[bytes]]:
        """What a snapshot of the files has to hold, and what it leaves out."""
        left = LeftAlone(os.fsencode(self.shadow), self.limit)
        return without(describe(self.shadow), left.large), frozenset(left.special | left.large)

    def _check(self) -> None:
        """The tree is the shadow, seen through the mount and, where one can, in the bare directory."""
        wanted = describe(self.shadow)
        _assert_same(wanted, describe(self.mountpoint if self.mounted else self.root), "the mount")
        if self.mounted and self.mountpoint != self.root:
            _assert_same(wanted, describe(self.root), "the bare directory")

    def _keep(self, snapshot: str, nodes: Tree, special: frozenset[bytes]) -> Kept:
        kept = Kept(snapshot, nodes, special)
        self.kept.append(kept)
        note(f"kept {snapshot}: {sorted(nodes)}")
        return kept

    def _say(self, entry: thread_pb2.Entry, kind: str, kept: Kept | None) -> None:
        said = Said(entry.id, kind, self.leaf, kept, entry.files_follow, len(self.said))
        assert entry.parent_id == (self.leaf.id if self.leaf else "")
        self.said.append(said)
        self.leaf = said

    def _branch(self) -> list[Said]:
        branch: list[Said] = []
        entry = self.leaf
        while entry is not None:
            branch.insert(0, entry)
            entry = entry.parent
        return branch

    def _check_branch(self) -> None:
        assert [entry.id for entry in self._thread.entries()] == [entry.id for entry in self._branch()]

    def _checkpoint_at(self, point: Said) -> tuple[Said, bool] | None:
        """The message whose checkpoint a rewind to ``point`` restores, and whether it is exactly what was there."""
        right_after = [
            entry for entry in self.said if entry.kind == "user" and entry.follows and _leads_to(point, entry)
        ]
        if right_after:
            return max(right_after, key=lambda entry: entry.number), True
        entry: Said | None = point
        while entry is not None and entry.kind != "user":
            entry = entry.parent
        return None if entry is None else (entry, False)

    def _go(
        self,
        kept: Kept,
        paths: list[bytes],
        leaves: tuple[Said | None, Said | None] | None,
        call: Callable[[bool], common_pb2.RestoreReport],
        *,
        repeatable: bool = True,
    ) -> bool:
        """A way back, first dry and then done by ``call``, and all that has to hold. Whether it changed a file."""
        self._check()
        before = describe(self.shadow)
        left = LeftAlone(os.fsencode(self.mountpoint), self.limit)
        wanted, mixed = restored(before, kept.nodes, left, kept.special, paths)
        followed = self.follows
        plan = self._planned(before, call)
        report = call(False)
        note(f"restored {list(report.restored)}, deleted {list(report.deleted)}")
        assert (plan.dry_run, report.dry_run) == (True, False)
        for part in ("restored", "deleted", "unchanged", "insertions", "deletions"):
            assert getattr(plan, part) == getattr(report, part), part
        found = describe(self.mountpoint)
        if mixed:
            wanted, found = without_groups(wanted), without_groups(found)
        _assert_same(wanted, found, "the restored tree")
        assert LeftAlone(os.fsencode(self.mountpoint)).content == left.content
        changed = {*report.restored, *report.deleted}
        assert bool(changed) == bool(report.safety_snapshot_id)
        if changed:
            # A large file that the restore changed is in the safety snapshot.
            lost = left.large - changed
            safety = Kept(report.safety_snapshot_id, without(before, lost), frozenset(left.special | lost))
            self.way = Way(safety, paths, leaves, followed)
            self.kept.append(self.way.before)
        elif leaves is not None and leaves[0] is not leaves[1]:
            self.way = Way(kept, paths, leaves, followed)
        if repeatable and all(path in kept.nodes for path in paths):
            again = call(True)
            assert not again.restored and not again.deleted, "what was restored differs from its snapshot"
        if changed:
            self._follow()
        return bool(changed)

    def _planned(self, before: Tree, call: Callable[[bool], common_pb2.RestoreReport]) -> common_pb2.RestoreReport:
        """The plan, when nothing is in the way any more."""
        plan = call(True)
        if plan.busy:
            assert self.held, plan.busy_by
            try:
                call(False)
            except (Busy, WorkspaceBusy):
                pass
            else:
                raise AssertionError("a restore over an open file was not refused")
            _assert_same(before, describe(self.mountpoint), "a refused restore's tree")
            self._release()
            deadline = time.monotonic() + 180
            # The kernel tells of a closed file when it comes to it.
            while plan.busy and time.monotonic() < deadline:
                plan = call(True)
        assert not plan.busy, plan.busy_by
        _assert_same(before, describe(self.mountpoint), "a dry run's tree")
        return plan

    def _follow(self) -> None:
        """The shadow becomes what the mount is, under the descriptors that are held as well."""
        tree = os.fsencode(self.shadow)
        names = {os.stat(os.path.join(tree, path)).st_ino: path for path in Choice(tree).files}
        held = [(here, names.get(os.fstat(there).st_ino)) for here, there in self.held]
        for _, there in self.held:
            os.close(there)
        remove(self.shadow)
        subprocess.run(["cp", "-a", "--", self.mountpoint, self.shadow], check=True)
        self.held = []
        for here, path in held:
            if path is not None and os.fstat(here).st_nlink:
                self.held.append((here, os.open(os.path.join(tree, path), os.O_RDWR)))
            else:
                os.close(here)
        self._check()

    def _release(self) -> None:
        while self.held:
            here, there = self.held.pop()
            with suppress(OSError):
                os.close(here)
            os.close(there)

    def _mount(self) -> None:
        self._workspace.mount(self._place_of_mount, scan=self.scanned)
        self.mounted = True

    def _unmount(self) -> None:
        self._workspace.unmount()
        self.mounted = False


def _leads_to(point: Said, entry: Said) -> bool:
    """Whether only entries that are passed over stand between two."""
    above = entry.parent
    while above is not None and above is not point and above.kind in _PASSED_OVER:
        above = above.parent
    return above is point


def _kinds_differ(kept: Kept, nodes: Tree, special: frozenset[bytes], path: bytes) -> bool:
    above = os.path.dirname(path)
    while above:
        if above in special or above in kept.special:
            return True
        one, other = kept.nodes.get(above), nodes.get(above)
        if one is not None and other is not None and one.kind != other.kind:
            return True
        if any(node is not None and node.kind != "directory" for node in (one, other)):
            return True
        above = os.path.dirname(above)
    return False


def _assert_same(wanted: Tree, found: Tree, what: str) -> None:
    different = differences(wanted, found)
    assert not different, f"{what} is not what it has to be (which comes first):\n  " + "\n  ".join(different[:20])
