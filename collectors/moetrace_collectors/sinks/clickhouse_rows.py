"""Records -> columns of the small ClickHouse tables; clickhouse_columns has the large. Pure; of the sink.

Column names are those of the migrations; a test compares them. Times go in as integers: ticks of the
column's DateTime64 scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.model import RankStep
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.clickhouse_columns import (
    TableColumns,
    expert_coactivation,
    expert_loads,
    phase_spans,
    rank_traffic,
    unfolded_expert_loads,
)
from moetrace_schemas import identity
from moetrace_schemas.enums import PHASE_BY_CODE, ROUTING_VIOLATION_BY_CODE

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of one table, column by column."""

    table: str
    names: tuple[str, ...]
    columns: tuple[list[Any], ...]

    def __len__(self) -> int:
        return len(self.columns[0])


class _Builder:
    """Collects the rows of one table; turned into columns at the end, which is faster than growing each."""

    def __init__(self, table: str, *names: str) -> None:
        self._table = table
        self._names = names
        self._rows: list[tuple[Any, ...]] = []

    def add_row(self, *values: Any) -> None:
        assert len(values) == len(self._names)
        self._rows.append(values)

    def rows(self) -> TableRows:
        columns = tuple(map(list, zip(*self._rows, strict=True))) or tuple([] for _ in self._names)
        return TableRows(table=self._table, names=self._names, columns=columns)


def rank_step_rows(
    rank_steps: Sequence[RankStep], *, late: bool, received_unix_ms: int
) -> tuple[TableColumns | TableRows, ...]:
    """Everything that rank steps themselves say: all tables but those of verdicts and events.

    `rank_steps` goes last: a reader that finds a row there finds the rows of the other tables too.
    """
    return (
        phase_spans(rank_steps),
        expert_loads(rank_steps),
        unfolded_expert_loads(rank_steps),
        rank_traffic(rank_steps),
        _routing_violations(rank_steps),
        expert_coactivation(rank_steps),
        _rank_waits(rank_steps),
        _rank_steps(rank_steps, late, received_unix_ms),
    )


def _rank_steps(rank_steps: Iterable[RankStep], late: bool, received_unix_ms: int) -> TableRows:
    builder = _Builder(
        "rank_steps", "run_id", "step", "rank", "microbatch", "trace_id", "world_size", "ep_group", "ep_rank",
        "ep_size", "forward_mode", "cohort", "model_name", "model_version", "host_name", "clock",
        "sample_period", "placement_version", "warmup", "late", "start_time", "duration_ns",
        "received_at", "expected_sites", "seen_sites", "anchor_error_ns", "tracer_ns",
    )  # fmt: skip
    for step in rank_steps:
        builder.add_row(
            step.run_id,
            step.step,
            step.rank,
            step.microbatch,
            f"{identity.trace_id(step.sent_run_id or step.run_id, step.step):032x}",
            step.world_size,
            step.ep_group,
            step.ep_rank,
            step.ep_size,
            step.forward_mode.value,
            step.cohort,
            step.model_name,
            step.model_version,
            step.host_name,
            step.clock,
            step.sample_period,
            step.placement_version,
            int(step.warmup),
            int(late),
            step.start_unix_ns,
            step.duration_ns,
            received_unix_ms,
            step.expected_sites,
            step.seen_sites,
            step.anchor_error_ns,
            step.tracer_ns,
        )
    return builder.rows()


def unjoined_rows(
    rank_steps: Sequence[RankStep], *, received_unix_ms: int
) -> tuple[TableColumns | TableRows, ...]:
    """The same of rank steps that the store joins; behind them `rank_step_arrivals`: that they are there."""
    rows = rank_step_rows(rank_steps, late=False, received_unix_ms=received_unix_ms)
    return (*rows, _arrivals(rank_steps))


def _arrivals(rank_steps: Iterable[RankStep]) -> TableRows:
    """rank_step_arrivals.

    The store puts its own time in: the only one that rows of all collectors can be compared by.
    """
    builder = _Builder("rank_step_arrivals", "run_id", "step", "rank", "microbatch", "start_time")
    for step in rank_steps:
        builder.add_row(step.run_id, step.step, step.rank, step.microbatch, step.start_unix_ns)
    return builder.rows()


def _rank_waits(rank_steps: Iterable[RankStep]) -> TableRows:
    builder = _Builder(
        "rank_waits", "run_id", "step", "phase", "forward_mode", "ep_group", "ep_rank", "microbatch",
        "waited_for", "cycles", "step_time",
    )  # fmt: skip
    for step in rank_steps:
        for entry in step.waits:
            for waited_for, cycles in enumerate(entry.cycles.tolist()):
                builder.add_row(
                    step.run_id,
                    step.step,
                    PHASE_BY_CODE[entry.phase].value,
                    step.forward_mode.value,
                    step.ep_group,
                    step.ep_rank,
                    step.microbatch,
                    waited_for,
                    cycles,
                    step.start_unix_ns // NS_PER_MS,
                )
    return builder.rows()


