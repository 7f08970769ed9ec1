"""Why the suspect was late: phases, rows against time, slow links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetrace_collectors.model import ExpertCounts, StepVerdict
from moetrace_collectors.simulate import Injection, Noise, SimulatedRun, simulate
from moetrace_collectors.verdict import VerdictEngine
from moetrace_collectors.verdict.gemm_fit import robust_slope
from moetrace_schemas.enums import COUNT_KIND_CODE, Cause, CountKind, Evidence, Phase
from verdict_timeline import exchange, joined, rank_step, work

USUAL = Noise(spread=0.03)


def verdicts(injection: Injection, **more: int) -> list[StepVerdict]:
    """Verdicts of the faulty steps of a run with one fault from step 20 on."""
    engine = VerdictEngine()
    run = SimulatedRun(noise=USUAL, num_steps=60, injections=(injection,), **more)  # type: ignore[arg-type]
    return [engine.judge(s.joined) for s in simulate(run)][20:]


@pytest.mark.parametrize(
    ("cause", "phase"),
    [
        (Cause.DEVICE, Phase.EXPERT_GEMM),
        (Cause.DEVICE, Phase.ROUTER),
        (Cause.DEVICE, Phase.PERMUTE),
        (Cause.OUTSIDE, Phase.OUTSIDE),
        (Cause.HOST, Phase.DISPATCH),
        (Cause.HOST, Phase.COMBINE),
        (Cause.ROUTING, Phase.EXPERT_GEMM),
        (Cause.PLACEMENT, Phase.EXPERT_GEMM),
    ],
)
def test_the_injected_cause_is_told(cause: Cause, phase: Phase) -> None:
    """In nearly every step with a fault of 8 % of the step."""
    found = verdicts(Injection(cause=cause, rank=2, extension=0.08, phase=phase, first_step=20))
    right = [
        v for v in found if v.suspect and (v.suspect.rank, v.suspect.phase, v.cause) == (2, phase, cause)
    ]
    assert len(right) >= 0.97 * len(found)


def test_a_slow_device_is_told_from_a_hot_one_from_the_first_step() -> None:
    """The other ranks of the very step are enough to fit time on rows: no history is needed."""
    for cause in (Cause.DEVICE, Cause.ROUTING):
        run = SimulatedRun(num_steps=1, injections=(Injection(cause=cause, rank=2, extension=0.15),))
        assert VerdictEngine().judge(next(simulate(run)).joined).cause is cause


@pytest.mark.parametrize(
    ("received", "cause"),
    [
        ({0: [100, 100], 1: [300, 100], 2: [100, 100], 3: [100, 100]}, Cause.ROUTING),
        ({0: [100, 100], 1: [200, 200], 2: [100, 100], 3: [100, 100]}, Cause.PLACEMENT),
        ({0: [100, 100], 1: [100, 100], 2: [100, 100], 3: [100, 100]}, Cause.DEVICE),
    ],
)
def test_counts_of_rows_received_stand_in_for_rows_of_the_work(
    received: dict[int, list[int]], cause: Cause
) -> None:
    """Rank 1 works twice as long: on twice the rows of one expert, of both, or on no more rows at all."""
    records = []
    for rank in range(4):
        late = 400 if rank == 1 else 0
        counts = [0] * 8
        counts[2 * rank : 2 * rank + 2] = received[rank]
        rows = [
            work(Phase.OUTSIDE, 100),
            exchange(Phase.DISPATCH, 10),
            work(Phase.EXPERT_GEMM, 400 + late),
            exchange(Phase.COMBINE, 410 - late),
        ]
        records.append(rank_step(rank, rows, ep_size=4, received={0: counts}))
    verdict = VerdictEngine().judge(joined(*records))
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.phase, verdict.cause) == (1, Phase.EXPERT_GEMM, cause)


@pytest.mark.parametrize(
    ("of_idle", "cause"),
    [([300, 100], Cause.ROUTING), ([100, 100], Cause.DEVICE), (None, Cause.UNKNOWN)],
    ids=["a hot expert", "a slow device", "rows not told"],
)
def test_rows_of_an_idle_rank_explain_its_time(of_idle: list[int] | None, cause: Cause) -> None:
    """Rank 1 runs a dummy batch and is late all the same: its experts serve the others."""
    records = []
    for rank in range(4):
        idle = rank == 1
        rows = [
            work(Phase.OUTSIDE, 100),
            exchange(Phase.DISPATCH, 10),
            work(Phase.EXPERT_GEMM, 800 if idle else 400),
            exchange(Phase.COMBINE, 10 if idle else 410),
        ]
        counts = [0] * 8
        counts[2 * rank : 2 * rank + 2] = of_idle or [0, 0] if idle else [100, 100]
        received = None if idle and of_idle is None else {0: counts}
        record = rank_step(rank, rows, ep_size=4, received=received)
        if idle:
            dummy = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.DUMMY], counts=np.array([2]))
            record = replace(record, experts=(*record.experts, dummy))
        records.append(record)
    verdict = VerdictEngine().judge(joined(*records))
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.phase, verdict.cause) == (1, Phase.EXPERT_GEMM, cause)


def test_a_rank_that_is_slow_in_every_phase_has_a_slow_device() -> None:
    """A fifth more in all of its work: that is no fault of what lies between the MoE layers.

    ::

        rank 0  |= outside 500 =|router 50|~~~~~ 110 ~~~~~|10|= gemm 400 =|~~ 80 ~~|10|
        rank 1  |=== outside 600 ===|router 60 |           10|=== gemm 480 ===     |10|
    """
    ranks = []
    for scale, waits in ((10, (110, 80)), (12, (0, 0))):
        ranks.append(
            [
                work(Phase.OUTSIDE, 50 * scale),
                work(Phase.ROUTER, 5 * scale),
                exchange(Phase.DISPATCH, 10 + waits[0]),
                work(Phase.EXPERT_GEMM, 40 * scale, rows=100),
                exchange(Phase.COMBINE, 10 + waits[1]),
            ]
        )
    verdict = VerdictEngine().judge(joined(*(rank_step(r, rows) for r, rows in enumerate(ranks))))
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.phase, verdict.cause) == (1, Phase.OUTSIDE, Cause.DEVICE)


def test_a_slow_link_is_told_without_blaming_a_rank() -> None:
    """All ranks wait alike for the slow transfer: the cause and the phase are known, the rank is not."""
    for verdict in verdicts(Injection(cause=Cause.LINK, rank=2, extension=0.08, layer=3, first_step=20)):
        assert verdict.cause is Cause.LINK
        assert (verdict.evidence, verdict.suspect) == (Evidence.INSUFFICIENT, None)
        assert "dispatch transfers of layer 3" in verdict.reason


def test_a_slow_link_does_not_become_normal_while_it_lasts() -> None:
    """The history keeps what the transfer was before; only after 256 slow steps is it the new normal."""
    fault = Injection(cause=Cause.LINK, rank=1, extension=0.1, first_step=20)
    run = SimulatedRun(
        noise=USUAL, num_ranks=2, num_experts=4, num_layers=2, num_steps=320, injections=(fault,)
    )
    engine = VerdictEngine()
    causes = [engine.judge(s.joined).cause for s in simulate(run)]
    assert causes[20:276] == [Cause.LINK] * 256
    assert Cause.LINK not in causes[290:]


def test_larger_payloads_are_no_slow_link() -> None:
    """Twice the tokens take twice the transfer: that is not the link's fault."""
    engine = VerdictEngine()
    small = SimulatedRun(noise=USUAL, num_steps=30)
    large = SimulatedRun(noise=USUAL, num_steps=10, num_tokens=8192, seed=1)
    for simulated in simulate(small):
        engine.judge(simulated.joined)
    assert all(engine.judge(s.joined).cause is not Cause.LINK for s in simulate(large))


