"""A store with steps that were not judged, and what readers say of their lengths.

`python -m unjudged_steps STORE_PATH` prints it as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetrace_collectors.ledger.store_samples import read_side
from moetrace_collectors.load.store_queries import STEP_TIME
from moetrace_collectors.model import JoinedStep
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_collectors.verdict.no_verdict import TWO_JOBS, no_verdict
from moetrace_collectors.views.browse_reader import read_runs
from moetrace_schemas.clickhouse import cookbook
from moetrace_schemas.enums import ClosedBy
from store_sink import sink_into

RUN = SyntheticRun(run_id="r", world_size=2, num_layers=1)
STEPS, SECOND_VERSION, UNJUDGED = 12, 4, range(5, 12)


class ClientStore:
    """A store through a client, as readers ask it."""

    address = "a store of a test"

    def __init__(self, client: Any) -> None:
        self._client = client

    def rows(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Rows of a query."""
        bound = {**parameters, "database": "moetrace"}
        return list(self._client.query(sql, parameters=bound).named_results())


def main(path: str) -> None:
    """Fill a store and read it."""
    sink, engine = sink_into(Path(path)), VerdictEngine()
    for step in range(STEPS):
        ranks = [replace(one, placement_version=1 + (step >= SECOND_VERSION)) for one in RUN.step(step)]
        joined = JoinedStep(
            run_id="r",
            step=step,
            world_size=2,
            rank_steps=tuple(ranks),
            missing_ranks=(),
            closed_by=ClosedBy.COMPLETE,
        )
        verdict = no_verdict(joined, TWO_JOBS) if step in UNJUDGED else engine.judge(joined)
        sink.take_step(StepResult(joined=joined, verdict=verdict, loads=()))
    sink.flush()
    store = ClientStore(sink._client)
    side = read_side(store, "r", label="after", version=2)
    pool = read_side(store, "r", label="pool", version=2, ranks=(0,))
    [entry] = read_runs(store)
    named = {"run": "r", "mode": "train", "firsts": [0], "lasts": [STEPS]}
    [step_time] = store.rows(STEP_TIME, named)
    percentiles = cookbook.recipe("step_percentiles").sql
    sink._client.command("USE moetrace")
    told = sink._client.query(percentiles, parameters={"run": "r", "hours": 24}).named_results()
    print(
        json.dumps(
            {
                "compared": side.steps["train"].step_ns.tolist(),
                "notes": side.notes,
                "of a pool": len(pool.steps["train"].step),
                "medians": [entry.step_median_ns, int(step_time["median_ns"])],
                "percentiles": [(row["steps"], row["p50_ms"]) for row in told],
            }
        )
    )
    sink.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
