"""AdminService: the daemon itself."""

from __future__ import annotations

import importlib.metadata
import os
import time

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from cogfs.fsd.control.collector import Collector
from cogfs.fsd.control.errors import invalid
from cogfs.fsd.control.places import Places
from cogfs.store.gc import Unreadable
from cogfs.store.recent import GRACE
from cogfs.store.store import Store
from cogfs.v1 import admin_pb2, admin_pb2_grpc

#: Seconds of a year.
_GRACE_MAX = 366 * 24 * 3600


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, places: Places, store: Store, collector: Collector) -> None:
        self._places = places
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
        grace = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else GRACE
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


def _unreadable(one: Unreadable) -> admin_pb2.Unreadable:
    return admin_pb2.Unreadable(snapshot_id=one.snapshot_id, workspace_id=one.workspace_id, reason=one.reason)
