"""How uneven experts and ranks are, where, and in which forward mode."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import assemble
from moetrace_dashboards.panels import lines, matrix, rows
from moetrace_dashboards.queries import promql, sql


def build(config: Config) -> Dashboard:
    """The dashboard."""
    panels = (
        matrix(
            "Load by layer and expert ($forward_mode)",
            "Routed pairs over the mean of the layer, source side, padding left out: 1 is even. One panel "
            "per "
            "forward mode, because prefill and decode load differ.",
            "none",
            sql.LAYER_BY_EXPERT,
            row="layer",
            column="expert",
            value="load",
            width=24,
            repeat="forward_mode",
        ),
        matrix(
            "Load by layer and rank",
            "Rows received over the mean of the layer, destination side: what placement makes of routing.",
            "none",
            sql.LAYER_BY_RANK,
            row="layer",
            column="rank",
            value="load",
        ),
        rows(
            "Hot and dead experts",
            "By layer and forward mode: experts without a token in the time shown, the hottest one, "
            "max/mean and CV.",
            "none",
            sql.HOT_AND_DEAD,
            width=12,
        ),
        lines(
            "Max/mean over experts",
            "Of the last step at each scrape. The line is where MoeExpertLoadImbalanced begins.",
            "none",
            [promql.EXPERT_IMBALANCE],
            width=8,
            limit=config.imbalance_high,
        ),
        lines(
            "Coefficient of variation over experts",
            "Standard deviation over mean of the last step at each scrape; less ruled by one expert than "
            "max/mean.",
            "none",
            [promql.EXPERT_CV],
            width=8,
        ),
        lines(
            "Max/mean over ranks",
            "Rows received by the busiest rank over the mean. The line is where a balancer should act.",
            "none",
            [promql.RANK_IMBALANCE],
            width=8,
            limit=config.rebalance_imbalance,
        ),
        lines(
            "Activated experts per rank",
            "Experts that got at least one row in a layer, mean over layers and steps: what a decode step "
            "must read "
            "from memory.",
            "none",
            [sql.ACTIVATED_EXPERTS],
            width=8,
        ),
        lines(
            "Routed pairs",
            "(token, slot) pairs per second over all layers, padding left out.",
            "cps",
            [promql.ROUTED_PAIRS],
            width=8,
        ),
        lines(
            "Pairs left out, by reason",
            "Padding and recompute are normal; dropped and invalid are tokens that reach no expert.",
            "cps",
            [promql.EXCLUDED_PAIRS],
            width=8,
        ),
        lines(
            "Routing that contradicts itself, by reason",
            "Per second, in the steps whose routing was checked; above 0 is a fault of code or weights.",
            "cps",
            [promql.ROUTING_VIOLATIONS],
            width=24,
        ),
    )
    return assemble(
        "expert_load",
        "moetrace: expert load",
        "Load over experts and ranks by layer and forward mode.",
        panels,
        config,
        with_layer=True,
    )
