"""Restores that are raced by somebody who would lead them out of their root: ``--tries N --minutes M --seed S``.

Half of the tries in a mounted project, half in a scanned one. What counts as a try, and what is looked at outside after
each few restores: ``tests/support/escape``.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback

from tests.e2e.support.site import site
from tests.support.escape import Escape


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.escape", description=__doc__)
    parser.add_argument("--tries", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after the restores in which they are over")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", choices=("mounted", "scanned"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    ways = [arguments.only] if arguments.only else ["mounted", "scanned"]
    for way in ways:
        end = time.monotonic() + arguments.minutes * 60 / len(ways)
        with site() as here:
            escape = Escape(here, scanned=way == "scanned")
            try:
                escape.begin()
                for done, _ in enumerate(escape.rounds(seed, arguments.tries // len(ways))):
                    if done % 20 == 0:
                        print(f"{way}: {escape.tries} tries", flush=True)
                    if time.monotonic() > end:
                        break
            except BaseException:
                traceback.print_exc()
                print(here.log_tail())
                return 1
            finally:
                escape.clear()
                print(f"{way}: {escape.tries} tries; restores: {dict(escape.outcomes)}; tricks: {dict(escape.tricks)}")
    print("nothing outside was touched")
    return 0


if __name__ == "__main__":
    sys.exit(main())
