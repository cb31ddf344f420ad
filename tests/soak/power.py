"""Loss of power at random moments, with random seeds, for as long as one likes: ``--cuts N``, ``--minutes M``.

The machine's disk is ext4 in a loop device, which is shut down, or copied at one moment while everything goes on.
``--control`` runs a daemon that never syncs anything (``sync``), or that believes the stat of a file after a loss of
power (``trust``), and has to find that something is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
import traceback

from tests.support import image, power

_PROGRAMS = {"sync": power.WITHOUT_SYNC, "trust": power.CREDULOUS}
_MARK = "COGFS_TEST_NAMESPACE"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.power", description=__doc__)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after the cut in which they are over")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--two", action="store_true", help="project and store on two filesystems")
    parser.add_argument("--control", choices=_PROGRAMS, help="a daemon that is wrong; succeeds when that is found out")
    arguments = parser.parse_args()
    if why := image.missing():
        parser.error(why)
    if _MARK not in os.environ:
        # The boot id is another one in this process and its children alone.
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.soak.power"]
        os.execvpe(command[0], [*command, *sys.argv[1:]], {**os.environ, _MARK: "1"})
    del os.environ[_MARK]
    image.let_go()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + arguments.minutes * 60
    try:
        counts = power.run(
            arguments.cuts,
            seed,
            two=arguments.two,
            program=_PROGRAMS[arguments.control] if arguments.control else power.PRODUCT,
            more=lambda: time.monotonic() < end,
            progress=lambda number: print(f"{number} cuts", flush=True) if number % 10 == 0 else None,
        )
    except power.Wrong as error:
        if arguments.control:
            print(f"found out: {str(error).splitlines()[0]}")
            return 0
        traceback.print_exc()
        return 1
    except AssertionError:
        traceback.print_exc()
        return 1
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    if arguments.control:
        print("nothing was found: the test finds nothing")
    return 1 if arguments.control else 0


if __name__ == "__main__":
    sys.exit(main())
