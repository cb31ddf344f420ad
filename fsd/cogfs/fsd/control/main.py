"""``cogfsd``: the daemon with its engine and all its services."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cogfs.fsd.control.command import execute
from cogfs.fsd.control.engine import Engine
from cogfs.fsd.control.server import Registration
from cogfs.store.store import Store


def main(arguments: Sequence[str] | None = None) -> int:
    return execute(arguments, Engine, _services)


def _services(store: Store, engine: Engine) -> Sequence[Registration]:
    """What is served besides the workspaces and the daemon itself."""
    return []


if __name__ == "__main__":
    sys.exit(main())
