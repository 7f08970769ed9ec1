"""A running collector's /metrics -> its own counters, and one line of them for people."""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from moetrace_collectors.access.client import client_access, explain
from moetrace_collectors.errors import UsageError
from moetrace_collectors.number_format import duration_text
from moetrace_collectors.views.recent_records import CollectorCounters
from moetrace_schemas import metrics
from moetrace_schemas.metrics import MetricSpec

TIMEOUT_S = 10.0


def read_counters(url: str, *, clock_s: Callable[[], float] = time.monotonic) -> CollectorCounters:
    """What the collector at `url` says of itself.

    Raises:
        UsageError: it does not answer, not as a collector does, or the environment's token or certificate
            does not do.
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics")
    try:
        text = client_access().fetch(request, timeout_s=TIMEOUT_S).decode()
        return parse_counters(text, read_monotonic_s=clock_s())
    except UsageError:
        raise
    except urllib.error.HTTPError as error:
        if (told := explain(url, error)) is not None:
            raise UsageError(told) from error
        raise UsageError(f"{url}/metrics answers {error.code}: check --url") from error
    except (OSError, ValueError) as error:
        if (told := explain(url, error)) is not None:
            raise UsageError(told) from error
        reason = getattr(error, "reason", error)
        raise UsageError(f"no collector answers at {url}/metrics ({reason}): check --url") from error


def parse_counters(text: str, *, read_monotonic_s: float) -> CollectorCounters:
    """Counters from the text that Prometheus scrapes.

    Raises:
        ValueError: it is no such text, or not a collector's.
    """
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def total(spec: MetricSpec) -> int:
        family = families.get(spec.name.removesuffix("_total"))
        return round(sum(sample.value for sample in _values(family, spec)))

    if metrics.COLLECTOR_RECEIVED_TOTAL.name.removesuffix("_total") not in families:
        raise ValueError("no metrics of a collector")
    return CollectorCounters(
        read_monotonic_s=read_monotonic_s,
        received=total(metrics.COLLECTOR_RECEIVED_TOTAL),
        joined=total(metrics.COLLECTOR_JOINED_TOTAL),
        late=total(metrics.COLLECTOR_LATE_TOTAL),
        duplicate=total(metrics.COLLECTOR_DUPLICATE_TOTAL),
        rejected=total(metrics.COLLECTOR_REJECTED_TOTAL),
        pending=total(metrics.COLLECTOR_PENDING),
        throttled=total(metrics.COLLECTOR_THROTTLED_TOTAL),
        lost_rows=total(metrics.COLLECTOR_LOST_ROWS_TOTAL),
        sink_errors=total(metrics.COLLECTOR_SINK_ERRORS_TOTAL),
        verdict_p99_s=_p99(families.get(metrics.COLLECTOR_VERDICT_LATENCY_SECONDS.name)),
    )


def health_line(now: CollectorCounters, before: CollectorCounters | None) -> str:
    """The counters in a sentence; with an earlier reading also what arrives per second."""
    received = f"{now.received:,} rank steps received"
    if before is not None and now.read_monotonic_s > before.read_monotonic_s:
        seconds = now.read_monotonic_s - before.read_monotonic_s
        # A restarted collector counts from zero.
        received += f" ({max(0, now.received - before.received) / seconds:,.1f}/s)"
    parts = [f"{received}, {now.joined:,} joined, {now.pending:,} pending"]
    parts += [
        f"{value:,} {words}"
        for value, words in (
            (now.late, "late"),
            (now.duplicate, "duplicate"),
            (now.rejected, "rejected"),
            (now.throttled, "requests told to wait"),
            (now.sink_errors, "failed writes"),
            (now.lost_rows, "rows lost"),
        )
        if value
    ]
    if now.verdict_p99_s is not None:
        bound = "over the largest bucket" if math.isinf(now.verdict_p99_s) else ""
        parts.append(f"verdict p99 {bound or 'within ' + duration_text(now.verdict_p99_s * 1e9)}")
    return ", ".join(parts)


def is_troubled(now: CollectorCounters, before: CollectorCounters | None) -> bool:
    """Whether something is lost or held up: since the earlier reading, or ever where there is none."""
    if before is None:
        return bool(now.rejected or now.lost_rows or now.sink_errors or now.throttled)
    return any(
        after > earlier
        for after, earlier in (
            (now.rejected, before.rejected),
            (now.lost_rows, before.lost_rows),
            (now.sink_errors, before.sink_errors),
            (now.throttled, before.throttled),
        )
    )


def _values(family: Metric | None, spec: MetricSpec) -> Iterable[Sample]:
    return [] if family is None else [sample for sample in family.samples if sample.name == spec.name]


def _p99(family: Metric | None) -> float | None:
    if family is None:
        return None
    buckets = sorted(
        (float(sample.labels["le"]), sample.value)
        for sample in family.samples
        if sample.name.endswith("_bucket")
    )
    if not buckets or not buckets[-1][1]:
        return None
    return next(bound for bound, count in buckets if count >= 0.99 * buckets[-1][1])
