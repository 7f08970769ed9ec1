"""The book of series, while others register theirs."""

from __future__ import annotations

import pytest

from moetrace_collectors import series
from moetrace_collectors.series import Counter, SeriesBook
from moetrace_schemas import metrics


@pytest.mark.parametrize("ask", ["collect", "forget_run"])
def test_a_series_may_be_registered_during_a_scrape(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`moetrace join` registers those of its ledger when it gets its lease; a scrape then must not fail."""
    book = SeriesBook()
    book.counter(metrics.COLLECTOR_RECEIVED_TOTAL)
    asked = getattr(Counter, ask)

    def registers(counter: Counter, *values: str) -> object:
        book.gauge(metrics.SELF_EXPECTED_SITES)
        return asked(counter, *values)

    monkeypatch.setattr(series.Counter, ask, registers)
    getattr(book, ask)(*(["r"] if ask == "forget_run" else []))
    monkeypatch.undo()
    assert metrics.SELF_EXPECTED_SITES.name in {family.name for family in book.collect()}
