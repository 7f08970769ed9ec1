"""A disk that refuses is told: once in the log, and on /healthz until it is over."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.testclient import TestClient

from moetrace_collectors.intake import Intake
from moetrace_collectors.receivers.handler import NotDurableError, Wire
from moetrace_collectors.receivers.pages import Pages
from moetrace_collectors.refusals import CALM_NS, SILENT_NS, DiskRefusals
from moetrace_collectors.request_handler import RequestHandler
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.series import SeriesBook
from moetrace_collectors.testing import SyntheticRun, request
from moetrace_collectors.wal.log import Position, WalUnavailableError


class Disk:
    """A journal whose disk may be full."""

    is_full = True

    def append(self, wire: Wire, *, arrived_ns: int) -> Position:
        """As of Journal."""
        if self.is_full:
            raise WalUnavailableError("the disk does not take it: No space left on device")
        return Position(segment=1, offset=0, end=1)

    def commit(self, position: Position) -> None:
        """As of Journal."""


def test_a_full_disk_is_said_once_and_healthz_says_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log with the directory and the error, which are not for all.

    Over with the first request that is taken, or after a silence.
    """
    caplog.set_level(logging.WARNING)
    now_ns = [0]
    refusals = DiskRefusals(tmp_path, clock_ns=lambda: now_ns[0])
    disk = Disk()
    handler = RequestHandler(
        intake=Intake(max_requests=9, max_bytes=2**30, clock_ns=lambda: now_ns[0]),
        metrics=SelfMetrics(SeriesBook()),
        max_world_size=64,
        journal=disk,  # type: ignore[arg-type]
        disk=refusals,
    )
    pages = Pages(
        registry=CollectorRegistry(),
        queries=None,  # type: ignore[arg-type]
        is_healthy=lambda: True,
        trouble=lambda: refusals.trouble,
        on_query_failed=lambda reason: None,
        reload=lambda: None,
    )
    client = TestClient(Starlette(routes=pages.routes()))
    sent = request(SyntheticRun(run_id="r", world_size=2, num_layers=1).step(0))
    assert client.get("/healthz").status_code == 200
    for _ in range(3):
        with pytest.raises(NotDurableError):
            handler.take(sent)
    answer = client.get("/healthz")
    assert (answer.status_code, str(tmp_path) in answer.text) == (503, False)
    assert "see the log of moetrace collect" in answer.text
    [line] = caplog.messages
    assert "requests are not acknowledged" in line
    assert str(tmp_path) in line
    assert "No space left on device" in line

    # Nobody has tried again for a while: a load balancer must not keep the request away that would show it.
    now_ns[0] = SILENT_NS
    assert client.get("/healthz").status_code == 200
    disk.is_full = False
    handler.take(sent)
    assert client.get("/healthz").text == "ok\n"
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "can be written again" in caplog.messages[1]


NO_SPACE = OSError(28, "No space left on device")


def test_a_nearly_full_disk_is_one_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests that fit between others that do not end nothing: one line, and /healthz stands still."""
    caplog.set_level(logging.WARNING)
    now_ns = [0]
    refusals = DiskRefusals(tmp_path, clock_ns=lambda: now_ns[0])
    for _ in range(100):
        refusals.refused(NO_SPACE)
        now_ns[0] += CALM_NS - 1
        refusals.took()
        assert refusals.trouble
    assert len(caplog.messages) == 1
    now_ns[0] += 1
    refusals.took()
    assert not refusals.trouble
    refusals.took()
    assert len(caplog.messages) == 2
    assert "can be written again" in caplog.messages[1]


def test_a_refusal_after_a_silence_is_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Retries are not said again; a refusal when the last is long over is, though nothing came between."""
    caplog.set_level(logging.WARNING)
    now_ns = [0]
    refusals = DiskRefusals(tmp_path, clock_ns=lambda: now_ns[0])
    for _ in range(3):
        refusals.refused(NO_SPACE)
        now_ns[0] += SILENT_NS - 1
    assert len(caplog.messages) == 1
    now_ns[0] += 1
    assert not refusals.trouble
    refusals.refused(NO_SPACE)
    assert len(caplog.messages) == 2
    assert refusals.trouble
