"""OTLP export request -> RankSteps, rejections and foreign spans. Pure stage behind the receivers.

Everything from the wire is checked here once, so that later stages trust their types: required
attributes and their types, closed sets, ranges, array lengths, finite limits, and that the trace id
is the one that run id and step give. Only `moe.step` and `moe.placement` spans are read. A `moe.step`
span carries its phase rows packed, or as `moe.phase` children in the same request; a child whose parent
is not there counts as foreign, like every other span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_collectors.decode_columns import (
    decode_coactivation,
    decode_experts,
    decode_phases,
    decode_traffic,
    decode_violations,
    decode_waits,
)
from moetrace_collectors.decode_placement import PlacementRejectedError, decode_placement
from moetrace_collectors.decode_spans import children_by_parent, pack_children
from moetrace_collectors.events import MAX_PAYLOAD_BYTES, Rejection
from moetrace_collectors.model import PlacementReport, RankStep
from moetrace_collectors.phase_shapes import PhaseShapes
from moetrace_schemas import SCHEMA_VERSION, attributes, identity, spans
from moetrace_schemas.columns import ColumnsError
from moetrace_schemas.enums import ForwardMode, RejectReason

HOST_NAME = "host.name"
"""OpenTelemetry's own resource attribute for the sender's host."""
PREFIX = "moetrace."
CLOCKS = ("host", "cuda", "device")
MAX_TEXT = 256
"""Characters of a model name, version, cohort or host; they become column values and labels."""
MAX_ATTRIBUTES = 128
"""Attributes, events and links of one span."""
MAX_BLOCK_BYTES = 32 * 2**20
"""One packed column."""
MAX_OTHER_BYTES = 64 * 1_024
"""A span without its packed columns."""
MAX_STEP = identity.HIGHEST_STEP
MAX_INDEX = 2**31 - 1
MAX_MICROBATCH = 65_535
MAX_NS = 2**53
"""104 days, and exact as a float64."""
MAX_DETAIL = 300
MIN_UNIX_NS = 946_684_800 * 10**9
"""2000-01-01. The store partitions by day: a clock far off would make partitions without end."""
MAX_UNIX_NS = 4_102_444_800 * 10**9
"""2100-01-01; a DateTime, which the time to live is computed in, ends in 2106."""

_BLOCKS = tuple(name for name, kind in attributes.TYPES.items() if kind == "bytes")
"""Packed columns."""
_TYPE_OF_FIELD = {
    "string_value": "string",
    "bool_value": "bool",
    "int_value": "int",
    "double_value": "double",
    "bytes_value": "bytes",
    "array_value": "array",
    "kvlist_value": "kvlist",
    None: "empty",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What one request held; `rank_steps + rejected` is what counts as received."""

    rank_steps: tuple[RankStep, ...]
    rejected: tuple[Rejection, ...]
    num_foreign_spans: int
    placements: tuple[PlacementReport, ...] = ()


