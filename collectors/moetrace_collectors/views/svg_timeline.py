"""A timeline as SVG: a lane per rank, a colour per phase, waits hatched, the critical path drawn on it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moetrace_collectors.number_format import count, duration_text
from moetrace_collectors.views.headline import layer_name
from moetrace_collectors.views.markup import Markup, number, tag
from moetrace_collectors.views.timeline import CriticalStretch, Lane, Mark, MarkKind, Timeline
from moetrace_schemas.enums import Direction, Phase

WIDTH = 1120.0
GUTTER = 72.0
"""Left of the lanes: the rank's name."""
AXIS_HEIGHT = 26.0
LANE_HEIGHT = 24.0
SIDE_HEIGHT = 6.0
"""Under a lane: work on other streams."""
LANE_PITCH = 40.0
MIN_WIDTH = 0.35
"""Pixels; what is narrower is drawn this wide, so that nothing vanishes."""
MERGE_WIDTH = 0.2
"""Pixels; marks of one phase and kind that are narrower are merged with the one before."""
LABEL_PIXELS_PER_LETTER = 6.6
DENSE_PATH = 40
"""Stretches of the critical path beyond which its crossings are drawn faint, so that lanes stay visible."""


def timeline_svg(timeline: Timeline, *, identifier: str, window: tuple[int, int] | None = None) -> Markup:
    """The whole step, or the part of it between two times in ns.

    Args:
        timeline: The step.
        identifier: Unique in the page; names the hatch pattern.
        window: Start and end of the part to draw.
    """
    start, end = window or (0, timeline.end_ns)
    scale = (WIDTH - GUTTER - 8) / max(1, end - start)
    height = AXIS_HEIGHT + LANE_PITCH * len(timeline.lanes) + 4
    top_of = {lane.rank: AXIS_HEIGHT + LANE_PITCH * index for index, lane in enumerate(timeline.lanes)}
    critical_ranks = {stretch.rank for stretch in timeline.critical}
    canvas = _Canvas(start=start, end=end, scale=scale, identifier=identifier)
    return tag(
        "svg",
        _hatch(identifier),
        *_axis(canvas, height),
        *(
            part
            for lane in timeline.lanes
            for part in _lane(canvas, lane, top_of[lane.rank], lane.rank in critical_ranks)
        ),
        *_critical_path(
            canvas,
            [item for item in timeline.critical if canvas.shows(item.start_ns, item.end_ns)],
            top_of,
        ),
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        class_="timeline",
        role="img",
        aria_label=f"Step {timeline.step} across ranks",
    )


class _Canvas:
    """Time to pixels, for one window."""

    def __init__(self, *, start: int, end: int, scale: float, identifier: str) -> None:
        self.start = start
        self.end = end
        self.scale = scale
        self.hatch = f"url(#hatch-{identifier})"

    def x(self, time_ns: int) -> float:
        return GUTTER + (min(max(time_ns, self.start), self.end) - self.start) * self.scale

    def shows(self, start_ns: int, end_ns: int) -> bool:
        # Clocks are aligned to a few microseconds only: what sticks into the window by less is not in it.
        margin = min(end_ns - start_ns, round(0.5 / self.scale))
        return end_ns - margin >= self.start and start_ns + margin <= self.end


def _hatch(identifier: str) -> Markup:
    return tag(
        "defs",
        tag(
            "pattern",
            tag("rect", width=6, height=6, class_="hatch-ground"),
            tag("path", d="M0 0V6", class_="hatch-line"),
            id=f"hatch-{identifier}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        ),
    )


def _axis(canvas: _Canvas, height: float) -> Iterator[Markup]:
    step = nice_step((canvas.end - canvas.start) / 1e6, most=9)
    decimals = max(0, -math.floor(math.log10(step))) if step < 1 else 0
    index = math.ceil(canvas.start / 1e6 / step)
    while index * step * 1e6 <= canvas.end:
        x = canvas.x(round(index * step * 1e6))
        yield tag("path", d=f"M{number(x)} {number(AXIS_HEIGHT - 6)}V{number(height)}", class_="grid")
        if x < WIDTH - 52:
            yield tag("text", f"{index * step:,.{decimals}f} ms", x=x + 3, y=14, class_="tick")
        index += 1


def nice_step(span: float, *, most: int) -> float:
    """The smallest of 1, 2, 5 x 10^n that divides a span into at most `most` parts."""
    if span <= 0:
        return 1.0
    magnitude: float = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude * most >= span)


