"""In-process `/metrics`: the tracer's own counters and this rank's phase times, catalogue names only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moetrace.guard import Guard
from moetrace.record.types import StepRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import metrics as catalogue

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Coarse on purpose: gateways with a fixed preset drop series with other boundaries."""


class PrometheusEmitter:
    """Observes records into histograms; counters are read from the tracer when scraped."""

    name = "prometheus"

    def __init__(self, registry: CollectorRegistry, metrics: SelfMetrics, guard: Guard) -> None:
        self._metrics = metrics
        phase, step = catalogue.PHASE_DURATION_SECONDS, catalogue.STEP_DURATION_SECONDS
        self._phase = Histogram(phase.name, phase.help, phase.labels, buckets=STEP_BUCKETS, registry=registry)
        self._step = Histogram(step.name, step.help, step.labels, buckets=STEP_BUCKETS, registry=registry)
        self._registry = registry
        self._self = _SelfCollector(metrics, guard)
        registry.register(self._self)

    def emit(self, record: StepRecord) -> None:
        """Add one step to the histograms."""
        totals: dict[str, int] = {}
        for row in record.phases:
            totals[row.phase] = totals.get(row.phase, 0) + row.duration_ns
        for phase, duration_ns in totals.items():
            self._phase.labels(phase=phase).observe(duration_ns / 1e9)
        self._step.labels(forward_mode=record.forward_mode).observe(record.duration_ns / 1e9)
        self._metrics.exported[self.name] += 1

    def close(self, deadline_monotonic_s: float) -> bool:
        """Leave the registry, so that a later tracer can use it; nothing is queued."""
        for collector in (self._phase, self._step, self._self):
            self._registry.unregister(collector)
        return True


class _SelfCollector(Collector):
    """Reads the tracer's counters at scrape time."""

    def __init__(self, metrics: SelfMetrics, guard: Guard) -> None:
        self._metrics = metrics
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        """All self metrics of the catalogue."""
        m = self._metrics
        yield _counter(
            catalogue.SELF_STEPS_TOTAL, {"sampled": m.steps_sampled, "not_sampled": m.steps_not_sampled}
        )
        yield _counter(catalogue.SELF_DROPPED_STEPS_TOTAL, dict(m.dropped))
        yield _counter(catalogue.SELF_EXPORTED_STEPS_TOTAL, dict(m.exported))
        yield _counter(catalogue.SELF_ERRORS_TOTAL, dict(self._guard.errors))
        yield _counter(catalogue.SELF_SKIPPED_TOTAL, dict(m.skipped))
        yield _gauge(catalogue.SELF_EXPECTED_SITES, m.expected_sites)
        yield _gauge(catalogue.SELF_SEEN_SITES, m.seen_sites)
        yield _counter(catalogue.SELF_ROUTING_VIOLATIONS_TOTAL, dict(m.violations))
        yield _gauge(catalogue.SELF_EXPORT_QUEUE_STEPS, m.queue_steps)
        yield CounterMetricFamily(
            catalogue.SELF_MODEL_THREAD_SECONDS_TOTAL.name,
            catalogue.SELF_MODEL_THREAD_SECONDS_TOTAL.help,
            value=m.model_thread_ns / 1e9,
        )
        spent = {thread: used_ns / 1e9 for thread, used_ns in m.background_ns.items()}
        yield _counter(catalogue.SELF_BACKGROUND_SECONDS_TOTAL, spent)
        yield _gauge(catalogue.SELF_SPOOLED_STEPS, m.spooled_steps)


def _counter(spec: catalogue.MetricSpec, values: Mapping[Any, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
    for label, value in values.items():
        family.add_metric([str(label)], value)
    return family


def _gauge(spec: catalogue.MetricSpec, value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(spec.name, spec.help, value=value)
