"""Planners side by side: speed on a large model, quality on recorded loads, and gain where topology matters.

1. Speed: 61 layers x 256 experts -> 288 slots on 32 ranks, 4 nodes. With `--published FILE` (the `eplb.py` of
   deepseek-ai/EPLB, which needs torch) the published code runs in the same rounds. Medians over rounds.
2. Quality: loads recorded over 33 steps (tests/data/loads), walk-forward over halves and quarters.
3. Topology: simulated tokens with topics, 4 nodes, routes known; copies are counted from the routes.

    python benchmarks/placement.py [--rounds 5] [--published FILE] [--write]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import write_section

from moetrace_collectors.load.coactivation import count_coactivation
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.placement.case import ReplayRequest, make_case
from moetrace_collectors.placement.eplb import EplbPlanner
from moetrace_collectors.placement.planners import PLANNERS
from moetrace_collectors.placement.problem import PlanProblem
from moetrace_collectors.placement.replay import replay_planner
from moetrace_collectors.placement.step_cost import Basis, GemmTime, StepCost
from moetrace_collectors.placement.step_time_planner import StepTimePlanner, predicted_us
from moetrace_collectors.placement.topology import Topology

LAYERS, EXPERTS, SLOTS, RANKS, NODES, GROUPS = 61, 256, 288, 32, 4, 8
LOADS = Path(__file__).resolve().parents[1] / "tests" / "data" / "loads"


def large_problem(*, groups: int) -> PlanProblem:
    random = np.random.default_rng(0)
    popularity = random.lognormal(5.0, 1.0, (LAYERS, EXPERTS))
    windows = random.poisson(popularity * random.lognormal(0.0, 0.2, (16, LAYERS, EXPERTS)))
    return problem(windows.astype(np.float64), slots=SLOTS, ranks=RANKS, nodes=NODES, groups=groups, top_k=8)


def problem(
    windows: np.ndarray, *, slots: int, ranks: int, nodes: int, groups: int, top_k: int
) -> PlanProblem:
    topology = Topology(num_ranks=ranks, num_nodes=nodes)
    gemm = GemmTime(start_us=0.0, us_per_row=0.22, basis=Basis.ASSUMED)
    return PlanProblem(
        windows=windows,
        num_slots=slots,
        topology=topology,
        cost=StepCost(topology=topology, gemm=gemm, top_k=top_k),
        num_groups=groups,
    )


def published_planner(path: Path, case: PlanProblem) -> Callable[[], Any]:
    import torch

    spec = importlib.util.spec_from_file_location("published_eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loads = torch.tensor(case.loads)
    return lambda: module.rebalance_experts(loads, case.num_slots, case.num_groups, NODES, RANKS)


def speed(rounds: int, published: Path | None) -> str:
    lines = ["| policy | planner | wall ms | CPU ms | wall / own EPLB |", "|---|---|---|---|---|"]
    for groups, policy in ((GROUPS, "hierarchical"), (1, "global")):
        case = large_problem(groups=groups)
        calls: dict[str, Callable[[], Any]] = {
            "eplb (own)": lambda case=case: EplbPlanner().plan(case),
            "moetrace": lambda case=case: StepTimePlanner().plan(case),
        }
        if published is not None:
            calls["eplb (published code)"] = published_planner(published, case)
        wall: dict[str, list[float]] = {name: [] for name in calls}
        cpu: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                began, used = time.perf_counter(), time.process_time()
                call()
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
        base = statistics.median(wall["eplb (own)"])
        for name in calls:
            median = statistics.median(wall[name])
            lines.append(
                f"| {policy} | {name} | {1e3 * median:.0f} | {1e3 * statistics.median(cpu[name]):.0f} "
                f"| {median / base:.1f} |"
            )
    return "\n".join(lines)


def quality() -> str:
    counts = np.array(json.loads((LOADS / "esft_law_counts.json").read_text())["counts"], dtype=np.float64)
    series = LoadSeries(
        source="esft_law",
        forward_mode=None,
        cohort=None,
        steps=np.arange(len(counts)),
        steps_in_entry=np.ones(len(counts), dtype=np.int64),
        layers=np.arange(counts.shape[1]),
        layer_names=tuple(str(layer) for layer in range(counts.shape[1])),
        loads=counts,
        top_k=6,
    )
    lines = [
        "| slots / ranks / nodes / groups | windows | planner | all | in sample | held out "
        "| held out, by step | held-out step time / EPLB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for slots, ranks, nodes, groups in ((64, 8, 1, 1), (72, 8, 1, 1), (80, 16, 2, 8), (80, 16, 2, 1)):
        for windows in (2, 4):
            request = ReplayRequest(
                num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups, windows=windows
            )
            case, _, _ = make_case(series, request)
            results = [replay_planner(case, planner) for planner in PLANNERS]
            base = next(r.held_out.step_ms for r in results if r.planner == "eplb" and r.held_out)
            for result in results:
                held_out, in_sample = result.held_out, result.in_sample
                assert held_out is not None
                assert in_sample is not None
                lines.append(
                    f"| {slots} / {ranks} / {nodes} / {groups} | {windows} | {result.planner} "
                    f"| {result.balancedness:.4f} | {in_sample.balancedness:.4f} "
                    f"| {held_out.balancedness:.4f} | {held_out.per_step:.4f} "
                    f"| {held_out.step_ms / base:.3f} |"
                )
    return "\n".join(lines)


def topical_routes(
    *, tokens: int, layers: int, experts: int, top_k: int, topics: int, pull: float
) -> np.ndarray:
    """A token's topic raises the score of the topic's experts by `pull`; popularity is log-normal."""
    random = np.random.default_rng(7)
    routes = np.empty((tokens, layers, top_k), dtype=np.int64)
    for layer in range(layers):
        topic_of = random.permutation(experts) % topics
        topic = random.integers(0, topics, tokens)
        score = random.gumbel(size=(tokens, experts)) + random.normal(0.0, 0.6, experts)
        score += pull * (topic_of == topic[:, None])
        routes[:, layer] = np.argpartition(-score, top_k, axis=1)[:, :top_k]
    return routes


def topology() -> str:
    lines = [
        "| experts -> slots on ranks, nodes | topics pull | network copies per token: EPLB | moetrace "
        "| fullest rank / EPLB | step time / EPLB |",
        "|---|---|---|---|---|---|",
    ]
    layers, experts, slots, ranks, nodes, top_k = 8, 64, 80, 16, 4, 6
    for pull in (0.0, 1.0, 2.0, 4.0):
        # Planned on the first half of the tokens, copies and times are of the second.
        routes = topical_routes(
            tokens=32_768, layers=layers, experts=experts, top_k=top_k, topics=8, pull=pull
        )
        halves = np.array_split(routes, 2)
        past, future = (
            np.stack(
                [
                    np.stack([np.bincount(part[:, at].ravel(), minlength=experts) for at in range(layers)])
                    for part in np.array_split(half, 16)
                ]
            ).astype(np.float64)
            for half in halves
        )
        cases = [
            problem(loads, slots=slots, ranks=ranks, nodes=nodes, groups=1, top_k=top_k)
            for loads in (past, future)
        ]
        pairs = [count_coactivation(half, num_experts=experts) for half in halves]
        known, unseen = (
            PlanProblem(
                windows=case.windows,
                num_slots=slots,
                topology=case.topology,
                cost=case.cost,
                coactivation=pair,
            )
            for case, pair in zip(cases, pairs, strict=True)
        )
        plans = [planner.plan(known) for planner in (EplbPlanner(), StepTimePlanner())]
        copies, fullest, times = [], [], []
        for plan in plans:
            share = plan.share.reshape(layers, experts, nodes, -1).sum(axis=3)
            reached = sum(
                (1.0 - np.prod(1.0 - share[at][halves[1][:, at]], axis=1)).sum() for at in range(layers)
            )
            copies.append(reached / (len(halves[1]) * layers))
            fullest.append(plan.rank_loads(unseen.loads).max(axis=1).sum())
            times.append(predicted_us(unseen, plan).sum())
        lines.append(
            f"| {experts} -> {slots} on {ranks}, {nodes} | {pull:g} | {copies[0]:.2f} | {copies[1]:.2f} "
            f"| {fullest[1] / fullest[0]:.3f} | {times[1] / times[0]:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--published", type=Path, help="eplb.py of deepseek-ai/EPLB")
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    arguments = parser.parse_args()
    text = (
        f"`python benchmarks/placement.py --rounds {arguments.rounds}"
        f"{' --published eplb.py' if arguments.published else ''} --write`\n\n"
        f"Planning {LAYERS} layers x {EXPERTS} experts -> {SLOTS} slots on {RANKS} ranks, {NODES} nodes:\n\n"
        f"{speed(arguments.rounds, arguments.published)}\n\n"
        "Recorded loads (26 layers, 64 experts, 33 steps). `all`: planned and scored on everything; "
        "`in sample` and `held out`: the same later windows, planned with hindsight and planned on what came "
        "before (balancedness_sum):\n\n"
        f"{quality()}\n\n"
        "Topology and co-activation (simulated tokens, one copy per node, planned on one half of the tokens "
        "and scored on the other; times assumed: 0.22 us per row, 7168-byte rows, 450 and 50 GB/s):\n\n"
        f"{topology()}"
    )
    print(text)
    if arguments.write:
        write_section("placement", "Placement planners", text)


if __name__ == "__main__":
    main()
