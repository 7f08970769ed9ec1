"""The collector's page as people use it: figures equal the store, links hold the state, keys do all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from integration.collector_process import CollectorProcess, collector
from moetrace_collectors.testing import SyntheticRun, request
from page_store import VIOLATIONS, late_rank, slow_layer, slow_rank

from .conftest import EXPERTS, LAYERS, RANKS, STEPS, picture

Sql = Callable[[str], list[dict[str, Any]]]
OpenPage = Callable[..., Page]
SLOW, LATE, LAYER = slow_rank(RANKS), late_rank(RANKS), slow_layer(LAYERS)
MARKUP = "<img src=x onerror=alert(1)>"
VIEWS = {
    "runs": "",
    "overview": "?run=page",
    "steps": "?run=page&view=steps",
    "step": "?run=page&view=step&step=18",
    "load": "?run=page&view=load",
    "traffic": "?run=page&view=traffic",
}


def ready(page: Page) -> None:
    """Wait until a view is complete."""
    page.wait_for_selector("main:not([aria-busy])")


def test_overview_names_rank_layer_and_phase(open_page: OpenPage) -> None:
    """The first sentence names the costliest rank and phase, the figures below the slow layer."""
    page = open_page()
    page.get_by_role("link", name="page", exact=True).last.click()
    sentences = page.locator("h1 > span")
    expect(sentences).to_have_count(2)
    expect(sentences.first).to_contain_text(f"decode Rank {LATE} in outside")
    expect(sentences.last).to_contain_text(f"prefill Rank {SLOW} in expert_gemm")
    expect(page.get_by_text(f"Layer {LAYER} was extended most")).to_be_visible()
    picture(page, "overview")


def test_step_shows_its_verdict_and_reads_out_marks(open_page: OpenPage, sql: Sql) -> None:
    """A click on a step leads to its verdict as stored; arrow keys read the timeline of each rank."""
    page = open_page("?run=page&view=steps&mode=prefill&evidence=clear")
    page.locator("#step-table tbody tr").first.click()
    expect(page.locator(".verdict h1")).to_be_visible()
    step = int(re.search(r"step=(\d+)", page.url)[1])  # type: ignore[index]
    stored = sql(
        "SELECT rank, layer, toString(phase) AS phase, worth_ns, reason FROM step_verdicts FINAL "
        f"WHERE step = {step}"
    )[0]
    assert (stored["rank"], stored["layer"], stored["phase"]) == (SLOW, LAYER, "expert_gemm")
    worth = f"{stored['worth_ns'] / 1e6:.2f} ms"
    expect(page.locator(".verdict h1")).to_contain_text(
        f"Rank {SLOW} in expert_gemm (mostly layer {LAYER}) extended this step by {worth}"
    )
    expect(page.locator(".why")).to_contain_text(stored["reason"][1:])
    ready(page)
    lanes = page.locator("canvas.lanes")
    lanes.focus()
    page.keyboard.press("ArrowRight")
    first = sql(
        "SELECT duration_ns FROM phase_spans FINAL WHERE rank = 0 AND step = "
        f"{step} ORDER BY start_time, duration_ns LIMIT 1"
    )[0]
    expect(page.locator("#said")).to_contain_text("rank 0, outside, layer 0: ")
    expect(page.locator("#said")).to_contain_text(f"{first['duration_ns'] / 1e6:.2f} ms")
    for _ in range(SLOW):
        page.keyboard.press("ArrowDown")
    expect(page.locator("#said")).to_contain_text(f"rank {SLOW}, ")
    picture(page, "step")


def test_filters_find_what_the_store_holds(open_page: OpenPage, sql: Sql) -> None:
    """Each filter narrows as SQL does, the address holds them all, and a link to it shows the same."""
    page = open_page("?run=page&view=steps")
    expect(page.locator("#step-count")).to_have_text(f"{2 * STEPS} steps")
    page.get_by_label("Evidence").select_option("clear")
    page.get_by_label("Rank").fill(str(SLOW))
    page.get_by_label("At least, ms").fill("5")
    where = f"evidence = 'clear' AND rank = {SLOW} AND step_ns >= 5000000"
    found = sql(f"SELECT count() AS steps FROM step_verdicts FINAL WHERE {where}")[0]["steps"]
    assert 0 < found < 2 * STEPS
    expect(page.locator("#step-count")).to_have_text(f"{found} steps found")
    assert page.locator("#step-table tbody tr").count() == found
    address = page.url
    assert all(part in address for part in ("evidence=clear", f"rank={SLOW}", "slower_ms=5"))
    again = open_page(address.partition("/ui/")[2])
    expect(again.locator("#step-count")).to_have_text(f"{found} steps found")
    expect(again.get_by_label("Rank")).to_have_value(str(SLOW))
    again.get_by_label("Search").fill("no such words")
    expect(again.get_by_text("No step fits these filters")).to_be_visible()
    again.get_by_role("button", name="Reset").click()
    expect(again.locator("#step-count")).to_have_text(f"{2 * STEPS} steps")


def test_pages_stay_in_order(open_page: OpenPage) -> None:
    """Next and Previous go through all steps, newest first, and Back in the browser goes back."""
    page = open_page("?run=page&view=steps")
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".pager span")).to_have_text(f"51 to {2 * STEPS} of {2 * STEPS}")
    expect(page.locator("#step-table tbody tr").last).to_contain_text("prefill")
    assert f"upto={2 * STEPS - 1}" in page.url
    page.go_back()
    expect(page.locator(".pager span")).to_have_text(f"1 to 50 of {2 * STEPS}")


def _pairs(sql: Sql, mode: str, layer: int, expert: int) -> int:
    """Routed pairs over the newest 20 steps of a mode, as the store has them."""
    steps = (
        f"SELECT step FROM step_verdicts FINAL WHERE forward_mode = '{mode}' AND warmup = 0 "
        "ORDER BY step DESC LIMIT 20"
    )
    rows = sql(
        f"SELECT sum(count) AS pairs FROM expert_loads FINAL WHERE count_kind = 'routed' AND layer = {layer} "
        f"AND expert = {expert} AND step IN ({steps})"
    )
    return int(rows[0]["pairs"])


def test_heat_map_cell_equals_the_store_in_each_mode(open_page: OpenPage, sql: Sql) -> None:
    """A cell reads out the pairs that the store holds, by keys and pointer, also after a switch of mode."""
    page = open_page("?run=page&view=load")
    expect(page.get_by_role("radio", name="decode")).to_be_checked()
    heat = page.locator("#experts")
    heat.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    decode = _pairs(sql, "decode", 1, 1)
    expect(page.locator("#experts-said")).to_contain_text(
        f"layer 1, expert 1: {decode:,} (token, slot) pairs"
    )
    page.get_by_role("radio", name="prefill").check()
    prefill = _pairs(sql, "prefill", 1, 1)
    assert prefill != decode
    expect(page.locator("#experts-said")).to_contain_text(
        f"layer 1, expert 1: {prefill:,} (token, slot) pairs"
    )
    assert "mode=prefill" in page.url
    box = page.locator("#experts .nsewdrag").bounding_box()
    assert box is not None
    x = box["x"] + box["width"] * 1.5 / EXPERTS
    y = box["y"] + box["height"] * 1.5 / LAYERS
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    expect(page.locator("#tip")).to_contain_text(f"layer 1, expert 1: {prefill:,}")
    picture(page, "load")


@pytest.mark.parametrize("view", ["load", "traffic"])
def test_words_and_tables_do_not_wait_for_the_drawing(open_page: OpenPage, view: str) -> None:
    """Heading and figures are on the screen, and cells can be read, while plotly is still on its way."""
    page = open_page("?run=page")
    held: list[Route] = []
    let_through: list[bool] = []
    page.route("**/plotly.min.js", lambda route: route.continue_() if let_through else held.append(route))
    page.locator("a.tab", has_text=view.capitalize()).click()
    expect(page.locator("main h1")).to_contain_text({"load": "is hottest", "traffic": "sent most"}[view])
    figure = page.locator({"load": "#experts", "traffic": "#traffic"}[view])
    figure.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(f"{'#experts' if view == 'load' else '#traffic'}-said")).to_contain_text(": ")
    if view == "load":
        expect(page.get_by_role("table", name="Figures per layer")).to_be_visible()
    assert page.locator(".js-plotly-plot").count() == 0
    let_through.append(True)
    for route in held:
        route.continue_()
    ready(page)
    assert page.locator(".js-plotly-plot").count() > 0


def test_a_cohort_is_shown_alone(open_page: OpenPage, sql: Sql) -> None:
    """The switch narrows cells to a cohort's rows, says so, and goes back to all."""
    page = open_page("?run=page&view=load&mode=decode")
    page.get_by_role("radio", name="chat").check()
    expect(
        page.get_by_text(re.compile(r": 10 decode steps recorded of \d+, .*, cohort chat\."))
    ).to_be_visible()
    stored = sql(
        "SELECT sum(count) AS pairs FROM expert_loads FINAL WHERE count_kind = 'routed' AND layer = 0 "
        f"AND expert = 0 AND cohort = 'chat' AND step >= {2 * STEPS - 20}"
    )[0]["pairs"]
    page.locator("#experts").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#experts-said")).to_contain_text(f"expert 0: {stored:,} (token, slot) pairs")
    assert "cohort=chat" in page.url
    page.get_by_role("radio", name="prefill").check()
    expect(page.locator("h1")).to_have_text("Nothing of cohort chat")
    page.get_by_role("radio", name="all").check()
    expect(page.locator("h1")).to_contain_text("In prefill, expert")


