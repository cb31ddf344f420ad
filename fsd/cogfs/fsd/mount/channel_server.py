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
_SEND_SIZE = 262144


class _Sender:
    """Sends frames to a peer, whole and in order, for anybody who has one."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        self._connection = connection
        self._rest = bytearray()
        self._more = trio.Event()
        self._sent = trio.Event()
        self._closed = False

    def post(self, data: bytes) -> None:
        """Send as much as there is room for now, and the rest by ``run``. What cannot be sent, as the peer has gone, is
        lost; who reads from it finds that out.

        At once, since the event loop may be serving the kernel for a while before the task of ``run`` gets its turn.
        """
        if self._closed:
            return
        if not self._rest:
            try:
                data = data[os.write(self._connection.fileno(), data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._closed = True
                return
        if data:
            self._rest += data
            self._more.set()

    async def send(self, data: bytes) -> None:
        """Post, and wait until it is sent: a peer that does not read must not be answered without end."""
        self.post(data)
        while self._rest and not self._closed:
            await self._sent.wait()

    async def run(self) -> None:
        """Until ``close``."""
        while not self._closed:
            await self._more.wait()
            self._more = trio.Event()
            try:
                while self._rest and not self._closed:
                    count = await self._connection.send(bytes(self._rest[:_SEND_SIZE]))
                    del self._rest[:count]
            except (OSError, trio.ClosedResourceError):
                self._closed = True
            sent, self._sent = self._sent, trio.Event()
            sent.set()

    def close(self) -> None:
        """The connection is about to be closed."""
        self._closed = True
        self._more.set()


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
        self._preserver = operations.preserver
        self._preserver.on_broken = self._tell_broken
        self._loop = loop
        self._started_ns = time.time_ns()
        self._present: trio.CancelScope | None = None
        #: To the present control process, once it is welcomed.
        self._sender: _Sender | None = None

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
                sender = _Sender(connection)
                nursery.start_soon(sender.run)
                nursery.start_soon(self._connection, connection, sender)

    async def _connection(self, connection: trio.socket.SocketType, sender: _Sender) -> None:
        number = connection.fileno()
        self._watch(number)
        scope = trio.CancelScope()
        try:
            with scope:
                await self._converse(connection, sender, scope)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.error("the connection was ended: %s", error)
        except Exception:
            log.exception("the connection was ended")
        finally:
            if self._loop is not None:
                self._loop.unwatch(number)
            sender.close()
            connection.close()
            if self._present is scope:
                self._present = None
                self._left()

    async def _converse(self, connection: trio.socket.SocketType, sender: _Sender, scope: trio.CancelScope) -> None:
        if not _owner(connection):
            raise ValueError("the peer is of another user")
        splitter = channel.Splitter()
        greeted = False
        while data := await connection.recv(_READ_SIZE):
            for body in splitter.feed(data):
                if greeted:
                    frame = channel.request_decoder.decode(body)
                    if isinstance(frame.request, channel.Resume | channel.Guard):
                        await self._gate.settle()
                    await sender.send(_encoded(channel.ReplyFrame(frame.number, self._answer(frame.request))))
                    if isinstance(frame.request, channel.Reconcile):
                        self._listens(sender)
                    continue
                hello = channel.hello_decoder.decode(body)
                if hello.version == channel.PROTOCOL_VERSION:
                    # Before the welcome, which tells what the end of a connection before it has left.
                    self._take_over(scope, hello)
                told = await self._welcome(connection)
                if hello.version != channel.PROTOCOL_VERSION:
                    raise ValueError(f"the control process speaks version {hello.version}")
                self._sender = sender
                if self._preserver.broken != told.broken:
                    self._tell_broken()
                if not told.boundaries:
                    self._listens(sender)
                greeted = True

    def _take_over(self, scope: trio.CancelScope, hello: channel.Hello) -> None:
        if self._present is not None:
            self._present.cancel()
            self._left()
        self._present = scope
        self._operations.control_pid = hello.control_pid

    def _left(self) -> None:
        """The control process is gone, or another one has come in its place."""
        self._sender = None
        self._operations.control_pid = 0
        self._preserver.leave()
        self._gate.resume()

    def _listens(self, sender: _Sender) -> None:
        """The control process knows the boundaries, and can be asked for files."""
        self._preserver.ask = lambda wanted: sender.post(channel.encode(channel.ReplyFrame(0, wanted)))
        self._preserver.ask_again()

    def _tell_broken(self) -> None:
        if self._sender is not None and self._preserver.broken:
            self._sender.post(channel.encode(channel.ReplyFrame(0, channel.Broken(self._preserver.broken))))

    async def _welcome(self, connection: trio.socket.SocketType) -> channel.Welcome:
        workspace = self._workspace
        welcome = channel.Welcome(
            channel.PROTOCOL_VERSION,
            workspace.workspace_id,
            os.getpid(),
            workspace.root,
            workspace.mountpoint,
            workspace.device,
            self._started_ns,
            self._gate.guard,
            self._gate.read_only,
            self._preserver.numbers,
            self._preserver.broken,
        )
        frame = channel.encode(welcome)
        rights = array.array("i", [workspace.root_fd]).tobytes()
        sent = await connection.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        await _send(connection, frame[sent:])
        return welcome

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
            case channel.Freeze(unlisted):
                if self._preserver.undecided:
                    raise ValueError("what was handed over to an earlier control process must be reconciled first")
                # No mutating call is under way while this runs, see Gate: there is nothing to wait for.
                frozen_ns = gate.freeze()
                try:
                    # What the control process could not make durable is handed over once more.
                    dirty.take_back()
                    number, complete, directories, files = dirty.hand_over(unlisted)
                    return channel.Frozen(number, complete, frozen_ns, channel.pack(directories, files))
                except BaseException:
                    gate.resume()
                    raise
            case channel.Committed(generation, boundary, unlisted, limit):
                if boundary:
                    self._preserver.commit(generation, unlisted=unlisted, limit=limit)
                else:
                    retained = dirty.commit(generation)
                    if retained is not None:
                        dirty.release(retained.changes)
                    self._preserver.sealed(generation)
            case channel.Sealed(generation, given_up):
                self._preserver.sealed(generation, given_up=given_up)
            case channel.Reconcile(boundaries, unlisted):
                self._preserver.reconcile(boundaries, unlisted)
            case channel.Preserve(ticket, was):
                self._preserver.preserve(ticket, was)
            case channel.Locate(inodes):
                return channel.Located([self._tree.nodes.locate(inode) for inode in inodes])
            case channel.ListForeign():
                return channel.Foreign(self._preserver.foreign())
            case channel.ListQuiet(seconds, limit):
                return channel.Quiet(dirty.quiet(seconds, limit))
            case channel.Resume():
                # First, since what may still be changed must be known to have been so.
                dirty.take_back()
                gate.resume()
            case channel.Guard(restore_id, owners, inodes, pinned):
                if not restore_id:
                    raise ValueError("a guard needs the id of its restore")
                gate.set_guard(restore_id, owners, inodes, pinned)
                # A call that waits for a file is looked at anew, too: it holds a lock that the restore may need.
                self._preserver.wake()
            case channel.Unguard():
                gate.unguard()
            case channel.SetReadOnly(reason):
                gate.set_read_only(reason)
            case channel.ListHandles():
                return channel.Handles(self._tree.handles.list())
            case channel.GetStats():
                dirty_files, dirty_directories = dirty.counts()
                nodes = self._tree.nodes
                return channel.Stats(
                    self._operations.counters.stats(),
                    len(nodes),
                    len(self._tree.handles),
                    dirty_files,
                    dirty_directories,
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
