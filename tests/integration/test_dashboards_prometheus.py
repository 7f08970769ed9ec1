"""Every PromQL panel on a real Prometheus that scrapes a real collector and a traced process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from integration.collector_process import ROOT, CollectorProcess, collector
from integration.prometheus_process import PROMETHEUS, Prometheus, free_port, prometheus
from ledger_builders import EVEN, placement_span, report
from moetrace_collectors.model import ExpertCounts, RankStep
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_dashboards.build import GENERATED
from moetrace_dashboards.queries import promql, rules
from moetrace_schemas.enums import COUNT_KIND_CODE, CountKind, ForwardMode, Phase

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs the Debian package prometheus")

RUN = SyntheticRun(run_id="r", slow_rank=2, slow_layer=1, slow_ns=3_000_000, forward_mode=ForwardMode.DECODE)
WIDE = SyntheticRun(run_id="wide", num_experts=64)
"""Does not fit the series budget below."""
SERIES_BUDGET = 20
FEED_S = 16.0
STEPS_PER_S = 20
MISSING_EVERY = 25
"""In one step of so many, rank 3 is missing."""
VARIABLES = {
    "$__rate_interval": "10s",
    "$__interval": "5s",
    "$__range": "1m",
    "$run": RUN.run_id,
    "$forward_mode": "(train|prefill|decode|mixed)",
    "$layer": "(0|1)",
    "$model_version": ".*",
}
QUIET_WHEN_HEALTHY = {
    "Store trouble",
    "Tracer: steps dropped",
    "Tracer: faults",
    "Changes judged in an hour",
    "Routing that contradicts itself, by reason",
}
"""Panels of counters that do not exist until something happens; promtool tests have them with data."""


def expand(expr: str) -> str:
    """PromQL as Grafana sends it."""
    for variable, value in sorted(VARIABLES.items(), key=lambda pair: -len(pair[0])):
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


def prom_panels() -> Iterator[tuple[str, str]]:
    """(dashboard: title, expression) of every PromQL of a panel, variable or annotation, as committed."""
    for path in sorted((GENERATED / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                if "expr" in target:
                    yield panel["title"], target["expr"]
        for note in board["annotations"]["list"]:
            yield note["name"], note["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                selector = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
                assert selector, variable["query"]
                yield variable["label"], f"count by ({selector[2]}) ({selector[1]})"


def rank_steps(step: int, placement: int) -> list[RankStep]:
    """Two ranks to a host, some padding, now and then a rank missing."""
    padding = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.PADDING], counts=np.array([7, 0]))
    ranks = [
        replace(
            rank,
            host_name=f"host-{rank.rank // 2}",
            placement_version=placement,
            tracer_ns=20_000,
            experts=(*rank.experts, padding),
        )
        for rank in RUN.step(step)
    ]
    return ranks[:3] if step % MISSING_EVERY == MISSING_EVERY - 1 else ranks


def feed(process: CollectorProcess, until: threading.Event) -> None:
    """Send steps at an even pace."""
    announced = ScopeSpans(spans=[placement_span(report(4, EVEN, run_id="r"))])
    process.send(ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[announced])]))
    started, step = time.monotonic(), 0
    while not until.wait(max(0.0, started + step / STEPS_PER_S - time.monotonic())):
        # By time and not by step: a loaded machine sends fewer steps until the tests ask.
        placement = 4 if time.monotonic() < started + FEED_S / 2 else 5
        process.send(request(rank_steps(step, placement)))
        process.send(request(WIDE.step(step)))
        step += 1


@contextmanager
def traced_process(endpoint: str) -> Iterator[str]:
    """A process under the real tracer; yields where its metrics are."""
    port = free_port()
    paths = [str(ROOT), str(ROOT / "schemas")]
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("traced_process.py")), endpoint, str(port)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after some seconds of steps, which go on while the tests ask."""
    directory = tmp_path_factory.mktemp("prometheus")
    options = directory / "collector.toml"
    options.write_text(f"series_budget = {SERIES_BUDGET}\njoin_timeout_s = 0.5\n")
    stop = threading.Event()
    with (
        collector(directory / "run", "--config", str(options)) as process,
        traced_process(process.http_address) as traced,
        prometheus(
            directory,
            {"moetrace": process.http_address.removeprefix("http://"), "ranks": traced},
            sorted((GENERATED / "prometheus").glob("*.yaml")),
        ) as running,
    ):
        feeder = threading.Thread(target=feed, args=(process, stop))
        feeder.start()
        try:
            time.sleep(FEED_S)
            yield running
        finally:
            stop.set()
            feeder.join()


