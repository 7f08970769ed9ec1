"""Hand-drawn steps with every row asserted, and properties that hold for any input."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace.record.assemble import assemble
from moetrace.record.exchanges import Interval
from moetrace.record.sites import Role, Site
from moetrace.record.types import PhaseRow
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Phase

from .intervals import EXCHANGE, GEMM, block, call, experts, launch, lines, messy, nested, phase, wait


def test_a_plain_layer_shows_its_phases_and_what_lies_between_them() -> None:
    """Without exchange, glue is permute and unpermute where the experts tell their GEMMs apart.

    ::

        0    10                              90  100
        |     |------------- block 0 ---------|   |
        |       |router|  |---- experts ----|     |
        |       12    20  25 |gemm|  |gemm|  80   |
        |                   30   40  50   60      |
    """
    rows = assemble(
        [
            call(block(0), 10, 90),
            call(phase("router", 0), 12, 20),
            call(experts(0), 25, 80),
            call(GEMM, 30, 40),
            call(GEMM, 50, 60),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-12",
        "0 router 12-20",
        "0 permute 20-30",
        "0 expert_gemm 30-60",
        "0 unpermute 60-80",
        "-1 outside 80-100",
    ]


def test_experts_that_cannot_be_split_are_fused_with_the_glue_around_them() -> None:
    """Without exchange and without a permute of its own, nothing is called permute: it is all fused.

    ::

        0    10                        90 100
        |     |------- block 2 --------|   |
        |      |router|  |-- experts --|   |
        |      10    20  30           80   |
    """
    rows = assemble(
        [call(block(2), 10, 90), call(phase("router", 2), 10, 20), call(experts(2), 30, 80)], 0, 100
    )
    assert lines(rows) == ["2 outside 0-10", "2 router 10-20", "2 fused 20-80", "-1 outside 80-100"]


def test_an_expert_parallel_layer_shows_count_and_payload_exchange() -> None:
    """Both exchanges of the dispatch are barriers, told apart by ordinal; the combine is one more.

    ::

        0   10                                                             200
        |    |------------------------- block 1 -------------------------|  |
        |    |router| |--- permute ---------------|                     190 |
        |    10    20 25 |count| |payload|        80                        |
        |                30   40 45     70           |experts| |unpermute|  |
        |                                            90    120 130     180  |
        |                                                       |comb|      |
        |                                                      140  160     |
    """
    rows = assemble(
        [
            call(block(1), 10, 190),
            call(phase("router", 1), 10, 20),
            call(phase("permute", 1), 25, 80),
            call(EXCHANGE, 30, 40),
            call(EXCHANGE, 45, 70),
            call(experts(1, "expert_gemm"), 90, 120),
            call(phase("unpermute", 1), 130, 180),
            call(EXCHANGE, 140, 160),
        ],
        0,
        200,
    )
    assert lines(rows) == [
        "1 outside 0-10",
        "1 router 10-20",
        "1 permute 20-30",
        "1 dispatch 30-40 barrier",
        "1 permute 40-45",
        "1 dispatch 45-70 barrier",
        "1 permute 70-90",
        "1 expert_gemm 90-120",
        "1 unpermute 120-140",
        "1 combine 140-160 barrier",
        "1 unpermute 160-180",
        "-1 outside 180-200",
    ]
    assert [row.ordinal for row in rows if row.phase is Phase.DISPATCH] == [0, 1]


def test_an_experts_call_around_the_whole_exchange_is_glue_between_its_parts() -> None:
    """The call that holds dispatch, local experts and combine says nothing of its own about the time in it.

    ::

        0   10                                             100
        |    |---------------- experts ------------------|  |
        |    |a2a | |- local experts (gemm) -|  |a2a|   90  |
        |    20  30 40                       60 70  80      |
    """
    rows = assemble(
        [
            call(experts(0), 10, 90),
            call(EXCHANGE, 20, 30),
            call(experts(0, "expert_gemm"), 40, 60),
            call(EXCHANGE, 70, 80),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-20",
        "0 dispatch 20-30 barrier",
        "0 permute 30-40",
        "0 expert_gemm 40-60",
        "0 unpermute 60-70",
        "0 combine 70-80 barrier",
        "0 unpermute 80-90",
        "-1 outside 90-100",
    ]


def test_launch_and_wait_are_one_exchange_where_only_glue_lies_between() -> None:
    """An exchange that returned at launch lasts until its wait is over.

    ::

        0   10                                  100
        |    |permute --------------------------| |
        |    10   |launch|  glue  |wait      |  90
        |         20    22        30        70
    """
    rows = assemble([call(phase("permute", 0), 10, 90), launch(20, 22), wait(30, 70)], 0, 100)
    assert lines(rows) == [
        "0 outside 0-10",
        "0 permute 10-20",
        "0 dispatch 20-70 barrier async",
        "0 permute 70-90",
        "-1 outside 90-100",
    ]


def test_only_the_wait_is_exposed_where_work_ran_meanwhile() -> None:
    """Work between launch and wait keeps its name; the launch is local work and the wait the barrier.

    ::

        0  10                                                  100
        |   |--------------------- block 0 ---------------------| |
        |   |permute | launch |  |shared_expert|  | wait | experts|
        |   10      30  30-34 34 40            60 62    80 80    90
    """
    rows = assemble(
        [
            call(block(0), 10, 90),
            call(phase("permute", 0), 10, 34),
            launch(30, 34),
            call(phase("shared_expert", 0), 40, 60),
            wait(62, 80),
            call(experts(0, "expert_gemm"), 80, 90),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 permute 10-30",
        "0 dispatch 30-34",
        "0 permute 34-40",
        "0 shared_expert 40-60",
        "0 permute 60-62",
        "0 dispatch 62-80 barrier async",
        "0 expert_gemm 80-90",
        "-1 outside 90-100",
    ]


def test_a_wait_inside_the_next_phase_is_the_exchange_and_not_that_phase() -> None:
    """A dispatch that hands on a pending result is ended inside the experts that use it first.

    ::

        0   10                                  100
        |    |dispatch|    |experts -----------|  |
        |    10       20   25 |wait| compute   90
        |       |launch|      26  60
        |       15   18
    """
    rows = assemble(
        [
            call(phase("dispatch", 0), 10, 20),
            launch(15, 18),
            call(phase("expert_gemm", 0), 25, 90),
            wait(26, 60),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 dispatch 10-20",
        "0 permute 20-25",
        "0 expert_gemm 25-26",
        "0 dispatch 26-60 barrier async",
        "0 expert_gemm 60-90",
        "-1 outside 90-100",
    ]


def test_an_exchange_outlives_the_phase_that_launched_it() -> None:
    """A wait behind the end of the launching phase still ends the exchange; the phase lasts with it.

    ::

        0   10                             100
        |    |dispatch|                      |
        |    10  |l|  20   |wait|  experts   |
        |       15 16      30  50  60    90  |
    """
    rows = assemble(
        [
            call(phase("dispatch", 0), 10, 20),
            launch(15, 16),
            wait(30, 50),
            call(experts(0, "expert_gemm"), 60, 90),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 dispatch 10-15",
        "0 dispatch 15-50 barrier async",
        "0 permute 50-60",
        "0 expert_gemm 60-90",
        "-1 outside 90-100",
    ]


def test_exchanges_in_flight_together_are_each_ended_by_their_own_wait() -> None:
    """Two launches, then their waits in the other order: each wait is the barrier of its own exchange.

    ::

        0  |dispatch ------------------------------| 100
        |  10 |l1| |l2|    |wait 2|   |wait 1|    90
        |     20 22 24 26  30    40   50    80
    """
    rows = assemble(
        [
            call(phase("dispatch", 0), 10, 90),
            launch(20, 22, ticket=1),
            launch(24, 26, ticket=2, flags=RowFlag.RECOMPUTE),
            wait(30, 40, ticket=2),
            wait(50, 80, ticket=1),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 dispatch 10-24",
        "0 dispatch 24-40 backward barrier recompute async",
        "0 dispatch 40-50",
        "0 dispatch 50-80 barrier async",
        "0 dispatch 80-90",
        "-1 outside 90-100",
    ]


def test_a_launch_that_nobody_waits_for_ends_where_it_returned() -> None:
    """Without a wait, no more than the launch is known.

    ::

        0  |dispatch ---|  100
        |  10 |l|      50
        |     20 22
    """
    rows = assemble([call(phase("dispatch", 0), 10, 50), launch(20, 22)], 0, 100)
    assert lines(rows) == [
        "0 outside 0-10",
        "0 dispatch 10-20",
        "0 dispatch 20-22 barrier async",
        "0 dispatch 22-50",
        "-1 outside 50-100",
    ]


def test_a_wrapper_around_an_exchange_is_local_work() -> None:
    """A delay before the collective, inside a wrapped exchange, is the rank's own: it makes others wait.

    ::

        0   10                                     100
        |    |permute ----------------------------|  |
        |       |exchange (with a delay) ------| 90  |
        |       20         |exchange ------|  80     |
        |                  50             78         |
    """
    rows = assemble(
        [call(phase("permute", 0), 10, 90), call(EXCHANGE, 20, 80), call(EXCHANGE, 50, 78)], 0, 100
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 permute 10-20",
        "0 dispatch 20-50",
        "0 dispatch 50-78 barrier",
        "0 dispatch 78-80",
        "0 permute 80-90",
        "-1 outside 90-100",
    ]


def test_a_wrapper_around_a_launch_is_local_work_until_the_launch() -> None:
    """The exchange of a delayed launch goes on behind the wrapper's end.

    ::

        0   10                                     100
        |    |unpermute --------------------------|  |
        |       |exchange (delay)---|    |wait|  90  |
        |       20        |launch|  45   50  70      |
        |                 40   44                    |
    """
    rows = assemble(
        [call(phase("unpermute", 0), 10, 90), call(EXCHANGE, 20, 45), launch(40, 44), wait(50, 70)], 0, 100
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 unpermute 10-20",
        "0 combine 20-40",
        "0 combine 40-70 barrier async",
        "0 unpermute 70-90",
        "-1 outside 90-100",
    ]


def test_hand_wrapped_phases_without_a_block_make_one_pass_each() -> None:
    """A router starts a pass anew; between passes lies `outside`, between parts glue.

    ::

        0 |router|disp| gemm |comb|unp|       |router| disp | gemm |comb|  100
        | 5     10   15  17-30 35  40        60     65     70     80    85
    """
    first = [
        call(phase("router", 0), 5, 10),
        call(phase("dispatch", 0), 10, 15),
        call(phase("expert_gemm", 0), 17, 30),
        call(phase("combine", 0), 30, 35),
        call(phase("unpermute", 0), 35, 40),
    ]
    second = [
        call(phase("router", 0), 60, 65),
        call(phase("dispatch", 0), 65, 70),
        call(phase("expert_gemm", 0), 70, 80),
        call(phase("combine", 0), 80, 85),
    ]
    rows = assemble([*first, *second], 0, 100)
    assert lines(rows) == [
        "0 outside 0-5",
        "0 router 5-10",
        "0 dispatch 10-15 barrier",
        "0 permute 15-17",
        "0 expert_gemm 17-30",
        "0 combine 30-35 barrier",
        "0 unpermute 35-40",
        "0 outside 40-60",
        "0 router 60-65",
        "0 dispatch 65-70 barrier",
        "0 expert_gemm 70-80",
        "0 combine 80-85 barrier",
        "-1 outside 85-100",
    ]


@pytest.mark.parametrize("last", ["combine", "unpermute"])
def test_what_follows_the_end_of_a_pass_is_outside(last: str) -> None:
    """Where no router is wrapped, a dispatch behind a combine or unpermute is the next forward.

    ::

        0 |disp| gemm | last |   outside   |disp| gemm | 100
        | 5   10     20     30            60   70     80
    """
    rows = assemble(
        [
            call(phase("dispatch", 0), 5, 10),
            call(phase("expert_gemm", 0), 10, 20),
            call(phase(last, 0), 20, 30),
            call(phase("dispatch", 0), 60, 70),
            call(phase("expert_gemm", 0), 70, 80),
        ],
        0,
        100,
    )
    assert "0 outside 30-60" in lines(rows)


def test_another_layer_starts_another_pass() -> None:
    """Time between two layers belongs to the second one.

    ::

        0 |gemm 0|      |gemm 1|  100
        | 10    20      40    50
    """
    rows = assemble([call(phase("expert_gemm", 0), 10, 20), call(phase("expert_gemm", 1), 40, 50)], 0, 100)
    assert lines(rows) == [
        "0 outside 0-10",
        "0 expert_gemm 10-20",
        "1 outside 20-40",
        "1 expert_gemm 40-50",
        "-1 outside 50-100",
    ]


def test_several_forwards_in_one_step_are_numbered_by_ordinal() -> None:
    """Rows of a kind count up through the step, so that a pass of one rank meets the same pass of another."""
    forwards = [
        interval
        for start in (0, 100, 200)
        for interval in (
            call(block(0), start + 10, start + 90),
            call(phase("router", 0), start + 10, start + 20),
            call(experts(0), start + 30, start + 80),
        )
    ]
    rows = assemble(forwards, 0, 300)
    assert [row.ordinal for row in rows if row.phase is Phase.ROUTER] == [0, 1, 2]
    assert [row.ordinal for row in rows if row.phase is Phase.FUSED] == [0, 1, 2]
    assert [row.layer for row in rows if row.phase is Phase.OUTSIDE] == [0, 0, 0, -1]


def test_recompute_is_backward_and_does_not_take_part_in_forward_ordinals() -> None:
    """Activation recompute repeats a layer inside backward: its rows, and the glue in it, say so.

    ::

        0 |--- block 0 ---|    backward    |--- block 0 again ---|  200
        | 10 |router| |experts|            110 |router| |experts|
        |    10    20 30     50            |   110  120 130   150
    """
    again = RowFlag.RECOMPUTE
    rows = assemble(
        [
            call(block(0), 10, 60),
            call(phase("router", 0), 10, 20),
            call(experts(0, "expert_gemm"), 30, 50),
            call(block(0), 110, 160, again),
            call(phase("router", 0), 110, 120, again),
            call(experts(0, "expert_gemm"), 130, 150, again),
        ],
        0,
        200,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 router 10-20",
        "0 fused 20-30",
        "0 expert_gemm 30-50",
        "0 outside 50-110",
        "0 router 110-120 backward recompute",
        "0 fused 120-130 backward recompute",
        "0 expert_gemm 130-150 backward recompute",
        "-1 outside 150-160 backward recompute",
        "-1 outside 160-200",
    ]
    assert [row.ordinal for row in rows if row.phase is Phase.ROUTER] == [0, 0]


def test_recompute_of_hand_wrapped_phases_is_a_pass_of_its_own() -> None:
    """A forward and its recompute never share a pass, even where nothing else tells them apart."""
    rows = assemble(
        [
            call(phase("permute", 0), 10, 20),
            call(phase("expert_gemm", 0), 20, 30),
            call(phase("permute", 0), 60, 70, RowFlag.RECOMPUTE),
            call(phase("expert_gemm", 0), 72, 80, RowFlag.RECOMPUTE),
        ],
        0,
        100,
    )
    assert lines(rows)[3:6] == [
        "0 outside 30-60",
        "0 permute 60-72 backward recompute",
        "0 expert_gemm 72-80 backward recompute",
    ]


def test_an_error_marks_the_phase_that_raised() -> None:
    """The row in which the model raised carries the flag; parts that had ended before do not.

    ::

        0   10                      60 (raised)   100
        |    |------ block 0 --------|             |
        |    |router|    |-- experts |             |
        |    10    20    30 |gemm    60            |
        |                   40                     |
    """
    error = RowFlag.ERROR
    rows = assemble(
        [
            call(block(0), 10, 60, error),
            call(phase("router", 0), 10, 20),
            call(experts(0), 30, 60, error),
            call(GEMM, 40, 60, error),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 router 10-20",
        "0 permute 20-40",
        "0 expert_gemm 40-60 error",
        "-1 outside 60-100",
    ]


def test_a_failed_exchange_is_still_a_barrier_and_carries_the_error() -> None:
    """A collective that raised ended there, and says so."""
    rows = assemble(
        [call(phase("permute", 0), 10, 40, RowFlag.ERROR), call(EXCHANGE, 20, 40, RowFlag.ERROR)], 0, 50
    )
    assert lines(rows) == [
        "0 outside 0-10",
        "0 permute 10-20 error",
        "0 dispatch 20-40 barrier error",
        "-1 outside 40-50",
    ]


def test_intervals_that_overlap_without_nesting_are_cut_at_the_end_of_the_earlier_one() -> None:
    """Two threads at once cannot both have the time: the earlier call keeps what it has.

    ::

        0   |-- router 0 --|
        |   10        |----40---- router 1 ---|   100
        |             30                     60
    """
    rows = assemble([call(phase("router", 0), 10, 40), call(phase("router", 1), 30, 60)], 0, 100)
    assert lines(rows) == [
        "0 outside 0-10",
        "0 router 10-30",
        "1 router 30-40",
        "-1 outside 40-100",
    ]


def test_a_layer_with_nothing_seen_is_fused() -> None:
    """Its time is real, and none of it can be told apart; it is never reported as zero."""
    assert lines(assemble([call(block(3), 10, 90)], 0, 100)) == [
        "3 outside 0-10",
        "3 fused 10-90",
        "-1 outside 90-100",
    ]


def test_an_exchange_outside_every_layer_is_none_of_ours() -> None:
    """A collective of the application (gradients, data) stays part of `outside`."""
    rows = assemble([call(EXCHANGE, 5, 30), launch(40, 41), wait(50, 60), call(block(0), 70, 80)], 0, 100)
    assert lines(rows) == ["0 outside 0-70", "0 fused 70-80", "-1 outside 80-100"]


def test_a_framework_helper_outside_every_layer_is_none_of_ours() -> None:
    """A GEMM helper that an uninstrumented model calls belongs to no layer."""
    assert lines(assemble([call(GEMM, 10, 20)], 0, 30)) == ["-1 outside 0-30"]


def test_a_phase_of_the_users_own_counts_at_step_level_where_no_layer_encloses_it() -> None:
    """`schedule` before the forward and `accept` after it are rows of layer -1.

    ::

        0  |schedule|  |--- block 0 ---|  |accept|  100
        |  10      20  30             60  70    80
    """
    rows = assemble(
        [
            call(Site(Role.PHASE, Phase.SCHEDULE, alone=True), 10, 20),
            call(block(0), 30, 60),
            call(Site(Role.PHASE, Phase.ACCEPT, alone=True), 70, 80),
        ],
        0,
        100,
    )
    assert lines(rows) == [
        "-1 outside 0-10",
        "-1 schedule 10-20",
        "0 outside 20-30",
        "0 fused 30-60",
        "-1 outside 60-70",
        "-1 accept 70-80",
        "-1 outside 80-100",
    ]


def test_a_step_without_layers_is_one_row_outside() -> None:
    """Nothing seen is a step of layer -1, from its start to its end."""
    assert lines(assemble([], 1000, 1500)) == ["-1 outside 0-500"]


def test_an_empty_step_has_no_rows() -> None:
    """A step without duration has nothing to tile."""
    assert assemble([], 7, 7) == ()


def test_calls_are_clipped_to_the_step() -> None:
    """What began before the step or ends behind it counts with what lies inside."""
    rows = assemble(
        [call(phase("router", 0), -50, 20), call(phase("expert_gemm", 1), 80, 140), call(block(2), 200, 300)],
        0,
        100,
    )
    assert lines(rows) == ["0 router 0-20", "1 outside 20-80", "1 expert_gemm 80-100"]


def test_a_barrier_without_duration_is_kept() -> None:
    """An exchange below the clock's resolution still happened: ranks are matched by counting barriers."""
    rows = assemble(
        [call(block(0), 10, 20), call(phase("permute", 0), 12, 16), call(EXCHANGE, 16, 16)], 0, 30
    )
    assert lines(rows) == [
        "0 outside 0-12",
        "0 permute 12-16",
        "0 dispatch 16-16 barrier",
        "-1 outside 16-30",
    ]


