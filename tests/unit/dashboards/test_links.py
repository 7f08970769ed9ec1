"""Links from cells: what Grafana opens after it has filled in its variables."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from moetrace_dashboards.config import Config
from moetrace_dashboards.frame import step_link, trace_link


@pytest.mark.parametrize("kind", ["tempo", "jaeger"])
def test_a_trace_id_leads_to_its_trace(kind: str) -> None:
    """Explore with the chosen trace data source and the id as the query."""
    link = trace_link(Config(trace_datasource_type=kind)).build()
    assert link.url is not None
    url = link.url.replace("${traces}", "uid-1").replace("${__data.fields.trace_id}", "abc123")
    assert "$" not in url
    pane = json.loads(parse_qs(urlsplit(url).query)["panes"][0])["a"]
    assert pane["datasource"] == "uid-1"
    assert pane["queries"][0]["query"] == "abc123"
    assert pane["queries"][0].get("queryType") == ("traceql" if kind == "tempo" else None)


def test_a_step_leads_to_itself() -> None:
    """The same dashboard, run and time, with the step filled in."""
    url = step_link().build().url
    assert url is not None
    assert "${__url_time_range}" in url
    assert "${run:queryparam}" in url
    assert url.endswith("&var-step=${__data.fields.step}")
