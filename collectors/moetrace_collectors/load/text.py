"""What `moetrace load` prints for people: one line per layer, then what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moetrace_collectors.load.analysis import MEASURED, LoadAnalysis
from moetrace_collectors.load.balancedness import DEFINITIONS, balancedness_layer
from moetrace_collectors.load.figures import hottest
from moetrace_collectors.number_format import count

MAX_LAYERS = 24
"""Layers listed, the least balanced first; the rest is in --json."""


def render(analysis: LoadAnalysis, others: Sequence[LoadAnalysis] = ()) -> str:
    """All lines of one analysis, and the names of the series that are not shown."""
    series = analysis.series
    ranks = "" if analysis.rank_loads is None else f", {_ranks(analysis, analysis.rank_loads.shape[2])}"
    lines = [
        f"{series.source}: {series.name}, {count(len(series.layers), 'layer')}, "
        f"{count(series.loads.shape[2], 'expert')}{ranks}",
        f"Figures: {series.counted.sentence()}",
        "",
        *_layer_table(analysis),
        "",
        *_balance(analysis),
        *_stability(analysis),
        *_exchange(analysis),
        *_hot_spots(analysis),
    ]
    if others:
        lines.append(
            "Not shown: " + "; ".join(other.series.name for other in others) + " (--forward-mode, --cohort)"
        )
    lines += [f"Note: {warning}." for warning in analysis.warnings]
    return "\n".join(lines).rstrip() + "\n"


def _ranks(analysis: LoadAnalysis, num_ranks: int) -> str:
    return f"{count(num_ranks, 'rank')} on {count(analysis.num_nodes, 'node')}"


def _layer_table(analysis: LoadAnalysis) -> list[str]:
    series, figures = analysis.series, analysis.experts
    totals = series.totals
    balance = balancedness_layer(analysis.compared)
    order = np.argsort(np.where(np.isnan(balance), 2.0, balance), kind="stable")[:MAX_LAYERS]
    first = hottest(totals, 1)[:, 0]
    ranks = None if analysis.rank_loads is None else analysis.rank_loads.sum(axis=0)
    rows = []
    for at in sorted(order.tolist()):
        total = max(float(figures.total[at]), 1.0)
        rows.append(
            (
                series.layer_names[at],
                f"{figures.total[at]:,.0f}",
                f"{figures.max_mean_ratio[at]:.2f}",
                f"{figures.cv[at]:.2f}",
                f"{figures.gini[at]:.2f}",
                f"{figures.entropy_bits[at]:.2f}",
                str(figures.dead[at]),
                f"{first[at]} ({100 * totals[at, first[at]] / total:.1f} %)",
                "-" if np.isnan(balance[at]) else f"{balance[at]:.3f}",
                "-" if ranks is None else str(int(ranks[at].argmax())),
                analysis.stability.kind[at],
            )
        )
    header = (
        "layer",
        "pairs",
        "max/mean",
        "cv",
        "gini",
        "bits",
        "dead",
        "hottest",
        "balance",
        "rank",
        "over time",
    )
    lines = table(header, rows)
    if len(series.layers) > MAX_LAYERS:
        lines.append(
            f"{count(len(series.layers) - MAX_LAYERS, 'better balanced layer')} not listed: --json has all"
        )
    return lines


def _balance(analysis: LoadAnalysis) -> list[str]:
    compared = analysis.compared
    steps = analysis.series.loads if analysis.rank_loads is None else analysis.rank_loads
    level = "experts" if analysis.rank_loads is None else "ranks"
    basis = "rows received, padding and dummy batches with them; " if analysis.rank_basis == MEASURED else ""
    lines = [f"Balance over {level} ({basis}definitions disagree; each with who uses it):"]
    for definition in DEFINITIONS.values():
        total = definition.value(compared)
        single = definition.value(steps.reshape(-1, steps.shape[-1]))
        lines.append(
            f"  {definition.name:18} {total:7.4f}   step by step {single:7.4f}   {definition.formula}; "
            f"{definition.used_by}"
        )
    return lines


def _stability(analysis: LoadAnalysis) -> list[str]:
    kinds = analysis.stability.kind
    known = [kind for kind in kinds if kind != "unknown"]
    if not known:
        return []
    share = float(np.nanmean(analysis.stability.persistent_share))
    stable, transient = known.count("stable"), known.count("transient")
    return [
        f"Over {count(analysis.stability.windows, 'window')}: {count(stable, 'layer')} stably uneven, "
        f"{transient} changing from window to window, {known.count('even')} even; {100 * share:.0f} % of the "
        "imbalance persists."
    ]


def _exchange(analysis: LoadAnalysis) -> list[str]:
    lines = []
    sent = analysis.communication
    if analysis.rank_loads is not None and analysis.rank_loads.shape[2] == 1:
        lines.append("Exchange: none, there is one rank.")
    elif sent is not None:
        crossing = sent.cross_node_ratio(analysis.num_nodes)
        how = "recorded" if sent.measured else "counts sent through the placement"
        lines.append(
            f"Exchange ({how}): {100 * float(crossing.mean()):.1f} % of the rows leave their node; the "
            f"fullest rank receives {float(sent.received_ratio().max()):.2f} x the mean in its worst layer."
        )
    if analysis.coactivation_cross_node is not None and analysis.num_nodes > 1:
        lines.append(
            f"Co-activation: {100 * float(analysis.coactivation_cross_node.mean()):.1f} % of the "
            "co-activated pairs cross nodes."
        )
    return lines


def _hot_spots(analysis: LoadAnalysis) -> list[str]:
    found = analysis.hot_spots
    if found is None:
        return []
    if not found:
        return ["Hot spots: none that persists."]
    return ["Hot spots:", *(f"  {finding.spot.sentence()}" for finding in found)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Right-aligned columns under a header."""
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
