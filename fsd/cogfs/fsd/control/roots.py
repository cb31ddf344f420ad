"""Which directories may be workspaces and mountpoints, and whether FUSE can be used at all.

Owns these rules, each refused with one sentence. Changes nothing and must not know how a mount is made.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
from collections.abc import Iterable, Sequence

from cogfs.fsd.control import mounts
from cogfs.fsd.control.errors import CogfsError, from_os_error, invalid, show
from cogfs.fsd.control.mounts import MountEntry, is_within
from cogfs.fsd.control.places import Places
from cogfs.store.schema import WorkspaceRow
from cogfs.v1.reasons import Reason

#: Filesystems that hold no files of anybody.
_PSEUDO = frozenset(
    {
        "proc",
        "sysfs",
        "cgroup",
        "cgroup2",
        "devpts",
        "securityfs",
        "debugfs",
        "tracefs",
        "pstore",
        "bpf",
        "configfs",
        "fusectl",
        "mqueue",
        "binfmt_misc",
        "efivarfs",
        "autofs",
        "nsfs",
    }
)
_PATH_MAX = 4095
#: What ends a sentence that says why FUSE cannot be used.
OFFER = "; without FUSE, cogfsctl mount --scan keeps the directory by looking at all files at each checkpoint"


def absolute(path: bytes, what: str) -> bytes:
    """``path`` without ``.``, ``..`` and doubled slashes. No look at the disk."""
    if not path:
        raise invalid(f"{what} is empty: give an absolute path")
    if b"\0" in path or len(path) > _PATH_MAX:
        raise invalid(f"{what} is no path: it holds a zero byte or is longer than {_PATH_MAX} bytes")
    if not path.startswith(b"/"):
        raise invalid(f"{what} must be an absolute path, not {show(path)!r}")
    normal = os.path.normpath(path)
    return normal.replace(b"//", b"/", 1) if normal.startswith(b"//") else normal


def places_of(row: WorkspaceRow) -> tuple[bytes, ...]:
    """Where its files are seen."""
    apart = row.mount_wanted and row.mountpoint not in (b"", row.root)
    return (row.root, row.mountpoint) if apart else (row.root,)


def find(path: bytes, rows: Iterable[WorkspaceRow]) -> WorkspaceRow | None:
    """The workspace that holds ``path`` in its root or where it is mounted."""
    best: WorkspaceRow | None = None
    longest = -1
    for row in rows:
        for place in places_of(row):
            if is_within(path, place) and len(place) > longest:
                best, longest = row, len(place)
    return best


def canonical(path: bytes, table: Sequence[MountEntry]) -> bytes:
    """An existing directory's path without symlinks. Looks at nothing inside a mount of cogfs."""
    check_no_cogfs(path, table)
    try:
        real = os.path.realpath(path, strict=True)
    except FileNotFoundError:
        raise invalid(f"{show(path)} does not exist: make the directory first") from None
    except NotADirectoryError:
        raise invalid(f"{show(path)} is not a directory") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise invalid(f"{show(path)} is a loop of symbolic links") from error
        raise from_os_error(error, f"look up {show(path)}") from error
    check_no_cogfs(real, table)
    return real


def check_new_root(
    root: bytes,
    rows: Sequence[WorkspaceRow],
    places: Places,
    table: Sequence[MountEntry],
    *,
    force: bool,
    missing: bool = False,
) -> None:
    """``root``, which is canonical, may become a workspace, or one sentence says why not. ``missing``: it is to be made
    in a directory that is there."""
    for row in rows:
        if row.root == root:
            raise CogfsError(
                Reason.ALREADY_EXISTS, f"{show(root)} is registered already, as {row.id}", workspace_id=row.id
            )
    check_directory(os.path.dirname(root) if missing else root)
    if not force:
        _refuse_too_much(root)
    for row in rows:
        for place in places_of(row):
            if is_within(root, place):
                raise invalid(f"{show(root)} lies in the workspace at {show(place)}: use that one")
            if is_within(place, root):
                raise invalid(f"{show(root)} holds the workspace at {show(place)}: delete that one first")
    for own in _own(places):
        if is_within(own, root):
            raise invalid(f"{show(root)} holds {show(own)}, where cogfs keeps its own files: move one of them")
        if is_within(root, own):
            raise invalid(
                f"{show(root)} lies in {show(own)}, where cogfs keeps its own files: choose another directory"
            )
    for entry in table:
        if entry.fstype == mounts.FSTYPE and is_within(entry.mountpoint, root):
            raise invalid(f"{show(root)} holds a mount of cogfs at {show(entry.mountpoint)}: unmount that one first")


def check_no_cogfs(path: bytes, table: Sequence[MountEntry]) -> None:
    """``path`` is not in a mount of cogfs, as far as its name tells."""
    for entry in table:
        if entry.fstype == mounts.FSTYPE and is_within(path, entry.mountpoint):
            raise invalid(
                f"{show(path)} is in a mount of cogfs, at {show(entry.mountpoint)}: unmount that one, "
                "or choose a directory outside of it"
            )


