"""Steps whose traffic is known and placed, for v_expected_traffic: `python -m expected_store STORE_PATH`.

Step 0: a simulated run of 8 ranks in 2 groups, experts in order, with what dispatchers sent. Then, in run
`placed`, one step of 2 ranks with 4 experts under a placement that holds expert 3 twice (version 7), and one
under a placement that nobody told (version 8).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.model import ExpertCounts, RankStep
from moetrace_collectors.simulate import SimulatedRun, simulate
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind
from store_sink import sink_into

SIMULATED = SimulatedRun(
    run_id="in-order", num_ranks=8, ep_size=4, num_layers=3, num_experts=16, ranks_per_node=2, num_steps=1
)
PLACED = SyntheticRun(run_id="placed", world_size=2, num_layers=1, num_experts=4)
COUNTS = {
    CountKind.ROUTED: np.array([10, 20, 30, 40]),
    CountKind.PADDING: np.array([1, 0, 0, 0]),
    CountKind.DROPPED: np.array([0, 5, 0, 0]),
}
SLOTS = ((0, 0, 3), (1, 0, 0), (2, 0, -1), (3, 1, 3), (4, 1, 2), (5, 1, 1))
"""(slot, ep_rank, expert) of layer 0 in version 7."""


def placed(rank_step: RankStep, version: int) -> RankStep:
    """A rank step that says what its router chose, and nothing of what it sent."""
    experts = tuple(
        ExpertCounts(layer=0, kind=COUNT_KIND_CODE[kind], counts=counts) for kind, counts in COUNTS.items()
    )
    return replace(rank_step, experts=experts, traffic=(), placement_version=version)


def main(path: str) -> None:
    """Migrate the store at `path` and fill it."""
    sink = sink_into(Path(path))
    for simulated in simulate(SIMULATED):
        for rank_step in simulated.joined.rank_steps:
            sink.take_unjoined(rank_step)
    for step, version in ((0, 7), (1, 8)):
        for rank_step in PLACED.step(step):
            sink.take_unjoined(placed(rank_step, version))
    sink.flush()
    sink.place([[PLACED.run_id, 7, 0, *slot] for slot in SLOTS])
    sink.close()


if __name__ == "__main__":
    main(sys.argv[1])
