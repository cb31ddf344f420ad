"""Who is in the way of a plan: open handles, and working directories that would go."""

from __future__ import annotations

import os

from cogfs.fsd.channel import OpenHandle
from cogfs.fsd.control.beneath import ancestors, beneath, split
from cogfs.fsd.control.errors import BusyBy
from cogfs.fsd.control.planner import Plan
from cogfs.fsd.control.ports import Link
from cogfs.fsd.control.users import as_busy, holder, open_handles
from cogfs.store.schema import Kind


class Touched:
    """The inodes that a plan changes, those of the directories it changes entries of, and those above them."""

    def __init__(self, root_fd: int, plan: Plan) -> None:
        """Looks at the backing directory; what is not there has no inode."""
        self.changed: set[int] = set()
        self.directories: set[int] = set()
        self.above: set[int] = set()
        with beneath(root_fd) as reach:
            for path in sorted({step.path for step in plan.steps} | _members(plan)):
                parent, name = split(path)
                try:
                    fd = reach.directory(parent)
                    inode = os.fstat(fd).st_ino
                    if path:
                        self.directories.add(inode)
                        self.changed.add(os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino)
                    else:
                        self.changed.add(inode)
                except OSError:
                    continue
            for path in sorted(ancestors(plan.paths())):
                try:
                    self.above.add(os.fstat(reach.directory(path)).st_ino)
                except OSError:
                    continue


def _members(plan: Plan) -> set[bytes]:
    return {path for members in plan.groups.values() for path in members}


def blocking(who: list[BusyBy]) -> list[BusyBy]:
    """Those that refuse a restore: a reader is told of and does not."""
    return [one for one in who if one["kind"] != "HANDLE" or one["access"] == "WRITE"]


def occupants(link: Link, plan: Plan, touched: Touched, *, strict: bool) -> list[BusyBy]:
    """Everybody but the daemon who holds what the plan changes or deletes; with ``strict`` every writer there is."""
    own = os.getpid()
    found = [
        as_busy(handle)
        for handle in open_handles(link)
        if handle.pid != own and not handle.directory and _concerns(handle, touched, strict=strict)
    ]
    going = [
        os.path.join(link.mountpoint, step.path)
        for step in plan.steps
        if step.before is not None
        and step.before.kind is Kind.DIRECTORY
        and (step.after is None or step.after.kind is not Kind.DIRECTORY)
    ]
    if going:
        found += _working_directories(link.mountpoint, set(going))
    return found


def _concerns(handle: OpenHandle, touched: Touched, *, strict: bool) -> bool:
    if strict and handle.writable:
        return True
    return not handle.deleted and handle.inode in touched.changed


def _working_directories(mountpoint: bytes, going: set[bytes]) -> list[BusyBy]:
    """Processes whose working directory goes. Reading the link asks the kernel alone, never the mount."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            where = os.readlink(b"/proc/%s/cwd" % name.encode())
        except OSError:
            continue
        if where in going:
            found.append(holder("WORKING_DIRECTORY", int(name), where, mountpoint, "READ"))
    return found
