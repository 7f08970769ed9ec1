"""Which rank, layer and phase extends steps, and which steps were worst."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble, step_link, trace_link
from moetrace_dashboards.panels import heat_over_time, lines, matrix, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    panels = (
        heat_over_time(
            "Extension by rank",
            "Seconds per second by which a rank's work before an exchange was longer than the mean of the "
            "ranks. "
            "A bright row is a slow rank; a bright column is a disturbance of all.",
            "s",
            promql.EXTENSION_BY_RANK,
        ),
        lines(
            "Share of steps that name a rank and phase",
            "Steps with clear evidence over all steps. The line is where MoeRankPersistentlyCritical begins.",
            "percentunit",
            [promql.CRITICAL_STEPS],
            limit=config.critical_share_high,
        ),
        lines(
            "Extension by phase",
            "Seconds per second by which the releaser's largest excess, by phase, extended steps.",
            "s",
            [promql.EXTENSION_BY_PHASE],
            stacked=True,
        ),
        matrix(
            "Extension by layer and phase",
            "Summed over the time shown. One bright cell is a place; a bright column is a phase that is "
            "slow in "
            "every layer.",
            "s",
            sql.EXTENSION_BY_LAYER_AND_PHASE,
            row="layer",
            column="phase",
            value="extension",
        ),
        matrix(
            "One step, rank by rank",
            "The step chosen above, or the slowest shown: time by rank and phase. In an exchange the rank "
            "with the "
            "shortest time waited least: the others waited for it.",
            "s",
            sql.STEP_RANK_BY_PHASE,
            row="rank",
            column="part",
            value="duration",
        ),
        rows(
            "Worst steps",
            "By what they would give back. A click on a row leads to the step rank by rank, or to its trace.",
            "s",
            sql.WORST_STEPS,
            cell_links=[step_link(), trace_link(config)],
        ),
    )
    return assemble(
        "critical_path",
        "moetrace: critical path",
        "Which rank, layer and phase extends steps, and the worst steps.",
        panels,
        config,
        with_step=True,
    )
