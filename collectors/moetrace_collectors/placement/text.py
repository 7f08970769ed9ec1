"""What `moetrace replay` prints for people: planners, options, and the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moetrace_collectors.load.text import table
from moetrace_collectors.placement.alternatives import Alternative
from moetrace_collectors.placement.recommendation import Recommendation
from moetrace_collectors.placement.replay import PlannerResult, ReplayCase, folds


def render(
    case: ReplayCase,
    results: Sequence[PlannerResult],
    options: Sequence[Alternative],
    recommendation: Recommendation,
    *,
    assumptions: Sequence[str],
    warnings: Sequence[str],
) -> str:
    """All lines."""
    series, topology = case.series, case.cost.topology
    scored = len(folds(len(series.loads), case.windows))
    lines = [
        f"{series.source}: {series.name}, {int(series.steps_in_entry.sum())} steps, "
        f"{len(series.layers)} layers, {series.loads.shape[2]} experts -> {case.num_slots} "
        f"slots on {topology.num_ranks} ranks, {topology.num_nodes} nodes",
        "",
        *_planners(results),
        "all: planned and scored on everything"
        + (
            f"; in sample and held out: the same {scored} later windows, planned with hindsight and "
            "planned on what came before; by step: held out, step by step"
            if scored
            else ""
        ),
        "",
        *_options(options),
        *[f"  {option.option}: {option.note}" for option in options],
        "",
        f"Recommendation: {recommendation.sentence}",
        *[f"Assumed: {assumption}." for assumption in assumptions],
        *[f"Note: {warning}." for warning in warnings],
    ]
    return "\n".join(lines) + "\n"


def _planners(results: Sequence[PlannerResult]) -> list[str]:
    header = (
        "planner",
        "max rank",
        "all",
        "in sample",
        "held out",
        "by step",
        "step ms",
        "saves",
        "migration",
        "break-even",
    )
    rows = []
    for result in results:
        held_out, in_sample = result.held_out, result.in_sample
        rows.append(
            (
                result.planner,
                f"{result.rank_loads.max():,.0f}",
                f"{result.balancedness:.4f}",
                f"{in_sample.balancedness:.4f}" if in_sample else "-",
                f"{held_out.balancedness:.4f}" if held_out else "-",
                f"{held_out.per_step:.4f}" if held_out else "-",
                f"{held_out.step_ms if held_out else result.step_ms:.3f}",
                f"{100 * result.saved:.1f} %",
                f"{result.migration.bytes / 1e9:.1f} GB, {result.migration.seconds:.2f} s",
                _seconds(result.break_even_s),
            )
        )
    return table(header, rows)


def _options(options: Sequence[Alternative]) -> list[str]:
    header = ("option", "step ms", "saves", "memory", "migration", "break-even", "throughput")
    rows = []
    for option in options:
        rows.append(
            (
                str(option.option) + ("" if option.possible else " (no)"),
                "-" if option.step_ms is None else f"{option.step_ms:.3f}",
                "-" if option.saved is None else f"{100 * option.saved:.1f} %",
                f"{option.memory_gb:+.1f} GB" if option.memory_gb else "-",
                "-" if option.migration is None else f"{option.migration.seconds:.2f} s",
                "-" if option.migration is None else _seconds(option.break_even_s),
                "-" if option.throughput is None else f"{100 * option.throughput:.0f} %",
            )
        )
    return table(header, rows)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
