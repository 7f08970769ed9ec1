"""Whether the other dashboards can be trusted: everything arrives, in time, from every rank."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble
from moetrace_dashboards.panels import AnyPanel, lines, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    panels = (*_collector(config), *_tracer(config), *_access())
    return assemble(
        "collector_health",
        "moetrace: collector and tracer health",
        "Rates, lags, drops and budgets of the collector and of the tracers in the model processes.",
        panels,
        config,
    )


def _collector(config: Config) -> tuple[AnyPanel, ...]:
    return (
        lines(
            "Rank steps",
            "Per second: received = joined + late + duplicate + rejected + pending.",
            "cps",
            promql.LEDGER,
        ),
        lines(
            "Rejected, by reason",
            "Rank steps or requests per second that were not taken.",
            "cps",
            [promql.REJECTED],
            width=6,
        ),
        lines(
            "Told to wait",
            "Requests per second answered with back-pressure; senders try again.",
            "cps",
            [promql.THROTTLED],
            width=6,
        ),
        lines(
            "Waiting",
            "Rank steps in the join window, and joined steps that are not yet written.",
            "none",
            promql.QUEUES,
            width=8,
        ),
        lines(
            "Verdict latency",
            "From the last rank's arrival to the verdict. The line is MoeCollectorLagging.",
            "s",
            promql.VERDICT_LATENCY,
            width=8,
            limit=config.verdict_latency_p99_s,
        ),
        lines(
            "Steps by why they closed",
            "Complete is good; timeout means missing ranks.",
            "cps",
            [promql.CLOSED_BY],
            width=8,
        ),
        lines(
            "Missing ranks",
            "Steps per second of the chosen run that closed without this rank.",
            "cps",
            [promql.MISSING_RANKS],
            width=8,
        ),
        lines(
            "Rows stored",
            "Rows per second that the store took, by table.",
            "cps",
            [promql.STORED_ROWS],
            width=8,
        ),
        lines(
            "Store trouble",
            "Failed writes (retried) and rows given up, per second.",
            "cps",
            promql.STORE_TROUBLE,
            width=8,
        ),
        lines(
            "Per-expert series in use",
            "Against the collector's series_budget.",
            "none",
            [promql.SERIES_IN_USE],
            width=12,
        ),
        lines(
            "Series refused",
            "Label sets per second refused because a budget is spent, by metric.",
            "cps",
            [promql.SERIES_REFUSED],
            width=12,
        ),
    )


def _tracer(config: Config) -> tuple[AnyPanel, ...]:
    return (
        lines(
            "Tracer: steps seen",
            "Steps per second by model process, sampled and not.",
            "cps",
            [promql.TRACER_STEPS],
            width=12,
        ),
        lines(
            "Tracer: steps dropped",
            "Sampled steps per second that were not sent, by reason.",
            "cps",
            [promql.TRACER_DROPS],
            width=12,
        ),
        lines(
            "Tracer: coverage",
            "Wrapped call sites that fired over those wrapped, per model process. Below the line "
            "something bypasses "
            "the wrappers: a captured graph, a compiled region, another code path.",
            "percentunit",
            [promql.SITE_COVERAGE],
            width=8,
            limit=config.coverage_ratio,
        ),
        lines(
            "Tracer: export queue",
            "Steps waiting for the exporter, per model process.",
            "none",
            [promql.TRACER_QUEUE],
            width=8,
        ),
        lines(
            "Tracer: faults",
            "Faults of the tracer itself per second, swallowed, by stage.",
            "cps",
            [promql.TRACER_ERRORS],
            width=8,
        ),
        rows(
            "What could not be joined or stored as it came",
            "The latest events of all runs.",
            "none",
            sql.RECENT_EVENTS,
        ),
        lines(
            "Coverage by rank",
            "As each rank says with its steps: wrapped call sites that fired over those that should have.",
            "percentunit",
            [promql.RANK_COVERAGE],
            width=24,
            limit=config.coverage_ratio,
        ),
        lines(
            "Tracer: cost on the models' threads",
            "Estimated host time of the tracer over the duration of the recorded steps: intervals x the "
            "calibrated cost of one, and the measured time of counting routes. Steps that are not sampled "
            "cost next to nothing.",
            "percentunit",
            [promql.TRACER_COST],
            width=12,
        ),
        lines(
            "Tracer: own threads",
            "CPU time per second of the tracer's drain and export threads, per model process: 1 is a core. "
            "They share the interpreter's lock with the model.",
            "percentunit",
            [promql.TRACER_THREADS],
            width=12,
        ),
    )


def _access() -> tuple[AnyPanel, ...]:
    return (
        lines(
            "Turned away, by reason",
            "Requests and connections per second without a right, too many or too slow; none was read.",
            "cps",
            [promql.REFUSED],
        ),
        lines(
            "Queries not answered, by reason",
            "SQL per second that was refused, or over a limit.",
            "cps",
            [promql.QUERY_FAILURES],
        ),
    )
