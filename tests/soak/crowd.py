"""Many clients at once, on the same threads and workspaces: ``--minutes M --clients N --seed S``.

Whenever some seconds are over all stand still, and what they did is held against what is there (``support/crowd``).
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback

from tests.e2e.support.site import site
from tests.support.crowd import Crowd


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.crowd", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=20.0, help="between two looks")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + arguments.minutes * 60
    with site() as here:
        crowd = Crowd(here, seed, arguments.clients)
        try:
            crowd.begin()
            rounds = 0
            while rounds == 0 or time.monotonic() < end:
                crowd.work(min(arguments.seconds, max(1.0, end - time.monotonic())), rounds)
                crowd.check()
                rounds += 1
        except BaseException:
            traceback.print_exc()
            print(here.log_tail())
            return 1
        finally:
            print(*crowd.report(), sep="\n", flush=True)
    print(f"{rounds} looks, nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
