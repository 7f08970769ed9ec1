"""PromQL of panels. Grafana's variables: $run, $forward_mode, $layer, $__rate_interval, $__interval."""

from __future__ import annotations

from moetrace_dashboards.queries.base import PromQuery
from moetrace_dashboards.queries.rules import COVERAGE

RUN = 'run_id="$run"'
MODE = f'{RUN}, forward_mode=~"$forward_mode"'
LAYER = f'{MODE}, layer=~"$layer"'
RATE = "$__rate_interval"

RUN_VARIABLE = 'label_values(moetrace_run_info{model_version=~"$model_version"}, run_id)'
MODEL_VERSION_VARIABLE = "label_values(moetrace_run_info, model_version)"
LAYER_VARIABLE = f"label_values(moetrace_expert_load_imbalance_ratio{{{RUN}}}, layer)"
PLACEMENT_CHANGES = f"changes(moetrace_placement_version{{{RUN}}}[$__interval]) > 0"
"""Annotation: a vertical line where the placement epoch changed."""


def _rate(metric: str, selector: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}[{RATE}]))"


def _quantile(quantile: float, metric: str, selector: str, by: str) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{metric}_bucket', selector, f'{by}, le')})"


def quantiles(metric: str, selector: str, by: str, legend: str) -> tuple[PromQuery, ...]:
    """p50, p95 and p99 of a histogram."""
    return tuple(
        PromQuery(expr=_quantile(q, metric, selector, by), legend=f"p{q * 100:g} {legend}")
        for q in (0.5, 0.95, 0.99)
    )


# --- step overview -----------------------------------------------------------------------------
STEP_SECONDS = quantiles("moetrace_step_seconds", MODE, "forward_mode", "{{forward_mode}}")
STEP_RATE = PromQuery(
    expr=_rate("moetrace_step_seconds_count", MODE, "forward_mode"), legend="{{forward_mode}}"
)
FRONTIER = PromQuery(
    expr=f"{_rate('moetrace_critical_path_seconds_total', MODE, 'phase')}\n"
    f"/ on () group_left () sum(rate(moetrace_step_seconds_count{{{MODE}}}[{RATE}]))",
    legend="{{phase}}",
)
WORTH = PromQuery(
    expr=f"topk(10, sum by (rank, phase) (increase(moetrace_worth_seconds_total{{{RUN}}}[$__range])))",
    legend="rank {{rank}} {{phase}}",
    instant=True,
)
CLEAR_SHARE = PromQuery(
    expr=f'sum(rate(moetrace_verdicts_total{{{RUN}, evidence="clear"}}[{RATE}]))\n'
    f"/ sum(rate(moetrace_verdicts_total{{{RUN}}}[{RATE}]))",
    legend="clear",
)
CAUSES = PromQuery(expr=_rate("moetrace_verdicts_total", RUN, "cause"), legend="{{cause}}")
EVIDENCE = PromQuery(expr=_rate("moetrace_verdicts_total", RUN, "evidence"), legend="{{evidence}}")

# --- critical path -----------------------------------------------------------------------------
EXTENSION_BY_RANK = PromQuery(expr=_rate("moetrace_extension_seconds_total", RUN, "rank"), legend="{{rank}}")
EXTENSION_BY_PHASE = PromQuery(
    expr=_rate("moetrace_extension_seconds_total", RUN, "phase"), legend="{{phase}}"
)
CRITICAL_STEPS = PromQuery(
    expr=f"topk(5, sum by (rank, phase) (rate(moetrace_critical_steps_total{{{RUN}}}[{RATE}])))\n"
    f"/ on () group_left () sum(rate(moetrace_step_seconds_count{{{RUN}}}[{RATE}]))",
    legend="rank {{rank}} {{phase}}",
)

