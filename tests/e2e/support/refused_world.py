"""A daemon with conversations and workspaces of which much cannot be taken back: the place where calls are refused."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from cogfs.client import AgentSession, Client, RunInterrupted, Thread, Unavailable, Workspace
from cogfs.v1 import run_pb2
from tests.e2e.support.agents import program
from tests.e2e.support.refusals import Guard
from tests.e2e.support.site import PATIENCE, Aside, Site, kill, wait_for

#: Long enough for a test, however slow the machine is.
LONG = "100000"


class World:
    """What stands, by attribute. Each test leaves it as it was."""

    def __init__(self, here: Site, cog: Client) -> None:
        self.here = here
        self.cog = cog
        self.base = here.base
        self._mounted()
        self._scanned()
        self._conversations()
        #: The files as they are, of the mounted workspace.
        self.now = self.workspace.checkpoint(wait_for="sealed").id
        self.guard = Guard(cog, self._places())

    def _mounted(self) -> None:
        """``chat``: m1 a1 m2 a2 with what they changed. The last restore was of "other" alone."""
        root = self.root = self.here.project
        for name in ("file", "other", "aside"):
            (root / name).write_text("before\n")
        (root / "turned").mkdir()
        (root / "turned" / "x").touch()
        self.workspace = self.cog.mount(root)
        self.chat = self.cog.create_thread("chat", workspace=self.workspace, agent="coder")
        self.m1 = self._say(self.chat, "m1")
        self._sessions()
        (root / "file").write_text("after\n")
        (root / "other").write_text("after\n")
        (root / "turned" / "x").unlink()
        (root / "turned").rmdir()
        (root / "turned").write_text("a file\n")
        (root / "made").mkdir()
        (root / "made" / "inside").write_text("x\n")
        self.chat.append("assistant", "done", id="a1")
        self._say(self.chat, "m2")
        (root / "file").write_text("later\n")
        self.chat.append("assistant", "done", id="a2")
        self.chat.put_memory("stands on what a rewind cuts", ["a2"], id="item")
        self.chat.put_memory("a file of it", "a1", kind="file", name="notes", id="notes")
        self.beside = self.cog.create_thread("beside", workspace=self.workspace)
        self.workspace.restore(self.m1, ["other"])

    def _scanned(self) -> None:
        """Workspaces that are not mounted: kept without hard links, pruned, away, damaged, and one to undo in."""
        self.linked, self.linked_thread = self._place("linked", refuse_hard_links=True)
        twin = self._root("linked") / "twin"
        twin.write_text("before\n")
        self.linked_snapshot = self._say(self.linked_thread, "l1")
        (self._root("linked") / "file").write_text("later\n")
        twin.unlink()
        twin.hardlink_to(self._root("linked") / "file")

        self.pruned, self.pruned_thread = self._place("pruned")
        self.gone = self._say(self.pruned_thread, "p1")
        (self._root("pruned") / "file").write_text("later\n")
        self.pruned.checkpoint(wait_for="sealed")
        self.cog.snapshot(self.gone).delete()

        self.away, self.away_thread = self._place("away")
        self.away_snapshot = self._say(self.away_thread, "w1")
        self.away.restore(self.away_snapshot)
        (self._root("away") / "file").write_text("later\n")
        self.away.restore(self.away_snapshot)
        self.away.unmount()

        # What is damaged is what an undo, and a rewind to v1, would bring back.
        self.vault, self.vault_thread = self._place("vault")
        self.precious = os.urandom(50_000)
        first = self.vault.checkpoint(wait_for="sealed").id
        (self._root("vault") / "file").write_bytes(self.precious)
        self.vault_snapshot = self._say(self.vault_thread, "v1")
        self.vault.restore(first)

        self.undone, self.undone_thread = self._place("undone")
        self._say(self.undone_thread, "u1")
        (self._root("undone") / "file").write_text("later\n")
        self.undone_thread.append("assistant", "done", id="u2")
        self.undone_thread.rewind("u1", files=True)

        self.fresh, _ = self._place("fresh")
        self._root("full").mkdir()
        (self._root("full") / "x").touch()

    def _conversations(self) -> None:
        """``talk`` has no files, and t3 off its active branch; ``empty`` has no entry."""
        self.talk = self.cog.create_thread("talk")
        for id in ("t1", "t2", "t3"):
            self.talk.append("user" if id == "t1" else "assistant", "words", id=id)
        self.talk.rewind("t2")
        self.empty = self.cog.create_thread("empty", workspace=self.workspace)
        self.ended = self.talk.run(id="ended")
        self.ended.end()
        self.stopped = self.talk.run(id="stopped")
        self.talk.rewind("t2", force=True)

    def _sessions(self) -> None:
        self.session = AgentSession.start(self.cog, self.workspace, enable_file_checkpointing=True)
        self.asked = self.session.user_message("go", wait_for="sealed").id
        self.subagents = self.session.user_message("a subagent's", parent_tool_use_id="toolu_01").id
        self.unchecked = AgentSession.start(self.cog, self.workspace)
        self.not_enabled = self.unchecked.user_message("go").id

    def _place(self, name: str, *, refuse_hard_links: bool = False) -> tuple[Workspace, Thread]:
        root = self._root(name)
        root.mkdir()
        (root / "file").write_text("before\n")
        workspace = self.cog.mount(root, scan=True, refuse_hard_links=refuse_hard_links)
        return workspace, self.cog.create_thread(name, workspace=workspace)

    def _root(self, name: str) -> Path:
        return self.base / name

    @staticmethod
    def _say(thread: Thread, id: str) -> str:
        """The snapshot of a message."""
        return thread.user_message(id, id=id, wait_for="sealed").file_checkpoint.snapshot_id

    def _places(self) -> list[Path]:
        """Wherever something could be changed."""
        names = ("linked", "pruned", "away", "vault", "undone", "fresh", "full")
        return [self.root, *(self._root(name) for name in names)]

    # --- what is in the way -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def command(self, workspace: Workspace | None = None) -> Iterator[int]:
        """A registered process; its pid."""
        with program("sleep", LONG) as process:
            self.cog.register_command(process.pid, workspace=workspace or self.workspace, command="make test")
            yield process.pid
        self._no_command()

    @contextlib.contextmanager
    def left_behind(self) -> Iterator[int]:
        """What a registered process that has ended left in the background; its pid."""
        with program("sh", "-c", f"sleep {LONG} & sleep {LONG} & wait") as process:
            wait_for("it has started them", lambda: len(_children(process.pid)) == 2)
            left, _ = _children(process.pid)
            self.cog.register_command(process.pid, workspace=self.workspace, command="make test")
            for pid in (process.pid, *_children(process.pid)):
                if pid != left:
                    kill(pid)
            process.wait(60)
            wait_for("it alone is left", lambda: [list(one.pids) for one in self.cog.commands()] == [[left]])
            yield left
        self._no_command()

    def _no_command(self) -> None:
        wait_for("no command is left", lambda: not self.cog.commands())

    @contextlib.contextmanager
    def ignoring_sigterm(self) -> Iterator[subprocess.Popen[bytes]]:
        """A registered process that has been sent SIGTERM, and takes its time."""
        ready = self.base / "ready"
        with program("sh", "-c", f"trap '' TERM; : > {ready}; exec sleep {LONG}") as process:
            wait_for("it ignores SIGTERM", ready.exists)
            ready.unlink()
            self.cog.register_command(process.pid, workspace=self.workspace, command="make test")
            process.send_signal(signal.SIGTERM)
            yield process
        self._no_command()

    @contextlib.contextmanager
    def working_in(self, directory: Path) -> Iterator[int]:
        with program("sleep", LONG, cwd=directory) as process:
            wait_for("it is there", lambda: os.readlink(f"/proc/{process.pid}/cwd") == str(directory))
            yield process.pid

    @staticmethod
    @contextlib.contextmanager
    def mapped(path: Path) -> Iterator[None]:
        """A map that is shared and can be written, of a file that is not open otherwise."""
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        with view:
            yield

    @staticmethod
    @contextlib.contextmanager
    def tool_call(thread: Thread, *, workspace: Workspace | None = None) -> Iterator[run_pb2.ToolCall]:
        """Of a run that is held here; it may be stopped meanwhile."""
        with (
            contextlib.suppress(RunInterrupted),
            thread.run(workspace=workspace) as run,
            run.tool_call("shell") as call,
        ):
            yield call

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A restore holds the mounted workspace. It will find that there is nothing to change."""
        worker = self.workspace.status().worker_pid
        begun = threading.Event()
        os.kill(worker, signal.SIGSTOP)
        # It is told of once the workspace is held, and waits for the worker then.
        restoring = Aside(lambda: self.workspace.restore(self.now, progress=lambda _: begun.set()))
        try:
            assert begun.wait(PATIENCE)
            yield
        finally:
            os.kill(worker, signal.SIGCONT)
            # What is refused meanwhile raises through here, and the next test needs the workspace.
            restoring.join()
        assert restoring.error is None, restoring.error

    @contextlib.contextmanager
    def damaged(self) -> Iterator[None]:
        """A bit of what v1 brings back has flipped on the disk."""
        packs = (self.here.state / "store" / "packs").iterdir()
        (pack,) = (path for path in packs if self.precious[:500] in path.read_bytes())
        at = pack.read_bytes().index(self.precious[:500]) + 250
        try:
            _put(pack, at, self.precious[250] ^ 0xFF)
            yield
        finally:
            _put(pack, at, self.precious[250])


