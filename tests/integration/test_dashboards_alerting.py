"""The whole way of an alert: real ranks, a fault, collector, Prometheus, Alertmanager, webhook."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from integration.collector_process import collector
from integration.prometheus_process import ALERTMANAGER, PROMETHEUS, alertmanager, prometheus
from moetrace_collectors.demo_processes import RankProcesses, make_plan
from moetrace_dashboards import build
from moetrace_schemas.enums import Phase

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="needs the Debian packages prometheus and prometheus-alertmanager",
    ),
]
RANKS, STEPS, SLOW_RANK = 2, 60, 1
ALERT = "MoeRankPersistentlyCritical"
DEADLINE_S = 60.0


class Webhook(HTTPServer):
    """Keeps what Alertmanager posts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.alerts: list[dict[str, Any]] = []

    def wait_for(self, name: str, status: str) -> dict[str, Any]:
        """The first alert of this name and status."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for alert in list(self.alerts):
                if (alert["labels"]["alertname"], alert["status"]) == (name, status):
                    return alert
            time.sleep(0.2)
        raise AssertionError(f"no {name} {status} in {self.alerts}")


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        """Take one notification."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.alerts += body["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


def test_a_slow_rank_wakes_somebody_with_its_rank_and_phase(tmp_path: Path) -> None:
    """A delay in one rank's experts arrives at the webhook as an alert that names rank and phase.

    Only the time an alert must hold is shorter than what is committed, so that the test ends.
    """
    settings = tmp_path / "quick.toml"
    settings.write_text('persistent_for = "3s"\n')
    assert build.main(["--config", str(settings), "--out", str(tmp_path / "generated")]) == 0
    plan = make_plan(
        "olmoe", RANKS, STEPS, [f"rank={SLOW_RANK},phase={Phase.EXPERT_GEMM.value},delay_ms=100"]
    )
    webhook = Webhook()
    threading.Thread(target=webhook.serve_forever, daemon=True).start()
    try:
        with (
            collector(tmp_path / "run") as process,
            alertmanager(tmp_path / "alertmanager", f"http://127.0.0.1:{webhook.server_port}/") as pager,
            prometheus(
                tmp_path / "prometheus",
                {"moetrace": process.http_address.removeprefix("http://")},
                sorted((tmp_path / "generated" / "prometheus").glob("*.yaml")),
                pager,
            ),
        ):
            ranks = RankProcesses(
                tmp_path, plan, run_id="alerting", endpoint=process.http_address, sample="1/1"
            )
            runner = threading.Thread(target=ranks.run, args=(lambda steps: None,))
            runner.start()
            alert = webhook.wait_for(ALERT, "firing")
            runner.join()
    finally:
        webhook.shutdown()
        webhook.server_close()
    assert alert["labels"] == {
        "alertname": ALERT,
        "severity": "warning",
        "run_id": "alerting",
        "rank": str(SLOW_RANK),
        "phase": "expert_gemm",
    }
    assert alert["annotations"]["summary"] == "Rank 1 in expert_gemm extends the steps of run alerting"
    assert alert["annotations"]["runbook_url"] == f"dashboards/runbooks/{ALERT}.md"
    quiet = {"MoeRanksMissing", "MoeTokensDropped", "MoeStoreUnreachable", "MoeCollectorLagging"}
    assert not quiet & {found["labels"]["alertname"] for found in webhook.alerts}