# --- expert load -------------------------------------------------------------------------------
EXPERT_IMBALANCE = PromQuery(
    expr=f"max by (layer, forward_mode) (moetrace_expert_load_imbalance_ratio{{{LAYER}}})",
    legend="layer {{layer}} {{forward_mode}}",
)
EXPERT_CV = PromQuery(
    expr=f"max by (layer, forward_mode) (moetrace_expert_load_cv_ratio{{{LAYER}}})",
    legend="layer {{layer}} {{forward_mode}}",
)
RANK_IMBALANCE = PromQuery(
    expr=f"max by (layer, forward_mode) (moetrace_rank_load_imbalance_ratio{{{LAYER}}})",
    legend="layer {{layer}} {{forward_mode}}",
)
EXCLUDED_PAIRS = PromQuery(expr=_rate("moetrace_excluded_pairs_total", RUN, "reason"), legend="{{reason}}")
ROUTING_VIOLATIONS = PromQuery(
    expr=_rate("moetrace_routing_violations_total", RUN, "reason"), legend="{{reason}}"
)
ROUTED_PAIRS = PromQuery(
    expr=_rate("moetrace_routed_pairs_total", MODE, "forward_mode"), legend="{{forward_mode}}"
)

# --- all-to-all --------------------------------------------------------------------------------
TRANSFER_AND_WAIT = (
    PromQuery(expr=_rate("moetrace_transfer_seconds_total", RUN, "phase"), legend="{{phase}} transfer"),
    PromQuery(
        expr=_rate("moetrace_wait_seconds_total", RUN, "phase"), legend="{{phase}} wait, all ranks together"
    ),
)
EXCHANGE_SECONDS = quantiles("moetrace_exchange_transfer_seconds", MODE, "phase", "{{phase}}")
ALL_TO_ALL_SHARE = PromQuery(
    expr="sum by (forward_mode) (rate(moetrace_critical_path_seconds_total"
    f'{{{MODE}, phase=~"dispatch|combine"}}[{RATE}]))\n'
    f"/ {_rate('moetrace_critical_path_seconds_total', MODE, 'forward_mode')}",
    legend="{{forward_mode}}",
)
ROWS_BY_SCOPE = PromQuery(
    expr=f"{_rate('moetrace_exchange_rows_total', RUN, 'scope')}\n"
    f"/ on () group_left () sum(rate(moetrace_exchange_rows_total{{{RUN}}}[{RATE}]))",
    legend="{{scope}}",
)

GROUP_TRANSFER = PromQuery(
    expr=f"topk(10, {_rate('moetrace_group_transfer_seconds_total', MODE, 'run_id, ep_group, phase')}\n"
    f"/ {_rate('moetrace_group_exchanges_total', MODE, 'run_id, ep_group, phase')})\n"
    f"* on (run_id, ep_group) group_left (hosts) moetrace_group_info{{{RUN}}}",
    legend="group of rank {{ep_group}} ({{hosts}}) {{phase}}",
)
HIDDEN_SHARE = PromQuery(
    expr="sum by (phase) (rate(moetrace_exchange_rank_seconds_total"
    f'{{{RUN}, overlap="hidden"}}[{RATE}]))\n'
    f"/ {_rate('moetrace_exchange_rank_seconds_total', RUN, 'phase')}",
    legend="{{phase}}",
)

# --- placement ---------------------------------------------------------------------------------
PLACEMENT_VERSION = PromQuery(
    expr=f"max by (run_id) (moetrace_placement_version{{{RUN}}})", legend="placement in use"
)
PLACEMENT_CHANGES_PER_HOUR = PromQuery(
    expr=f"max by (run_id) (changes(moetrace_placement_version{{{RUN}}}[1h]))", legend="changes in an hour"
)
PLACEMENT_COPIES = PromQuery(
    expr=f"sum by (run_id) (increase(moetrace_placement_experts_copied_total{{{RUN}}}[1h]))",
    legend="experts fetched in an hour",
)
PLACEMENT_VERDICTS = PromQuery(
    expr=f"sum by (verdict) (increase(moetrace_placement_verdicts_total{{{RUN}}}[1h]))",
    legend="{{verdict}}",
)
STEP_P95 = PromQuery(
    expr=_quantile(0.95, "moetrace_step_seconds", MODE, "forward_mode"), legend="{{forward_mode}}"
)

