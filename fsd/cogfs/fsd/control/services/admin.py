"""AdminService: the daemon itself."""

from __future__ import annotations

import importlib.metadata
import os
import time

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from cogfs.fsd.control.places import Places
from cogfs.store.store import Store
from cogfs.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, places: Places, store: Store) -> None:
        self._places = places
        self._store = store
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