def _violations_builder() -> _Builder:
    return _Builder(
        "routing_violations", "run_id", "step", "layer", "violation", "forward_mode", "scope", "rank",
        "microbatch", "count", "step_time",
    )  # fmt: skip


def _routing_violations(rank_steps: Iterable[RankStep]) -> TableRows:
    builder = _violations_builder()
    for step in rank_steps:
        for entry in step.violations:
            builder.add_row(
                step.run_id,
                step.step,
                entry.layer,
                ROUTING_VIOLATION_BY_CODE[entry.violation].value,
                step.forward_mode.value,
                "rank",
                step.rank,
                step.microbatch,
                entry.count,
                step.start_unix_ns // NS_PER_MS,
            )
    return builder.rows()


def _group_violations(results: Iterable[StepResult]) -> TableRows:
    builder = _violations_builder()
    for result in results:
        step_time_ms = _step_time_ns(result) // NS_PER_MS
        for found in result.violations:
            builder.add_row(
                result.joined.run_id,
                result.joined.step,
                found.layer,
                found.violation.value,
                found.forward_mode.value,
                "group",
                found.ep_group,
                found.microbatch,
                found.count,
                step_time_ms,
            )
    return builder.rows()


def verdict_rows(results: Sequence[StepResult]) -> tuple[TableRows, ...]:
    """What was found out about steps: routing_violations of whole groups, step_barriers, step_verdicts.

    `step_verdicts` goes last: where a reader finds a verdict, its exchanges are there too.
    """
    return (_group_violations(results), _step_barriers(results), _step_verdicts(results))


def _step_time_ns(result: StepResult) -> int:
    return min(rank_step.start_unix_ns for rank_step in result.joined.rank_steps)


def _step_verdicts(results: Iterable[StepResult]) -> TableRows:
    builder = _Builder(
        "step_verdicts", "run_id", "step", "step_time", "forward_mode", "evidence", "reason", "rank", "layer",
        "phase", "cause", "worth_ns", "share", "runner_up_rank", "runner_up_layer", "runner_up_phase",
        "runner_up_worth_ns", "step_ns", "extension_ns", "phase_ns", "world_size", "missing_ranks",
        "closed_by", "warmup",
    )  # fmt: skip
    for result in results:
        joined, verdict = result.joined, result.verdict
        suspect, runner_up = verdict.suspect, verdict.runner_up
        builder.add_row(
            joined.run_id,
            joined.step,
            _step_time_ns(result),
            verdict.forward_mode.value,
            verdict.evidence.value,
            verdict.reason,
            suspect.rank if suspect else None,
            suspect.layer if suspect else None,
            suspect.phase.value if suspect else None,
            verdict.cause.value,
            suspect.worth_ns if suspect else 0,
            float(suspect.share) if suspect else 0.0,
            runner_up.rank if runner_up else None,
            runner_up.layer if runner_up else None,
            runner_up.phase.value if runner_up else None,
            runner_up.worth_ns if runner_up else 0,
            verdict.step_ns,
            verdict.extension_ns,
            {phase.value: duration for phase, duration in verdict.phase_ns.items()},
            joined.world_size,
            list(joined.missing_ranks),
            joined.closed_by.value,
            int(verdict.warmup),
        )
    return builder.rows()


def _step_barriers(results: Iterable[StepResult]) -> TableRows:
    builder = _Builder(
        "step_barriers", "run_id", "step", "step_time", "ep_group", "barrier", "layer", "phase", "direction",
        "microbatch", "ordinal", "releaser_rank", "work_phase", "transfer_ns", "max_work_ns", "mean_work_ns",
        "extension_ns", "wait_sum_ns", "ambiguous",
    )  # fmt: skip
    for result in results:
        step_time_ns = _step_time_ns(result)
        for barrier in result.verdict.barriers:
            builder.add_row(
                result.joined.run_id,
                result.joined.step,
                step_time_ns,
                barrier.ep_group,
                barrier.index,
                barrier.layer,
                barrier.phase.value,
                barrier.direction.value,
                barrier.microbatch,
                barrier.ordinal,
                barrier.releaser_rank,
                barrier.work_phase.value,
                barrier.transfer_ns,
                barrier.max_work_ns,
                barrier.mean_work_ns,
                barrier.extension_ns,
                barrier.wait_sum_ns,
                int(barrier.ambiguous),
            )
    return builder.rows()


def event_rows(events: Sequence[CollectorEvent]) -> TableRows:
    """collector_events."""
    builder = _Builder("collector_events", "time", "run_id", "kind", "reason", "step", "rank", "detail")
    for event in events:
        builder.add_row(
            event.time_unix_ms,
            event.run_id,
            event.kind.value,
            event.reason,
            event.step,
            event.rank,
            event.detail,
        )
    return builder.rows()
