"""StepRecord -> span attributes with packed columns. Pure; the writer's half of the wire contract."""

from __future__ import annotations

from moetrace.context import RankContext
from moetrace.record.placement import PlacementRecord
from moetrace.record.types import StepRecord, TrafficRecord, WaitRow
from moetrace_schemas import SCHEMA_VERSION, attributes
from moetrace_schemas.columns import (
    COACTIVATION,
    EXPERTS,
    PHASES,
    PLACEMENT,
    TRAFFIC,
    VIOLATIONS,
    WAITS,
    pack,
)
from moetrace_schemas.enums import (
    COACTIVATION_SPAN_CODE,
    COUNT_KIND_CODE,
    DIRECTION_CODE,
    PHASE_CODE,
    ROUTING_VIOLATION_CODE,
    PlacementEvent,
)
from moetrace_schemas.placement import PlacementMap, canonical_json

HIGHEST_COUNT = 2**32 - 1
"""The wire's count of a violation is a uint32."""
HIGHEST_CYCLES = 2**53
"""The most that the waits of one rank in one phase may add up to."""

AttributeValue = str | int | float | bool | bytes


def span_attributes(
    record: StepRecord, context: RankContext, *, sample_period: int, model_name: str, model_version: str
) -> dict[str, AttributeValue]:
    """Every attribute of the `moe.step` span of one record."""
    values: dict[str, AttributeValue] = {
        attributes.SCHEMA_VERSION: SCHEMA_VERSION,
        attributes.RUN_ID: context.run_id,
        attributes.STEP_INDEX: record.step,
        attributes.RANK: context.rank,
        attributes.WORLD_SIZE: context.world_size,
        attributes.EP_RANK: context.ep_rank,
        attributes.EP_SIZE: context.ep_size,
        attributes.EP_GROUP: context.ep_group,
        attributes.MICROBATCH_INDEX: record.microbatch,
        attributes.FORWARD_MODE: record.forward_mode.value,
        attributes.SAMPLE_PERIOD: sample_period,
        attributes.STEP_WARMUP: record.warmup,
        attributes.CLOCK: record.clock,
        attributes.DURATION_NS: record.duration_ns,
        attributes.MODEL_NAME: model_name,
        attributes.MODEL_VERSION: model_version,
        attributes.COHORT: record.cohort,
        attributes.PLACEMENT_VERSION: record.placement_version,
        attributes.COLUMNS_PHASES: _phases(record),
    }
    if record.tracer_ns >= 0:
        values[attributes.TRACER_NS] = record.tracer_ns
    if record.expected_sites:
        values[attributes.COVERAGE_EXPECTED_SITES] = len(record.expected_sites)
        values[attributes.COVERAGE_SEEN_SITES] = len(record.expected_sites & record.seen_sites)
    if record.anchor_error_ns >= 0:
        values[attributes.ANCHOR_ERROR_NS] = record.anchor_error_ns
    if record.experts:
        values[attributes.COLUMNS_EXPERTS] = _experts(record)
    # What exchanges of another group than the expert-parallel one say has no place in its matrix.
    traffic = [row for row in record.traffic if len(row.rows) == context.ep_size]
    if traffic:
        values[attributes.COLUMNS_TRAFFIC] = _traffic(traffic)
    if record.violations:
        values[attributes.COLUMNS_VIOLATIONS] = _violations(record)
    if record.coactivation:
        values[attributes.COLUMNS_COACTIVATION] = _coactivation(record)
    waits = [row for row in record.waits if len(row.waits) == context.ep_size]
    if waits:
        values[attributes.COLUMNS_WAITS] = _waits(waits)
    return values


def _phases(record: StepRecord) -> bytes:
    rows = record.phases
    if not rows:
        return pack(PHASES, [[] for _ in PHASES.columns])
    # The block's columns are a row's fields, in the same order.
    layers, _, _, *numbers = zip(*rows, strict=True)
    phases = [PHASE_CODE[row.phase] for row in rows]
    directions = [DIRECTION_CODE[row.direction] for row in rows]
    return pack(PHASES, [layers, phases, directions, *numbers])


