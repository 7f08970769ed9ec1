"""The analysis in a terminal: what was read, where time went, who released whom, what is doubtful."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moetrace_collectors.number_format import count, duration_text, plain
from moetrace_collectors.offline.analysis import Analysis
from moetrace_collectors.offline.collectives import JoinedCollective
from moetrace_collectors.offline.run_view import run_views
from moetrace_collectors.views.load_figures import max_mean_ratio
from moetrace_collectors.views.summarise import summarise
from moetrace_collectors.views.terminal import print_run

MAX_RANKS = 16
MAX_COLLECTIVES = 12
MAX_LAYERS = 8
MAX_WARNINGS = 20
_TEXT_COLUMNS = ("phase", "kind", "released by")


def print_analysis(analysis: Analysis, *, console: Console, outputs: Sequence[tuple[str, str]] = ()) -> None:
    """Print it.

    Args:
        analysis: The result.
        console: Where to.
        outputs: Kind and path of files that were written.
    """
    formats = sorted({file.format for file in analysis.files})
    console.print(
        Text("moetrace ", style="bold").append(
            f"{count(len(analysis.files), 'input')} ({', '.join(formats)}), "
            f"{count(len(analysis.ranks), 'rank')}",
            style="dim",
        )
    )
    console.print()
    if analysis.usage:
        _print_usage(analysis, console)
    if analysis.collectives:
        _print_collectives(analysis.collectives, console)
    if analysis.clocks:
        _print_clocks(analysis, console)
    for view in run_views(analysis.joined, analysis.verdicts):
        print_run(view, summarise(view.steps), console=console, store="(files)", report=None)
    for recording in analysis.loads:
        _print_load(analysis, recording.source, console)
    for finding in analysis.wait_matrices:
        slow = [
            *(f"column {column} (all wait for it)" for column in finding.columns),
            *(f"row {row} (slow to receive)" for row in finding.rows),
            *(f"link from {row} to {column}" for row, column in finding.points),
        ]
        console.print(
            Text(f"{plain(finding.name)}, {finding.size} x {finding.size}: ", style="bold").append(
                "slow: " + ", ".join(slow) if slow else "nothing stands out", style=""
            )
        )
    for warning in analysis.warnings[:MAX_WARNINGS]:
        console.print(Text(f"note: {plain(warning)}", style="yellow"))
    if len(analysis.warnings) > MAX_WARNINGS:
        console.print(Text(f"and {len(analysis.warnings) - MAX_WARNINGS} more notes (--json)", style="dim"))
    for kind, path in outputs:
        console.print(Text(f"{kind:9}", style="dim"), Text(plain(path)), soft_wrap=True)


def _print_usage(analysis: Analysis, console: Console) -> None:
    table = _table("rank", "busy", "idle", "exposed communication", "MoE layers")
    for rank, usage in list(analysis.usage.items())[:MAX_RANKS]:
        table.add_row(
            str(rank),
            duration_text(usage.busy_ns),
            duration_text(usage.idle_ns),
            duration_text(usage.exposed_communication_ns),
            str(usage.moe_layers) if usage.moe_layers else "-",
        )
    console.print(table)
    if len(analysis.usage) > MAX_RANKS:
        console.print(Text(f"{len(analysis.usage) - MAX_RANKS} more ranks (--json, --html)", style="dim"))
    console.print()
    names = list(dict.fromkeys(name for usage in analysis.usage.values() for name in usage.phases))
    if not names:
        return
    several = len(analysis.usage) > 1
    spread = ("least", "mean per rank", "most") if several else ("time",)
    table = _table("phase", "kernels", *spread)
    for name in names:
        times = {
            rank: usage.phases[name].duration_ns if name in usage.phases else 0
            for rank, usage in analysis.usage.items()
        }
        kernels = sum(usage.phases[name].kernels for usage in analysis.usage.values() if name in usage.phases)
        least, most = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
        mean = duration_text(sum(times.values()) / len(times))
        cells = (_at_rank(times[least], least), mean, _at_rank(times[most], most)) if several else (mean,)
        table.add_row(name, f"{kernels:,}", *cells)
    console.print(table)
    console.print()


def _at_rank(duration_ns: int, rank: int) -> str:
    return f"{duration_text(duration_ns)} (rank {rank})"


def _print_collectives(collectives: Sequence[JoinedCollective], console: Console) -> None:
    costly = sorted(collectives, key=lambda one: (-_longest_wait(one), one.index))[:MAX_COLLECTIVES]
    table = _table("collective", "kind", "transfer", "longest wait", "released by")
    for one in sorted(costly, key=lambda one: one.index):
        table.add_row(
            str(one.index),
            plain(one.kind),
            duration_text(one.transfer_ns),
            duration_text(_longest_wait(one)),
            f"rank {one.releaser}",
        )
    console.print(table)
    if len(collectives) > len(costly):
        console.print(
            Text(f"the {len(costly)} with the longest waits of {len(collectives):,} collectives", style="dim")
        )
    console.print()


def _longest_wait(one: JoinedCollective) -> int:
    return max(one.durations_ns.values()) - one.transfer_ns


def _print_clocks(analysis: Analysis, console: Console) -> None:
    table = _table("rank", "clock offset", "drift", "error")
    for rank, fit in sorted(analysis.clocks.items())[:MAX_RANKS]:
        table.add_row(
            str(rank), duration_text(fit.offset_ns), f"{fit.drift_ppm:.1f} ppm", duration_text(fit.error_ns)
        )
    console.print(table)
    console.print()


def _print_load(analysis: Analysis, source: str, console: Console) -> None:
    recording = next(one for one in analysis.loads if one.source == source)
    console.print(
        Text(plain(recording.source), style="bold").append(
            f"  {count(len(recording.steps), 'step')}, {count(recording.num_experts, 'expert')}", style="dim"
        )
    )
    table = _table("layer", "pairs", "max/mean", "hot expert", "dead")
    totals = recording.totals
    order = sorted(range(len(totals)), key=lambda i: (-max_mean_ratio(totals[i].tolist()), i))[:MAX_LAYERS]
    for index in sorted(order):
        counts = totals[index]
        table.add_row(
            recording.layer_names[index],
            f"{int(counts.sum()):,}",
            f"{max_mean_ratio(counts.tolist()):.2f}",
            str(int(counts.argmax())),
            str(int((counts == 0).sum())),
        )
    console.print(table)
    if len(totals) > MAX_LAYERS:
        console.print(
            Text(
                f"{MAX_LAYERS} of {len(totals)} layers shown, the most uneven; --json has all",
                style="dim",
            ),
            soft_wrap=True,
        )
    console.print()


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", overflow="fold")
    return table
