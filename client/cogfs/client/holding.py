"""What keeps a run held from here: the stream that is the holder's connection, and the renewal of a lease.

Both in threads of their own, which outlast a restart of the daemon. Knows nothing of what the run does.
"""

from __future__ import annotations

import threading

import grpc

from cogfs.client.connection import Connection
from cogfs.client.errors import CogfsError, RunInterrupted, Unavailable, from_rpc
from cogfs.v1 import run_pb2

#: Seconds before a daemon that does not answer is asked again.
_AGAIN = 0.2
#: Of a lease, the part after which it is renewed.
_PART = 3


class Holding:
    """One run, held until it is over or ``let_go``."""

    def __init__(self, connection: Connection, run: run_pb2.Run) -> None:
        self._connection = connection
        self._request = run_pb2.WatchRunRequest(run_id=run.id)
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self._released = threading.Event()
        self._renewed_no_more = threading.Event()
        self._call: grpc.Call | None = None
        self._lock = threading.Lock()
        self._failure: CogfsError | None = None
        self._threads = [threading.Thread(target=self._watch, name=f"watch-{run.id}", daemon=True)]
        if run.kind == run_pb2.Run.DURABLE:
            seconds = (run.lease.seconds + run.lease.nanos / 1e9) / _PART
            self._threads.append(
                threading.Thread(target=self._renew, args=(seconds,), name=f"renew-{run.id}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until the daemon has answered that the stream counts. CogfsError when it does not."""
        self._answered.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def stopped(self) -> threading.Event:
        """Set when the run was told to stop, or cannot be held any more; see ``check``."""
        return self._stopped

    def check(self) -> None:
        """RunInterrupted when it was told to stop; another error when it cannot be held any more."""
        if self._stopped.is_set():
            raise self._failure or RunInterrupted("the run was told to stop")

    def let_go(self, *, when_over: bool = False) -> None:
        """The run is over, or left to others. ``when_over``: the stream stays until the daemon ends it."""
        self._renewed_no_more.set()
        if when_over:
            return
        self._released.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _fail(self, error: CogfsError) -> None:
        if self._failure is None:
            self._failure = error
        self._stopped.set()
        self._answered.set()

    def _watch(self) -> None:
        while not self._released.is_set():
            try:
                if self._follow():
                    return
            except Unavailable:
                # It is being restarted, and gives the time to find it again.
                self._released.wait(_AGAIN)
            except CogfsError as error:
                self._fail(error)
                return

    def _follow(self) -> bool:
        """One stream to its end; whether the run is over."""
        try:
            with self._lock:
                if self._released.is_set():
                    return True
                self._call = call = self._connection.runs.WatchRun(self._request)
            for event in call:
                if event.kind == run_pb2.RunEvent.HELD:
                    self._answered.set()
                elif event.kind == run_pb2.RunEvent.STOP:
                    self._fail(RunInterrupted(f"the run {self._request.run_id} was stopped: {event.why}"))
                elif event.kind == run_pb2.RunEvent.ENDED:
                    return True
        except grpc.RpcError as error:
            if not self._released.is_set():
                raise from_rpc(error, self._connection.endpoint) from None
        except ValueError:
            # The client was closed.
            return True
        return False

    def _renew(self, seconds: float) -> None:
        pause = seconds
        while not self._renewed_no_more.wait(pause) and not self._stopped.is_set():
            try:
                request = run_pb2.RenewRunRequest(run_id=self._request.run_id)
                self._connection.call(self._connection.runs.RenewRun, request, timeout=max(1.0, seconds))
                pause = seconds
            except Unavailable:
                pause = min(_AGAIN, seconds)
            except CogfsError as error:
                self._fail(error)
            except ValueError:
                return
