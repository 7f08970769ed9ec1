"""The analysis as one self-contained HTML page, in the style of the run report. Pure; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence

from moetrace_collectors.number_format import count, duration_text, plain
from moetrace_collectors.offline.analysis import Analysis
from moetrace_collectors.offline.collectives import JoinedCollective
from moetrace_collectors.offline.load_recording import LoadRecording
from moetrace_collectors.offline.run_view import run_views
from moetrace_collectors.views.load_figures import max_mean_ratio
from moetrace_collectors.views.markup import Markup, join, table, tag
from moetrace_collectors.views.report_steps import extension_table, steps_table
from moetrace_collectors.views.report_text import asset
from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.summarise import summarise
from moetrace_collectors.views.svg_steps import step_strip
from moetrace_collectors.views.svg_timeline import legend, timeline_svg
from moetrace_collectors.views.timeline import lay_out

MAX_ROWS = 500
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def render_result(analysis: Analysis) -> str:
    """The page's text."""
    views = run_views(analysis.joined, analysis.verdicts)
    sections = [part for index, view in enumerate(views) for part in _run_sections(view, index)]
    if analysis.usage:
        sections.append(_section("time", "Device time by rank", _usage(analysis)))
    if analysis.collectives:
        sections.append(_section("collectives", "Collectives", _collectives(analysis.collectives)))
    if analysis.clocks:
        sections.append(_section("clocks", "Clocks", _clocks(analysis)))
    if analysis.loads:
        sections.append(_section("loads", "Expert load", join(_load(one) for one in analysis.loads)))
    if analysis.wait_matrices:
        sections.append(_section("waits", "Wait matrices", _waits(analysis)))
    sections.append(_section("files", "What was read", _files(analysis)))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "moetrace analyze"),
        tag("style", asset("palette.css"), asset("report.css")),
    )
    body = tag(
        "body",
        _header(analysis, views),
        tag("main", *sections),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
        tag("script", asset("report.js")),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _section(identifier: str, title: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), content, id=identifier)


def _header(analysis: Analysis, views: Sequence[RunView]) -> Markup:
    facts = [
        count(len(analysis.files), "input"),
        ", ".join(sorted({file.format for file in analysis.files})),
        count(len(analysis.ranks), "rank"),
    ]
    if views:
        headline = summarise(views[0].steps).headline
    elif analysis.usage and not analysis.recognised_phases:
        headline = "No MoE phase was recognised in these traces."
    elif analysis.usage:
        headline = "Time by phase; too little to name a rank."
    else:
        headline = "What the files hold."
    return tag(
        "header",
        tag("p", tag("b", "moetrace"), *(tag("span", fact) for fact in facts), class_="facts"),
        tag("h1", headline),
    )


def _run_sections(view: RunView, index: int) -> list[Markup]:
    name = plain(view.overview.run_id)
    parts = [tag("h3", "What each rank added to the critical path"), extension_table(view.extensions)]
    sections = []
    row = next((step for step in view.steps if view.detail and step.step == view.detail.step), None)
    if view.detail is not None and row is not None and view.detail.intervals:
        drawn = lay_out(view.detail, critical_rank=row.suspect.rank if row.suspect else None)
        figure = tag(
            "div",
            timeline_svg(drawn, identifier=f"step{index}", window=None),
            class_="explore-marks scroll",
            tabindex=0,
        )
        sections.append(
            _section(
                f"timeline{index}", f"{name}: step {row.step} across ranks", join((legend(drawn), figure))
            )
        )
    sections.append(
        _section(
            f"steps{index}",
            f"{name}: steps",
            join(
                (
                    *parts,
                    tag("h3", "Steps"),
                    step_strip(view.steps, drawn=row.step if row else -1),
                    steps_table(view),
                )
            ),
        )
    )
    return sections


