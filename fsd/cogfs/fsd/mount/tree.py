"""The passthrough: every operation on nodes, done on the backing directory and noted in the node and dirty tables.

Synchronous, and knows no FUSE. Everything is reached from a directory's descriptor by one name, never through a
symbolic link and never by an absolute path; what is opened is checked to be the node's inode.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from stat import S_ISGID, S_ISLNK, S_ISREG, S_ISUID, S_IXGRP
from typing import TypeVar

from cogfs.fsd.mount import syscalls
from cogfs.fsd.mount.closer import LARGE
from cogfs.fsd.mount.dirty import DirtyTable
from cogfs.fsd.mount.handles import Handle, HandleTable, Listing
from cogfs.fsd.mount.identity import Caller, Identity
from cogfs.fsd.mount.nodes import OPEN_NODE, Node, NodeTable
from cogfs.fsd.undolog import Status, Was, Xattrs

T = TypeVar("T")

#: As a time for ``set_attributes``: the kernel's clock at the time of the call.
NOW = -1

#: What is passed on of the flags of an open. ``O_APPEND``: the kernel sends positions. ``O_DIRECT``: the buffers here
#: are not aligned. ``O_SYNC``: would block the event loop, see ``Handle.sync``.
_OPEN_FLAGS = os.O_ACCMODE | os.O_NOATIME
_SYNC_FLAGS = os.O_SYNC | os.O_DSYNC
#: Never wait for the other end, should something else have taken a file's place.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

CAPABILITY = b"security.capability"

Found = tuple[Node, os.stat_result]


class Tree:
    """The backing directory, as nodes."""

    def __init__(self, nodes: NodeTable, handles: HandleTable, dirty: DirtyTable, identity: Identity) -> None:
        self.nodes = nodes
        self.handles = handles
        self.dirty = dirty
        self._identity = identity

    # Looking

    def lookup(self, parent: Node, name: bytes) -> Found | None:
        """The entry ``name``, or None. Counts a lookup."""
        try:
            stat = os.stat(name, dir_fd=self.nodes.fd(parent), follow_symlinks=False)
        except FileNotFoundError:
            assert parent.children is not None
            stale = parent.children.get(name)
            if stale is not None:  # removed behind the mount
                self.nodes.remove_name(stale, parent, name)
                self.nodes.drop_unused(stale)
            return None
        node = self.nodes.entry(parent, name, stat)
        node.lookups += 1
        return node, stat

    def read_link(self, node: Node) -> bytes:
        """Target of a symbolic link."""
        dir_fd, name = self._at(node)
        return os.readlink(name, dir_fd=dir_fd)

    def look(self, parent: Node, name: bytes) -> Found | None:
        """The entry ``name`` as it is now, or None. Counts no lookup."""
        try:
            stat = os.stat(name, dir_fd=self.nodes.fd(parent), follow_symlinks=False)
        except FileNotFoundError:
            return None
        return self.nodes.entry(parent, name, stat), stat

    def describe(self, node: Node) -> Was:
        """All that a snapshot keeps of it, but for the content of a regular file."""
        stat = self.nodes.stat(node)
        path, follow = self._path(node)
        target = self.read_link(node) if S_ISLNK(node.kind) else b""
        return Was(Status.of(stat), _xattrs(path, follow), target)

    def _at(self, node: Node) -> tuple[int, bytes]:
        """Where ``node`` is, as the arguments of a call that takes a directory and a name: the name is empty when the
        descriptor is of the node itself."""
        if node.fd >= 0:
            return node.fd, b""
        if node.parent is not None:
            return self.nodes.fd(node.parent), node.name
        if node.handles:
            return node.handles[-1].fd, b""
        if node.children is not None:
            return self.nodes.fd(node), b""
        raise OSError(errno.ESTALE, "no known name leads to the node")

    def _path(self, node: Node) -> tuple[bytes, bool]:
        """A path that leads to ``node`` from this process only, and whether its last step must be followed."""
        if node.children is not None:
            return b"/proc/self/fd/%d" % self.nodes.fd(node), True
        dir_fd, name = self._at(node)
        if name:
            return b"/proc/self/fd/%d/%s" % (dir_fd, name), False
        return b"/proc/self/fd/%d" % dir_fd, True

    def _descriptor(self, call: Callable[[], int]) -> int:
        """The result of ``call``, tried again with fewer descriptors open when there are too many."""
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        self.nodes.close_descriptors(1 << 30)
        return call()

    # Making

    def _as_caller(self, caller: Caller, call: Callable[[], T]) -> T:
        return self._identity.make(caller, call) if self._identity.foreign(caller) else call()

    def _made(self, parent: Node, name: bytes, stat: os.stat_result) -> Found:
        node = self.nodes.entry(parent, name, stat)
        node.lookups += 1
        node.capability_free = True
        self.dirty.entry(parent, name)
        self.dirty.made(node)
        return node, stat

    def _made_entry(self, parent: Node, name: bytes, dir_fd: int) -> Found:
        return self._made(parent, name, os.stat(name, dir_fd=dir_fd, follow_symlinks=False))

    def create(self, parent: Node, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Handle, Found]:
        """A new regular file, open. One that was made behind the mount is opened, where ``flags`` allow that."""
        dir_fd = self.nodes.fd(parent)
        wanted = flags & _OPEN_FLAGS | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        try:
            fd = self._create(parent, name, mode, wanted, caller, dir_fd)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel will not cut it, as it thinks it new.
            fd = self._create(parent, name, mode, wanted & ~os.O_EXCL | flags & os.O_TRUNC, caller, dir_fd)
            return self._opened(fd, parent, name, flags, caller)
        found = self._made(parent, name, os.fstat(fd))
        return self._handle(fd, found[0], flags, caller), found

    def _create(self, parent: Node, name: bytes, mode: int, wanted: int, caller: Caller, dir_fd: int) -> int:
        if self._identity.foreign(caller):
            return self._identity.make(caller, lambda: os.open(name, wanted, mode, dir_fd=dir_fd))
        try:
            return os.open(name, wanted, mode, dir_fd=dir_fd)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        self.nodes.close_descriptors(1 << 30)
        return os.open(name, wanted, mode, dir_fd=self.nodes.fd(parent))

    def _opened(self, fd: int, parent: Node, name: bytes, flags: int, caller: Caller) -> tuple[Handle, Found]:
        """What the kernel took for absent, opened by ``fd``."""
        stat = os.fstat(fd)
        if not S_ISREG(stat.st_mode):
            os.close(fd)
            raise OSError(errno.EEXIST, "something that is no file was made behind the mount")
        node = self.nodes.entry(parent, name, stat)
        node.lookups += 1
        self.dirty.entry(parent, name)
        self.dirty.content(node)
        return self._handle(fd, node, flags, caller), (node, stat)

    def make_directory(self, parent: Node, name: bytes, mode: int, caller: Caller) -> Found:
        """A new directory."""
        dir_fd = self.nodes.fd(parent)
        self._as_caller(caller, lambda: os.mkdir(name, mode & 0o7777, dir_fd=dir_fd))
        return self._made_entry(parent, name, dir_fd)

    def make_node(self, parent: Node, name: bytes, mode: int, device: int, caller: Caller) -> Found:
        """A new file of any kind that ``mknod`` makes."""
        dir_fd = self.nodes.fd(parent)
        self._as_caller(caller, lambda: os.mknod(name, mode, device, dir_fd=dir_fd))
        return self._made_entry(parent, name, dir_fd)

    def make_link(self, parent: Node, name: bytes, target: bytes, caller: Caller) -> Found:
        """A new symbolic link."""
        dir_fd = self.nodes.fd(parent)
        self._as_caller(caller, lambda: os.symlink(target, name, dir_fd=dir_fd))
        return self._made_entry(parent, name, dir_fd)

    def link(self, node: Node, parent: Node, name: bytes) -> Found:
        """One more name of ``node``."""
        dir_fd = self.nodes.fd(parent)
        source_fd, source = self._at(node)
        if source:
            os.link(source, name, src_dir_fd=source_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        else:
            os.link(b"/proc/self/fd/%d" % source_fd, name, dst_dir_fd=dir_fd, follow_symlinks=True)
        stat = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not node.matches(stat):
            os.unlink(name, dir_fd=dir_fd)
            raise OSError(errno.ESTALE, "another file is in its place")
        self.nodes.add_name(node, parent, name)
        node.lookups += 1
        self.dirty.entry(parent, name)
        self.dirty.moved(node)
        self.dirty.attributes(node)
        return node, stat

    # Removing and moving

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of anything but a directory."""
        dir_fd = self.nodes.fd(parent)
        assert parent.children is not None
        node = parent.children.get(name)
        pin = self._pin(node, dir_fd, name)
        try:
            os.unlink(name, dir_fd=dir_fd)
        except BaseException:
            if pin >= 0:
                os.close(pin)
            raise
        self.dirty.entry(parent, name)
        if node is not None:
            self._lost(node, parent, name, pin)

    def remove_directory(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        dir_fd = self.nodes.fd(parent)
        assert parent.children is not None
        node = parent.children.get(name)
        pin = self._pin(node, dir_fd, name)
        try:
            os.rmdir(name, dir_fd=dir_fd)
        except BaseException:
            if pin >= 0:
                os.close(pin)
            raise
        self.dirty.entry(parent, name)
        if node is not None:
            self._lost(node, parent, name, pin)

    def _pin(self, node: Node | None, dir_fd: int, name: bytes) -> int:
        """A descriptor for ``node``, which is about to lose its last known name, or -1 when it needs none."""
        if node is None or node.links or node.fd >= 0 or not self.nodes.may_pin:
            return -1
        try:
            return os.open(name, OPEN_NODE, dir_fd=dir_fd)
        except OSError:
            return -1

    def _lost(self, node: Node, parent: Node, name: bytes, pin: int) -> None:
        """``node`` has lost the name ``name`` in ``parent``; ``pin`` is of what had that name."""
        self.handles.unnamed(node, parent, name)
        self.nodes.remove_name(node, parent, name)
        if node.parent is None:
            descriptor = pin if pin >= 0 else node.fd
            removed = True
            if descriptor >= 0:
                stat = os.fstat(descriptor)
                removed = node.children is not None or stat.st_nlink == 0
                node.large = removed and stat.st_size >= LARGE
                if pin >= 0 and not node.matches(stat):
                    os.close(pin)
                    pin = -1
            elif node.handles:
                removed = os.fstat(node.handles[-1].fd).st_nlink == 0
            self.nodes.pin(node, pin, removed)
        if node.deleted:
            self.dirty.removed(node)
        else:
            self.dirty.moved(node)
            self.dirty.attributes(node)
        self.nodes.drop_unused(node)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int) -> None:
        """Move an entry, over another one or in exchange for it as ``flags`` of ``renameat2`` say."""
        if flags not in (0, syscalls.RENAME_NOREPLACE, syscalls.RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, "unknown flags")
        nodes = self.nodes
        old_fd = nodes.fd(parent)
        new_fd = nodes.fd(new_parent)
        old_fd = nodes.fd(parent)  # opening the second may have closed the first
        assert parent.children is not None and new_parent.children is not None
        node = parent.children.get(name)
        if node is None:
            node = nodes.entry(parent, name, os.stat(name, dir_fd=old_fd, follow_symlinks=False))
        other = new_parent.children.get(new_name)
        if other is node:  # two names of one file, or the same name twice: nothing is done
            syscalls.rename(old_fd, name, new_fd, new_name, flags)
            return
        exchange = flags == syscalls.RENAME_EXCHANGE
        watched = self.dirty.watched(node)
        other_watched = other is None or self.dirty.watched(other)
        pin = -1 if exchange else self._pin(other, new_fd, new_name)
        try:
            if flags:
                syscalls.rename(old_fd, name, new_fd, new_name, flags)
            else:
                os.rename(name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd)
        except BaseException:
            if pin >= 0:
                os.close(pin)
            raise
        self.dirty.entry(parent, name)
        self.dirty.entry(new_parent, new_name)
        nodes.remove_name(node, parent, name)
        if other is not None:
            if exchange:
                nodes.remove_name(other, new_parent, new_name)
                nodes.add_name(other, parent, name)
                self._moved(other, other_watched)
            else:
                self._lost(other, new_parent, new_name, pin)
        nodes.add_name(node, new_parent, new_name)
        self._moved(node, watched)

    def _moved(self, node: Node, watched: bool) -> None:
        self.dirty.moved(node)
        if not watched and self.dirty.watched(node):
            self.dirty.arrived(node)
        else:
            self.dirty.attributes(node)

    # Attributes

    def set_attributes(
        self,
        node: Node,
        handle: Handle | None,
        caller: Caller,
        *,
        size: int | None,
        uid: int | None,
        gid: int | None,
        mode: int | None,
        atime_ns: int | None,
        mtime_ns: int | None,
    ) -> os.stat_result:
        """Change what is not None; times may be ``NOW``."""
        if size is not None:
            self.dirty.content(node)
            self._truncate(node, handle, size)
            self.dirty.closed(node)
            if caller.uid != 0 and mode is None:
                self._drop_privileges(node)
        else:
            self.dirty.attributes(node)
        if uid is not None or gid is not None:
            owner, group = -1 if uid is None else uid, -1 if gid is None else gid
            path, follow = self._path(node)
            os.chown(path, owner, group, follow_symlinks=follow)
        if mode is not None:
            self._set_mode(node, handle, mode)
        if atime_ns is not None or mtime_ns is not None:
            dir_fd, name = self._at(node)
            syscalls.utimens(dir_fd, name, _time(atime_ns), _time(mtime_ns))
        return self.nodes.stat(node)

    def _truncate(self, node: Node, handle: Handle | None, size: int) -> None:
        if handle is not None and handle.writable:
            os.ftruncate(handle.fd, size)
            return
        fd = self.nodes.open(node, os.O_PATH)
        try:
            os.truncate(b"/proc/self/fd/%d" % fd, size)
        finally:
            os.close(fd)

    def _set_mode(self, node: Node, handle: Handle | None, mode: int) -> None:
        if handle is not None:
            os.fchmod(handle.fd, mode & 0o7777)
        elif node.fd >= 0:
            os.chmod(b"/proc/self/fd/%d" % node.fd, mode & 0o7777)
        else:
            fd = self.nodes.open(node, os.O_PATH)
            try:
                os.chmod(b"/proc/self/fd/%d" % fd, mode & 0o7777)
            finally:
                os.close(fd)

    def _drop_privileges(self, node: Node) -> bool:
        """Take the bits away that a change by one without privileges takes away, since this process may keep them."""
        mode = self.nodes.stat(node).st_mode
        kept = mode & ~S_ISUID
        if mode & S_IXGRP:
            kept &= ~S_ISGID
        if kept == mode or not S_ISREG(mode):
            return False
        self._set_mode(node, None, kept)
        return True

    # Extended attributes

    def get_attribute(self, node: Node, name: bytes) -> bytes:
        """Value of an extended attribute."""
        path, follow = self._path(node)
        try:
            return os.getxattr(path, name, follow_symlinks=follow)
        except OSError as error:
            if name == CAPABILITY and error.errno == errno.ENODATA:
                node.capability_free = True
            raise

    def set_attribute(self, node: Node, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        path, follow = self._path(node)
        self.dirty.attributes(node)
        node.capability_free = False
        os.setxattr(path, name, value, follow_symlinks=follow)

    def remove_attribute(self, node: Node, name: bytes) -> None:
        """Remove an extended attribute."""
        path, follow = self._path(node)
        self.dirty.attributes(node)
        os.removexattr(path, name, follow_symlinks=follow)

    def attribute_names(self, node: Node) -> list[bytes]:
        """Names of the extended attributes."""
        path, follow = self._path(node)
        return [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=follow)]

    # Handles

    def open(self, node: Node, flags: int, caller: Caller) -> Handle:
        """Open a file, and cut it when ``flags`` say so."""
        wanted = flags & _OPEN_FLAGS | _FILE_FLAGS
        fd = self._descriptor(lambda: self.nodes.open(node, wanted))
        if flags & os.O_TRUNC:
            try:
                self.dirty.content(node)
                if flags & os.O_ACCMODE == os.O_RDONLY:
                    os.truncate(b"/proc/self/fd/%d" % fd, 0)
                else:
                    os.ftruncate(fd, 0)
                if caller.uid != 0:
                    self._drop_privileges(node)
            except BaseException:
                os.close(fd)
                raise
        return self._handle(fd, node, flags, caller)

    def _handle(self, fd: int, node: Node, flags: int, caller: Caller) -> Handle:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        handle = self.handles.add(fd, node, caller.pid, writable)
        if writable:
            handle.sync = flags & _SYNC_FLAGS
            handle.privileged = caller.uid == 0
        return handle

    def write(self, handle: Handle, offset: int, data: bytes) -> int:
        """Write all of ``data``; less when the filesystem ends."""
        node = handle.node
        change = node.change
        if change is None or not change.content:
            self.dirty.content(node)
        written = os.pwrite(handle.fd, data, offset)
        handle.written += written
        while written < len(data):
            try:
                more = os.pwrite(handle.fd, memoryview(data)[written:], offset + written)
            except OSError:
                break  # what was written counts; the next call gets the error
            if more == 0:
                break
            written += more
        return written

    def drop_privileges(self, handle: Handle) -> bool:
        """After a write: whether the mode of the file changed by it."""
        return not handle.privileged and self._drop_privileges(handle.node)

    def release(self, fh: int) -> None:
        """Close a handle."""
        writable = self.handles.get(fh).writable
        node = self.handles.remove(fh)
        if writable:
            self.dirty.closed(node)
        self.nodes.drop_unused(node)

    def open_directory(self, node: Node, caller: Caller) -> Handle:
        """Open a directory for reading."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # Not "." in it: that would need the right to search it.
        fd = self._descriptor(lambda: os.open(b"/proc/self/fd/%d" % self.nodes.fd(node), flags))
        handle = self.handles.add(fd, node, caller.pid, False)
        handle.listing = Listing(fd)
        return handle


def _xattrs(path: bytes, follow: bool) -> Xattrs:
    """Those that can be read."""
    found = []
    try:
        for name in os.listxattr(path, follow_symlinks=follow):
            try:
                found.append((os.fsencode(name), os.getxattr(path, name, follow_symlinks=follow)))
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.EACCES, errno.EPERM):
                    raise
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EACCES, errno.EPERM):
            raise
    return tuple(sorted(found))


def _time(value: int | None) -> tuple[int, int]:
    if value is None:
        return 0, syscalls.UTIME_OMIT
    if value == NOW:
        return 0, syscalls.UTIME_NOW
    return divmod(value, 1_000_000_000)
