"""Programs that hold runs, as processes of their own that a test can kill, and what tests ask about runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from cogfs.client import Client
from cogfs.v1 import run_pb2
from tests.e2e.support.site import PATIENCE, Site, wait_for

#: Holds a run until its input ends; tells its id, then whether it was told to stop. Arguments: endpoint, thread, what
#: ``Thread.run`` is given, the name of a tool call that it is in meanwhile (or nothing), and how it takes being told.
_AGENT = """
import json, os, select, sys
from cogfs.client import RunInterrupted, connect
endpoint, thread, options, tool, manner = sys.argv[1:]
with connect(endpoint) as cog:
    try:
        with cog.thread(thread).run(**json.loads(options)) as run:
            call = run.tool_call(tool) if tool else None
            if call is not None:
                call.__enter__()
            print(run.id, flush=True)
            while not select.select([0], [], [], 0.05)[0]:
                if manner == "obedient" and run.stopped.is_set():
                    break
            if call is not None:
                call.__exit__(None, None, None)
        print("ended", flush=True)
    except RunInterrupted as error:
        print("interrupted", flush=True)
"""


class Agent:
    """A process that holds a run."""

    def __init__(self, process: subprocess.Popen[str], run_id: str) -> None:
        self.process = process
        self.run_id = run_id

    @property
    def pid(self) -> int:
        return self.process.pid

    def finish(self) -> str:
        """Let it end its run; how that came out: ``ended`` or ``interrupted``."""
        out, _ = self.process.communicate(timeout=PATIENCE)
        return out.strip()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(PATIENCE)


@contextlib.contextmanager
def agent(
    here: Site, thread: str = "chat", options: str = "{}", tool: str = "", manner: str = "deaf"
) -> Iterator[Agent]:
    """A process that holds a run of a thread. ``obedient``: it ends its tool call and the run when it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", _AGENT, f"unix://{here.runtime}/cogfsd.sock", thread, options, tool, manner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=here.environ,
        text=True,
    )
    try:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        assert run_id, "the agent did not begin its run"
        yield Agent(process, run_id)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def run_of(cog: Client, run_id: str) -> run_pb2.Run:
    return cog.run(run_id).message


def wait_for_state(cog: Client, run_id: str, state: run_pb2.Run.State.ValueType) -> run_pb2.Run:
    """The run once it has come into a state."""
    name = run_pb2.Run.State.Name(state)
    wait_for(f"the run is {name}", lambda: run_of(cog, run_id).state == state)
    return run_of(cog, run_id)


@contextlib.contextmanager
def program(*arguments: str | os.PathLike[str], cwd: str | os.PathLike[str] = "/") -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; nothing of that is left at the end."""
    process = subprocess.Popen(
        arguments, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(PATIENCE)