def test_of_two_calls_with_the_same_times_the_later_one_is_the_outer() -> None:
    """A buffer keeps calls in order of their end, so a coarse clock does not turn them inside out."""
    rows = assemble(
        [call(EXCHANGE, 10, 20), call(phase("combine", 0), 10, 20), call(block(0), 10, 20)], 0, 30
    )
    assert lines(rows) == ["0 outside 0-10", "0 combine 10-20 barrier", "-1 outside 20-30"]
    assert len({row.layer for row in rows}) == 2


def test_rows_carry_the_microbatch() -> None:
    """Every row says which microbatch the span holds."""
    rows = assemble([call(block(0), 10, 20)], 0, 30, microbatch=3)
    assert {row.microbatch for row in rows} == {3}


def assert_tiles(rows: tuple[PhaseRow, ...], duration: int) -> None:
    """Rows follow each other from the start of the step to its end."""
    cursor = 0
    for row in rows:
        assert row.start_offset_ns == cursor
        assert row.duration_ns >= 0
        cursor += row.duration_ns
    assert cursor == duration


@given(st.one_of(nested(), messy()))
def test_rows_tile_the_step(step: tuple[list[Interval], int, int]) -> None:
    """Whatever was recorded, rows cover the step without gap or overlap and add up to its duration."""
    intervals, start, end = step
    assert_tiles(assemble(intervals, start, end), end - start)


