"""The page's script in a real browser: figures answer the keyboard, filter and switch do as told."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moetrace_collectors.views.report_html import render_report
from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.summarise import summarise
from run_view_builders import large_view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

# Runs in the page after its own script, and leaves what it saw as the document's only text.
PROBE = """<script>
addEventListener("load", () => {
  const seen = {};
  const tip = document.getElementById("tip");
  const press = (element, ...keys) => {
    for (const key of keys) {
      element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    }
    return tip.textContent;
  };
  const point = (element, x, y) => {
    const box = element.getBoundingClientRect();
    const place = { clientX: box.left + box.width * x, clientY: box.top + box.height * y };
    element.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, ...place }));
    return tip.textContent;
  };
  const timeline = document.querySelector("#timeline .explore-marks");
  seen.firstMark = press(timeline, "ArrowRight");
  seen.otherRank = press(timeline, "ArrowRight", "ArrowDown");
  seen.corner = press(document.getElementById("experts-0"), "ArrowRight", "ArrowDown", "ArrowRight");
  seen.step = press(document.querySelector("#steps .explore-marks"), "ArrowRight");
  document.querySelectorAll("input[name=load-view]")[2].click();
  seen.hidden = [...document.querySelectorAll(".load-view")].map((view) => view.hidden);
  const map = document.querySelector("#ranks-2 svg");
  seen.pointed = point(map, 0.95, 0.95);
  const filter = document.getElementById("step-filter");
  filter.value = "Rank 2 NOTHING";
  filter.dispatchEvent(new Event("input"));
  seen.none = document.getElementById("step-count").textContent;
  filter.value = "rank 2";
  filter.dispatchEvent(new Event("input"));
  seen.all = document.getElementById("step-count").textContent;
  document.body.textContent = JSON.stringify(seen);
});
</script></body>"""


@pytest.fixture(scope="module")
def view() -> RunView:
    """Four ranks, three layers, eight experts, twelve steps that name rank 2; two modes, two cohorts."""
    return large_view(ranks=4, layers=3, experts=8, steps=12)


@pytest.fixture(scope="module")
def seen(view: RunView, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe saw."""
    folder = tmp_path_factory.mktemp("page")
    page = render_report(view, summarise(view.steps))
    file = folder / "report.html"
    file.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    return json.loads(_body_text(file, folder))  # type: ignore[no-any-return]


def _body_text(file: Path, folder: Path) -> str:
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder}/profile",
    ]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return html.unescape(done.stdout.partition("<body>")[2].partition("</body>")[0])


def test_timeline_reads_out_marks_lane_by_lane(seen: dict[str, Any]) -> None:
    """Right goes to the next mark, down to the rank below at the same time."""
    assert seen["firstMark"] == "rank 0, outside, layer 0: 0.50 ms"
    assert seen["otherRank"] == "rank 1, router, layer 0: 50.0 us"


def test_heat_map_reads_out_cells(view: RunView, seen: dict[str, Any]) -> None:
    """Arrow keys reach a cell, whose count and ratio are those of the store."""
    row = [count or 0 for count in view.expert_loads[0].counts[1]]
    ratio = row[1] * len(row) / sum(row)
    assert seen["corner"] == f"layer 1, expert 1: {row[1]:,} (token, slot) pairs, {ratio:.2f} x mean"


def test_steps_read_out_their_verdict(seen: dict[str, Any]) -> None:
    """A step says its length, its evidence and who extended it."""
    assert seen["step"].startswith("step 0 (prefill): 100 ms; evidence clear; rank 2 in expert_gemm")


def test_switch_shows_one_mode_and_cohort(seen: dict[str, Any]) -> None:
    """Of six combinations of mode and cohort only the chosen one is shown."""
    assert seen["hidden"] == [index != 2 for index in range(6)]


def test_pointer_reads_the_cell_under_it(view: RunView, seen: dict[str, Any]) -> None:
    """Near the lower right corner lies the last layer and the last rank."""
    last = view.rank_loads[2].counts[-1][-1]
    assert seen["pointed"].startswith(f"layer 2, rank 3: {last:,} rows, ")


def test_filter_counts_what_it_shows(seen: dict[str, Any]) -> None:
    """All words must be in a row, in any case of letters."""
    assert (seen["none"], seen["all"]) == ("0 of 12 steps", "12 of 12 steps")
