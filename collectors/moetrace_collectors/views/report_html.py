"""The report: one self-contained HTML page of one run. Pure; it opens offline and loads nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from moetrace_collectors.number_format import count, duration_text, length_text, percent
from moetrace_collectors.views.findings import Summary
from moetrace_collectors.views.headline import layer_name
from moetrace_collectors.views.markup import Markup, join, table, tag
from moetrace_collectors.views.report_load import load_section, traffic_section
from moetrace_collectors.views.report_steps import evidence_badge, extension_table, steps_table
from moetrace_collectors.views.report_text import accounting_section, asset, how_section
from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.step_sentence import verdict_sentence
from moetrace_collectors.views.svg_steps import frontier_bar, step_strip
from moetrace_collectors.views.svg_timeline import legend, timeline_svg
from moetrace_collectors.views.timeline import costliest_window, lay_out

# The page may run its own script and styles and load nothing at all, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def render_report(view: RunView, summary: Summary) -> str:
    """The page's text."""
    sections = [
        _section("findings", "Findings", _findings(summary)),
        _section("timeline", *_timeline(view)),
        _section("time", "Where the time goes", _time(view, summary)),
        _section("steps", "Steps", _steps(view)),
        _section("load", "Expert and rank load", load_section(view, summary)),
    ]
    traffic = traffic_section(view.traffic, summary)
    if traffic is not None:
        sections.append(_section("traffic", "Traffic from rank to rank", traffic))
    sections += [
        _section("accounting", "What arrived", accounting_section(view, summary)),
        _section("how", "How to read this page", how_section()),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"moetrace: {view.overview.run_id}"),
        tag("style", asset("palette.css"), asset("report.css")),
    )
    body = tag(
        "body",
        tag("a", "Skip to the findings", href="#findings", class_="skip"),
        _header(view, summary),
        _navigation(has_traffic=traffic is not None),
        tag("main", *sections),
        tag("div", id="tip", role="status", aria_live="polite", hidden=True),
        tag("script", asset("report.js")),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _section(identifier: str, title: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), content, id=identifier)


def _header(view: RunView, summary: Summary) -> Markup:
    overview = view.overview
    facts = [
        overview.run_id,
        " ".join(part for part in (overview.model_name, overview.model_version) if part) or "unnamed model",
        f"{count(overview.world_size, 'rank')} on {count(max(1, len(overview.hosts)), 'host')}",
        ", ".join(overview.forward_modes),
        f"1 step in {overview.sample_period} sampled" if overview.sample_period > 1 else "every step sampled",
        f"figures: {summary.counted.sentence()}",
        f"{_utc(overview.first_unix_ns)} to {_utc(overview.last_unix_ns)} UTC",
    ]
    return tag(
        "header",
        tag("p", tag("b", "moetrace"), *(tag("span", fact) for fact in facts), class_="facts"),
        tag("h1", summary.headline),
        tag("p", summary.remark, class_="remark") if summary.remark else "",
        _next_steps(summary),
        _figures(view, summary),
    )


def _navigation(*, has_traffic: bool) -> Markup:
    names = [
        ("findings", "Findings"),
        ("timeline", "Worst step"),
        ("time", "Time"),
        ("steps", "Steps"),
        ("load", "Load"),
        *([("traffic", "Traffic")] if has_traffic else []),
        ("accounting", "Accounting"),
        ("how", "How to read"),
    ]
    return tag("nav", *(tag("a", text, href=f"#{name}") for name, text in names), aria_label="Sections")


def _next_steps(summary: Summary) -> Markup:
    return tag("ul", *(tag("li", sentence) for sentence in summary.next_steps), class_="next")


def _figures(view: RunView, summary: Summary) -> Markup:
    clear = sum(count for member, count in summary.evidence.items() if member == "clear")
    durations = [
        (
            length_text(summary.step_median_ns),
            "median step",
            f"95th percentile {length_text(summary.step_p95_ns)}",
        ),
        (
            duration_text(summary.extension_median_ns),
            "median extension per step",
            f"{percent(summary.extension_median_ns / max(1, summary.step_median_ns))} of the median step",
        ),
    ]
    figures = [
        # Of no judged step there is no median.
        *(durations if summary.step_median_ns else []),
        (
            f"{clear:,} of {summary.counted_steps:,}",
            "steps with clear evidence",
            f"{count(summary.warmup_steps, 'warm-up step')} left out",
        ),
    ]
    worst = max(
        (layer for layer in view.imbalance if layer.view.cohort is None),
        key=lambda layer: layer.max_mean_ratio,
        default=None,
    )
    if worst is not None:
        figures.append(
            (
                f"{worst.max_mean_ratio:.2f}",
                "hottest expert over the mean",
                f"expert {worst.hot_expert}, {layer_name(worst.layer)}, {worst.view.label}",
            )
        )
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", note)))
            for value, name, note in figures
        ),
        class_="figures",
    )


