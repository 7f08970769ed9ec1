"""How sure a verdict is: spikes, persistent faults, what the history must and must not remember."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.simulate import Injection, Noise, SimulatedRun, simulate
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Cause, ClosedBy, Evidence, ForwardMode, Phase
from verdict_timeline import joined, layer_rows, rank_step, work

USUAL = Noise(spread=0.05, hiccups_per_step=0.05, hiccup_ns=100_000.0)


def device(rank: int, extension: float, **more: int) -> Injection:
    """A slow router."""
    return Injection(cause=Cause.DEVICE, rank=rank, extension=extension, phase=Phase.ROUTER, **more)  # type: ignore[arg-type]


def verdicts(run: SimulatedRun) -> list[StepVerdict]:
    """Verdicts of a simulated run, step by step."""
    engine = VerdictEngine()
    return [engine.judge(simulated.joined) for simulated in simulate(run)]


def named(verdict: StepVerdict) -> tuple[int, Phase] | None:
    """Whom a verdict names."""
    return (verdict.suspect.rank, verdict.suspect.phase) if verdict.suspect else None


def test_a_run_without_fault_is_clear_in_at_most_one_step_of_a_hundred() -> None:
    """Noise of 5 % with rare scheduling hiccups, 400 steps."""
    found = [v for seed in range(2) for v in verdicts(SimulatedRun(seed=seed, noise=USUAL, num_steps=200))]
    assert sum(v.evidence is Evidence.CLEAR for v in found) <= 4


def test_a_rank_that_is_slow_from_the_first_step_is_named_clear() -> None:
    """A fault that has always been there is no noise: the spread counts, not the level."""
    found = verdicts(SimulatedRun(noise=USUAL, num_steps=100, injections=(device(3, 0.08),)))
    assert all(named(v) == (3, Phase.ROUTER) for v in found)
    assert all(v.evidence is Evidence.AMBIGUOUS for v in found[:8])
    assert sum(v.evidence is Evidence.CLEAR for v in found[8:]) >= 0.97 * 92


def test_a_spike_in_a_single_step_is_named_clear() -> None:
    """Nothing before, nothing after: step 40 alone is extended by 8 %."""
    fault = device(5, 0.08, first_step=40, every=1000)
    found = verdicts(SimulatedRun(noise=USUAL, num_steps=60, injections=(fault,)))
    assert (found[40].evidence, named(found[40])) == (Evidence.CLEAR, (5, Phase.ROUTER))


def test_a_small_persistent_fault_is_seen_in_its_level() -> None:
    """5 % in every step drowns in hiccups of that size in single steps, but not over many."""
    noisy = Noise(spread=0.10, hiccups_per_step=1.0, hiccup_ns=300_000.0)
    found = verdicts(SimulatedRun(noise=noisy, num_steps=150, injections=(device(2, 0.05, first_step=20),)))
    late = found[60:]
    assert sum(named(v) == (2, Phase.ROUTER) for v in late) >= 0.9 * len(late)
    assert all(named(v) == (2, Phase.ROUTER) for v in late if v.evidence is Evidence.CLEAR)


def test_a_fault_that_has_ended_does_not_hide_the_next_one() -> None:
    """Rank 1 was slow for 60 steps; when rank 6 is slow by less, it is clear at once."""
    faults = [device(1, 0.15, every=1), device(6, 0.06, first_step=60)]
    engine = VerdictEngine()
    first = [
        engine.judge(s.joined)
        for s in simulate(SimulatedRun(noise=USUAL, num_steps=60, injections=(faults[0],)))
    ]
    then = [
        engine.judge(s.joined)
        for s in list(simulate(SimulatedRun(noise=USUAL, num_steps=80, injections=(faults[1],), seed=1)))[60:]
    ]
    assert named(first[-1]) == (1, Phase.ROUTER)
    assert all(named(v) == (6, Phase.ROUTER) and v.evidence is Evidence.CLEAR for v in then)


def test_a_rank_that_is_slow_now_and_then_stays_clear() -> None:
    """Its own spikes never raise the bar that it is measured with."""
    found = verdicts(
        SimulatedRun(noise=USUAL, num_steps=200, injections=(device(4, 0.08, first_step=20, every=4),))
    )
    hit = [v for v in found[20:] if (v.step - 20) % 4 == 0]
    assert all(named(v) == (4, Phase.ROUTER) for v in hit)
    assert sum(v.evidence is Evidence.CLEAR for v in hit) >= 0.9 * len(hit)


def test_routing_that_is_skewed_anew_in_every_step_is_not_taken_for_noise() -> None:
    """Another rank is hot in every step, so no rank stands out of the others' past; its rows say why."""
    found = verdicts(SimulatedRun(noise=Noise(spread=0.02), load_sigma=1.0, num_steps=60))[8:]
    clear = [v for v in found if v.evidence is Evidence.CLEAR]
    assert len(clear) >= 0.5 * len(found)
    assert {v.cause for v in clear} <= {Cause.ROUTING, Cause.PLACEMENT}
    assert len({v.suspect.rank for v in clear if v.suspect}) > 3


