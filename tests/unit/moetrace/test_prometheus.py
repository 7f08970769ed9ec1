"""In-process metrics: catalogue names and labels only, and the exact text of a small case."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moetrace.emit.prometheus import PrometheusEmitter
from moetrace.guard import Guard
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import metrics as catalogue
from moetrace_schemas.enums import DropReason, RoutingViolation, SkipReason

from .records import step_record

EXPOSITION = """\
# HELP moetrace_self_steps_total Steps seen by the tracer, by outcome: sampled, not_sampled.
# TYPE moetrace_self_steps_total counter
moetrace_self_steps_total{outcome="sampled"} 3.0
moetrace_self_steps_total{outcome="not_sampled"} 7.0
# HELP moetrace_self_dropped_steps_total Sampled steps that were dropped, by reason.
# TYPE moetrace_self_dropped_steps_total counter
moetrace_self_dropped_steps_total{reason="export_queue_full"} 2.0
# HELP moetrace_self_exported_steps_total Sampled steps that an emitter delivered.
# TYPE moetrace_self_exported_steps_total counter
moetrace_self_exported_steps_total{emitter="prometheus"} 1.0
# HELP moetrace_self_errors_total Faults of the tracer itself, swallowed; a stage that keeps failing is \
switched off.
# TYPE moetrace_self_errors_total counter
moetrace_self_errors_total{stage="counts"} 1.0
# HELP moetrace_self_skipped_total Calls of recorded steps that have no time of their own, by reason.
# TYPE moetrace_self_skipped_total counter
moetrace_self_skipped_total{reason="cuda_graph"} 5.0
# HELP moetrace_self_expected_sites Call sites wrapped by instrument().
# TYPE moetrace_self_expected_sites gauge
moetrace_self_expected_sites 13.0
# HELP moetrace_self_seen_sites Wrapped call sites that fired in the last sampled step.
# TYPE moetrace_self_seen_sites gauge
moetrace_self_seen_sites 12.0
# HELP moetrace_self_routing_violations_total Contradictions in the routing of checked steps of this rank, \
by reason (ENUMS.md says the unit of each).
# TYPE moetrace_self_routing_violations_total counter
moetrace_self_routing_violations_total{reason="conservation"} 6.0
# HELP moetrace_self_export_queue_steps Steps waiting for the exporter.
# TYPE moetrace_self_export_queue_steps gauge
moetrace_self_export_queue_steps 4.0
# HELP moetrace_self_model_thread_seconds_total Estimated host time that the tracer took on the model's \
thread over recorded steps: intervals x the calibrated cost of one, and the measured time of counting routes.
# TYPE moetrace_self_model_thread_seconds_total counter
moetrace_self_model_thread_seconds_total 0.25
# HELP moetrace_self_background_seconds_total CPU time of the tracer's own threads, drain and export; with \
the interpreter's lock shared, the model can feel part of it.
# TYPE moetrace_self_background_seconds_total counter
moetrace_self_background_seconds_total{thread="drain"} 1.5
# HELP moetrace_self_spooled_steps Steps on this rank's disk that wait for the collector to come back.
# TYPE moetrace_self_spooled_steps gauge
moetrace_self_spooled_steps 0.0
"""


@pytest.fixture
def registry() -> CollectorRegistry:
    """After one step of one rank."""
    registry, metrics, guard = CollectorRegistry(), SelfMetrics(), Guard()
    emitter = PrometheusEmitter(registry, metrics, guard)
    emitter.emit(step_record())
    metrics.steps_sampled, metrics.steps_not_sampled = 3, 7
    metrics.drop(DropReason.EXPORT_QUEUE_FULL, 2)
    metrics.skipped[SkipReason.CUDA_GRAPH] = 5
    metrics.expected_sites, metrics.seen_sites, metrics.queue_steps = 13, 12, 4
    metrics.model_thread_ns, metrics.background_ns["drain"] = 250_000_000, 1_500_000_000
    metrics.violations[RoutingViolation.CONSERVATION] += 6
    guard.caught("counts", ValueError())
    return registry


def exposition(registry: CollectorRegistry) -> str:
    """The text that a scraper gets."""
    # When a metric was created says nothing of the model.
    lines = generate_latest(registry).decode().splitlines()
    return "".join(f"{line}\n" for line in lines if "_created" not in line)


def test_the_tracers_own_counters_read_exactly_so(registry: CollectorRegistry) -> None:
    """The exposition is the product: names, types, help, labels and values."""
    text = exposition(registry)
    assert text[text.index("# HELP moetrace_self_steps_total") :] == EXPOSITION


def test_phase_times_are_summed_over_the_layers_of_a_step(registry: CollectorRegistry) -> None:
    """One observation per phase and step, in seconds."""
    assert registry.get_sample_value("moetrace_phase_duration_seconds_count", {"phase": "outside"}) == 1
    total = registry.get_sample_value("moetrace_phase_duration_seconds_sum", {"phase": "outside"})
    assert total == pytest.approx(50e-6)
    assert registry.get_sample_value(
        "moetrace_step_duration_seconds_sum", {"forward_mode": "prefill"}
    ) == pytest.approx(100e-6)


def test_every_metric_and_label_is_in_the_catalogue(registry: CollectorRegistry) -> None:
    """Nothing is exported that the catalogue does not name, and all that it names for the library is."""
    specifications = {
        spec.name.removesuffix("_total"): spec for spec in catalogue.ALL if spec.side == "library"
    }
    families = list(registry.collect())
    assert {family.name for family in families} == set(specifications)
    for family in families:
        specification = specifications[family.name]
        assert (family.type, family.documentation) == (specification.kind, specification.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(specification.labels)


def test_the_number_of_series_is_bounded(registry: CollectorRegistry) -> None:
    """Label sets stay within what the catalogue allows."""
    limits = {spec.name.removesuffix("_total"): spec.max_series for spec in catalogue.ALL}
    for family in registry.collect():
        series = {tuple(sorted((k, v) for k, v in s.labels.items() if k != "le")) for s in family.samples}
        assert len(series) <= limits[family.name]


def test_a_closed_emitter_leaves_its_registry(registry: CollectorRegistry) -> None:
    """Another tracer can use it afterwards."""
    own = CollectorRegistry()
    for _ in range(2):
        PrometheusEmitter(own, SelfMetrics(), Guard()).close(0)
    assert list(own.collect()) == []
