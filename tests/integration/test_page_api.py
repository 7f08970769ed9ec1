"""The JSON of the collector's page: shapes as published, figures as stored, strict headers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest

from integration.collector_process import Answer, CollectorProcess, ask
from integration.page_collector import page_collector
from page_store import EXPECTED_SITES, SEEN_SITES, VIOLATIONS, late_rank, slow_layer, slow_rank

RANKS, LAYERS, EXPERTS, STEPS = 4, 3, 8, 12
ENDPOINTS = {
    "runs": "",
    "news": "run=page&since=3",
    "overview": "run=page",
    "steps": "run=page&order=worth&size=5",
    "step": "run=page&step=10",
    "timeline": "run=page&step=10&ranks=0,2",
    "loads": "run=page&mode=decode&cohort=chat",
    "traffic": "run=page&mode=decode&from=0-1&to=2-3",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with 12 steps of prefill and 12 of decode."""
    directory = tmp_path_factory.mktemp("api")
    with page_collector(directory, ranks=RANKS, layers=LAYERS, experts=EXPERTS, steps=STEPS) as process:
        yield process


def document(server: CollectorProcess, name: str, query: str) -> Any:
    """The JSON of an endpoint."""
    answer = server.get(f"/ui/api/{name}?{query}")
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def rows(server: CollectorProcess, sql: str) -> list[list[Any]]:
    """Rows of the store, asked past the page."""
    settings = {"X-ClickHouse-Format": "JSONCompactEachRow"}
    url = (
        f"{server.http_address}/?default_format=JSONCompactEachRow&output_format_json_quote_64bit_integers=0"
    )
    return [json.loads(line) for line in ask(url, sql.encode(), settings).body.splitlines()]


