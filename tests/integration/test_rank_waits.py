"""Waits of exchange kernels on their whole way: buffers of two ranks, wire, join, store, recipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.collector_process import collector, moetrace, rows
from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.otlp import OtlpEmitter
from moetrace.instrument import wait_stats
from moetrace.testing import FakeTime
from moetrace.timing.clock import HostClock
from moetrace.tracer import Tracer
from unit.moetrace import deep_ep_package as deep_ep

RANKS, STEPS = 2, 3
WAITS = {0: [0, 2**50 + 1], 1: [7, 3]}
"""What one dispatch of each rank waits for rows of each rank; a combine waits twice that."""
IDS, X = torch.tensor([[0, 1]]), torch.ones(1, 2)


def run_rank(rank: int, endpoint: str, package: Any) -> None:
    """Three steps of one layer that exchanges by the low-latency kernels."""
    config = Config.load({"run_id": "waits", "endpoint": endpoint, "wait_stats": True, "warmup_steps": 0}, {})
    context = RankContext(
        run_id="waits",
        rank=rank,
        world_size=RANKS,
        ep_rank=rank,
        ep_size=RANKS,
        ep_group=0,
        host_name="host",
    )
    tracer = Tracer(config, context, [], HostClock(FakeTime().now_ns))
    tracer.drain.emitters.append(OtlpEmitter(lambda: tracer, tracer.metrics, config))
    buffer = package.Buffer(FakeTime(), deep_ep.Arriving([[0]], 1, rank, RANKS))
    buffer.waits = torch.tensor(WAITS[rank])
    router = tracer.wrap(router=lambda: IDS, layer=0, num_experts=RANKS).router
    for _ in range(STEPS):
        with tracer.step():
            router()
            _, _, handle, _, hook = buffer.low_latency_dispatch(X, IDS, 8, RANKS, return_recv_hook=True)
            hook()
            buffer.low_latency_combine(x=X, topk_idx=IDS, topk_weights=X, handle=handle)
    assert tracer.guard.errors == {}
    assert tracer.shutdown(30), tracer.metrics.losses()


def test_waits_of_two_ranks_are_stored_to_the_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per step, phase, waiting rank and rank waited for; rows received beside them; a recipe names it."""
    package = deep_ep.package(deep_ep.Buffer)
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    monkeypatch.setattr(wait_stats, "_tensors", type(wait_stats._tensors)())
    with collector(tmp_path) as process:
        for rank in range(RANKS):
            run_rank(rank, process.http_address, package)
        assert process.terminate() == 0
    stored = rows(
        tmp_path,
        "SELECT step, phase, ep_rank, waited_for, cycles FROM rank_waits FINAL WHERE run_id = 'waits'",
    )
    found = {
        (int(r["step"]), r["phase"], int(r["ep_rank"]), int(r["waited_for"])): int(r["cycles"])  # type: ignore[call-overload]
        for r in stored
    }
    assert found == {
        (step, phase, rank, late): cycles * times
        for step in range(STEPS)
        for phase, times in (("dispatch", 1), ("combine", 2))
        for rank in range(RANKS)
        for late, cycles in enumerate(WAITS[rank])
    }
    received = rows(
        tmp_path,
        "SELECT rank, expert, sum(count) AS number FROM expert_loads FINAL WHERE run_id = 'waits' "
        "AND count_kind = 'received' AND count > 0 GROUP BY rank, expert ORDER BY rank",
    )
    assert [(r["rank"], r["expert"], int(r["number"])) for r in received] == [  # type: ignore[call-overload]
        (rank, rank, STEPS) for rank in range(RANKS)
    ]
    done = moetrace(
        *("query", "--dir", str(tmp_path), "--cookbook", "kernel_waits", "--param", "rank=1"),
        *("--format", "JSONEachRow"),
    )
    assert done.returncode == 0, done.stderr
    answer = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["phase"], a["waited_for_rank"], int(a["waited_cycles"])) for a in answer] == [
        ("combine", 0, 7 * 2 * STEPS),
        ("dispatch", 0, 7 * STEPS),
    ]
