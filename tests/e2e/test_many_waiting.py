"""Calls that wait for one workspace keep nobody else waiting, however many they are."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.support.site import Aside, Site, wait_for

#: More than the threads that answer what never waits for long.
_WAITING = 48


def test_messages_that_wait_for_one_workspace_keep_no_other_call_waiting(here: Site) -> None:
    other = here.base / "other"
    other.mkdir()
    here.mount()
    here.mount(other)
    worker = here.worker_pid()
    with here.client() as cog:
        stuck = [cog.create_thread(f"stuck{number}", workspace=here.workspace(cog)) for number in range(_WAITING)]
        free = cog.create_thread("free", workspace=cog.workspace(other))
        first = free.user_message("first").id
        os.kill(worker, signal.SIGSTOP)
        try:
            wait_for("the worker stands still", lambda: _state(worker) == "T")
            # The first of them has the workspace's lock and waits for the worker; all others wait for that lock.
            waiting = [Aside(lambda thread=thread: thread.append_entry("user", "hello")) for thread in stuck]  # type: ignore[misc]
            with here.client() as another:
                for _ in range(5):
                    thread = another.thread("free")
                    assert next(entry.id for entry in thread.entries()) == first
                    thread.user_message("goes on")
                    thread.rewind(first, files=True)
                    assert len(another.workspaces()) == 2
            assert any(one.result is None for one in waiting), "nobody waited: this shows nothing"
        finally:
            os.kill(worker, signal.SIGCONT)
        for one in waiting:
            one.join()
            assert one.error is None, one.error
        for thread in stuck:
            assert [entry.content for entry in thread.entries()] == ["hello"]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
