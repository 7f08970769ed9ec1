"""Steps judged in memory -> what a trace shows of them. Pure."""

from __future__ import annotations

from collections import Counter

from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.offline.run_view import barrier_row, judged_step_row
from moetrace_collectors.summary import RECEIVED, layer_loads
from moetrace_collectors.traces.step_records import TracedStep


def traced_step(joined: JoinedStep, verdict: StepVerdict) -> TracedStep:
    """The same record that the store gives for this step."""
    received: Counter[int] = Counter()
    for one in joined.rank_steps:
        for counts in one.experts:
            if counts.kind == RECEIVED:
                received[one.rank] += int(counts.counts.sum())
    return TracedStep(
        joined=joined,
        row=judged_step_row(joined, verdict),
        barriers=tuple(barrier_row(barrier) for barrier in verdict.barriers),
        received_rows=dict(received),
        max_mean_ratio={(load.forward_mode, load.layer): load.max_mean_ratio for load in layer_loads(joined)},
    )
