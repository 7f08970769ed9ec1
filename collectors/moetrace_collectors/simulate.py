"""Simulated runs with a known truth: ranks x layers x steps as joined steps, with injected causes.

For tests, benchmarks and `moetrace simulate`. Nothing here is measured: every rank has local work, exchanges
start when the last rank arrives, and whoever comes early waits, so that a late rank shows in the waits of
the others exactly as on real machines::

    rank 0  |outside|router|permute|launch|~~~ wait ~~~|transfer|expert_gemm|launch|...
    rank 1  |outside|router|permute ======= slow ======|transfer|expert_gemm|launch|...

Ranks never synchronise at a step's end: one that is late in the tail starts its next step late. The same
`SimulatedRun` always gives the same steps (numpy's PCG64 from `seed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import (
    ExpertCounts,
    FloatArray,
    IntArray,
    JoinedStep,
    PhaseColumns,
    RankStep,
    TrafficRow,
)
from moetrace_collectors.simulated_run import (
    DEVICE_PHASES,
    LAUNCH_NS,
    PHASE_NS,
    Clocks,
    Injection,
    Noise,
    SimulatedRun,
)
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    PHASE_CODE,
    Cause,
    ClosedBy,
    CountKind,
    Phase,
)

__all__ = [
    "DEVICE_PHASES",
    "Clocks",
    "Hiccup",
    "Injection",
    "Noise",
    "SimulatedRun",
    "SimulatedStep",
    "arrivals",
    "simulate",
]

START_UNIX_NS = 1_900_000_000_000_000_000
"""True start of step 0 (in 2030, so that no table's time to live removes simulated rows)."""

# Rows of one layer in order: (phase, is the exchange itself).
_ROWS: tuple[tuple[Phase, bool], ...] = (
    (Phase.OUTSIDE, False),
    (Phase.ROUTER, False),
    (Phase.PERMUTE, False),
    (Phase.DISPATCH, False),
    (Phase.DISPATCH, True),
    (Phase.EXPERT_GEMM, False),
    (Phase.COMBINE, False),
    (Phase.COMBINE, True),
    (Phase.UNPERMUTE, False),
)
_DISPATCH, _GEMM, _COMBINE = 4, 5, 7
_NUM_ROWS = len(_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loads:
    """Where the pairs of one step go."""

    routed: IntArray
    """[layers, ranks, experts]: pairs that each rank routes to each expert."""
    between: IntArray
    """[layers, ranks, group size]: rows that each rank sends to each rank of its group."""
    arrived: IntArray
    """[layers, ranks, experts per rank]: rows that each rank's own experts receive."""

    @property
    def received(self) -> IntArray:
        """[layers, ranks]: rows that each rank's experts receive."""
        received: IntArray = self.arrived.sum(axis=2)
        return received


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiccup:
    """Time that the noise took from one rank in one phase of a step."""

    rank: int
    phase: Phase
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A joined step and the faults that were active in it."""

    joined: JoinedStep
    truth: tuple[Injection, ...]
    hiccups: tuple[Hiccup, ...] = ()
    """What nobody injected and happened all the same, summed by rank and phase."""


def simulate(run: SimulatedRun) -> Iterator[SimulatedStep]:
    """All steps of a run in order."""
    random = np.random.default_rng(run.seed)
    offsets = random.normal(0.0, run.clocks.offset_ns, run.num_ranks)
    drifts = random.normal(0.0, run.clocks.drift_ppm * 1e-6, run.num_ranks)
    now = np.zeros(run.num_ranks)
    for step in range(run.num_steps):
        truth = tuple(injection for injection in run.injections if injection.hits(step))
        loads = _loads(run, _routed(run, random, step, truth))
        began = now.copy()
        ends, now, hiccups = _timeline(run, random, loads, truth, now)
        reading = random.normal(0.0, run.clocks.jitter_ns, run.num_ranks)
        starts = np.rint(offsets + began * (1.0 + drifts) + reading).astype(np.int64) + START_UNIX_NS
        arrives = random.random(run.num_ranks) >= run.missing_chance
        if not arrives.any():
            arrives[0] = True
        rank_steps = tuple(
            _rank_step(run, step, rank, began[rank], ends[rank], int(starts[rank]), loads)
            for rank in np.flatnonzero(arrives).tolist()
        )
        joined = JoinedStep(
            run_id=run.run_id,
            step=step,
            world_size=run.num_ranks,
            rank_steps=rank_steps,
            missing_ranks=tuple(np.flatnonzero(~arrives).tolist()),
            closed_by=ClosedBy.COMPLETE if arrives.all() else ClosedBy.TIMEOUT,
        )
        yield SimulatedStep(joined=joined, truth=truth, hiccups=hiccups)


def arrivals(run: SimulatedRun) -> Iterator[RankStep]:
    """The run's records in the order in which a collector gets them.

    Ranks of a step come in any order, late ones when later steps have come, lost ones never::

        step 0: rank 2, 0, 3        step 1: 3, 1, 0, 2        step 4: 0, 2, 1, 3, and rank 1 of step 0
    """
    random = np.random.default_rng((run.seed, 1))
    late: list[tuple[int, RankStep]] = []
    for simulated in simulate(run):
        records = list(simulated.joined.rank_steps)
        records = [records[i] for i in random.permutation(len(records))]
        for record in records:
            if random.random() < run.late_chance:
                late.append((record.step + run.late_steps, record))
            else:
                yield record
        yield from (record for due, record in late if due <= simulated.joined.step)
        late = [(due, record) for due, record in late if due > simulated.joined.step]
    yield from (record for _, record in late)


def _routed(
    run: SimulatedRun, random: np.random.Generator, step: int, truth: tuple[Injection, ...]
) -> IntArray:
    """[layers, ranks, experts]: pairs that each rank routes to each expert."""
    shape = (run.num_layers, run.num_experts)
    if run.popularity is None:
        popularity = random.lognormal(0.0, run.load_sigma, shape)
    else:
        popularity = run.popularity[step % len(run.popularity)].astype(np.float64)
    popularity = popularity / popularity.sum(axis=1, keepdims=True)
    for injection in truth:
        if injection.cause in (Cause.ROUTING, Cause.PLACEMENT):
            _skew(run, injection, popularity)
    pairs = int(run.mean_rows)
    return np.stack(
        [random.multinomial(pairs, popularity[layer], run.num_ranks) for layer in range(run.num_layers)]
    )


def _skew(run: SimulatedRun, injection: Injection, popularity: FloatArray) -> None:
    """Give the rank the mean share plus a surplus: on one expert (routing), or on all alike (placement).

    The total is fixed, so what one rank has above the mean is the extension itself.
    """
    per_rank = run.num_experts // run.group_size
    place = injection.rank % run.group_size
    mine = slice(place * per_rank, (place + 1) * per_rank)
    layers = range(run.num_layers) if injection.layer is None else [injection.layer]
    surplus_rows = injection.extension * run.calm_step_ns / len(layers) / run.gemm_ns_per_row
    even = 1.0 / run.group_size
    surplus = min(surplus_rows / (run.mean_rows * run.group_size), 0.9 * (1.0 - even))
    for layer in layers:
        own = popularity[layer, mine] * even / popularity[layer, mine].sum()
        popularity[layer] *= (1.0 - even - surplus) / (1.0 - popularity[layer, mine].sum())
        if injection.cause is Cause.ROUTING:
            own[layer % per_rank] += surplus
        else:
            own[:] = (even + surplus) / per_rank
        popularity[layer, mine] = own


def _loads(run: SimulatedRun, routed: IntArray) -> _Loads:
    size = run.group_size
    groups = run.num_ranks // size
    per_group = routed.reshape(run.num_layers, groups, size, run.num_experts).sum(axis=2)
    return _Loads(
        routed=routed,
        between=routed.reshape(run.num_layers, run.num_ranks, size, -1).sum(axis=3),
        arrived=per_group.reshape(run.num_layers, run.num_ranks, -1),
    )


def _timeline(
    run: SimulatedRun,
    random: np.random.Generator,
    loads: _Loads,
    truth: tuple[Injection, ...],
    now: FloatArray,
) -> tuple[FloatArray, FloatArray, tuple[Hiccup, ...]]:
    """End of every row, [ranks, layers x rows], when each rank ends the step, and the hiccups."""
    work, hiccups = _local_work(run, random, loads, truth)
    sent, received = _payloads(run, loads)
    ends = np.zeros((run.num_ranks, run.num_layers, _NUM_ROWS))
    groups = np.arange(run.num_ranks) // run.group_size
    for layer in range(run.num_layers):
        for row, (_, exchange) in enumerate(_ROWS):
            if exchange:
                to, back = (sent, received) if row == _DISPATCH else (received, sent)
                transfer = run.latency_ns + np.maximum(to[layer], back[layer])
                arrived = np.zeros(groups[-1] + 1)
                np.maximum.at(arrived, groups, now)
                now = arrived[groups] + transfer + _link_delay(run, truth, layer, row, groups)
            else:
                now = now + work[:, layer, row]
            ends[:, layer, row] = now
    return ends.reshape(run.num_ranks, -1), now, hiccups


def _local_work(
    run: SimulatedRun, random: np.random.Generator, loads: _Loads, truth: tuple[Injection, ...]
) -> tuple[FloatArray, tuple[Hiccup, ...]]:
    """[ranks, layers, rows]: local work, ns; 0 in exchange rows. And which hiccups are part of it."""
    work = np.zeros((run.num_ranks, run.num_layers, _NUM_ROWS))
    for row, (phase, exchange) in enumerate(_ROWS):
        if not exchange:
            work[:, :, row] = PHASE_NS.get(phase, LAUNCH_NS)
    work[:, :, _GEMM] = run.gemm_ns_per_row * loads.received.T
    lengths = work.copy()
    work *= random.lognormal(0.0, run.noise.spread, work.shape)
    hiccups: tuple[Hiccup, ...] = ()
    if run.noise.hiccups_per_step > 0.0:
        chance = run.noise.hiccups_per_step * lengths / lengths.sum(axis=(1, 2), keepdims=True)
        hit = random.random(work.shape) < chance
        lost = hit * random.exponential(run.noise.hiccup_ns, work.shape)
        work += lost
        hiccups = _by_rank_and_phase(lost)
    for injection in truth:
        if injection.cause in (Cause.DEVICE, Cause.OUTSIDE, Cause.HOST):
            row = _ROWS.index((injection.named_phase, False))
            layers = slice(None) if injection.layer is None else slice(injection.layer, injection.layer + 1)
            delay = injection.extension * run.calm_step_ns * run.group_size / max(run.group_size - 1, 1)
            work[injection.rank, layers, row] += delay / (run.num_layers if injection.layer is None else 1)
    return work, hiccups


def _by_rank_and_phase(lost: FloatArray) -> tuple[Hiccup, ...]:
    by_row = lost.sum(axis=1)
    return tuple(
        Hiccup(rank=rank, phase=_ROWS[row][0], duration_ns=int(by_row[rank, row]))
        for rank, row in np.argwhere(by_row > 0).tolist()
    )


def _payloads(run: SimulatedRun, loads: _Loads) -> tuple[FloatArray, FloatArray]:
    """[layers, ranks] twice: time to send and to receive the dispatch payload at the links' speeds, ns."""
    size = run.group_size
    moved = loads.between.reshape(run.num_layers, -1, size, size) * float(run.row_bytes)
    ranks = np.arange(run.num_ranks).reshape(-1, size)
    same_node = ranks[:, :, None] // run.ranks_per_node == ranks[:, None, :] // run.ranks_per_node
    cost = moved / np.where(same_node, run.bytes_per_ns, run.node_bytes_per_ns)
    return cost.sum(axis=3).reshape(run.num_layers, -1), cost.sum(axis=2).reshape(run.num_layers, -1)


def _link_delay(
    run: SimulatedRun, truth: tuple[Injection, ...], layer: int, row: int, groups: IntArray
) -> FloatArray:
    """[ranks]: what slow links add to one exchange; the whole group waits for the slow sender's rows."""
    delay = np.zeros(run.num_ranks)
    for injection in truth:
        if injection.cause is Cause.LINK and _ROWS[row][0] is injection.named_phase:
            whole = injection.extension * run.calm_step_ns
            if injection.layer is None:
                whole /= run.num_layers
            if injection.layer is None or injection.layer == layer:
                delay[groups == groups[injection.rank]] += whole
    return delay


def _rank_step(
    run: SimulatedRun,
    step: int,
    rank: int,
    began: float,
    ends: FloatArray,
    start_unix_ns: int,
    loads: _Loads,
) -> RankStep:
    offsets = np.rint(np.concatenate([[began], ends]) - began).astype(np.int64)
    layers, num_rows = run.num_layers, run.num_layers * _NUM_ROWS
    between = loads.between[:, rank]
    received = loads.arrived[:, rank].sum(axis=1)
    rows = np.full((layers, _NUM_ROWS), -1, dtype=np.int64)
    rows[:, _DISPATCH] = between.sum(axis=1)
    rows[:, _GEMM] = rows[:, _COMBINE] = received
    payload = np.where(np.isin(np.arange(_NUM_ROWS), [_DISPATCH, _COMBINE]), rows * run.row_bytes, -1)
    zeros = np.zeros(num_rows, dtype=np.int64)
    place = rank % run.group_size
    per_rank = run.num_experts // run.group_size
    arrived = np.zeros((layers, run.num_experts), dtype=np.int64)
    arrived[:, place * per_rank : (place + 1) * per_rank] = loads.arrived[:, rank]
    return RankStep(
        run_id=run.run_id,
        step=step,
        rank=rank,
        microbatch=0,
        world_size=run.num_ranks,
        ep_rank=place,
        ep_size=run.group_size,
        ep_group=rank // run.group_size,
        forward_mode=run.forward_mode,
        sample_period=1,
        warmup=step < run.warmup_steps,
        clock="host",
        duration_ns=int(offsets[-1]),
        start_unix_ns=start_unix_ns,
        host_name=f"node{rank // run.ranks_per_node}",
        phases=PhaseColumns(
            layer=np.repeat(np.arange(layers), _NUM_ROWS),
            phase=np.tile([PHASE_CODE[phase] for phase, _ in _ROWS], layers),
            direction=zeros,
            microbatch=zeros,
            ordinal=zeros,
            stream=zeros,
            flags=np.tile([int(RowFlag.BARRIER) * exchange for _, exchange in _ROWS], layers),
            start_offset_ns=offsets[:-1],
            duration_ns=np.diff(offsets),
            bytes=payload.ravel(),
            rows=rows.ravel(),
        ),
        experts=tuple(
            ExpertCounts(layer=layer, kind=COUNT_KIND_CODE[kind], counts=counts[layer])
            for layer in range(layers)
            for kind, counts in ((CountKind.ROUTED, loads.routed[:, rank]), (CountKind.RECEIVED, arrived))
        ),
        traffic=tuple(
            TrafficRow(
                layer=layer, phase=PHASE_CODE[Phase.DISPATCH], row_bytes=run.row_bytes, rows=between[layer]
            )
            for layer in range(layers)
        ),
    )
