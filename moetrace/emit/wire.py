"""StepRecord -> span attributes with packed columns. Pure; the writer's half of the wire contract."""

from __future__ import annotations

from moetrace.context import RankContext
from moetrace.record.types import StepRecord
from moetrace_schemas import SCHEMA_VERSION, attributes
from moetrace_schemas.columns import EXPERTS, PHASES, TRAFFIC, pack
from moetrace_schemas.enums import COUNT_KIND_CODE, DIRECTION_CODE, PHASE_CODE

AttributeValue = str | int | bool | bytes


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
    if record.experts:
        values[attributes.COLUMNS_EXPERTS] = _experts(record)
    if record.traffic:
        values[attributes.COLUMNS_TRAFFIC] = _traffic(record)
    return values


def _phases(record: StepRecord) -> bytes:
    rows = record.phases
    return pack(
        PHASES,
        [
            [row.layer for row in rows],
            [PHASE_CODE[row.phase] for row in rows],
            [DIRECTION_CODE[row.direction] for row in rows],
            [row.microbatch for row in rows],
            [row.ordinal for row in rows],
            [row.stream for row in rows],
            [row.flags for row in rows],
            [row.start_offset_ns for row in rows],
            [row.duration_ns for row in rows],
            [row.bytes for row in rows],
            [row.rows for row in rows],
        ],
    )


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


def _traffic(record: StepRecord) -> bytes:
    rows = record.traffic
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
