"""The kernel adapter: pyfuse3's handlers on a ``Tree``. Each is admitted, counted, and ends in a reply or an errno.

No exception but ``FUSEError`` leaves a handler: anything else would end the mount.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat as modes
from collections.abc import Callable, Collection, Coroutine, Sequence
from time import perf_counter_ns, time_ns
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields

from cogfs.fsd.mount import syscalls
from cogfs.fsd.mount.counters import Counters
from cogfs.fsd.mount.gate import Gate, place_of
from cogfs.fsd.mount.handles import Handle
from cogfs.fsd.mount.invalidate import Invalidator
from cogfs.fsd.mount.loop import BurstLoop
from cogfs.fsd.mount.nodes import Node
from cogfs.fsd.mount.preserver import Preserver
from cogfs.fsd.mount.tree import CAPABILITY, NOW, Found, Tree

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds for which the kernel keeps names, absent names and attributes: only this mount changes what they show.
CACHE_SECONDS = 3600.0

#: A time no older than this, in nanoseconds, at the start of the handler is pyfuse3's reading of the clock for "now";
#: one that came from the caller has been on its way for longer.
_NOW_WINDOW = 10_000

_DTYPE_SHIFT = 12

#: Who calls, on which backing inodes, and what preserves what the call is about to change, or None when it changes
#: nothing by itself (see ``Gate.admit``); None for a call that need not be admitted after all.
Admission = tuple[int, Callable[[], Collection[int]], Callable[[], trio.Event | None] | None] | None


def _handled(function: Callable[..., Any], admission: Callable[..., Admission | None] | None = None) -> Any:
    """``function``, a method that gives a result or a coroutine of one, as a handler."""
    name = function.__name__.lstrip("_")

    @functools.wraps(function)
    async def handler(self: Operations, *args: Any) -> Any:
        start = perf_counter_ns()
        counter = self.counters[name]
        try:
            if admission is not None and self.gate.closed and (admitted := admission(self, *args)) is not None:
                await self.gate.admit(*admitted)
            result = function(self, *args)
            return await result if result.__class__ is CoroutineType else result
        except BaseException as error:
            counter.errors += 1
            raise _fuse_error(name, error) from None
        finally:
            counter.add(perf_counter_ns() - start)

    return handler


def _fuse_error(name: str, error: BaseException) -> BaseException:
    """What to raise for what a handler raised: ``FUSEError`` for every exception, and cancellation as it is."""
    if isinstance(error, OSError):
        return FUSEError(error.errno or errno.EIO)
    if isinstance(error, FUSEError) or not isinstance(error, Exception):
        return error
    log.error("the handler of %s failed", name, exc_info=error)
    return FUSEError(errno.EIO)


def reading(
    function: Callable[Concatenate[Operations, P], R],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]]:
    """A handler that changes nothing."""
    handler: Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]] = _handled(function)
    return handler


def waiting(
    function: Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]]:
    """A handler that changes nothing and awaits."""
    handler: Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]] = _handled(function)
    return handler


def changing(
    admission: Callable[..., Admission | None],
) -> Callable[[Callable[Concatenate[Operations, P], R]], Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]]]:
    """A handler that is admitted as ``admission`` of its arguments says: by whom, and on which backing inodes; None: it
    changes nothing."""

    def decorate(
        function: Callable[Concatenate[Operations, P], R],
    ) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]]:
        handler: Callable[Concatenate[Operations, P], Coroutine[Any, Any, R]] = _handled(function, admission)
        return handler

    return decorate


def _entry(self: Operations, parent: int, name: bytes, *rest: Any) -> Admission:
    def preserve() -> trio.Event | None:
        return self.preserver.prepare(((self.tree.nodes.get(parent), name),), ())

    return rest[-1].pid, lambda: self.inodes_of(parent, name), preserve


def _two_entries(
    self: Operations, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: RequestContext
) -> Admission:
    def preserve() -> trio.Event | None:
        get = self.tree.nodes.get
        exchange = flags == syscalls.RENAME_EXCHANGE
        return self.preserver.prepare_rename(get(parent), name, get(new_parent), new_name, exchange)

    return ctx.pid, lambda: [*self.inodes_of(parent, name), *self.inodes_of(new_parent, new_name)], preserve


def _node_and_entry(self: Operations, node: int, parent: int, name: bytes, ctx: RequestContext) -> Admission:
    get = self.tree.nodes.get

    def preserve() -> trio.Event | None:
        return self.preserver.prepare(((get(parent), name),), (get(node),))

    return ctx.pid, lambda: [get(node).ino, *self.inodes_of(parent, name)], preserve


def _node(self: Operations, node: int, *rest: Any) -> Admission:
    get = self.tree.nodes.get
    return rest[-1].pid, lambda: (get(node).ino,), lambda: self.preserver.prepare((), (get(node),))


def _written(self: Operations, fh: int, off: int, buf: bytes) -> Admission:
    # The kernel's requests for writes do not say who writes: whoever opened the file does.
    handle = self.tree.handles.get(fh)
    node = handle.node
    return handle.pid, lambda: (node.ino,), lambda: self.preserver.prepare_write(node, off, len(buf))


def _opened(self: Operations, node: int, flags: int, ctx: RequestContext) -> Admission:
    get = self.tree.nodes.get
    if flags & os.O_TRUNC:
        return _node(self, node, ctx)
    # Who opens a file for writing while a restore replaces it would write into the old one from then on.
    if flags & os.O_ACCMODE != os.O_RDONLY:
        return ctx.pid, lambda: (get(node).ino,), None
    return None


class Operations(pyfuse3.Operations):
    """What pyfuse3 calls."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        tree: Tree,
        gate: Gate,
        preserver: Preserver,
        counters: Counters,
        invalidator: Invalidator,
        loop: BurstLoop | None,
    ) -> None:
        super().__init__()
        self.tree = tree
        self.gate = gate
        self.preserver = preserver
        self.counters = counters
        self._invalidator = invalidator
        self._loop = loop
        #: Process id of the control process; its read-only handles are synced to flush maps, not the disk.
        self.control_pid = 0

    def inodes_of(self, parent: int, name: bytes) -> list[int]:
        """Backing inodes of a directory and of what is known to have that name in it, and the latter's place."""
        directory = self.tree.nodes.get(parent)
        child = (directory.children or {}).get(name)
        return [directory.ino] if child is None else [directory.ino, child.ino, place_of(child.ino)]

    # Names

    @reading
    def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        found = self.tree.lookup(self.tree.nodes.get(parent_inode), name)
        if found is None:
            return _ABSENT
        return _attributes(found[0], found[1])

    @reading
    def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        forget = self.tree.nodes.forget
        for inode, count in inode_list:
            forget(inode, count)

    def _made(self, found: Found, ctx: RequestContext) -> EntryAttributes:
        if self.gate.guard:
            self.gate.made(ctx.pid, found[0].ino)
        return _attributes(*found)

    @changing(_entry)
    def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        handle, found = self.tree.create(self.tree.nodes.get(parent_inode), name, mode, flags, ctx)
        return FileInfo(fh=handle.fd), self._made(found, ctx)

    @changing(_entry)
    def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        found = self.tree.make_directory(self.tree.nodes.get(parent_inode), name, mode, ctx)
        self.preserver.made_directory(found[0])
        return self._made(found, ctx)

    @changing(_entry)
    def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        return self._made(self.tree.make_node(self.tree.nodes.get(parent_inode), name, mode, rdev, ctx), ctx)

    @changing(_entry)
    def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._made(self.tree.make_link(self.tree.nodes.get(parent_inode), name, target, ctx), ctx)

    @changing(_node_and_entry)
    def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        nodes = self.tree.nodes
        return _attributes(*self.tree.link(nodes.get(inode), nodes.get(new_parent_inode), new_name))

    @changing(_entry)
    def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self.tree.unlink(self.tree.nodes.get(parent_inode), name)

    @changing(_entry)
    def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self.tree.remove_directory(self.tree.nodes.get(parent_inode), name)

    @changing(_two_entries)
    def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        nodes = self.tree.nodes
        self.tree.rename(nodes.get(parent_inode_old), name_old, nodes.get(parent_inode_new), name_new, flags)

    # Nodes

    @reading
    def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        node = self.tree.nodes.get(inode)
        return _attributes(node, self.tree.nodes.stat(node))

    @reading
    def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.tree.read_link(self.tree.nodes.get(inode))

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        # Before the handler proper: it may have to wait, and then "now" could not be told from another time any more.
        now = time_ns()
        atime = _time(attr.st_atime_ns, now) if fields.update_atime else None
        mtime = _time(attr.st_mtime_ns, now) if fields.update_mtime else None
        return await self._setattr(inode, attr, fields, fh, atime, mtime, ctx)

    @changing(_node)
    def _setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: int | None,
        atime: int | None,
        mtime: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        node = self.tree.nodes.get(inode)
        stat = self.tree.set_attributes(
            node,
            None if fh is None else self.tree.handles.get(fh),
            ctx,
            size=attr.st_size if fields.update_size else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            mode=attr.st_mode if fields.update_mode else None,
            atime_ns=atime,
            mtime_ns=mtime,
        )
        return _attributes(node, stat)

    @reading
    def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        return True  # default_permissions: the kernel has decided

    @reading
    def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        stat = os.fstatvfs(self.tree.nodes.root.fd)
        data = pyfuse3.StatvfsData()
        data.f_bsize = stat.f_bsize
        data.f_frsize = stat.f_frsize
        data.f_blocks = stat.f_blocks
        data.f_bfree = stat.f_bfree
        data.f_bavail = stat.f_bavail
        data.f_files = stat.f_files
        data.f_ffree = stat.f_ffree
        data.f_favail = stat.f_favail
        data.f_namemax = stat.f_namemax
        return data

    # Extended attributes

    @reading
    def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        node = self.tree.nodes.get(inode)
        if node.capability_free and name == CAPABILITY:
            raise FUSEError(errno.ENODATA)  # asked before every write, so by the shortest way
        return self.tree.get_attribute(node, name)

    @reading
    def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        return self.tree.attribute_names(self.tree.nodes.get(inode))

    @changing(_node)
    def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self.tree.set_attribute(self.tree.nodes.get(inode), name, value)

    @changing(_node)
    def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        self.tree.remove_attribute(self.tree.nodes.get(inode), name)

    # Files

    @changing(_opened)
    def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=self.tree.open(self.tree.nodes.get(inode), flags, ctx).fd)

    @reading
    def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    @changing(_written)
    def write(self, fh: int, off: int, buf: bytes) -> Any:
        handle = self.tree.handles.get(fh)
        written = self.tree.write(handle, off, buf)
        if not handle.privileged and self.tree.drop_privileges(handle):
            self._invalidator.attributes(handle.node.id)
        if self.gate.closed:
            self.preserver.written(handle.node)
        # What is written is written: only the reply waits for the disk.
        return self._written(handle, written) if handle.sync else written

    async def _written(self, handle: Handle, written: int) -> int:
        await self._sync(handle, handle.sync & os.O_SYNC != os.O_SYNC)
        return written

    @reading
    def flush(self, fh: int) -> None:
        # Nothing is kept back here. This answer makes the kernel stop asking, which saves a round trip for each close.
        raise FUSEError(errno.ENOSYS)

    @reading
    def release(self, fh: int) -> None:
        self.tree.release(fh)

    @waiting
    async def fsync(self, fh: int, datasync: bool) -> None:
        handle = self.tree.handles.get(fh)
        if not handle.writable and self._of_control(handle.pid):
            return  # the kernel has written out the maps of the file before it asked, and that was the purpose
        await self._sync(handle, datasync)

    async def _sync(self, handle: Handle, datasync: bool) -> None:
        call = os.fdatasync if datasync else os.fsync
        if self._loop is None:
            await trio.to_thread.run_sync(call, handle.fd)
        else:
            with self._loop.outside():
                await trio.to_thread.run_sync(call, handle.fd)

    def _of_control(self, pid: int) -> bool:
        return self.control_pid != 0 and os.path.exists(f"/proc/{self.control_pid}/task/{pid}")

    # Directories

    @reading
    def opendir(self, inode: int, ctx: RequestContext) -> int:
        return self.tree.open_directory(self.tree.nodes.get(inode), ctx).fd

    @reading
    def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        handle = self.tree.handles.get(fh)
        listing = handle.listing
        assert listing is not None
        listing.seek(start_id)
        while (entry := listing.next()) is not None:
            if not self._reply_entry(token, handle, entry):
                return
            listing.advance()

    def _reply_entry(self, token: pyfuse3.ReaddirToken, handle: Handle, entry: tuple[bytes, int, int, int]) -> bool:
        """Whether there was room for it."""
        name, position, inode, kind = entry
        if name in (b".", b".."):  # the kernel counts no lookup of these and takes number and type only
            attributes = EntryAttributes()
            attributes.st_ino = inode
            attributes.st_mode = modes.S_IFDIR
            return pyfuse3.readdir_reply(token, name, attributes, position)
        directory = handle.node
        try:
            stat = os.stat(name, dir_fd=handle.fd, follow_symlinks=False)
        except FileNotFoundError:
            return True  # removed since it was listed
        except PermissionError:  # a directory that may be read but not searched
            attributes = EntryAttributes()
            attributes.st_ino = inode
            attributes.st_mode = kind << _DTYPE_SHIFT
            attributes.entry_timeout = attributes.attr_timeout = 0
            return pyfuse3.readdir_reply(token, name, attributes, position)
        nodes = self.tree.nodes
        node = nodes.entry(directory, name, stat)
        if not pyfuse3.readdir_reply(token, name, _attributes(node, stat), position):
            nodes.drop_unused(node)
            return False
        node.lookups += 1
        return True

    @reading
    def releasedir(self, fh: int) -> None:
        self.tree.release(fh)

    @waiting
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._sync(self.tree.handles.get(fh), datasync)


