"""A run, as the one who works on it holds it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cogfs.client.arguments import process_id, text
from cogfs.client.connection import Connection
from cogfs.client.errors import CogfsError, NotFound, RunInterrupted, ValidationError
from cogfs.client.holding import Holding
from cogfs.v1 import run_pb2, thread_pb2

if TYPE_CHECKING:
    from cogfs.client.thread import Thread

#: Seconds in which a daemon that is being restarted is told of an end.
_PATIENCE = 30.0

_BY_STATE = run_pb2.Run.State.Name


class Run:
    """One run. ``message`` is what the daemon said of it last.

    As a context manager it is held: by a stream, and a durable one by a lease that is renewed. The end of the block
    ends the run, unless it is paused, and raises RunInterrupted when it had been stopped and nothing else is raised.
    """

    def __init__(self, connection: Connection, thread: Thread, message: run_pb2.Run, holder: str) -> None:
        """``holder``: by which name it is held here."""
        self._connection = connection
        self.thread = thread
        self.message = message
        self._holder = holder
        self._holding: Holding | None = None

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def state(self) -> str:
        """going, paused, lapsed, ended or interrupted, as it was said last."""
        return _BY_STATE(self.message.state).lower()

    def refresh(self) -> Run:
        """Asks the daemon again."""
        self.message = self._connection.call(self._connection.runs.GetRun, run_pb2.GetRunRequest(run_id=self.id))
        return self

    # --- holding ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.message.state == run_pb2.Run.PAUSED:
            self.resume()
        elif self.message.kind == run_pb2.Run.DURABLE:
            # Also one that another may hold, which is refused then.
            self.renew(self._holder)
        self._holding = Holding(self._connection, self.message)
        try:
            self._holding.wait()
            self.refresh()
            if self.message.state == run_pb2.Run.INTERRUPTED:
                raise self._interrupted()
            if self.message.state == run_pb2.Run.ENDED:
                raise ValidationError(f"the run {self.id} has ended")
        except BaseException:
            self._holding.let_go()
            self._holding = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        holding, self._holding = self._holding, None
        try:
            try:
                if self.message.state == run_pb2.Run.PAUSED:
                    # It goes on waiting for somebody, without a holder.
                    self.refresh()
                else:
                    self.end()
            except CogfsError:
                if error is None:
                    raise
                return
            if self.message.state == run_pb2.Run.INTERRUPTED and error is None:
                raise self._interrupted()
        finally:
            if holding is not None:
                # What another thread still calls is known to go on as long as its process is there.
                holding.let_go(when_over=bool(self.message.open_tool_calls))

    def _interrupted(self) -> RunInterrupted:
        why = self.message.why
        return RunInterrupted(f"the run {self.id} was stopped: {why}", {"why": why})

    @property
    def stopped(self) -> threading.Event:
        """Set when the run was told to stop; only within ``with``."""
        return self._held().stopped

    def check(self) -> None:
        """RunInterrupted when the run was told to stop. What takes long asks now and then."""
        self._held().check()

    def _held(self) -> Holding:
        if self._holding is None:
            raise RuntimeError("the run is held within `with` alone")
        return self._holding

    def renew(self, holder: str | None = None) -> Run:
        """Begins the lease of a durable run anew, or takes it up again. RunInterrupted, ThreadBusy."""
        request = run_pb2.RenewRunRequest(run_id=self.id, holder=text(holder or self._holder, "holder's name"))
        self.message = self._connection.call(self._connection.runs.RenewRun, request)
        return self

    def pause(self) -> Run:
        """The run waits for somebody. It is then in the way of nothing, and dropped by a rewind of its conversation."""
        self.message = self._connection.call(self._connection.runs.PauseRun, run_pb2.PauseRunRequest(run_id=self.id))
        return self

    def resume(self) -> Run:
        """A paused run goes on. RunInterrupted when it was dropped."""
        request = run_pb2.ResumeRunRequest(run_id=self.id, holder=self._holder)
        self.message = self._connection.call(self._connection.runs.ResumeRun, request)
        return self

    def end(self) -> Run:
        """The run is over. Can be repeated."""
        request = run_pb2.EndRunRequest(run_id=self.id)
        self.message = self._connection.call_patiently(self._connection.runs.EndRun, request, _PATIENCE)
        return self

    # --- working ------------------------------------------------------------------------------------------------------

    def user_message(self, content: str, **more: Any) -> thread_pb2.Entry:
        """As ``Thread.user_message``, by this run: its agent, its policy of checkpoints and its workspace count. So for
        messages that are queued while it goes on."""
        return self.thread.user_message(content, run=self.id, **more)

    def append(self, kind: str, content: str, **more: Any) -> thread_pb2.Entry:
        """As ``Thread.append``, by this run."""
        return self.thread.append(kind, content, run=self.id, **more)

    @contextlib.contextmanager
    def tool_call(self, name: str = "", *, id: str | None = None) -> Iterator[run_pb2.ToolCall]:
        """A tool call of the run, for as long as the block lasts: no files of its workspace are restored meanwhile.
        RunInterrupted when the run was told to stop before it."""
        if self._holding is not None:
            self._holding.check()
        request = run_pb2.BeginToolCallRequest(
            run_id=self.id, tool_call_id=text(id or "", "tool call's id"), name=text(name, "tool's name")
        )
        call = self._connection.call(self._connection.runs.BeginToolCall, request)
        try:
            yield call
        finally:
            # Of a run that has lost its holder no call is left.
            with contextlib.suppress(NotFound):
                ended = run_pb2.EndToolCallRequest(run_id=self.id, tool_call_id=call.id)
                self._connection.call_patiently(self._connection.runs.EndToolCall, ended, _PATIENCE)

    def command(self, pid: int, command: str | None = None) -> run_pb2.Command:
        """Registers a process of the run, as ``Thread.command``."""
        request = run_pb2.RegisterCommandRequest(
            run_id=self.id, pid=process_id(pid), command=text(command or "", "command's text")
        )
        return self._connection.call(self._connection.runs.RegisterCommand, request)


def own_name() -> str:
    """What this process calls itself as the holder of a run."""
    return f"{socket.gethostname()}:{os.getpid()}"[-128:]
