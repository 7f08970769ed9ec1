"""A placement as an OTLP request: how `moetrace placement record` reaches a collector."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http import HTTPStatus

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from moetrace_collectors.access.client import TOKEN, TOKEN_FILE, client_access, explain
from moetrace_collectors.access.scopes import Scope
from moetrace_collectors.errors import UsageError
from moetrace_collectors.model import PlacementReport
from moetrace_schemas import SCHEMA_VERSION, attributes, identity, spans
from moetrace_schemas.columns import PLACEMENT, pack
from moetrace_schemas.placement import canonical_json

TIMEOUT_S = 30.0


def placement_request(
    report: PlacementReport, *, world_size: int, time_unix_ns: int
) -> ExportTraceServiceRequest:
    """The request that carries one placement."""
    terms, mapping = report.terms, report.mapping
    rows = mapping.physical_to_logical
    told: dict[str, str | int | float | bytes | None] = {
        attributes.SCHEMA_VERSION: SCHEMA_VERSION,
        attributes.RUN_ID: report.run_id,
        attributes.STEP_INDEX: report.step,
        attributes.RANK: report.rank,
        attributes.WORLD_SIZE: world_size,
        attributes.PLACEMENT_VERSION: report.version,
        attributes.PLACEMENT_EXPERTS: mapping.num_experts,
        attributes.PLACEMENT_RANKS: mapping.num_ranks,
        attributes.PLACEMENT_DIGEST: mapping.digest(),
        attributes.COLUMNS_PLACEMENT: pack(
            PLACEMENT,
            [list(mapping.layers), [len(row) for row in rows]],
            [expert for row in rows for expert in row],
        ),
        attributes.PLACEMENT_KIND: report.event.value,
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
        attributes.PLACEMENT_COMPARISON: report.comparison or None,
    }
    trace = identity.trace_id(report.run_id, report.step)
    span = Span(
        trace_id=trace.to_bytes(16, "big"),
        span_id=identity.placement_span_id(trace, report.version, report.rank).to_bytes(8, "big"),
        name=spans.MOE_PLACEMENT,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=time_unix_ns,
        end_time_unix_nano=time_unix_ns,
        attributes=[
            KeyValue(key=name, value=_value(value)) for name, value in told.items() if value is not None
        ],
    )
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])


def send(url: str, report: PlacementReport, *, world_size: int) -> None:
    """Give a placement to a running collector.

    Raises:
        UsageError: nobody answers there, or the collector refuses it, in its own words.
    """
    message = placement_request(report, world_size=world_size, time_unix_ns=time.time_ns())
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/traces",
        data=message.SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
        method="POST",
    )
    try:
        body = ExportTraceServiceResponse.FromString(client_access().fetch(request, timeout_s=TIMEOUT_S))
    except UsageError:
        raise
    except urllib.error.HTTPError as error:
        if (told := explain(url, error, scope=Scope.INGEST)) is not None:
            raise UsageError(told) from error
        if error.code == HTTPStatus.FORBIDDEN:
            raise UsageError(
                f"the collector at {url} refuses the token: set {TOKEN_FILE} (or {TOKEN}) to one with scope "
                f"{Scope.INGEST}"
            ) from error
        raise UsageError(f"the collector at {url} answered {error.code}: try again later") from error
    except (OSError, ValueError) as error:
        if (told := explain(url, error)) is not None:
            raise UsageError(told) from error
        reason = getattr(error, "reason", error)
        raise UsageError(f"no collector answers at {url} ({reason}): check --url") from error
    if body.partial_success.rejected_spans:
        raise UsageError(
            f"the collector at {url} refuses the placement: {body.partial_success.error_message}"
        )


def _value(value: str | int | float | bytes) -> AnyValue:
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    return AnyValue(string_value=value)