def _experts(record: StepRecord) -> bytes:
    rows = record.experts
    return pack(
        EXPERTS,
        [
            [row.layer for row in rows],
            [COUNT_KIND_CODE[row.kind] for row in rows],
            [len(r.counts) for r in rows],
        ],
        [count for row in rows for count in row.counts],
    )


def _traffic(rows: list[TrafficRecord]) -> bytes:
    return pack(
        TRAFFIC,
        [
            [row.layer for row in rows],
            [PHASE_CODE[row.phase] for row in rows],
            [row.row_bytes for row in rows],
            [len(row.rows) for row in rows],
        ],
        [count for row in rows for count in row.rows],
    )


def _waits(rows: list[WaitRow]) -> bytes:
    # What a hung kernel summed may be beyond the wire's limit, for a rank or for all together.
    return pack(
        WAITS,
        [[PHASE_CODE[row.phase] for row in rows], [len(row.waits) for row in rows]],
        [min(cycles, HIGHEST_CYCLES // len(row.waits)) for row in rows for cycles in row.waits],
    )


def placement_attributes(record: PlacementRecord, context: RankContext) -> dict[str, AttributeValue]:
    """Every attribute of the `moe.placement` span of one placement; terms that are not told are left out."""
    terms = record.terms
    told: dict[str, AttributeValue | None] = {
        attributes.SCHEMA_VERSION: SCHEMA_VERSION,
        attributes.RUN_ID: context.run_id,
        attributes.STEP_INDEX: record.step,
        attributes.RANK: context.rank,
        attributes.WORLD_SIZE: context.world_size,
        attributes.PLACEMENT_VERSION: record.version,
        attributes.PLACEMENT_EXPERTS: record.map.num_experts,
        attributes.PLACEMENT_RANKS: record.map.num_ranks,
        attributes.PLACEMENT_DIGEST: record.map.digest(),
        attributes.COLUMNS_PLACEMENT: placement_block(record.map),
        attributes.PLACEMENT_KIND: PlacementEvent.ANNOUNCED.value,
        attributes.PLACEMENT_POLICY: terms.policy_version or None,
        attributes.PLACEMENT_PROPOSER: terms.proposed_by or None,
        attributes.PLACEMENT_WINDOW_FIRST: None if terms.window is None else terms.window[0],
        attributes.PLACEMENT_WINDOW_LAST: None if terms.window is None else terms.window[1],
        attributes.PLACEMENT_ACCEPT_SLOWDOWN: float(terms.max_slowdown),
        attributes.PLACEMENT_ACCEPT_ERRORS: float(terms.max_error_rate),
        attributes.PLACEMENT_ROLLBACK: terms.rollback_version,
        attributes.PLACEMENT_COUNTS: terms.count_ids.value,
        attributes.PLACEMENT_EXPERT_BYTES: terms.expert_bytes,
        attributes.PLACEMENT_MEMORY_BYTES: terms.memory_bytes,
        attributes.PLACEMENT_WEIGHTS: (
            canonical_json(dict(terms.weight_digests)).decode() if terms.weight_digests else None
        ),
    }
    return {name: value for name, value in told.items() if value is not None}


def placement_block(placement: PlacementMap) -> bytes:
    """The packed mapping."""
    rows = placement.physical_to_logical
    return pack(
        PLACEMENT,
        [list(placement.layers), [len(row) for row in rows]],
        [expert for row in rows for expert in row],
    )


def _violations(record: StepRecord) -> bytes:
    rows = record.violations
    return pack(
        VIOLATIONS,
        [
            [row.layer for row in rows],
            [ROUTING_VIOLATION_CODE[row.violation] for row in rows],
            [min(row.count, HIGHEST_COUNT) for row in rows],
        ],
    )


def _coactivation(record: StepRecord) -> bytes:
    rows = [(row, pair) for row in record.coactivation for pair in row.pairs]
    return pack(
        COACTIVATION,
        [
            [row.layer for row, _ in rows],
            [COACTIVATION_SPAN_CODE[row.span] for row, _ in rows],
            [first for _, (first, _, _) in rows],
            [second for _, (_, second, _) in rows],
            [tokens for _, (_, _, tokens) in rows],
        ],
    )
