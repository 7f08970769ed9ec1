"""A store -> whole steps, as they were joined, row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import IntArray, JoinedStep, PhaseColumns, RankStep
from moetrace_collectors.traces import store_queries as queries
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.views import store_queries as view_queries
from moetrace_collectors.views.store_reader import barrier_row, member, step_row
from moetrace_collectors.views.store_rows import Parameters, Row, Store
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction, ForwardMode, Phase


def read_step(store: Store, run_id: str, step: int) -> TracedStep:
    """One joined step.

    Raises:
        UsageError: its rows are no longer in the store.
    """
    at: Parameters = {"run": run_id, "step": step}
    verdicts = store.rows(queries.VERDICT, at)
    senders = store.rows(queries.RANK_STEPS, at)
    if not verdicts or not senders:
        raise UsageError(f"step {step} of run {run_id!r} is not in the store any more")
    verdict = step_row(verdicts[0])
    by_sender: dict[tuple[int, int], list[Row]] = defaultdict(list)
    microbatches: dict[int, set[int]] = defaultdict(set)
    for sender in senders:
        microbatches[int(sender["rank"])].add(int(sender["microbatch"]))
    for row in store.rows(queries.PHASE_ROWS, at):
        known = microbatches.get(int(row["rank"]))
        if not known:
            continue  # of a rank step that came too late to be joined
        # A rank step of a whole step holds rows of all its microbatches.
        own = int(row["microbatch"]) if int(row["microbatch"]) in known else min(known)
        by_sender[int(row["rank"]), own].append(row)
    return TracedStep(
        joined=JoinedStep(
            run_id=run_id,
            step=step,
            world_size=verdict.world_size,
            rank_steps=tuple(
                _rank_step(run_id, step, sender, by_sender[int(sender["rank"]), int(sender["microbatch"])])
                for sender in senders
            ),
            missing_ranks=verdict.missing_ranks,
            closed_by=verdict.closed_by,
        ),
        row=verdict,
        barriers=tuple(barrier_row(row) for row in store.rows(view_queries.BARRIERS, at)),
        received_rows={int(row["rank"]): int(row["total"]) for row in store.rows(queries.RECEIVED_ROWS, at)},
        max_mean_ratio={
            (member(ForwardMode, row["mode"]), int(row["at_layer"])): float(row["ratio"])
            for row in store.rows(queries.MAX_MEAN, at)
        },
    )


def _rank_step(run_id: str, step: int, sender: Row, rows: Sequence[Row]) -> RankStep:
    start_ns = int(sender["start_ns"])
    return RankStep(
        run_id=run_id,
        step=step,
        rank=int(sender["rank"]),
        microbatch=int(sender["microbatch"]),
        world_size=int(sender["world_size"]),
        ep_rank=int(sender["ep_rank"]),
        ep_size=int(sender["ep_size"]),
        ep_group=int(sender["ep_group"]),
        forward_mode=member(ForwardMode, sender["forward_mode"]),
        sample_period=int(sender["sample_period"]),
        warmup=bool(sender["warmup"]),
        clock=str(sender["clock"]),
        duration_ns=int(sender["duration_ns"]),
        start_unix_ns=start_ns,
        anchor_error_ns=int(sender["anchor_error_ns"]),
        host_name=str(sender["host_name"]),
        model_name=str(sender["model_name"]),
        model_version=str(sender["model_version"]),
        cohort=str(sender["cohort"]),
        placement_version=int(sender["placement_version"]),
        phases=PhaseColumns(
            layer=_column(rows, "layer"),
            phase=_codes([PHASE_CODE[member(Phase, row["phase"])] for row in rows]),
            direction=_codes([DIRECTION_CODE[member(Direction, row["direction"])] for row in rows]),
            microbatch=_column(rows, "microbatch"),
            ordinal=_column(rows, "ordinal"),
            stream=_column(rows, "stream"),
            flags=_column(rows, "flags"),
            start_offset_ns=_column(rows, "start_ns") - start_ns,
            duration_ns=_column(rows, "duration_ns"),
            bytes=_column(rows, "bytes"),
            rows=_column(rows, "rows"),
        ),
    )


def _column(rows: Sequence[Row], name: str) -> IntArray:
    return _codes([int(row[name]) for row in rows])


def _codes(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
