"""Alert rules. The runbook's address is added by code, so that no alert can be without one."""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_dashboards.config import UIDS, Config
from moetrace_dashboards.queries import rules
from moetrace_dashboards.queries.rules import Level, with_hysteresis

GROUP = "moetrace.alerts"
WARNING = "warning"
CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert; texts are templates over the labels of its expression."""

    name: str
    expr: str
    hold: str
    """How long the expression must hold before the alert fires."""
    severity: str
    summary: str
    description: str
    dashboard: str
    """Key of config.UIDS: where to look first."""
    level: Level | None = None
    """Of an alert with hysteresis: what its expression is made of."""


def alerts(config: Config) -> tuple[Alert, ...]:
    """Every alert, in the order of the generated file."""
    return (*_load(config), *_critical_path(config), *_exchange(config), *_placement(config), *_own(config))


def alert_rules(config: Config) -> dict[str, object]:
    """The rule file as a document."""
    return {"groups": [{"name": GROUP, "rules": [_rule(alert, config) for alert in alerts(config)]}]}


def _rule(alert: Alert, config: Config) -> dict[str, object]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "dashboard": f"/d/{UIDS[alert.dashboard]}",
            "runbook_url": f"{config.runbook_base_url}/{alert.name}.md",
        },
    }


def _load(config: Config) -> tuple[Alert, ...]:
    return (
        Alert(
            name="MoeExpertPersistentlyHot",
            expr=with_hysteresis(
                "MoeExpertPersistentlyHot",
                rules.EXPERT_LOAD,
                "run_id, forward_mode, layer, expert",
                high=config.expert_load_high,
                low=config.expert_load_low,
            ),
            level=Level(value=rules.EXPERT_LOAD, high=config.expert_load_high, low=config.expert_load_low),
            hold=config.persistent_for,
            severity=WARNING,
            summary="Expert {{ $labels.expert }} of layer {{ $labels.layer }} stays hot in "
            "{{ $labels.forward_mode }} of run {{ $labels.run_id }}",
            description='It gets {{ $value | printf "%.1f" }} times the mean of its layer.',
            dashboard="expert_load",
        ),
        Alert(
            name="MoeExpertLoadImbalanced",
            expr=with_hysteresis(
                "MoeExpertLoadImbalanced",
                rules.IMBALANCE,
                "run_id, forward_mode, layer",
                high=config.imbalance_high,
                low=config.imbalance_low,
            ),
            level=Level(value=rules.IMBALANCE, high=config.imbalance_high, low=config.imbalance_low),
            hold=config.persistent_for,
            severity=WARNING,
            summary="Load over the experts of layer {{ $labels.layer }} stays uneven in "
            "{{ $labels.forward_mode }} of run {{ $labels.run_id }}",
            description='The hottest expert of a step gets {{ $value | printf "%.1f" }} times the mean.',
            dashboard="expert_load",
        ),
        Alert(
            name="MoeExpertsDead",
            expr=rules.dead_experts(config.dead_expert_window),
            hold="5m",
            severity=WARNING,
            summary="{{ $value }} experts of layer {{ $labels.layer }} get no tokens in "
            "{{ $labels.forward_mode }} of run {{ $labels.run_id }}",
            description=f"No token was routed to them for {config.dead_expert_window}.",
            dashboard="expert_load",
        ),
        Alert(
            name="MoeTokensDropped",
            expr=f"{rules.LOST_PAIRS} > {config.dropped_ratio}",
            hold="10m",
            severity=CRITICAL,
            summary="Tokens are lost ({{ $labels.reason }}) in run {{ $labels.run_id }}",
            description="{{ $value | humanizePercentage }} of the (token, slot) pairs reach no expert: "
            "{{ $labels.reason }}.",
            dashboard="expert_load",
        ),
        Alert(
            name="MoeRoutingContradicted",
            expr=rules.ROUTING_CONTRADICTED,
            hold="5m",
            severity=CRITICAL,
            summary="Routing contradicts itself ({{ $labels.reason }}) in run {{ $labels.run_id }}",
            description='{{ $value | printf "%.0f" }} cases in the checked steps of 10 minutes.',
            dashboard="expert_load",
        ),
    )


def _critical_path(config: Config) -> tuple[Alert, ...]:
    return (
        Alert(
            name="MoeRankPersistentlyCritical",
            expr=with_hysteresis(
                "MoeRankPersistentlyCritical",
                rules.CRITICAL_SHARE,
                "run_id, rank, phase",
                high=config.critical_share_high,
                low=config.critical_share_low,
            ),
            level=Level(
                value=rules.CRITICAL_SHARE, high=config.critical_share_high, low=config.critical_share_low
            ),
            hold=config.persistent_for,
            severity=WARNING,
            summary="Rank {{ $labels.rank }} in {{ $labels.phase }} extends the steps of run "
            "{{ $labels.run_id }}",
            description="{{ $value | humanizePercentage }} of the steps clearly name it.",
            dashboard="critical_path",
        ),
        Alert(
            name="MoeDeviceSlowerThanRows",
            expr=with_hysteresis(
                "MoeDeviceSlowerThanRows",
                rules.DEVICE_SHARE,
                "run_id, rank, phase",
                high=config.device_share_high,
                low=config.device_share_low,
            ),
            level=Level(value=rules.DEVICE_SHARE, high=config.device_share_high, low=config.device_share_low),
            hold=config.persistent_for,
            severity=WARNING,
            summary="The device of rank {{ $labels.rank }} is slower in {{ $labels.phase }} than its rows "
            "explain (run {{ $labels.run_id }})",
            description="{{ $value | humanizePercentage }} of the steps name it with cause device.",
            dashboard="critical_path",
        ),
    )


def _exchange(config: Config) -> tuple[Alert, ...]:
    decode = f'{rules.ALL_TO_ALL_SHARE}{{forward_mode="decode"}}'
    return (
        Alert(
            name="MoeAllToAllOverBudget",
            expr=f"{rules.TRANSFER_P99} > {config.all_to_all_p99_budget_s}",
            hold="10m",
            severity=WARNING,
            summary="{{ $labels.phase }} in {{ $labels.forward_mode }} of run {{ $labels.run_id }} "
            "is over its budget",
            description="p99 of the transfer is {{ $value | humanizeDuration }}; the budget is "
            f"{config.all_to_all_p99_budget_s * 1000:g}ms.",
            dashboard="all_to_all",
        ),
        Alert(
            name="MoeAllToAllShareHigh",
            expr=f"{decode} > {config.all_to_all_decode_share}",
            hold=config.persistent_for,
            severity=WARNING,
            summary="All-to-all takes much of the decode step of run {{ $labels.run_id }}",
            description="{{ $value | humanizePercentage }} of the critical path of decode is "
            "dispatch and combine.",
            dashboard="all_to_all",
        ),
        Alert(
            name="MoeLinkTransferRegressed",
            expr=rules.transfer_regression(config),
            hold="10m",
            severity=WARNING,
            summary="Transfers of {{ $labels.phase }} in {{ $labels.forward_mode }} got slower in run "
            "{{ $labels.run_id }}",
            description='The mean is {{ $value | printf "%.2f" }} times what it was in the hour before.',
            dashboard="all_to_all",
        ),
        Alert(
            name="MoeGroupTransferRegressed",
            expr=rules.group_transfer_regression(config),
            hold="10m",
            severity=WARNING,
            summary="Transfers of {{ $labels.phase }} in {{ $labels.forward_mode }} got slower in the group "
            "of rank {{ $labels.ep_group }}, run {{ $labels.run_id }}",
            description='Beyond what more bytes explain, the mean is {{ $value | printf "%.2f" }} times '
            "what it was in the hour before. Hosts of the group: {{ $labels.hosts }}.",
            dashboard="all_to_all",
        ),
        Alert(
            name="MoeCrossNodeRatioHigh",
            expr=f"{rules.CROSS_NODE} > {config.cross_node_ratio}",
            hold=config.persistent_for,
            severity=WARNING,
            summary="Many rows of {{ $labels.phase }} cross nodes in run {{ $labels.run_id }}",
            description="{{ $value | humanizePercentage }} of the rows go to another node.",
            dashboard="all_to_all",
        ),
    )


def _placement(config: Config) -> tuple[Alert, ...]:
    target = f"Rollback target: placement {rules.ROLLBACK_TARGET}."
    return (
        Alert(
            name="MoePlacementStepTimeRegressed",
            expr=rules.placement_p95_regression(config),
            hold="2m",
            severity=CRITICAL,
            summary="Steps of run {{ $labels.run_id }} got slower after a placement change "
            "({{ $labels.forward_mode }})",
            description=f"p95 is {{{{ $value | humanizePercentage }}}} above what it was before. {target}",
            dashboard="placement",
        ),
        Alert(
            name="MoePlacementErrorRateRegressed",
            expr=rules.placement_error_regression(config),
            hold="2m",
            severity=CRITICAL,
            summary="Run {{ $labels.run_id }} loses more tokens after a placement change",
            description="The share of dropped or invalid pairs rose by "
            f"{{{{ $value | humanizePercentage }}}}. {target}",
            dashboard="placement",
        ),
        Alert(
            name="MoePlacementChurn",
            expr=rules.placement_churn(config),
            hold="0s",
            severity=WARNING,
            summary="Placement of run {{ $labels.run_id }} changes too often",
            description="{{ $value }} changes in an hour; the budget is "
            f"{config.placement_changes_per_hour:g}.",
            dashboard="placement",
        ),
        Alert(
            name="MoeRebalanceStalled",
            expr=rules.rebalance_stalled(config),
            hold="10m",
            severity=WARNING,
            summary="No rebalance of run {{ $labels.run_id }} although layer {{ $labels.layer }} "
            "stays uneven in {{ $labels.forward_mode }}",
            description='The busiest rank got at least {{ $value | printf "%.1f" }} times the mean for '
            f"{config.rebalance_window} and the placement did not change.",
            dashboard="placement",
        ),
    )


def _own(config: Config) -> tuple[Alert, ...]:
    at = "{{ $labels.instance }}"
    return (
        Alert(
            name="MoeRanksMissing",
            expr=rules.RANKS_MISSING,
            hold="3m",
            severity=CRITICAL,
            summary="Rank {{ $labels.rank }} of run {{ $labels.run_id }} is missing",
            description='{{ $value | printf "%.0f" }} steps in 2 minutes closed without it.',
            dashboard="collector_health",
        ),
        Alert(
            name="MoeTracerDropping",
            expr=rules.TRACER_DROPS,
            hold="10m",
            severity=WARNING,
            summary=f"The tracer at {at} drops steps ({{{{ $labels.reason }}}})",
            description='{{ $value | printf "%.0f" }} sampled steps in 5 minutes were not sent.',
            dashboard="collector_health",
        ),
        Alert(
            name="MoeInstrumentationCoverageLost",
            expr=f"{rules.COVERAGE} < {config.coverage_ratio}",
            hold="10m",
            severity=WARNING,
            summary=f"Wrapped call sites at {at} no longer fire",
            description="Only {{ $value | humanizePercentage }} of them fired in the last sampled steps.",
            dashboard="collector_health",
        ),
        Alert(
            name="MoeRankCoverageLost",
            expr=rules.rank_coverage_lost(config),
            hold="10m",
            severity=WARNING,
            summary="Wrapped call sites of rank {{ $labels.rank }} in run {{ $labels.run_id }} do not fire",
            description="Only {{ $value | humanizePercentage }} of them fired in its last recorded steps.",
            dashboard="collector_health",
        ),
        Alert(
            name="MoeSeriesBudgetExhausted",
            expr=rules.SERIES_REFUSED,
            hold="15m",
            severity=WARNING,
            summary=f"The collector at {at} refuses series of {{{{ $labels.metric }}}}",
            description='{{ $value | printf "%.0f" }} label sets in 10 minutes; details are in ClickHouse.',
            dashboard="collector_health",
        ),
        Alert(
            name="MoeCollectorLagging",
            expr=f"{rules.VERDICT_P99} > {config.verdict_latency_p99_s}\nor\n{rules.COLLECTOR_BACKLOG}",
            hold="10m",
            severity=WARNING,
            summary=f"The collector at {at} is behind",
            description="Verdicts come late (p99 over "
            f"{config.verdict_latency_p99_s:g}s) or senders are told to wait.",
            dashboard="collector_health",
        ),
        Alert(
            name="MoeStoreUnreachable",
            expr=rules.STORE_ERRORS,
            hold="2m",
            severity=CRITICAL,
            summary=f"The collector at {at} cannot write to ClickHouse",
            description='{{ $value | printf "%.0f" }} failed writes in 5 minutes and no row stored.',
            dashboard="collector_health",
        ),
    )
