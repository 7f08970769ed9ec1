"""Records of the views, built in memory: small ones for tests of words and shapes, a large one for size."""

from __future__ import annotations

import numpy as np

from moetrace_collectors.model import Suspect
from moetrace_collectors.views.load_figures import run_imbalance
from moetrace_collectors.views.run_records import (
    Accounting,
    BarrierRow,
    LoadMatrix,
    LoadView,
    PhaseInterval,
    RunOverview,
    RunView,
    StepDetail,
    StepRow,
    Traffic,
)
from moetrace_collectors.views.worst_step import lanes_to_show
from moetrace_schemas.enums import Cause, ClosedBy, Direction, Evidence, ForwardMode, Phase

MS = 1_000_000


def suspect(
    rank: int, phase: Phase, *, layer: int | None = None, worth_ms: float = 10, share: float = 0.8
) -> Suspect:
    """A suspect whose worth is given in ms."""
    return Suspect(rank=rank, phase=phase, layer=layer, worth_ns=round(worth_ms * MS), share=share)


def step_row(
    step: int,
    named: Suspect | None = None,
    *,
    evidence: Evidence = Evidence.CLEAR,
    cause: Cause = Cause.DEVICE,
    warmup: bool = False,
    missing_ranks: tuple[int, ...] = (),
    step_ms: float = 100,
    reason: str = "a reason.",
) -> StepRow:
    """A joined step; without a suspect its evidence is insufficient."""
    return StepRow(
        step=step,
        start_unix_ns=1_900_000_000_000_000_000 + step * 100 * MS,
        forward_mode=ForwardMode.PREFILL,
        evidence=evidence if named is not None else Evidence.INSUFFICIENT,
        reason=reason,
        suspect=named,
        cause=cause if named is not None else Cause.UNKNOWN,
        runner_up=None,
        step_ns=round(step_ms * MS),
        extension_ns=20 * MS,
        phase_ns={Phase.EXPERT_GEMM: round(step_ms * MS)},
        world_size=4,
        missing_ranks=missing_ranks,
        closed_by=ClosedBy.TIMEOUT if missing_ranks else ClosedBy.COMPLETE,
        warmup=warmup,
    )


def interval(
    rank: int,
    phase: Phase,
    start_ms: float,
    duration_ms: float,
    *,
    layer: int = 0,
    is_barrier: bool = False,
    stream: int = 0,
    ep_group: int = 0,
    ordinal: int = 0,
) -> PhaseInterval:
    """A phase row whose times are given in ms."""
    return PhaseInterval(
        rank=rank,
        ep_group=ep_group,
        layer=layer,
        phase=phase,
        direction=Direction.FORWARD,
        microbatch=0,
        ordinal=ordinal,
        is_barrier=is_barrier,
        stream=stream,
        error=False,
        start_unix_ns=round(start_ms * MS),
        duration_ns=round(duration_ms * MS),
        bytes=-1,
        rows=-1,
    )


def barrier(
    index: int,
    phase: Phase,
    releaser: int,
    *,
    layer: int = 0,
    transfer_ms: float = 1,
    extension_ms: float = 1,
    ambiguous: bool = False,
    ep_group: int = 0,
) -> BarrierRow:
    """An exchange whose times are given in ms; the tail of a step has layer -1 and phase outside."""
    return BarrierRow(
        ep_group=ep_group,
        index=index,
        layer=layer,
        phase=phase,
        direction=Direction.FORWARD,
        microbatch=0,
        ordinal=0,
        releaser_rank=releaser,
        work_phase=Phase.EXPERT_GEMM,
        transfer_ns=round(transfer_ms * MS),
        extension_ns=round(extension_ms * MS),
        ambiguous=ambiguous,
    )


def overview(
    *, run_id: str = "run", model_name: str = "model", ranks: int = 4, steps: int = 1
) -> RunOverview:
    """An overview of a prefill run on one host."""
    return RunOverview(
        run_id=run_id,
        model_name=model_name,
        model_version="",
        world_size=ranks,
        ranks=tuple(range(ranks)),
        hosts=("host",),
        forward_modes=(ForwardMode.PREFILL,),
        cohorts=(),
        clocks=("host",),
        sample_period=1,
        steps=steps,
        warmup_steps=0,
        first_unix_ns=1_900_000_000_000_000_000,
        last_unix_ns=1_900_000_001_000_000_000,
    )


