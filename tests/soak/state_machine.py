"""The state machines of the tests with random seeds, for as long as one likes: ``--minutes N``.

Files against a plain directory, and threads with all that belongs to them against a plain model, in turns.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import traceback
from collections import Counter

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.state_machine import Machine, Session
from tests.support.talk_machine import TalkMachine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.state_machine", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="one round, with this seed")
    parser.add_argument("--examples", type=int, default=15, help="runs of the machine in a round")
    parser.add_argument("--steps", type=int, default=40, help="steps in a run")
    parser.add_argument("--machine", choices=("files", "threads"), help="that one alone")
    parser.add_argument("--scanned", action="store_true", help="files without a mount")
    parser.add_argument("--no-shrink", action="store_true", help="show the first failure as it is")
    arguments = parser.parse_args()
    # So that a daemon and its mounts end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Machine.scanned = arguments.scanned
    machines: dict[str, type[Machine | TalkMachine]] = {"files": Machine, "threads": TalkMachine}
    chosen = [arguments.machine] if arguments.machine else list(machines)
    end = time.monotonic() + arguments.minutes * 60
    rounds = failures = 0
    counts: Counter[str] = Counter()
    while True:
        number = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
        for name in chosen:
            print(f"seed {number}, {name}", flush=True)
            shrink = not arguments.no_shrink
            done = _round(machines[name], number, arguments.examples, arguments.steps, counts, shrink=shrink)
            rounds += 1
            failures += not done
            if not done:
                print(f"again: --seed {number} --machine {name}", flush=True)
        if arguments.seed is not None or time.monotonic() >= end:
            break
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count}")
    print(f"{rounds} rounds, {failures} failed")
    return 1 if failures else 0


def _round(
    machine: type[Machine | TalkMachine], number: int, examples: int, steps: int, counts: Counter[str], *, shrink: bool
) -> bool:
    session = Session()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    class Seeded(machine):  # type: ignore[misc, valid-type]
        pass

    Seeded.session = session
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
        return False
    finally:
        counts.update({"examples": session.runs}, **session.counts)
        session.close()
    return True


if __name__ == "__main__":
    sys.exit(main())
