"""A store for the collector's page: `python -m page_store STORE_PATH RANKS LAYERS EXPERTS STEPS`.

One simulated run, `page`: STEPS steps of prefill, then STEPS of decode, the first two of each being warm-up.
In prefill one rank is slow in the experts of one layer in every second step; in decode a rank is late
between MoE layers, and experts 0 and 1 are four times as popular as the others. Odd steps of decode are of
cohort `batch`, even ones of `chat`. In the newest step rank 0 contradicts itself and rank 1 misses a wrapped
call. The ledger knows two epochs: 2 was applied and accepted, 3 is announced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetrace_collectors.ledger.chain import LedgerRow, append
from moetrace_collectors.model import JoinedStep, RankStep, ViolationCount
from moetrace_collectors.simulate import START_UNIX_NS, Injection, Noise, SimulatedRun, simulate
from moetrace_schemas.enums import (
    ROUTING_VIOLATION_CODE,
    Cause,
    ForwardMode,
    Phase,
    PlacementEvent,
    RoutingViolation,
)

RUN_ID = "page"
WARMUP_STEPS = 2
COHORTS = ("chat", "batch")
"""Of decode steps in turn."""
VIOLATIONS = 3
SEEN_SITES, EXPECTED_SITES = 7, 8
"""Of the rank that misses a call."""
MAX_GROUP = 64
"""Ranks per expert-parallel group at most."""


def slow_rank(ranks: int) -> int:
    """Slow in `expert_gemm` of `slow_layer`, in prefill."""
    return ranks * 2 // 3


def slow_layer(layers: int) -> int:
    """Where `slow_rank` is slow."""
    return layers // 2


def late_rank(ranks: int) -> int:
    """Late in `outside` of every layer, in decode."""
    return 1 if ranks > 1 else 0


def joined_steps(*, ranks: int, layers: int, experts: int, steps: int) -> Iterator[JoinedStep]:
    """Prefill, then decode."""
    shape = SimulatedRun(
        run_id=RUN_ID,
        num_ranks=ranks,
        ranks_per_node=min(8, ranks),
        ep_size=min(MAX_GROUP, ranks),
        num_layers=layers,
        num_experts=experts,
        num_tokens=2048,
        num_steps=steps,
        warmup_steps=WARMUP_STEPS,
        noise=Noise(spread=0.02),
    )
    prefill = replace(
        shape,
        forward_mode=ForwardMode.PREFILL,
        injections=(
            Injection(
                cause=Cause.DEVICE,
                rank=slow_rank(ranks),
                extension=0.25,
                phase=Phase.EXPERT_GEMM,
                layer=slow_layer(layers),
                every=2,
            ),
        ),
    )
    popularity = np.ones((1, layers, experts))
    popularity[:, :, :2] = 4.0
    decode = replace(
        shape,
        seed=1,
        num_tokens=256,
        forward_mode=ForwardMode.DECODE,
        popularity=popularity,
        injections=(Injection(cause=Cause.OUTSIDE, rank=late_rank(ranks), extension=0.3),),
    )
    first, start = 0, START_UNIX_NS
    for run in (prefill, decode):
        ends = start
        for simulated in simulate(run):
            shifted = tuple(
                replace(
                    rank_step,
                    step=rank_step.step + first,
                    start_unix_ns=rank_step.start_unix_ns - START_UNIX_NS + start,
                )
                for rank_step in simulated.joined.rank_steps
            )
            ends = max(ends, *(step.start_unix_ns + step.duration_ns for step in shifted))
            if run is decode:
                shifted = _told(shifted, newest=simulated.joined.step == steps - 1)
            yield replace(simulated.joined, step=simulated.joined.step + first, rank_steps=shifted)
        first, start = first + steps, ends


def _told(rank_steps: tuple[RankStep, ...], *, newest: bool) -> tuple[RankStep, ...]:
    """With cohort and coverage; and of the newest step, with what is wrong in it."""
    code = ROUTING_VIOLATION_CODE[RoutingViolation.CONSERVATION]
    return tuple(
        replace(
            step,
            cohort=COHORTS[step.step % 2],
            expected_sites=EXPECTED_SITES,
            seen_sites=SEEN_SITES if newest and step.rank == 1 else EXPECTED_SITES,
            violations=(ViolationCount(layer=0, violation=code, count=VIOLATIONS),)
            if newest and step.rank == 0
            else (),
        )
        for step in rank_steps
    )


def ledger_rows(steps: int) -> list[LedgerRow]:
    """Epoch 2 from the fifth decode step on, compared and accepted; epoch 3 announced for a step to come."""
    told = (
        (PlacementEvent.ANNOUNCED, 2, steps + 4, ""),
        (PlacementEvent.APPLIED, 2, steps + 4, ""),
        (PlacementEvent.JUDGED, 2, steps + 4, "accepted"),
        (PlacementEvent.ANNOUNCED, 3, None, ""),
    )
    rows: list[LedgerRow] = []
    for event, version, step, verdict in told:
        row = LedgerRow(
            run_id=RUN_ID,
            sequence=0,
            time_unix_ms=START_UNIX_NS // 1_000_000 + len(rows),
            event=event,
            version=version,
            previous_version=version - 1,
            step=step,
            verdict=verdict,
            policy_version="eplb-1",
            experts_copied=6,
        )
        rows.append(append(rows[-1] if rows else None, row))
    return rows


def fill(path: Path, *, ranks: int, layers: int, experts: int, steps: int) -> None:
    """Migrate the store at `path`, judge every step and write it."""
    from moetrace_collectors.ledger.client_store import ClientLedgerStore
    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.sinks.base import StepResult
    from moetrace_collectors.sinks.clickhouse import ClickHouseSink
    from moetrace_collectors.store import embedded_dsn, open_client, parse_store
    from moetrace_collectors.summary import layer_loads
    from moetrace_collectors.verdict.engine import VerdictEngine

    client = open_client(parse_store(embedded_dsn(path)))
    migrate(client, database="moetrace")
    sink = ClickHouseSink(
        client,
        database="moetrace",
        batch_bytes=1 << 26,
        on_stored=lambda table, rows: None,
        on_lost=lambda table, rows: None,
    )
    engine = VerdictEngine()
    for joined in joined_steps(ranks=ranks, layers=layers, experts=experts, steps=steps):
        sink.take_step(StepResult(joined=joined, verdict=engine.judge(joined), loads=layer_loads(joined)))
        if ranks > MAX_GROUP:
            sink.flush()  # a step of many ranks is millions of rows
    sink.flush()
    for row in ledger_rows(steps):
        ClientLedgerStore(client, database="moetrace").insert(row)
    client.close()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    ranks, layers, experts, steps = (int(number) for number in numbers)
    fill(Path(path), ranks=ranks, layers=layers, experts=experts, steps=steps)
