"""The directory of a store: made for its owner only, locked by one process, of a known format, on a local disk."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import sys
from pathlib import Path

from cogfs.store.errors import Locked, NetworkFilesystem, Unsafe, UnsupportedFormat, of_system, translated
from cogfs.store.files import sync_directory
from cogfs.store.schema import FORMAT_VERSION
from cogfs.store.steps import step

LOCK = "lock"
FORMAT = "format"
INDEX = "index"
PACKS = "packs"
_TEMPORARY = ".new"
_FORMAT_WORDS = "cogfs store "

#: Filesystems (``f_type`` of statfs) where LMDB's locks and maps, or this store itself, cannot live.
_REFUSED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x00C36400: "Ceph",
    0x01021997: "9P",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x20030528: "OrangeFS",
    0x564C: "NCP",
    0x65735546: "FUSE",
}


class Place:
    """The directory at ``path``, made if need be, checked, and locked until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The format that the store says it has.
        self.version = FORMAT_VERSION
        with translated(f"opening {path}"):
            self._make(path)
            self._lock = self._take_lock()
            try:
                for name in (INDEX, PACKS):
                    _make_directory(path / name)
                self._remove_temporary()
                self._check_format()
            except BaseException:
                os.close(self._lock)
                raise

    @property
    def index(self) -> Path:
        """Where LMDB's files are."""
        return self.path / INDEX

    @property
    def packs(self) -> Path:
        """Where the packs are."""
        return self.path / PACKS

    def room(self) -> int:
        """Bytes that are left on the disk. StoreIO."""
        with translated("looking how much room there is"):
            place = os.statvfs(self.path)
        return place.f_bavail * place.f_frsize

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock)

    def _make(self, path: Path) -> None:
        step("store.create")
        missing: list[Path] = []
        parent = path
        while not os.path.lexists(parent):
            missing.append(parent)
            parent = parent.parent
        if missing:
            # Before anything is made on a filesystem that will be refused.
            _check_filesystem(parent)
        for directory in reversed(missing):
            _make_directory(directory)
            _sync_names_in(directory.parent)
        _make_directory(path)
        _check_filesystem(path)

    def _take_lock(self) -> int:
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise Locked(f"the store {self.path} is open in another process; stop that one first") from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _remove_temporary(self) -> None:
        try:
            os.unlink(self.path / (FORMAT + _TEMPORARY))
        except FileNotFoundError:
            pass

    def _check_format(self) -> None:
        path = self.path / FORMAT
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._write_format(path)
            return
        with open(fd, "rb") as file:
            text = file.read(100).decode(errors="replace").strip()
        version = text.removeprefix(_FORMAT_WORDS)
        if not text.startswith(_FORMAT_WORDS) or not version.isdecimal():
            raise UnsupportedFormat(f"{path} does not say which format the store has")
        check_version(int(version), str(self.path))
        self.version = int(version)

    def upgrade(self) -> None:
        """Says that the store has the newest format. NoSpace and StoreIO leave it as it was."""
        with translated(f"bringing {self.path} to a new format"):
            step("store.upgrade")
            self._remove_temporary()
            self._write_format(self.path / FORMAT)
        self.version = FORMAT_VERSION

    def _write_format(self, path: Path) -> None:
        temporary = path.with_name(FORMAT + _TEMPORARY)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)
            file.write(f"{_FORMAT_WORDS}{FORMAT_VERSION}\n".encode())
            file.flush()
            os.fsync(fd)
        step("store.format")
        os.rename(temporary, path)
        sync_directory(self.path)
        _sync_names_in(self.path.parent)


def check_version(version: int, what: str) -> None:
    """UnsupportedFormat unless stores of this format can be used: none of a newer one."""
    if not 1 <= version <= FORMAT_VERSION:
        raise UnsupportedFormat(
            f"the store {what} has format {version}, and this version of cogfs knows formats up to"
            f" {FORMAT_VERSION} only; use the version that wrote it, or a newer one"
        )


def _make_directory(path: Path) -> None:
    """A directory of this user that nobody else can enter; Unsafe when something else is there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise Unsafe(f"{path} is a symlink; the store must be at a place of its own")
    if not stat.S_ISDIR(status.st_mode):
        raise Unsafe(f"{path} is not a directory; the store needs one of its own")
    if status.st_uid != os.geteuid():
        raise Unsafe(f"{path} belongs to another user; the store must be the user's own")
    if stat.S_IMODE(status.st_mode) != 0o700:
        # By a descriptor, so that no symlink is followed, of the sort that needs no permission: the umask may have
        # taken all.
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        finally:
            os.close(fd)


def _sync_names_in(parent: Path) -> None:
    """Makes the names in ``parent`` durable, unless it is a directory of another user that cannot be opened."""
    try:
        sync_directory(parent)
    except PermissionError:
        pass


def filesystem_type(path: Path) -> int:
    """``f_type`` of the filesystem that ``path`` is on."""
    # No field of it is needed but the first, which is one word; 1 KiB is more than any libc fills in.
    buffer = ctypes.create_string_buffer(1024)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(ctypes.c_char_p(os.fsencode(path)), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def _check_filesystem(path: Path) -> None:
    try:
        name = _REFUSED.get(filesystem_type(path))
    except OSError as error:
        raise of_system(error, f"looking at the filesystem of {path}") from error
    if name is not None:
        raise NetworkFilesystem(f"{path} is on {name}, which cannot hold the store; choose a place on a local disk")
