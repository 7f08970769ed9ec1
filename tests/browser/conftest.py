"""A real Chromium on a real collector's page; screenshots go to pictures/, which git ignores."""

from __future__ import annotations

import json
import shutil
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from integration.collector_process import CollectorProcess
from integration.page_collector import page_collector

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = Path(__file__).parent / "pictures"
RANKS, LAYERS, EXPERTS, STEPS = 4, 4, 16, 40

Sql = Callable[[str], list[dict[str, Any]]]
OpenPage = Callable[..., Page]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder drives a browser."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="no chromium on this machine"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; nothing is downloaded. Per module, so that its event loop ends with these tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector whose store holds the run of page_store.py: 4 ranks, 40 steps of prefill and of decode."""
    directory = tmp_path_factory.mktemp("page")
    with page_collector(directory, ranks=RANKS, layers=LAYERS, experts=EXPERTS, steps=STEPS) as process:
        yield process


@pytest.fixture(scope="session")
def sql(server: CollectorProcess) -> Sql:
    """Rows of the store, asked past the page."""

    def ask(statement: str) -> list[dict[str, Any]]:
        query = {
            "query": statement,
            "default_format": "JSONEachRow",
            "output_format_json_quote_64bit_integers": "0",
        }
        answer = server.get(f"/?{urllib.parse.urlencode(query)}")
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]

    return ask


@pytest.fixture
def open_page(browser: Browser, server: CollectorProcess) -> Iterator[OpenPage]:
    """Opens a place of the page; at the end nothing may have been complained of, and no request have left.

    `complaints=False` for a page whose collector is taken away on purpose.
    """
    contexts: list[BrowserContext] = []
    said: list[str] = []
    asked: list[str] = []

    def open_one(
        place: str = "", *, base: str = server.http_address, complaints: bool = True, **options: Any
    ) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        if complaints:
            page.on("console", lambda message: said.append(message.text) if _is_bad(message.type) else None)
            page.on("pageerror", lambda error: said.append(str(error)))

        def note(request: Request) -> None:
            if not request.url.startswith((base, "data:")):
                asked.append(request.url)

        page.on("request", note)
        page.goto(f"{base}/ui/{place}")
        page.wait_for_selector("main:not([aria-busy])")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert said == []
    assert asked == []


def _is_bad(kind: str) -> bool:
    return kind in ("error", "warning")


def picture(page: Page, name: str) -> None:
    """Keep what the page looks like, for people."""
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
