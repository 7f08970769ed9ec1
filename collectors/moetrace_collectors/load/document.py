"""The JSON document of `moetrace load --json`. Pure.

Its schema is published as moetrace_schemas/json/load_result.schema.json; names are added there first, and
never removed or reused. Loads are (token, slot) pairs, ratios and shares are plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moetrace_collectors.load.analysis import LoadAnalysis, LoadWindow
from moetrace_collectors.load.balancedness import DEFINITIONS, balancedness_layer
from moetrace_collectors.load.coactivation import apart_across
from moetrace_collectors.load.figures import (
    PERCENTILES,
    LoadFigures,
    hottest,
    load_figures,
    max_mean_ratio,
)
from moetrace_collectors.load.hot_spot_scan import HotSpotFinding
from moetrace_collectors.load.kernel_shapes import KernelShapes
from moetrace_collectors.model import IntArray

SCHEMA_NAME = "load_result.schema.json"
DOCUMENT_VERSION = 1


def build_document(
    analysis: LoadAnalysis, others: Sequence[LoadAnalysis] = (), *, hot_experts: int = 8
) -> dict[str, Any]:
    """The document as plain JSON types: the series asked for at the top, the others in `other_views`."""
    warnings = list(analysis.warnings)
    if others:
        warnings.append(
            f"figures at the top are of {analysis.series.name}; prefill, decode and cohorts are never mixed, "
            f"so {len(others)} more stand in other_views"
        )
    return {
        "document_version": DOCUMENT_VERSION,
        "source": analysis.series.source,
        **_view(analysis, hot_experts),
        "other_views": [{**_view(other, hot_experts), "warnings": list(other.warnings)} for other in others],
        "warnings": warnings,
    }


def _view(analysis: LoadAnalysis, hot_experts: int) -> dict[str, Any]:
    series = analysis.series
    compared = analysis.compared
    return {
        "forward_mode": str(series.forward_mode) if series.forward_mode else None,
        "cohort": series.cohort,
        "steps": int(series.steps_in_entry.sum()),
        "experts": int(series.loads.shape[2]),
        "top_k": series.top_k,
        "placement_version": series.placement_version,
        "ranks": None if analysis.rank_loads is None else int(analysis.rank_loads.shape[2]),
        "nodes": analysis.num_nodes,
        "rank_loads_from": analysis.rank_basis,
        "balancedness_level": "expert" if analysis.rank_loads is None else "rank",
        "balancedness_mean": number(DEFINITIONS["balancedness_mean"].value(compared)),
        "balancedness_sum": number(DEFINITIONS["balancedness_sum"].value(compared)),
        "balancedness_definitions": [
            {
                "name": definition.name,
                "formula": definition.formula,
                "used_by": definition.used_by,
                "perfect": definition.perfect,
                "value": number(definition.value(compared)),
                "value_per_step": _per_step(analysis, definition.name),
            }
            for definition in DEFINITIONS.values()
        ],
        "layers": _layers(analysis, hot_experts),
        "windows": [_window(window, analysis) for window in analysis.windows],
        "hot_spots": (
            None if analysis.hot_spots is None else [_hot_spot(finding) for finding in analysis.hot_spots]
        ),
        "communication": _communication(analysis),
        "coactivation": _coactivation(analysis),
    }


def _per_step(analysis: LoadAnalysis, name: str) -> float | None:
    """The same definition over every (step, layer): what steps live through, and not their sum."""
    loads = analysis.series.loads if analysis.rank_loads is None else analysis.rank_loads
    return number(DEFINITIONS[name].value(loads.reshape(-1, loads.shape[-1])))


def _layers(analysis: LoadAnalysis, hot_experts: int) -> list[dict[str, Any]]:
    series, experts, stable = analysis.series, analysis.experts, analysis.stability
    totals = series.totals
    hot = hottest(totals, hot_experts)
    balance = balancedness_layer(analysis.compared)
    rank_totals = None if analysis.rank_loads is None else analysis.rank_loads.sum(axis=0)
    ranks = None if rank_totals is None else load_figures(rank_totals)
    layers = []
    for at, layer in enumerate(series.layers.tolist()):
        total = float(experts.total[at])
        layers.append(
            {
                "layer": int(layer),
                "name": series.layer_names[at],
                "tokens": whole(total),
                "max": whole(float(experts.max[at])),
                "mean": float(experts.mean[at]),
                "max_mean_ratio": float(experts.max_mean_ratio[at]),
                "cv": float(experts.cv[at]),
                "gini": float(experts.gini[at]),
                "entropy_bits": float(experts.entropy_bits[at]),
                "percentiles": _percentiles(experts, at),
                "dead_experts": int(experts.dead[at]),
                "hot_experts": [
                    {
                        "expert": int(expert),
                        "tokens": whole(float(totals[at, expert])),
                        "share": float(totals[at, expert]) / total if total else 0.0,
                    }
                    for expert in hot[at].tolist()
                ],
                "rank_loads": None if rank_totals is None else [whole(x) for x in rank_totals[at].tolist()],
                "rank_max_mean_ratio": None if ranks is None else float(ranks.max_mean_ratio[at]),
                "rank_cv": None if ranks is None else float(ranks.cv[at]),
                "rank_figures": None if ranks is None else _figures(ranks, at),
                "balancedness": number(float(balance[at])),
                "critical_rank": (
                    int(rank_totals[at].argmax()) if rank_totals is not None and total else None
                ),
                "activated_experts": (
                    None if analysis.activated is None else [float(x) for x in analysis.activated[at]]
                ),
                "stability": {
                    "kind": stable.kind[at],
                    "persistent_share": number(float(stable.persistent_share[at])),
                    "rank_correlation": number(float(stable.rank_correlation[at])),
                    "hot_set_overlap": number(float(stable.hot_set_overlap[at])),
                    "hottest_share": number(float(stable.hottest_share[at])),
                },
            }
        )
    return layers


def _figures(figures: LoadFigures, at: int) -> dict[str, Any]:
    """Figures of one layer over ranks."""
    return {
        "total": whole(float(figures.total[at])),
        "max": whole(float(figures.max[at])),
        "mean": float(figures.mean[at]),
        "max_mean_ratio": float(figures.max_mean_ratio[at]),
        "cv": float(figures.cv[at]),
        "gini": float(figures.gini[at]),
        "entropy_bits": float(figures.entropy_bits[at]),
        "percentiles": _percentiles(figures, at),
        "idle": int(figures.dead[at]),
    }


def _percentiles(figures: LoadFigures, at: int) -> dict[str, float]:
    return {
        f"p{percent}": float(value)
        for percent, value in zip(PERCENTILES, figures.percentiles[at], strict=True)
    }


def _window(window: LoadWindow, analysis: LoadAnalysis) -> dict[str, Any]:
    experts = window.experts
    compared = window.rank_loads
    return {
        "first_step": window.first_step,
        "last_step": window.last_step,
        "start_unix_s": window.start_s,
        "balancedness_mean": (
            None if compared is None else number(DEFINITIONS["balancedness_mean"].value(compared))
        ),
        "balancedness_sum": (
            None if compared is None else number(DEFINITIONS["balancedness_sum"].value(compared))
        ),
        "layers": [
            {
                "layer": int(layer),
                "tokens": whole(float(experts.total[at])),
                "max_mean_ratio": float(experts.max_mean_ratio[at]),
                "cv": float(experts.cv[at]),
                "hot_expert": int(window.hottest[at]),
                "rank_max_mean_ratio": None if compared is None else float(max_mean_ratio(compared[at])),
            }
            for at, layer in enumerate(analysis.series.layers.tolist())
        ],
    }


def _hot_spot(finding: HotSpotFinding) -> dict[str, Any]:
    spot = finding.spot
    return {
        "layer": spot.place.layer,
        "signal": str(spot.place.signal),
        "state": str(spot.state),
        "fired": len(finding.fired_at_s),
        "fired_at_unix_s": list(finding.fired_at_s),
        "max_mean_ratio": spot.ratio,
        "peak_max_mean_ratio": spot.peak,
        "rank": spot.hottest if spot.hottest >= 0 else None,
        "explanation": spot.sentence(),
    }


def _communication(analysis: LoadAnalysis) -> dict[str, Any] | None:
    sent = analysis.communication
    if sent is None:
        return None
    received = load_figures(sent.received())
    return {
        "measured": sent.measured,
        "rows": sent.rows.sum(axis=0).tolist(),
        "bytes": None if sent.bytes is None else sent.bytes.sum(axis=0).tolist(),
        "layers": [
            {
                "layer": int(layer),
                "received_max_mean_ratio": float(received.max_mean_ratio[at]),
                "received": _figures(received, at),
                "bytes": None if sent.bytes is None else whole(float(sent.bytes[at].sum())),
                "cross_node_ratio": float(crossing),
            }
            for at, (layer, crossing) in enumerate(
                zip(analysis.series.layers.tolist(), sent.cross_node_ratio(analysis.num_nodes), strict=True)
            )
        ],
    }


def _coactivation(analysis: LoadAnalysis) -> dict[str, Any] | None:
    pairs = analysis.coactivation
    if pairs is None:
        return None
    crossing = analysis.coactivation_cross_node
    return {
        "sampled_tokens": pairs.tokens or None,
        "cross_node_share": None if crossing is None else [float(share) for share in crossing],
        "top_pairs": [
            {
                "layer": int(analysis.series.layers[pair.layer]),
                "experts": [pair.first, pair.second],
                "tokens": pair.tokens,
                "cross_node": pair.cross_node,
            }
            for pair in analysis.coactivated_pairs
        ],
        "across_layers": [] if pairs.across is None else _across_layers(analysis, pairs.across),
    }


def _across_layers(analysis: LoadAnalysis, across: IntArray) -> list[dict[str, Any]]:
    """Per layer the two experts that most tokens visit one after the other, and how much crosses nodes."""
    placement = analysis.placement
    apart = None if placement is None else apart_across(placement, num_nodes=analysis.num_nodes)
    follows = []
    for at, tokens in enumerate(across):
        expert, next_expert = divmod(int(tokens.argmax()), tokens.shape[1])
        total = int(tokens.sum())
        follows.append(
            {
                "layer": int(analysis.series.layers[at]),
                "expert": expert,
                "next_expert": next_expert,
                "tokens": int(tokens[expert, next_expert]),
                "cross_node": None if apart is None else float(apart[at, expert, next_expert]),
                "cross_node_share": (
                    float((tokens * apart[at]).sum() / total) if apart is not None and total else None
                ),
            }
        )
    return follows


def shapes_document(
    shapes: KernelShapes, analysis: LoadAnalysis, *, hidden: int | None, intermediate: int | None
) -> dict[str, Any]:
    """Grouped-GEMM problems as plain JSON types: M per group, N and K where they are told."""
    return {
        "document_version": DOCUMENT_VERSION,
        "source": analysis.series.source,
        "forward_mode": str(analysis.series.forward_mode) if analysis.series.forward_mode else None,
        "ranks": analysis.placement.num_ranks if analysis.placement else None,
        "n": intermediate,
        "k": hidden,
        "measured_problems": shapes.measured_problems,
        "histogram": [
            {"rank": entry.rank, "rows_low": entry.low, "rows_high": entry.high, "count": entry.count}
            for entry in shapes.histogram
        ],
        "problems": [
            {
                "step": int(analysis.series.steps[problem.step]),
                "layer": int(analysis.series.layers[problem.layer]),
                "rank": problem.rank,
                "weight": problem.weight,
                "rows": list(problem.rows),
            }
            for problem in shapes.problems
        ],
    }


def shapes_csv(document: Mapping[str, Any]) -> str:
    """The problems of `shapes_document` as CSV, one line per group."""
    lines = ["problem,step,layer,rank,weight,group,m,n,k"]
    n, k = document["n"] or "", document["k"] or ""
    for at, problem in enumerate(document["problems"]):
        place = f"{at},{problem['step']},{problem['layer']},{problem['rank']},{problem['weight']}"
        lines += [f"{place},{group},{rows},{n},{k}" for group, rows in enumerate(problem["rows"])]
    return "\n".join(lines) + "\n"


def number(value: float) -> float | None:
    """None for what JSON cannot say (NaN: nothing was counted)."""
    return value if math.isfinite(value) else None


def whole(value: float) -> int | float:
    """Counts as integers; halves of replicated experts stay what they are."""
    return int(value) if float(value).is_integer() else float(np.float64(value))
