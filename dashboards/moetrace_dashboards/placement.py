"""What a placement change did."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble
from moetrace_dashboards.panels import lines, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    panels = (
        lines(
            "Placement in use",
            "Epoch of the placement; 0 is unknown. Changes are drawn as lines in every panel.",
            "none",
            [promql.PLACEMENT_VERSION],
            width=8,
        ),
        lines(
            "Changes in an hour",
            "The line is the budget of MoePlacementChurn.",
            "none",
            [promql.PLACEMENT_CHANGES_PER_HOUR],
            width=8,
            limit=config.placement_changes_per_hour,
        ),
        lines(
            "p95 of step time",
            "Watch it across the change; MoePlacementStepTimeRegressed compares both sides.",
            "s",
            [promql.STEP_P95],
            width=8,
        ),
        lines(
            "Experts fetched in an hour",
            "Experts that ranks did not hold in the epoch before, by the announced maps: what changes cost.",
            "none",
            [promql.PLACEMENT_COPIES],
            width=12,
        ),
        lines(
            "Changes judged in an hour",
            "Steps of like size before and after: accepted, regressed or not enough evidence.",
            "none",
            [promql.PLACEMENT_VERDICTS],
            width=12,
        ),
        rows(
            "Ledger",
            "Every proposal, announcement, first step and verdict; `moetrace placement verify` checks it.",
            "none",
            sql.PLACEMENT_LEDGER,
        ),
        rows(
            "Before and after",
            "Steps, p50 and p95 by placement and forward mode, in the time shown.",
            "s",
            sql.PLACEMENTS,
        ),
        rows(
            "Replicas that appeared",
            "(expert, rank) pairs that got rows in this placement and not in the one before: what had to "
            "be moved. "
            "A replica that never got a row is not seen.",
            "none",
            sql.MIGRATIONS,
            width=12,
        ),
        rows(
            "Use of replicas",
            "Ranks that got rows of an expert, and max/mean over them: a replica far below its twins is "
            "wasted memory.",
            "none",
            sql.REPLICA_USE,
            width=12,
        ),
    )
    return assemble(
        "placement",
        "moetrace: placement and changes",
        "Placement epochs, what they did, and how replicas are used.",
        panels,
        config,
        with_layer=True,
    )
