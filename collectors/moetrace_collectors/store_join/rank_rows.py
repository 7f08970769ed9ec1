"""Rows of the store -> RankSteps, equal to those that came from the wire. Pure.

Traffic is not read: no verdict needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moetrace_collectors.model import ExpertCounts, IntArray, PhaseColumns, RankStep
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    DIRECTION_CODE,
    PHASE_CODE,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
)

Row = Mapping[str, Any]
RecordKey = tuple[int, int, int]
"""(step, rank, microbatch)"""

_PLAIN = ("layer", "microbatch", "ordinal", "stream", "flags", "duration_ns", "bytes", "rows")


def rank_steps_of_rows(
    records: Iterable[Row], phases: Iterable[Row], experts: Iterable[Row]
) -> dict[int, list[RankStep]]:
    """Rank steps by step number, each in ascending order of (rank, microbatch).

    Args:
        records: of queries.RANK_STEPS.
        phases: of queries.PHASES.
        experts: of queries.EXPERTS.
    """
    phases_of = {_key(row, "record_microbatch"): row for row in phases}
    experts_of: dict[RecordKey, list[ExpertCounts]] = {}
    for row in experts:
        experts_of.setdefault(_key(row, "microbatch"), []).append(_counts(row))
    by_step: dict[int, list[RankStep]] = {}
    for record in records:
        key = _key(record, "microbatch")
        rank_step = _rank_step(record, phases_of.get(key), experts_of.get(key, ()))
        by_step.setdefault(rank_step.step, []).append(rank_step)
    return by_step


def _key(row: Row, microbatch: str) -> RecordKey:
    return (int(row["step"]), int(row["rank"]), int(row[microbatch]))


def _rank_step(record: Row, phases: Row | None, experts: Sequence[ExpertCounts]) -> RankStep:
    start_unix_ns = int(record["start_unix_ns"])
    return RankStep(
        run_id=str(record["run_id"]),
        step=int(record["step"]),
        rank=int(record["rank"]),
        microbatch=int(record["microbatch"]),
        world_size=int(record["world_size"]),
        ep_rank=int(record["ep_rank"]),
        ep_size=int(record["ep_size"]),
        ep_group=int(record["ep_group"]),
        forward_mode=ForwardMode(record["forward_mode"]),
        sample_period=int(record["sample_period"]),
        warmup=bool(record["warmup"]),
        clock=str(record["clock"]),
        duration_ns=int(record["duration_ns"]),
        start_unix_ns=start_unix_ns,
        host_name=str(record["host_name"]),
        model_name=str(record["model_name"]),
        model_version=str(record["model_version"]),
        cohort=str(record["cohort"]),
        placement_version=int(record["placement_version"]),
        phases=_phases(phases, start_unix_ns),
        experts=tuple(experts),
    )


def _phases(row: Row | None, start_unix_ns: int) -> PhaseColumns:
    if row is None:
        nothing = np.zeros(0, dtype=np.int64)
        return PhaseColumns(**dict.fromkeys(PhaseColumns.__slots__, nothing))
    columns: dict[str, IntArray] = {name: np.array(row[name], dtype=np.int64) for name in _PLAIN}
    columns["phase"] = np.array([PHASE_CODE[Phase(name)] for name in row["phase"]], dtype=np.int64)
    columns["direction"] = np.array(
        [DIRECTION_CODE[Direction(name)] for name in row["direction"]], dtype=np.int64
    )
    columns["start_offset_ns"] = np.array(row["start_unix_ns"], dtype=np.int64) - start_unix_ns
    return PhaseColumns(**columns)


def _counts(row: Row) -> ExpertCounts:
    experts = np.array(row["experts"], dtype=np.int64)
    counts = np.zeros(int(experts.max()) + 1, dtype=np.int64)
    counts[experts] = row["counts"]
    return ExpertCounts(layer=int(row["layer"]), kind=COUNT_KIND_CODE[CountKind(row["kind"])], counts=counts)