# --- collector and tracer health ---------------------------------------------------------------
LEDGER = tuple(
    PromQuery(expr=f"sum by (instance) (rate({metric}[{RATE}]))", legend=f"{name} {{{{instance}}}}")
    for name, metric in (
        ("received", "moetrace_collector_received_total"),
        ("joined", "moetrace_collector_joined_total"),
        ("late", "moetrace_collector_late_total"),
        ("duplicate", "moetrace_collector_duplicate_total"),
    )
)
REFUSED = PromQuery(
    expr=f"sum by (reason) (rate(moetrace_collector_refused_total[{RATE}]))", legend="{{reason}}"
)
QUERY_FAILURES = PromQuery(
    expr=f"sum by (reason) (rate(moetrace_collector_query_failures_total[{RATE}]))", legend="{{reason}}"
)
REJECTED = PromQuery(
    expr=f"sum by (reason) (rate(moetrace_collector_rejected_total[{RATE}]))", legend="{{reason}}"
)
THROTTLED = PromQuery(
    expr=f"sum by (instance) (rate(moetrace_collector_throttled_total[{RATE}]))", legend="{{instance}}"
)
QUEUES = (
    PromQuery(
        expr="sum by (instance) (moetrace_collector_pending)", legend="rank steps pending {{instance}}"
    ),
    PromQuery(
        expr="sum by (instance) (moetrace_collector_sink_queue_steps)",
        legend="steps waiting for the sinks {{instance}}",
    ),
)
CLOSED_BY = PromQuery(
    expr=f"sum by (closed_by) (rate(moetrace_collector_steps_total[{RATE}]))", legend="{{closed_by}}"
)
MISSING_RANKS = PromQuery(
    expr=f"sum by (rank) (rate(moetrace_missing_rank_steps_total{{{RUN}}}[{RATE}]))",
    legend="rank {{rank}}",
)
VERDICT_LATENCY = tuple(
    PromQuery(
        expr=f"histogram_quantile({q}, sum by (le) "
        f"(rate(moetrace_collector_verdict_latency_seconds_bucket[{RATE}])))",
        legend=f"p{q * 100:g}",
    )
    for q in (0.5, 0.99)
)
STORED_ROWS = PromQuery(
    expr=f"sum by (table) (rate(moetrace_collector_stored_rows_total[{RATE}]))", legend="{{table}}"
)
STORE_TROUBLE = (
    PromQuery(
        expr=f"sum by (sink) (rate(moetrace_collector_sink_errors_total[{RATE}]))",
        legend="failed writes to {{sink}}",
    ),
    PromQuery(
        expr=f"sum by (table) (rate(moetrace_collector_lost_rows_total[{RATE}]))",
        legend="rows lost of {{table}}",
    ),
)
TRACER_DROPS = PromQuery(
    expr=f"sum by (instance, reason) (rate(moetrace_self_dropped_steps_total[{RATE}]))",
    legend="{{instance}} {{reason}}",
)
TRACER_ERRORS = PromQuery(
    expr=f"sum by (instance, stage) (rate(moetrace_self_errors_total[{RATE}]))",
    legend="{{instance}} {{stage}}",
)
TRACER_STEPS = PromQuery(
    expr=f"sum by (instance, outcome) (rate(moetrace_self_steps_total[{RATE}]))",
    legend="{{instance}} {{outcome}}",
)
TRACER_COST = PromQuery(
    expr=f"{_rate('moetrace_tracer_seconds_total', RUN, 'run_id')}\n"
    f"/ {_rate('moetrace_traced_rank_seconds_total', RUN, 'run_id')}",
    legend="{{run_id}}",
)
TRACER_THREADS = PromQuery(
    expr=f"sum by (instance, thread) (rate(moetrace_self_background_seconds_total[{RATE}]))",
    legend="{{instance}} {{thread}}",
)
TRACER_QUEUE = PromQuery(expr="sum by (instance) (moetrace_self_export_queue_steps)", legend="{{instance}}")
SITE_COVERAGE = PromQuery(expr=COVERAGE, legend="{{instance}}")
RANK_COVERAGE = PromQuery(
    expr="min by (run_id, rank) (moetrace_rank_site_coverage_ratio)", legend="{{run_id}} rank {{rank}}"
)
SERIES_IN_USE = PromQuery(
    expr='count by (__name__) ({__name__=~"moetrace_expert_tokens_total|moetrace_expert_slot_tokens_total'
    '|moetrace_expert_slot_id"})',
    legend="{{__name__}}",
)
SERIES_REFUSED = PromQuery(
    expr=f"sum by (metric) (rate(moetrace_series_refused_total[{RATE}]))", legend="{{metric}}"
)
