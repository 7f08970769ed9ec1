"""The page is whole in itself, well formed, safe and of bounded size."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from moetrace_collectors.views.report_html import render_report
from moetrace_collectors.views.report_steps import MAX_STEP_ROWS
from moetrace_collectors.views.run_records import RunView
from moetrace_collectors.views.summarise import summarise
from moetrace_schemas.enums import Phase
from run_view_builders import large_view, overview, run_view, step_row, suspect

VOID = {"meta", "input", "br", "hr", "link", "img", "area", "base", "col", "embed", "source", "track", "wbr"}
LOADING = {"src", "srcset", "data", "poster", "action", "formaction", "background", "xlink:href", "ping"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Checks nesting, and keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.faults.append(f"doubled attribute in {tag}")
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close an element, which must be the innermost one."""
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> does not close the innermost element")


def page_of(view: RunView) -> str:
    """The page of a view."""
    return render_report(view, summarise(view.steps))


def hostile_view() -> RunView:
    """A run whose every text from outside is an attack."""
    return run_view(
        step_row(1, suspect(2, Phase.EXPERT_GEMM, layer=1), reason=HOSTILE),
        overview=overview(run_id=HOSTILE, model_name=HOSTILE),
    )


def test_page_is_well_formed() -> None:
    """Every element is closed in order, with no attribute twice and no id twice."""
    page = Page(page_of(large_view(ranks=4, layers=3, experts=8, steps=20)))
    assert page.faults == []
    assert page.open == []
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)


def test_page_loads_nothing() -> None:
    """No element names a resource, and the policy forbids to load any: the page opens offline."""
    text = page_of(large_view(ranks=4, layers=3, experts=8, steps=20))
    page = Page(text)
    for name, attributes in page.elements:
        assert name not in {"link", "iframe", "object", "embed", "img", "base", "form"}
        assert not LOADING & set(attributes), (name, attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert re.findall(r"https?:|url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", text) == []
    policies = [a["content"] for n, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")


def test_names_from_outside_are_text() -> None:
    """Markup in a run id, a model name or a reason is shown as text: no element or handler comes of it."""
    clean = Page(page_of(run_view(step_row(1, suspect(2, Phase.EXPERT_GEMM, layer=1)))))
    page = Page(page_of(hostile_view()))
    assert [name for name, _ in page.elements] == [name for name, _ in clean.elements]
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert "&lt;script&gt;alert(1)" in page_of(hostile_view())


def test_largest_deployment_fits_ten_megabytes() -> None:
    """64 ranks x 61 layers x 256 experts, two modes by two cohorts, 2,000 steps: below 10 MB."""
    text = page_of(large_view())
    assert len(text.encode()) < 10_000_000
    assert text.count('class="lane-name') <= 2 * 16


def test_critical_rank_is_always_drawn() -> None:
    """Where ranks are too many to draw, the slow one has a lane, in bold."""
    text = page_of(large_view(layers=4, experts=8, steps=10))
    assert '<text x="62" ' in text
    assert re.search(r'class="lane-name critical">rank 38<', text)
    assert "48 more ranks took part" in text


def test_long_runs_list_the_costliest_steps() -> None:
    """The table stops at 500 rows, says so, and keeps the step that cost most."""
    rows = [
        step_row(step, suspect(0, Phase.ROUTER, worth_ms=50 if step == 777 else 1 + step / 1000))
        for step in range(1200)
    ]
    text = page_of(run_view(*rows))
    table = text[text.index('id="step-table"') : text.index("</table>", text.index('id="step-table"'))]
    assert table.count("<tr>") == MAX_STEP_ROWS + 1
    assert ">777<" in table
    assert "The 500 costliest of 1,200 steps are listed" in text


def test_evidence_is_told_by_word_and_shape() -> None:
    """A reader who cannot tell the colours reads the evidence, and the phase, as words."""
    text = page_of(run_view(step_row(1, suspect(2, Phase.EXPERT_GEMM, layer=1))))
    assert '<span class="badge clear">clear</span>' in text
    assert "<td>expert_gemm</td>" in text


def test_figures_are_reachable_by_keyboard() -> None:
    """Every figure to explore can take the focus and has a name."""
    page = Page(page_of(large_view(ranks=4, layers=3, experts=8, steps=20)))
    figures = [a for _, a in page.elements if "explore" in (a.get("class") or "")]
    assert len(figures) > 4
    assert all(figure.get("tabindex") == "0" and figure.get("aria-label") for figure in figures)


def test_page_claims_only_what_the_collector_can_know() -> None:
    """What never reached the collector it cannot know: it vouches for what reached it only."""
    text = page_of(run_view(step_row(1)))
    assert "Nothing that reached the collector was lost" in text
    assert "Nothing was lost" not in text


def test_page_of_warmup_only_shows_no_median() -> None:
    """Where no step counts there is no median step to show."""
    text = page_of(run_view(step_row(0, warmup=True)))
    assert "No step outside warm-up has been joined." in text
    assert "median step" not in text


def test_page_without_loads_and_phase_rows_says_so() -> None:
    """What is not in the store is named as missing; the rest of the page stands."""
    text = page_of(run_view(step_row(1)))
    assert "The phase rows of this step are not in the store." in text
    assert "No expert counts are in the store" in text
    assert Page(text).faults == []
