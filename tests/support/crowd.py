"""Many clients that work on the same threads and workspaces at once, and what has to hold whatever order it comes to.

What each client did is written down with its answer. When all stand still, that is held against what is there:

- *No entry is lost, none is made up.* The entries of a thread are those whose append was answered.
- *The moves of a thread's leaf can be put in a row.* An entry was added where a leaf was, a rewind began where one was;
  so from the first leaf a path leads through all moves that were answered, each once, to the leaf that there is.
- *Memory follows the branch*: an item counts when an entry that it stands on is active.
- *Each snapshot is of one moment between restores.* The files below ``all`` are changed by restores alone, and all at
  once: a snapshot in which two of them are of two versions was taken within a restore. Any other file holds what a
  client wrote, whole.
- *A dry run says what the execution does*, which brings the files to what the snapshot says.
- *Nothing is left*: no run goes on, nobody has anything for himself.

Each call has a deadline. The clients speak to a real daemon; two of the workspaces are mounted, one is scanned.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cogfs.client import Client, CogfsError, Snapshot, Thread, Workspace
from cogfs.v1 import run_pb2, snapshot_pb2, thread_pb2
from cogfs.v1.reasons import Reason
from tests.e2e.support.site import Site, wait_for
from tests.support.tree import describe, differences, of_snapshot

#: Seconds in which every call is answered, also one that waits for others which wait for tool calls.
DEADLINE = 120.0
#: Seconds in which a call is answered that waits for nobody.
QUICK = 10.0
#: Reasons of an answer that is no mistake of anybody's.
ALLOWED = {
    Reason.BUSY,
    Reason.THREAD_BUSY,
    Reason.WORKSPACE_BUSY,
    Reason.RUN_INTERRUPTED,
    # A point that another one has cut off meanwhile, a snapshot that was pruned, an undo with nothing to undo.
    Reason.VALIDATION_ERROR,
    # A thread or a snapshot that was deleted meanwhile, tool calls of a run whose holder was let go.
    Reason.NOT_FOUND,
}
_VERSIONS = 4
_FILES = 6
#: A thread with more entries is replaced by a new one when all stand still.
_LONG = 300
#: Snapshots that are looked at whenever all stand still.
_LOOKED_AT = 40


@dataclass(slots=True)
class Story:
    """What was answered of one thread."""

    thread_id: str
    workspace: int
    #: The leaf when it came to be, and what it held then.
    start: str = ""
    entries: dict[str, str] = field(default_factory=dict)
    #: From which leaf to which; None: to one that an undo knew.
    moves: list[tuple[str, str | None]] = field(default_factory=list)


class Crowd:
    """``clients`` of one daemon. ``wrong`` holds whatever was not allowed."""

    def __init__(self, site: Site, seed: int, clients: int = 16) -> None:
        self.site = site
        self.seed = seed
        self.clients = clients
        self.outcomes: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._stories: dict[str, Story] = {}
        self._names = itertools.count()
        #: What clients wrote, by the name of the file; the first content is that of the beginning.
        self._written: dict[str, set[bytes]] = {}
        self._roots: list[Path] = []
        self._versions: list[list[str]] = []
        self._seen: set[str] = set()
        self._calls: dict[int, tuple[str, float]] = {}
        self._contents: dict[bytes, bytes] = {}

    # --- the beginning ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The daemon, its workspaces with their versions, and two threads in each."""
        site = self.site
        site.environ["COGFS_TOOL_SETTLE"] = "5"
        for number, options in enumerate(((), ("--retain-count", "60"), ("--scan",))):
            root = site.base / f"project{number}"
            root.mkdir()
            self._roots.append(root)
            site.ctl("mount", root, *options)
        site.daemon_pid()
        with site.client() as cog:
            for number, root in enumerate(self._roots):
                (root / "all").mkdir()
                (root / "some").mkdir()
                for name in range(_FILES):
                    self._write(root / "some" / f"f{name}", f"first {name}\n")
                self._versions.append([])
                for version in range(_VERSIONS):
                    self._versions[number].append(self._version(cog, root, version))
                for _ in range(2):
                    self._new_thread(cog, number)

    @staticmethod
    def _version(cog: Client, root: Path, version: int) -> str:
        """A snapshot of one version of what restores alone change, while nobody else does anything."""
        for name in range(_FILES):
            (root / "all" / f"v{name}").write_text(f"version {version}\n")
        return cog.workspace(root).checkpoint(f"version {version}", wait_for="sealed").id

    def _write(self, path: Path, content: str) -> None:
        with self._lock:
            self._written.setdefault(path.name, set()).add(content.encode())
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
        try:
            temporary.write_text(content)
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _name(self, kind: str) -> str:
        return f"{kind}{next(self._names)}"

    def _new_thread(self, cog: Client, number: int) -> None:
        thread = cog.create_thread(self._name("thread"), workspace=cog.workspace(self._roots[number]))
        self._stories[thread.id] = Story(thread.id, number)
        self._append(thread, "user", "begin")

    # --- what clients do ----------------------------------------------------------------------------------------------

    def work(self, seconds: float, round_: int) -> None:
        """All clients for so long, and then until their last call is answered."""
        end = time.monotonic() + seconds
        clients = [
            threading.Thread(target=self._live, args=(number, f"{self.seed}.{round_}.{number}", end), daemon=True)
            for number in range(self.clients)
        ]
        clients.append(threading.Thread(target=self._ask, args=(end,), daemon=True))
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            time.sleep(0.1)
            now = time.monotonic()
            late = [what for what, begun in list(self._calls.values()) if now - begun > DEADLINE]
            if late:
                self._show_stacks()
                raise AssertionError(f"not answered in {DEADLINE:g} s: {late}\n{self.site.log_tail()}")

    @staticmethod
    def _show_stacks() -> None:
        for number, frame in sys._current_frames().items():
            print(f"thread {number}", file=sys.stderr)
            traceback.print_stack(frame)

    def _live(self, number: int, seed: str, end: float) -> None:
        chance = random.Random(seed)
        try:
            with self.site.client() as cog, warnings.catch_warnings():
                while time.monotonic() < end and not self.wrong:
                    self._once(cog, chance, number)
        except BaseException as error:
            self.wrong.append(f"client {number}: {error!r}\n{traceback.format_exc()}")
        finally:
            self._calls.pop(number, None)

    def _once(self, cog: Client, chance: random.Random, number: int) -> None:
        acts: dict[Callable[[Client, random.Random], None], float] = {
            self._note: 5,
            self._message: 5,
            self._files: 4,
            self._work: 4,
            self._rewind: 5,
            self._restore: 3,
            self._checkpoint: 2,
            self._undo: 2,
            self._fork: 3,
            self._fork_files: 2,
            self._fork_into: 0.3,
            self._remember: 2,
            self._look: 3,
        }
        (act,) = chance.choices(list(acts), list(acts.values()))
        what = act.__name__.strip("_")
        begun = time.monotonic()
        self._calls[number] = what, begun
        try:
            act(cog, chance)
            outcome = what
        except CogfsError as error:
            outcome = f"{what} {error.reason.name}"
            if error.reason not in ALLOWED:
                self.wrong.append(f"{outcome}: {error}")
        with self._lock:
            self.outcomes[outcome] += 1
            self.longest[what] = max(self.longest.get(what, 0.0), time.monotonic() - begun)

    def _ask(self, end: float) -> None:
        """One who asks for what nobody has, while the others have all the rest."""
        try:
            with self.site.client() as cog:
                cog.create_thread(name := self._name("apart"))
                while time.monotonic() < end:
                    begun = time.monotonic()
                    cog.thread(name)
                    took = time.monotonic() - begun
                    self.longest["apart"] = max(self.longest.get("apart", 0.0), took)
                    if took > QUICK:
                        self.wrong.append(f"who asks for what nobody has waited {took:.1f} s")
                    time.sleep(0.02)
                cog.thread(name).delete()
        except BaseException as error:
            self.wrong.append(f"apart: {error!r}")

    def _chosen(self, cog: Client, chance: random.Random) -> tuple[Thread, Story]:
        with self._lock:
            story = self._stories[chance.choice(list(self._stories))]
        return cog.thread(story.thread_id), story

    def _place(self, cog: Client, chance: random.Random) -> tuple[int, Workspace]:
        number = chance.randrange(len(self._roots))
        return number, cog.workspace(self._roots[number])

    def _append(self, thread: Thread, kind: str, content: str, run: str | None = None) -> thread_pb2.Entry:
        content = f"{content} {self._name('')}"
        answer = thread.append_entry(kind, content, run=run)
        entry = answer.entry
        with self._lock:
            story = self._stories[thread.id]
            story.entries[entry.id] = content
            story.moves.append((entry.parent_id, entry.id))
            if answer.checkpoint_error:
                self.wrong.append(f"a message without its checkpoint: {answer.checkpoint_error}")
        return entry

    def _note(self, cog: Client, chance: random.Random) -> None:
        thread, _ = self._chosen(cog, chance)
        self._append(thread, chance.choice(("note", "assistant", "tool")), "by hand")

    def _message(self, cog: Client, chance: random.Random) -> None:
        thread, _ = self._chosen(cog, chance)
        self._append(thread, "user", "hello")

    def _files(self, cog: Client, chance: random.Random) -> None:
        root = chance.choice(self._roots)
        for _ in range(chance.randrange(1, 4)):
            # Busy while a restore goes on.
            with contextlib.suppress(OSError):
                self._write(root / "some" / f"f{chance.randrange(_FILES)}", f"{chance.random()}\n")

    def _work(self, cog: Client, chance: random.Random) -> None:
        thread, story = self._chosen(cog, chance)
        with thread.run(durable=chance.random() < 0.3, strategy=chance.choice(("wait", "reject"))) as run:
            self._append(run.thread, "user", "work", run.id)
            with run.tool_call("write"), contextlib.suppress(OSError):
                path = self._roots[story.workspace] / "some" / f"f{chance.randrange(_FILES)}"
                self._write(path, f"{chance.random()}\n")
            self._append(run.thread, "assistant", "done", run.id)
            if chance.random() < 0.2:
                run.pause()

    def _rewind(self, cog: Client, chance: random.Random) -> None:
        thread, story = self._chosen(cog, chance)
        # Mostly one of the last, so that there is something to go back to for the others.
        entries = list(itertools.islice(thread.entries(newest_first=True), chance.choice((3, 10, 50))))
        if not entries:
            return
        files, memory = chance.random() < 0.5, chance.random() < 0.85
        dry = chance.random() < 0.2
        to = chance.choice(entries).id
        report = thread.rewind(to, files=files, memory=memory or not files, force=chance.random() < 0.5, dry_run=dry)
        if report.conversation.rewound and not dry:
            with self._lock:
                story.moves.append((report.conversation.previous_leaf_id, to))

    def _restore(self, cog: Client, chance: random.Random) -> None:
        number, workspace = self._place(cog, chance)
        snapshot = chance.choice(self._versions[number])
        if chance.random() < 0.3:
            snapshot = chance.choice(list(itertools.islice(workspace.snapshots(), 30))).id
        paths = ["some"] if chance.random() < 0.2 else []
        workspace.restore(snapshot, paths, force=chance.random() < 0.5, dry_run=chance.random() < 0.2)

    def _checkpoint(self, cog: Client, chance: random.Random) -> None:
        _, workspace = self._place(cog, chance)
        workspace.checkpoint("by hand", wait_for=chance.choice((None, "sealed")))

    def _undo(self, cog: Client, chance: random.Random) -> None:
        _, workspace = self._place(cog, chance)
        report = workspace.undo(force=chance.random() < 0.5)
        if report.thread_id and report.HasField("conversation") and report.conversation.rewound:
            with self._lock:
                story = self._stories.get(report.thread_id)
                if story is not None:
                    story.moves.append((report.conversation.previous_leaf_id, None))

    def _point(self, thread: Thread, chance: random.Random) -> thread_pb2.Entry:
        return chance.choice(list(itertools.islice(thread.entries(all_branches=True, newest_first=True), 60)))

    def _fork(self, cog: Client, chance: random.Random) -> None:
        thread, _ = self._chosen(cog, chance)
        self._check_fork(thread, thread.fork(point := self._point(thread, chance).id), point).delete()

    def _fork_files(self, cog: Client, chance: random.Random) -> None:
        """Into the workspace that all work in."""
        thread, story = self._chosen(cog, chance)
        fork = thread.fork(point := self._point(thread, chance).id, files=True, force=chance.random() < 0.5)
        self._check_fork(thread, fork, point)
        if chance.random() < 0.5 and len(self._stories) < 12:
            entries = {entry.id: entry.content for entry in fork.entries()}
            with self._lock:
                self._stories[fork.id] = Story(fork.id, story.workspace, point, entries)
        else:
            fork.delete()

    def _fork_into(self, cog: Client, chance: random.Random) -> None:
        """Into a directory of its own, which is then as its snapshot says; nobody else knows of it."""
        thread, _ = self._chosen(cog, chance)
        place = self.site.base / self._name("fork")
        try:
            fork = thread.fork(point := self._point(thread, chance).id, files=True, into=place)
        except CogfsError:
            assert not place.exists() and not os.path.ismount(place), f"{place} is left of a fork that was refused"
            raise
        self._check_fork(thread, fork, point)
        assert fork.files is not None
        workspace = cog.workspace(place)
        held = of_snapshot(cog.snapshot(fork.files.restore.snapshot_id))
        different = differences(describe(place), held, [b""])
        assert not different, f"the files of a fork are not those of its checkpoint: {different[:5]}"
        self._check_snapshot(cog.snapshot(fork.files.restore.snapshot_id))
        fork.delete()
        workspace.unmount()
        workspace.delete()
        shutil.rmtree(place)

    def _check_fork(self, thread: Thread, fork: Thread, point: str) -> Thread:
        """It is the branch up to the point, and its leaf is there."""
        entries = list(fork.entries())
        assert entries and entries[-1].id == point == fork.message.leaf_id, "a fork does not end at its point"
        known = self._stories[thread.id].entries
        parents = ["", *(entry.id for entry in entries[:-1])]
        assert [entry.parent_id for entry in entries] == parents, "a fork is no whole branch"
        assert all(known.get(entry.id, entry.content) == entry.content for entry in entries)
        return fork

    def _remember(self, cog: Client, chance: random.Random) -> None:
        thread, _ = self._chosen(cog, chance)
        entries = list(itertools.islice(thread.entries(newest_first=True), 5))
        if entries:
            stands_on = chance.sample([entry.id for entry in entries], chance.randrange(1, len(entries) + 1))
            thread.put_memory("remembered", stands_on, id=f"m{chance.randrange(8)}")

    def _look(self, cog: Client, chance: random.Random) -> None:
        thread, story = self._chosen(cog, chance)
        before = dict(story.entries)
        found = {entry.id: entry.content for entry in thread.entries(all_branches=True)}
        lost = [one for one in before if one not in found]
        assert not lost, f"entries of {thread.id} are lost: {lost}"
        cog.workspace(chance.choice(self._roots))
        for _ in cog.runs():
            pass

    # --- what has to hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All stand still."""
        assert not self.wrong, "\n".join(self.wrong) + "\n" + self.site.log_tail()
        with self.site.client() as cog:
            wait_for("no run goes on", lambda: not any(run.state == run_pb2.Run.GOING for run in cog.runs()))
            for story in list(self._stories.values()):
                self._check_thread(cog.thread(story.thread_id), story)
            for number, root in enumerate(self._roots):
                self._check_workspace(cog, number, root)
            self._replace_long(cog)

    def _check_thread(self, thread: Thread, story: Story) -> None:
        entries = list(thread.entries(all_branches=True))
        found = {entry.id: entry.content for entry in entries}
        assert found == story.entries, (
            f"{thread.id}: lost {[one for one in story.entries if one not in found]}, "
            f"made up {[one for one in found if one not in story.entries]}"
        )
        known = set[str]()
        for entry in entries:
            assert not entry.parent_id or entry.parent_id in known, f"{entry.id} came before what it follows"
            known.add(entry.id)
        branch = [entry.id for entry in thread.entries()]
        leaf = thread.message.leaf_id
        assert (branch[-1] if branch else "") == leaf, f"{thread.id} ends at {branch[-1:]} and says {leaf}"
        check_moves(story, leaf)
        active = set(branch)
        for memory in thread.memory():
            counts = memory.state == thread_pb2.Memory.ACTIVE
            assert counts == bool(active.intersection(memory.entry_ids)), f"{memory.id} of {thread.id} is {memory}"
        with thread.run(strategy="reject") as run, run.tool_call():
            pass

    def _check_workspace(self, cog: Client, number: int, root: Path) -> None:
        workspace = cog.workspace(root)
        fresh = [one for one in workspace.snapshots() if one.id not in self._seen]
        chance = random.Random(f"{self.seed}.{len(self._seen)}")
        self._seen.update(one.id for one in fresh)
        for snapshot in chance.sample(fresh, min(len(fresh), _LOOKED_AT)):
            self._check_snapshot(snapshot)
        kept = {one.id for one in workspace.snapshots()}
        for version, snapshot_id in enumerate(self._versions[number]):
            if snapshot_id not in kept:
                # Retention took it.
                self._versions[number][version] = self._version(cog, root, version)
        now = workspace.checkpoint(wait_for="sealed")
        self._is_as(root, now)
        back = cog.snapshot(chance.choice(self._versions[number]))
        plan, done = back.restore(dry_run=True), back.restore()
        assert [*plan.files] == [*done.files], "a dry run does not say what the restore does"
        self._is_as(root, back)
        if done.safety_snapshot_id:
            # Else nothing was changed, and an undo would take back what somebody restored before.
            workspace.undo()
            self._is_as(root, now)

    @staticmethod
    def _is_as(root: Path, snapshot: Snapshot) -> None:
        different = differences(describe(root), of_snapshot(snapshot), [b""])
        assert not different, f"{root.name} is not as {snapshot.id}: {different[:5]}"

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        try:
            state = snapshot.refresh().message.state
            assert state != snapshot_pb2.Snapshot.FAILED, f"{snapshot.id} failed: {snapshot.message.reason}"
            entries = list(snapshot.ls(recursive=True))
            versions = set()
            for entry in entries:
                if entry.kind != snapshot_pb2.TreeEntry.FILE:
                    continue
                content = self._content(snapshot, entry)
                directory, _, name = entry.path.decode().rpartition("/")
                if directory == "all":
                    versions.add(content)
                elif not name.startswith("."):
                    assert content in self._written[name], (
                        f"{snapshot.id} has {content!r} in {name}, which nobody wrote"
                    )
        except CogfsError as error:
            # Retention took it meanwhile.
            if error.reason is not Reason.NOT_FOUND:
                raise
            return
        count = sum(entry.path.startswith(b"all/v") for entry in entries)
        label = snapshot.message.label
        assert (len(versions), count) in ((1, _FILES), (0, 0)), (
            f"{snapshot.id} ({label}) is of {versions}, {count} files"
        )

    def _content(self, snapshot: Snapshot, entry: snapshot_pb2.TreeEntry) -> bytes:
        if entry.hash not in self._contents:
            self._contents[entry.hash] = b"".join(snapshot.cat(entry.path))
        return self._contents[entry.hash]

    def _replace_long(self, cog: Client) -> None:
        for story in list(self._stories.values()):
            if len(story.entries) > _LONG or len(self._stories) > 8:
                cog.thread(story.thread_id).delete()
                del self._stories[story.thread_id]
        for number in range(len(self._roots)):
            while sum(story.workspace == number for story in self._stories.values()) < 2:
                self._new_thread(cog, number)

    def report(self) -> Iterator[str]:
        """What was done, and how long the longest took."""
        yield f"{sum(self.outcomes.values())} calls: " + ", ".join(f"{n} {c}" for n, c in sorted(self.outcomes.items()))
        yield "longest, seconds: " + ", ".join(f"{name} {took:.2f}" for name, took in sorted(self.longest.items()))


def check_moves(story: Story, leaf: str) -> None:
    """A path leads from the first leaf to ``leaf`` through all moves, each once.

    There is one when each leaf was left as often as it was come to (the first once more, the last once less), and all
    hang together, which they do as each entry hangs on its parent.
    """
    gone_from: Counter[str] = Counter([leaf])
    come_to: Counter[str] = Counter([story.start])
    unknown = 0
    for start, end in story.moves:
        gone_from[start] += 1
        if end is None:
            unknown += 1
        else:
            come_to[end] += 1
    missing = come_to - gone_from
    assert not missing, f"{story.thread_id}: leaves that nobody went on from: {dict(missing)}"
    # What an undo went back to is what was gone on from without having been come to.
    more = gone_from - come_to
    assert more.total() == unknown, f"{story.thread_id}: {dict(more)} and {unknown} undone moves"