@given(st.one_of(nested(), messy()), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    step: tuple[list[Interval], int, int], shuffle: random.Random
) -> None:
    """Intervals are recorded in order of their end; rows do not depend on it, twins apart."""
    intervals, start, end = step
    unique = list({(max(item.start_ns, start), min(item.end_ns, end)): item for item in intervals}.values())
    shuffled = list(unique)
    shuffle.shuffle(shuffled)
    assert assemble(shuffled, start, end) == assemble(unique, start, end)


@given(st.one_of(nested(), messy()))
def test_ordinals_count_up_from_zero_within_a_kind(step: tuple[list[Interval], int, int]) -> None:
    """(layer, phase, direction, barrier?, ordinal) names a row of a step exactly once, without holes."""
    seen: dict[tuple[object, ...], int] = {}
    for row in assemble(*step):
        kind = (row.layer, row.phase, row.direction, bool(row.flags & RowFlag.BARRIER))
        assert row.ordinal == seen.get(kind, 0)
        seen[kind] = row.ordinal + 1


@given(st.one_of(nested(), messy()))
def test_no_row_of_a_kind_touches_the_next_one_of_the_same_kind(
    step: tuple[list[Interval], int, int],
) -> None:
    """Neighbours that say the same are one row, barriers apart."""
    rows = assemble(*step)
    for before, after in itertools.pairwise(rows):
        kinds = [(row.layer, row.phase, row.direction, row.flags) for row in (before, after)]
        assert kinds[0] != kinds[1] or after.flags & RowFlag.BARRIER
