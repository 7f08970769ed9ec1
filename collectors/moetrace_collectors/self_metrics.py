"""The collector about itself: ledger of rank steps, what closed, what sinks did, how long a verdict took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moetrace_collectors.intake import LedgerSnapshot
from moetrace_collectors.model import JoinedStep
from moetrace_collectors.series import SeriesBook
from moetrace_schemas import metrics
from moetrace_schemas.enums import QueryFailure, RefuseReason, RejectReason
from moetrace_schemas.metrics import MetricSpec


class SelfMetrics:
    """Counters that the pipeline's stages feed; safe from any thread."""

    def __init__(self, book: SeriesBook) -> None:
        """Make the collector's own series in `book`."""
        self.foreign_spans = book.counter(metrics.COLLECTOR_FOREIGN_SPANS_TOTAL)
        self.throttled = book.counter(metrics.COLLECTOR_THROTTLED_TOTAL)
        self.unavailable = book.counter(metrics.COLLECTOR_UNAVAILABLE_TOTAL)
        self.unread_calls = book.counter(metrics.COLLECTOR_UNREAD_CALLS_TOTAL)
        self.reused_run_ids = book.counter(metrics.COLLECTOR_REUSED_RUN_IDS_TOTAL)
        self.wal_replayed = book.counter(metrics.COLLECTOR_WAL_REPLAYED_TOTAL)
        self.wal_damaged_bytes = book.counter(metrics.COLLECTOR_WAL_DAMAGED_BYTES_TOTAL)
        self.missing_ranks = book.counter(metrics.COLLECTOR_MISSING_RANKS_TOTAL)
        self.sink_queue_steps = book.gauge(metrics.COLLECTOR_SINK_QUEUE_STEPS)
        self.verdict_latency = book.histogram(metrics.COLLECTOR_VERDICT_LATENCY_SECONDS)
        self._steps = book.counter(metrics.COLLECTOR_STEPS_TOTAL)
        self._stored_rows = book.counter(metrics.COLLECTOR_STORED_ROWS_TOTAL)
        self._lost_rows = book.counter(metrics.COLLECTOR_LOST_ROWS_TOTAL)
        self._sink_errors = book.counter(metrics.COLLECTOR_SINK_ERRORS_TOTAL)
        self._refused = book.counter(metrics.COLLECTOR_REFUSED_TOTAL)
        self._query_failures = book.counter(metrics.COLLECTOR_QUERY_FAILURES_TOTAL)
        # A rate needs a first sample, and the reasons are a closed set.
        for refusal in RefuseReason:
            self._refused.add(0, (refusal.value,))
        for failure in QueryFailure:
            self._query_failures.add(0, (failure.value,))

    def step_closed(self, joined: JoinedStep) -> None:
        """A step left the window."""
        self._steps.add(labels=(joined.closed_by.value,))
        self.missing_ranks.add(len(joined.missing_ranks))

    def rows_stored(self, table: str, num_rows: int) -> None:
        """The store took rows."""
        self._stored_rows.add(num_rows, (table,))

    def rows_lost(self, table: str, num_rows: int) -> None:
        """Rows were given up."""
        self._lost_rows.add(num_rows, (table,))

    def refused(self, reason: RefuseReason) -> None:
        """A request or connection was turned away."""
        self._refused.add(labels=(reason.value,))

    def query_failed(self, reason: QueryFailure) -> None:
        """A query was not answered."""
        self._query_failures.add(labels=(reason.value,))

    def sink_failed(self, sink: str) -> None:
        """A write failed."""
        self._sink_errors.add(labels=(sink,))


class LedgerMetrics:
    """The ledger as metrics, all of one snapshot, so that a scrape always adds up."""

    def __init__(self, snapshot: Callable[[], LedgerSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Sequence[Metric]:
        """See prometheus_client's Collector."""
        ledger = self._snapshot()
        rejected = CounterMetricFamily(
            metrics.COLLECTOR_REJECTED_TOTAL.name,
            metrics.COLLECTOR_REJECTED_TOTAL.help,
            labels=metrics.COLLECTOR_REJECTED_TOTAL.labels,
        )
        for reason in RejectReason:
            rejected.add_metric([reason.value], ledger.rejected.get(reason, 0))
        return [
            _counter(metrics.COLLECTOR_RECEIVED_TOTAL, ledger.received),
            _counter(metrics.COLLECTOR_JOINED_TOTAL, ledger.joined),
            _counter(metrics.COLLECTOR_LATE_TOTAL, ledger.late),
            _counter(metrics.COLLECTOR_DUPLICATE_TOTAL, ledger.duplicate),
            rejected,
            _gauge(metrics.COLLECTOR_PENDING, ledger.pending),
            _gauge(metrics.COLLECTOR_WAL_BACKLOG_REQUESTS, ledger.backlog_requests),
        ]


class WalMetrics:
    """Size and syncs of the write-ahead log, read at each scrape."""

    def __init__(self, *, num_bytes: Callable[[], int], num_syncs: Callable[[], int]) -> None:
        self._num_bytes = num_bytes
        self._num_syncs = num_syncs

    def collect(self) -> Sequence[Metric]:
        """See prometheus_client's Collector."""
        return [
            _gauge(metrics.COLLECTOR_WAL_BYTES, self._num_bytes()),
            _counter(metrics.COLLECTOR_WAL_SYNCS_TOTAL, self._num_syncs()),
        ]


def make_registry(book: SeriesBook, snapshot: Callable[[], LedgerSnapshot]) -> CollectorRegistry:
    """A registry of exactly this collector's metrics; the process-wide one is left alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerMetrics(snapshot))
    registry.register(book)
    return registry


def _gauge(spec: MetricSpec, value: int) -> Metric:
    return GaugeMetricFamily(spec.name, spec.help, value=value)


def _counter(spec: MetricSpec, value: int) -> Metric:
    return CounterMetricFamily(spec.name, spec.help, value=value)