def schema(name: str) -> dict[str, Any]:
    """The published shape of an endpoint."""
    text = resources.files("moetrace_schemas.json").joinpath("page_api.schema.json").read_text()
    published: dict[str, Any] = json.loads(text)
    return {**published, "$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_answers_have_the_published_shape(server: CollectorProcess, name: str) -> None:
    """No field is missing, and none is there that the schema does not name."""
    jsonschema.Draft202012Validator(schema(name)).validate(document(server, name, ENDPOINTS[name]))


def test_every_endpoint_is_published() -> None:
    """The schema and the collector know the same endpoints."""
    from moetrace_collectors.page.api import ENDPOINTS as served

    published = json.loads(
        resources.files("moetrace_schemas.json").joinpath("page_api.schema.json").read_text()
    )["$defs"]
    assert (
        set(served)
        == set(ENDPOINTS)
        == set(published) - {"error", "suspect", "run", "step_entry", "matrix", "notice", "epoch"}
    )


def test_steps_are_filtered_as_sql_would(server: CollectorProcess) -> None:
    """Rank, phase, mode, length and words narrow; pages do not overlap."""
    where = f"rank = {slow_rank(RANKS)} AND phase = 'expert_gemm' AND forward_mode = 'prefill'"
    query = f"run=page&rank={slow_rank(RANKS)}&phase=expert_gemm&mode=prefill&text=EXPERT_gemm"
    stored = [
        row[0] for row in rows(server, f"SELECT step FROM step_verdicts FINAL WHERE {where} ORDER BY step")
    ]
    found = document(server, "steps", query + "&order=oldest")
    assert [row["step"] for row in found["rows"]] == stored
    assert found["total"] == len(stored) > 2
    pages = [document(server, "steps", f"run=page&size=10&page={page}") for page in range(3)]
    assert [row["step"] for page in pages for row in page["rows"]] == list(range(2 * STEPS - 1, -1, -1))
    assert document(server, "steps", "run=page&upto=4")["rows"][0]["step"] == 4


def test_budgets_are_work_and_exchanges_of_each_rank(server: CollectorProcess) -> None:
    """Work, transfer and wait sum to all that a rank recorded, and the slow rank waits least."""
    step = document(server, "step", ENDPOINTS["step"])
    stored = rows(
        server,
        "SELECT rank, sum(duration_ns) FROM phase_spans FINAL WHERE step = 10 GROUP BY rank ORDER BY rank",
    )
    assert [[budget[0], sum(budget[2:])] for budget in step["budgets"]] == stored
    waits = {budget[0]: budget[4] for budget in step["budgets"]}
    assert min(waits, key=waits.__getitem__) == slow_rank(RANKS) == step["step"]["suspect"]["rank"]
    assert step["exchanges"][0]["layer"] == slow_layer(LAYERS)
    assert (step["before"], step["behind"]) == (9, 11)


def test_timeline_draws_the_ranks_asked_for(server: CollectorProcess) -> None:
    """Marks of a rank last as long as its rows, and ranks that do not exist are left out."""
    timeline = document(server, "timeline", "run=page&step=10&ranks=2,0,77")
    assert [lane["rank"] for lane in timeline["lanes"]] == [0, 2]
    assert timeline["hidden_ranks"] == RANKS - 2
    lengths = [sum(mark[4] for mark in lane["marks"]) for lane in timeline["lanes"]]
    stored = rows(
        server,
        "SELECT sum(duration_ns) FROM phase_spans FINAL WHERE step = 10 AND rank IN (0, 2) "
        "GROUP BY rank ORDER BY rank",
    )
    assert lengths == [row[0] for row in stored]


def test_loads_and_traffic_equal_the_store(server: CollectorProcess) -> None:
    """Both are sums over the newest steps of one mode, without warm-up."""
    loads = document(server, "loads", "run=page&mode=decode&steps=3")
    assert loads["steps"] == [2 * STEPS - 3, 2 * STEPS - 2, 2 * STEPS - 1]
    stored = rows(
        server,
        "SELECT sum(count) FROM expert_loads FINAL WHERE count_kind = 'routed' AND step >= 21 "
        "AND layer = 1 AND expert = 5",
    )
    assert loads["experts"]["counts"][1][5] == stored[0][0]
    traffic = document(server, "traffic", "run=page&mode=decode&steps=3&from=1-1&to=0-3")
    stored = rows(
        server,
        "SELECT destination_ep_rank, sum(bytes) FROM rank_traffic FINAL WHERE phase = 'dispatch' "
        "AND step >= 21 AND source_rank = 1 GROUP BY destination_ep_rank ORDER BY destination_ep_rank",
    )
    assert traffic["bytes"] == [[row[1] for row in stored]]
    everything = document(server, "loads", "run=page&mode=decode&steps=5000")
    assert everything["steps"] == list(range(STEPS + 2, 2 * STEPS))


def test_a_cohort_is_summed_alone_and_all_of_them_make_the_whole(server: CollectorProcess) -> None:
    """Each cohort equals its rows in the store over the steps that are named; an unknown one is empty."""
    sums = {}
    for cohort in ("", "chat", "batch"):
        loads = document(server, "loads", f"run=page&mode=decode&steps=4&cohort={cohort}")
        assert (loads["cohorts"], loads["cohort"]) == (["batch", "chat"], cohort)
        steps = ", ".join(str(step) for step in loads["steps"])
        stored = rows(
            server,
            f"SELECT sum(count) FROM expert_loads FINAL WHERE count_kind = 'routed' AND step IN ({steps})"
            + (f" AND cohort = '{cohort}'" if cohort else ""),
        )
        sums[cohort] = sum(map(sum, loads["experts"]["counts"]))
        assert sums[cohort] == stored[0][0]
        assert len(loads["steps"]) == (2 if cohort else 4)
    assert sums["chat"] + sums["batch"] == sums[""]
    nothing = document(server, "loads", "run=page&mode=decode&cohort=nobody")
    assert (nothing["steps"], nothing["experts"]) == ([], None)


def test_overview_says_a_sentence_for_each_forward_mode(server: CollectorProcess) -> None:
    """Each mode names its own rank, however the other one fares."""
    modes = {mode["forward_mode"]: mode for mode in document(server, "overview", "run=page")["modes"]}
    assert modes["decode"]["headline"].startswith(f"Rank {late_rank(RANKS)} in outside")
    assert modes["prefill"]["headline"].startswith(f"Rank {slow_rank(RANKS)} in expert_gemm")


def test_notices_say_what_is_wrong_and_their_sql_shows_the_rows(server: CollectorProcess) -> None:
    """A contradiction and a missed call are one line each; the SQL answers with just those rows."""
    notices = {item["kind"]: item for item in document(server, "overview", "run=page")["notices"]}
    assert f"conservation {VIOLATIONS} in 1 step" in notices["routing_violations"]["text"]
    assert f"rank 1 saw {SEEN_SITES} of {EXPECTED_SITES} sites" in notices["coverage"]["text"]
    last = 2 * STEPS - 1
    found = {kind: _rows_behind(server, item) for kind, item in notices.items()}
    assert [(row["step"], row["rank"], row["count"]) for row in found["routing_violations"]] == [
        (last, 0, VIOLATIONS)
    ]
    assert [(row["step"], row["rank"], row["seen_sites"]) for row in found["coverage"]] == [
        (last, 1, SEEN_SITES)
    ]


def _rows_behind(server: CollectorProcess, notice: dict[str, Any]) -> list[dict[str, Any]]:
    query = {
        "query": notice["sql"],
        "default_format": "JSONEachRow",
        "output_format_json_quote_64bit_integers": "0",
        **{f"param_{name}": value for name, value in notice["parameters"].items()},
    }
    return [json.loads(line) for line in server.get(f"/?{urlencode(query)}").body.splitlines()]


def test_epochs_of_the_ledger_come_with_step_and_verdict(server: CollectorProcess) -> None:
    """Newest first, each as far as it got; the list of steps has those whose first step is known."""
    epochs = document(server, "overview", "run=page")["epochs"]
    assert [(epoch["version"], epoch["state"], epoch["verdict"], epoch["step"]) for epoch in epochs] == [
        (3, "announced", "", None),
        (2, "judged", "accepted", STEPS + 4),
    ]
    assert [epoch["version"] for epoch in document(server, "steps", "run=page")["epochs"]] == [2]


@pytest.mark.parametrize(
    ("place", "status", "words"),
    [
        ("step?run=page&step=999", 404, "no joined step 999"),
        ("overview?run=nothing", 404, "no run 'nothing'"),
        ("step?run=page", 400, "step = ''"),
        ("overview", 400, "run is missing"),
        ("steps?run=page&evidence=sure", 400, "evidence = 'sure': one of ambiguous, clear, insufficient"),
        ("steps?run=page&slower_ms=nan", 400, "slower_ms = 'nan'"),
        ("timeline?run=page&step=1&ranks=a", 400, "ranks = 'a'"),
        ("traffic?run=page&from=9-3", 400, "from = '9-3'"),
        ("loads?run=page&mode=train", 404, "no step of forward mode train"),
        ("steps?run=page&text='; DROP TABLE step_verdicts; --".replace(" ", "%20"), 200, '"total":0'),
        ("everything", 404, "no such endpoint"),
    ],
)
def test_bad_requests_are_answered_in_a_sentence(
    server: CollectorProcess, place: str, status: int, words: str
) -> None:
    """A wrong parameter is named, and a value never becomes SQL."""
    answer = server.get(f"/ui/api/{place}")
    assert answer.status == status
    assert words in answer.body.decode()
    if status != 200:
        jsonschema.Draft202012Validator(schema("error")).validate(json.loads(answer.body))


def _open(server: CollectorProcess, path: str, **headers: str) -> Answer:
    return ask(f"{server.http_address}{path}", None, headers)


@pytest.mark.parametrize("path", ["/ui/", "/ui/assets/app.js", "/ui/assets/plotly.min.js", "/ui/api/runs"])
def test_everything_is_served_under_a_strict_policy(server: CollectorProcess, path: str) -> None:
    """Only the collector's own scripts and styles run, nothing inline, and nobody may frame the page."""
    policy = _open(server, path).headers["content-security-policy"]
    assert "unsafe" not in policy
    for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
        assert part in policy


def test_files_are_packed_and_asked_for_once(server: CollectorProcess) -> None:
    """A browser that takes gzip gets it, and one that has the file gets told so."""
    plain = _open(server, "/ui/assets/plotly.min.js")
    packed = _open(server, "/ui/assets/plotly.min.js", **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) * 2 < len(plain.body)
    again = _open(server, "/ui/assets/plotly.min.js", **{"If-None-Match": packed.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert _open(server, "/ui/assets/%2e%2e%2fapi.py").status == 404


def test_a_browser_at_the_root_finds_the_page_and_a_driver_its_sql(server: CollectorProcess) -> None:
    """A bare GET is redirected only where HTML is asked for, and a query never."""
    assert b"<title>moetrace</title>" in _open(server, "/", Accept="text/html").body
    assert _open(server, "/", Accept="*/*").body == b"Ok.\n"
    assert _open(server, "/?query=SELECT%201", Accept="text/html").body == b"1\n"