def test_what_contradicts_is_a_line_that_leads_to_its_rows(open_page: OpenPage) -> None:
    """The overview says what is wrong in one line each, and the link shows the rows as the store has them."""
    page = open_page("?run=page")
    lines = page.get_by_role("list", name="Before you trust the figures").get_by_role("listitem")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text(f"conservation {VIOLATIONS} in 1 step")
    expect(lines.last).to_contain_text("rank 1 saw 7 of 8 sites")
    with page.expect_popup() as opened:
        lines.first.get_by_role("link", name="Rows (SQL)").click()
    expect(opened.value.locator("body")).to_contain_text("conservation")
    expect(opened.value.locator("body")).to_contain_text(str(2 * STEPS - 1))


def test_placement_epochs_are_listed_and_marked_on_the_steps(open_page: OpenPage) -> None:
    """The run's page lists epochs with their verdict; the first step of one carries its mark."""
    page = open_page("?run=page")
    rows = page.get_by_role("table", name="Placement epochs").locator("tbody tr")
    expect(rows.first).to_contain_text("epoch 3")
    expect(rows.first).to_contain_text("announced")
    expect(rows.last).to_contain_text("accepted")
    picture(page, "overview-notices")
    page.locator("a.tab", has_text="Steps").click()
    marks = page.locator(".epoch-mark")
    expect(marks).to_have_count(1)
    marked = page.locator("#step-table tbody tr", has=page.locator(".epoch-mark"))
    assert marked.get_attribute("data-key") == f"step {STEPS + 4}"
    expect(marked).to_contain_text(f"accepted epoch 2 from {STEPS + 4}")
    picture(page, "steps-epoch")


