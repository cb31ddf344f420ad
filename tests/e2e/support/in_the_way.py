"""What is in the way of a restore, a rewind, a fork or an undo, each with the call that it refuses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from cogfs.client import (
    AlreadyExists,
    Busy,
    IOFailed,
    RunInterrupted,
    ThreadBusy,
    ValidationError,
    WorkspaceBusy,
)
from tests.e2e.support.agents import program
from tests.e2e.support.refusals import Refusal, busy, busy_before, fork, refused_too, restore, rewind, says_no, undo
from tests.e2e.support.refused_world import LONG, World
from tests.e2e.support.site import wait_for

#: By its name what is in the way for as long as a block lasts, and the refusal.
IN_THE_WAY: dict[str, Callable[[World], AbstractContextManager[Refusal]]] = {}


def in_the_way(build: Callable[[World], Iterator[Refusal]]) -> Callable[[World], AbstractContextManager[Refusal]]:
    made = contextlib.contextmanager(build)
    IN_THE_WAY[build.__name__] = made
    return made


@in_the_way
def a_run_of_the_thread_and_its_conversation(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1"), busy)


@in_the_way
def a_run_of_the_thread_and_its_files(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_the_thread_and_the_files_alone(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1", files=True, memory=False), busy)


@in_the_way
def a_durable_run_of_the_thread(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    yield Refusal(ThreadBusy, run.id, rewind(world.chat, "a1"), busy)
    run.end()


@in_the_way
def a_lease_when_a_rewind_is_forced(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    call = rewind(world.chat, "a1", files=True, force=True)
    yield Refusal(ThreadBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_lease_when_a_fork_is_forced(world: World) -> Iterator[Refusal]:
    run = world.chat.run(durable=True, lease=600)
    call = fork(world.chat, "a1", files=True, force=True)
    yield Refusal(ThreadBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_lease_of_another_thread_when_a_rewind_is_forced(world: World) -> Iterator[Refusal]:
    run = world.beside.run(durable=True, lease=600)
    call = rewind(world.chat, "a1", files=True, force=True)
    yield Refusal(WorkspaceBusy, "its lease is not renewed", call, busy, stops=[run.id])
    run.end()


@in_the_way
def a_run_of_the_thread_for_its_fork(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1"), busy)


@in_the_way
def a_run_of_the_thread_for_its_fork_with_files(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_the_thread_for_a_fork_into_a_new_directory(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ThreadBusy, run.id, fork(world.chat, "a1", files=True, into=world.base / "new"), busy)


@in_the_way
def a_run_of_the_thread_for_an_undo_of_its_rewind(world: World) -> Iterator[Refusal]:
    with world.undone_thread.run() as run:
        yield Refusal(Busy, run.id, undo(world.undone), busy)


@in_the_way
def a_run_of_another_thread(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(WorkspaceBusy, f"{run.id} of thread beside", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_of_another_thread_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(WorkspaceBusy, f"{run.id} of thread beside", fork(world.chat, "a1", files=True), busy)


@in_the_way
def a_run_in_the_workspace_that_a_fork_is_to_get(world: World) -> Iterator[Refusal]:
    with world.talk.run(workspace=world.fresh) as run:
        yield Refusal(WorkspaceBusy, run.id, fork(world.chat, "a1", files=True, workspace=world.fresh), busy)


@in_the_way
def a_tool_call_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_tool_call_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", restore(world.workspace, world.m1), busy)


@in_the_way
def a_tool_call_when_a_restore_is_forced(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", restore(world.workspace, world.m1, force=True), busy)


@in_the_way
def a_tool_call_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside):
        yield Refusal(Busy, "tool call shell", undo(world.workspace), busy)


@in_the_way
def a_tool_call_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.talk, workspace=world.fresh):
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, "tool call shell", call, busy)


@in_the_way
def a_tool_call_of_a_run_that_waits_for_somebody(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call:
        world.cog.run(call.run_id).pause()
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_tool_call_that_does_not_end_by_force(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call:
        forced = rewind(world.chat, "a1", files=True, force=True)
        yield Refusal(WorkspaceBusy, "not ended in time", forced, busy_before, stops=[call.run_id])


@in_the_way
def a_tool_call_that_goes_on_after_its_run(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.beside) as call:
        world.cog.run(call.run_id).end()
        yield Refusal(WorkspaceBusy, "tool call shell", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(Busy, f"sleep .pid {pid}. of the command 'make test'", restore(world.workspace, world.m1), busy)


@in_the_way
def a_command_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.command() as pid:
        yield Refusal(Busy, f"pid {pid}", undo(world.workspace), busy)


@in_the_way
def a_command_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.command(world.fresh) as pid:
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, f"pid {pid}", call, busy)


@in_the_way
def what_a_command_left(world: World) -> Iterator[Refusal]:
    with world.left_behind() as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_command_that_takes_its_time_to_stop(world: World) -> Iterator[Refusal]:
    with world.ignoring_sigterm() as process:
        yield Refusal(Busy, f"pid {process.pid}", restore(world.workspace, world.m1), busy)


@in_the_way
def a_writer_for_a_restore(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", restore(world.workspace, world.m1), busy)


@in_the_way
def a_writer_for_a_rewind(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def a_writer_for_an_undo(world: World) -> Iterator[Refusal]:
    with (world.root / "other").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", undo(world.workspace), busy)


@in_the_way
def a_writer_for_a_fork(world: World) -> Iterator[Refusal]:
    with (world.base / "fresh" / "file").open("a"):
        call = fork(world.chat, "a1", files=True, workspace=world.fresh)
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", call, busy)


@in_the_way
def a_writer_for_a_session(world: World) -> Iterator[Refusal]:
    with (world.root / "file").open("a"):
        call = partial(world.session.rewind_files, world.asked)
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", call, says_no)


@in_the_way
def a_map_that_can_be_written(world: World) -> Iterator[Refusal]:
    with world.mapped(world.root / "file"):
        yield Refusal(WorkspaceBusy, f"pid {os.getpid()}", rewind(world.chat, "a1", files=True), busy)


@in_the_way
def whoever_works_in_a_directory_that_goes(world: World) -> Iterator[Refusal]:
    with world.working_in(world.root / "made") as pid:
        yield Refusal(WorkspaceBusy, f"pid {pid}", rewind(world.chat, "m1", files=True, before=True), busy)


@in_the_way
def a_writer_of_something_else_when_it_is_strict(world: World) -> Iterator[Refusal]:
    with (world.root / "aside").open("a"):
        yield Refusal(Busy, f"pid {os.getpid()}", restore(world.workspace, world.m1, strict=True), busy)


@in_the_way
def the_run_that_asks_in_its_own_thread(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        yield Refusal(ValidationError, "thread of itself", rewind(world.chat, "a1", calling_run=run.id), refused_too)


@in_the_way
def the_run_that_asks_by_force(world: World) -> Iterator[Refusal]:
    with world.chat.run() as run:
        call = rewind(world.chat, "a1", files=True, force=True, calling_run=run.id)
        yield Refusal(ValidationError, "thread of itself", call, refused_too)


@in_the_way
def the_run_that_asks_in_its_own_workspace(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        call = rewind(world.chat, "a1", files=True, calling_run=run.id)
        yield Refusal(ValidationError, "workspace of itself", call, refused_too)


@in_the_way
def a_run_that_waits_for_the_run_that_asks(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.chat) as call, world.talk.run(parent=call) as run:
        asked = rewind(world.chat, "a1", calling_run=run.id)
        yield Refusal(ValidationError, "waits for it", asked, refused_too)


@in_the_way
def a_damaged_content_for_a_restore(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(IOFailed, "not what was stored", restore(world.vault, world.vault_snapshot), refused_too)


@in_the_way
def a_damaged_content_for_a_rewind(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(IOFailed, "not what was stored", rewind(world.vault_thread, "v1", files=True), refused_too)


@in_the_way
def a_damaged_content_for_an_undo(world: World) -> Iterator[Refusal]:
    with world.damaged():
        yield Refusal(IOFailed, "not what was stored", undo(world.vault), refused_too)


@in_the_way
def a_damaged_content_for_a_fork(world: World) -> Iterator[Refusal]:
    with world.damaged():
        call = fork(world.vault_thread, "v1", files=True, workspace=world.fresh)
        yield Refusal(IOFailed, "not what was stored", call, refused_too)


@in_the_way
def a_damaged_content_for_a_fork_into_a_new_directory(world: World) -> Iterator[Refusal]:
    with world.damaged():
        call = fork(world.vault_thread, "v1", files=True, into=world.base / "new")
        yield Refusal(IOFailed, "not what was stored", call, refused_too)


# --- without a dry run ---


@in_the_way
def a_run_of_a_thread_that_is_to_be_deleted(world: World) -> Iterator[Refusal]:
    with world.beside.run() as run:
        yield Refusal(ThreadBusy, run.id, lambda _: world.beside.delete(), None)


@in_the_way
def another_holder_of_a_lease(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=600, holder="first")
    yield Refusal(ThreadBusy, "first holds the run", lambda _: world.cog.run(run.id).renew("second"), None)
    run.end()


@in_the_way
def a_lease_that_ran_out(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=1)
    wait_for("it has run out", lambda: run.refresh().state == "lapsed")
    yield Refusal(RunInterrupted, "its lease ran out", lambda _: run.append("note", "x"), None)
    run.end()


@in_the_way
def the_renewal_of_a_run_that_was_stopped(world: World) -> Iterator[Refusal]:
    run = world.talk.run(durable=True, lease=600)
    world.talk.rewind("t2", force=True)
    yield Refusal(RunInterrupted, "was stopped", lambda _: run.renew(), None)


@in_the_way
def a_tool_call_of_a_paused_run(world: World) -> Iterator[Refusal]:
    run = world.talk.run()
    run.pause()
    yield Refusal(ValidationError, "is paused", lambda _: run.tool_call("x").__enter__(), None)
    run.end()


@in_the_way
def a_tool_call_of_a_taken_id(world: World) -> Iterator[Refusal]:
    with world.tool_call(world.talk) as call:
        again = world.cog.run(call.run_id).tool_call("x", id=call.id)
        yield Refusal(AlreadyExists, "already", lambda _: again.__enter__(), None)


@in_the_way
def a_run_that_rejects_while_a_restore_goes_on(world: World) -> Iterator[Refusal]:
    yield Refusal(ThreadBusy, "strategy", partial(_meanwhile, world, lambda: world.chat.run(strategy="reject")), None)


@in_the_way
def a_paused_run_that_rejects_meanwhile(world: World) -> Iterator[Refusal]:
    run = world.beside.run(strategy="reject")
    run.pause()
    yield Refusal(ThreadBusy, "strategy", partial(_meanwhile, world, run.resume), None)
    run.end()


@in_the_way
def a_command_that_is_asked_for_meanwhile(world: World) -> Iterator[Refusal]:
    with program("sleep", LONG) as process:
        call = partial(_meanwhile, world, lambda: world.chat.command(process.pid))
        yield Refusal(Busy, "a restore changes the files", call, None)


def _meanwhile(world: World, call: Callable[[], object], _: bool) -> object:
    """While a restore holds the workspace."""
    with world.held():
        return call()