def _put(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([value]))


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- of a user who is not root ----------------------------------------------------------------------------------------

_NOBODY = 65534
#: An attribute by which a file may open raw sockets.
_CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)


class ClosedWorld:
    """The daemon of a user who is not root. Of each workspace, which is scanned, the directory "part" or the file in it
    is not that user's any more since the message m1 of the thread of the workspace's name."""

    def __init__(self, here: Site) -> None:
        self.here = here
        self.base = here.base
        self.base.chmod(0o755)
        for path in (here.state, here.runtime):
            path.mkdir()
            os.chown(path, _NOBODY, _NOBODY)
        here.environ["HOME"] = str(here.state)
        here.prefix = here.prefix_as(_NOBODY, _NOBODY)
        here.start()

    def fill(self, cog: Client) -> None:
        self.cog = cog
        self.snapshots: dict[str, str] = {}
        places = []
        for name, change in _CLOSED.items():
            root = self.base / name
            part, file = root / "part", root / "part" / "file"
            part.mkdir(parents=True)
            file.write_text("before\n")
            for path in (root, part, file):
                os.chown(path, _NOBODY, _NOBODY)
            if name == "capable":
                os.setxattr(file, "security.capability", _CAPABILITY)
            thread = cog.create_thread(name, workspace=cog.mount(root, scan=True))
            entry = thread.user_message("go", id="m1", wait_for="sealed")
            self.snapshots[name] = entry.file_checkpoint.snapshot_id
            file.write_text("later\n")
            change(part)
            places.append(root)
        self.guard = Guard(cog, places)

    def workspace(self, name: str) -> Workspace:
        return self.cog.workspace(self.base / name)


