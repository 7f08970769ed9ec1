"""Joined steps -> ordinary OTLP spans: one trace per step, a span per rank and a child per phase row. Pure.

Trace and span ids are those of the ranks' own spans (moetrace_schemas.identity), so that an export adds to
what a backend has of the same step and is the same when it is repeated. A child that waited links to the
child of the rank that it waited for. Clocks are aligned by one amount per rank and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from moetrace_collectors.model import RankStep
from moetrace_collectors.traces.exchanges import Exchange, exchange_key, exchanges_of
from moetrace_collectors.traces.rows import PhaseRow, rows_of
from moetrace_collectors.traces.step_clocks import RankClock
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.views.run_records import ExchangeKey
from moetrace_schemas import SCHEMA_VERSION, attributes, identity, spans
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE

SERVICE_NAME = "moetrace"
Value = str | int | bool


def step_spans(step: TracedStep, clocks: Mapping[int, RankClock]) -> Iterator[list[ReadableSpan]]:
    """The spans of one step, rank step by rank step: its own span first, then its children."""
    exchanges = {exchange.key: exchange for exchange in exchanges_of(step)}
    for one in step.joined.rank_steps:
        start = one.start_unix_ns
        if one.rank in clocks:
            start = int(clocks[one.rank].fit.to_reference(np.array([start], dtype=np.int64))[0])
        resource = Resource({"service.name": SERVICE_NAME, "host.name": one.host_name})
        parent = _context(one)
        own = _span(
            spans.MOE_STEP,
            parent,
            None,
            resource,
            _step_attributes(one, step),
            start,
            one.duration_ns,
        )
        yield [own, *(_child(one, row, start, parent, resource, exchanges) for row in rows_of(one))]


def _child(
    one: RankStep,
    row: PhaseRow,
    start_unix_ns: int,
    parent: SpanContext,
    resource: Resource,
    exchanges: Mapping[ExchangeKey, Exchange],
) -> ReadableSpan:
    values = _row_attributes(one, row)
    links: tuple[Link, ...] = ()
    if row.is_barrier:
        exchange = exchanges[exchange_key(one, row)]
        mine = exchange.participants[one.rank]
        values[attributes.WAIT_NS] = mine.wait_ns
        if exchange.releaser_rank >= 0:
            values[attributes.RELEASER_RANK] = exchange.releaser_rank
        releaser = exchange.releaser
        if releaser is not None and releaser.rank_step is not one and mine.wait_ns > 0:
            links = (Link(_row_context(_context(releaser.rank_step), releaser.row)),)
    return _span(
        spans.MOE_PHASE,
        _row_context(parent, row),
        parent,
        resource,
        values,
        start_unix_ns + row.start_offset_ns,
        row.duration_ns,
        links=links,
        error=row.is_error,
    )


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    values: Mapping[str, Value],
    start_unix_ns: int,
    duration_ns: int,
    *,
    links: tuple[Link, ...] = (),
    error: bool = False,
) -> ReadableSpan:
    return ReadableSpan(
        name=name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=values,
        links=links,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if error else StatusCode.UNSET),
        start_time=start_unix_ns,
        end_time=start_unix_ns + duration_ns,
        instrumentation_scope=InstrumentationScope(SERVICE_NAME, version=str(SCHEMA_VERSION)),
    )


def _context(one: RankStep) -> SpanContext:
    trace = identity.trace_id(one.run_id, one.step)
    return SpanContext(
        trace,
        identity.span_id(trace, one.rank, one.microbatch),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _row_context(parent: SpanContext, row: PhaseRow) -> SpanContext:
    return SpanContext(
        parent.trace_id,
        identity.phase_span_id(
            parent.span_id,
            row.layer,
            PHASE_CODE[row.phase],
            DIRECTION_CODE[row.direction],
            row.microbatch,
            row.ordinal,
            barrier=row.is_barrier,
        ),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _step_attributes(one: RankStep, step: TracedStep) -> dict[str, Value]:
    verdict = step.row
    values: dict[str, Value] = {
        attributes.SCHEMA_VERSION: SCHEMA_VERSION,
        attributes.RUN_ID: one.run_id,
        attributes.STEP_INDEX: one.step,
        attributes.RANK: one.rank,
        attributes.WORLD_SIZE: one.world_size,
        attributes.EP_RANK: one.ep_rank,
        attributes.EP_SIZE: one.ep_size,
        attributes.EP_GROUP: one.ep_group,
        attributes.MICROBATCH_INDEX: one.microbatch,
        attributes.FORWARD_MODE: str(one.forward_mode),
        attributes.SAMPLE_PERIOD: one.sample_period,
        attributes.STEP_WARMUP: one.warmup,
        attributes.CLOCK: one.clock,
        attributes.DURATION_NS: one.duration_ns,
        attributes.MODEL_NAME: one.model_name,
        attributes.MODEL_VERSION: one.model_version,
        attributes.COHORT: one.cohort,
        attributes.PLACEMENT_VERSION: one.placement_version,
        attributes.VERDICT_EVIDENCE: str(verdict.evidence),
        attributes.VERDICT_REASON: verdict.reason,
    }
    if one.anchor_error_ns >= 0:
        values[attributes.ANCHOR_ERROR_NS] = one.anchor_error_ns
    if verdict.suspect is not None:
        values |= {
            attributes.VERDICT_RANK: verdict.suspect.rank,
            attributes.VERDICT_PHASE: str(verdict.suspect.phase),
            attributes.VERDICT_CAUSE: str(verdict.cause),
            attributes.VERDICT_WORTH_NS: verdict.suspect.worth_ns,
        }
        if verdict.suspect.layer is not None:
            values[attributes.VERDICT_LAYER] = verdict.suspect.layer
    return values


def _row_attributes(one: RankStep, row: PhaseRow) -> dict[str, Value]:
    values: dict[str, Value] = {
        attributes.PHASE: str(row.phase),
        attributes.LAYER_INDEX: row.layer,
        attributes.DIRECTION: str(row.direction),
        attributes.MICROBATCH_INDEX: row.microbatch,
        attributes.ORDINAL: row.ordinal,
        attributes.STREAM: row.stream,
        attributes.FLAGS: row.flags,
        attributes.RANK: one.rank,
    }
    if row.bytes >= 0:
        values[attributes.BYTES] = row.bytes
    if row.rows >= 0:
        values[attributes.ROWS] = row.rows
    return values
