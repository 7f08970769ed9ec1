"""Exchanges, frontier and extensions on hand-drawn steps: every edge has a known answer."""

from __future__ import annotations

from moetrace_collectors.model import JoinedStep, RankStep, StepVerdict
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Direction, Phase
from verdict_timeline import exchange, joined, layer_rows, rank_step, work


def judge(step: JoinedStep) -> StepVerdict:
    """The verdict of a first step."""
    return VerdictEngine().judge(step)


def test_a_barrier_is_released_by_the_rank_that_waited_least() -> None:
    """Transfer is the shortest duration, the rest is wait, and the releaser is who made the others wait.

    ::

        rank 0  |= outside 40 =|~~ wait 30 ~~|10|= gemm 20 =|~ 0 ~|10|
        rank 1  |==== outside 70 ===========|10|= gemm 8 =|~~ 12 ~|10|
    """
    verdict = judge(
        joined(
            rank_step(0, layer_rows(0, 40, 20, (30, 0))),
            rank_step(1, layer_rows(0, 70, 8, (0, 12))),
        )
    )
    dispatch, combine, tail = verdict.barriers
    assert (dispatch.transfer_ns, dispatch.wait_sum_ns, dispatch.releaser_rank) == (10, 30, 1)
    assert (dispatch.max_work_ns, dispatch.mean_work_ns, dispatch.extension_ns) == (70, 55, 15)
    assert (combine.transfer_ns, combine.wait_sum_ns, combine.releaser_rank) == (10, 12, 0)
    assert (combine.max_work_ns, combine.mean_work_ns, combine.extension_ns) == (20, 14, 6)
    assert (tail.phase, tail.layer, tail.max_work_ns, tail.transfer_ns) == (Phase.OUTSIDE, -1, 0, 0)
    assert verdict.step_ns == 70 + 10 + 20 + 10
    assert verdict.extension_ns == 15 + 6
    assert verdict.phase_ns == {
        Phase.OUTSIDE: 70,
        Phase.DISPATCH: 10,
        Phase.EXPERT_GEMM: 20,
        Phase.COMBINE: 10,
    }


def test_the_rank_with_the_longest_collective_is_not_the_culprit() -> None:
    """Rank 0 spends the longest in its collectives because it waits for rank 1.

    ::

        rank 0  |10|~~~~~~~~ wait 90 ~~~~~~~|10|          longest collective: rank 0
        rank 1  |========= outside 100 =====|10|          culprit: rank 1
    """
    verdict = judge(
        joined(
            rank_step(0, layer_rows(0, 10, 50, (90, 0))),
            rank_step(1, layer_rows(0, 100, 50, (0, 0))),
        )
    )
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.phase) == (1, Phase.OUTSIDE)


