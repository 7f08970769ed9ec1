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
from dataclasses import dataclass, field, replace

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
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    PHASE_CODE,
    Cause,
    ClosedBy,
    CountKind,
    ForwardMode,
    Phase,
)

START_UNIX_NS = 1_900_000_000_000_000_000
"""True start of step 0 (in 2030, so that no table's time to live removes simulated rows)."""

PHASE_NS: dict[Phase, float] = {
    Phase.OUTSIDE: 400_000.0,
    Phase.ROUTER: 40_000.0,
    Phase.PERMUTE: 60_000.0,
    Phase.UNPERMUTE: 50_000.0,
}
"""Local work per layer that does not depend on rows, ns."""

LAUNCH_NS = 8_000.0
"""Host time before each exchange (rows of phase dispatch and combine without flag BARRIER)."""

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
class Noise:
    """What no one injected: spread of work, and a scheduler that takes cores away."""

    spread: float = 0.02
    """Log-normal sigma of every interval of local work."""
    hiccups_per_step: float = 0.0
    """Expected number of scheduling hiccups of each rank per step."""
    hiccup_ns: float = 0.0
    """Mean length of a hiccup (exponential); it hits an interval in proportion to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """How wrong the ranks' unix clocks are. Durations are exact: monotonic clocks drift far less."""

    offset_ns: float = 0.0
    """Standard deviation of a rank's constant offset."""
    drift_ppm: float = 0.0
    """Standard deviation of a rank's drift, parts per million."""
    jitter_ns: float = 0.0
    """Standard deviation of each reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One known fault.

    `extension` is what it adds to a calm step (max - mean over ranks), as a part of the calm step; over all
    layers, or in one. The delay of the rank itself is that times R / (R - 1), since the rank is part of the mean.
    """

    cause: Cause
    rank: int
    extension: float
    phase: Phase = Phase.EXPERT_GEMM
    """For `device`: any local phase. The other causes have their own phase, see `named_phase`."""
    layer: int | None = None
    first_step: int = 0
    every: int = 1

    def hits(self, step: int) -> bool:
        """Whether the fault is active in a step."""
        return step >= self.first_step and (step - self.first_step) % self.every == 0

    @property
    def named_phase(self) -> Phase:
        """The phase that a right verdict names."""
        if self.cause in (Cause.ROUTING, Cause.PLACEMENT):
            return Phase.EXPERT_GEMM
        if self.cause is Cause.OUTSIDE:
            return Phase.OUTSIDE
        if self.cause in (Cause.HOST, Cause.LINK) and self.phase is not Phase.COMBINE:
            return Phase.DISPATCH
        return self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run to simulate; validated on construction.

    Raises:
        ValueError: experts do not divide by ranks, or an injection names a rank or layer that does not exist.
    """

    seed: int = 0
    run_id: str = "simulated"
    num_ranks: int = 8
    ranks_per_node: int = 8
    ep_size: int | None = None
    """Ranks per expert-parallel group; None = all ranks in one group."""
    num_layers: int = 8
    num_experts: int = 64
    top_k: int = 2
    num_tokens: int = 4096
    """Tokens per rank and step."""
    num_steps: int = 64
    warmup_steps: int = 0
    forward_mode: ForwardMode = ForwardMode.TRAIN
    row_bytes: int = 4096
    load_sigma: float = 0.1
    """Log-normal sigma of expert popularity, drawn anew for every layer and step."""
    popularity: FloatArray | None = None
    """[steps, layers, experts] replayed loads instead of drawn ones; step s uses entry s modulo their number."""
    gemm_ns_per_row: float = 60.0
    bytes_per_ns: float = 150.0
    """Exchange speed inside a node."""
    node_bytes_per_ns: float = 25.0
    """Exchange speed between nodes."""
    latency_ns: float = 15_000.0
    noise: Noise = field(default_factory=Noise)
    clocks: Clocks = field(default_factory=Clocks)
    missing_chance: float = 0.0
    """Chance that a rank's step never arrives."""
    injections: tuple[Injection, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        group = self.group_size
        if self.num_ranks % group or self.num_experts % group:
            raise ValueError(
                f"ep_size {group} must divide num_ranks {self.num_ranks} and num_experts {self.num_experts}"
            )
        for injection in self.injections:
            if not 0 <= injection.rank < self.num_ranks:
                raise ValueError(f"injection rank {injection.rank}: ranks are 0 to {self.num_ranks - 1}")
            if injection.layer is not None and not 0 <= injection.layer < self.num_layers:
                raise ValueError(f"injection layer {injection.layer}: layers are 0 to {self.num_layers - 1}")

    @property
    def group_size(self) -> int:
        """Ranks per expert-parallel group."""
        return self.ep_size or self.num_ranks

    @property
    def mean_rows(self) -> float:
        """Rows that a rank's experts receive per layer on average."""
        return float(self.num_tokens * self.top_k)

    @property
    def calm_step_ns(self) -> float:
        """Expected length of a step of even loads without noise or fault."""
        moved = self.mean_rows * self.row_bytes
        exchange = self.latency_ns + moved / self._mean_speed()
        local = sum(PHASE_NS.values()) + 2 * LAUNCH_NS + self.gemm_ns_per_row * self.mean_rows
        return self.num_layers * (local + 2 * exchange)

    def _mean_speed(self) -> float:
        near = min(self.ranks_per_node, self.group_size) / self.group_size
        return 1.0 / (near / self.bytes_per_ns + (1.0 - near) / self.node_bytes_per_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A joined step and the faults that were active in it."""

    joined: JoinedStep
    truth: tuple[Injection, ...]


def simulate(run: SimulatedRun) -> Iterator[SimulatedStep]:
    """All steps of a run in order."""
    random = np.random.default_rng(run.seed)
    offsets = random.normal(0.0, run.clocks.offset_ns, run.num_ranks)
    drifts = random.normal(0.0, run.clocks.drift_ppm * 1e-6, run.num_ranks)
    now = np.zeros(run.num_ranks)
    for step in range(run.num_steps):
        truth = tuple(injection for injection in run.injections if injection.hits(step))
        routed = _routed(run, random, step, truth)
        began = now.copy()
        ends, now = _timeline(run, random, routed, truth, now)
        reading = random.normal(0.0, run.clocks.jitter_ns, run.num_ranks)
        starts = np.rint(offsets + began * (1.0 + drifts) + reading).astype(np.int64) + START_UNIX_NS
        arrives = random.random(run.num_ranks) >= run.missing_chance
        if not arrives.any():
            arrives[0] = True
        rank_steps = tuple(
            _rank_step(run, step, rank, began[rank], ends[rank], int(starts[rank]), routed)
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
        yield SimulatedStep(joined=joined, truth=truth)


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
    return np.stack([random.multinomial(pairs, popularity[layer], run.num_ranks) for layer in range(run.num_layers)])


def _skew(run: SimulatedRun, injection: Injection, popularity: FloatArray) -> None:
    """Move popularity to the rank's experts: to one of them (routing), or to all alike (placement)."""
    per_rank = run.num_experts // run.group_size
    place = injection.rank % run.group_size
    mine = slice(place * per_rank, (place + 1) * per_rank)
    layers = range(run.num_layers) if injection.layer is None else [injection.layer]
    extra_rows = injection.extension * run.calm_step_ns / len(layers) / run.gemm_ns_per_row
    # The total is fixed, so what one rank gains over the mean is the extension itself.
    moved = extra_rows / (run.mean_rows * run.group_size)
    for layer in layers:
        own = popularity[layer, mine].copy()
        rest = 1.0 - own.sum()
        moved_here = min(moved, 0.9 * rest)
        popularity[layer] *= (rest - moved_here) / rest
        if injection.cause is Cause.ROUTING:
            popularity[layer, mine] = own
            popularity[layer, mine.start + layer % per_rank] += moved_here
        else:
            popularity[layer, mine] = own.mean() + moved_here / per_rank


def _timeline(
    run: SimulatedRun,
    random: np.random.Generator,
    routed: IntArray,
    truth: tuple[Injection, ...],
    now: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """End of every row, [ranks, layers x rows], and the time at which each rank ends the step."""
    work = _local_work(run, random, routed, truth)
    sent, received = _payloads(run, routed)
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
    return ends.reshape(run.num_ranks, -1), now


def _local_work(
    run: SimulatedRun, random: np.random.Generator, routed: IntArray, truth: tuple[Injection, ...]
) -> FloatArray:
    """[ranks, layers, rows]: local work, ns; 0 in exchange rows."""
    work = np.zeros((run.num_ranks, run.num_layers, _NUM_ROWS))
    for row, (phase, exchange) in enumerate(_ROWS):
        if not exchange:
            work[:, :, row] = PHASE_NS.get(phase, LAUNCH_NS)
    work[:, :, _GEMM] = run.gemm_ns_per_row * received_rows(run, routed).T
    lengths = work.copy()
    work *= random.lognormal(0.0, run.noise.spread, work.shape)
    if run.noise.hiccups_per_step > 0.0:
        chance = run.noise.hiccups_per_step * lengths / lengths.sum(axis=(1, 2), keepdims=True)
        hit = random.random(work.shape) < chance
        work += hit * random.exponential(run.noise.hiccup_ns, work.shape)
    for injection in truth:
        if injection.cause in (Cause.DEVICE, Cause.OUTSIDE, Cause.HOST):
            row = _ROWS.index((injection.named_phase, False))
            layers = slice(None) if injection.layer is None else slice(injection.layer, injection.layer + 1)
            delay = injection.extension * run.calm_step_ns * run.group_size / max(run.group_size - 1, 1)
            work[injection.rank, layers, row] += delay / (run.num_layers if injection.layer is None else 1)
    return work


def received_rows(run: SimulatedRun, routed: IntArray) -> IntArray:
    """[layers, ranks]: rows that each rank's experts receive from the ranks of its group."""
    groups = run.num_ranks // run.group_size
    by_group = routed.reshape(run.num_layers, groups, run.group_size, run.num_experts).sum(axis=2)
    by_rank: IntArray = by_group.reshape(run.num_layers, run.num_ranks, -1).sum(axis=2)
    return by_rank


def _rows_between(run: SimulatedRun, routed: IntArray) -> IntArray:
    """[layers, ranks, group size]: rows that each rank sends to each rank of its group."""
    between: IntArray = routed.reshape(run.num_layers, run.num_ranks, run.group_size, -1).sum(axis=3)
    return between


def _payloads(run: SimulatedRun, routed: IntArray) -> tuple[FloatArray, FloatArray]:
    """[layers, ranks] twice: time to send and to receive the dispatch payload at the links' speeds, ns."""
    size = run.group_size
    moved = _rows_between(run, routed).reshape(run.num_layers, -1, size, size) * float(run.row_bytes)
    ranks = np.arange(run.num_ranks).reshape(-1, size)
    same_node = ranks[:, :, None] // run.ranks_per_node == ranks[:, None, :] // run.ranks_per_node
    cost = moved / np.where(same_node, run.bytes_per_ns, run.node_bytes_per_ns)
    return cost.sum(axis=3).reshape(run.num_layers, -1), cost.sum(axis=2).reshape(run.num_layers, -1)


def _link_delay(
    run: SimulatedRun, truth: tuple[Injection, ...], layer: int, row: int, groups: IntArray
) -> FloatArray:
    """[ranks]: what slow links add to one exchange. Every rank of the group waits for the slow sender's rows."""
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
    routed: IntArray,
) -> RankStep:
    offsets = np.rint(np.concatenate([[began], ends]) - began).astype(np.int64)
    layers, num_rows = run.num_layers, run.num_layers * _NUM_ROWS
    between = _rows_between(run, routed)[:, rank]
    received = received_rows(run, routed)[:, rank]
    rows = np.full((layers, _NUM_ROWS), -1, dtype=np.int64)
    rows[:, _DISPATCH] = between.sum(axis=1)
    rows[:, _GEMM] = rows[:, _COMBINE] = received
    payload = np.where(np.isin(np.arange(_NUM_ROWS), [_DISPATCH, _COMBINE]), rows * run.row_bytes, -1)
    zeros = np.zeros(num_rows, dtype=np.int64)
    place = rank % run.group_size
    per_rank = run.num_experts // run.group_size
    group = slice(rank - place, rank - place + run.group_size)
    arrived = np.zeros((layers, run.num_experts), dtype=np.int64)
    mine = slice(place * per_rank, (place + 1) * per_rank)
    arrived[:, mine] = routed[:, group, mine].sum(axis=1)
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
            for kind, counts in ((CountKind.ROUTED, routed[:, rank]), (CountKind.RECEIVED, arrived))
        ),
        traffic=tuple(
            TrafficRow(
                layer=layer, phase=PHASE_CODE[Phase.DISPATCH], row_bytes=run.row_bytes, rows=between[layer]
            )
            for layer in range(layers)
        ),
    )


def with_seed(run: SimulatedRun, seed: int) -> SimulatedRun:
    """The same run drawn from another seed."""
    return replace(run, seed=seed)
