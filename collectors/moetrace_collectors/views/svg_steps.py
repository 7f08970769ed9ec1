"""Steps over time, and what a step's critical path is made of, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moetrace_collectors.number_format import duration_text, length_text, percent
from moetrace_collectors.views.headline import layer_name
from moetrace_collectors.views.markup import Markup, number, tag
from moetrace_collectors.views.run_records import StepRow
from moetrace_collectors.views.svg_timeline import nice_step
from moetrace_schemas.enums import Evidence, Phase

WIDTH = 1120.0
GUTTER = 72.0
STRIP_HEIGHT = 132.0
HEAD = 8.0
FOOT = 22.0
MAX_BARS = 560
"""More steps share a bar: the one whose suspect cost most stands for them."""
MAX_BAR_WIDTH = 40.0


def step_strip(steps: Sequence[StepRow], *, drawn: int) -> Markup:
    """One bar per step: its length, and on top of it what the named rank cost, in the colour of its phase.

    Args:
        steps: In step order.
        drawn: The step that the timeline shows; it gets a mark.
    """
    bars = list(_representatives(steps, drawn))
    longest = max((row.step_ns for row in bars), default=0)
    scale = STRIP_HEIGHT / max(1, longest)
    width = min(MAX_BAR_WIDTH, (WIDTH - GUTTER - 8) / max(1, len(bars)))
    gap = 1.0 if width > 4 else 0.0
    base = HEAD + STRIP_HEIGHT
    return tag(
        "svg",
        tag(
            "defs",
            tag(
                "pattern",
                tag("path", d="M0 0V6", class_="hatch-ink"),
                id="hatch-strip",
                width=5,
                height=6,
                patternUnits="userSpaceOnUse",
                patternTransform="rotate(45)",
            ),
        ),
        *_scale_lines(longest, scale, base),
        *(
            _bar(row, GUTTER + index * width, width - gap, base, scale, drawn=row.step == drawn)
            for index, row in enumerate(bars)
        ),
        *_step_names(bars, width, base),
        viewBox=f"0 0 {number(WIDTH)} {number(base + FOOT)}",
        class_="strip",
        role="img",
        aria_label="Steps over time",
    )


def step_text(row: StepRow) -> str:
    """What a step says when pointed at."""
    text = f"step {row.step} ({row.forward_mode}): {length_text(row.step_ns)}; evidence {row.evidence}"
    if row.suspect is not None:
        text += (
            f"; rank {row.suspect.rank} in {row.suspect.phase} ({layer_name(row.suspect.layer)}), "
            f"cause {row.cause}: {duration_text(row.suspect.worth_ns)}"
        )
    return text + ("; warm-up" if row.warmup else "")


def frontier_bar(phase_ns: Mapping[Phase, int]) -> Markup:
    """One stacked bar with its legend: the critical path by phase, as shares of their sum."""
    total = sum(phase_ns.values())
    segments = []
    x = 0.0
    for phase, duration in phase_ns.items():
        width = WIDTH * duration / total if total else 0.0
        text = f"{phase}: {duration_text(duration)}, {percent(duration / total)}"
        segments.append(
            tag("rect", tag("title", text), x=x, y=0, width=width, height=30, class_=f"p-{phase}")
        )
        label = f"{phase} {percent(duration / total)}"
        if width > 7 * len(label):
            segments.append(tag("text", label, x=x + width / 2, y=20, class_="mark-name"))
        x += width
    bar = tag(
        "svg",
        tag("g", *segments, class_="marks"),
        viewBox=f"0 0 {number(WIDTH)} 30",
        class_="frontier",
        role="img",
        aria_label="Critical path by phase",
    )
    names = [
        tag("span", tag("i", class_=f"swatch p-{phase}"), f"{phase} {duration_text(duration)}")
        for phase, duration in phase_ns.items()
    ]
    return Markup(bar + tag("p", *names, class_="legend"))


def _representatives(steps: Sequence[StepRow], drawn: int) -> Iterator[StepRow]:
    groups = min(len(steps), MAX_BARS)
    for index in range(groups):
        group = steps[index * len(steps) // groups : (index + 1) * len(steps) // groups]
        yield max(group, key=lambda row: (row.step == drawn, row.worth_ns, row.step_ns))


def _bar(row: StepRow, x: float, width: float, base: float, scale: float, *, drawn: bool) -> Markup:
    height = row.step_ns * scale
    named = row.suspect is not None and row.evidence is not Evidence.INSUFFICIENT
    worth = min(height, max(0.0, row.worth_ns * scale)) if named else 0.0
    top = base - height
    parts = [tag("rect", x=x, y=top + worth, width=width, height=height - worth, class_="bar")]
    if row.suspect is not None and worth > 0:
        parts.append(tag("rect", x=x, y=top, width=width, height=worth, class_=f"p-{row.suspect.phase}"))
        if row.evidence is Evidence.AMBIGUOUS:
            parts.append(tag("rect", x=x, y=top, width=width, height=worth, fill="url(#hatch-strip)"))
    if drawn:
        middle = x + width / 2
        parts.append(tag("path", d=f"M{number(middle)} {number(base + 2)}l4 6h-8z", class_="drawn-step"))
    return tag("g", tag("title", step_text(row)), *parts, class_="step warm-up" if row.warmup else "step")


def _scale_lines(longest: int, scale: float, base: float) -> Iterator[Markup]:
    step = nice_step(longest / 1e6, most=4)
    value = step
    while value * 1e6 * scale <= STRIP_HEIGHT:
        y = base - value * 1e6 * scale
        yield tag("path", d=f"M{number(GUTTER)} {number(y)}H{number(WIDTH - 8)}", class_="grid")
        yield tag("text", f"{value:g} ms", x=GUTTER - 8, y=y + 4, class_="row-name")
        value += step


def _step_names(bars: Sequence[StepRow], width: float, base: float) -> Iterator[Markup]:
    every = max(1, round(len(bars) / 12))
    for index in range(0, len(bars), every):
        if bars:
            x = GUTTER + (index + 0.5) * width
            yield tag("text", str(bars[index].step), x=x, y=base + 19, class_="column-name")
