"""A million steps of hand-written code: memory and objects behind each tenth of them.

Steps wait for the drain thread where it falls behind, so that what was sampled was recorded, and not dropped.

    python benchmarks/growth.py [--steps 1000000] [--sample 1/10] [--write]

Exit code 1 where memory or objects grew.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable

from results import write_section

import moetrace
from moetrace.record.types import StepRecord

PARTS = 10
ALLOWED_OBJECTS = 500
ALLOWED_KIB = 4096


class Nowhere:
    """Takes every record and keeps none."""

    name = "nowhere"

    def __init__(self) -> None:
        self.taken = 0

    def emit(self, record: StepRecord) -> None:
        """Count it."""
        self.taken += 1

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
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    emitter = Nowhere()
    tracer = moetrace.init(run_id="growth", endpoint="", sample=arguments.sample, emitters=[emitter])
    run, metrics, waiting = one_step(), tracer.metrics, tracer.config.buffers // 2
    seen = []
    lines = [
        f"`python benchmarks/growth.py --steps {arguments.steps} --sample {arguments.sample}`",
        "",
        "| steps | recorded | objects | peak RSS, KiB |",
        "|---|---|---|---|",
    ]
    for part in range(PARTS):
        for _ in range(arguments.steps // PARTS):
            run()
            while metrics.steps_sampled - metrics.dropped.total() - emitter.taken > waiting:
                time.sleep(0.0001)
        gc.collect()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen.append((len(gc.get_objects()), peak))
        lines.append(
            f"| {(part + 1) * arguments.steps // PARTS:,} | {emitter.taken:,} | {seen[-1][0]:,} | {peak:,} |"
        )
    moetrace.shutdown()
    (objects, peak), (last_objects, last_peak) = seen[1], seen[-1]
    grew = last_objects - objects > ALLOWED_OBJECTS or last_peak - peak > ALLOWED_KIB
    lines += [
        "",
        f"{metrics.dropped.total():,} of {metrics.steps_sampled:,} sampled steps dropped, faults "
        f"{tracer.guard.errors or 'none'}; from the second tenth on it {'grew' if grew else 'did not grow'}.",
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        write_section("growth", "A million steps", text)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