def test_a_late_rank_after_the_last_exchange_is_named_but_never_clear() -> None:
    """Nobody waits for it within the step, so nothing bears witness, however often it happens.

    ::

        rank 0  ... |combine|outside 10|
        rank 1  ... |combine|======= outside 60 =======|
    """
    engine = VerdictEngine()
    for step in range(20):
        records = [
            rank_step(rank, [*layer_rows(0, 100, 50, (0, 0)), work(Phase.OUTSIDE, tail, -1)], step=step)
            for rank, tail in enumerate((10, 60))
        ]
        verdict = engine.judge(joined(*records))
    assert (verdict.evidence, named(verdict)) == (Evidence.AMBIGUOUS, (1, Phase.OUTSIDE))
    assert verdict.suspect is not None
    assert verdict.suspect.layer is None


def test_two_ranks_late_alike_are_not_told_apart() -> None:
    """Two faults of one size in different phases: ambiguous, and the other is the runner-up."""
    faults = (
        device(1, 0.1, first_step=20),
        Injection(cause=Cause.OUTSIDE, rank=6, extension=0.1, first_step=20),
    )
    found = verdicts(SimulatedRun(noise=Noise(spread=0.02), num_steps=60, injections=faults))[30:]
    pair = {(1, Phase.ROUTER), (6, Phase.OUTSIDE)}
    for verdict in found:
        assert verdict.evidence is Evidence.AMBIGUOUS
        assert verdict.runner_up is not None
        assert {named(verdict), (verdict.runner_up.rank, verdict.runner_up.phase)} == pair


def test_a_second_culprit_makes_the_first_one_ambiguous() -> None:
    """Rank 6 costs more than half of what rank 1 costs, at other exchanges: there are two faults."""
    gemm = Injection(cause=Cause.DEVICE, rank=6, extension=0.07, first_step=20)
    run = SimulatedRun(
        noise=Noise(spread=0.02), num_steps=60, injections=(device(1, 0.1, first_step=20), gemm)
    )
    for verdict in verdicts(run)[30:]:
        assert (verdict.evidence, named(verdict)) == (Evidence.AMBIGUOUS, (1, Phase.ROUTER))
        assert "rank 6 in expert_gemm" in verdict.reason


def test_a_rank_in_the_shadow_of_another_is_the_runner_up() -> None:
    """Rank 6 is late at the same exchanges by nearly as much: fixing rank 1 alone would give back little."""
    faults = (device(1, 0.10, first_step=20), device(6, 0.09, first_step=20))
    found = verdicts(SimulatedRun(noise=Noise(spread=0.01), num_steps=60, injections=faults))[30:]
    for verdict in found:
        assert (verdict.evidence, named(verdict)) == (Evidence.AMBIGUOUS, (1, Phase.ROUTER))
        assert verdict.runner_up is not None
        assert (verdict.runner_up.rank, verdict.runner_up.phase) == (6, Phase.ROUTER)


def test_an_insufficient_verdict_names_nobody_and_says_why() -> None:
    """Every verdict has a one-sentence reason; an insufficient one has no suspect."""
    for verdict in verdicts(SimulatedRun(noise=USUAL, num_steps=80)):
        assert verdict.reason.endswith(".")
        assert "\n" not in verdict.reason
        if verdict.evidence is Evidence.INSUFFICIENT:
            assert verdict.suspect is None


def test_warm_up_steps_are_judged_marked_and_not_remembered() -> None:
    """Twenty slow warm-up steps leave the history empty."""
    found = verdicts(SimulatedRun(num_steps=30, warmup_steps=20, injections=(device(0, 0.1),)))
    assert all(v.warmup for v in found[:20])
    assert named(found[5]) == (0, Phase.ROUTER)
    assert "only 0 of 8" in found[20].reason


def test_forward_modes_have_their_own_history() -> None:
    """A decode step is never compared with prefill steps."""
    engine = VerdictEngine()
    run = SimulatedRun(num_steps=20, forward_mode=ForwardMode.PREFILL)
    for simulated in simulate(run):
        engine.judge(simulated.joined)
    decode = next(simulate(replace(run, forward_mode=ForwardMode.DECODE, injections=(device(0, 0.1),))))
    assert "only 0 of 8" in engine.judge(decode.joined).reason


def test_memory_is_bounded_over_runs() -> None:
    """A hundred runs leave the histories of the latest ones only."""
    engine = VerdictEngine()
    for index in range(100):
        for simulated in simulate(
            SimulatedRun(run_id=f"run-{index}", num_ranks=2, num_experts=4, num_layers=1, num_steps=1)
        ):
            engine.judge(simulated.joined)
    assert len(engine._memories) == 32


