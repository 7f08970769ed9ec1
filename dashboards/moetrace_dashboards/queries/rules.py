"""PromQL of the recording rules and alerts: what they have in common with panels has one text.

A run that has ended keeps its last gauges until the collector forgets it, so everything built on a gauge
is joined with `STEPS > 0`. Ratios of rates of an ended run are 0/0 = NaN, which no comparison passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_dashboards.config import Config

STEPS = "run_mode:moetrace_steps:rate5m"
STEP_P95 = "run_mode:moetrace_step_seconds:p95_10m"
EXPERT_LOAD = "run_mode_layer_expert:moetrace_expert_load:ratio5m"
IMBALANCE = "run_mode_layer:moetrace_expert_load_imbalance:avg5m"
RANK_IMBALANCE = "run_mode_layer:moetrace_rank_load_imbalance:avg5m"
CRITICAL_SHARE = "run_rank_phase:moetrace_critical_steps:ratio5m"
DEVICE_SHARE = "run_rank_phase:moetrace_device_steps:ratio5m"
TRANSFER_P99 = "run_phase_mode:moetrace_exchange_transfer_seconds:p99_5m"
TRANSFER_MEAN = "run_phase_mode:moetrace_exchange_transfer_seconds:mean5m"
GROUP_TRANSFER_MEAN = "run_group_phase_mode:moetrace_group_transfer_seconds:mean5m"
GROUP_BYTES_MEAN = "run_group_phase_mode:moetrace_group_exchange_bytes:mean5m"
ALL_TO_ALL_SHARE = "run_mode:moetrace_all_to_all:ratio5m"
CROSS_NODE = "run_phase:moetrace_cross_node_rows:ratio5m"
LOST_PAIRS = "run_reason:moetrace_lost_pairs:ratio5m"
COVERAGE = "instance:moetrace_site_coverage:ratio5m"
VERDICT_P99 = "job:moetrace_verdict_latency_seconds:p99_5m"


_GROUP = "run_id, ep_group, phase, forward_mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """level:metric:operation, and its expression."""

    record: str
    expr: str


RECORDING_RULES = (
    RecordingRule(record=STEPS, expr="sum by (run_id, forward_mode) (rate(moetrace_step_seconds_count[5m]))"),
    RecordingRule(
        record=STEP_P95,
        expr="histogram_quantile(0.95, sum by (run_id, forward_mode, le) "
        "(rate(moetrace_step_seconds_bucket[10m])))",
    ),
    RecordingRule(
        record=EXPERT_LOAD,
        expr="sum by (run_id, forward_mode, layer, expert) (rate(moetrace_expert_tokens_total[5m]))\n"
        "/ on (run_id, forward_mode, layer) group_left ()\n"
        "avg by (run_id, forward_mode, layer) (sum by (run_id, forward_mode, layer, expert) "
        "(rate(moetrace_expert_tokens_total[5m])))",
    ),
    RecordingRule(
        record=IMBALANCE,
        expr="max by (run_id, forward_mode, layer) "
        "(avg_over_time(moetrace_expert_load_imbalance_ratio[5m]))\n"
        f"and on (run_id, forward_mode) {STEPS} > 0",
    ),
    RecordingRule(
        record=RANK_IMBALANCE,
        expr="max by (run_id, forward_mode, layer) "
        "(avg_over_time(moetrace_rank_load_imbalance_ratio[5m]))\n"
        f"and on (run_id, forward_mode) {STEPS} > 0",
    ),
    RecordingRule(
        record=CRITICAL_SHARE,
        expr="sum by (run_id, rank, phase) (rate(moetrace_critical_steps_total[5m]))\n"
        f"/ on (run_id) group_left () sum by (run_id) ({STEPS})",
    ),
    RecordingRule(
        record=DEVICE_SHARE,
        expr="sum by (run_id, rank, phase) "
        '(rate(moetrace_critical_cause_steps_total{cause="device"}[5m]))\n'
        f"/ on (run_id) group_left () sum by (run_id) ({STEPS})",
    ),
    RecordingRule(
        record=TRANSFER_P99,
        expr="histogram_quantile(0.99, sum by (run_id, phase, forward_mode, le) "
        "(rate(moetrace_exchange_transfer_seconds_bucket[5m])))",
    ),
    RecordingRule(
        record=TRANSFER_MEAN,
        expr="sum by (run_id, phase, forward_mode) (rate(moetrace_exchange_transfer_seconds_sum[5m]))\n"
        "/ sum by (run_id, phase, forward_mode) (rate(moetrace_exchange_transfer_seconds_count[5m]))",
    ),
    RecordingRule(
        record=GROUP_TRANSFER_MEAN,
        expr=f"sum by ({_GROUP}) (rate(moetrace_group_transfer_seconds_total[5m]))\n"
        f"/ sum by ({_GROUP}) (rate(moetrace_group_exchanges_total[5m]))",
    ),
    RecordingRule(
        record=GROUP_BYTES_MEAN,
        expr=f"sum by ({_GROUP}) (rate(moetrace_group_exchange_bytes_total[5m]))\n"
        f"/ sum by ({_GROUP}) (rate(moetrace_group_exchanges_total[5m]))",
    ),
    RecordingRule(
        record=ALL_TO_ALL_SHARE,
        expr="sum by (run_id, forward_mode) "
        '(rate(moetrace_critical_path_seconds_total{phase=~"dispatch|combine"}[5m]))\n'
        "/ sum by (run_id, forward_mode) (rate(moetrace_critical_path_seconds_total[5m]))",
    ),
    RecordingRule(
        record=CROSS_NODE,
        expr='sum by (run_id, phase) (rate(moetrace_exchange_rows_total{scope="cross_node"}[5m]))\n'
        "/ sum by (run_id, phase) (rate(moetrace_exchange_rows_total[5m]))",
    ),
    RecordingRule(
        record=LOST_PAIRS,
        expr="sum by (run_id, reason) "
        '(rate(moetrace_excluded_pairs_total{reason=~"dropped|invalid"}[5m]))\n'
        "/ on (run_id) group_left () (sum by (run_id) (rate(moetrace_routed_pairs_total[5m]))\n"
        '+ (sum by (run_id) (rate(moetrace_excluded_pairs_total{reason=~"dropped|invalid"}[5m]))))',
    ),
    RecordingRule(
        record=COVERAGE,
        expr="max_over_time(moetrace_self_seen_sites[5m]) / max_over_time(moetrace_self_expected_sites[5m])",
    ),
    RecordingRule(
        record=VERDICT_P99,
        expr="histogram_quantile(0.99, sum by (job, instance, le) "
        "(rate(moetrace_collector_verdict_latency_seconds_bucket[5m])))",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A value that fires above `high`, and once firing until below `low`."""

    value: str
    high: float
    low: float


