"""The simulator: deterministic, with a truth that is really in the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetrace_collectors.model import JoinedStep
from moetrace_collectors.simulate import Clocks, Injection, Noise, SimulatedRun, arrivals, simulate
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Cause, ClosedBy, Phase

CALM = SimulatedRun(noise=Noise(spread=0.0), load_sigma=0.0, num_tokens=100_000, num_steps=2)


def frontier_ns(step: JoinedStep) -> float:
    """Longest rank's step."""
    return max(record.duration_ns for record in step.rank_steps)


def test_one_seed_gives_one_run() -> None:
    """Equal runs are equal to the byte; another seed is another run."""
    run = SimulatedRun(num_steps=3, noise=Noise(spread=0.1, hiccups_per_step=1, hiccup_ns=1e5))

    def durations(of: SimulatedRun) -> list[bytes]:
        return [r.phases.duration_ns.tobytes() for s in simulate(of) for r in s.joined.rank_steps]

    assert durations(run) == durations(run)
    assert durations(run) != durations(replace(run, seed=1))


def test_a_calm_step_takes_as_long_as_promised() -> None:
    """Without noise a step's length is `calm_step_ns`, which extensions are parts of."""
    for simulated in simulate(CALM):
        assert frontier_ns(simulated.joined) == pytest.approx(CALM.calm_step_ns, rel=0.01)


@pytest.mark.parametrize("cause", [Cause.DEVICE, Cause.OUTSIDE, Cause.HOST, Cause.ROUTING, Cause.PLACEMENT])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_fault_extends_max_over_mean_by_what_was_asked(cause: Cause, ranks: int) -> None:
    """Max - mean of the ranks' work in the named phase is the asked part of a calm step."""
    run = replace(CALM, num_ranks=ranks, injections=(Injection(cause=cause, rank=1, extension=0.1),))
    for simulated in simulate(run):
        work = [_local_work(simulated.joined, rank) for rank in range(ranks)]
        assert int(np.argmax(work)) == 1
        assert max(work) - sum(work) / ranks == pytest.approx(0.1 * run.calm_step_ns, rel=0.05)


def _local_work(step: JoinedStep, rank: int) -> float:
    rows = step.rank_steps[rank].phases
    return float(rows.duration_ns[(rows.flags & int(RowFlag.BARRIER)) == 0].sum())


def test_exchanges_end_together_and_the_late_rank_waits_least() -> None:
    """Waits come out of the timeline, so the slow rank has the shortest exchange."""
    fault = Injection(cause=Cause.DEVICE, rank=5, extension=0.1, phase=Phase.ROUTER, layer=2)
    step = next(simulate(replace(CALM, injections=(fault,)))).joined
    inside = [
        r.phases.duration_ns[(r.phases.flags == int(RowFlag.BARRIER)) & (r.phases.layer == 2)][0]
        for r in step.rank_steps
    ]
    assert int(np.argmin(inside)) == 5


def test_only_hit_steps_have_a_truth() -> None:
    """`first_step` and `every` say which steps are faulty."""
    fault = Injection(cause=Cause.OUTSIDE, rank=0, extension=0.1, first_step=3, every=4)
    run = SimulatedRun(num_ranks=2, num_layers=1, num_steps=12, injections=(fault,))
    assert [s.joined.step for s in simulate(run) if s.truth] == [3, 7, 11]


def test_missing_ranks_are_listed_and_never_all() -> None:
    """A step that lost ranks says so and is closed by timeout."""
    run = SimulatedRun(num_ranks=4, num_layers=1, num_steps=40, missing_chance=0.5)
    steps = [s.joined for s in simulate(run)]
    assert any(step.missing_ranks for step in steps)
    for step in steps:
        present = {record.rank for record in step.rank_steps}
        assert present
        assert present | set(step.missing_ranks) == set(range(4))
        assert (step.closed_by is ClosedBy.TIMEOUT) == bool(step.missing_ranks)


def test_records_arrive_in_any_order_and_late_ones_after_later_steps() -> None:
    """Nothing is lost or doubled on the way; late records come `late_steps` steps after their own."""
    run = SimulatedRun(num_ranks=4, num_layers=1, num_steps=30, late_chance=0.1, late_steps=3)
    order = [(record.step, record.rank) for record in arrivals(run)]
    assert sorted(order) == [(step, rank) for step in range(30) for rank in range(4)]
    newest = [max(step for step, _ in order[: i + 1]) for i in range(len(order))]
    lags = {latest - step for latest, (step, _) in zip(newest, order, strict=True)}
    assert {0, 3} <= lags
    assert [rank for step, rank in order if step == 0] != [0, 1, 2, 3]


def test_clock_errors_move_starts_and_no_duration() -> None:
    """Offset, drift and jitter are of the unix clock; durations are monotonic."""
    wrong = replace(CALM, clocks=Clocks(offset_ns=1e9, drift_ppm=50.0, jitter_ns=1e5))
    for right_step, wrong_step in zip(simulate(CALM), simulate(wrong), strict=True):
        for a, b in zip(right_step.joined.rank_steps, wrong_step.joined.rank_steps, strict=True):
            assert a.start_unix_ns != b.start_unix_ns
    spread = np.ptp([r.start_unix_ns for r in next(simulate(wrong)).joined.rank_steps])
    assert spread > 1e8


def test_replayed_loads_are_followed() -> None:
    """Given popularities, step s routes by entry s: expert 3 alone is used in the first step."""
    popularity = np.zeros((2, 1, 8))
    popularity[0, 0, 3] = popularity[1, 0, 5] = 1.0
    run = SimulatedRun(num_ranks=2, num_layers=1, num_experts=8, num_steps=2, popularity=popularity)
    hot = [int(s.joined.rank_steps[0].experts[0].counts.argmax()) for s in simulate(run)]
    assert hot == [3, 5]


def test_nodes_apart_are_slower() -> None:
    """The same ranks on four nodes take longer exchanges than on one."""
    near = next(simulate(CALM)).joined
    apart = next(simulate(replace(CALM, ranks_per_node=2))).joined
    assert frontier_ns(apart) > 1.2 * frontier_ns(near)
    assert len({record.host_name for record in apart.rank_steps}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 6, "ep_size": 4}, "ep_size 4 must divide"),
        ({"injections": (Injection(cause=Cause.DEVICE, rank=8, extension=0.1),)}, "ranks are 0 to 7"),
        (
            {"injections": (Injection(cause=Cause.DEVICE, rank=0, extension=0.1, layer=8),)},
            "layers are 0 to 7",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, object], message: str) -> None:
    """The message names the field and what is possible."""
    with pytest.raises(ValueError, match=message):
        replace(SimulatedRun(), **changes)  # type: ignore[arg-type]
