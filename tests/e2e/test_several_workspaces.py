"""A thread that goes on in another workspace, with another agent (after a handoff): whose files are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cogfs.client import Client, Fork, NotFound, Thread, ValidationError, Workspace
from tests.e2e.ctl import Ctl


@dataclass
class Handoff:
    """m1 a1 by coder in its workspace, m2 a2 by writer in another one, m3 a3 by coder again. After each message the
    file of its agent says so."""

    thread: Thread
    code: Workspace
    text: Workspace
    files: dict[str, Path]

    def read(self) -> tuple[str, str]:
        return self.files["coder"].read_text(), self.files["writer"].read_text()


@pytest.fixture
def handoff(cog: Client, project: Path) -> Iterator[Handoff]:
    other = project.parent / "other"
    other.mkdir()
    files = {"coder": project / "file", "writer": other / "file"}
    for file in files.values():
        file.write_text("first")
    code, text = cog.mount(project), cog.mount(other, scan=True)
    thread = cog.create_thread("chat", workspace=code)
    for number, (agent, workspace) in enumerate((("coder", code), ("writer", text), ("coder", code)), 1):
        with thread.run(agent=agent, workspace=workspace) as run:
            run.user_message(f"message {number}", id=f"m{number}")
            files[agent].write_text(f"after m{number}")
        thread.append("assistant", "done", id=f"a{number}")
    yield Handoff(thread, code, text, files)


def test_the_nearest_checkpoint_says_which_workspace(handoff: Handoff) -> None:
    report = handoff.thread.rewind("a1", files=True)
    # It is that of m2, which the other agent got.
    assert (report.files.entry_id, report.files.workspace_id, report.files.exact) == ("m2", handoff.text.id, True)
    assert handoff.read() == ("after m3", "first")


@pytest.mark.parametrize("by_agent", [False, True])
def test_of_several_workspaces_one_is_chosen(handoff: Handoff, by_agent: bool) -> None:
    def rewind(entry: str, agent: str, workspace: Workspace, *, dry_run: bool) -> tuple[str, str, bool]:
        report = handoff.thread.rewind(
            entry,
            files=True,
            workspace=None if by_agent else workspace,
            agents=[agent] if by_agent else [],
            dry_run=dry_run,
        )
        return report.files.entry_id, report.files.workspace_id, report.files.exact

    for dry_run in (True, False):
        assert rewind("a2", "coder", handoff.code, dry_run=dry_run) == ("m3", handoff.code.id, True)
    assert handoff.read() == ("after m1", "after m2")
    # The next message was the other agent's, so that the files of this one are those before its turn.
    for dry_run in (True, False):
        assert rewind("a1", "coder", handoff.code, dry_run=dry_run) == ("m1", handoff.code.id, False)
    assert handoff.read() == ("first", "after m2")


def test_agents_and_workspaces_that_have_no_part_in_it(cog: Client, handoff: Handoff) -> None:
    before = handoff.read(), handoff.thread.refresh().message
    for dry_run in (True, False):
        with pytest.raises(ValidationError, match="no run of reviewer is known"):
            handoff.thread.rewind("a1", files=True, agents=["reviewer"], dry_run=dry_run)
        with pytest.raises(ValidationError, match="did not run in workspace"):
            handoff.thread.rewind("m1", files=True, agents=["writer"], dry_run=dry_run)
        with pytest.raises(ValidationError, match="did not run in workspace"):
            handoff.thread.rewind("m1", files=True, workspace=handoff.text, dry_run=dry_run)
        with pytest.raises(ValidationError, match="agents"):
            handoff.thread.rewind("a1", files=True, agents=[""], dry_run=dry_run)
        with pytest.raises(ValidationError, match="no run of reviewer is known"):
            handoff.thread.fork("a1", id="fork", files=True, agents=["reviewer"], dry_run=dry_run)
        with pytest.raises(ValidationError, match="ask for these"):
            handoff.thread.fork("a1", id="fork", agents=["coder"], dry_run=dry_run)
    with pytest.raises(NotFound):
        cog.thread("fork")
    assert (handoff.read(), handoff.thread.refresh().message) == before


def test_a_fork_of_one_agent_s_files(handoff: Handoff) -> None:
    place = handoff.files["coder"].parent.parent / "forked"
    plan = handoff.thread.fork("a2", files=True, into=place, agents=["writer"], dry_run=True)
    assert not isinstance(plan, Fork) and plan.files.entry_id == "m2"
    assert not place.exists()
    fork = handoff.thread.fork("a2", files=True, into=place, agents=["writer"])
    assert fork.files is not None and (fork.files.entry_id, fork.files.exact) == ("m2", False)
    assert (place / "file").read_text() == "first"
    assert handoff.read() == ("after m3", "after m2")


def test_the_command_line(daemon: Ctl, handoff: Handoff) -> None:
    plan = daemon.json("rewind", "chat", "a2", "--files", "--agent", "coder", "--dry-run")
    assert plan["files"]["workspace_id"] == handoff.code.id and plan["files"]["entry_id"] == "m3"
    done = daemon.json("rewind", "chat", "m3", "--files", "--before", "--yes")
    assert (done["files"]["entry_id"], done["files"]["exact"]) == ("m3", True)
    assert done["conversation"]["cut"] == ["m3", "a3"]
    assert handoff.read() == ("after m1", "after m2")
    assert [entry.id for entry in handoff.thread.entries()] == ["m1", "a1", "m2", "a2"]
    refused = daemon.run("rewind", "chat", "a1", "--agent", "coder", "--yes")
    assert refused.returncode == 2 and b"--files" in refused.stderr
    with handoff.thread.run(agent="coder") as run:
        call = daemon.run("rewind", "chat", "a1", "--calling-run", run.id, "--yes", "--force")
        assert call.returncode != 0 and run.id.encode() in call.stderr
    assert [entry.id for entry in handoff.thread.entries()] == ["m1", "a1", "m2", "a2"]
