"""Where steps spend their time, and whom the verdicts name."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble, link_to
from moetrace_dashboards.panels import lines, number, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    to_path = [link_to("critical_path", "the steps behind this")]
    panels = (
        number(
            "Clear verdicts",
            "Share of steps whose critical rank and phase stand clearly out of the noise. A low share is "
            "normal "
            "when nothing is wrong.",
            "percentunit",
            promql.CLEAR_SHARE,
        ),
        lines(
            "Step time",
            "Duration of joined steps along their frontier: p50, p95 and p99 by forward mode. Warm-up is "
            "left out.",
            "s",
            promql.STEP_SECONDS,
            width=18,
            links=to_path,
        ),
        lines(
            "Where a step's time goes",
            "Mean frontier of a step by phase. These are pieces of the critical path, so they add up to "
            "the step; "
            "sums over ranks would not.",
            "s",
            [promql.FRONTIER],
            stacked=True,
            links=to_path,
        ),
        rows(
            "Who costs most",
            "What clear verdicts say would be saved in the time shown if the named rank were average in the "
            "named phase.",
            "s",
            promql.WORTH,
            width=12,
        ),
        rows(
            "Suspects with layer and cause",
            "Steps and worth by rank, phase, layer and cause; an empty layer is a rank that is slow in "
            "all of them.",
            "s",
            sql.TOP_SUSPECTS,
            width=24,
        ),
        lines("Causes", "Verdicts per second by cause.", "cps", [promql.CAUSES], width=8, stacked=True),
        lines(
            "Evidence",
            "Verdicts per second by how sure they are.",
            "cps",
            [promql.EVIDENCE],
            width=8,
            stacked=True,
        ),
        lines("Step rate", "Joined steps per second by forward mode.", "cps", [promql.STEP_RATE], width=8),
    )
    return assemble(
        "step_overview",
        "moetrace: steps",
        "Step time, its critical path by phase, and who extends it.",
        panels,
        config,
    )
