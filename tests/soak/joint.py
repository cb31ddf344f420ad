"""Crashes in the middle of rewinds, restores, undos and forks, with random seeds, for as long as one likes:
``--runs N``, ``--minutes M``.

On ext4 in a loop device where that can be had (root), since it gives inode numbers away again at once. ``--control``
runs a daemon whose recovery forgets the conversation, and has to find that something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.e2e.support.site import Site
from tests.support import image
from tests.support.crashes import PRODUCT
from tests.support.joint import FILES_ALONE, Counts, Torn, rounds

_SIZE = 4 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.joint", description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after the run in which they are over")
    parser.add_argument("--seed", type=int, help="of the first round")
    parser.add_argument("--filesystem", choices=("ext4", "xfs", "none"), default="ext4", help="none: that of /tmp")
    parser.add_argument(
        "--control", action="store_true", help="a daemon that is wrong; succeeds when that is found out"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    counts = Counts()
    end = time.monotonic() + arguments.minutes * 60
    try:
        with contextlib.ExitStack() as stack:
            place = None
            if arguments.filesystem != "none" and not image.missing():
                place = stack.enter_context(image.filesystem(arguments.filesystem, _SIZE))
            site = Site(Path(tempfile.mkdtemp(prefix="cogfs-joint-", dir=place)))
            stack.callback(site.close)
            program = FILES_ALONE if arguments.control else PRODUCT
            for done in rounds(site, seed, counts, arguments.runs, lambda: time.monotonic() < end, program):
                if done % 10 == 0:
                    print(f"{done} runs", flush=True)
    except Torn as error:
        if arguments.control:
            print(f"found out: {str(error).splitlines()[0][:200]}")
            return 0
        traceback.print_exc()
        return 1
    finally:
        print(counts, flush=True)
    if arguments.control:
        print("nothing was found: the test finds nothing")
    return 1 if arguments.control else 0


if __name__ == "__main__":
    sys.exit(main())