def with_hysteresis(alert: str, value: str, labels: str, *, high: float, low: float) -> str:
    """Above `high`, and once firing until below `low`: a value at the edge does not flap."""
    firing = f'ALERTS{{alertname="{alert}", alertstate="firing"}}'
    return f"{value} > {high}\nor\n({value} > {low} and on ({labels}) {firing})"


def dead_experts(window: str) -> str:
    """Experts that got nothing in the window while the layer did, and that were there all of the window."""
    dead = (
        "count by (run_id, forward_mode, layer) (sum by (run_id, forward_mode, layer, expert) "
        f"(increase(moetrace_expert_tokens_total[{window}])) == 0)"
    )
    layer = (
        "sum by (run_id, forward_mode, layer) "
        f"(increase(moetrace_expert_tokens_total[{window}])) > 0\n"
        f"and sum by (run_id, forward_mode, layer) (moetrace_expert_tokens_total offset {window})"
    )
    return f"{dead}\nand ({layer})"


def transfer_regression(config: Config) -> str:
    """Mean transfer over what it was in the hour before the last quarter of an hour."""
    before = f"avg_over_time({TRANSFER_MEAN}[1h] offset 15m)"
    return f"{TRANSFER_MEAN} / {before} > {config.transfer_regression_ratio}"


def group_transfer_regression(config: Config) -> str:
    """As `transfer_regression` for one group of several, less what more bytes explain; with its hosts.

    In a run of one group it says nothing that the whole run's does not.
    """
    growth = f"{GROUP_TRANSFER_MEAN} / avg_over_time({GROUP_TRANSFER_MEAN}[1h] offset 15m)"
    more_bytes = f"clamp_min({GROUP_BYTES_MEAN} / avg_over_time({GROUP_BYTES_MEAN}[1h] offset 15m), 1)"
    return (
        f"((({growth}) / ({more_bytes}) or {growth}) > {config.transfer_regression_ratio})\n"
        "* on (run_id, ep_group) group_left (hosts) moetrace_group_info\n"
        "and on (run_id) count by (run_id) (moetrace_group_info) > 1"
    )