def _findings(summary: Summary) -> Markup:
    if not summary.findings:
        return tag("p", "No step names a rank.", class_="note")
    rows = [
        (
            f"rank {finding.rank}",
            layer_name(finding.layer),
            tag("span", tag("i", class_=f"swatch p-{finding.phase}"), str(finding.phase)),
            str(finding.cause),
            duration_text(finding.worth_median_ns),
            duration_text(finding.worth_total_ns),
            f"{finding.steps:,} ({percent(finding.steps_share)})",
            percent(finding.share_median),
            f"clear {finding.clear_steps:,}, ambiguous {finding.ambiguous_steps:,}",
        )
        for finding in summary.findings[:25]
    ]
    note = (
        "Worth is what a step would give back if this rank were average in this phase; share is its part "
        "of all that uneven ranks cost the step. Warm-up steps and steps with insufficient evidence are "
        "left out."
    )
    if len(summary.findings) > 25:
        note += f" The 25 costliest of {len(summary.findings):,} are listed."
    return join(
        (
            table(
                (
                    "Rank",
                    "Layer",
                    "Phase",
                    "Cause",
                    "#Worth, median",
                    "#Worth, total",
                    "#Steps",
                    "#Share, median",
                    "Evidence",
                ),
                rows,
            ),
            tag("p", note, class_="note"),
        )
    )


def _timeline(view: RunView) -> tuple[str, Markup]:
    detail = view.detail
    row = next((step for step in view.steps if detail is not None and step.step == detail.step), None)
    if detail is None or row is None or not detail.intervals:
        return "Step across ranks", tag(
            "p", "The phase rows of this step are not in the store.", class_="note"
        )
    timeline = lay_out(detail, critical_rank=row.suspect.rank if row.suspect else None)
    window = costliest_window(timeline)
    parts = [
        tag("p", evidence_badge(row.evidence), f" {verdict_sentence(row)}", class_="verdict"),
        legend(timeline),
        _explorable(timeline_svg(timeline, identifier="whole", window=None), f"Step {row.step} across ranks"),
    ]
    if window is not None:
        parts += [
            tag("h3", "Closer: around the costliest exchange"),
            _explorable(
                timeline_svg(timeline, identifier="closer", window=window), "Around the costliest exchange"
            ),
        ]
    note = (
        "Lanes are laid so that the ends of shared exchanges meet; clocks serve this drawing only, never the "
        "verdict. A rank that waits long is early: the slow one hardly waits."
    )
    if len({barrier.ep_group for barrier in detail.barriers}) > 1:
        note += (
            " The critical path is that of one expert-parallel group, the critical rank's; groups do not "
            "wait for each other."
        )
    if timeline.hidden_ranks:
        note += (
            f" {count(timeline.hidden_ranks, 'more rank')} took part: drawn are the critical rank, its "
            "runner-up, the costliest releasers, and others spread over the rest; the critical path has "
            "gaps where it ran over the others."
        )
    return f"Step {row.step} across ranks", join((*parts, tag("p", note, class_="note")))


def _explorable(figure: Markup, name: str) -> Markup:
    return tag(
        "div",
        figure,
        class_="explore-marks scroll",
        tabindex=0,
        aria_label=f"{name}. Left and right move from mark to mark, up and down from rank to rank.",
    )


def _time(view: RunView, summary: Summary) -> Markup:
    parts = []
    if summary.phase_median_ns:
        parts += [
            tag("h3", "The critical path by phase, median over steps"),
            frontier_bar(summary.phase_median_ns),
        ]
    parts += [tag("h3", "What each rank added to the critical path"), extension_table(view.extensions)]
    return join(parts)


def _steps(view: RunView) -> Markup:
    drawn = view.detail.step if view.detail is not None else -1
    strip = step_strip(view.steps, drawn=drawn)
    caption = (
        "A bar is a step's length. Its coloured part is what the named rank cost, in the colour of the "
        "phase; hatched where the evidence is ambiguous, absent where it is insufficient. Warm-up is "
        "pale. The triangle marks the step drawn above."
    )
    return join((_explorable(strip, "Steps over time"), tag("p", caption, class_="note"), steps_table(view)))


def _utc(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
