"""`moetrace placement shadow`: a proposed placement scored on recorded or live traffic, unapplied."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from moetrace_collectors.load.source_arguments import (
    add_source_arguments,
    positive,
    positive_number,
    read_loads,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Traffic, the proposal, costs."""
    add_source_arguments(parser)
    parser.add_argument(
        "--propose",
        type=Path,
        required=True,
        metavar="FILE",
        help="the placement to score: a placement file, a record, or what moetrace replay --json printed",
    )
    parser.add_argument("--planner", metavar="NAME", help="of a replay (default: the recommended one)")
    parser.add_argument(
        "--last", type=positive, metavar="STEPS", help="score on the newest steps only (default: all)"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="experts per token, where not recorded")
    parser.add_argument("--us-per-row", type=positive_number, metavar="US", help="experts' time per row")
    parser.add_argument("--node-gbps", type=positive_number, metavar="GB/S", help="speed inside a node")
    parser.add_argument("--link-gbps", type=positive_number, metavar="GB/S", help="speed between nodes")
    parser.add_argument("--expert-mb", type=positive_number, metavar="MB", help="weights of one expert")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Score and print.

    Raises:
        UsageError: nothing to read, or the proposal does not fit the traffic.
    """
    from moetrace_collectors.ledger.record_file import read_record
    from moetrace_collectors.ledger.transition import placement_of_layers
    from moetrace_collectors.load.analysis import fit_placement
    from moetrace_collectors.load.placement_file import read_placement
    from moetrace_collectors.load.routes_file import read_coactivation
    from moetrace_collectors.load.series import choose_series
    from moetrace_collectors.placement.case import ReplayRequest, make_case
    from moetrace_collectors.placement.shadow import newest, shadow, shadow_document, shadow_text

    mapping = read_record(arguments.propose, planner=arguments.planner).mapping
    series = newest(
        choose_series(read_loads(arguments), forward_mode=arguments.forward_mode, cohort=arguments.cohort),
        arguments.last,
    )
    _, num_layers, num_experts = series.loads.shape
    today = None
    if arguments.placement is not None:
        today = read_placement(arguments.placement, num_experts=num_experts, num_ranks=mapping.num_ranks)
    coactivation = None
    if arguments.routes is not None:
        coactivation = read_coactivation(arguments.routes, num_experts=num_experts)
    request = ReplayRequest(
        num_ranks=mapping.num_ranks if arguments.ranks is None else arguments.ranks,
        num_slots=mapping.num_slots,
        num_nodes=arguments.nodes,
        top_k=arguments.top_k,
        us_per_row=arguments.us_per_row,
        row_bytes=arguments.row_bytes,
        node_gb_per_s=arguments.node_gbps,
        link_gb_per_s=arguments.link_gbps,
        expert_mb=arguments.expert_mb,
    )
    case, assumptions, warnings = make_case(
        series, request, today=today, coactivation=coactivation, clock=time.monotonic
    )
    proposed = fit_placement(
        placement_of_layers(mapping, series.layers.tolist()),
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=request.num_ranks,
    )
    found = shadow(case, proposed)
    told = {"assumptions": assumptions, "warnings": warnings}
    if arguments.json:
        sys.stdout.write(json.dumps(shadow_document(case, found, **told), allow_nan=False) + "\n")
    else:
        sys.stdout.write(shadow_text(case, found, **told))
    return 0