def test_slow_ranks_do_not_bend_the_line_of_time_on_rows() -> None:
    """One rank of sixteen at twice the time leaves the slope of the others.

    ::

        time = 20 + 3 x rows;  one outlier at 2 x (20 + 3 x rows)
    """
    rows = np.tile(np.linspace(100, 200, 16), (2, 1))
    times = 20 + 3 * rows
    times[:, 15] *= 2
    assert robust_slope(rows, times) == pytest.approx([3.0, 3.0], rel=0.02)


def test_equal_rows_give_the_time_per_row() -> None:
    """A cloud without any spread of rows tells no slope; the time per row is the bound that is left."""
    rows = np.full((1, 8), 100.0)
    assert robust_slope(rows, np.full((1, 8), 500.0)) == pytest.approx([5.0])


def test_a_slope_is_never_negative_nor_above_the_time_per_row() -> None:
    """No device gets faster with more rows, and none starts with credit."""
    rows = np.array([[100.0, 150.0, 200.0], [100.0, 150.0, 200.0]])
    times = np.array([[300.0, 200.0, 100.0], [100.0, 400.0, 900.0]])
    slope = robust_slope(rows, times)
    assert slope[0] == 0.0
    assert slope[1] == pytest.approx(np.median(times[1] / rows[1]))