def _lane(canvas: _Canvas, lane: Lane, top: float, critical: bool) -> Iterator[Markup]:
    yield tag(
        "text",
        f"rank {lane.rank}",
        x=GUTTER - 10,
        y=top + LANE_HEIGHT / 2 + 4,
        class_="lane-name critical" if critical else "lane-name",
    )
    yield tag("rect", x=GUTTER, y=top, width=WIDTH - GUTTER - 8, height=LANE_HEIGHT, class_="lane")
    if not lane.marks:
        yield tag("text", "no phase rows in the store", x=GUTTER + 8, y=top + 16, class_="tick")
    drawn = [mark for mark in lane.marks if canvas.shows(mark.start_ns, mark.start_ns + mark.duration_ns)]
    yield tag("g", *(_mark(canvas, mark, top) for mark in _merged(canvas, drawn)), class_="marks")


def _merged(canvas: _Canvas, marks: list[Mark]) -> Iterator[Mark]:
    """Leave out marks too narrow to see next to a like one."""
    last: Mark | None = None
    for mark in marks:
        narrow = mark.duration_ns * canvas.scale < MERGE_WIDTH
        if narrow and last is not None and last.phase == mark.phase and last.kind == mark.kind:
            continue
        last = mark
        yield mark


def _mark(canvas: _Canvas, mark: Mark, top: float) -> Markup:
    x = canvas.x(mark.start_ns)
    width = max(MIN_WIDTH, canvas.x(mark.start_ns + mark.duration_ns) - x)
    y, height = (top + LANE_HEIGHT + 1, SIDE_HEIGHT) if mark.side_stream else (top, LANE_HEIGHT)
    waits = mark.kind is MarkKind.WAIT
    rect = tag(
        "rect",
        tag("title", mark_text(mark)),
        x=x,
        y=y,
        width=width,
        height=height,
        class_="wait" if waits else f"p-{mark.phase}" + (" error" if mark.error else ""),
        fill=canvas.hatch if waits else None,
    )
    label = "wait" if waits else str(mark.phase)
    if mark.side_stream or width < LABEL_PIXELS_PER_LETTER * len(label) + 8:
        return rect
    text = tag(
        "text", label, x=x + width / 2, y=y + 16, class_="mark-name wait-name" if waits else "mark-name"
    )
    return Markup(rect + text)


def mark_text(mark: Mark) -> str:
    """What a mark says when pointed at."""
    what = {
        MarkKind.WORK: str(mark.phase),
        MarkKind.WAIT: f"{mark.phase}: wait for the others",
        MarkKind.TRANSFER: f"{mark.phase}: transfer",
    }[mark.kind]
    where = layer_name(mark.layer)
    if mark.direction is Direction.BACKWARD:
        where += ", backward"
    if mark.microbatch:
        where += f", microbatch {mark.microbatch}"
    text = f"{what}, {where}: {duration_text(mark.duration_ns)}"
    if mark.rows >= 0 and mark.kind is not MarkKind.WAIT:
        text += f", {count(mark.rows, 'row')}"
    return text + (" (the model raised here)" if mark.error else "")


def _critical_path(
    canvas: _Canvas, stretches: list[CriticalStretch], top_of: dict[int, float]
) -> Iterator[Markup]:
    """Along the lower edge of the lane that everyone waited for, and from lane to lane where it changes."""
    previous: tuple[int, float, float] | None = None
    crossing = "critical-path step-over" + (" dense" if len(stretches) > DENSE_PATH else "")
    for stretch in stretches:
        if stretch.rank not in top_of:
            continue
        y = top_of[stretch.rank] + LANE_HEIGHT + 3
        start, end = canvas.x(stretch.start_ns), canvas.x(stretch.end_ns)
        class_name = "critical-path" if stretch.certain else "critical-path doubtful"
        if previous is not None and previous[0] == stretch.barrier - 1 and previous[2] != y:
            step_over = f"M{number(previous[1])} {number(previous[2])}L{number(start)} {number(y)}"
            yield tag("path", d=step_over, class_=crossing)
        line = f"M{number(start)} {number(y)}H{number(end)}"
        yield tag("path", tag("title", _stretch_text(stretch)), d=line, class_=class_name)
        previous = (stretch.barrier, end, y)


def _stretch_text(stretch: CriticalStretch) -> str:
    where = (
        f"before the exchange in {layer_name(stretch.layer)}" if stretch.layer >= 0 else "at the step's end"
    )
    over = f"{duration_text(stretch.extension_ns)} over the mean of the ranks"
    doubt = "" if stretch.certain else " (ambiguous)"
    return f"critical: rank {stretch.rank}, most of all in {stretch.phase}, {where}: {over}{doubt}"


def legend(timeline: Timeline) -> Markup:
    """Names of the colours that the timeline uses."""
    used = {mark.phase for lane in timeline.lanes for mark in lane.marks}
    items = [_swatch(f"p-{phase}", str(phase)) for phase in Phase if phase in used]
    return tag(
        "p",
        *items,
        _swatch("swatch-wait", "wait inside an exchange"),
        _swatch("swatch-critical", "critical path (dashed: ambiguous)"),
        class_="legend",
    )


def _swatch(class_name: str, text: str) -> Markup:
    return tag("span", tag("i", class_=f"swatch {class_name}"), text)
