"""The command line of ``cogfsd``, and its exit code.

Must not know which engine and services the daemon is made of: ``main`` puts them in.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cogfs.fsd.control import logs, places, settings
from cogfs.fsd.control.daemon import AlreadyRunning, run
from cogfs.fsd.control.faults import as_cogfs_error
from cogfs.fsd.control.newplace import NewPlaces
from cogfs.fsd.control.ports import EngineT
from cogfs.fsd.control.server import Registration
from cogfs.store.store import Store

_EPILOG = """\
A daemon that stops takes its mounts away and brings them back when it starts again. With --leave-mounts they stay, and
programs that work in them notice nothing of a restart.

It keeps its files in COGFS_STATE_DIR and its sockets in COGFS_RUNTIME_DIR, and is set up by COGFS_CONFIG.

example: cogfsd --leave-mounts
"""


def execute(
    arguments: Sequence[str] | None,
    make_engine: Callable[[Store, places.Places, settings.Settings], EngineT],
    more_services: Callable[[Store, EngineT, NewPlaces], Sequence[Registration]],
) -> int:
    """Serve until told to stop.

    The exit code: 0 after an orderly stop and when a daemon runs already, else that of the reason.
    """
    options = _parser().parse_args(arguments)
    logs.configure(options.log_level or logs.USUAL)
    try:
        found = settings.load(os.environ, os.geteuid())
        logs.configure(options.log_level or found.log_level)
        where = places.find(os.environ, os.geteuid())
        run(where, found, make_engine, more_services, leave_mounts=options.leave_mounts)
    except AlreadyRunning as error:
        print(error, file=sys.stderr)
        return 0
    except Exception as error:
        fault = as_cogfs_error(error, "run cogfsd")
        print(f"cogfsd: {fault}", file=sys.stderr)
        return fault.reason.exit_code
    return 0


def leave(exit_code: int) -> NoReturn:
    """End the process now: a thread that a dead disk or a mount has caught must not keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cogfsd",
        description="The daemon of cogfs: mounts projects, keeps their history, serves the API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--leave-mounts", action="store_true", help="on SIGTERM leave the mounts to the next daemon")
    parser.add_argument("--log-level", choices=logs.LEVELS, help="log this and worse (log.level, else info)")
    parser.add_argument("--version", action="version", version=f"cogfsd {importlib.metadata.version('cogfs')}")
    return parser
