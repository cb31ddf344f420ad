"""The state machine of the tests with random seeds, for as long as one likes: ``--minutes N``."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.state_machine import Machine, Session


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.state_machine", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="one round, with this seed")
    parser.add_argument("--examples", type=int, default=15, help="runs of the machine in a round")
    parser.add_argument("--steps", type=int, default=40, help="steps in a run")
    parser.add_argument("--scanned", action="store_true", help="without a mount")
    parser.add_argument("--no-shrink", action="store_true", help="show the first failure as it is")
    arguments = parser.parse_args()
    # So that a daemon and its mounts end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = time.monotonic() + arguments.minutes * 60
    rounds = failures = 0
    while True:
        number = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
        shrink = not arguments.no_shrink
        failures += not _round(number, arguments.examples, arguments.steps, shrink=shrink, scanned=arguments.scanned)
        rounds += 1
        if arguments.seed is not None or time.monotonic() >= end:
            break
    print(f"{rounds} rounds, {failures} failed")
    return 1 if failures else 0


def _round(number: int, examples: int, steps: int, *, shrink: bool, scanned: bool) -> bool:
    print(f"seed {number}", flush=True)
    session = Session()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    class Seeded(Machine):
        pass

    Seeded.session = session
    Seeded.scanned = scanned
    try:
        run_state_machine_as_test(
            Seeded,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                database=None,
                deadline=None,
                phases=phases,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Exception:
        traceback.print_exc()
        log = session.installation.state / "cogfsd.log"
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]))
        print(f"seed {number} failed", flush=True)
        return False
    finally:
        session.close()
    return True


if __name__ == "__main__":
    sys.exit(main())