class _RejectedError(Exception):
    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def decode(
    request: ExportTraceServiceRequest, *, max_world_size: int, shapes: PhaseShapes | None = None
) -> Decoded:
    """Decode one request; a bad span never costs its neighbours.

    Args:
        request: as parsed from protobuf or JSON.
        max_world_size: largest world size taken; bounds what one forged span can make the joiner list.
        shapes: what earlier requests had in common; None looks at everything anew.
    """
    rank_steps: list[RankStep] = []
    rejected: list[Rejection] = []
    placements: list[PlacementReport] = []
    num_foreign = 0
    children = children_by_parent(request)
    num_orphans = sum(map(len, children.values()))
    for resource_spans in request.resource_spans:
        host_name = _host_name(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if span.name == spans.MOE_PHASE:
                    continue
                values = {entry.key: entry.value for entry in span.attributes[:MAX_ATTRIBUTES]}
                if not _is_ours(span, values):
                    num_foreign += 1
                    continue
                own = children.get((span.trace_id, span.span_id), ())
                num_orphans -= len(own)
                try:
                    _check_size(span, values)
                    _check_children(own)
                    if span.name == spans.MOE_PLACEMENT:
                        placements.append(
                            decode_placement(span, values, host_name, max_world_size=max_world_size)
                        )
                    else:
                        rank_steps.append(_rank_step(span, values, own, host_name, max_world_size, shapes))
                except (_RejectedError, PlacementRejectedError) as error:
                    rejected.append(_rejection(error.reason, str(error), span, values))
    # Two steps of one span id would both claim its children.
    return Decoded(
        rank_steps=tuple(rank_steps),
        rejected=tuple(rejected),
        num_foreign_spans=num_foreign + max(0, num_orphans),
        placements=tuple(placements),
    )


def _is_ours(span: Span, values: Mapping[str, AnyValue]) -> bool:
    if attributes.SCHEMA_VERSION in values or attributes.COLUMNS_PHASES in values:
        return True
    return span.name == spans.MOE_STEP and any(name.startswith(PREFIX) for name in values)


def _check_size(span: Span, values: Mapping[str, AnyValue]) -> int:
    """The size of a span that is within the limits, bytes."""
    number = len(span.attributes) + len(span.events) + len(span.links)
    if number > MAX_ATTRIBUTES:
        raise _RejectedError(
            RejectReason.TOO_MANY_ATTRIBUTES,
            f"{number} attributes, events and links, at most {MAX_ATTRIBUTES} are taken",
        )
    blocks = 0
    for name in _BLOCKS:
        if name in values:
            block = len(values[name].bytes_value)
            if block > MAX_BLOCK_BYTES:
                raise _RejectedError(
                    RejectReason.ATTRIBUTE_TOO_LARGE, f"{name}: {block} bytes, at most {MAX_BLOCK_BYTES}"
                )
            blocks += block
    size = span.ByteSize()
    other = size - blocks
    if other > MAX_OTHER_BYTES:
        raise _RejectedError(
            RejectReason.ATTRIBUTE_TOO_LARGE,
            f"{other} bytes beside the packed columns, at most {MAX_OTHER_BYTES} are taken",
        )
    return size


def _check_children(children: Sequence[Span]) -> None:
    """Each child is held to the limits of a span, all of them to that of the column that they stand for."""
    try:
        size = sum(_check_size(child, {}) for child in children)
    except _RejectedError as error:
        raise _RejectedError(error.reason, f"{spans.MOE_PHASE} span: {error}") from error
    if size > MAX_BLOCK_BYTES:
        raise _RejectedError(
            RejectReason.ATTRIBUTE_TOO_LARGE,
            f"{len(children)} {spans.MOE_PHASE} spans of {size} bytes, at most {MAX_BLOCK_BYTES}",
        )


def _rank_step(
    span: Span,
    values: Mapping[str, AnyValue],
    children: Sequence[Span],
    host_name: str,
    max_world_size: int,
    shapes: PhaseShapes | None,
) -> RankStep:
    # The version first: a newer writer may have renamed anything else.
    if attributes.SCHEMA_VERSION in values:
        version = _int(values, attributes.SCHEMA_VERSION, 0, MAX_INDEX)
        if not 1 <= version <= SCHEMA_VERSION:
            raise _RejectedError(
                RejectReason.UNSUPPORTED_SCHEMA_VERSION,
                f"{attributes.SCHEMA_VERSION} is {version}, this collector reads up to {SCHEMA_VERSION}: "
                "upgrade the collector first",
            )
    for name in attributes.REQUIRED:
        if name not in values and not (name == attributes.COLUMNS_PHASES and children):
            raise _RejectedError(RejectReason.MISSING_ATTRIBUTE, f"{name} is missing")
    run_id = _string(values, attributes.RUN_ID)
    if identity.RUN_ID_PATTERN.fullmatch(run_id) is None:
        raise _invalid(attributes.RUN_ID, repr(run_id), "1 to 128 of [A-Za-z0-9._:-]")
    step = _int(values, attributes.STEP_INDEX, 0, MAX_STEP)
    world_size = _int(values, attributes.WORLD_SIZE, 1, max_world_size)
    ep_size = _int(values, attributes.EP_SIZE, 1, world_size)
    ep_rank = _int(values, attributes.EP_RANK, 0, ep_size - 1)
    clock = _string(values, attributes.CLOCK)
    if clock not in CLOCKS:
        raise _invalid(attributes.CLOCK, repr(clock), "host, cuda or device")
    if not MIN_UNIX_NS <= span.start_time_unix_nano <= MAX_UNIX_NS:
        raise _invalid(
            "start time", str(span.start_time_unix_nano), "unix ns between the years 2000 and 2100"
        )
    if int.from_bytes(span.trace_id, "big") != identity.trace_id(run_id, step) or len(span.trace_id) != 16:
        raise _RejectedError(
            RejectReason.IDENTITY_MISMATCH,
            f"trace id {span.trace_id.hex()} is not the one of run {run_id}, step {step}",
        )
    rank = _int(values, attributes.RANK, 0, world_size - 1)
    microbatch = _int(values, attributes.MICROBATCH_INDEX, 0, MAX_MICROBATCH)
    try:
        phases = decode_phases(
            _bytes(values, attributes.COLUMNS_PHASES)
            if attributes.COLUMNS_PHASES in values
            else pack_children(children, start_unix_ns=span.start_time_unix_nano, microbatch=microbatch),
            microbatch=microbatch,
            shapes=shapes,
        )
        experts = (
            decode_experts(_bytes(values, attributes.COLUMNS_EXPERTS))
            if attributes.COLUMNS_EXPERTS in values
            else ()
        )
        traffic = (
            decode_traffic(_bytes(values, attributes.COLUMNS_TRAFFIC), ep_size=ep_size)
            if attributes.COLUMNS_TRAFFIC in values
            else ()
        )
        violations = (
            decode_violations(_bytes(values, attributes.COLUMNS_VIOLATIONS))
            if attributes.COLUMNS_VIOLATIONS in values
            else ()
        )
        coactivation = (
            decode_coactivation(_bytes(values, attributes.COLUMNS_COACTIVATION))
            if attributes.COLUMNS_COACTIVATION in values
            else None
        )
        waits = (
            decode_waits(_bytes(values, attributes.COLUMNS_WAITS), ep_size=ep_size)
            if attributes.COLUMNS_WAITS in values
            else ()
        )
    except ColumnsError as error:
        raise _RejectedError(RejectReason.MALFORMED_COLUMNS, str(error)) from error
    return RankStep(
        run_id=run_id,
        step=step,
        rank=rank,
        microbatch=microbatch,
        world_size=world_size,
        ep_rank=ep_rank,
        ep_size=ep_size,
        ep_group=_int(values, attributes.EP_GROUP, 0, world_size - 1),
        forward_mode=_forward_mode(values),
        sample_period=_int(values, attributes.SAMPLE_PERIOD, 1, MAX_INDEX),
        warmup=_bool(values, attributes.STEP_WARMUP),
        clock=clock,
        duration_ns=_int(values, attributes.DURATION_NS, 0, MAX_NS),
        start_unix_ns=span.start_time_unix_nano,
        host_name=host_name,
        model_name=_text(values, attributes.MODEL_NAME),
        model_version=_text(values, attributes.MODEL_VERSION),
        cohort=_text(values, attributes.COHORT),
        placement_version=_optional_int(values, attributes.PLACEMENT_VERSION),
        anchor_error_ns=(
            _int(values, attributes.ANCHOR_ERROR_NS, 0, MAX_NS)
            if attributes.ANCHOR_ERROR_NS in values
            else -1
        ),
        tracer_ns=_int(values, attributes.TRACER_NS, 0, MAX_NS) if attributes.TRACER_NS in values else -1,
        phases=phases,
        experts=experts,
        traffic=traffic,
        violations=violations,
        coactivation=coactivation,
        waits=waits,
        expected_sites=_optional_int(values, attributes.COVERAGE_EXPECTED_SITES),
        seen_sites=_optional_int(values, attributes.COVERAGE_SEEN_SITES),
    )


def _forward_mode(values: Mapping[str, AnyValue]) -> ForwardMode:
    text = _string(values, attributes.FORWARD_MODE)
    try:
        return ForwardMode(text)
    except ValueError:
        raise _invalid(attributes.FORWARD_MODE, repr(text), ", ".join(ForwardMode)) from None


def _host_name(entries: Sequence[KeyValue]) -> str:
    for entry in entries:
        if entry.key == HOST_NAME and entry.value.WhichOneof("value") == "string_value":
            name = str(entry.value.string_value)[:MAX_TEXT]
            # A host's name is a courtesy of the sender's resource: not worth a rank step.
            return name if name.isprintable() else ""
    return ""


def _typed(values: Mapping[str, AnyValue], name: str) -> AnyValue:
    value = values[name]
    wanted, got = attributes.TYPES[name], _TYPE_OF_FIELD.get(value.WhichOneof("value"), "unknown")
    if got != wanted:
        raise _RejectedError(RejectReason.INVALID_ATTRIBUTE, f"{name}: {wanted} expected, got {got}")
    return value


def _string(values: Mapping[str, AnyValue], name: str) -> str:
    return str(_typed(values, name).string_value)


def _text(values: Mapping[str, AnyValue], name: str) -> str:
    if name not in values:
        return ""
    text = _string(values, name)
    if len(text) > MAX_TEXT:
        raise _invalid(name, f"{len(text)} characters", f"at most {MAX_TEXT}")
    if not text.isprintable():
        # It becomes a label, and a line on somebody's terminal.
        raise _invalid(name, repr(text), "text without control characters")
    return text


def _int(values: Mapping[str, AnyValue], name: str, low: int, high: int) -> int:
    value = int(_typed(values, name).int_value)
    if not low <= value <= high:
        raise _invalid(name, str(value), f"{low} to {high}")
    return value


def _optional_int(values: Mapping[str, AnyValue], name: str) -> int:
    return _int(values, name, 0, MAX_INDEX) if name in values else 0


def _bool(values: Mapping[str, AnyValue], name: str) -> bool:
    return bool(_typed(values, name).bool_value)


def _bytes(values: Mapping[str, AnyValue], name: str) -> bytes:
    return bytes(_typed(values, name).bytes_value)


def _invalid(name: str, got: str, expected: str) -> _RejectedError:
    return _RejectedError(RejectReason.INVALID_ATTRIBUTE, f"{name} is {got}: {expected} expected")


def _rejection(reason: RejectReason, detail: str, span: Span, values: Mapping[str, AnyValue]) -> Rejection:
    """Name run, step and rank as far as they can be read, so that a person can find the sender."""
    run_id = values[attributes.RUN_ID].string_value if attributes.RUN_ID in values else ""
    return Rejection(
        reason=reason,
        detail=detail[:MAX_DETAIL],
        run_id=run_id if identity.RUN_ID_PATTERN.fullmatch(run_id) else "",
        step=_readable(values, attributes.STEP_INDEX, MAX_STEP),
        rank=_readable(values, attributes.RANK, 2**32 - 1),
        payload=span.SerializeToString()[:MAX_PAYLOAD_BYTES],
    )


def _readable(values: Mapping[str, AnyValue], name: str, high: int) -> int | None:
    value = values.get(name)
    if value is None or value.WhichOneof("value") != "int_value" or not 0 <= value.int_value <= high:
        return None
    return int(value.int_value)