def test_traffic_cell_equals_the_store(open_page: OpenPage, sql: Sql) -> None:
    """Bytes from rank 1 to rank 0 are those of the newest decode steps."""
    page = open_page("?run=page&view=traffic&mode=decode&steps=1")
    newest = 2 * STEPS - 1
    stored = sql(
        "SELECT sum(bytes) AS bytes, sum(rows) AS sent FROM rank_traffic FINAL WHERE phase = 'dispatch' "
        f"AND source_rank = 1 AND destination_ep_rank = 0 AND step = {newest}"
    )[0]
    page.locator("#traffic").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#traffic-said")).to_have_text(
        f"rank 1 to 0: {stored['bytes']:,} bytes, {stored['sent']:,} rows"
    )
    picture(page, "traffic")


def test_keyboard_alone_leads_from_the_runs_to_a_step(open_page: OpenPage) -> None:
    """Tab, arrows and Enter suffice, and what has the focus shows it."""
    page = open_page()

    def tab_to(matches: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", matches):
                width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
                assert float(width.removesuffix("px")) >= 2
                return
        raise AssertionError(f"Tab does not reach {matches}")

    tab_to("tr[data-href]")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("Rank")
    tab_to("a.tab[href*=steps]")
    page.keyboard.press("Enter")
    expect(page.locator("#step-table")).to_be_visible()
    tab_to("#step-table tr[data-href]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".steering b")).to_have_text(f"Step {2 * STEPS - 3}")


def test_lanes_can_be_chosen_and_zoom_is_in_the_address(open_page: OpenPage) -> None:
    """Enter on a rank takes its lane away; the zoom of a link is shown again."""
    page = open_page("?run=page&view=step&step=18")
    page.locator("canvas.ribbon").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("img", name=f"Timeline of {RANKS - 1} ranks")).to_be_visible()
    assert "ranks=1%2C2%2C3" in page.url
    page.get_by_role("button", name="Zoom in").click()
    assert "zoom=" in page.url


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_a_phone(open_page: OpenPage, view: str) -> None:
    """Nothing is wider than the screen."""
    page = open_page(VIEWS[view], viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    picture(page, f"phone-{view}")


@pytest.mark.parametrize("view", sorted(VIEWS))
@pytest.mark.parametrize("width", [1000, 1150, 1300, 1500])
def test_no_table_is_cut_off_in_a_window(open_page: OpenPage, view: str, width: int) -> None:
    """On a screen of ordinary width the last column of every table is seen without scrolling sideways."""
    page = open_page(VIEWS[view], viewport={"width": width, "height": 900})
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".scroll, main table")]
            .filter((box) => box.scrollWidth > box.clientWidth + 1
                || box.getBoundingClientRect().right > innerWidth)
            .map((box) => box.closest("section")?.querySelector("h2")?.textContent || box.className)"""
    )
    assert cut == []


def test_theme_follows_the_system_until_one_is_chosen(open_page: OpenPage) -> None:
    """Dark as the system says, then light by choice, also after a reload."""
    page = open_page("?run=page", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    picture(page, "overview-dark")
    theme = page.get_by_role("button", name="Theme")
    theme.click()
    expect(theme).to_have_text("Theme: light")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light


def test_every_control_has_a_name(open_page: OpenPage) -> None:
    """A screen reader can say what every control and figure is."""
    page = open_page("?run=page&view=steps")
    for view in VIEWS.values():
        page.goto(page.url.partition("?")[0] + view)
        ready(page)
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, canvas, svg, [tabindex="0"]')]
              .filter((node) => !node.closest('[aria-hidden=true], #js-plotly-tester'))
              .filter((node) => node.checkVisibility())
              .filter((node) => !(node.textContent.trim() || node.ariaLabel || node.labels?.length))
              .map((node) => node.outerHTML.slice(0, 120))"""
        )
        assert unnamed == []


