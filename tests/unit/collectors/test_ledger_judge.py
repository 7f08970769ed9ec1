"""The collector judges changes as they run: once each, when the evidence is enough or the next one begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moetrace_collectors.ledger.comparison import Comparison
from moetrace_collectors.ledger.judge import SETTLE_STEPS, ChangeJudge
from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import Cause, ChangeVerdict, ClosedBy, Evidence
from moetrace_schemas.placement import PlacementTerms

RUN = SyntheticRun(run_id="run", world_size=2, num_layers=1)


def take(judge: ChangeJudge, step: int, version: int, step_ms: float) -> tuple[int, Comparison] | None:
    """Give one joined step."""
    ranks = tuple(replace(rank, placement_version=version) for rank in RUN.step(step))
    joined = JoinedStep(
        run_id="run",
        step=step,
        world_size=2,
        rank_steps=ranks,
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )
    verdict = StepVerdict(
        run_id="run",
        step=step,
        forward_mode=RUN.forward_mode,
        evidence=Evidence.INSUFFICIENT,
        reason="",
        suspect=None,
        cause=Cause.UNKNOWN,
        runner_up=None,
        step_ns=int(step_ms * 1e6),
        extension_ns=0,
    )
    return judge.take(joined, verdict, (), version)


def run(
    judge: ChangeJudge, first: int, count: int, version: int, step_ms: float
) -> list[tuple[int, Comparison]]:
    """Steps of one epoch; what was judged meanwhile."""
    random = np.random.default_rng(first)
    times = step_ms * random.lognormal(0.0, 0.05, count)
    found = [take(judge, first + at, version, time) for at, time in enumerate(times)]
    return [each for each in found if each is not None]


def test_a_slower_epoch_is_judged_once_and_soon() -> None:
    """With the rollback target that was announced; afterwards the epoch is left alone."""
    judge = ChangeJudge()
    judge.announce("run", 5, PlacementTerms(rollback_version=2))
    assert run(judge, 0, 300, 4, 10.0) == []
    ((version, comparison),) = run(judge, 300, 600, 5, 14.0)
    assert (version, comparison.verdict) == (5, ChangeVerdict.REGRESSED)
    assert comparison.rollback_version == 2
    assert comparison.modes[0].steps_after <= 240


def test_an_epoch_like_the_one_before_is_accepted() -> None:
    """Nothing regressed, and enough steps say so."""
    judge = ChangeJudge()
    run(judge, 0, 300, 4, 10.0)
    ((version, comparison),) = run(judge, 300, 600, 5, 10.0)
    assert (version, comparison.verdict) == (5, ChangeVerdict.ACCEPTED)


def test_an_epoch_that_ends_early_is_not_enough_evidence() -> None:
    """It is judged as the next one begins, with what there was: no change goes without a row."""
    judge = ChangeJudge()
    run(judge, 0, 300, 4, 10.0)
    assert run(judge, 300, 20, 5, 10.0) == []
    ((version, comparison),) = run(judge, 320, 1, 6, 10.0)
    assert (version, comparison.verdict) == (5, ChangeVerdict.NOT_ENOUGH_EVIDENCE)


def test_the_migration_itself_is_not_judged() -> None:
    """The first steps of an epoch run beside the copying of weights."""
    judge = ChangeJudge()
    run(judge, 0, 300, 4, 10.0)
    found = run(judge, 300, SETTLE_STEPS, 5, 500.0) + run(judge, 300 + SETTLE_STEPS, 600, 5, 10.0)
    assert [comparison.verdict for _, comparison in found] == [ChangeVerdict.ACCEPTED]


def test_stragglers_of_the_epoch_before_begin_nothing() -> None:
    """A step that closes late, after the change, is of its own epoch."""
    judge = ChangeJudge()
    run(judge, 0, 300, 4, 10.0)
    found = run(judge, 301, 30, 5, 10.0)
    assert take(judge, 300, 4, 10.0) is None
    found += run(judge, 331, 600, 5, 10.0)
    assert [version for version, _ in found] == [5]