def _foreign(part: Path) -> None:
    os.chown(part, 0, 0)


def _shut(part: Path) -> None:
    os.chown(part, 0, 0)
    part.chmod(0o700)


def _hidden(part: Path) -> None:
    os.chown(part / "file", 0, 0)
    (part / "file").chmod(0o600)


def _capable(part: Path) -> None:
    assert not os.listxattr(part / "file")


_CLOSED = {"foreign": _foreign, "shut": _shut, "hidden": _hidden, "capable": _capable}


# --- of a rewind that is not finished ---------------------------------------------------------------------------------


class UnfinishedWorld:
    """A daemon was killed in a rewind of the thread ``chat``, and its directory is not where the next one looks."""

    def __init__(self, here: Site) -> None:
        self.here = here
        self.base = here.base
        file = here.project / "file"
        file.write_text("before\n")
        # A restore and its undo come first.
        assert here.start("restore.applied:3") is not None
        with here.client() as cog:
            workspace = cog.mount(here.project, scan=True)
            thread = cog.create_thread("chat", workspace=workspace)
            self.snapshot = thread.user_message("one", id="m1", wait_for="sealed").file_checkpoint.snapshot_id
            file.write_text("later\n")
            thread.user_message("two", id="m2", wait_for="sealed")
            workspace.restore(self.snapshot)
            workspace.undo()
            with contextlib.suppress(Unavailable):
                thread.rewind("m1", files=True, before=True)
        self.away = self.base / "away"
        here.project.rename(self.away)
        here.start()

    def look(self, cog: Client) -> None:
        self.thread = cog.thread("chat")
        (self.workspace,) = cog.workspaces()
        self.guard = Guard(cog, [self.away])
