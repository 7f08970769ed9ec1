"""Faults that are there from a run's first step: there are no calm steps to compare with."""

from __future__ import annotations

import pytest

from moetrace_collectors.model import StepVerdict
from moetrace_collectors.simulate import Injection, Noise, SimulatedRun, SimulatedStep, simulate
from moetrace_collectors.simulated_truth import Outcome, outcome
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Cause, Evidence, Phase
from verdict_timeline import exchange, joined, rank_step, work

USUAL = Noise(spread=0.05, hiccups_per_step=0.05, hiccup_ns=100_000.0)
KNOWN_FROM = 8
"""First step with enough steps before it."""


def judged(*faults: Injection, seed: int = 0, **shape: int) -> list[tuple[SimulatedStep, StepVerdict]]:
    """A run's steps and verdicts."""
    run = SimulatedRun(seed=seed, noise=USUAL, num_steps=60, injections=faults, **shape)  # type: ignore[arg-type]
    engine = VerdictEngine()
    return [(step, engine.judge(step.joined)) for step in simulate(run)]


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.UNKNOWN])
@pytest.mark.parametrize("extension", [0.05, 0.3])
def test_no_clear_verdict_is_wrong_from_the_first_step_on(cause: Cause, extension: float) -> None:
    """Whatever is injected: right, or unclear, or a hiccup that really happened; all but a link is named."""
    for seed in range(3):
        found = [
            outcome(*one) for one in judged(Injection(cause=cause, rank=2, extension=extension), seed=seed)
        ]
        assert Outcome.WRONG not in found
        if cause is not Cause.LINK:
            assert found.count(Outcome.RIGHT) >= 0.9 * len(found)


def test_a_link_slow_from_the_first_step_leaves_nobody_clear_beside_it() -> None:
    """Its own history calls it usual; the way back does not, so a hiccup of 3 % is not the clear culprit."""
    for seed in (1, 2, 5):
        found = judged(Injection(cause=Cause.LINK, rank=2, extension=0.3), seed=seed)
        assert all(verdict.evidence is not Evidence.CLEAR for _, verdict in found)
        for _, verdict in found[KNOWN_FROM:]:
            assert "dispatch transfers are" in verdict.reason
            assert "than the same rows on their way back" in verdict.reason


def test_one_layer_that_is_slow_from_the_first_step_is_told_by_the_others() -> None:
    """As many bytes take several times as long in one layer only: the link's cause, and the layer."""
    found = judged(Injection(cause=Cause.LINK, rank=2, extension=0.1, layer=3))
    for _, verdict in found[KNOWN_FROM:]:
        assert (verdict.cause, verdict.suspect, verdict.evidence) == (Cause.LINK, None, Evidence.INSUFFICIENT)
        assert "dispatch transfers of layer 3 are" in verdict.reason


def test_one_group_that_is_slow_from_the_first_step_is_told_by_the_others() -> None:
    """Groups of the same shape on as many hosts should take as long."""
    shape = {"num_ranks": 16, "ep_size": 4, "ranks_per_node": 4}
    found = judged(Injection(cause=Cause.LINK, rank=6, extension=0.3), **shape)
    for _, verdict in found[KNOWN_FROM:]:
        assert verdict.cause is Cause.LINK
        assert "in expert-parallel group 1 are" in verdict.reason


def test_a_group_across_hosts_is_no_peer_of_groups_within_one() -> None:
    """Of 24 ranks on hosts of ten, groups 1 and 2 of six straddle two hosts: slower there is no fault."""
    found = judged(num_ranks=24, num_experts=48, ep_size=6, ranks_per_node=10)
    assert all(verdict.cause is not Cause.LINK for _, verdict in found)


def test_layers_with_larger_payloads_are_no_slow_link() -> None:
    """Five times the bytes of the other layers may take five times as long."""
    engine = VerdictEngine()
    for step in range(12):
        records = []
        for rank in range(2):
            rows = []
            for layer in range(5):
                size = 5 if layer == 3 else 1
                for phase in (Phase.DISPATCH, Phase.COMBINE):
                    rows.append(work(Phase.OUTSIDE, 1000, layer))
                    rows.append(exchange(phase, 200 * size, layer, bytes=1000 * size))
            records.append(rank_step(rank, rows, step=step))
        verdict = engine.judge(joined(*records))
        assert verdict.cause is Cause.UNKNOWN
        assert "transfers" not in verdict.reason


def test_an_exchange_of_counts_is_no_peer() -> None:
    """It tells no bytes of its own: those of the rows that follow it say nothing of how long it may take."""
    engine = VerdictEngine()
    for step in range(12):
        records = []
        for rank in range(2):
            rows = []
            for layer in range(5):
                counts = 900 if layer == 0 else 100
                rows += [work(Phase.OUTSIDE, 3000, layer), exchange(Phase.DISPATCH, counts, layer)]
                rows += [exchange(Phase.DISPATCH, 200, layer, ordinal=1, bytes=1000)]
                rows += [
                    work(Phase.EXPERT_GEMM, 3000, layer),
                    exchange(Phase.COMBINE, 200, layer, bytes=1000),
                ]
            records.append(rank_step(rank, rows, step=step))
        verdict = engine.judge(joined(*records))
        assert (verdict.cause, "transfers" in verdict.reason) == (Cause.UNKNOWN, False)


def test_unknown_bytes_tell_nothing() -> None:
    """The same layer without bytes, and a dispatch twice its combine: nothing to hold them against."""
    engine = VerdictEngine()
    for step in range(12):
        records = []
        for rank in range(2):
            rows = []
            for layer in range(5):
                rows += [work(Phase.OUTSIDE, 1000, layer), exchange(Phase.DISPATCH, 900, layer)]
                rows += [work(Phase.EXPERT_GEMM, 1000, layer), exchange(Phase.COMBINE, 200, layer)]
            records.append(rank_step(rank, rows, step=step))
        verdict = engine.judge(joined(*records))
        assert (verdict.cause, "transfers" in verdict.reason) == (Cause.UNKNOWN, False)
