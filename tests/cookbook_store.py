"""A run in which every question of the cookbook has a known answer: `python -m cookbook_store STORE`.

8 ranks on two nodes, decode, 3 MoE layers, 16 experts of which expert 5 is hot and expert 15 dead. Rank 7 is
slow in `expert_gemm` of layer 1 in every step from 20 on. Placement epoch 2 begins with step 40; in both of
them experts lie in order. Rank 3 is missing from steps 50 to 52 and late in step 53. Each rank drops 4 pairs
of expert 5 per layer and step, which its dispatcher sends all the same. Exchange kernels wait 100 cycles for
each rank of each, and 900 more for rank 7.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.events import CollectorEvent, EventKind
from moetrace_collectors.model import ExpertCounts, RankStep, WaitCycles
from moetrace_collectors.simulate import Injection, Noise, SimulatedRun, simulate
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.summary import layer_loads
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.enums import COUNT_KIND_CODE, PHASE_CODE, Cause, ClosedBy, CountKind, ForwardMode, Phase
from store_sink import roll_up, sink_into

POPULARITY = np.array([1.0] * 5 + [4.0] + [1.0] * 9 + [0.0])
RUN = SimulatedRun(
    run_id="cookbook",
    num_ranks=8,
    ranks_per_node=4,
    num_layers=3,
    num_experts=16,
    num_tokens=512,
    num_steps=60,
    warmup_steps=2,
    forward_mode=ForwardMode.DECODE,
    popularity=np.tile(POPULARITY, (1, 3, 1)),
    noise=Noise(spread=0.01),
    injections=(Injection(cause=Cause.DEVICE, rank=7, extension=0.2, layer=1, first_step=20),),
)
MISSING = {50: True, 51: True, 52: True, 53: False}
"""Steps without rank 3, and whether it never came."""
DROPPED = 4
WAITED = np.array([100] * 7 + [1000])


def bent(rank_step: RankStep) -> RankStep:
    """A rank step with its placement epoch, model, dropped pairs and waits."""
    counts = np.zeros(RUN.num_experts, dtype=np.int64)
    counts[5] = DROPPED
    dropped = tuple(
        ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[CountKind.DROPPED], counts=counts)
        for layer in range(RUN.num_layers)
    )
    return replace(
        rank_step,
        placement_version=1 if rank_step.step < 40 else 2,
        model_name="tiny-moe",
        model_version="v3",
        experts=rank_step.experts + dropped,
        waits=tuple(
            WaitCycles(phase=PHASE_CODE[phase], cycles=WAITED) for phase in (Phase.DISPATCH, Phase.COMBINE)
        ),
    )


def main(path: str) -> None:
    """Migrate the store at `path` and fill it."""
    sink = sink_into(Path(path))
    engine = VerdictEngine()
    for simulated in simulate(RUN):
        joined = simulated.joined
        ranks = tuple(bent(rank_step) for rank_step in joined.rank_steps)
        if joined.step in MISSING:
            if not MISSING[joined.step]:
                sink.take_late(ranks[3])
                sink.take_event(event(EventKind.LATE, joined.step))
            ranks = ranks[:3] + ranks[4:]
            joined = replace(joined, missing_ranks=(3,), closed_by=ClosedBy.TIMEOUT)
        joined = replace(joined, rank_steps=ranks)
        sink.take_step(StepResult(joined=joined, verdict=engine.judge(joined), loads=layer_loads(joined)))
    sink.flush()
    roll_up(Path(path))
    sink.place(
        [
            [RUN.run_id, version, layer, expert, expert * RUN.num_ranks // RUN.num_experts, expert]
            for version in (1, 2)
            for layer in range(RUN.num_layers)
            for expert in range(RUN.num_experts)
        ]
    )
    sink.close()


def event(kind: EventKind, step: int) -> CollectorEvent:
    """An event of rank 3."""
    return CollectorEvent(
        time_unix_ms=time.time_ns() // 1_000_000,
        kind=kind,
        reason="step_closed",
        run_id=RUN.run_id,
        step=step,
        rank=3,
        detail="",
    )


if __name__ == "__main__":
    main(sys.argv[1])
