"""A heat map of ratios to a mean as SVG: cells in a few bins, so that a colour can be read off the legend.

Cells of one bin are one path, which keeps 61 layers x 256 experts at a few hundred kilobytes, and needs
no script to show. Values for the pointer travel beside it as JSON.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moetrace_collectors.views.markup import Markup, data_block, number, tag

WIDTH = 1120.0
GUTTER = 84.0
HEAD = 26.0
LABEL_PITCH = 30.0
"""Column numbers are at least this far apart."""
MAX_CELL_WIDTH = 64.0
LABEL_CELL_WIDTH = 28.0
"""Cells at least this wide carry their ratio as text."""

EXPERT_EDGES = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Bins of a ratio to the layer's mean, for experts: the middle bin is close to even."""
RANK_EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""The same for ranks, whose loads are sums over experts and lie closer together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """What to draw."""

    identifier: str
    """Unique in the page."""
    title: str
    row_name: str
    """As in `layer`."""
    rows: Sequence[int]
    column_name: str
    columns: Sequence[int]
    values: Sequence[Sequence[int | None]]
    """None = not reported: the cell stays empty."""
    means: Sequence[float]
    """What each row's values are compared with."""
    unit: str
    """Of the values, as in `pairs`."""
    edges: tuple[float, ...] = EXPERT_EDGES


def heat_map(figure: HeatMap) -> Markup:
    """The figure and the values for its tooltips."""
    columns = max(1, len(figure.columns))
    width = min(MAX_CELL_WIDTH, (WIDTH - GUTTER - 4) / columns)
    height = 24.0 if len(figure.rows) <= 16 else 16.0 if len(figure.rows) <= 32 else 11.0
    total_height = HEAD + height * len(figure.rows) + 4
    used_width = GUTTER + width * columns + 4
    geometry = {"gutter": GUTTER, "head": HEAD, "width": width, "height": height}
    svg = tag(
        "svg",
        *_labels(figure, width, height),
        tag(
            "g",
            *_bins(figure),
            transform=f"translate({number(GUTTER)} {number(HEAD)}) scale({width:.5f} {number(height)})",
        ),
        *(_texts(figure, width, height) if width >= LABEL_CELL_WIDTH and height >= 16 else ()),
        tag("rect", class_="cursor", x=0, y=0, width=width, height=height, visibility="hidden"),
        viewBox=f"0 0 {number(used_width)} {number(total_height)}",
        style=f"max-width:{number(used_width)}px",
        class_="heat",
        role="img",
        aria_label=figure.title,
    )
    data = {
        **geometry,
        "box": [used_width, total_height],
        "rowName": figure.row_name,
        "rows": list(figure.rows),
        "columnName": figure.column_name,
        "columns": list(figure.columns),
        "values": [list(row) for row in figure.values],
        "means": [round(mean, 3) for mean in figure.means],
        "unit": figure.unit,
    }
    return tag(
        "div",
        svg,
        data_block(f"{figure.identifier}-data", data),
        class_="explore-heat",
        id=figure.identifier,
        tabindex=0,
        aria_label=f"{figure.title}. Arrow keys move from cell to cell.",
    )


def heat_legend(edges: tuple[float, ...], *, mean: str, with_dead: bool) -> Markup:
    """Names of the bins, coldest first."""
    names = [f"below {edges[0]:g}"]
    names += [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    names.append(f"{edges[-1]:g} and more")
    items = [tag("span", tag("i", class_=f"swatch h{index}"), name) for index, name in enumerate(names)]
    if with_dead:
        items.insert(0, tag("span", tag("i", class_="swatch h-dead"), "none at all"))
    return tag("p", tag("span", f"times {mean}:"), *items, class_="legend")


def _bins(figure: HeatMap) -> Iterator[Markup]:
    cells: dict[str, list[str]] = defaultdict(list)
    for y, (row, mean) in enumerate(zip(figure.values, figure.means, strict=True)):
        for x, value in enumerate(row):
            if value is not None:
                cells[_bin(value, mean, figure.edges)].append(f"M{x} {y}h1v1h-1z")
    for name in sorted(cells):
        yield tag("path", d="".join(cells[name]), class_=name)


def _bin(value: int, mean: float, edges: tuple[float, ...]) -> str:
    if value == 0:
        return "h-dead"
    return f"h{bisect_right(edges, value / mean)}" if mean > 0 else "h-dead"


def _texts(figure: HeatMap, width: float, height: float) -> Iterator[Markup]:
    for y, (row, mean) in enumerate(zip(figure.values, figure.means, strict=True)):
        for x, value in enumerate(row):
            if value is not None and mean > 0:
                yield tag(
                    "text",
                    f"{value / mean:.2f}",
                    x=GUTTER + (x + 0.5) * width,
                    y=HEAD + (y + 0.5) * height + 4,
                    class_=f"cell {_bin(value, mean, figure.edges)}-text",
                )


def _labels(figure: HeatMap, width: float, height: float) -> Iterator[Markup]:
    every_row = math.ceil(14 / height)
    for index, row in enumerate(figure.rows):
        if index % every_row == 0:
            yield tag(
                "text",
                f"{figure.row_name} {row}",
                x=GUTTER - 8,
                y=HEAD + (index + 0.5) * height + 4,
                class_="row-name",
            )
    yield tag("text", figure.column_name, x=GUTTER - 8, y=HEAD - 9, class_="row-name axis-name")
    every_column = max(1, math.ceil(LABEL_PITCH / width))
    for index, column in enumerate(figure.columns):
        if index % every_column == 0:
            x = GUTTER + (index + 0.5) * width
            yield tag("text", str(column), x=x, y=HEAD - 9, class_="column-name")
