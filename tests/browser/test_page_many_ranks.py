"""The page at many ranks: short first, detail on demand."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from integration.collector_process import CollectorProcess
from integration.page_collector import page_collector
from moetrace_collectors.views.worst_step import MAX_LANES
from page_store import slow_rank

from .conftest import picture

RANKS, STEPS = 128, 6
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """128 ranks in two expert-parallel groups."""
    directory = tmp_path_factory.mktemp("wide")
    with page_collector(directory, ranks=RANKS, layers=2, experts=64, steps=STEPS) as process:
        yield process


def test_lanes_are_few_and_any_rank_can_be_added(open_page: OpenPage, wide: CollectorProcess) -> None:
    """Some ranks are drawn, the named one among them; all are there in short, and Enter adds one."""
    page = open_page("?run=page&view=step&step=4", base=wide.http_address)
    expect(page.get_by_role("img", name=f"Timeline of {MAX_LANES} ranks")).to_be_visible()
    expect(page.get_by_role("heading", name=f"All {RANKS} ranks in short")).to_be_visible()
    page.locator("canvas.ribbon").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#said")).to_contain_text(f"rank {slow_rank(RANKS)}: ")
    expect(page.locator("#said")).to_contain_text("named by the verdict; drawn above")
    while "drawn above" in page.locator("#said").inner_text():
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.get_by_role("img", name=f"Timeline of {MAX_LANES + 1} ranks")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#said")).to_contain_text("drawn above")
    picture(page, "many-ranks-step")


def test_traffic_opens_from_blocks_to_ranks(open_page: OpenPage, wide: CollectorProcess) -> None:
    """A cell of two ranks by two holds what the store holds, and Enter shows its four pairs."""
    page = open_page("?run=page&view=traffic&steps=1", base=wide.http_address)
    expect(page.get_by_text(f"{RANKS} ranks in blocks of 2")).to_be_visible()
    page.locator("#traffic").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    cell = page.locator("#traffic-said")
    expect(cell).to_have_text(f"rank 0-1 to 2-3: {_bytes(wide, 'source_rank < 2', 'BETWEEN 2 AND 3')}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Ranks 0-1 to 2-3: back to all")).to_be_visible()
    page.locator("#traffic").focus()
    for key in ("Home", "PageUp", "ArrowDown"):
        page.keyboard.press(key)
    expect(cell).to_have_text(f"rank 1 to 2: {_bytes(wide, 'source_rank = 1', '= 2')}")


def _bytes(process: CollectorProcess, source: str, destination: str) -> str:
    sql = (
        "SELECT sum(bytes) AS bytes, sum(rows) AS num_rows FROM rank_traffic FINAL WHERE phase = 'dispatch' "
        f"AND step = {2 * STEPS - 1} AND {source} AND destination_ep_rank {destination}"
    )
    query = urllib.parse.urlencode({"query": sql, "default_format": "JSONEachRow"})
    row: dict[str, Any] = json.loads(process.get(f"/?{query}").body)
    return f"{int(row['bytes']):,} bytes, {int(row['num_rows']):,} rows"