def _changed(watch: str) -> str:
    # Now is all after the change (none in the last 10 minutes), then is all before it.
    return (
        f"max by (run_id) (changes(moetrace_placement_version[{watch}])) > 0\n"
        "unless on (run_id) max by (run_id) (changes(moetrace_placement_version[10m])) > 0"
    )


def placement_p95_regression(config: Config) -> str:
    """p95 after a change over p95 before it, minus one."""
    before = f"avg_over_time({STEP_P95}[30m] offset {config.placement_watch})"
    return (
        f"({STEP_P95} / {before} - 1 > {config.placement_p95_regression})\n"
        f"and on (run_id) ({_changed(config.placement_watch)})"
    )


def placement_error_regression(config: Config) -> str:
    """Share of lost pairs after a change minus what it was before; nothing before counts as zero."""
    now = f"sum by (run_id) ({LOST_PAIRS})"
    before = f"sum by (run_id) (avg_over_time({LOST_PAIRS}[30m] offset {config.placement_watch}))"
    steps = f"0 * sum by (run_id) ({STEPS} offset {config.placement_watch})"
    return (
        f"({now} - ({before} or {steps}) > {config.placement_error_regression})\n"
        f"and on (run_id) ({_changed(config.placement_watch)})"
    )


def placement_churn(config: Config) -> str:
    """Changes in an hour over the budget."""
    return f"max by (run_id) (changes(moetrace_placement_version[1h])) > {config.placement_changes_per_hour}"


def rebalance_stalled(config: Config) -> str:
    """Load over ranks uneven all of the window, with a known placement that never changed."""
    window = config.rebalance_window
    uneven = f"min_over_time({RANK_IMBALANCE}[{window}]) > {config.rebalance_imbalance}"
    still = (
        f"max by (run_id) (changes(moetrace_placement_version[{window}])) == 0\n"
        f"and max by (run_id) (moetrace_placement_version offset {window}) > 0"
    )
    return f"{uneven}\nand on (run_id) ({still})\nand on (run_id, forward_mode) {STEPS} > 0"


def rank_coverage_lost(config: Config) -> str:
    """Ranks of running runs whose wrapped call sites fire no more, as they say themselves with every step."""
    seen = "max by (run_id, rank) (max_over_time(moetrace_rank_site_coverage_ratio[5m]))"
    return f"{seen} < {config.coverage_ratio}\nand on (run_id) sum by (run_id) ({STEPS}) > 0"


ROUTING_CONTRADICTED = "sum by (run_id, reason) (increase(moetrace_routing_violations_total[10m])) > 0"
RANKS_MISSING = "sum by (run_id, rank) (increase(moetrace_missing_rank_steps_total[2m])) > 0"
"""Windows are shorter than the hold of their alert: a single event, as at the end of a run, wakes nobody."""
TRACER_DROPS = "sum by (job, instance, reason) (increase(moetrace_self_dropped_steps_total[5m])) > 0"
SERIES_REFUSED = "sum by (job, instance, metric) (increase(moetrace_series_refused_total[10m])) > 0"
COLLECTOR_BACKLOG = (
    "sum by (job, instance) (increase(moetrace_collector_throttled_total[5m])) > 0\n"
    "or\n"
    "sum by (job, instance) (increase(moetrace_collector_unavailable_total[5m])) > 0"
)
"""Senders told to come back: no room, or a disk that does not make their requests durable."""
STORE_ERRORS = (
    'sum by (job, instance) (increase(moetrace_collector_sink_errors_total{sink="clickhouse"}[5m])) > 0\n'
    "unless on (job, instance)\n"
    "sum by (job, instance) (increase(moetrace_collector_stored_rows_total[5m])) > 0"
)
ROLLBACK_TARGET = (
    "{{ with printf \"moetrace_placement_rollback_version{run_id='%[1]s'} or "
    "moetrace_placement_previous_version{run_id='%[1]s'}\" $labels.run_id | query }}"
    "{{ . | first | value }}{{ else }}unknown{{ end }}"
)
"""Template: the epoch to go back to, as it was announced, else the one before."""