def check_directory(root: bytes) -> None:
    """``root`` is a directory that the daemon can read, on a filesystem that can hold a workspace."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise invalid(f"{show(root)} does not exist: make the directory first") from None
    except NotADirectoryError:
        raise invalid(f"{show(root)} is not a directory") from None
    except PermissionError:
        raise CogfsError(
            Reason.DENIED, f"{show(root)} cannot be read by user {os.geteuid()}, as whom cogfsd runs"
        ) from None
    except OSError as error:
        raise from_os_error(error, f"open {show(root)}") from error
    try:
        os.statvfs(descriptor)
        # Reading is one permission, reaching what is listed another.
        if not os.access(".", os.X_OK, dir_fd=descriptor):
            raise CogfsError(Reason.DENIED, f"{show(root)} cannot be searched by user {os.geteuid()}")
    except OSError as error:
        raise from_os_error(error, f"use the filesystem of {show(root)}") from error
    finally:
        os.close(descriptor)
    entry = mounts.covering(root, mounts.table())
    if entry is not None and entry.fstype in _PSEUDO:
        raise invalid(f"{show(root)} is on {entry.fstype}, which holds no files that could be kept")


def check_mountpoint(
    at: bytes, root: bytes, rows: Sequence[WorkspaceRow], places: Places, table: Sequence[MountEntry]
) -> bytes:
    """The canonical path of a mountpoint apart from the root: an empty directory, or a name free in one that exists."""
    check_no_cogfs(at, table)
    parent, name = os.path.split(at)
    missing = False
    try:
        os.lstat(at)
    except FileNotFoundError:
        missing = True
    except OSError as error:
        raise from_os_error(error, f"look up the mountpoint {show(at)}") from error
    place = os.path.join(canonical(parent, table), name) if missing else canonical(at, table)
    if is_within(place, root):
        raise invalid(f"the mountpoint {show(place)} lies in the workspace's own root: choose one outside of it")
    if is_within(root, place):
        raise invalid(f"the mountpoint {show(place)} holds the workspace's root: choose one beside it")
    for row in rows:
        if is_within(place, row.root) and row.root != root:
            raise invalid(f"the mountpoint {show(place)} lies in the workspace at {show(row.root)}")
    for own in _own(places):
        if is_within(place, own) or is_within(own, place):
            raise invalid(f"the mountpoint {show(place)} meets {show(own)}, where cogfs keeps its own files")
    if mounts.top_at(place, list(table)) is not None:
        raise invalid(f"something is mounted at {show(place)} already: choose another mountpoint")
    if missing:
        return place
    try:
        with os.scandir(place) as entries:
            if next(entries, None) is not None:
                raise invalid(f"the mountpoint {show(place)} is not empty: choose an empty directory")
    except NotADirectoryError:
        raise invalid(f"the mountpoint {show(place)} is not a directory") from None
    except OSError as error:
        raise from_os_error(error, f"read the mountpoint {show(place)}") from error
    return place


def check_fuse() -> None:
    """FUSE can be used here. UNAVAILABLE with what to do otherwise."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        raise CogfsError(
            Reason.UNAVAILABLE,
            "there is no /dev/fuse: load the kernel's fuse module (modprobe fuse), or give the container that device"
            + OFFER,
        ) from None
    except PermissionError:
        raise CogfsError(
            Reason.UNAVAILABLE,
            f"user {os.geteuid()} may not open /dev/fuse: give that user read and write permission on it, "
            "or allow the container that device" + OFFER,
        ) from None
    except OSError as error:
        raise CogfsError(
            Reason.UNAVAILABLE,
            f"/dev/fuse cannot be opened ({error.strerror}): load the kernel's fuse module (modprobe fuse)" + OFFER,
        ) from error
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise CogfsError(
            Reason.UNAVAILABLE,
            "the program fusermount3 is missing: install the package fuse3 (apt install fuse3)" + OFFER,
        )


def _own(places: Places) -> set[bytes]:
    return {os.path.realpath(os.fsencode(path)) for path in (places.state, places.runtime, places.store)}


def _refuse_too_much(root: bytes) -> None:
    hint = "say --force-root (force_root in the API) if that is meant"
    if root == b"/":
        raise invalid(f"/ is the root of the filesystem and not a project: {hint}")
    known = {os.path.normpath(os.fsencode(user.pw_dir)) for user in pwd.getpwall() if user.pw_dir.startswith("/")}
    for home in known:
        if root != home and is_within(home, root) and os.path.isdir(home):
            raise invalid(f"{show(root)} holds the home directory {show(home)} and is not a project: {hint}")
    for home in {*known, os.environb.get(b"HOME", b"")}:
        if home.startswith(b"/") and root in (os.path.normpath(home), os.path.realpath(home)):
            raise invalid(f"{show(root)} is a home directory and not a project: {hint}")
