"""Rows of the store -> RankSteps, equal to those that came from the wire. Pure.

Pairs of experts are not read: nothing that is found out about a step needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from moetrace_collectors.model import (
    ExpertCounts,
    IntArray,
    PhaseColumns,
    RankStep,
    TrafficRow,
    ViolationCount,
    WaitCycles,
)
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    DIRECTION_CODE,
    PHASE_CODE,
    ROUTING_VIOLATION_CODE,
    CountKind,
    Direction,
    ForwardMode,
    Phase,
    RoutingViolation,
)

Row = Mapping[str, Any]
RecordKey = tuple[int, int, int]
"""(step, rank, microbatch)"""

_PLAIN = ("layer", "microbatch", "ordinal", "stream", "flags", "duration_ns", "bytes", "rows")
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows of some steps of a run, each of the query of its name in `queries`."""

    records: Iterable[Row]
    phases: Iterable[Row] = ()
    experts: Iterable[Row] = ()
    unfolded: Iterable[Row] = ()
    traffic: Iterable[Row] = ()
    violations: Iterable[Row] = ()
    waits: Iterable[Row] = ()


def rank_steps_of_rows(stored: StoredRows) -> dict[int, list[RankStep]]:
    """Rank steps by step number, each in ascending order of (rank, microbatch)."""
    phases_of = {_key(row, "record_microbatch"): row for row in stored.phases}
    experts_of = _by_record((_key(row), _counts(row)) for row in stored.experts)
    unfolded_of = _by_record((_key(row), _counts(row)) for row in stored.unfolded)
    traffic_of = _by_record((_key(row), _traffic(row)) for row in stored.traffic)
    violations_of = _by_record((_key(row), _violation(row)) for row in stored.violations)
    waits_of: dict[tuple[int, ...], list[WaitCycles]] = {}
    for row in stored.waits:
        waits_of.setdefault(_place(row), []).append(_waits(row))
    by_step: dict[int, list[RankStep]] = {}
    for record in stored.records:
        key = _key(record)
        rank_step = _rank_step(
            record,
            phases=_phases(phases_of.get(key), int(record["start_unix_ns"])),
            experts=tuple(experts_of.get(key, ())),
            unfolded=tuple(unfolded_of.get(key, ())),
            traffic=tuple(traffic_of.get(key, ())),
            violations=tuple(violations_of.get(key, ())),
            waits=tuple(waits_of.get(_place(record), ())),
        )
        by_step.setdefault(rank_step.step, []).append(rank_step)
    return by_step


def _by_record(parts: Iterable[tuple[RecordKey, _Part]]) -> dict[RecordKey, list[_Part]]:
    found: dict[RecordKey, list[_Part]] = {}
    for key, part in parts:
        found.setdefault(key, []).append(part)
    return found


def _key(row: Row, microbatch: str = "microbatch") -> RecordKey:
    return (int(row["step"]), int(row["rank"]), int(row[microbatch]))


def _place(row: Row) -> tuple[int, ...]:
    """A rank where rows name it by its place in its group."""
    return (int(row["step"]), int(row["ep_group"]), int(row["ep_rank"]), int(row["microbatch"]))


def _rank_step(
    record: Row,
    *,
    phases: PhaseColumns,
    experts: tuple[ExpertCounts, ...],
    unfolded: tuple[ExpertCounts, ...],
    traffic: tuple[TrafficRow, ...],
    violations: tuple[ViolationCount, ...],
    waits: tuple[WaitCycles, ...],
) -> RankStep:
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
        start_unix_ns=int(record["start_unix_ns"]),
        host_name=str(record["host_name"]),
        model_name=str(record["model_name"]),
        model_version=str(record["model_version"]),
        cohort=str(record["cohort"]),
        placement_version=int(record["placement_version"]),
        anchor_error_ns=int(record["anchor_error_ns"]),
        tracer_ns=int(record["tracer_ns"]),
        expected_sites=int(record["expected_sites"]),
        seen_sites=int(record["seen_sites"]),
        phases=phases,
        experts=experts,
        unfolded=unfolded,
        traffic=traffic,
        violations=violations,
        waits=waits,
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
    return ExpertCounts(
        layer=int(row["layer"]),
        kind=COUNT_KIND_CODE[CountKind(row["kind"])],
        counts=_placed(row["experts"], row["counts"]),
    )


def _traffic(row: Row) -> TrafficRow:
    sent = _placed(row["destinations"], row["sent"])
    num_rows = int(sent.sum())
    return TrafficRow(
        layer=int(row["layer"]),
        phase=PHASE_CODE[Phase(row["phase"])],
        # Told nowhere else; where no row was sent, it counts for nothing.
        row_bytes=int(row["sent_bytes"]) // num_rows if num_rows else 0,
        rows=sent,
        direction=DIRECTION_CODE[Direction(row["direction"])],
    )


def _violation(row: Row) -> ViolationCount:
    return ViolationCount(
        layer=int(row["layer"]),
        violation=ROUTING_VIOLATION_CODE[RoutingViolation(row["violation"])],
        count=int(row["count"]),
    )


def _waits(row: Row) -> WaitCycles:
    return WaitCycles(phase=PHASE_CODE[Phase(row["phase"])], cycles=_placed(row["others"], row["cycles"]))


def _placed(places: Sequence[int], values: Sequence[int]) -> IntArray:
    """Values at their places, zeros between them."""
    numbers = np.array(places, dtype=np.int64)
    found = np.zeros(int(numbers.max()) + 1, dtype=np.int64)
    found[numbers] = values
    return found
