"""AdminService: the daemon itself."""

from __future__ import annotations

import importlib.metadata
import os
import time

import grpc
import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from cogfs.fsd.control.collector import Collector
from cogfs.fsd.control.errors import CogfsError, invalid
from cogfs.fsd.control.places import Places
from cogfs.fsd.control.ports import Room
from cogfs.fsd.control.retaking import retake
from cogfs.store.check import AffectedPath
from cogfs.store.gc import Unreadable
from cogfs.store.reach import Interrupted
from cogfs.store.store import Store
from cogfs.v1 import admin_pb2, admin_pb2_grpc
from cogfs.v1.reasons import Reason

_log = structlog.get_logger(__name__)

#: Seconds of a year.
_GRACE_MAX = 366 * 24 * 3600


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, places: Places, store: Store, collector: Collector, budget: Room) -> None:
        self._places = places
        self._budget = budget
        self._store = store
        self._collector = collector
        self._started = Timestamp()
        self._started.FromNanoseconds(time.time_ns())

    def GetDaemon(self, request: admin_pb2.GetDaemonRequest, context: grpc.ServicerContext) -> admin_pb2.Daemon:
        stats = self._store.stats()
        return admin_pb2.Daemon(
            pid=os.getpid(),
            endpoint=self._places.endpoint,
            version=importlib.metadata.version("cogfs"),
            store=os.fsencode(self._places.store),
            started_at=self._started,
            store_objects=stats.objects,
            store_bytes=stats.pack_bytes,
        )

    def Collect(self, request: admin_pb2.CollectRequest, context: grpc.ServicerContext) -> admin_pb2.CollectResponse:
        grace = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else self._collector.grace
        if not 0 <= grace <= _GRACE_MAX:
            raise invalid("the grace of a collection is from 0 to one year")
        started = time.monotonic()
        done = self._collector.collect(grace, thorough=request.thorough, goes_on=context.is_active)
        return admin_pb2.CollectResponse(
            objects_dropped=done.objects,
            objects_kept=done.live,
            bytes_freed=done.freed,
            packs_removed=done.packs,
            bytes_wasted=done.waste,
            unreadable=[_unreadable(one) for one in done.unreadable],
            deferred=done.deferred,
            duration_ms=(time.monotonic() - started) * 1e3,
        )

    def Check(self, request: admin_pb2.CheckRequest, context: grpc.ServicerContext) -> admin_pb2.CheckResponse:
        found = self._store.check(self._collector.roots, data=request.data, goes_on=context.is_active)
        for problem in found.problems:
            _log.error("the store is damaged", check=problem.check, problem=problem.text)
        return admin_pb2.CheckResponse(
            ok=not found.problems,
            objects=found.objects,
            snapshots=found.snapshots,
            bytes_read=found.bytes_read,
            objects_unneeded=found.unneeded,
            problems=[admin_pb2.Problem(check=one.check, text=one.text, hash=one.name) for one in found.problems],
            problems_untold=found.untold,
            affected=[_affected(one) for one in found.affected],
        )

    def Repair(self, request: admin_pb2.RepairRequest, context: grpc.ServicerContext) -> admin_pb2.RepairResponse:
        done = self._store.repair(self._collector.roots, lambda affected: retake(self._store, affected))
        _log.warning("the store was repaired", found=done.found, remade=done.remade, lost=done.lost)
        return admin_pb2.RepairResponse(
            objects_intact=done.intact,
            objects_found=done.found,
            objects_remade=done.remade,
            objects_lost=done.lost,
            rows_dropped=done.dropped,
            affected=[_affected(one) for one in done.affected],
        )

    def GetStats(self, request: admin_pb2.GetStatsRequest, context: grpc.ServicerContext) -> admin_pb2.Stats:
        stats = self._store.stats()
        try:
            used = self._store.usage(self._collector.roots, goes_on=context.is_active)
        except Interrupted:
            raise CogfsError(Reason.UNAVAILABLE, "the daemon stops") from None
        with self._store.read() as reader:
            known = {row.id: row.root for row in reader.workspaces()}
        return admin_pb2.Stats(
            objects=stats.objects,
            packs=stats.packs,
            pack_bytes=stats.pack_bytes,
            index_bytes=stats.index_bytes,
            raw_bytes=used.raw,
            stored_bytes=used.stored,
            ratio=used.raw / used.stored if used.stored else 1.0,
            max_bytes=self._budget.max_bytes,
            full=self._budget.full,
            unneeded_bytes=max(0, stats.pack_bytes - used.needed),
            workspaces=[
                admin_pb2.WorkspaceUse(
                    workspace_id=workspace_id,
                    root=known.get(workspace_id, b""),
                    snapshot_count=len(one.snapshots),
                    unique_bytes=one.unique,
                    shared_bytes=one.shared,
                    snapshots=[
                        admin_pb2.SnapshotUse(snapshot_id=name, unique_bytes=mine.unique, shared_bytes=mine.shared)
                        for name, mine in sorted(one.snapshots.items(), reverse=True)
                    ],
                )
                for workspace_id, one in sorted(used.workspaces.items())
            ],
        )


def _affected(one: AffectedPath) -> admin_pb2.AffectedPath:
    return admin_pb2.AffectedPath(snapshot_id=one.snapshot_id, workspace_id=one.workspace_id, path=one.path)


def _unreadable(one: Unreadable) -> admin_pb2.Unreadable:
    return admin_pb2.Unreadable(snapshot_id=one.snapshot_id, workspace_id=one.workspace_id, reason=one.reason)