def accounting(*, late: int = 0, missing_by_rank: dict[int, int] | None = None) -> Accounting:
    """An accounting in which nothing else was lost."""
    return Accounting(
        rank_steps=4,
        late=late,
        events={},
        unattributed_rejects=0,
        steps_by_closed_by={ClosedBy.COMPLETE: 1},
        missing_by_rank=missing_by_rank or {},
        pairs_by_kind={},
    )


def run_view(*steps: StepRow, **fields: object) -> RunView:
    """A view of these steps and nothing else, but for the fields given."""
    values: dict[str, object] = {
        "overview": overview(steps=len(steps)),
        "steps": steps,
        "imbalance": (),
        "expert_loads": (),
        "rank_loads": (),
        "traffic": None,
        "extensions": (),
        "detail": None,
        "accounting": accounting(),
        **fields,
    }
    return RunView(**values)  # type: ignore[arg-type]


def large_view(*, ranks: int = 64, layers: int = 61, experts: int = 256, steps: int = 2000) -> RunView:
    """A run of the size of the largest deployments: random loads, one rank that is slow in every layer."""
    random = np.random.default_rng(7)
    slow = ranks * 3 // 5
    rows = tuple(
        step_row(step, suspect(slow, Phase.EXPERT_GEMM, worth_ms=float(random.uniform(5, 9))))
        for step in range(steps)
    )
    drawn = max(rows, key=lambda row: row.worth_ns)
    barriers = []
    intervals: list[PhaseInterval] = []
    now = 0.0
    for layer in range(layers):
        gemm = random.normal(1.0, 0.05, ranks)
        gemm[slow] += 0.4
        for rank in range(ranks):
            intervals += [
                interval(rank, Phase.OUTSIDE, now, 0.5, layer=layer),
                interval(rank, Phase.ROUTER, now + 0.5, 0.05, layer=layer),
                interval(rank, Phase.DISPATCH, now + 0.55, 0.2, layer=layer, is_barrier=True),
                interval(rank, Phase.EXPERT_GEMM, now + 0.75, float(gemm[rank]), layer=layer),
                interval(
                    rank,
                    Phase.COMBINE,
                    now + 0.75 + float(gemm[rank]),
                    float(gemm.max() - gemm[rank]) + 0.2,
                    layer=layer,
                    is_barrier=True,
                ),
            ]
        barriers.append(barrier(2 * layer, Phase.DISPATCH, rank % 7, layer=layer, transfer_ms=0.2))
        barriers.append(
            barrier(2 * layer + 1, Phase.COMBINE, slow, layer=layer, transfer_ms=0.2, extension_ms=5)
        )
        now += 0.95 + float(gemm.max())
    shown = lanes_to_show(drawn, range(ranks), barriers)
    views = [
        LoadView(forward_mode=mode, cohort=cohort)
        for mode in (ForwardMode.PREFILL, ForwardMode.DECODE)
        for cohort in (None, "code", "prose")
    ]
    loads = tuple(_random_loads(view, random, layers, experts) for view in views)
    rank_loads = tuple(_random_loads(view, random, layers, ranks) for view in views)
    sent = random.integers(10**6, 10**7, (ranks, ranks)).tolist()
    return run_view(
        *rows,
        overview=overview(ranks=ranks, steps=steps),
        expert_loads=loads,
        rank_loads=rank_loads,
        imbalance=run_imbalance(loads, rank_loads, {}),
        traffic=Traffic(
            ranks=tuple(range(ranks)), rows=tuple(map(tuple, sent)), bytes=tuple(map(tuple, sent))
        ),
        detail=StepDetail(
            step=drawn.step,
            ranks=tuple(range(ranks)),
            shown_ranks=shown,
            intervals=tuple(row for row in intervals if row.rank in shown),
            barriers=tuple(barriers),
        ),
    )


def _random_loads(view: LoadView, random: np.random.Generator, layers: int, columns: int) -> LoadMatrix:
    counts = random.lognormal(8, 1, (layers, columns)).astype(int).tolist()
    return LoadMatrix(
        view=view,
        layers=tuple(range(layers)),
        columns=tuple(range(columns)),
        counts=tuple(map(tuple, counts)),
    )
