"""A million steps of hand-written code: memory, objects and time of the first and of the last part of them.

    python benchmarks/growth.py [--steps 1000000] [--sample 1/10]

Exit code 1 where memory or objects grew.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable

import moetrace
from moetrace.record.types import StepRecord

PARTS = 10
ALLOWED_OBJECTS = 500
ALLOWED_KIB = 4096


class Nowhere:
    """Takes every record and keeps none."""

    name = "nowhere"

    def emit(self, record: StepRecord) -> None:
        """Forget it."""

    def close(self, deadline_monotonic_s: float) -> bool:
        """Nothing is queued."""
        return True


def one_step() -> Callable[[], None]:
    """A step with two layers of three phases each."""
    layers = [
        moetrace.wrap(router=_nothing, dispatch=_nothing, experts=_nothing, layer=layer) for layer in (0, 1)
    ]

    def run() -> None:
        with moetrace.step():
            for layer in layers:
                layer.router()
                layer.dispatch()
                layer.experts()

    return run


def _nothing() -> None:
    """A phase that costs nothing."""


def main() -> int:
    """Run, print one row per part, compare the second with the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--sample", default="1/10")
    arguments = parser.parse_args()
    tracer = moetrace.init(run_id="growth", endpoint="", sample=arguments.sample, emitters=[Nowhere()])
    run = one_step()
    seen = []
    print("| steps | objects | peak RSS, KiB | ns per step |\n|---|---|---|---|")
    for part in range(PARTS):
        start = time.perf_counter_ns()
        for _ in range(arguments.steps // PARTS):
            run()
        took = (time.perf_counter_ns() - start) * PARTS // arguments.steps
        gc.collect()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen.append((len(gc.get_objects()), peak))
        print(f"| {(part + 1) * arguments.steps // PARTS} | {seen[-1][0]} | {peak} | {took} |")
    metrics = tracer.metrics
    print(
        f"recorded {metrics.steps_sampled}, dropped {metrics.dropped.total()}, errors {tracer.guard.errors}"
    )
    moetrace.shutdown()
    (objects, peak), (last_objects, last_peak) = seen[1], seen[-1]
    grew = last_objects - objects > ALLOWED_OBJECTS or last_peak - peak > ALLOWED_KIB
    print("grew" if grew else "did not grow")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
