"""Counters, gauges and histograms of the metric catalogue, each with a hard bound on its label sets.

Unlike prometheus_client's own metric classes these refuse a label set beyond the catalogue's
`max_series` (and count the refusal), forget a run's label sets, and expose exactly the catalogue's
names. They are collected by a prometheus_client registry.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from moetrace_schemas import metrics
from moetrace_schemas.metrics import MetricSpec

Labels = tuple[str, ...]
"""Label values in the catalogue's order."""
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Steps and verdicts."""
EXCHANGE_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""One all-to-all: tens of microseconds inside a node, milliseconds across nodes."""


class _Series:
    """Label sets of one metric."""

    def __init__(self, spec: MetricSpec, lock: threading.Lock, refuse: Callable[[MetricSpec], None]) -> None:
        self.spec = spec
        self._lock = lock
        self._refuse = refuse
        self._run_index = spec.labels.index("run_id") if "run_id" in spec.labels else None

    def _has_room(self, used: int, labels: Labels) -> bool:
        # A wrong number of labels is a fault of ours, not of the data.
        assert len(labels) == len(self.spec.labels), (self.spec.name, labels)
        if used < self.spec.max_series:
            return True
        self._refuse(self.spec)
        return False

    def _of_run(self, keys: Iterable[Labels], run_id: str) -> list[Labels]:
        if self._run_index is None:
            return []
        return [key for key in keys if key[self._run_index] == run_id]


class Counter(_Series):
    """Only grows."""

    def __init__(self, spec: MetricSpec, lock: threading.Lock, refuse: Callable[[MetricSpec], None]) -> None:
        super().__init__(spec, lock, refuse)
        self._values: dict[Labels, float] = {}
        if not spec.labels:
            # A rate needs a first sample, so what has no labels is there from the start.
            self._values[()] = 0.0

    def add(self, amount: float = 1.0, labels: Labels = ()) -> None:
        """Add to one label set; refused and counted where it would be one too many."""
        with self._lock:
            before = self._values.get(labels)
            if before is None and not self._has_room(len(self._values), labels):
                return
            self._values[labels] = (before or 0.0) + amount

    def forget_run(self, run_id: str) -> None:
        """Drop the label sets of a run."""
        with self._lock:
            for key in self._of_run(self._values, run_id):
                del self._values[key]

    def collect(self) -> Metric:
        """What a scrape sees."""
        family = CounterMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        with self._lock:
            for labels, value in self._values.items():
                family.add_metric(labels, value)
        return family


class Gauge(_Series):
    """Goes up and down."""

    def __init__(self, spec: MetricSpec, lock: threading.Lock, refuse: Callable[[MetricSpec], None]) -> None:
        super().__init__(spec, lock, refuse)
        self._values: dict[Labels, float] = {}
        if not spec.labels:
            self._values[()] = 0.0

    def set(self, value: float, labels: Labels = ()) -> None:
        """Set one label set; refused and counted where it would be one too many."""
        with self._lock:
            if labels in self._values or self._has_room(len(self._values), labels):
                self._values[labels] = value

    def forget_run(self, run_id: str) -> None:
        """Drop the label sets of a run."""
        with self._lock:
            for key in self._of_run(self._values, run_id):
                del self._values[key]

    def collect(self) -> Metric:
        """What a scrape sees."""
        family = GaugeMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        with self._lock:
            for labels, value in self._values.items():
                family.add_metric(labels, value)
        return family


class Histogram(_Series):
    """Counts seconds in buckets."""

    def __init__(
        self,
        spec: MetricSpec,
        lock: threading.Lock,
        refuse: Callable[[MetricSpec], None],
        bounds: tuple[float, ...] = SECONDS_BUCKETS,
    ) -> None:
        super().__init__(spec, lock, refuse)
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, seconds: float, labels: Labels = ()) -> None:
        """Count one value; refused and counted where its label set would be one too many."""
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                if not self._has_room(len(self._counts), labels):
                    return
                counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
                self._sums[labels] = 0.0
            counts[bisect.bisect_left(self._bounds, seconds)] += 1
            self._sums[labels] += seconds

    def forget_run(self, run_id: str) -> None:
        """Drop the label sets of a run."""
        with self._lock:
            for key in self._of_run(self._counts, run_id):
                del self._counts[key], self._sums[key]

    def collect(self) -> Metric:
        """What a scrape sees."""
        family = HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        with self._lock:
            for labels, counts in self._counts.items():
                buckets: list[tuple[str, float]] = []
                total = 0
                for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
                    total += count
                    buckets.append((bound, float(total)))
                family.add_metric(list(labels), buckets=buckets, sum_value=self._sums[labels])
        return family


_AnySeries = TypeVar("_AnySeries", Counter, Gauge, Histogram)


class SeriesBook:
    """Every series of this process; a prometheus_client Collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Counter | Gauge | Histogram] = {}
        """By metric."""
        self._refusals: dict[str, float] = {}

    def counter(self, spec: MetricSpec) -> Counter:
        """A counter of the catalogue; the one that there is where it was asked for before."""
        assert spec.kind == "counter", spec.name
        return self._keep(Counter(spec, self._lock, self._refuse))

    def gauge(self, spec: MetricSpec) -> Gauge:
        """A gauge of the catalogue."""
        assert spec.kind == "gauge", spec.name
        return self._keep(Gauge(spec, self._lock, self._refuse))

    def histogram(self, spec: MetricSpec, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
        """A histogram of the catalogue."""
        assert spec.kind == "histogram", spec.name
        return self._keep(Histogram(spec, self._lock, self._refuse, bounds))

    def refuse(self, spec: MetricSpec) -> None:
        """Count a label set that a caller did not even try because of a budget of its own."""
        with self._lock:
            self._refuse(spec)

    def forget_run(self, run_id: str) -> None:
        """Drop every label set of a run."""
        for series in self._registered():
            series.forget_run(run_id)

    def collect(self) -> Sequence[Metric]:
        """What a scrape sees."""
        refused = CounterMetricFamily(
            metrics.SERIES_REFUSED_TOTAL.name,
            metrics.SERIES_REFUSED_TOTAL.help,
            labels=metrics.SERIES_REFUSED_TOTAL.labels,
        )
        with self._lock:
            for name, count in self._refusals.items():
                refused.add_metric([name], count)
        return [*(series.collect() for series in self._registered()), refused]

    def _registered(self) -> tuple[Counter | Gauge | Histogram, ...]:
        # A scrape may come while a sink still registers its own; each series takes the lock by itself.
        with self._lock:
            return tuple(self._all.values())

    def _keep(self, series: _AnySeries) -> _AnySeries:
        with self._lock:
            known = self._all.setdefault(series.spec.name, series)
        # One metric is of one kind: the catalogue says which.
        assert isinstance(known, type(series)), series.spec.name
        return known

    def _refuse(self, spec: MetricSpec) -> None:
        # Called with the lock held.
        self._refusals[spec.name] = self._refusals.get(spec.name, 0.0) + 1.0
