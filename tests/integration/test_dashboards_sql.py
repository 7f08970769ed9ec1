"""Every SQL panel on the real ClickHouse engine, over a run with known answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from integration.collector_process import CollectorProcess, collector
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_dashboards.build import GENERATED
from moetrace_dashboards.queries.sql import PLACEMENT_EPOCHS
from moetrace_schemas.clickhouse.render import TIME_COLUMNS
from moetrace_schemas.enums import ForwardMode, Phase

NUM_STEPS = 40
CHANGED_AT = 20
RUN = SyntheticRun(
    run_id="sql",
    world_size=4,
    num_layers=2,
    num_experts=8,
    slow_rank=2,
    slow_layer=1,
    slow_phase=Phase.EXPERT_GEMM,
    slow_ns=3_000_000,
    forward_mode=ForwardMode.DECODE,
)
FROM_S = int(time.time()) - 3600
"""The collector's own events are of now, the run's steps of its start."""
TO_S = RUN.start_unix_ns // 10**9 + 3600
VARIABLES = {
    "${run}": RUN.run_id,
    "${forward_mode:singlequote}": "'train','prefill','decode','mixed'",
    "${layer:csv}": "0,1",
    "${step}": "",
}
INTERVAL_S = 15
EPOCHS = "placement epochs of a push"


def expand(sql: str) -> str:
    """What Grafana's ClickHouse data source sends: variables first, then its macros (version 4)."""
    for variable, value in VARIABLES.items():
        sql = sql.replace(variable, value)
    sql = re.sub(
        r"\$__timeFilter\((\w+)\)",
        rf"\1 >= toDateTime({FROM_S}) AND \1 <= toDateTime({TO_S})",
        sql,
    )
    sql = re.sub(
        r"\$__timeInterval\((\w+)\)",
        rf"toStartOfInterval(toDateTime(\1), INTERVAL {INTERVAL_S} second)",
        sql,
    )
    assert "$" not in sql, sql
    return sql


