"""`moetrace load`: how uneven a recorded load is, at experts, ranks and links, and whether it stays so."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.source_arguments import (
    add_source_arguments,
    positive,
    positive_number,
    read_loads,
)
from moetrace_collectors.number_format import count

if TYPE_CHECKING:
    from moetrace_collectors.load.analysis import LoadAnalysis

HELP = "show how uneven expert load is, per layer, rank and link, and over time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Source, ranks and placement, windows, and what to write."""
    add_source_arguments(parser)
    parser.add_argument(
        "--windows",
        type=positive,
        default=8,
        metavar="N",
        help="windows for stability over time (default: %(default)s)",
    )
    parser.add_argument(
        "--top",
        type=positive,
        default=8,
        metavar="K",
        help="hot experts listed per layer (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds-per-step", type=positive_number, metavar="S", help="for dumps that tell no time"
    )
    parser.add_argument("--hot-spots", type=Path, metavar="FILE", help="TOML with settings of hot spots")
    parser.add_argument(
        "--export-shapes",
        type=Path,
        metavar="FILE",
        help="write rows per expert and rank as grouped-GEMM problems (.json or .csv)",
    )
    parser.add_argument(
        "--shapes", type=positive, default=64, metavar="N", help="problems to write (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=positive, metavar="K", help="model width, written as K of the problems"
    )
    parser.add_argument("--intermediate", type=positive, metavar="N", help="experts' width, written as N")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    """Read, analyse, print.

    Raises:
        UsageError: nothing to read, or arguments that do not fit the loads.
    """
    # Here and not above: help needs neither numpy nor a store.
    from moetrace_collectors.load.analysis import LoadOptions, analyse
    from moetrace_collectors.load.document import build_document
    from moetrace_collectors.load.hot_spot_settings import load_rules
    from moetrace_collectors.load.placement_file import read_placement
    from moetrace_collectors.load.routes_file import read_coactivation
    from moetrace_collectors.load.series import choose_series
    from moetrace_collectors.load.text import render

    rules = load_rules(arguments.hot_spots)
    found = read_loads(arguments)
    chosen = choose_series(found, forward_mode=arguments.forward_mode, cohort=arguments.cohort)
    options = LoadOptions(
        num_ranks=arguments.ranks,
        num_nodes=arguments.nodes,
        windows=arguments.windows,
        hot_experts=arguments.top,
        seconds_per_step=arguments.seconds_per_step,
        row_bytes=arguments.row_bytes,
    )
    num_experts = chosen.loads.shape[2]
    placement = None
    if arguments.placement is not None:
        placement = read_placement(arguments.placement, num_experts=num_experts, num_ranks=arguments.ranks)
    coactivation = chosen.coactivation
    if arguments.routes is not None:
        coactivation = read_coactivation(arguments.routes, num_experts=num_experts)
    analysis = analyse(chosen, options, rules, placement=placement, coactivation=coactivation)
    narrowed = arguments.forward_mode is not None or arguments.cohort is not None
    others = []
    for other in [] if narrowed else found:
        # Another recording may be of another model, which these ranks or this placement do not fit.
        fits = other.loads.shape[1:] == chosen.loads.shape[1:] or (
            placement is None and other.loads.shape[2] % (arguments.ranks or 1) == 0
        )
        if other is not chosen and fits:
            others.append(analyse(other, options, rules, placement=placement))
    if arguments.export_shapes is not None:
        _export_shapes(arguments, analysis)
    if arguments.json:
        document = build_document(analysis, others, hot_experts=arguments.top)
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    else:
        sys.stdout.write(render(analysis, others))
    return 0


def _export_shapes(arguments: argparse.Namespace, analysis: LoadAnalysis) -> None:
    from moetrace_collectors.load.document import shapes_csv, shapes_document
    from moetrace_collectors.load.kernel_shapes import kernel_shapes
    from moetrace_collectors.load.placement_file import write_json, write_text

    path: Path = arguments.export_shapes
    if path.suffix not in (".json", ".csv"):
        raise UsageError(f"--export-shapes {path}: a name that ends in .json or .csv expected")
    if analysis.placement is None:
        raise UsageError("--export-shapes needs to know ranks: give --ranks or --placement")
    shapes = kernel_shapes(analysis.series.loads, analysis.placement, max_problems=arguments.shapes)
    document = shapes_document(shapes, analysis, hidden=arguments.hidden, intermediate=arguments.intermediate)
    if path.suffix == ".csv":
        write_text(path, shapes_csv(document))
    else:
        write_json(path, document)
    print(f"{count(len(shapes.problems), 'problem')} written to {path}", file=sys.stderr)
