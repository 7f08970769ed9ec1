"""A query that the embedded engine cannot stop: one long function over one huge array."""

from __future__ import annotations

from pathlib import Path

from integration.collector_process import collector, rows
from moetrace_collectors.testing import SyntheticRun, request

DEPTH = 400
ELEMENTS = 30_000_000
ENDLESS = f"SELECT arraySum(arrayMap(x -> {'lgamma(' * DEPTH}x{')' * DEPTH}, range({ELEMENTS})))"
"""Minutes, in one block of one row; the engine looks at its time limit before and after."""


def test_its_reader_is_answered_and_nothing_waits_for_it(tmp_path: Path) -> None:
    """It keeps a place; other readers and ranks are served, and the stop, which has a deadline, is clean."""
    run = SyntheticRun(run_id="r", world_size=2, num_layers=1)
    config = tmp_path / "collector.toml"
    config.write_text("query_timeout_s = 0.5\nquery_max_concurrent = 2\n")
    with collector(tmp_path / "run", "--config", str(config)) as process:
        answer = process.post(ENDLESS.encode(), path="/", content_type="text/plain")
        assert answer.status == 504, answer.body
        assert answer.headers["x-clickhouse-exception-code"] == "159"
        assert b"a function over one huge array cannot be stopped" in answer.body
        assert b"takes one of 2 places" in answer.body
        assert process.post(b"SELECT 1", path="/", content_type="text/plain").body == b"1\n"
        assert process.send(request(run.step(0))).status == 200
        process.wait_for("moetrace_collector_joined_total", 2)
        assert process.metric("moetrace_collector_joined_total") == 2
        running = b"SELECT count() FROM system.processes WHERE elapsed > 1"
        assert process.post(running, path="/", content_type="text/plain").body == b"1\n", (
            "it is still at work"
        )
        # Soon enough, or this raises; the query would take longer.
        assert process.terminate() == 0
        assert "cut off what did not end in time" in process.said()
    assert rows(tmp_path / "run", "SELECT count() AS n FROM rank_steps FINAL") == [{"n": 2}]
