"""The run in a terminal: headline, findings, load per layer, where to look next. Fits 80 columns.

rich leaves colour out where there is no terminal or NO_COLOR is set; where the output's encoding is not
UTF-8, everything here is ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from moetrace_collectors.number_format import count, duration_text, length_text, percent, plain
from moetrace_collectors.views.findings import Finding, Summary
from moetrace_collectors.views.run_records import Accounting, LayerImbalance, LoadMatrix, RunView
from moetrace_schemas.enums import Evidence, Phase

MAX_FINDINGS = 8
MAX_PHASES = 4
"""Phases in the line of where the time goes; it stays one line."""
MAX_LAYERS = 8
"""Layers listed per forward mode: the most uneven ones."""
HEAT_CELLS = 32
"""Characters of a heat row; more experts share one, which shows the hottest of them."""
BLOCKS = "\u00b7\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = ".:-=+*%#@"
HEAT_STEP = 0.5
"""Times the mean per level of a heat character: the mean itself is level 2, four times it the highest."""
EVIDENCE_STYLES = {Evidence.CLEAR: "green", Evidence.AMBIGUOUS: "yellow", Evidence.INSUFFICIENT: "dim"}


def print_run(
    view: RunView,
    summary: Summary,
    *,
    console: Console,
    store: str,
    report: str | None,
    commands: Sequence[str] = (),
) -> None:
    """Print one run.

    Args:
        view: The run.
        summary: What its verdicts say together.
        console: Where to.
        store: Where the rows lie.
        report: Path of the HTML report, if one was written.
        commands: What to try next, one command each.
    """
    _print_title(view, summary, console)
    console.print(Text(summary.headline, style="bold"), soft_wrap=False)
    if summary.remark:
        console.print(Text(summary.remark))
    console.print()
    if summary.findings:
        console.print(_findings_table(summary.findings[:MAX_FINDINGS]))
    notes = _notes(summary)
    if notes:
        _print_notes(console, notes)
    whole = [matrix for matrix in view.expert_loads if matrix.view.cohort is None]
    for index, matrix in enumerate(whole):
        if index:
            console.print()
        _print_load(view, matrix, console)
    if whole:
        _print_notes(console, ["ranks: max/mean of rows received by ranks; hot: expert with most tokens"])
    for sentence in summary.next_steps:
        console.print(Text(f"- {sentence}"))
    lost = accounting_line(view.accounting)
    if lost:
        console.print(Text(lost, style="yellow"))
    console.print()
    # Paths and commands are for copying: no wrapping.
    for name, value in (("store", store), ("report", report)):
        if value is not None:
            console.print(Text(f"{name:7}", style="dim"), Text(plain(value)), soft_wrap=True)
    for command in commands:
        console.print(Text("next   ", style="dim"), Text(plain(command)), soft_wrap=True)


def accounting_line(accounting: Accounting) -> str:
    """What was lost, in one sentence; empty where nothing was."""
    if not accounting.anything_lost:
        return ""
    parts = [count(accounting.rank_steps, "rank step") + " stored"]
    for number, word in (
        (accounting.late, "late"),
        (accounting.events_of("duplicate"), "duplicate"),
        (accounting.events_of("rejected"), "rejected"),
    ):
        if number:
            parts.append(f"{number:,} {word}")
    missing = sorted(accounting.missing_by_rank.items(), key=lambda item: (-item[1], item[0]))
    parts += [f"rank {rank} missing from {count(steps, 'step')}" for rank, steps in missing[:3]]
    if len(missing) > 3:
        parts.append(f"{count(len(missing) - 3, 'more rank')} missing from some")
    line = f"Arrived: {', '.join(parts)}."
    # They belong to no run, or to any: not to this one's figures.
    if accounting.unattributed_rejects:
        line += f" {count(accounting.unattributed_rejects, 'rejected request')} named no run."
    return line


def time_line(phase_ns: Mapping[Phase, int]) -> str:
    """The critical path by phase in shares, longest first; empty where nothing took time."""
    total = sum(phase_ns.values())
    if not total:
        return ""
    longest = sorted(phase_ns.items(), key=lambda item: -item[1])
    shown = [(str(phase), duration) for phase, duration in longest[:MAX_PHASES]]
    shown.append(("other", total - sum(duration for _, duration in shown)))
    return "time: " + ", ".join(f"{name} {percent(part / total)}" for name, part in shown if part)


def heat_row(counts: Sequence[int | None], *, ascii_only: bool, cells: int = HEAT_CELLS) -> Text:
    """A row of characters, higher for more of the mean; a space where nothing was reported."""
    reported = [value for value in counts if value is not None]
    mean = sum(reported) / len(reported) if reported else 0.0
    marks = ASCII_BLOCKS if ascii_only else BLOCKS
    width = min(cells, len(counts))
    row = Text()
    for cell in range(width):
        group = counts[cell * len(counts) // width : (cell + 1) * len(counts) // width]
        present = [value for value in group if value is not None]
        if not present or mean == 0:
            row.append(" ")
            continue
        ratio = max(present) / mean
        level = min(len(marks) - 1, round(ratio / HEAT_STEP)) if max(present) else 0
        row.append(marks[level], style=_heat_style(ratio))
    return row


def _heat_style(ratio: float) -> str:
    if ratio >= 2:
        return "bold red"
    if ratio >= 1.25:
        return "yellow"
    return "" if ratio >= 0.8 else "blue"


def _print_title(view: RunView, summary: Summary, console: Console) -> None:
    overview = view.overview
    title = Text("moetrace ", style="bold").append(plain(overview.run_id), style="bold cyan")
    model = plain(" ".join(part for part in (overview.model_name, overview.model_version) if part))
    facts = [
        *([model] if model else []),
        f"{count(overview.world_size, 'rank')} on {count(max(1, len(overview.hosts)), 'host')}",
        "/".join(overview.forward_modes),
    ]
    console.print(title)
    console.print(Text(", ".join(facts), style="dim"))
    console.print(Text(summary.counted.sentence(), style="dim"))
    console.print()


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("rank", "right"),
        ("layer", "right"),
        ("phase", "left"),
        ("cause", "left"),
        ("worth", "right"),
        ("of steps", "right"),
        ("share", "right"),
        ("evidence", "left"),
    )
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")
    for finding in findings:
        table.add_row(
            str(finding.rank),
            "all" if finding.layer is None else str(finding.layer),
            str(finding.phase),
            str(finding.cause),
            duration_text(finding.worth_median_ns),
            percent(finding.steps_share),
            percent(finding.share_median),
            _evidence_cell(finding),
        )
    return table


def _evidence_cell(finding: Finding) -> Text:
    if not finding.clear_steps:
        return Text(f"ambiguous in {finding.steps:,}", style=EVIDENCE_STYLES[Evidence.AMBIGUOUS])
    if finding.clear_steps == finding.steps:
        return Text(f"clear in {finding.steps:,}", style=EVIDENCE_STYLES[Evidence.CLEAR])
    return Text(
        f"clear in {finding.clear_steps:,} of {finding.steps:,}", style=EVIDENCE_STYLES[Evidence.AMBIGUOUS]
    )


def _notes(summary: Summary) -> list[str]:
    if not summary.counted_steps:
        return []
    mix = ", ".join(f"{number:,} {evidence}" for evidence, number in summary.evidence.items())
    notes = [f"median step {length_text(summary.step_median_ns)}; worth and share are medians per step"]
    time = time_line(summary.phase_median_ns)
    notes += [time] if time else []
    notes.append(f"evidence over {count(summary.counted_steps, 'step')}: {mix}")
    if len(summary.findings) > MAX_FINDINGS:
        notes.append(f"{len(summary.findings) - MAX_FINDINGS:,} more findings in the report")
    return notes


def _print_load(view: RunView, matrix: LoadMatrix, console: Console) -> None:
    layers = [layer for layer in view.imbalance if layer.view == matrix.view]
    worst = sorted(layers, key=lambda layer: (-layer.max_mean_ratio, layer.layer))[:MAX_LAYERS]
    listed = sorted(worst, key=lambda layer: layer.layer)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    per_cell = -(-len(matrix.columns) // HEAT_CELLS)
    heat_name = f"experts 0 to {len(matrix.columns) - 1}"
    if per_cell > 1:
        heat_name += f", hottest of {per_cell}"
    for name in ("layer", "max/mean", "cv", "ranks", "hot"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column(heat_name, overflow="fold")
    ascii_only = not console.encoding.lower().startswith("utf")
    for layer in listed:
        counts = matrix.counts[matrix.layers.index(layer.layer)]
        table.add_row(*_load_cells(layer), heat_row(counts, ascii_only=ascii_only))
    title = f"Expert load, {plain(matrix.view.label)}"
    if len(layers) > len(listed):
        title += f": the {len(listed)} most uneven of {len(layers)} layers"
    console.print(Text(title, style="bold"))
    console.print(table)


def _load_cells(layer: LayerImbalance) -> tuple[str, ...]:
    ranks = "-" if layer.rank_max_mean_ratio is None else f"{layer.rank_max_mean_ratio:.2f}"
    return (
        str(layer.layer),
        f"{layer.max_mean_ratio:.2f}",
        f"{layer.cv:.2f}",
        ranks,
        str(layer.hot_expert),
    )


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(note, style="dim"))
    console.print()