def test_memory_is_bounded_over_ranks_that_come_and_go() -> None:
    """An elastic run with new rank numbers in every step keeps the ranks of its window, and still judges."""
    engine = VerdictEngine()
    step = next(simulate(SimulatedRun(num_layers=1))).joined
    for index in range(200):
        renamed = tuple(replace(r, rank=r.rank + 8 * index, step=index) for r in step.rank_steps)
        engine.judge(replace(step, step=index, rank_steps=renamed))
    (memory,) = engine._memories.values()
    assert len(memory.worths._column) <= 2 * 8 + 64 + 8 * 65


def test_the_same_steps_give_the_same_verdicts() -> None:
    """The engine reads no clock and no random source."""
    run = SimulatedRun(noise=USUAL, num_steps=30, injections=(device(2, 0.1, first_step=10),))
    assert verdicts(run) == verdicts(run)


def without(step: JoinedStep, *ranks: int) -> JoinedStep:
    """The step as it looks when some ranks' records never arrive."""
    return replace(
        step,
        rank_steps=tuple(r for r in step.rank_steps if r.rank not in ranks),
        missing_ranks=ranks,
        closed_by=ClosedBy.TIMEOUT,
    )


@pytest.fixture
def partial_steps() -> tuple[VerdictEngine, list[JoinedStep]]:
    """An engine with 20 calm steps, and later steps in which rank 3 is late by a tenth of the step."""
    run = SimulatedRun(noise=Noise(spread=0.02), num_steps=30, injections=(device(3, 0.1, first_step=20),))
    steps = [simulated.joined for simulated in simulate(run)]
    engine = VerdictEngine()
    for step in steps[:20]:
        engine.judge(step)
    return engine, steps[20:]


def test_a_present_rank_is_named_although_another_is_missing(
    partial_steps: tuple[VerdictEngine, list[JoinedStep]],
) -> None:
    """Rank 3 hardly waited while others did, and transfers are as usual: rank 5's absence changes nothing.

    ::

        rank 0         |= work =|~~~~ wait ~~~~|transfer|
        rank 3         |======== work =========|transfer|     transfer as in the history: rank 3 released it
        rank 5 (missing)   ?
    """
    engine, steps = partial_steps
    verdict = engine.judge(without(steps[0], 5))
    assert verdict.partial
    assert verdict.missing_ranks == (5,)
    assert named(verdict) == (3, Phase.ROUTER)
    assert verdict.evidence is not Evidence.INSUFFICIENT


def test_nobody_is_blamed_for_what_a_missing_rank_did(
    partial_steps: tuple[VerdictEngine, list[JoinedStep]],
) -> None:
    """The late rank itself is missing: everybody waited, the transfers look long, nobody present is named."""
    engine, steps = partial_steps
    for step in steps:
        verdict = engine.judge(without(step, 3))
        assert verdict.evidence is Evidence.INSUFFICIENT
        assert verdict.suspect is None
        assert any(b.releaser_rank == -1 and b.ambiguous for b in verdict.barriers)


def test_with_missing_ranks_and_no_history_nobody_is_named() -> None:
    """Without earlier transfers nothing tells whether the missing rank was the last to arrive."""
    step = next(simulate(SimulatedRun(injections=(device(3, 0.3),)))).joined
    verdict = VerdictEngine().judge(without(step, 5))
    assert (verdict.evidence, verdict.suspect) == (Evidence.INSUFFICIENT, None)
    assert "missing" in verdict.reason


def test_partial_steps_stay_out_of_the_history() -> None:
    """After twenty partial steps there is still nothing to compare with."""
    engine = VerdictEngine()
    steps = [s.joined for s in simulate(SimulatedRun(num_steps=21, injections=(device(3, 0.1),)))]
    for step in steps[:20]:
        engine.judge(without(step, 5))
    assert "only 0 of 8" in engine.judge(steps[20]).reason


def test_a_step_without_exchanges_names_nobody_but_shows_its_phases() -> None:
    """Without expert parallelism nothing makes one rank wait for another."""
    verdict = verdicts(SimulatedRun(num_ranks=4, ep_size=1, num_steps=1))[0]
    assert (verdict.evidence, verdict.suspect) == (Evidence.INSUFFICIENT, None)
    assert sum(verdict.phase_ns.values()) == verdict.step_ns > 0


def test_an_empty_step_is_insufficient() -> None:
    """A step of which nothing arrived has a verdict all the same."""
    verdict = VerdictEngine().judge(
        JoinedStep(
            run_id="r", step=1, world_size=2, rank_steps=(), missing_ranks=(0, 1), closed_by=ClosedBy.TIMEOUT
        )
    )
    assert (verdict.evidence, verdict.step_ns, verdict.barriers) == (Evidence.INSUFFICIENT, 0, ())
    assert verdict.partial
