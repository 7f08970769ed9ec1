"""Routing receipts over a group: rows are followed from the routers to the experts of all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetrace.record.count_sites import CountSite
from moetrace.record.receipts import settle
from moetrace.record.types import ExpertRow
from moetrace_collectors.model import ExpertCounts, JoinedStep, RankStep, TrafficRow
from moetrace_collectors.receipts import group_violations
from moetrace_collectors.simulate import SimulatedRun, simulate
from moetrace_collectors.testing import SyntheticRun
from moetrace_schemas.enums import (
    COUNT_KIND_CODE,
    PHASE_CODE,
    ClosedBy,
    CountKind,
    ForwardMode,
    Phase,
    RoutingViolation,
)

RUN = SyntheticRun(world_size=2, num_layers=1, num_experts=4)
RECEIVED_KIND = COUNT_KIND_CODE[CountKind.RECEIVED]
ROUTED = [[3, 1, 4, 0], [2, 1, 1, 2]]
SENT = [[4, 4], [3, 3]]
RECEIVED = [[5, 2, 0, 0], [0, 0, 5, 2]]


def ranks(
    *, routed: list[list[int]] = ROUTED, sent: list[list[int]] = SENT, received: list[list[int]] = RECEIVED
) -> tuple[RankStep, ...]:
    """Two ranks of one layer; experts 0 and 1 live on the first."""
    found = []
    for rank, step in enumerate(RUN.step(0)):
        experts = tuple(
            ExpertCounts(layer=0, kind=COUNT_KIND_CODE[kind], counts=np.array(counts[rank]))
            for kind, counts in ((CountKind.ROUTED, routed), (CountKind.RECEIVED, received))
        )
        traffic = TrafficRow(
            layer=0, phase=PHASE_CODE[Phase.DISPATCH], row_bytes=16, rows=np.array(sent[rank])
        )
        found.append(replace(step, experts=experts, traffic=(traffic,)))
    return tuple(found)


def whole(rank_steps: tuple[RankStep, ...]) -> JoinedStep:
    """All ranks of one step, joined."""
    return JoinedStep(
        run_id=RUN.run_id,
        step=rank_steps[0].step,
        world_size=len(rank_steps),
        rank_steps=rank_steps,
        missing_ranks=(),
        closed_by=ClosedBy.COMPLETE,
    )


def found(rank_steps: tuple[RankStep, ...]) -> dict[RoutingViolation, int]:
    """Violations of the joined step."""
    result = group_violations(whole(rank_steps))
    assert {(v.ep_group, v.layer) for v in result} <= {(0, 0)}
    return {violation.violation: violation.count for violation in result}


def test_a_sound_group_contradicts_nothing() -> None:
    """What all routers chose is what all experts got; also in the steps of a simulated run."""
    assert found(ranks()) == {}
    simulated = SimulatedRun(num_ranks=4, num_layers=2, num_experts=8, num_steps=2)
    assert [group_violations(step.joined) for step in simulate(simulated)] == [(), ()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 20])
def test_a_synthetic_run_contradicts_nothing(world_size: int) -> None:
    """What every rank receives is what all ranks routed and sent to it, in all columns."""
    run = SyntheticRun(world_size=world_size, num_pairs=1000)
    for step in range(3):
        rank_steps = run.step(step)
        assert group_violations(whole(rank_steps)) == ()
        for layer in range(run.num_layers):
            sent = np.array(
                [entry.rows for rank in rank_steps for entry in rank.traffic if entry.layer == layer]
            )
            for rank in rank_steps:
                received = [e.counts for e in rank.experts if (e.layer, e.kind) == (layer, RECEIVED_KIND)]
                phases = rank.phases
                gemm = (phases.layer == layer) & (phases.phase == PHASE_CODE[Phase.EXPERT_GEMM])
                assert int(received[0].sum()) == int(sent[:, rank.rank].sum()) == int(phases.rows[gemm].sum())


def test_a_synthetic_run_loses_rows_where_asked() -> None:
    """The injected violation is one of conservation, in as many rows, in layer 0."""
    (violation,) = group_violations(whole(SyntheticRun(lost_rows=7).step(0)))
    assert (violation.violation, violation.layer, violation.count) == (RoutingViolation.CONSERVATION, 0, 7)


def test_rows_that_never_came_are_lost() -> None:
    """Two rows less than were chosen, at an expert that got the rest."""
    assert found(ranks(received=[[3, 2, 0, 0], [0, 0, 5, 2]])) == {RoutingViolation.CONSERVATION: 2}


def test_rows_that_nobody_chose_are_named() -> None:
    """As many rows in all, but three of them at an expert to which no rank of the group routed them."""
    assert found(ranks(received=[[2, 5, 0, 0], [0, 0, 5, 2]])) == {RoutingViolation.EXECUTED_NOT_SELECTED: 3}


def test_padding_is_sent_and_computed_as_well() -> None:
    """Rows of padding tokens are due like all others."""
    first, second = ranks(routed=[[2, 1, 4, 0], ROUTED[1]])
    padding = ExpertCounts(layer=0, kind=COUNT_KIND_CODE[CountKind.PADDING], counts=np.array([1, 0, 0, 0]))
    assert found((replace(first, experts=(*first.experts, padding)), second)) == {}


def idle(rank_steps: tuple[RankStep, ...], rank: int) -> tuple[RankStep, ...]:
    """The same rows on the wire, but what this rank routed was a dummy batch, told as a total."""
    step = rank_steps[rank]
    routed, *others = step.experts
    total = replace(routed, kind=COUNT_KIND_CODE[CountKind.DUMMY], counts=np.array([routed.counts.sum()]))
    changed = replace(step, experts=(total, *others))
    return (*rank_steps[:rank], changed, *rank_steps[rank + 1 :])


def test_rows_of_an_idle_rank_may_have_gone_anywhere() -> None:
    """A sound group stays sound with one idle rank, or with two; rows that never came are still missed.

    Rows at an expert that nobody chose are named as far as the dummy batch cannot have sent them there.
    """
    assert [found(idle(ranks(), rank)) for rank in (0, 1)] == [{}, {}]
    assert found(idle(idle(ranks(), 0), 1)) == {}
    lost = ranks(received=[[3, 2, 0, 0], [0, 0, 5, 2]])
    assert found(idle(lost, 1)) == {RoutingViolation.CONSERVATION: 2}
    # Rank 0 chose [3 1 | 4 0]. Of nine rows too many at experts 1 and 3, rank 1 may have sent six.
    assert found(idle(ranks(received=[[0, 8, 0, 0], [0, 0, 4, 2]]), 1)) == {
        RoutingViolation.EXECUTED_NOT_SELECTED: 3
    }


def test_a_group_with_an_idle_rank_that_chose_no_expert_is_checked() -> None:
    """The library's total is what was sent, whatever else the idle rank's router gave."""
    given = [
        ExpertRow(layer=0, kind=CountKind.ROUTED, counts=tuple(ROUTED[1])),
        ExpertRow(layer=0, kind=CountKind.INVALID, counts=(5,)),
        ExpertRow(layer=0, kind=CountKind.DROPPED, counts=(0, 3, 0, 0)),
    ]
    (total,) = settle(given, [CountSite(0, 4, ep_size=2)], dummy=True).experts
    lost = idle(ranks(received=[[3, 2, 0, 0], [0, 0, 5, 2]]), 1)
    dummy, *others = lost[1].experts
    told = replace(dummy, counts=np.array(total.counts))
    assert found((lost[0], replace(lost[1], experts=(told, *others)))) == {RoutingViolation.CONSERVATION: 2}


def test_an_idle_rank_belongs_to_those_whom_it_keeps_company() -> None:
    """Whatever it says that its own batch is for; ranks of two kinds of batches are still none to compare."""
    lost = idle(ranks(received=[[3, 2, 0, 0], [0, 0, 5, 2]]), 1)
    first, second = (
        replace(step, forward_mode=mode)
        for step, mode in zip(lost, (ForwardMode.PREFILL, ForwardMode.DECODE), strict=True)
    )
    (violation,) = group_violations(whole((first, second)))
    assert (violation.forward_mode, violation.violation, violation.count) == (
        ForwardMode.PREFILL,
        RoutingViolation.CONSERVATION,
        2,
    )
    busy = ranks(received=[[3, 2, 0, 0], [0, 0, 5, 2]])[1]
    assert found((first, replace(busy, forward_mode=ForwardMode.DECODE))) == {}


def test_an_idle_rank_whose_rows_do_not_add_up_is_left_alone() -> None:
    """Its dispatcher sent less than a row per pair: nothing can be followed."""
    assert found(idle(ranks(sent=[[4, 4], [3, 2]], received=[[0, 0, 0, 0], [0, 0, 5, 2]]), 1)) == {}


@pytest.mark.parametrize(
    "steps",
    [
        ranks(received=[[0, 0, 0, 0], [0, 0, 5, 2]])[:1],
        ranks(received=[[0, 0, 0, 0], [0, 0, 5, 2]], sent=[[4, 4], [9, 9]]),
        tuple(replace(step, traffic=()) for step in ranks(received=[[0, 0, 0, 0], [0, 0, 5, 2]])),
        tuple(replace(step, experts=step.experts[:1]) for step in ranks()),
    ],
    ids=["a rank is missing", "rows are padded", "nothing is known of the rows", "nothing is received"],
)
def test_where_rows_cannot_be_followed_nothing_is_said(steps: tuple[RankStep, ...]) -> None:
    """No accusation without both sides."""
    assert found(steps) == {}