def test_new_steps_come_in_without_moving_the_reader(open_page: OpenPage, tmp_path: Path) -> None:
    """New steps join the overview and the top of the list; whoever has the focus on a row is told instead.

    The model's name is markup: it must be shown as text.
    """
    run = SyntheticRun(run_id="live", slow_rank=1)
    with collector(tmp_path / "live") as process:
        _send(process, run, 0, 3)
        page = open_page(base=process.http_address)
        page.locator("tbody tr").first.click()
        expect(page.locator(".facts")).to_contain_text(MARKUP)
        page.locator("a.tab", has_text="Steps").click()
        expect(page.locator("#step-count")).to_have_text("3 steps")
        _send(process, run, 3, 4)
        expect(page.locator("#step-count")).to_have_text("4 steps", timeout=20_000)
        page.locator("a.tab", has_text="Overview").click()
        expect(page.get_by_role("heading", name="The newest 4 steps")).to_be_visible()
        _send(process, run, 4, 5)
        expect(page.get_by_role("heading", name="The newest 5 steps")).to_be_visible(timeout=20_000)
        page.go_back()
        expect(page.locator("#step-count")).to_have_text("5 steps")
        row = page.locator("#step-table tbody tr", has_text="3").first
        row.focus()
        _send(process, run, 5, 6)
        expect(page.get_by_role("button", name="New steps up to 5: show")).to_be_visible(timeout=20_000)
        expect(row).to_be_focused()
        page.get_by_role("button", name="New steps").click()
        expect(page.locator("#step-count")).to_have_text("6 steps")
        # A step that was waited for comes behind a newer one.
        for first, num_steps in ((7, 7), (6, 8)):
            _send(process, run, first, first + 1)
            expect(page.locator("#step-count")).to_have_text(f"{num_steps} steps", timeout=20_000)
        assert page.locator("img").count() == 0


