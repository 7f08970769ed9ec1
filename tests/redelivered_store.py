"""Rows that come twice, in other batches and across restarts, and what the roll-ups say: prints JSON.

`python -m redelivered_store STORE_PATH`. A run of three minutes, its steps 2.5 s apart, is written by four
processes' worth of sinks, one after the other on the same store:

    first    steps 0..29, flushed every 7, rolled up behind each flush (so that minutes grow between turns)
    second   steps 10..49 once more and on, flushed every 4; dies before it has rolled up
    third    nothing new: what the second left is found and rolled up
    fourth   everything a third time in one batch, ranks in another order, and rank 2 of step 7, which was
             missing
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetrace_collectors.model import JoinedStep
from moetrace_collectors.roll_ups.roll_up import RollUp, RollUpSettings
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.store import embedded_dsn, open_client, parse_store
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict.engine import VerdictEngine
from moetrace_schemas.enums import ClosedBy
from store_sink import sink_into

RUN = SyntheticRun(run_id="redelivered", world_size=3, num_layers=2, slow_rank=1)
NUM_STEPS = 50
STEP_NS = 2_500_000_000
MISSING = (7, 2)
"""(step, rank) that only the last delivery brings."""

BUCKETS = (
    "CAST(sumMap(map(toUInt16(floor(8 * log2(greatest({ns}, 1)))), toUInt64(1))), 'Map(UInt16, UInt64)')"
)
SUMMED = {
    "expert_load_minutes": (
        "SELECT minute, layer, count_kind, forward_mode, cohort, placement_version, rank, expert, count, "
        "source_rows",
        "SELECT toStartOfMinute(toDateTime(step_time)) AS minute, layer, count_kind, forward_mode, cohort, "
        "placement_version, if(count_kind = 'received', toInt32(rank), -1) AS of_rank, expert, sum(count), "
        "count() FROM expert_loads FINAL GROUP BY ALL ORDER BY ALL",
    ),
    "phase_minutes": (
        "SELECT minute, layer, phase, direction, is_barrier, forward_mode, intervals, duration_ns, "
        "shortest_ns, longest_ns, by_duration, source_rows",
        "SELECT toStartOfMinute(toDateTime(start_time)) AS minute, layer, phase, direction, is_barrier, "
        "forward_mode, count(), sum(duration_ns), min(duration_ns), max(duration_ns), "
        f"{BUCKETS.replace('{ns}', 'duration_ns')}, "
        "count() FROM phase_spans FINAL GROUP BY ALL ORDER BY ALL",
    ),
    "exchange_minutes": (
        "SELECT minute, layer, phase, direction, exchanges, transfer_ns, longest_transfer_ns, wait_ns, "
        "extension_ns, ambiguous, by_transfer, source_rows",
        "SELECT toStartOfMinute(toDateTime(step_time)) AS minute, layer, phase, direction, count(), "
        "sum(transfer_ns), max(transfer_ns), sum(wait_sum_ns), sum(extension_ns), "
        f"sum(toUInt64(ambiguous)), {BUCKETS.replace('{ns}', 'transfer_ns')}, "
        "count() FROM step_barriers FINAL WHERE phase IN ('dispatch', 'combine') GROUP BY ALL ORDER BY ALL",
    ),
}
"""Roll-up -> its columns, and the same summed from the table without repeats."""


def results(*, whole: bool) -> list[StepResult]:
    """Judged steps; without what is missing, or with it."""
    engine = VerdictEngine()
    found = []
    for step in range(NUM_STEPS):
        first_ns = RUN.step(0)[0].start_unix_ns
        ranks = tuple(
            replace(one, start_unix_ns=first_ns + STEP_NS * step)
            for one in RUN.step(step)
            if whole or (step, one.rank) != MISSING
        )
        missing = tuple(rank for rank in range(RUN.world_size) if rank not in {one.rank for one in ranks})
        joined = JoinedStep(
            run_id=RUN.run_id,
            step=step,
            world_size=RUN.world_size,
            rank_steps=ranks,
            missing_ranks=missing,
            closed_by=ClosedBy.TIMEOUT if missing else ClosedBy.COMPLETE,
        )
        found.append(StepResult(joined=joined, verdict=engine.judge(joined), loads=()))
    return found


class Store:
    """The store, as one process after the other opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.delivered = 0
        """Rank steps written so far, repeats included."""

    def deliver(self, steps: list[StepResult], *, at_once: int, roll_up: bool) -> None:
        """A process that writes steps, some at a time, and may roll up behind each time."""
        sink = sink_into(self._path)
        client = self._client()
        roller = RollUp(client, RollUpSettings(database="moetrace"))
        for first in range(0, len(steps), at_once):
            for result in steps[first : first + at_once]:
                sink.take_step(result)
                self.delivered += len(result.joined.rank_steps)
            sink.flush()
            if roll_up:
                roller.turn(everything=True)
        client.close()
        sink.close()

    def turn(self) -> int:
        """A process that rolls up what it finds; minutes it rolled up."""
        client = self._client()
        number = RollUp(client, RollUpSettings(database="moetrace")).turn(everything=True)
        client.close()
        return number

    def ask(self, sql: str) -> list[Any]:
        """Rows of a query, as text."""
        client = self._client()
        rows = client.query(sql, settings={}).result_rows
        client.close()
        return [[str(value) for value in row] for row in rows]

    def compared(self) -> dict[str, Any]:
        """By roll-up, its rows and what the tables say without repeats."""
        return {
            name: {
                "rolled_up": self.ask(f"{columns} FROM moetrace.{name} ORDER BY ALL"),
                "summed": self.ask(summed.replace("FROM ", "FROM moetrace.")),
            }
            for name, (columns, summed) in SUMMED.items()
        }

    def _client(self) -> Any:
        return open_client(parse_store(embedded_dsn(self._path)))


def main(path: str) -> None:
    """Deliver everything, again and again."""
    store = Store(Path(path))
    partial, whole = results(whole=False), results(whole=True)
    told: dict[str, Any] = {}
    store.deliver(partial[:30], at_once=7, roll_up=True)
    told["first"] = store.compared()
    store.deliver(partial[10:], at_once=4, roll_up=False)
    told["second"] = {
        "delivered": store.delivered,
        "kept": store.ask("SELECT count() FROM moetrace.rank_steps FINAL"),
    }
    told["third"] = {"turned": store.turn(), **store.compared()}
    again = [
        StepResult(
            joined=replace(one.joined, rank_steps=one.joined.rank_steps[::-1]), verdict=one.verdict, loads=()
        )
        for one in whole
    ]
    store.deliver(again, at_once=NUM_STEPS, roll_up=False)
    told["fourth"] = {"turned": store.turn(), **store.compared()}
    told["nothing left"] = store.turn()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
