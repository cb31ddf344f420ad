"""The worker's end of the channel: one control process at a time, its requests carried out in the order they come.

Runs in the event loop, between handlers. Whatever a peer sends, the mount goes on: a frame that makes no sense ends its
connection.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
import stat as modes
import struct
import time
from dataclasses import dataclass

import msgspec
import trio

from cogfs.fsd import channel
from cogfs.fsd.mount.loop import BurstLoop
from cogfs.fsd.mount.operations import Operations

log = logging.getLogger(__name__)

_READ_SIZE = 65536


@dataclass(frozen=True)
class Workspace:
    """What ``Welcome`` tells."""

    workspace_id: str
    root: bytes
    mountpoint: bytes
    #: ``st_dev`` of the mount.
    device: int
    #: A descriptor of the backing root for the control process.
    root_fd: int


def listen(path: str) -> socket.socket:
    """A listening socket at ``path``, for the owner only. A socket that nobody listens on is replaced.
    OSError EADDRINUSE when somebody does, or when something else is there."""
    try:
        if not modes.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EADDRINUSE, "something that is no socket is in its place", path)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            else:
                raise OSError(errno.EADDRINUSE, "another worker listens there", path)
    except FileNotFoundError:
        pass
    server = socket.socket(socket.AF_UNIX)
    former = os.umask(0o177)
    try:
        server.bind(path)
        server.listen(8)
    except BaseException:
        server.close()
        raise
    finally:
        os.umask(former)
    return server


class ChannelServer:
    """Serves one listening socket."""

    def __init__(
        self, server: socket.socket, workspace: Workspace, operations: Operations, loop: BurstLoop | None
    ) -> None:
        self._server = server
        self._workspace = workspace
        self._operations = operations
        self._tree = operations.tree
        self._gate = operations.gate
        self._loop = loop
        self._started_ns = time.time_ns()
        self._present: trio.CancelScope | None = None

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        server = trio.socket.from_stdlib_socket(self._server)
        self._watch(server.fileno())
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection, _ = await server.accept()
                except OSError as error:
                    log.error("cannot accept a connection: %s", error)
                    await trio.sleep(0.1)
                    continue
                nursery.start_soon(self._connection, connection)

    async def _connection(self, connection: trio.socket.SocketType) -> None:
        number = connection.fileno()
        self._watch(number)
        scope = trio.CancelScope()
        try:
            with scope:
                await self._converse(connection, scope)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.error("the connection was ended: %s", error)
        except Exception:
            log.exception("the connection was ended")
        finally:
            if self._loop is not None:
                self._loop.unwatch(number)
            connection.close()
            if self._present is scope:
                self._present = None
                self._left()

    async def _converse(self, connection: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        if not _owner(connection):
            raise ValueError("the peer is of another user")
        splitter = channel.Splitter()
        greeted = False
        while data := await connection.recv(_READ_SIZE):
            for body in splitter.feed(data):
                if greeted:
                    frame = channel.request_decoder.decode(body)
                    answer = channel.ReplyFrame(frame.number, self._answer(frame.request))
                    await _send(connection, _encoded(answer))
                    continue
                hello = channel.hello_decoder.decode(body)
                await self._welcome(connection)
                if hello.version != channel.PROTOCOL_VERSION:
                    raise ValueError(f"the control process speaks version {hello.version}")
                self._take_over(scope, hello)
                greeted = True

    def _take_over(self, scope: trio.CancelScope, hello: channel.Hello) -> None:
        if self._present is not None:
            self._present.cancel()
            self._left()
        self._present = scope
        self._operations.control_pid = hello.control_pid

    def _left(self) -> None:
        """The control process is gone, or another one has come in its place."""
        self._operations.control_pid = 0
        self._tree.dirty.take_back()
        self._gate.resume()

    async def _welcome(self, connection: trio.socket.SocketType) -> None:
        workspace = self._workspace
        frame = channel.encode(
            channel.Welcome(
                channel.PROTOCOL_VERSION,
                workspace.workspace_id,
                os.getpid(),
                workspace.root,
                workspace.mountpoint,
                workspace.device,
                self._started_ns,
                self._gate.guard,
                self._gate.read_only,
            )
        )
        rights = array.array("i", [workspace.root_fd]).tobytes()
        sent = await connection.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        await _send(connection, frame[sent:])

    def _answer(self, request: channel.Request) -> channel.Answer:
        try:
            return self._carry_out(request)
        except OSError as error:
            return channel.Failed(error.errno or errno.EIO, error.strerror or str(error))
        except ValueError as error:
            return channel.Failed(errno.EINVAL, str(error))
        except Exception as error:
            log.exception("a request failed")
            return channel.Failed(errno.EIO, f"{type(error).__name__}: {error}")

    def _carry_out(self, request: channel.Request) -> channel.Answer:
        gate, dirty = self._gate, self._tree.dirty
        match request:
            case channel.Freeze():
                # No mutating call is under way while this runs, see Gate: there is nothing to wait for.
                gate.freeze()
                try:
                    # What the control process could not make durable is handed over once more.
                    dirty.take_back()
                    return channel.Frozen(*dirty.hand_over())
                except BaseException:
                    gate.resume()
                    raise
            case channel.Committed(generation):
                dirty.committed(generation)
            case channel.Resume():
                gate.resume()
            case channel.Guard(restore_id, owners, inodes, pinned):
                if not restore_id:
                    raise ValueError("a guard needs the id of its restore")
                gate.set_guard(restore_id, owners, inodes, pinned)
            case channel.Unguard():
                gate.unguard()
            case channel.SetReadOnly(reason):
                gate.set_read_only(reason)
            case channel.ListHandles():
                return channel.Handles(self._tree.handles.list())
            case channel.GetStats():
                files, directories = dirty.counts()
                nodes = self._tree.nodes
                return channel.Stats(
                    self._operations.counters.stats(),
                    len(nodes),
                    len(self._tree.handles),
                    files,
                    directories,
                    nodes.descriptors + len(self._tree.handles),
                )
        return channel.Done()

    def _watch(self, fd: int) -> None:
        if self._loop is not None:
            self._loop.watch(fd)


def _encoded(reply: channel.ReplyFrame) -> bytes:
    try:
        return channel.encode(reply)
    except ValueError as error:
        return channel.encode(channel.ReplyFrame(reply.number, channel.Failed(errno.EMSGSIZE, str(error))))


def _owner(connection: trio.socket.SocketType) -> bool:
    """Whether the peer is of this user, or root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())


async def _send(connection: trio.socket.SocketType, data: bytes) -> None:
    view = memoryview(data)
    while view:
        sent = await connection.send(view)
        view = view[sent:]
