"""The seam between the receivers and the pipeline: what both OTLP receivers call for every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from moetrace_collectors.errors import CollectorError
from moetrace_schemas.enums import RejectReason


class OverloadedError(CollectorError):
    """There is no room; nothing of the request was taken. The sender shall try again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotDurableError(OverloadedError):
    """The request could not be made durable, so it is not acknowledged. The sender shall try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A request's own bytes: an ExportTraceServiceRequest in protobuf, as the write-ahead log keeps it."""

    body: bytes
    is_gzip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that was taken, with the spans of it that were not."""

    rejected_spans: int
    message: str
    """Why, for the sender's log; empty where nothing was rejected."""


class TraceHandler(Protocol):
    """Takes export requests; safe to call from several threads."""

    def take(self, request: ExportTraceServiceRequest, wire: Wire | None = None) -> Accepted:
        """Take one request; what it accepted is durable when it returns.

        Args:
            request: parsed.
            wire: its bytes; None where they were no protobuf.

        Raises:
            OverloadedError: there is no room.
            NotDurableError: the disk does not take it.
        """

    def refuse(self, reason: RejectReason, detail: str, payload: bytes) -> None:
        """Count a request that could not even be split into spans."""


def response(accepted: Accepted) -> ExportTraceServiceResponse:
    """The OTLP answer; partial success is only set where there is something to say."""
    if accepted.rejected_spans == 0:
        return ExportTraceServiceResponse()
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(
            rejected_spans=accepted.rejected_spans, error_message=accepted.message
        )
    )
