"""Starting and ending a mount worker."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback

import pyfuse3
import trio

from cogfs.fsd.mount import syscalls
from cogfs.fsd.mount.channel_server import ChannelServer, Workspace, listen
from cogfs.fsd.mount.closer import Closer
from cogfs.fsd.mount.counters import Counters
from cogfs.fsd.mount.dirty import DirtyTable
from cogfs.fsd.mount.gate import Gate
from cogfs.fsd.mount.handles import HandleTable
from cogfs.fsd.mount.identity import Identity
from cogfs.fsd.mount.invalidate import Invalidator
from cogfs.fsd.mount.loop import BurstLoop, supported
from cogfs.fsd.mount.nodes import NodeTable
from cogfs.fsd.mount.operations import Operations
from cogfs.fsd.mount.preserver import AT_ONCE, LOG_LIMIT, Preserver
from cogfs.fsd.mount.tree import Tree

log = logging.getLogger(__name__)

#: Of the open files that the system allows, this part is for directories; pins of removed nodes may take as much.
_DIRECTORY_SHARE = 5
_MAX_DIRECTORIES = 4096

#: Requests that may wait at the same time (for a freeze, a sync) while others go on.
_MAX_TASKS = 4096

#: Seconds between two looks at whether the mount has ended, and from then to the end of calls that still wait.
_END_SECONDS = 2.0


class StartError(Exception):
    """The worker cannot start; ``number`` is an errno."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "event": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(fields)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cogfs.fsd.mount", description="Serves one mounted workspace.")
    parser.add_argument("--workspace-id", required=True)
    parser.add_argument("--root", required=True, help="the backing directory")
    parser.add_argument("--mountpoint", required=True, help="where it is mounted; may be the backing directory itself")
    parser.add_argument("--socket", required=True, help="where the control process connects")
    parser.add_argument("--ready-fd", required=True, type=int, help="gets one JSON line when the mount serves")
    parser.add_argument("--allow-other", action="store_true", help="other users may use the mount")
    parser.add_argument(
        "--exclude-name", action="append", default=[], help="do not note changes below such directories"
    )
    parser.add_argument("--undo-log", help="where unsealed boundaries are preserved; without it there are none")
    parser.add_argument(
        "--content-at-once",
        type=int,
        default=AT_ONCE,
        help="bytes of a file that one call writes to the undo log; -1: none, the control process captures all files",
    )
    parser.add_argument("--log-limit", type=int, default=LOG_LIMIT, help="bytes after which the log takes no content")
    parser.add_argument("--generation", type=int, default=1, help="number of the first generation, above all earlier")
    parser.add_argument(
        "--boundary", action="append", type=int, default=[], help="left unsealed by an earlier worker; may be repeated"
    )
    parser.add_argument("--stock-loop", action="store_true", help="use pyfuse3's own session loop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a worker until its mount ends; the exit code."""
    options = parse(arguments)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.raiseExceptions = False  # a log that cannot be written must not end the mount
    # SIGTERM too, until the session serves and after it: it must not leave a dead mount.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0)
    # Large tables live as long as the mount: a full collection would walk them for nothing, while requests wait.
    gc.set_threshold(100_000, 50, 1000)
    try:
        worker = Worker(options)
    except (StartError, OSError) as error:
        # The burst loop's, whose signal would end the process as soon as its handler is gone.
        signal.setitimer(signal.ITIMER_REAL, 0)
        number = error.number if isinstance(error, StartError) else error.errno or errno.EIO
        log.error("cannot mount: %s", error)
        _ready(options.ready_fd, {"ok": False, "errno": number, "message": str(error)})
        return 1
    return worker.run()


def _ready(fd: int, message: dict[str, object]) -> None:
    try:
        os.write(fd, json.dumps(message).encode() + b"\n")
        os.close(fd)
    except OSError as error:
        log.warning("nobody waits for the worker: %s", error)


class Worker:
    """One mount, made by the constructor and served by ``run``."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.generation <= max([0, *options.boundary]) or (options.boundary and options.undo_log is None):
            raise StartError(errno.EINVAL, "boundaries need an undo log, and numbers below the first generation's")
        limit = _raise_descriptor_limit()
        self._options = options
        root_fd = _open_root(options.root, os.O_PATH)
        shared_fd = _open_root(options.root, os.O_RDONLY)
        self._closer = Closer()
        nodes = NodeTable(root_fd, min(_MAX_DIRECTORIES, max(limit // _DIRECTORY_SHARE, 16)), self._closer)
        dirty = DirtyTable(nodes, {os.fsencode(name) for name in options.exclude_name}, options.generation)
        self._loop = None if options.stock_loop else _burst_loop()
        self._invalidator = Invalidator()
        tree = Tree(nodes, HandleTable(self._closer), dirty, Identity())
        gate = Gate() if self._loop is None else Gate(self._loop.outside)
        preserver = Preserver(
            tree, gate, options.undo_log, options.boundary, options.content_at_once, options.log_limit
        )
        self._operations = Operations(tree, gate, preserver, Counters(), self._invalidator, self._loop)
        _mount(self._operations, options)
        try:
            self._listener = listen(options.socket)
            self._socket_inode = os.lstat(options.socket).st_ino
            mountpoint = os.fsencode(os.path.abspath(options.mountpoint))
            workspace = Workspace(
                options.workspace_id,
                os.fsencode(os.path.abspath(options.root)),
                mountpoint,
                _device_of_mount(mountpoint),
                shared_fd,
            )
        except BaseException:
            pyfuse3.close(unmount=True)
            raise
        self._channel = ChannelServer(self._listener, workspace, self._operations, self._loop)

    def run(self) -> int:
        """Serve until the mount ends."""
        code = 0
        try:
            trio.run(self._serve)
        except BaseException:
            log.exception("the session ended by an error")
            code = 1
        try:
            pyfuse3.close(unmount=code != 0)
        finally:
            if self._loop is not None:
                self._loop.uninstall()
            self._invalidator.close()
            self._closer.stop()
            self._remove_socket()
        log.info("the mount has ended")
        return code

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._channel.serve)
            # Before anybody is told that there is a worker, whom they might end.
            await nursery.start(self._terminate_on_signal)
            nursery.start_soon(self._tell_ready)
            nursery.start_soon(_end_of_mount, nursery.cancel_scope)
            await pyfuse3.main(min_tasks=1, max_tasks=_MAX_TASKS)
            nursery.cancel_scope.cancel()

    async def _tell_ready(self) -> None:
        log.info("mounted %s on %s", self._options.root, self._options.mountpoint)
        _ready(self._options.ready_fd, {"ok": True, "pid": os.getpid()})

    async def _terminate_on_signal(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """SIGTERM unmounts; the end of the session follows. A mount in use stays."""
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                try:
                    await trio.to_thread.run_sync(_unmount, os.path.abspath(self._options.mountpoint))
                except OSError as error:
                    log.warning("not unmounted: %s", error)

    def _remove_socket(self) -> None:
        self._listener.close()
        try:
            if os.lstat(self._options.socket).st_ino == self._socket_inode:
                os.unlink(self._options.socket)
        except FileNotFoundError:
            pass


def _raise_descriptor_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def _open_root(root: str, flags: int) -> int:
    try:
        return os.open(root, flags | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(error.errno or errno.EIO, f"{root}: {error.strerror}") from error


def _burst_loop() -> BurstLoop | None:
    if not supported():
        log.warning("this pyfuse3 is not the one the burst loop knows: its own loop is used")
        return None
    loop = BurstLoop()
    loop.install()
    return loop


def _mount(operations: Operations, options: argparse.Namespace) -> None:
    """Mount. libfuse says why it failed on the standard error only, so that is caught for the message."""
    try:
        os.stat("/dev/fuse")  # whether it may be opened is seen by mounting: fusermount3 has rights of its own
    except OSError as error:
        raise StartError(error.errno or errno.EIO, f"/dev/fuse: {error.strerror}") from error
    try:
        if not os.path.isdir(options.mountpoint):
            raise StartError(errno.ENOTDIR, f"{options.mountpoint}: not a directory")
    except ValueError as error:
        raise StartError(errno.EINVAL, f"{options.mountpoint!r}: {error}") from error
    arguments = {f"fsname=cogfs:{options.workspace_id}", "subtype=cogfs", "default_permissions"}
    if options.allow_other:
        arguments.add("allow_other")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            pyfuse3.init(operations, options.mountpoint, arguments)
            failed = False
        except RuntimeError:
            failed = True
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        text = said.read().decode("utf-8", "backslashreplace").strip()
    if failed:
        raise StartError(_errno_of(text), text or "libfuse could not mount")
    if text:
        log.warning("libfuse: %s", text)


def _errno_of(text: str) -> int:
    """libfuse ends its messages with the text of the errno."""
    for number in (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.EBUSY, errno.EINVAL):
        if os.strerror(number) in text:
            return number
    return errno.EIO


def _device_of_mount(mountpoint: bytes) -> int:
    """``st_dev`` of the mount, from the mount table: to ask the mount itself would wait for this process."""
    device = 0
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split(b" ")
            if fields[4].decode("unicode_escape").encode("latin-1") == mountpoint:
                major, minor = fields[2].split(b":")
                device = os.makedev(int(major), int(minor))
    if not device:
        raise OSError(errno.EIO, "the mount is not in the mount table", os.fsdecode(mountpoint))
    return device


async def _end_of_mount(scope: trio.CancelScope) -> None:
    """Cancel what is left some time after the kernel has ended the mount: calls that wait for a control process, which
    may never come, and whose callers have had their answer."""
    poll = select.poll()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                poll.register(int(name), 0)  # errors are told in any case
    while not poll.poll(0):
        await trio.sleep(_END_SECONDS)
    await trio.sleep(_END_SECONDS)
    log.warning("the mount was ended while calls were under way")
    scope.cancel()


def _unmount(mountpoint: str) -> None:
    if os.geteuid() == 0:
        syscalls.umount(os.fsencode(mountpoint))
        return
    done = subprocess.run(["fusermount3", "-u", "--", mountpoint], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(errno.EBUSY, done.stderr.strip())