def sql_panels() -> Iterator[tuple[str, str]]:
    """(title, SQL) of every panel on ClickHouse, as committed."""
    for path in sorted((GENERATED / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                if "rawSql" in target:
                    yield panel["title"], target["rawSql"]


PANELS = dict(sql_panels())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """A collector with 40 steps of 4 ranks; the placement changes at step 20."""
    with collector(tmp_path_factory.mktemp("sql")) as process:
        for step in range(NUM_STEPS):
            version = 1 if step < CHANGED_AT else 2
            ranks = [replace(rank, placement_version=version) for rank in RUN.step(step)]
            assert process.send(request(ranks)).status == 200
        # The sink writes all tables of a batch before it counts the verdicts' rows.
        wait_for_rows(process, "SELECT count() AS n FROM step_verdicts FINAL", NUM_STEPS)
        yield process


@pytest.fixture(scope="module")
def answers(filled: CollectorProcess) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows of every SQL panel."""
    found = {title: ask_sql(filled, expand(sql)) for title, sql in PANELS.items()}
    return {**found, EPOCHS: ask_sql(filled, PLACEMENT_EPOCHS)}


def ask_sql(process: CollectorProcess, sql: str) -> list[dict[str, Any]]:
    """Rows, as a ClickHouse client gets them from the collector."""
    answer = process.post(
        sql.encode(), path="/?default_format=JSONEachRow&database=moetrace", content_type="text/plain"
    )
    assert answer.status == 200, (sql, answer.body.decode())
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def wait_for_rows(process: CollectorProcess, sql: str, number: int) -> None:
    """Wait until what was sent is stored; the assertions after it say what is wrong if not."""
    deadline = time.monotonic() + 20
    while int(ask_sql(process, sql)[0]["n"]) < number and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize("title", sorted(PANELS))
def test_the_engine_runs_every_panel_and_returns_rows(
    title: str, answers: dict[str, list[dict[str, Any]]]
) -> None:
    """No panel's SQL fails, and none is empty over a run that has what it shows."""
    assert answers[title]


@pytest.mark.parametrize("title", sorted(PANELS))
def test_a_panel_reads_no_more_than_its_run_and_its_time(title: str, filled: CollectorProcess) -> None:
    """Both conditions reach the indexes of every table that it reads, so that a month of runs costs no hour.

    Events are in order of time, not of runs.
    """
    plan = ask_sql(filled, f"EXPLAIN indexes = 1, pretty = 0 {expand(PANELS[title])}")
    _, *reads = re.split(r"ReadFromMergeTree \(moetrace\.", "\n".join(row["explain"] for row in plan))
    assert reads
    for read in reads:
        table = read.partition(")")[0]
        assert f"run_id in ['{RUN.run_id}', '{RUN.run_id}']" in read or table == "collector_events", read
        if "$__timeFilter" in PANELS[title]:
            assert f"({TIME_COLUMNS[table]} in [" in read, read


def test_the_slow_rank_is_on_top(answers: dict[str, list[dict[str, Any]]]) -> None:
    """3 ms on one of four ranks is worth 2.25 ms a step, in its layer and phase, with its cause."""
    top = answers["Suspects with layer and cause"][0]
    assert (top["rank"], top["layer"], top["phase"], top["cause"]) == ("2", "1", "expert_gemm", "device")
    assert top["worth"] / int(top["steps"]) == pytest.approx(0.00225, rel=0.05)
    worst = answers["Worst steps"][0]
    assert (worst["rank"], worst["phase"], len(worst["trace_id"])) == ("2", "expert_gemm", 32)
    cells = {
        (row["layer"], row["phase"]): row["extension"] for row in answers["Extension by layer and phase"]
    }
    assert max(cells, key=cells.__getitem__) == ("1", "expert_gemm")
    assert cells["1", "expert_gemm"] == pytest.approx(NUM_STEPS * 0.00225, rel=0.05)


def test_one_step_shows_who_was_waited_for(answers: dict[str, list[dict[str, Any]]]) -> None:
    """In the exchange after the slow phase the slow rank's own time is the shortest."""
    times = {(row["rank"], row["part"]): row["duration"] for row in answers["One step, rank by rank"]}
    combine = {rank: time for (rank, part), time in times.items() if part == "combine (exchange)"}
    assert min(combine, key=combine.__getitem__) == "2"
    assert times["2", "expert_gemm"] == pytest.approx(0.0036, rel=0.05)


def test_loads_are_over_their_layers_mean(answers: dict[str, list[dict[str, Any]]]) -> None:
    """An even run has 1 everywhere, over experts and over ranks; both experts of each rank are activated."""
    by_expert = answers["Load by layer and expert ($forward_mode)"]
    assert len(by_expert) == 2 * 8
    assert all(row["load"] == pytest.approx(1.0) for row in by_expert)
    by_rank = answers["Load by layer and rank"]
    assert {(row["layer"], row["rank"], row["load"]) for row in by_rank} == {
        (layer, rank, 1.0) for layer in "01" for rank in "0123"
    }
    assert {row["activated"] for row in answers["Activated experts per rank"]} == {2}
    for row in answers["Hot and dead experts"]:
        assert (int(row["experts"]), int(row["dead"]), row["forward_mode"]) == (8, 0, "decode")


def test_traffic_and_bytes_are_what_was_sent(answers: dict[str, list[dict[str, Any]]]) -> None:
    """256 rows from each rank to each, per step and layer; 16 KiB per rank and exchange."""
    assert {
        (row["source"], row["destination"]): int(row["rows_sent"])
        for row in answers["Rows from rank to rank"]
    } == {(a, b): NUM_STEPS * 2 * 256 for a in "0123" for b in "0123"}
    sizes = answers["Bytes by size of exchange"]
    assert {(row["phase"], row["at_least"], row["exchanges"]) for row in sizes} == {
        (phase, "16.00 KiB", str(NUM_STEPS * 4 * 2)) for phase in ("dispatch", "combine")
    }
    slowest = answers["Slowest exchanges by layer"]
    assert all(row["p50"] == pytest.approx(0.0001) for row in slowest)


def test_placements_are_told_apart(answers: dict[str, list[dict[str, Any]]]) -> None:
    """Steps before and after the change; no replica moved; every expert in use is on one rank."""
    assert [(row["placement"], row["steps"]) for row in answers["Before and after"]] == [
        ("1", "20"),
        ("2", "20"),
    ]
    assert {int(row["replicas_that_appeared"]) for row in answers["Replicas that appeared"]} == {0}
    assert {int(row["replicas"]) for row in answers["Use of replicas"]} == {1}


def test_a_push_finds_the_first_step_of_each_placement(answers: dict[str, list[dict[str, Any]]]) -> None:
    """One row per run and epoch, at the earliest start over ranks; nobody announced a map here."""
    start_ms = RUN.start_unix_ns // 10**6
    assert [(row["run_id"], row["placement"], row["time_ms"]) for row in answers[EPOCHS]] == [
        ("sql", 1, str(start_ms)),
        ("sql", 2, str(start_ms + CHANGED_AT * 10)),
    ]
    for row in answers[EPOCHS]:
        assert (int(row["is_announced"]), row["experts_copied"], row["sentence"]) == (0, None, "")
