"""Grouped GEMM on the measured mix of shapes beside the balanced shape of the same total.

Kernels are mostly judged on one large balanced shape. Here every measured problem (rows of each of a rank's
experts, from `moetrace load --export-shapes`, or the recorded loads in tests/data) runs as it is, and beside
it, in the same round, the balanced problem of the same total. Per problem the median over rounds of the
ratio within a round; sums are weighted by how many measured problems each stands for.

    python benchmarks/grouped_gemm.py [--shapes FILE.json] [--hidden 512] [--intermediate 256] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import write_section

from moetrace_collectors.load.expert_map import contiguous_placement
from moetrace_collectors.load.kernel_shapes import kernel_shapes

LOADS = Path(__file__).resolve().parents[1] / "tests" / "data" / "loads" / "esft_law_counts.json"


def recorded_problems(count: int) -> list[tuple[tuple[int, ...], int]]:
    """Rows of each expert and weight, of recorded loads on 8 ranks."""
    loads = np.array(json.loads(LOADS.read_text())["counts"], dtype=np.float64)
    placement = contiguous_placement(
        num_layers=loads.shape[1], num_experts=loads.shape[2], num_slots=loads.shape[2], num_ranks=8
    )
    shapes = kernel_shapes(loads, placement, max_problems=count)
    return [(problem.rows, problem.weight) for problem in shapes.problems]


def balanced(rows: tuple[int, ...]) -> tuple[int, ...]:
    """The same total on as many groups, as even as whole rows can be."""
    each, rest = divmod(sum(rows), len(rows))
    return tuple(each + (group < rest) for group in range(len(rows)))


def grouped(
    x: torch.Tensor, weights: torch.Tensor, rows: tuple[int, ...], device: torch.device, how: str
) -> Any:
    """One call: the fused kernel, or a loop of products."""
    if how == "grouped_mm":
        ends = torch.tensor(np.cumsum(rows), dtype=torch.int32, device=device)
        return lambda: torch.nn.functional.grouped_mm(x, weights, offs=ends)
    parts = list(torch.split(x, list(rows)))
    return lambda: [part @ weight for part, weight in zip(parts, weights, strict=True)]


def measure(call: Any, device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=Path, help="JSON of moetrace load --export-shapes")
    parser.add_argument("--problems", type=int, default=24, help="strata, where no file is given")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    hidden, intermediate = arguments.hidden, arguments.intermediate
    if arguments.shapes is None:
        source, problems = "recorded loads, 64 experts on 8 ranks", recorded_problems(arguments.problems)
    else:
        document = json.loads(arguments.shapes.read_text())
        source = document["source"]
        problems = [(tuple(problem["rows"]), problem["weight"]) for problem in document["problems"]]
        hidden, intermediate = document["k"] or hidden, document["n"] or intermediate
    groups = len(problems[0][0])
    weights = torch.randn(groups, hidden, intermediate, dtype=dtype, device=device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # neighbours on the machine disturb one thread least
    lines = [
        "| how | measured mix us | balanced us | measured / balanced | worst problem |",
        "|---|---|---|---|---|",
    ]
    for how in ("grouped_mm", "loop of products"):
        totals, extra, ratios, count = [0.0, 0.0], 0.0, [], 0
        for rows, weight in problems:
            x = torch.randn(sum(rows), hidden, dtype=dtype, device=device)
            calls = [grouped(x, weights, shape, device, how) for shape in (rows, balanced(rows))]
            for call in calls:
                call()  # first use builds the kernel
            times: list[list[float]] = [[], []]
            for turn in range(arguments.rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    times[which].append(measure(calls[which], device))
            medians = [statistics.median(kept) for kept in times]
            ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
            totals = [total + weight * median for total, median in zip(totals, medians, strict=True)]
            extra += weight * ratio * medians[1]
            ratios.append(ratio)
            count += weight
        lines.append(
            f"| {how} | {1e6 * totals[0] / count:.0f} | {1e6 * totals[1] / count:.0f} "
            f"| {extra / totals[1]:.3f} | {max(ratios):.2f} |"
        )
    spread = statistics.median(max(rows) * len(rows) / sum(rows) for rows, _ in problems)
    text = (
        f"`python benchmarks/grouped_gemm.py --write` on {device.type}, {arguments.dtype}, K {hidden}, "
        f"N {intermediate}, {groups} groups: {source}; {len(problems)} problems that stand for "
        f"{sum(weight for _, weight in problems)}, median max/mean of rows {spread:.2f}.\n\n"
        + "\n".join(lines)
    )
    print(text)
    if arguments.write:
        write_section("grouped_gemm", "Grouped GEMM on measured shapes", text)


if __name__ == "__main__":
    main()
