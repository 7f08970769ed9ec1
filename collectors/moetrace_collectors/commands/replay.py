"""`moetrace replay`: what other placements of the experts would have been worth on recorded loads."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.source_arguments import (
    add_source_arguments,
    positive,
    positive_number,
    read_loads,
)

if TYPE_CHECKING:
    from moetrace_collectors.load.series import LoadSeries
    from moetrace_collectors.placement.replay import PlannerResult, ReplayCase

HELP = "score placements of the experts on recorded loads, and say whether a move pays"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, slots and topology, costs, limits, and what to write."""
    add_source_arguments(parser)
    parser.add_argument(
        "--slots",
        type=positive,
        metavar="N",
        help="physical experts over all ranks (default: as many as today; more are recommended only if "
        "given here or if --memory-gb has room for them)",
    )
    parser.add_argument(
        "--groups", type=positive, default=1, metavar="N", help="expert groups of the router (default: 1)"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="experts per token, where not recorded")
    costs = parser.add_argument_group(
        "costs (default: recorded ones, else typical ones that are named as assumed)"
    )
    costs.add_argument(
        "--us-per-row", type=positive_number, metavar="US", help="experts' time per row of a layer"
    )
    costs.add_argument("--step-ms", type=positive_number, metavar="MS", help="length of a step")
    costs.add_argument(
        "--node-gbps", type=positive_number, metavar="GB/S", help="speed inside a node, per rank"
    )
    costs.add_argument(
        "--link-gbps", type=positive_number, metavar="GB/S", help="speed between nodes, per rank"
    )
    costs.add_argument(
        "--copies",
        choices=("pair", "rank", "node"),
        default="node",
        help="copies of a row that a dispatch sends: per expert, rank or node (default: %(default)s)",
    )
    costs.add_argument(
        "--expert-mb", type=positive_number, metavar="MB", help="weights of one expert of one layer"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--memory-gb",
        metavar="GB[,GB...]",
        help="memory per rank, one number or one per rank; the smallest counts",
    )
    limits.add_argument(
        "--reserved-gb",
        type=_not_negative,
        default=0.0,
        metavar="GB",
        help="of it for KV cache, activations and all that is no routed expert (default: 0)",
    )
    limits.add_argument(
        "--max-moves", type=_whole, metavar="N", help="experts that may be copied (default: any number)"
    )
    limits.add_argument(
        "--plan-seconds", type=positive_number, default=1.0, metavar="S", help="longest planning (default: 1)"
    )
    limits.add_argument(
        "--windows", type=_windows, default=2, metavar="N", help="windows of the walk-forward (default: 2)"
    )
    limits.add_argument(
        "--horizon-s",
        type=positive_number,
        default=3600.0,
        metavar="S",
        help="a move must pay within (default: 3600)",
    )
    limits.add_argument(
        "--min-gain",
        type=positive_number,
        default=0.01,
        metavar="PART",
        help="part of a step worth a change (default: 0.01)",
    )
    parser.add_argument(
        "--write-placement", type=Path, metavar="FILE", help="write the recommended placement as JSON"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Read, plan, score, print.

    Raises:
        UsageError: nothing to read, or what is asked for cannot be planned.
    """
    # Here and not above: help needs neither numpy nor a store.
    from moetrace_collectors.load.series import choose_series
    from moetrace_collectors.placement.alternatives import alternatives
    from moetrace_collectors.placement.document import build_document
    from moetrace_collectors.placement.planners import PLANNERS
    from moetrace_collectors.placement.recommendation import recommend
    from moetrace_collectors.placement.replay import replay_planner
    from moetrace_collectors.placement.text import render

    found = read_loads(arguments)
    series = choose_series(found, forward_mode=arguments.forward_mode, cohort=arguments.cohort)
    case, assumptions, warnings = _case(arguments, series)
    if len(found) > 1:
        listed = "; ".join(other.name for other in found if other is not series)
        warnings.append(f"replayed is {series.name}; not {listed} (--forward-mode, --cohort)")
    results = [replay_planner(case, planner) for planner in PLANNERS]
    cohorts = [
        other for other in found if other.forward_mode is series.forward_mode and other.cohort is not None
    ]
    options = alternatives(case, results, cohorts if series.cohort is None else ())
    answer = recommend(case, options)
    told = {"assumptions": assumptions, "warnings": warnings}
    if arguments.write_placement is not None:
        chosen = next(
            (option.result for option in options if option.option.value == answer.action.value), None
        )
        _write(arguments.write_placement, chosen, series)
    if arguments.json:
        document = build_document(case, results, options, answer, **told)
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    else:
        sys.stdout.write(render(case, results, options, answer, **told))
    return 0


def _case(arguments: argparse.Namespace, series: LoadSeries) -> tuple[ReplayCase, list[str], list[str]]:
    from dataclasses import replace

    from moetrace_collectors.load.routes_file import read_coactivation
    from moetrace_collectors.placement.case import ReplayRequest, make_case

    coactivation = None
    if arguments.routes is not None:
        coactivation = read_coactivation(arguments.routes, num_experts=series.loads.shape[2])
    today = None
    if arguments.placement is not None:
        from moetrace_collectors.load.placement_file import read_placement

        today = read_placement(
            arguments.placement, num_experts=series.loads.shape[2], num_ranks=arguments.ranks
        )
    request = ReplayRequest(
        num_slots=arguments.slots,
        num_ranks=arguments.ranks,
        num_nodes=arguments.nodes,
        num_groups=arguments.groups,
        top_k=arguments.top_k,
        us_per_row=arguments.us_per_row,
        row_bytes=arguments.row_bytes,
        node_gb_per_s=arguments.node_gbps,
        link_gb_per_s=arguments.link_gbps,
        copies=arguments.copies,
        expert_mb=arguments.expert_mb,
        memory_gb=_smallest(arguments.memory_gb),
        memory_ranks=0 if arguments.memory_gb is None else arguments.memory_gb.count(",") + 1,
        reserved_gb=arguments.reserved_gb,
        max_moves=arguments.max_moves,
        windows=arguments.windows,
        horizon_s=arguments.horizon_s,
        min_gain=arguments.min_gain,
        plan_seconds=arguments.plan_seconds,
    )
    if arguments.step_ms is not None:
        series = replace(series, step_ms=arguments.step_ms)
    return make_case(series, request, today=today, coactivation=coactivation, clock=time.monotonic)


def _write(path: Path, chosen: PlannerResult | None, series: LoadSeries) -> None:
    from moetrace_collectors.load.placement_file import write_placement

    if chosen is None:
        print(f"nothing is to be moved, so {path} is not written", file=sys.stderr)
        return
    write_placement(path, chosen.placement, layers=[int(layer) for layer in series.layers])
    print(f"placement of {chosen.planner} written to {path}", file=sys.stderr)


def _smallest(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 < value < float("inf") for value in values):
        raise UsageError(
            f"memory-gb = {text!r}: a number above 0 expected, or one per rank with commas between"
        )
    return min(values)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of 0 or more expected, got {text!r}")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"a whole number of 0 or more expected, got {text!r}")
    return value


def _windows(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError("2 windows or more expected: one to plan on, one to score")
    return value
