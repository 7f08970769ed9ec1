"""Sends spans to an OTLP/HTTP endpoint, whole rank steps at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from moetrace_collectors.errors import UsageError

PATH = "/v1/traces"
TIMEOUT_S = 10.0
SPANS_PER_REQUEST = 2000
"""A rank step is never split over two requests: a reader finds its children beside it."""
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)


def endpoint_of(url: str) -> str:
    """Where traces go, from a base address or a full one.

    Raises:
        UsageError: it is no http or https address.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--otlp {url}: an address as in http://localhost:4318 expected")
    return url if url.rstrip("/").endswith(PATH) else url.rstrip("/") + PATH


def make_exporter(url: str) -> SpanExporter:
    """OTLP over HTTP with gzip; headers from OTEL_EXPORTER_OTLP_HEADERS, as the SDK reads them."""
    for name in _LOGGERS:
        # It logs what the command then says itself, in one line.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint_of(url), timeout=TIMEOUT_S, compression=Compression.Gzip)


def send(exporter: SpanExporter, rank_steps: Iterable[Sequence[ReadableSpan]]) -> tuple[int, int]:
    """Send everything; ends at the first request that is not taken.

    Returns:
        Spans taken, and spans of the request that was not taken (0 where all were).
    """
    taken = 0
    for batch in _batches(rank_steps):
        if exporter.export(batch) is not SpanExportResult.SUCCESS:
            return taken, len(batch)
        taken += len(batch)
    return taken, 0


def _batches(rank_steps: Iterable[Sequence[ReadableSpan]]) -> Iterator[list[ReadableSpan]]:
    batch: list[ReadableSpan] = []
    for spans in rank_steps:
        if batch and len(batch) + len(spans) > SPANS_PER_REQUEST:
            yield batch
            batch = []
        batch += spans
    if batch:
        yield batch
