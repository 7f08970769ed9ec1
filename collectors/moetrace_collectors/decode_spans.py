"""Plain child spans -> the packed phase rows that they stand for. Pure; part of the decode stage.

A `moe.step` span without packed phases may have its rows as `moe.phase` children in the same request: what
`moetrace export --otlp` sends, and what instrumentation without packed columns can send. They are packed
into the wire's columns and decoded from there, so that both are checked alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moetrace_schemas import attributes, spans
from moetrace_schemas.columns import PHASES, ColumnsError, pack
from moetrace_schemas.enums import DIRECTION_CODE, PHASE_CODE, Direction

ParentKey = tuple[bytes, bytes]
"""(trace id, span id)"""
_TYPES = {**attributes.TYPES, **attributes.PHASE_TYPES}
_PHASES = {str(phase): code for phase, code in PHASE_CODE.items()}
_DIRECTIONS = {str(direction): code for direction, code in DIRECTION_CODE.items()}
_FIELDS = {name: f"{kind}_value" for name, kind in _TYPES.items()}
Children = Mapping[ParentKey, Sequence[Span]]
_Value = TypeVar("_Value", int, str)


def children_by_parent(request: ExportTraceServiceRequest) -> Children:
    """Every `moe.phase` span of a request by its parent."""
    found: dict[ParentKey, list[Span]] = defaultdict(list)
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if span.name == spans.MOE_PHASE:
                    found[span.trace_id, span.parent_span_id].append(span)
    return found


def pack_children(children: Sequence[Span], *, start_unix_ns: int, microbatch: int) -> bytes:
    """The packed phase rows of a step that begins at `start_unix_ns`, in order of start.

    Raises:
        ColumnsError: a child lacks an attribute, or one does not fit.
    """
    rows = [
        _row(span, start_unix_ns, microbatch)
        for span in sorted(children, key=lambda span: int(span.start_time_unix_nano))
    ]
    try:
        return pack(PHASES, list(zip(*rows, strict=True)))
    except OverflowError as error:
        raise ColumnsError(f"{spans.MOE_PHASE} spans: a value is out of range ({error})") from error


def _row(span: Span, start_unix_ns: int, microbatch: int) -> tuple[int, ...]:
    values = {entry.key: entry.value for entry in span.attributes}
    return (
        _value(values, attributes.LAYER_INDEX, 0, required=True),
        _code(values, attributes.PHASE, _PHASES, None),
        _code(values, attributes.DIRECTION, _DIRECTIONS, str(Direction.FORWARD)),
        _value(values, attributes.MICROBATCH_INDEX, microbatch),
        _value(values, attributes.ORDINAL, 0),
        _value(values, attributes.STREAM, 0),
        _value(values, attributes.FLAGS, 0),
        int(span.start_time_unix_nano) - start_unix_ns,
        int(span.end_time_unix_nano) - int(span.start_time_unix_nano),
        _value(values, attributes.BYTES, -1),
        _value(values, attributes.ROWS, -1),
    )


def _code(
    values: Mapping[str, AnyValue],
    name: str,
    known: Mapping[str, int],
    otherwise: str | None,
) -> int:
    text = _value(values, name, otherwise or "", required=otherwise is None)
    if text not in known:
        raise ColumnsError(f"{spans.MOE_PHASE} span: {name} is {text[:50]!r}: {', '.join(known)} expected")
    return known[text]


def _value(values: Mapping[str, AnyValue], name: str, otherwise: _Value, *, required: bool = False) -> _Value:
    value = values.get(name)
    if value is None:
        if required:
            raise ColumnsError(f"{spans.MOE_PHASE} span: {name} is missing")
        return otherwise
    field = _FIELDS[name]
    if value.WhichOneof("value") != field:
        raise ColumnsError(f"{spans.MOE_PHASE} span: {name}: {_TYPES[name]} expected")
    read: _Value = getattr(value, field)
    return read
