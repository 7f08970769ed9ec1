"""The page's JSON endpoints: parameters -> reader -> document. Blocking; the routes run it in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moetrace_collectors.page import documents
from moetrace_collectors.page.request_parameters import RequestParameters
from moetrace_collectors.views import browse_reader, run_notices
from moetrace_collectors.views.browse_queries import STEP_ORDERS
from moetrace_collectors.views.browse_records import StepFilter
from moetrace_collectors.views.store_rows import Store
from moetrace_collectors.views.summarise import summarise
from moetrace_schemas.enums import Cause, Evidence, ForwardMode, Phase

OVERVIEW_STEPS = 1_000
"""Newest steps that an overview reads."""
STRIP_STEPS = 160
PAGE_SIZE = 50
MAX_PAGE_SIZE = 500
LOAD_STEPS = 20
MAX_LOAD_STEPS = 5_000
_MAX = 2**63 - 1

Endpoint = Callable[[Store, RequestParameters], Mapping[str, Any]]


def runs(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """Every run."""
    return documents.runs_document(browse_reader.read_runs(store))


def news(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """What came since a step; cheap, asked every few seconds."""
    since = parameters.integer("since", -1, low=0, high=_MAX)
    found = browse_reader.read_news(store, parameters.text("run"), since)
    return {"last_step": found.last_step, "new_steps": found.num_new, "rows": found.num_rows}


def overview(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """A run in one picture."""
    run_id = parameters.text("run")
    costs = browse_reader.read_costs(store, run_id, limit=OVERVIEW_STEPS)
    looked_at = max(1, run_notices.MAX_COVERAGE_ROWS // max(1, costs.entry.ranks))
    return documents.overview_document(
        costs,
        summarise(costs.steps),
        notices=run_notices.read_notices(store, run_id, first_step=costs.steps[-looked_at:][0].step),
        epochs=run_notices.read_epochs(store, run_id),
        strip=STRIP_STEPS,
    )


def steps(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """One page of steps."""
    number = parameters.integer("page", 0, low=0, high=10_000_000)
    size = parameters.integer("size", PAGE_SIZE, low=1, high=MAX_PAGE_SIZE)
    page = browse_reader.read_step_page(
        store,
        parameters.text("run"),
        StepFilter(
            evidence=str(parameters.member("evidence", Evidence) or ""),
            cause=str(parameters.member("cause", Cause) or ""),
            phase=str(parameters.member("phase", Phase) or ""),
            forward_mode=str(parameters.member("mode", ForwardMode) or ""),
            rank=parameters.integer("rank", -1, low=0, high=2**32 - 1),
            slower_ns=parameters.milliseconds("slower_ms"),
            text=parameters.text("text", ""),
        ),
        order=parameters.one_of("order", STEP_ORDERS, "newest"),
        page=number,
        size=size,
        upto=parameters.integer("upto", -1, low=0, high=_MAX),
    )
    epochs = run_notices.read_epochs(store, parameters.text("run"))
    return documents.steps_document(page, epochs=epochs, number=number, size=size)


def step(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """One step: verdict, every rank in short, the costliest exchanges."""
    number = parameters.integer("step", low=0, high=_MAX)
    return documents.step_document(browse_reader.read_step(store, parameters.text("run"), number))


def timeline(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """One step across some of its ranks, laid out."""
    number = parameters.integer("step", low=0, high=_MAX)
    laid_out = browse_reader.read_timeline(
        store, parameters.text("run"), number, lanes=parameters.ranks("ranks")
    )
    return documents.timeline_document(laid_out)


def loads(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """Layer x expert and layer x rank."""
    sums = browse_reader.read_loads(
        store,
        parameters.text("run"),
        mode=parameters.member("mode", ForwardMode),
        cohort=parameters.text("cohort", ""),
        num_steps=_steps(parameters),
    )
    return {} if sums is None else documents.loads_document(sums)


def traffic(store: Store, parameters: RequestParameters) -> Mapping[str, Any]:
    """Rank x rank, in blocks where ranks are many."""
    blocks = browse_reader.read_traffic_blocks(
        store,
        parameters.text("run"),
        mode=parameters.member("mode", ForwardMode),
        num_steps=_steps(parameters),
        sources=parameters.span("from"),
        destinations=parameters.span("to"),
    )
    return {} if blocks is None else documents.traffic_document(blocks)


def _steps(parameters: RequestParameters) -> int:
    return parameters.integer("steps", LOAD_STEPS, low=1, high=MAX_LOAD_STEPS)


ENDPOINTS: Mapping[str, Endpoint] = {
    "runs": runs,
    "news": news,
    "overview": overview,
    "steps": steps,
    "step": step,
    "timeline": timeline,
    "loads": loads,
    "traffic": traffic,
}
"""By name, under /ui/api/."""
