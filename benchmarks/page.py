"""How long the collector's page takes to show something, in a real Chromium, at few and at many ranks.

A simulated run of tests/page_store.py is stored (61 layers, 64 experts in groups of at most 64 ranks, prefill
and decode), a collector serves it, and each view is opened in a browser that has nothing cached. Medians over
repeats of: first contentful paint; the view's own sentence painted (its h1, which needs the store's
answer); the view complete, figures drawn. And what went over the wire, packed.

    python benchmarks/page.py [--ranks 4 512] [--repeats 5] [--stores DIR] [--write]

At 512 ranks the store is filled with some 40 million rows first, which takes a minute or two and 4 GB of
memory; --stores keeps it for the next time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from results import write_section

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from integration.collector_process import CollectorProcess, collector  # noqa: E402
from integration.page_collector import page_collector  # noqa: E402

LAYERS, EXPERTS = 61, 64
STEPS = {True: 40, False: 4}
"""Steps of each forward mode: few where ranks are many."""
MANY_RANKS = 64
VIEWS = {
    "runs": "",
    "overview": "?run=page",
    "steps": "?run=page&view=steps",
    "step": "?run=page&view=step&step=2",
    "load": "?run=page&view=load",
    "traffic": "?run=page&view=traffic",
}


@contextmanager
def served(directory: Path, ranks: int) -> Iterator[CollectorProcess]:
    store = directory / f"ranks-{ranks}"
    if store.is_dir():
        with collector(store) as process:
            yield process
        return
    store.mkdir(parents=True)
    steps = STEPS[ranks <= MANY_RANKS]
    with page_collector(store, ranks=ranks, layers=LAYERS, experts=EXPERTS, steps=steps) as process:
        yield process


# In the page itself: a driver's question waits behind whatever script runs, a person's eyes do not.
NOTE_SENTENCE = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("main h1")) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.sentenceMs = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""
"""When the first frame with the sentence has been painted, from the start of the navigation."""


def open_view(browser: Browser, address: str) -> tuple[float, float, float, int, int]:
    """Time in ms to first paint, sentence and whole view; bytes of JSON and of everything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(NOTE_SENTENCE)
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    session.on(
        "Network.responseReceived", lambda event: names.update({event["requestId"]: event["response"]["url"]})
    )
    session.on(
        "Network.loadingFinished",
        lambda event: sizes.update({event["requestId"]: int(event["encodedDataLength"])}),
    )
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector("main:not([aria-busy])")
    complete = time.perf_counter()
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    sentence = page.evaluate("window.sentenceMs")
    answers = sum(size for request, size in sizes.items() if "/ui/api/" in names.get(request, ""))
    everything = sum(sizes.values())
    context.close()
    return float(paint), float(sentence), (complete - began) * 1e3, answers, everything


def table(browser: Browser, process: CollectorProcess, ranks: int, repeats: int) -> list[str]:
    lines = []
    for view, place in VIEWS.items():
        runs = [open_view(browser, f"{process.http_address}/ui/{place}") for _ in range(repeats)]
        paint, sentence, complete, answers, everything = (
            statistics.median(values) for values in zip(*runs, strict=True)
        )
        lines.append(
            f"| {ranks} | {view} | {paint / 1e3:.2f} | {sentence / 1e3:.2f} | {complete / 1e3:.2f} | "
            f"{answers / 1e3:,.0f} | {everything / 1e3:,.0f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stores", type=Path, help="where to keep the filled stores")
    parser.add_argument("--write", action="store_true", help="write the section in RESULTS.md")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("benchmarks/page.py needs a chromium: apt-get install chromium")
    version = subprocess.run([chromium, "--version"], capture_output=True, text=True, check=True).stdout
    lines = [
        "| ranks | view | first paint, s | sentence, s | complete, s | answers, kB | all, kB |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for ranks in arguments.ranks:
            with served(arguments.stores or Path(scratch), ranks) as process:
                lines += table(browser, process, ranks, arguments.repeats)
        browser.close()
    text = (
        f"`python benchmarks/page.py`: {LAYERS} layers, {EXPERTS} experts, {version.strip()}, browser and "
        f"collector on this machine, nothing cached; medians of {arguments.repeats}. *Sentence*: the view's "
        "heading, which needs the store's answer. *Complete*: every figure drawn. Heat maps (load, traffic) "
        "fetch plotly's script once. Sizes are packed, as sent.\n\n" + "\n".join(lines)
    )
    print(text)
    if arguments.write:
        write_section("page", "The collector's page: time to the first figure", text)


if __name__ == "__main__":
    main()
