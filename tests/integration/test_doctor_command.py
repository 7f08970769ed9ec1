"""`moetrace doctor` on stored runs: every line has a figure, a query that runs, and a fix where it fails."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from ledger_builders import EVEN, SWAPPED, placement_span, report
from moetrace_collectors.testing import SyntheticRun, request

from .collector_process import collector, moetrace, run_script
from .prometheus_process import PROMETHEUS
from .prometheus_process import prometheus as real_prometheus

ROOT = Path(__file__).parents[2]
CONFIG = {"num_experts_per_tok": 2, "num_local_experts": 16}


def schema() -> dict[str, Any]:
    """The published schema."""
    text = resources.files("moetrace_schemas.json").joinpath("doctor_result.schema.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@contextmanager
def prometheus(rules: list[dict[str, str]]) -> Iterator[str]:
    """A Prometheus that answers with these alert rules."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/api/v1/rules?type=alert"
            body = json.dumps({"status": "success", "data": {"groups": [{"rules": rules}]}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory: 8 ranks on two nodes, two hot experts on rank 0, no placement announced."""
    directory = tmp_path_factory.mktemp("doctor") / "run"
    directory.mkdir()
    run_script("simulated_store", directory / "store")
    return directory


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document, valid against its schema."""
    done = moetrace("doctor", *arguments, "--json")
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    rules = schema()
    jsonschema.Draft202012Validator.check_schema(rules)
    jsonschema.Draft202012Validator(rules).validate(document)
    return done.returncode, document


def test_a_run_with_known_faults(simulated: Path, tmp_path: Path) -> None:
    """Hot experts together, rows across nodes and nothing to overlap fail; the rest passes or is unknown."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    with prometheus([{"name": "MoeRanksMissing", "health": "ok"}]) as address:
        code, document = doctor("--dir", str(simulated), "--config", str(config), "--prometheus", address)
    assert code == 1
    assert {check["name"]: check["status"] for check in document["checks"]} == {
        "instrumentation_coverage": "pass",
        "model_shape": "pass",
        "drops_and_overflow": "pass",
        "topology_known": "pass",
        "all_to_all_percentiles": "unknown",
        "cross_node_share": "fail",
        "hot_experts_on_one_device": "fail",
        "overlap_possible": "fail",
        "prefill_and_decode_apart": "pass",
        "alert_rules_loaded": "pass",
        "rollback_target_present": "unknown",
    }
    counted = [document[name] for name in ("passed", "failed", "unknown")]
    assert counted == [6, 3, 2]
    by_name = {check["name"]: check for check in document["checks"]}
    assert "experts 0, 1 are hot and all on rank 0" in by_name["hot_experts_on_one_device"]["reason"]
    assert "8 ranks on 2 hosts" in by_name["topology_known"]["figure"]
    for check in document["checks"]:
        assert (check["fix"] is None) == (check["status"] == "pass"), check


@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")
def test_the_rules_of_a_real_prometheus_are_counted(simulated: Path, tmp_path: Path) -> None:
    """None before they are loaded; afterwards every alert of the project, all of them evaluating."""
    rules = sorted((ROOT / "dashboards/generated/prometheus").glob("*.yaml"))
    names = [
        rule["alert"]
        for path in rules
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(names) >= 20
    for loaded, status, figure in ((rules, "pass", f"{len(names)} alert"), ([], "fail", "0 alert")):
        with real_prometheus(tmp_path / status, {}, loaded) as server:
            _, document = doctor("--dir", str(simulated), "--prometheus", server.address)
            (check,) = [each for each in document["checks"] if each["name"] == "alert_rules_loaded"]
            assert (check["status"], check["query_language"]) == (status, "http")
            assert check["figure"] == f"{figure} rules of moetrace, 0 not evaluating"
            with urllib.request.urlopen(check["query"], timeout=30) as answer:
                assert json.load(answer)["status"] == "success"


def test_every_query_that_is_printed_runs(simulated: Path) -> None:
    """As a reader would paste it: through `moetrace query`, and it gives rows with the figures' names."""
    _, document = doctor("--dir", str(simulated))
    queries = {
        check["name"]: check["query"] for check in document["checks"] if check["query_language"] == "sql"
    }
    assert len(queries) == 10
    for name, sql in queries.items():
        done = moetrace("query", "--dir", str(simulated), "--format", "JSONEachRow", sql)
        assert done.returncode == 0, (name, done.stderr)
        assert done.stdout.strip(), name
    done = moetrace("doctor", "--dir", str(simulated), "--queries")
    assert all(line in done.stdout for sql in queries.values() for line in sql.splitlines())


def test_figures_leave_warm_up_out_and_say_so(simulated: Path) -> None:
    """The same steps as in every other view: exchanges of the four warm-up steps are in no percentile."""
    text = moetrace("doctor", "--dir", str(simulated)).stdout
    said = re.search(r"Figures: steps 4 to (\d+): (\d+) recorded of (\d+), 4 of warm-up left out", text)
    assert said is not None, text
    assert int(said[2]) == int(said[3]) == int(said[1]) - 3
    exchanges = re.search(r"dispatch: p50 .* ms over (\d+)", text)
    assert exchanges is not None
    assert int(exchanges[1]) % int(said[2]) == 0


def test_a_model_that_is_not_the_configured_one_fails(simulated: Path) -> None:
    """Another top-k, another number of experts, a shared expert that nobody saw."""
    for told, reason in (
        (("--top-k", "3"), "routes a token to 3 experts"),
        (("--experts", "64"), "the config has 64 experts, counted are 16"),
        (("--shared-experts", "1"), "the config has 1 shared expert, none is seen"),
    ):
        _, document = doctor("--dir", str(simulated), *told)
        check = next(check for check in document["checks"] if check["name"] == "model_shape")
        assert check["status"] == "fail"
        assert reason in check["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "nobody"), "holds no run 'nobody'"),
        (("--config", "/nowhere.json"), "/nowhere.json"),
        (("--prometheus", "localhost:9090"), "an address as in http://127.0.0.1:9090 expected"),
        (("--top-k", "-1"), "0 or more expected"),
    ],
)
def test_bad_use_is_exit_code_2(simulated: Path, arguments: tuple[str, ...], message: str) -> None:
    """One line that says what is wrong; never a traceback."""
    done = moetrace("doctor", "--dir", str(simulated), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rollback_target_and_a_mixed_step_through_a_running_collector(tmp_path: Path) -> None:
    """Placements with their maps pass; prefill and decode in one step fail; no Prometheus is unknown."""
    run = SyntheticRun(run_id="live", world_size=4, num_layers=2)
    with collector(tmp_path / "run") as process:
        for step, version, rows in ((0, 1, EVEN), (1, 2, SWAPPED)):
            span = placement_span(report(version, rows, run_id="live", step=step))
            message = ExportTraceServiceRequest(
                resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])]
            )
            assert process.send(message).status == 200
            ranks = [replace(rank, placement_version=version) for rank in run.step(step)]
            process.send(request(ranks))
        process.wait_for("moetrace_collector_joined_total", 8)
        assert process.terminate() == 0
    with collector(tmp_path / "run") as process:
        code, document = doctor("--url", process.http_address, "--prometheus", "http://127.0.0.1:1")
        status = {check["name"]: check["status"] for check in document["checks"]}
        assert status["rollback_target_present"] == "pass"
        assert status["alert_rules_loaded"] == "unknown"
        assert status["prefill_and_decode_apart"] == "pass"
        assert code == (1 if document["failed"] else 0)
        process.terminate()
