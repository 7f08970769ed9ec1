"""`moetrace dashboards push` against Grafana's HTTP API."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moetrace_dashboards.alerts import alerts
from moetrace_dashboards.build import DASHBOARDS
from moetrace_dashboards.cli import TOKEN_VARIABLE, main
from moetrace_dashboards.config import FOLDER_UID, UIDS, Config
from unit.dashboards.grafana_server import TOKEN, FakeGrafana, grafana

SOURCES = ("--prometheus-url", "http://prometheus:9090", "--clickhouse", "clickhouse:8123")
REAL_URL = os.environ.get("MOETRACE_TEST_GRAFANA_URL", "")


def push(server: FakeGrafana, *options: str, token: str = TOKEN) -> int:
    """Exit code of a push."""
    return main(["push", "--grafana-url", server.url, "--token", token, *options])


def test_a_push_makes_everything_and_a_second_one_nothing() -> None:
    """Data sources, folder and dashboards in it, under their fixed uids; then nothing is written."""
    with grafana() as server:
        assert push(server, *SOURCES) == 0
        assert {source["uid"] for source in server.datasources} == {
            "moetrace-prometheus",
            "moetrace-clickhouse",
        }
        assert set(server.dashboards) == set(UIDS.values())
        assert {board["meta"]["folderUid"] for board in server.dashboards.values()} == {FOLDER_UID}
        written = len(server.writes)
        assert written == 2 + 1 + len(DASHBOARDS)
        assert push(server, *SOURCES) == 0
        assert len(server.writes) == written


def test_a_dry_run_shows_the_difference_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would be created or updated, with a diff of what is there against what is wanted."""
    config = tmp_path / "site.toml"
    config.write_text("all_to_all_p99_budget_s = 0.0125\n")
    with grafana() as server:
        assert push(server, *SOURCES, "--dry-run") == 0
        assert server.writes == []
        assert "would create folder moetrace" in capsys.readouterr().out
        push(server, *SOURCES)
        capsys.readouterr()
        written = len(server.writes)
        assert push(server, *SOURCES, "--config", str(config), "--dry-run") == 0
        said = capsys.readouterr().out
        assert said.startswith("would update dashboard all_to_all\n")
        assert '+                "value": 0.0125' in said
        assert len(server.writes) == written
        assert push(server, *SOURCES, "--config", str(config)) == 0
        assert server.writes[written:] == ["POST /api/dashboards/db"]


