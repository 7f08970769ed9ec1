"""A simulated run in the embedded engine, for tests of loads: `python -m simulated_store STORE_PATH`.

8 ranks on two nodes, 3 MoE layers, 16 experts, top-2, prefill, 24 steps of which the first 4 are warm-up.
In every step experts 0 and 1, both on rank 0, are four times as popular as the others; experts' time is 60 ns
per row, and links are 150 and 25 bytes per ns.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.model import CoactivationColumns, JoinedStep
from moetrace_collectors.simulate import Noise, SimulatedRun, simulate
from moetrace_schemas.enums import ForwardMode

POPULARITY = np.array([4.0, 4.0] + [1.0] * 14)
RUN = SimulatedRun(
    run_id="simulated",
    num_ranks=8,
    ranks_per_node=4,
    num_layers=3,
    num_experts=16,
    top_k=2,
    num_tokens=512,
    num_steps=24,
    warmup_steps=4,
    forward_mode=ForwardMode.PREFILL,
    popularity=np.tile(POPULARITY, (1, 3, 1)),
    noise=Noise(spread=0.01),
)


def with_pairs(joined: JoinedStep) -> JoinedStep:
    """The step with co-activation on rank 0: experts 0 and 1 share ten tokens, 1 and 9 share five, per layer.

    Layers have their turn one at a time, as ranks sample them; across layers, 0 is followed by 2.
    """
    layer = joined.step % RUN.num_layers
    pairs = [(layer, 0, 0, 1, 10), (layer, 0, 1, 9, 5)]
    if layer + 1 < RUN.num_layers:
        pairs.append((layer, 1, 0, 2, 3))
    columns = CoactivationColumns(
        **dict(zip(("layer", "span", "first", "second", "count"), np.array(pairs).T, strict=True))
    )
    first, *others = joined.rank_steps
    return replace(joined, rank_steps=(replace(first, coactivation=columns), *others))


def main(path: str) -> None:
    """Migrate the store at `path` and fill it."""
    from moetrace_collectors.sinks.base import StepResult
    from moetrace_collectors.summary import layer_loads
    from moetrace_collectors.verdict.engine import VerdictEngine
    from store_sink import sink_into

    sink = sink_into(Path(path))
    engine = VerdictEngine()
    for simulated in simulate(RUN):
        joined = with_pairs(simulated.joined)
        sink.take_step(StepResult(joined=joined, verdict=engine.judge(joined), loads=layer_loads(joined)))
    sink.flush()
    sink.close()


if __name__ == "__main__":
    main(sys.argv[1])
