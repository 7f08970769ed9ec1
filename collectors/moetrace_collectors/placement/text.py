"""What `moetrace replay` prints for people: planners, options, and the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moetrace_collectors.load.text import table
from moetrace_collectors.number_format import count, duration_text
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
        f"{series.source}: {series.name}, {count(len(series.layers), 'layer')}, "
        f"{count(series.loads.shape[2], 'expert')} in {count(case.num_slots, 'slot')} on "
        f"{count(topology.num_ranks, 'rank')} of {count(topology.num_nodes, 'node')} "
        f"(today: {count(case.today.num_slots, 'slot')})",
        f"Figures: {series.counted.sentence()}",
        "",
        "What planners would have made of it",
        *_planners(results),
        *_legend(scored),
        "",
        "What can be done",
        *_options(options),
        *[f"  {option.option}: {option.note}" for option in options],
        "",
        f"Recommendation: {recommendation.sentence}",
        *[f"Assumed: {assumption}." for assumption in assumptions],
        *[f"Note: {warning}." for warning in warnings],
    ]
    return "\n".join(lines) + "\n"


def _legend(scored: int) -> list[str]:
    """What the columns of the planners mean; without later windows two of them are empty."""
    windows = count(scored, "later window")
    lines = [
        "  busiest        rows of the busiest rank in its busiest layer",
        "  all            balance (mean / max over ranks, 1 is even): planned on all steps, scored on them",
    ]
    if scored:
        lines += [
            f"  hindsight      balance in {windows}, planned with hindsight: what nobody can have",
            f"  held out       balance in {windows}, planned on the steps before: what it would have been",
            "  by step        held out, as the mean over single steps",
        ]
    return [
        *lines,
        f"  step, saves    time of experts and exchanges per step{', held out' if scored else ''}, and the "
        "part of a step saved",
        "  break-even     when the time lost by migrating is won back",
    ]


def _planners(results: Sequence[PlannerResult]) -> list[str]:
    header = (
        "planner",
        "busiest",
        "all",
        "hindsight",
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
                f"{result.migration.bytes / 1e9:.1f} GB, {duration_text(result.migration.seconds * 1e9)}",
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
                str(option.option) + ("" if option.possible else " (not scored)"),
                "-" if option.step_ms is None else f"{option.step_ms:.3f}",
                "-" if option.saved is None else f"{100 * option.saved:.1f} %",
                f"{option.memory_gb:+.1f} GB" if option.memory_gb else "-",
                "-" if option.migration is None else duration_text(option.migration.seconds * 1e9),
                "-" if option.migration is None else _seconds(option.break_even_s),
                "-" if option.throughput is None else f"{100 * option.throughput:.0f} %",
            )
        )
    return table(header, rows)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