def test_the_phase_is_the_one_with_the_largest_excess_and_not_the_longest() -> None:
    """Outside is the longest phase of the late rank, but it is late through its router.

    ::

        rank 0  |== outside 100 ==|r 5|~~~~ wait 38 ~~~~|10|
        rank 1  |== outside 103 ===|==== router 40 =====|10|
    """
    rows = [
        [work(Phase.OUTSIDE, 100), work(Phase.ROUTER, 5), exchange(Phase.DISPATCH, 48)],
        [work(Phase.OUTSIDE, 103), work(Phase.ROUTER, 40), exchange(Phase.DISPATCH, 10)],
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    assert verdict.barriers[0].work_phase is Phase.ROUTER


def test_waits_that_work_does_not_explain_make_a_barrier_ambiguous() -> None:
    """Carry-over: rank 1 left the dispatch 30 later than rank 0, so rank 0 waits in the combine for no work.

    ::

        rank 0  |50|10|= gemm 20 =|~~~~ wait 30 ~~~~|10|
        rank 1  |50|======= 40 ======|= gemm 20 =|10|      same work, released late
    """
    verdict = judge(
        joined(
            rank_step(0, layer_rows(0, 50, 20, (0, 30))),
            rank_step(1, layer_rows(0, 50, 20, (30, 0))),
        )
    )
    assert verdict.barriers[1].ambiguous
    assert verdict.barriers[1].extension_ns == 0
    assert verdict.suspect is None


def test_work_that_the_waits_deny_makes_a_barrier_ambiguous() -> None:
    """Rank 1 reports 60 more work than rank 0, yet it was rank 1 that waited: its work overlapped something.

    ::

        rank 0  |= outside 40 =|10|
        rank 1  |==== outside 100 ====|~~ wait 20 ~~|10|
    """
    verdict = judge(
        joined(
            rank_step(0, layer_rows(0, 40, 20, (0, 0))),
            rank_step(1, layer_rows(0, 100, 20, (20, 0))),
        )
    )
    assert verdict.barriers[0].ambiguous
    assert verdict.barriers[0].releaser_rank == 0
    assert verdict.suspect is None


def test_a_count_exchange_before_the_payload_costs_nothing_twice() -> None:
    """The late rank is charged at the count exchange; the payload exchange that follows at once is even.

    ::

        rank 0  |= 20 =|~~~ wait 60 ~~~|5|       |10|
        rank 1  |======== 80 ==========|5|       |10|
                                       ordinal 0  ordinal 1
    """
    rows = [
        [
            work(Phase.OUTSIDE, outside),
            exchange(Phase.DISPATCH, counts),
            exchange(Phase.DISPATCH, 10, ordinal=1),
            work(Phase.EXPERT_GEMM, 50),
            exchange(Phase.COMBINE, 10),
        ]
        for outside, counts in ((20, 65), (80, 5))
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    counts, payload = verdict.barriers[:2]
    assert (counts.ordinal, counts.releaser_rank, counts.extension_ns) == (0, 1, 30)
    assert (payload.ordinal, payload.max_work_ns, payload.extension_ns, payload.transfer_ns) == (1, 0, 0, 10)
    assert not verdict.barriers[1].ambiguous


def test_a_fault_in_every_layer_names_no_layer() -> None:
    """Four layers with 20 each are the rank's fault and not a layer's."""
    ranks = [[], []]
    for layer in range(4):
        ranks[0] += layer_rows(layer, 100, 50, (20, 0))
        ranks[1] += layer_rows(layer, 120, 50, (0, 0))
    verdict = judge(joined(*(rank_step(rank, rows) for rank, rows in enumerate(ranks))))
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.layer, verdict.suspect.worth_ns) == (1, None, 40)


def test_a_layer_is_named_where_it_holds_half_of_the_worth() -> None:
    """Layer 2 holds 60 of 80."""
    ranks = [[], []]
    for layer in range(3):
        late = (20, 60)[layer == 2] if layer else 0
        ranks[0] += layer_rows(layer, 100, 50, (late, 0))
        ranks[1] += layer_rows(layer, 100 + late, 50, (0, 0))
    verdict = judge(joined(*(rank_step(rank, rows) for rank, rows in enumerate(ranks))))
    assert verdict.suspect is not None
    assert (verdict.suspect.layer, verdict.suspect.share) == (2, 1.0)


def test_work_after_the_combine_belongs_to_its_own_layer() -> None:
    """A slow unpermute of layer 0 delays the dispatch of layer 1; the layer to look at is 0.

    ::

        rank 0  ..combine 0|unpermute 5|outside 50|~~ 45 ~~|10 (dispatch 1)|
        rank 1  ..combine 0|==== unpermute 50 ====|outside 50|10|
    """
    ranks = []
    for unpermute, wait in ((5, 45), (50, 0)):
        rows = layer_rows(0, 50, 50, (0, 0))
        rows.append(work(Phase.UNPERMUTE, unpermute, 0))
        ranks.append(rows + layer_rows(1, 50, 50, (wait, 0)))
    verdict = judge(joined(*(rank_step(rank, rows) for rank, rows in enumerate(ranks))))
    assert verdict.suspect is not None
    assert (verdict.suspect.phase, verdict.suspect.layer) == (Phase.UNPERMUTE, 0)
    assert verdict.barriers[2].layer == 1


def test_the_tail_extends_the_step_but_is_weaker_evidence() -> None:
    """Nothing synchronises work after the last exchange: it counts, marked ambiguous.

    ::

        rank 0  ...|combine 10|unpermute 10|
        rank 1  ...|combine 10|======= unpermute 60 =======|
    """
    ranks = [[*layer_rows(0, 50, 50, (0, 0)), work(Phase.UNPERMUTE, unpermute, 0)] for unpermute in (10, 60)]
    verdict = judge(joined(*(rank_step(rank, rows) for rank, rows in enumerate(ranks))))
    tail = verdict.barriers[-1]
    assert (tail.layer, tail.phase, tail.work_phase) == (-1, Phase.OUTSIDE, Phase.UNPERMUTE)
    assert (tail.max_work_ns, tail.transfer_ns, tail.extension_ns, tail.ambiguous) == (60, 0, 25, True)
    assert verdict.step_ns == 50 + 10 + 50 + 10 + 60


def test_dispatch_rows_without_the_flag_are_work_around_the_exchange() -> None:
    """A late launch is the host's: local work of phase dispatch, beside the flagged exchange.

    ::

        rank 0  |outside 50|launch 2|~~~ wait 48 ~~~|10|
        rank 1  |outside 50|======== launch 50 =====|10|
    """
    rows = [
        [work(Phase.OUTSIDE, 50), work(Phase.DISPATCH, launch), exchange(Phase.DISPATCH, inside)]
        for launch, inside in ((2, 58), (50, 10))
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    assert len(verdict.barriers) == 2
    assert verdict.barriers[0].work_phase is Phase.DISPATCH
    assert verdict.phase_ns == {Phase.OUTSIDE: 50, Phase.DISPATCH: 60}


def test_without_any_flag_dispatch_and_combine_are_the_exchanges() -> None:
    """A sender that does not know the flag is read by phase."""
    rows = [
        [work(Phase.OUTSIDE, outside), work(Phase.DISPATCH, inside), work(Phase.EXPERT_GEMM, 5)]
        for outside, inside in ((20, 70), (80, 10))
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    first = verdict.barriers[0]
    assert (first.phase, first.releaser_rank, first.extension_ns) == (Phase.DISPATCH, 1, 30)
    assert (first.max_work_ns, first.transfer_ns) == (80, 10)


def test_forward_and_backward_of_a_layer_are_different_exchanges() -> None:
    """The backward combine comes first and has the same layer; keys tell the two passes apart.

    ::

        forward 0:  outside | dispatch | gemm | combine    backward 0:  outside | combine | gemm | dispatch
    """
    ranks = []
    for outside, wait in ((10, 40), (50, 0)):
        back = {"direction": Direction.BACKWARD}
        ranks.append(
            [
                *layer_rows(0, 30, 30, (0, 0)),
                work(Phase.OUTSIDE, outside, **back),
                exchange(Phase.COMBINE, 10 + wait, **back),
                work(Phase.EXPERT_GEMM, 60, **back),
                exchange(Phase.DISPATCH, 10, **back),
            ]
        )
    verdict = judge(joined(*(rank_step(rank, rows) for rank, rows in enumerate(ranks))))
    assert [(b.phase, b.direction, b.extension_ns) for b in verdict.barriers[:4]] == [
        (Phase.DISPATCH, Direction.FORWARD, 0),
        (Phase.COMBINE, Direction.FORWARD, 0),
        (Phase.COMBINE, Direction.BACKWARD, 20),
        (Phase.DISPATCH, Direction.BACKWARD, 0),
    ]


def test_microbatches_of_one_rank_are_put_in_order_of_start() -> None:
    """Two records per rank, one per microbatch, interleaved in time; each exchange meets its own.

    ::

        rank 0  |mb0 20|disp 0|mb1 20|disp 1|
        rank 1  |mb0 20|disp 0|mb1 ===== 60 |disp 1|
    """

    def records(rank: int, second: int, wait: int) -> list[RankStep]:
        first = [work(Phase.OUTSIDE, 20), exchange(Phase.DISPATCH, 10)]
        later = [
            work(Phase.OUTSIDE, second, microbatch=1),
            exchange(Phase.DISPATCH, 10 + wait, microbatch=1),
        ]
        return [
            rank_step(rank, later, microbatch=1, start_unix_ns=30),
            rank_step(rank, first, microbatch=0, start_unix_ns=0),
        ]

    verdict = judge(joined(*records(0, 20, 40), *records(1, 60, 0)))
    assert [(b.microbatch, b.extension_ns) for b in verdict.barriers[:2]] == [(0, 0), (1, 20)]
    assert verdict.barriers[1].releaser_rank == 1


def test_groups_are_judged_apart_and_the_slowest_is_the_frontier() -> None:
    """Group 0 takes 90, group 1 takes 140; ranks of one group never wait for the other's."""
    verdict = judge(
        joined(
            rank_step(0, layer_rows(0, 40, 30, (0, 0))),
            rank_step(1, layer_rows(0, 40, 30, (0, 0))),
            rank_step(2, layer_rows(0, 30, 40, (60, 0)), ep_group=1),
            rank_step(3, layer_rows(0, 90, 40, (0, 0)), ep_group=1),
        )
    )
    assert verdict.step_ns == 90 + 10 + 40 + 10
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.worth_ns, verdict.suspect.share) == (3, 30, 1.0)
    assert {b.ep_group for b in verdict.barriers} == {0, 1}


def test_an_exchange_that_one_rank_alone_has_shifts_no_other() -> None:
    """Matched by key: layer 1's exchanges still meet layer 1's, and only what follows the odd one is marked.

    ::

        rank 0  |layer 0|                 |layer 1|
        rank 1  |layer 0|5|dispatch 9: 12 |layer 1|
        rank 2  |layer 0|                 |layer 1|
    """
    even = [*layer_rows(0, 50, 20, (0, 0)), *layer_rows(1, 50, 20, (0, 0))]
    odd = [work(Phase.OUTSIDE, 5, 9), exchange(Phase.DISPATCH, 12, 9)]
    extra = [*layer_rows(0, 50, 20, (0, 0)), *odd, *layer_rows(1, 50, 20, (0, 0))]
    verdict = judge(joined(*(rank_step(r, (even, extra, even)[r], ep_size=3) for r in range(3))))
    layer_one = [b for b in verdict.barriers if b.layer == 1]
    assert [b.layer for b in verdict.barriers] == [0, 0, 1, 1, -1]
    assert [b.ambiguous for b in layer_one] == [True, False]
    assert layer_one[0].max_work_ns == 50 + 5 + 12


def test_a_rank_with_a_truncated_step_counts_as_missing() -> None:
    """A rank that recorded a fraction of the exchanges must not cut the others' step short."""
    full = [row for layer in range(4) for row in layer_rows(layer, 50, 20, (0, 0))]
    verdict = judge(
        joined(
            rank_step(0, full, ep_size=3),
            rank_step(1, full[:3], ep_size=3),
            rank_step(2, full, ep_size=3),
        )
    )
    assert verdict.partial
    assert len(verdict.barriers) == 9


def test_work_hidden_under_an_exchange_is_not_counted() -> None:
    """A shared expert on another stream costs only what sticks out of the exchange.

    ::

        stream 0  |outside 50|==== dispatch 40 ====|      |gemm 20|
        stream 1              |===== shared_expert 55 ===|
                                                   |< 15 >|  exposed
    """
    rows = [
        work(Phase.OUTSIDE, 50),
        exchange(Phase.DISPATCH, 40),
        work(Phase.SHARED_EXPERT, 55, stream=1, start=50),
        work(Phase.EXPERT_GEMM, 20, start=105),
        exchange(Phase.COMBINE, 10),
    ]
    verdict = judge(joined(rank_step(0, rows), rank_step(1, rows)))
    assert verdict.phase_ns == {
        Phase.OUTSIDE: 50,
        Phase.DISPATCH: 40,
        Phase.SHARED_EXPERT: 15,
        Phase.EXPERT_GEMM: 20,
        Phase.COMBINE: 10,
    }


def test_an_exchange_hidden_under_compute_costs_its_exposed_rest() -> None:
    """Two-batch overlap: the exchange runs on its own stream while the other batch computes.

    ::

        stream 0  |outside 50|= gemm (other batch) 30 =|          |gemm 20|
        stream 1             |======== dispatch 45 ===============|
                                                       |<-- 15 -->|  exposed
    """
    rows = [
        work(Phase.OUTSIDE, 50),
        exchange(Phase.DISPATCH, 45, stream=1, start=50),
        work(Phase.EXPERT_GEMM, 30, start=50, microbatch=1),
        work(Phase.EXPERT_GEMM, 20, start=95),
        exchange(Phase.COMBINE, 10),
    ]
    verdict = judge(joined(rank_step(0, rows), rank_step(1, rows)))
    assert (verdict.barriers[0].transfer_ns, verdict.barriers[1].max_work_ns) == (15, 50)
    assert verdict.step_ns == 50 + 15 + 50 + 10


def test_fused_time_is_shown_as_fused() -> None:
    """Parts that cannot be told apart are never split or dropped."""
    rows = [
        [
            work(Phase.OUTSIDE, 50),
            exchange(Phase.DISPATCH, 10),
            work(Phase.FUSED, fused),
            exchange(Phase.COMBINE, 10 + wait),
        ]
        for fused, wait in ((40, 50), (90, 0))
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    assert verdict.suspect is not None
    assert (verdict.suspect.rank, verdict.suspect.phase) == (1, Phase.FUSED)
    assert verdict.phase_ns[Phase.FUSED] == 90


def test_ranks_may_record_different_local_rows() -> None:
    """One rank splits its work into more intervals than the other: the exchanges still meet.

    ::

        rank 0  |outside 20|router 10|~~~ 40 ~~~|10|
        rank 1  |== outside 60 ======|router 5|router 5|10|
    """
    rows = [
        [work(Phase.OUTSIDE, 20), work(Phase.ROUTER, 10), exchange(Phase.DISPATCH, 50)],
        [
            work(Phase.OUTSIDE, 60),
            work(Phase.ROUTER, 5),
            work(Phase.ROUTER, 5, ordinal=1),
            exchange(Phase.DISPATCH, 10),
        ],
    ]
    verdict = judge(joined(*(rank_step(rank, rows[rank]) for rank in range(2))))
    first = verdict.barriers[0]
    assert (first.releaser_rank, first.work_phase, first.extension_ns) == (1, Phase.OUTSIDE, 20)
    assert not first.ambiguous


def test_repeated_keys_are_matched_by_occurrence() -> None:
    """A sender without ordinals repeats a key; the second one of each rank meets the second of the others."""
    twice = [work(Phase.OUTSIDE, 50), exchange(Phase.DISPATCH, 10), exchange(Phase.DISPATCH, 7)]
    odd = [*twice, work(Phase.EXPERT_GEMM, 5), exchange(Phase.COMBINE, 10)]
    verdict = judge(joined(*(rank_step(r, (twice, odd, twice)[r], ep_size=3) for r in range(3))))
    assert [b.transfer_ns for b in verdict.barriers] == [10, 7, 0]
