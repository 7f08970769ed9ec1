"""`/metrics` of `moetrace join`: the series of steps that a collector exports where it joins itself.

The same sink fills them from the same results, so dashboards and alert rules hold for both. Like a
collector's they begin at zero with the process: steps that were judged before are in the store only.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from moetrace_collectors.access.scopes import RouteScopes
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.prometheus import PrometheusSink

AWAY = "the store does not answer or does not take rows; see the log of moetrace join\n"
"""Anyone may read it, so it says nothing of where the store is and what it said."""


class JoinMetrics:
    """The series, and the routes that show them."""

    def __init__(self, *, series_budget: int) -> None:
        """Nothing is counted yet.

        Args:
            series_budget: label sets of per-expert metrics at most, as of a collector.
        """
        self.book = book = SeriesBook()
        self.own = SelfMetrics(book)
        self._sink = PrometheusSink(book, series_budget=series_budget)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(book)
        self._is_well = True

    def take(self, results: Sequence[StepResult]) -> None:
        """Steps that were judged now."""
        for result in results:
            self.own.step_closed(result.joined)
            self._sink.take_step(result)

    def store_answers(self, answers: bool) -> None:
        """Whether the store answered in the last turn and took everything."""
        self._is_well = answers
        if not answers:
            self.own.sink_failed("clickhouse")

    def text(self) -> bytes:
        """The page of metrics."""
        return generate_latest(self._registry)

    def routes(self) -> list[Route]:
        """GET /metrics and /healthz."""
        return [
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
        ]

    def scopes(self, *, open_metrics: bool) -> RouteScopes:
        """Who may ask."""
        return {"/healthz": None, **({"/metrics": None} if open_metrics else {})}

    async def _metrics(self, request: Request) -> Response:
        return Response(await run_in_threadpool(self.text), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: Request) -> Response:
        if not self._is_well:
            return PlainTextResponse(AWAY, 503)
        return PlainTextResponse("ok\n")
