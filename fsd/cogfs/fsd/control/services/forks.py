"""The call of ThreadService that forks a thread."""

from __future__ import annotations

import grpc

from cogfs.fsd.control.fork import ForkRequest, Forks
from cogfs.fsd.control.services.convert import checked_agent, required, runs_report, thread_message
from cogfs.store.store import Store
from cogfs.v1 import thread_pb2


class ForkCalls:
    def __init__(self, store: Store, forks: Forks) -> None:
        self._contents = store
        self._forks = forks

    def ForkThread(
        self, request: thread_pb2.ForkThreadRequest, context: grpc.ServicerContext
    ) -> thread_pb2.ForkThreadReport:
        wanted = ForkRequest(
            required(request.thread_id, "thread_id"),
            required(request.at_entry_id, "at_entry_id"),
            request.new_thread_id,
            request.files,
            request.workspace_id,
            request.into,
            request.source_workspace_id,
            tuple(checked_agent(required(agent, "agents")) for agent in request.agents),
            request.dry_run,
            request.force,
        )
        done = self._forks.fork(wanted)
        report = thread_pb2.ForkThreadReport(
            thread=thread_message(done.thread),
            dry_run=request.dry_run,
            source_thread_id=request.thread_id,
            at_entry_id=request.at_entry_id,
            entries_copied=done.entries,
            memories_copied=done.memories,
            runs=runs_report(done.runs),
        )
        files = done.files
        if files is not None:
            report.snapshots_copied = files.snapshots
            report.workspace_made = files.made
            report.files.restore.CopyFrom(files.outcome.whole(self._contents))
            report.files.entry_id = files.entry_id
            report.files.exact = files.exact
            report.files.workspace_id = files.workspace_id
            report.files.safety_snapshot_id = files.outcome.report.safety_snapshot_id
        return report
