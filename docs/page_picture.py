"""Makes docs/page.png: one step of a simulated run on the collector's own page, in a headless browser.

Needs Debian's chromium (or another Chromium as $CHROMIUM).

    .venv/bin/python docs/page_picture.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from integration.page_collector import page_collector  # noqa: E402

STEP = 18
"""Of prefill, in which one rank is slow in the experts of one layer."""


def main() -> None:
    """Fill a store, serve it, look at it."""
    with (
        tempfile.TemporaryDirectory() as directory,
        page_collector(Path(directory), ranks=8, layers=4, experts=64, steps=20) as process,
        sync_playwright() as playwright,
    ):
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 880})
        page.goto(f"{process.http_address}/ui/?run=page&view=step&step={STEP}")
        page.wait_for_selector("main:not([aria-busy])")
        page.screenshot(path=ROOT / "docs" / "page.png")
        browser.close()


if __name__ == "__main__":
    main()