def _absent() -> EntryAttributes:
    attributes = EntryAttributes()
    attributes.st_ino = 0
    attributes.entry_timeout = CACHE_SECONDS
    return attributes


_ABSENT = _absent()


def _attributes(node: Node, stat: os.stat_result) -> EntryAttributes:
    attributes = EntryAttributes()
    node_id = node.id
    # To take the tuple apart costs less than to ask for its fields.
    attributes.st_mode, ino, _, attributes.st_nlink, uid, gid, size, _, _, _ = stat
    # The root is node 1 for the kernel, which is told so by no reply; what programs see is the backing number.
    attributes.st_ino = ino if node_id == 1 else node_id
    attributes.entry_timeout = CACHE_SECONDS
    attributes.attr_timeout = CACHE_SECONDS
    # They are zero when they are not set, and setting costs more than looking.
    if uid:
        attributes.st_uid = uid
    if gid:
        attributes.st_gid = gid
    if stat.st_rdev:
        attributes.st_rdev = stat.st_rdev
    if size:
        attributes.st_size = size
    attributes.st_blksize = stat.st_blksize
    if stat.st_blocks:
        attributes.st_blocks = stat.st_blocks
    attributes.st_atime_ns = stat.st_atime_ns
    attributes.st_mtime_ns = stat.st_mtime_ns
    attributes.st_ctime_ns = stat.st_ctime_ns
    return attributes


def _time(value: int, now: int) -> int:
    return NOW if 0 <= now - value <= _NOW_WINDOW else value