def test_alert_rules_are_made_on_demand_once_and_updated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only with --alerts: one rule per alert; a second push finds nothing; a threshold changes one rule."""
    site = tmp_path / "site.toml"
    site.write_text('cross_node_ratio = 0.4\npersistent_for = "60m"\n')
    base = tmp_path / "base.toml"
    base.write_text('persistent_for = "60m"\n')
    with grafana() as server:
        push(server, *SOURCES)
        assert server.alert_rules == {}
        assert push(server, *SOURCES, "--alerts", "--config", str(base)) == 0
        assert set(server.alert_rules) == {alert.name for alert in alerts(Config())}
        written = len(server.writes)
        assert push(server, *SOURCES, "--alerts", "--config", str(base)) == 0
        assert len(server.writes) == written
        capsys.readouterr()
        assert push(server, *SOURCES, "--alerts", "--config", str(site), "--dry-run") == 0
        said = capsys.readouterr().out
        assert "would update alert rule MoeCrossNodeRatioHigh" in said
        assert "> 0.4" in said
        assert len(server.writes) == written
        assert push(server, *SOURCES, "--alerts", "--config", str(site)) == 0
        rules = [path for path in server.writes[written:] if "alert-rules" in path]
        assert rules == ["PUT /api/v1/provisioning/alert-rules/MoeCrossNodeRatioHigh"]


def test_alert_rules_use_the_data_source_that_is_there() -> None:
    """Without --prometheus-url the rules ask the Prometheus that Grafana has already."""
    with grafana() as server:
        server.datasources += [
            {"uid": "site-prometheus", "type": "prometheus", "name": "P", "access": "proxy"},
            {
                "uid": "site-clickhouse",
                "type": "grafana-clickhouse-datasource",
                "name": "C",
                "access": "proxy",
            },
        ]
        assert push(server, "--alerts") == 0
        asked = {rule["data"][0]["datasourceUid"] for rule in server.alert_rules.values()}
        assert asked == {"site-prometheus"}


def test_a_data_source_that_moved_is_updated() -> None:
    """Only the one whose address differs; settings that Grafana added do not count as a difference."""
    with grafana() as server:
        push(server, *SOURCES)
        written = len(server.writes)
        assert push(server, "--prometheus-url", "http://other:9090", *SOURCES[2:]) == 0
        assert server.writes[written:] == ["PUT /api/datasources/uid/moetrace-prometheus"]
        assert server.datasources[0]["url"] == "http://other:9090"


def test_placement_epochs_become_annotations_that_follow_the_ledger() -> None:
    """One per run and epoch, at its first step, with diff and verdict; a second push adds none, a later
    verdict changes the text and makes no second one.
    """
    epoch = {
        "run_id": "r", "placement": 4, "time_ms": "1900000000000", "is_announced": 1, "before": 3,
        "experts_copied": 2, "copied_bytes": 3_000_000_000, "replicas_added": 8, "sentence": "",
    }  # fmt: skip
    bare = {**epoch, "placement": 5, "is_announced": 0, "experts_copied": None, "copied_bytes": None}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(json.dumps(row) + "\n" for row in (epoch, bare)).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    options = (*SOURCES, "--collector", f"http://127.0.0.1:{collector.server_port}")
    changed = "run r: placement 4\nafter placement 3: 2 experts copied (3 GB), +8 replicas\n"
    told = "run r: placement 5\nnobody announced its map\nnot judged yet"
    try:
        with grafana() as server:
            for _ in range(2):
                assert push(server, *options) == 0
            assert [(note["time"], note["text"], note["tags"]) for note in server.annotations] == [
                (1_900_000_000_000, f"{changed}not judged yet", ["moetrace", "placement"]),
                (1_900_000_000_000, told, ["moetrace", "placement"]),
            ]
            epoch["sentence"] = "regressed -> roll back to version 3; decode: step_p95 +20 %"
            written = len(server.writes)
            for _ in range(2):
                assert push(server, *options) == 0
            assert server.writes[written:] == ["PATCH /api/annotations/1"]
            assert [note["text"] for note in server.annotations] == [f"{changed}{epoch['sentence']}", told]
    finally:
        collector.shutdown()
        collector.server_close()


def test_placement_epochs_are_asked_for_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collector that wants a token gets MOETRACE_TOKEN_FILE's; without it one line says what to set."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    options = (*SOURCES, "--collector", f"http://127.0.0.1:{collector.server_port}")
    secret = tmp_path / "token"
    try:
        with grafana() as server:
            assert push(server, *options) == 2
            assert "set MOETRACE_TOKEN or MOETRACE_TOKEN_FILE" in capsys.readouterr().err
            secret.write_text("right\n")
            monkeypatch.setenv("MOETRACE_TOKEN_FILE", str(secret))
            assert push(server, *options) == 0
            monkeypatch.setenv("MOETRACE_TOKEN_FILE", str(tmp_path / "none"))
            assert push(server, *options) == 2
            assert "a file with one token expected" in capsys.readouterr().err
    finally:
        collector.shutdown()
        collector.server_close()


@pytest.mark.parametrize(
    ("version", "token", "options", "message"),
    [
        ("11.6.0", "wrong", SOURCES, "refuses the token: make a service account token"),
        ("11.6.0", TOKEN, (), "no data source of type prometheus in"),
        ("11.6.0", TOKEN, SOURCES[:2], "no data source of type grafana-clickhouse-datasource in"),
        ("10.4.2", TOKEN, SOURCES, "Grafana 10.4.2 at"),
        ("", TOKEN, SOURCES, "does not answer as Grafana does"),
        ("11.6.0", TOKEN, (*SOURCES[:2], "--clickhouse", "nowhere"), "host:port expected"),
        ("11.6.0", TOKEN, (*SOURCES, "--collector", "http://127.0.0.1:1"), "no collector answers"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    version: str, token: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad token, a missing data source, an old version, ...: exit code 2 before the first change."""
    with grafana(version) as server:
        assert push(server, *options, token=token) == 2
        said = capsys.readouterr().err
        assert message in said
        assert (said.startswith("moetrace: "), said.count("\n")) == (True, 1)
        assert server.writes == []


def test_without_a_token_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says both ways to give one."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main(["push", "--grafana-url", "http://127.0.0.1:1"]) == 2
    assert TOKEN_VARIABLE in capsys.readouterr().err


@pytest.mark.skipif(not REAL_URL, reason="MOETRACE_TEST_GRAFANA_URL is not set")
def test_a_real_grafana_takes_it_and_is_then_current(capsys: pytest.CaptureFixture[str]) -> None:
    """With a real Grafana (and MOETRACE_GRAFANA_TOKEN): push, then nothing is left to do."""
    arguments = ["push", "--grafana-url", REAL_URL, *SOURCES, "--alerts"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert "is current" in capsys.readouterr().out