def _usage(analysis: Analysis) -> Markup:
    names = list(dict.fromkeys(name for usage in analysis.usage.values() for name in usage.phases))
    rows = [
        (
            f"rank {rank}",
            duration_text(usage.busy_ns),
            duration_text(usage.idle_ns),
            duration_text(usage.exposed_communication_ns),
            *(
                f"{duration_text(usage.phases[name].duration_ns)} ({usage.phases[name].kernels:,})"
                if name in usage.phases
                else "-"
                for name in names
            ),
        )
        for rank, usage in list(analysis.usage.items())[:MAX_ROWS]
    ]
    headings = ("Rank", "#Busy", "#Idle", "#Exposed communication", *(f"#{name}" for name in names))
    note = (
        "Summed device time by phase, kernels in brackets; kernels that run at once count each for "
        "themselves. Busy is the union over all streams, exposed communication what no kernel hides."
    )
    return join((table(headings, rows), tag("p", note, class_="note")))


def _collectives(collectives: Sequence[JoinedCollective]) -> Markup:
    shown = collectives[:MAX_ROWS]
    rows = [
        (
            str(one.index),
            plain(one.kind),
            plain(one.group[0]) or "-",
            duration_text(one.transfer_ns),
            duration_text(max(one.durations_ns.values()) - one.transfer_ns),
            f"rank {one.releaser}",
        )
        for one in shown
    ]
    note = (
        "Transfer is the shortest time over ranks, wait the rest of each rank's; the rank that waited least "
        "came last and released the others."
    )
    if len(shown) < len(collectives):
        note += f" The first {len(shown):,} of {len(collectives):,} are listed."
    headings = ("#Index", "Kind", "Group", "#Transfer", "#Longest wait", "Released by")
    return join((table(headings, rows), tag("p", note, class_="note")))


def _clocks(analysis: Analysis) -> Markup:
    rows = [
        (
            f"rank {rank}",
            duration_text(fit.offset_ns),
            f"{fit.drift_ppm:.1f} ppm",
            duration_text(fit.error_ns),
            f"{fit.agreeing_pairs} of {fit.pairs}",
        )
        for rank, fit in sorted(analysis.clocks.items())
    ]
    note = (
        "Against the first rank listed, from ends of shared exchanges. For drawing only: no verdict reads it."
    )
    return join(
        (
            table(("Rank", "#Offset", "#Drift", "#Error", "#Pairs agreeing"), rows),
            tag("p", note, class_="note"),
        )
    )


def _load(recording: LoadRecording) -> Markup:
    rows = [
        (
            name,
            f"{int(counts.sum()):,}",
            f"{max_mean_ratio(counts.tolist()):.2f}",
            str(int(counts.argmax())),
            str(int((counts == 0).sum())),
        )
        for name, counts in zip(recording.layer_names, recording.totals, strict=True)
    ]
    return join(
        (
            tag("h3", f"{plain(recording.source)}: {count(len(recording.steps), 'step')}"),
            table(("Layer", "#Pairs", "#Max/mean", "#Hot expert", "#Dead experts"), rows),
        )
    )


def _waits(analysis: Analysis) -> Markup:
    rows = [
        (
            plain(finding.name),
            str(finding.size),
            ", ".join(map(str, finding.columns)) or "-",
            ", ".join(map(str, finding.rows)) or "-",
            ", ".join(f"{row} to {column}" for row, column in finding.points) or "-",
        )
        for finding in analysis.wait_matrices
    ]
    return table(("Matrix", "#Ranks", "Slow columns", "Slow rows", "Slow links"), rows)


def _files(analysis: Analysis) -> Markup:
    rows = [
        (
            plain(file.path),
            file.format,
            "-" if file.rank is None else str(file.rank),
            f"{file.events:,}",
        )
        for file in analysis.files[:MAX_ROWS]
    ]
    parts = [table(("File", "Format", "#Rank", "#Entries"), rows)]
    if analysis.warnings:
        notes = [tag("li", plain(warning)) for warning in analysis.warnings[:MAX_ROWS]]
        parts += [tag("h3", "Notes"), tag("ul", *notes)]
    return join(parts)
