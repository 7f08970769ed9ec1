"""The report's tables of steps and of what each rank added to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from moetrace_collectors.model import Suspect
from moetrace_collectors.number_format import count, duration_text, length_text, percent
from moetrace_collectors.views.markup import Markup, join, table, tag
from moetrace_collectors.views.run_records import RankPhaseExtension, RunView, StepRow
from moetrace_schemas.enums import Evidence, Phase

MAX_STEP_ROWS = 500
MAX_RANK_ROWS = 16


def evidence_badge(evidence: Evidence) -> Markup:
    """The evidence as a word with a shape, so that colour is not needed to tell."""
    return tag("span", str(evidence), class_=f"badge {evidence}")


def extension_table(extensions: Iterable[RankPhaseExtension]) -> Markup:
    """Rank x phase, ms summed over the run's steps, shaded by size."""
    cells: dict[int, dict[Phase, int]] = defaultdict(dict)
    ambiguous = 0
    for extension in extensions:
        cells[extension.rank][extension.phase] = extension.extension_ns
        ambiguous += extension.ambiguous_ns
    if not cells:
        return tag("p", "No exchange between ranks was judged.", class_="note")
    phases = [phase for phase in Phase if any(row.get(phase) for row in cells.values())]
    largest = max(max(row.values()) for row in cells.values())
    totals = {rank: sum(row.values()) for rank, row in cells.items()}
    ranked = sorted(cells, key=lambda rank: (-totals[rank], rank))
    shown = sorted(ranked[:MAX_RANK_ROWS])
    rows = [
        (
            f"rank {rank}",
            *(_shaded(cells[rank].get(phase, 0), largest) for phase in phases),
            duration_text(totals[rank]),
        )
        for rank in shown
    ]
    note = (
        "Summed over steps and exchanges: by how much the rank that everyone waited for exceeded the "
        "mean of all, under the phase of its largest excess."
    )
    if len(ranked) > len(shown):
        rest = sum(totals[rank] for rank in ranked[MAX_RANK_ROWS:])
        note += f" {count(len(ranked) - len(shown), 'more rank')} added {duration_text(rest)} together."
    if ambiguous:
        note += f" Left out: {duration_text(ambiguous)} of exchanges where waits and work disagree."
    headings = ("Rank", *(f"#{phase}" for phase in phases), "#Total")
    return join((table(headings, rows, class_="matrix"), tag("p", note, class_="note")))


def steps_table(view: RunView) -> Markup:
    """A table of steps with a filter; of a long run the costliest ones."""
    listed = list(view.steps)
    note = ""
    if len(listed) > MAX_STEP_ROWS:
        listed = sorted(listed, key=lambda row: (-row.worth_ns, -row.step_ns))[:MAX_STEP_ROWS]
        listed.sort(key=lambda row: row.step)
        note = f"The {MAX_STEP_ROWS} costliest of {len(view.steps):,} steps are listed; all are in the store."
    if view.overview.steps > len(view.steps):
        note += f" Figures are of the newest {len(view.steps):,} of {view.overview.steps:,} steps."
    one_mode = len({row.forward_mode for row in view.steps}) == 1
    headings = (
        "#Step",
        "State" if one_mode else "Mode",
        "#Length",
        "Evidence",
        "Rank",
        "Layer",
        "Phase",
        "Cause",
        "#Worth",
        "#Share",
        "Runner-up",
        "Why this evidence",
    )
    control = tag(
        "p",
        tag("label", "Filter steps", for_="step-filter"),
        tag(
            "input",
            id="step-filter",
            type="search",
            placeholder="words that a row must hold, as in: clear expert_gemm",
            autocomplete="off",
        ),
        tag("output", count(len(listed), "step"), id="step-count", for_="step-filter"),
        class_="filter script-only",
    )
    parts = [
        control,
        table(headings, (_step_cells(row, one_mode=one_mode) for row in listed), id="step-table"),
    ]
    if note:
        parts.append(tag("p", note.strip(), class_="note"))
    return join(parts)


def _step_cells(row: StepRow, *, one_mode: bool) -> tuple[str, ...]:
    suspect = row.suspect
    state = " ".join(([] if one_mode else [str(row.forward_mode)]) + (["warm-up"] if row.warmup else []))
    return (
        str(row.step),
        state,
        length_text(row.step_ns),
        evidence_badge(row.evidence),
        f"rank {suspect.rank}" if suspect else "",
        _layer(suspect),
        str(suspect.phase) if suspect else "",
        str(row.cause) if suspect else "",
        duration_text(suspect.worth_ns) if suspect else "",
        percent(suspect.share) if suspect else "",
        _runner_up(row.runner_up),
        _reason(row),
    )


def _layer(suspect: Suspect | None) -> str:
    if suspect is None:
        return ""
    return "no single" if suspect.layer is None else str(suspect.layer)


def _runner_up(suspect: Suspect | None) -> str:
    if suspect is None:
        return ""
    return f"rank {suspect.rank} {suspect.phase} {duration_text(suspect.worth_ns)}"


def _reason(row: StepRow) -> str:
    if not row.missing_ranks:
        return row.reason
    missing = ", ".join(str(rank) for rank in row.missing_ranks[:8])
    more = f" and {len(row.missing_ranks) - 8} more" if len(row.missing_ranks) > 8 else ""
    return f"{row.reason} Missing: {'rank' if len(row.missing_ranks) == 1 else 'ranks'} {missing}{more}."


def _shaded(value: int, largest: int) -> Markup:
    if value <= 0:
        return tag("span", "", class_="shade")
    strength = 6 + round(64 * value / largest)
    return tag("span", duration_text(value), class_="shade", style=f"--strength:{strength}%")
