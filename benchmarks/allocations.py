"""What the model's thread allocates for a step of Python memory: while the step is open, and behind it.

Forward steps of a small OLMoE, not instrumented, instrumented and sampled out, and recorded. tracemalloc
runs from before the warm-up on, so that what is preallocated once counts once. Before each measured step
the drain thread has finished with all steps before it, and while the step is open it has nothing to do:
what is counted is the hot path and the model itself.

Held: bytes after the forward, before the step ends, more than when it began. Peak: the most on the way.
Both less the same of the model alone. Kept: bytes more after 50 further steps, drained, per step.

    python benchmarks/allocations.py [--steps 50] [--layers 8] [--write]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from results import write_section
from step_cost import make_model

import moetrace

WARM_UP_STEPS = 60
SAMPLES = {"not instrumented": None, "sampled out": "1/1000000000", "recorded": "1/1"}


class Nowhere:
    """Takes every record and keeps none."""

    name = "nowhere"

    def __init__(self) -> None:
        self.taken = 0

    def emit(self, record: Any) -> None:
        """Count it."""
        self.taken += 1

    def close(self, deadline_monotonic_s: float) -> bool:
        """Nothing is queued."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes; medians over steps."""

    held: float
    peak: float
    kept_per_step: float


def measure(model: Any, tokens: torch.Tensor, sample: str | None, steps: int) -> Allocated:
    """One condition."""
    emitter = Nowhere()
    tracer = None
    tracemalloc.start()
    if sample is not None:
        tracer = moetrace.init(
            run_id="allocations", endpoint="", sample=sample, emitters=[emitter], forward_mode="prefill"
        )
        moetrace.instrument(model)

    def drained() -> int:
        while tracer is not None and (
            emitter.taken + tracer.metrics.dropped.total() < tracer.metrics.steps_sampled
        ):
            time.sleep(0.001)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def one_step() -> tuple[int, int]:
        with moetrace.step():
            begin = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            model(input_ids=tokens, use_cache=False)
            end, peak = tracemalloc.get_traced_memory()
        return end - begin, peak - begin

    held, peaks = [], []
    gc.disable()
    try:
        for _ in range(WARM_UP_STEPS):
            one_step()
            drained()
        before = drained()
        for _ in range(steps):
            more, peak = one_step()
            held.append(more)
            peaks.append(peak)
            drained()
        after = drained()
    finally:
        gc.enable()
        tracemalloc.stop()
        if tracer is not None:
            moetrace.shutdown(timeout_s=1)
    # The lists of results are no part of it: some 36 bytes a number.
    own = 2 * steps * 36
    return Allocated(
        held=statistics.median(held),
        peak=statistics.median(peaks),
        kept_per_step=max(0, after - before - own) / steps,
    )


def main() -> None:
    """Measure the conditions, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model(options.layers, 32, 128)
    tokens = torch.randint(2, 2048, (4, 96))
    with torch.no_grad():
        found = {name: measure(model, tokens, sample, options.steps) for name, sample in SAMPLES.items()}
    alone = found["not instrumented"]
    lines = [
        f"`python benchmarks/allocations.py --steps {options.steps} --layers {options.layers}`: forward "
        f"steps of an OLMoE of {options.layers} MoE layers, traced by tracemalloc; less what the model "
        f"alone does ({alone.held:,.0f} bytes held, {alone.peak:,.0f} at the peak). "
        "Tensors' data is not Python memory.",
        "",
        "| condition | bytes held while the step is open | peak bytes | bytes kept per step |",
        "|---|---|---|---|",
    ]
    for name, allocated in found.items():
        lines.append(
            f"| {name} | {allocated.held - alone.held:,.0f} | {allocated.peak - alone.peak:,.0f} "
            f"| {allocated.kept_per_step:,.0f} |"
        )
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_section("allocations", "Python memory of the hot path", text)


if __name__ == "__main__":
    main()
