"""Two training steps with backward exchanges, for v_backward_traffic: `python -m backward_store STORE_PATH`.

4 ranks on two hosts, 2 layers; rank r sends 10 r + d rows to rank d in dispatch, and gets as many back. In
step 0 every exchange has its backward, and dispatch of layer 0 is recomputed; in step 1 layer 1 has none.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.model import IntArray, PhaseColumns, RankStep, TrafficRow
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction, Phase
from store_sink import sink_into

RUN = SyntheticRun(run_id="backward", world_size=4, num_layers=2)
SENT = np.array([[10 * rank + other for other in range(4)] for rank in range(4)])
ROW_BYTES = 32
BACKWARD = DIRECTION_CODE[Direction.BACKWARD]


def trained(rank_step: RankStep) -> RankStep:
    """A rank step with what it sent both ways, and with backward exchanges."""
    phases = rank_step.phases
    exchanges = np.flatnonzero(phases.flags)
    with_backward = exchanges if rank_step.step == 0 else exchanges[phases.layer[exchanges] == 0]
    recomputed = exchanges[: 1 if rank_step.step == 0 else 0]
    order = np.concatenate([np.arange(len(phases)), with_backward[::-1], recomputed])
    again: IntArray = np.zeros(len(order), dtype=np.int64)
    again[len(phases) :] = 1
    columns = {name: getattr(phases, name)[order] for name in PhaseColumns.__slots__}
    columns["start_offset_ns"] = columns["start_offset_ns"] + again * rank_step.duration_ns
    columns["ordinal"] = columns["ordinal"].copy()
    columns["direction"] = columns["direction"].copy()
    columns["flags"] = columns["flags"].copy()
    columns["direction"][len(phases) : len(phases) + len(with_backward)] = BACKWARD
    columns["ordinal"][len(phases) + len(with_backward) :] = 1
    columns["flags"][len(phases) + len(with_backward) :] |= int(RowFlag.RECOMPUTE)
    traffic = tuple(
        TrafficRow(layer=layer, phase=PHASE_CODE[phase], row_bytes=ROW_BYTES, rows=rows)
        for layer in range(RUN.num_layers)
        for phase, rows in (
            (Phase.DISPATCH, SENT[rank_step.rank]),
            (Phase.COMBINE, SENT[:, rank_step.rank]),
        )
    )
    return replace(
        rank_step,
        host_name=f"host-{rank_step.rank // 2}",
        phases=PhaseColumns(**columns),
        traffic=traffic,
    )


def main(path: str) -> None:
    """Migrate the store at `path` and fill it."""
    sink = sink_into(Path(path))
    for step in range(2):
        for rank_step in RUN.step(step):
            sink.take_unjoined(trained(rank_step))
    sink.flush()
    sink.close()


if __name__ == "__main__":
    main(sys.argv[1])