@pytest.mark.parametrize(("title", "expr"), sorted(set(prom_panels())))
def test_prometheus_runs_every_panel_and_returns_data(server: Prometheus, title: str, expr: str) -> None:
    """No expression of a panel, variable or annotation is wrong, and none is empty on a run that has it."""
    found = server.recent(expand(expr))
    assert found or title in QUIET_WHEN_HEALTHY


@pytest.mark.parametrize("rule", rules.RECORDING_RULES, ids=lambda rule: str(rule.record))
def test_every_recording_rule_has_data(server: Prometheus, rule: rules.RecordingRule) -> None:
    """Each recorded series exists; the only rule about lost pairs has nothing to record here."""
    found = server.instant(rule.record)
    assert bool(found) == (rule.record != rules.LOST_PAIRS)


def test_the_frontier_adds_up_to_the_step(server: Prometheus) -> None:
    """Phases on the critical path, summed, are the duration of the steps that were sent."""
    expected_s = RUN.step(0)[0].duration_ns / 1e9
    assert server.value(f"sum({expand(promql.FRONTIER.expr)})") == pytest.approx(expected_s, rel=0.1)


def test_the_slow_rank_is_the_one_that_is_named(server: Prometheus) -> None:
    """Rank 2 in expert_gemm: nearly all steps name it, and it is worth 2.25 ms of each."""
    shares = {
        (sample["metric"]["rank"], sample["metric"]["phase"]): float(sample["value"][1])
        for sample in server.instant(expand(promql.CRITICAL_STEPS.expr))
    }
    assert max(shares, key=shares.__getitem__) == ("2", Phase.EXPERT_GEMM.value)
    assert shares["2", "expert_gemm"] > 0.8
    worth = server.instant(expand(promql.WORTH.expr))
    assert worth[0]["metric"] == {"rank": "2", "phase": "expert_gemm"}
    per_step = server.value(
        'moetrace_worth_seconds_total{run_id="r", rank="2"} '
        '/ on (run_id) sum by (run_id) (moetrace_critical_steps_total{run_id="r", rank="2"})'
    )
    assert per_step == pytest.approx(0.00225, rel=0.05)


def test_loads_travel_and_coverage_are_what_was_sent(server: Prometheus) -> None:
    """Even experts; a quarter of the rows stays on its rank, a quarter on its host; every site fires."""
    for sample in server.instant(expand(promql.EXPERT_IMBALANCE.expr)):
        assert float(sample["value"][1]) == pytest.approx(1.0)
    scopes = {
        sample["metric"]["scope"]: float(sample["value"][1])
        for sample in server.instant(expand(promql.ROWS_BY_SCOPE.expr))
    }
    assert scopes["same_rank"] == pytest.approx(0.25, abs=0.02)
    assert scopes["same_node"] == pytest.approx(0.25, abs=0.02)
    assert scopes["cross_node"] == pytest.approx(0.5, abs=0.02)
    assert server.value(promql.SITE_COVERAGE.expr) == 1.0


def test_exchanges_are_counted_apart_from_waits(server: Prometheus) -> None:
    """100 us of transfer each: p99 within its bucket, and the share of the step that this makes."""
    for query in promql.EXCHANGE_SECONDS:
        for sample in server.instant(expand(query.expr)):
            assert 0 < float(sample["value"][1]) <= 0.0002
    share = server.value(expand(promql.ALL_TO_ALL_SHARE.expr))
    assert share == pytest.approx(4 * 100_000 / RUN.step(0)[0].duration_ns, rel=0.15)


def test_tracers_cost_is_over_the_steps_that_say_it(server: Prometheus) -> None:
    """20 us of each rank's step, over the duration of those steps; the traced process says its own too."""
    share = server.value(expand(promql.TRACER_COST.expr))
    assert share == pytest.approx(20_000 / RUN.step(0)[0].duration_ns, rel=0.05)
    assert server.value("moetrace_self_model_thread_seconds_total") > 0


def test_transfers_of_a_group_come_with_its_hosts(server: Prometheus) -> None:
    """100 us an exchange in the one group, which spans two hosts."""
    for sample in server.instant(expand(promql.GROUP_TRANSFER.expr)):
        assert (sample["metric"]["ep_group"], sample["metric"]["hosts"]) == ("0", "host-0,host-1")
        assert float(sample["value"][1]) == pytest.approx(0.0001, rel=0.05)


def test_the_rollback_target_is_the_placement_before(server: Prometheus) -> None:
    """Placement 5 is in use, 4 was before it."""
    assert server.value('moetrace_placement_version{run_id="r"}') == 5
    assert server.value('moetrace_placement_previous_version{run_id="r"}') == 4