def test_a_collector_that_goes_away_is_said_in_one_sentence(open_page: OpenPage, tmp_path: Path) -> None:
    """An empty store says what to do next; without the collector the page stays and says so."""
    with collector(tmp_path / "away") as process:
        page = open_page(base=process.http_address, complaints=False)
        expect(page.locator("h1")).to_have_text("No run yet")
        expect(page.locator("pre")).to_contain_text(f'endpoint="{process.http_address}"')
        process.terminate()
        expect(page.get_by_role("alert")).to_have_text(
            "The collector does not answer: it may be restarting. Trying again.", timeout=20_000
        )
        expect(page.locator("h1")).to_have_text("No run yet")


def _send(process: CollectorProcess, run: SyntheticRun, first: int, behind: int) -> None:
    for step in range(first, behind):
        rank_steps = [replace(rank_step, model_name=MARKUP) for rank_step in run.step(step)]
        assert process.send(request(rank_steps)).status == 200


def test_a_store_that_is_away_leaves_the_figures_standing(open_page: OpenPage) -> None:
    """The collector's sentence is shown and what was seen before stays, until the store answers again."""
    page = open_page("?run=page&view=steps", complaints=False)
    words = (
        "The store does not answer; what arrives is kept while the collector's queue has room. Trying again."
    )
    page.route(
        "**/api/**",
        lambda route: route.fulfill(status=503, json={"error": words}, content_type="application/json"),
    )
    expect(page.get_by_role("alert")).to_have_text(words, timeout=20_000)
    expect(page.locator("#step-table tbody tr")).to_have_count(50)
    page.unroute("**/api/**")
    expect(page.get_by_role("alert")).to_be_hidden(timeout=20_000)


def test_without_plotly_cells_are_read_all_the_same(open_page: OpenPage, sql: Sql) -> None:
    """The page says what to install, and arrow keys read the cells of a heat map that is not drawn."""
    page = open_page("?run=page", complaints=False)
    page.route("**/plotly.min.js", lambda route: route.fulfill(status=404, body=""))
    page.locator("a.tab", has_text="Load").click()
    said = page.locator("#experts-said")
    expect(said).to_contain_text("pip install 'moetrace[collector]'")
    page.locator("#experts").focus()
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text(f"layer 0, expert 0: {_pairs(sql, 'decode', 0, 0):,} (token, slot) pairs")
