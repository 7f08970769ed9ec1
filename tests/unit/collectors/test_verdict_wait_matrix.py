"""Waits that kernels told, as evidence for a slow link: whose ends, and only where the matrix is whole."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moetrace_collectors.model import IntArray, RankStep, WaitCycles
from moetrace_collectors.simulate import Injection, SimulatedRun, simulate
from moetrace_collectors.verdict import VerdictEngine
from moetrace_collectors.verdict.wait_matrix import group_matrix, slow_ends
from moetrace_schemas.enums import PHASE_CODE, Cause, Phase

SIZE = 8


def rank_steps(
    template: RankStep, matrix: IntArray, *, first_rank: int = 0, phase: Phase = Phase.DISPATCH
) -> list[RankStep]:
    """One group whose kernels waited so."""
    return [
        dataclasses.replace(
            template,
            rank=first_rank + at,
            ep_rank=at,
            ep_size=len(matrix),
            ep_group=first_rank,
            waits=(WaitCycles(phase=PHASE_CODE[phase], cycles=row),),
        )
        for at, row in enumerate(matrix)
    ]


@pytest.fixture
def template() -> RankStep:
    """Any rank step."""
    return next(iter(simulate(SimulatedRun(num_steps=1)))).joined.rank_steps[0]


def waits(**slow: tuple[int, int]) -> IntArray:
    """Even waits, and slow cells: `column`, `row` or `point`."""
    matrix: IntArray = np.full((SIZE, SIZE), 100, dtype=np.int64)
    np.fill_diagonal(matrix, 0)
    for kind, (row, column) in slow.items():
        cells = {"column": np.s_[:, column], "row": np.s_[row, :], "point": np.s_[row, column]}[kind]
        matrix[cells] *= 20
    return matrix


def test_ends_are_named_by_their_global_ranks(template: RankStep) -> None:
    """A column, a row and a point of the second group's matrix."""
    for slow, said in (
        (waits(column=(0, 3)), "all ranks waited long for rank 11"),
        (waits(row=(5, 0)), "rank 13 waited long for all ranks"),
        (waits(point=(1, 6)), "rank 9 waited long for rank 14 alone"),
        (waits(), ""),
    ):
        steps = [*rank_steps(template, waits()), *rank_steps(template, slow, first_rank=8)]
        assert slow_ends(steps, 8, Phase.DISPATCH) == said
        assert slow_ends(steps, 0, Phase.DISPATCH) == ""
        assert slow_ends(steps, 8, Phase.COMBINE) == ""


def test_a_matrix_without_all_its_rows_says_nothing(template: RankStep) -> None:
    """A rank that tells no waits is not one that never waits."""
    steps = rank_steps(template, waits(column=(0, 3)))
    silent = [dataclasses.replace(steps[0], waits=()), *steps[1:]]
    assert slow_ends(silent, 0, Phase.DISPATCH) == ""
    assert slow_ends(steps[1:], 0, Phase.DISPATCH) == ""
    assert slow_ends([], 0, Phase.DISPATCH) == ""


def test_microbatches_of_a_step_add_up(template: RankStep) -> None:
    """Each is a rank step of its own."""
    steps = rank_steps(template, waits())
    again = [dataclasses.replace(one, microbatch=1) for one in steps]
    found = group_matrix([*steps, *again], 0, Phase.DISPATCH)
    assert found is not None
    assert (found[0] == waits() * 2).all()
    assert found[1] == tuple(range(SIZE))


def test_a_slow_link_that_kernels_saw_is_named_beside_the_cause() -> None:
    """Durations tell the cause; cycles are no time, so nobody is blamed for a worth."""
    fault = Injection(cause=Cause.LINK, rank=2, extension=0.08, layer=3, first_step=20)
    engine = VerdictEngine()
    run = SimulatedRun(num_ranks=SIZE, num_experts=2 * SIZE, num_steps=30, injections=(fault,))
    for step in simulate(run):
        seen = rank_steps(step.joined.rank_steps[0], waits(point=(1, 6)))
        told = tuple(
            dataclasses.replace(one, waits=row.waits)
            for one, row in zip(step.joined.rank_steps, seen, strict=True)
        )
        verdict = engine.judge(dataclasses.replace(step.joined, rank_steps=told))
        if step.joined.step >= 25:
            assert (verdict.cause, verdict.suspect) == (Cause.LINK, None)
            assert "kernels summed, rank 1 waited long for rank 6 alone." in verdict.reason
