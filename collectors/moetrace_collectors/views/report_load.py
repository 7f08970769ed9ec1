"""The report's sections on load: layer x expert, layer x rank, imbalance per layer, rank x rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.markup import Markup, join, table, tag
from moetrace_collectors.views.run_records import LayerImbalance, LoadMatrix, LoadView, RunView, Traffic
from moetrace_collectors.views.svg_heat_map import (
    EXPERT_EDGES,
    RANK_EDGES,
    HeatMap,
    heat_legend,
    heat_map,
)

MAX_LOAD_VIEWS = 12
"""Forward modes and cohorts in one page; each costs up to half a megabyte at 61 layers x 256 experts."""
MAX_TRAFFIC_RANKS = 128


def load_section(view: RunView, summary: Summary) -> Markup:
    """Heat maps and figures per forward mode and cohort, with a switch."""
    if not view.expert_loads:
        return tag("p", "No expert counts are in the store for the steps of this run.", class_="note")
    shown = view.expert_loads[:MAX_LOAD_VIEWS]
    by_view = {matrix.view: matrix for matrix in view.rank_loads}
    parts = [_switch([matrix.view for matrix in shown])]
    for index, matrix in enumerate(shown):
        layers = [layer for layer in view.imbalance if layer.view == matrix.view]
        parts.append(
            tag(
                "div",
                tag("h3", f"Tokens per expert, {matrix.view.label}"),
                _expert_map(matrix, index),
                tag("h3", f"Rows received per rank, {matrix.view.label}"),
                _rank_map(by_view.get(matrix.view), index),
                tag("h3", f"Imbalance per layer, {matrix.view.label}"),
                _imbalance_table(layers),
                class_="load-view",
                data_view=index,
            )
        )
    note = (
        f"Sums over {summary.counted.sentence()}. Tokens are without padding and dummy batches; rows that "
        "ranks received hold both, and are over the steps that miss no rank. 95 % of steps: the ratio within "
        "one step that 95 % of the steps stay below; sums hide what changes from step to step."
    )
    if len(view.expert_loads) > len(shown):
        note += (
            f" {len(view.expert_loads) - len(shown)} more combinations of mode and cohort are in the store."
        )
    parts.append(tag("p", note, class_="note"))
    return join(parts)


def traffic_section(traffic: Traffic | None, summary: Summary) -> Markup | None:
    """Rank x rank heat map of the dispatches' bytes; None where nothing was recorded."""
    if traffic is None or not any(map(any, traffic.bytes)) or len(traffic.ranks) > MAX_TRAFFIC_RANKS:
        return None
    mean = fmean(value for row in traffic.bytes for value in row)
    silent = not all(map(all, traffic.bytes))
    figure = HeatMap(
        identifier="traffic-map",
        title="Bytes sent from rank to rank by dispatches",
        row_name="from",
        rows=traffic.ranks,
        column_name="to rank",
        columns=traffic.ranks,
        values=traffic.bytes,
        means=[mean] * len(traffic.ranks),
        unit="bytes",
        edges=RANK_EDGES,
    )
    note = (
        f"Bytes that dispatches sent, summed over {summary.counted.sentence()}, without steps that miss a "
        "rank; the way back (combine) mirrors it."
    )
    return join(
        (
            heat_legend(RANK_EDGES, mean="the mean pair of ranks", with_dead=silent),
            heat_map(figure),
            tag("p", note, class_="note"),
        )
    )


def _switch(views: Sequence[LoadView]) -> Markup:
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="load-view", value=index, checked=index == 0),
            view.label,
        )
        for index, view in enumerate(views)
    ]
    return tag(
        "fieldset", tag("legend", "Show"), *choices, class_="switch script-only", hidden=len(views) < 2
    )


def _expert_map(matrix: LoadMatrix, index: int) -> Markup:
    figure = HeatMap(
        identifier=f"experts-{index}",
        title=f"Tokens per layer and expert, {matrix.view.label}",
        row_name="layer",
        rows=matrix.layers,
        column_name="expert",
        columns=matrix.columns,
        values=matrix.counts,
        means=_means(matrix),
        unit="(token, slot) pairs",
    )
    return Markup(
        heat_legend(EXPERT_EDGES, mean="the layer's mean", with_dead=_has_zero(matrix)) + heat_map(figure)
    )


def _rank_map(matrix: LoadMatrix | None, index: int) -> Markup:
    if matrix is None:
        return tag("p", "No rank reported the rows it received.", class_="note")
    figure = HeatMap(
        identifier=f"ranks-{index}",
        title=f"Rows received per layer and rank, {matrix.view.label}",
        row_name="layer",
        rows=matrix.layers,
        column_name="rank",
        columns=matrix.columns,
        values=matrix.counts,
        means=_means(matrix),
        unit="rows",
        edges=RANK_EDGES,
    )
    return Markup(
        heat_legend(RANK_EDGES, mean="the layer's mean", with_dead=_has_zero(matrix)) + heat_map(figure)
    )


def _means(matrix: LoadMatrix) -> list[float]:
    return [fmean([value for value in row if value is not None] or [0]) for row in matrix.counts]


def _has_zero(matrix: LoadMatrix) -> bool:
    return any(value == 0 for row in matrix.counts for value in row)


def _imbalance_table(layers: Sequence[LayerImbalance]) -> Markup:
    rows = [
        (
            str(layer.layer),
            f"{layer.max_mean_ratio:.2f}",
            "" if layer.step_p95_max_mean_ratio is None else f"{layer.step_p95_max_mean_ratio:.2f}",
            f"{layer.cv:.2f}",
            "" if layer.rank_max_mean_ratio is None else f"{layer.rank_max_mean_ratio:.2f}",
            str(layer.hot_expert),
            f"{layer.dead_experts:,} of {layer.experts:,}",
            f"{layer.pairs:,}",
        )
        for layer in layers
    ]
    headings = (
        "#Layer",
        "#Max / mean, experts",
        "#95 % of steps",
        "#CV, experts",
        "#Max / mean, ranks",
        "#Hot expert",
        "#Without tokens",
        "#Pairs",
    )
    return table(headings, rows)
