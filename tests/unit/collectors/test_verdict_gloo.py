"""Recorded runs of real gloo ranks with a known injected delay: the verdict must name it."""

from __future__ import annotations

from functools import cache

import pytest

import gloo_replay
from moetrace_collectors.model import StepVerdict
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Cause, Evidence, Phase

INJECTED = sorted(name for name, case in gloo_replay.cases().items() if case["injected"])


@cache
def verdicts(name: str) -> tuple[StepVerdict, ...]:
    """All verdicts of a run but those of its warm-up steps."""
    engine = VerdictEngine()
    return tuple(v for v in map(engine.judge, gloo_replay.joined_steps(name)) if not v.warmup)


def is_right(name: str, verdict: StepVerdict) -> bool:
    """Whether a verdict names the injected rank and phase."""
    injected = gloo_replay.cases()[name]["injected"]
    suspect = verdict.suspect
    return suspect is not None and (suspect.rank, suspect.phase.value) == (
        injected["rank"],
        injected["phase"],
    )


@pytest.mark.parametrize("name", INJECTED)
def test_the_injected_rank_and_phase_are_named(name: str) -> None:
    """In at least 95 % of the steps after warm-up."""
    right = sum(is_right(name, verdict) for verdict in verdicts(name))
    assert len(verdicts(name)) == 55
    assert right >= 0.95 * 55


@pytest.mark.parametrize("name", INJECTED)
def test_the_injected_layer_is_named_or_left_open(name: str) -> None:
    """A delay in one layer names it; a delay in every layer names none."""
    layer = gloo_replay.cases()[name]["injected"].get("layer")
    right = [v.suspect.layer for v in verdicts(name) if is_right(name, v) and v.suspect]
    assert right.count(layer) >= 0.95 * len(right)


@pytest.mark.parametrize("name", INJECTED)
def test_a_clear_verdict_is_never_wrong(name: str) -> None:
    """On the recorded runs every clear verdict names what was injected, and most steps are clear."""
    clear = [v for v in verdicts(name) if v.evidence is Evidence.CLEAR]
    assert all(is_right(name, verdict) for verdict in clear)
    assert len(clear) >= 40


def test_a_run_without_injection_is_mostly_not_clear() -> None:
    """Scheduling on two shared cores does stretch single steps; at most 3 of 55 are called clear."""
    calm = verdicts("calm_2")
    assert sum(v.evidence is Evidence.CLEAR for v in calm) <= 3
    assert sum(v.evidence is Evidence.INSUFFICIENT for v in calm) >= 40


def test_the_longest_collective_names_the_wrong_rank() -> None:
    """The rule that people use today is wrong in nearly every step of a two-rank run."""
    named = 0
    for joined in gloo_replay.joined_steps("outside_2"):
        inside = [int(r.phases.duration_ns[r.phases.flags == 1].max()) for r in joined.rank_steps]
        named += inside.index(max(inside)) == 0 and not joined.rank_steps[0].warmup
    assert named <= 5


@pytest.mark.parametrize("name", sorted(gloo_replay.cases()))
def test_the_frontier_splits_into_phases_exactly(name: str) -> None:
    """Increments and phases both sum to the step, in integer nanoseconds."""
    for verdict in verdicts(name):
        assert sum(b.max_work_ns + b.transfer_ns for b in verdict.barriers) == verdict.step_ns
        assert sum(verdict.phase_ns.values()) == verdict.step_ns
        assert sum(b.extension_ns for b in verdict.barriers) == verdict.extension_ns


def test_the_experts_time_has_no_known_cause_without_rows() -> None:
    """The recordings hold no rows, so routing and device cannot be told apart; outside can."""
    assert {v.cause for v in verdicts("expert_2") if v.suspect} == {Cause.UNKNOWN}
    assert {v.cause for v in verdicts("outside_2") if v.suspect} == {Cause.OUTSIDE}
    assert all(v.suspect is None or v.suspect.phase is not Phase.FUSED for v in verdicts("calm_2"))
