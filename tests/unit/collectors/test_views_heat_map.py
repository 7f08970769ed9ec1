"""A heat map's colours can be read back, and what was not reported looks missing."""

from __future__ import annotations

import json
import re

from moetrace_collectors.views.svg_heat_map import EXPERT_EDGES, HeatMap, heat_legend, heat_map

FIGURE = HeatMap(
    identifier="h",
    title="Tokens",
    row_name="layer",
    rows=(0, 3),
    column_name="expert",
    columns=(0, 1, 2, 3),
    values=((10, 10, 10, 70), (0, None, 20, 40)),
    means=(25.0, 20.0),
    unit="pairs",
)


def cells(figure: str) -> dict[str, set[tuple[int, int]]]:
    """(row, column) by bin."""
    return {
        name: {(int(y), int(x)) for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", path)}
        for path, name in re.findall(r'<path d="((?:M\d+ \d+h1v1h-1z)+)" class="([^"]+)"', figure)
    }


def test_cells_fall_into_bins_of_their_ratio_to_the_mean() -> None:
    """0.4, 1.0, 2.0 and 2.8 times the mean have their own colours; zero is told from little."""
    assert cells(heat_map(FIGURE)) == {
        "h1": {(0, 0), (0, 1), (0, 2)},
        "h5": {(0, 3), (1, 3)},
        "h-dead": {(1, 0)},
        "h3": {(1, 2)},
    }


def test_unreported_cell_stays_empty() -> None:
    """Missing data looks missing, not zero."""
    drawn = set().union(*cells(heat_map(FIGURE)).values())
    assert (1, 1) not in drawn


def test_pointer_reads_the_exact_counts() -> None:
    """The page carries the counts behind the colours, null where nothing was reported."""
    body = re.search(r'id="h-data">(.*?)</script>', heat_map(FIGURE))
    assert body is not None
    data = json.loads(body[1])
    assert data["values"] == [[10, 10, 10, 70], [0, None, 20, 40]]
    assert data["rows"] == [0, 3]
    assert data["means"] == [25.0, 20.0]


def test_legend_names_every_bin() -> None:
    """One name per colour, with its bounds."""
    legend = heat_legend(EXPERT_EDGES, mean="the mean", with_dead=True)
    assert legend.count("swatch") == len(EXPERT_EDGES) + 2
    assert "0.8 to 1.25" in legend
