"""The drawing of a step lays lanes by exchanges, keeps waits apart, and follows the releasers."""

from __future__ import annotations

from moetrace_collectors.views.run_records import StepDetail
from moetrace_collectors.views.svg_timeline import timeline_svg
from moetrace_collectors.views.timeline import Mark, MarkKind, Timeline, costliest_window, lay_out
from moetrace_collectors.views.worst_step import lanes_to_show, worst_step
from moetrace_schemas.enums import Evidence, Phase
from run_view_builders import MS, barrier, interval, step_row, suspect


def two_ranks(*, clock_error_ms: float = 0) -> StepDetail:
    """Rank 1 works 7 ms before a combine that both leave at 8 ms; rank 0 works 4 ms and waits 3 ms.

    ::

        rank 0  |== gemm 4 ==|~~~ wait 3 ~~~|= 1 =|= outside 2 =|
        rank 1  |====== gemm 7 =============|= 1 =|= outside 5 =======|
    """
    error = clock_error_ms
    return StepDetail(
        step=3,
        ranks=(0, 1),
        shown_ranks=(0, 1),
        intervals=(
            interval(0, Phase.EXPERT_GEMM, 100, 4),
            interval(0, Phase.COMBINE, 104, 4, is_barrier=True),
            interval(0, Phase.OUTSIDE, 108, 2, layer=-1),
            interval(1, Phase.EXPERT_GEMM, 100 + error, 7),
            interval(1, Phase.COMBINE, 107 + error, 1, is_barrier=True),
            interval(1, Phase.OUTSIDE, 108 + error, 5, layer=-1),
        ),
        barriers=(
            barrier(0, Phase.COMBINE, 1, extension_ms=1.5),
            barrier(1, Phase.OUTSIDE, 1, layer=-1, transfer_ms=0),
        ),
    )


def marks(timeline: Timeline, rank: int) -> list[tuple[MarkKind, Phase, float, float]]:
    """(kind, phase, start ms, duration ms) of one lane."""
    lane: tuple[Mark, ...] = next(lane.marks for lane in timeline.lanes if lane.rank == rank)
    return [(mark.kind, mark.phase, mark.start_ns / MS, mark.duration_ns / MS) for mark in lane]


def test_exchange_is_split_into_wait_and_transfer() -> None:
    """Wait is what a rank spent in the exchange beyond the rank that waited least, and comes first."""
    timeline = lay_out(two_ranks())
    assert marks(timeline, 0) == [
        (MarkKind.WORK, Phase.EXPERT_GEMM, 0, 4),
        (MarkKind.WAIT, Phase.COMBINE, 4, 3),
        (MarkKind.TRANSFER, Phase.COMBINE, 7, 1),
        (MarkKind.WORK, Phase.OUTSIDE, 8, 2),
    ]
    assert (MarkKind.WAIT, Phase.COMBINE) not in [mark[:2] for mark in marks(timeline, 1)]


def test_lanes_meet_at_exchange_ends_whatever_the_clocks_say() -> None:
    """A clock that is wrong by seconds changes nothing in the picture."""
    assert lay_out(two_ranks(clock_error_ms=-5_000)) == lay_out(two_ranks())


def test_critical_path_follows_the_releasers() -> None:
    """The path runs over the releaser of each exchange, up to the exchange's end, and over the tail."""
    critical = lay_out(two_ranks()).critical
    assert [(item.rank, item.start_ns / MS, item.end_ns / MS) for item in critical] == [(1, 0, 8), (1, 8, 13)]


def test_unknown_releaser_leaves_a_gap() -> None:
    """An exchange whose releaser cannot be told has no critical stretch; none is made up."""
    detail = two_ranks()
    untold = StepDetail(
        step=3,
        ranks=detail.ranks,
        shown_ranks=detail.shown_ranks,
        intervals=detail.intervals,
        barriers=(barrier(0, Phase.COMBINE, -1), detail.barriers[1]),
    )
    assert [item.barrier for item in lay_out(untold).critical] == [1]


def test_rank_without_rows_keeps_an_empty_lane() -> None:
    """A rank whose rows are gone is shown as missing, not left out."""
    detail = two_ranks()
    with_third = StepDetail(
        step=3,
        ranks=(0, 1, 2),
        shown_ranks=(0, 1, 2),
        intervals=detail.intervals,
        barriers=detail.barriers,
    )
    timeline = lay_out(with_third)
    assert marks(timeline, 2) == []
    assert "no phase rows in the store" in timeline_svg(timeline, identifier="t")


def test_lanes_are_capped_and_the_critical_rank_is_among_them() -> None:
    """Of 64 ranks 16 are drawn: the critical one always, then releasers, then some for comparison."""
    step = step_row(1, suspect(37, Phase.EXPERT_GEMM))
    barriers = [barrier(index, Phase.COMBINE, 50 + index, extension_ms=index) for index in range(3)]
    lanes = lanes_to_show(step, range(64), barriers)
    assert len(lanes) == 16
    assert {37, 50, 51, 52} <= set(lanes)
    assert list(lanes) == sorted(lanes)


def test_worst_step_is_the_costliest_clear_one() -> None:
    """A costlier step that is ambiguous or warm-up is not the one to look at first."""
    steps = [
        step_row(0, suspect(0, Phase.ROUTER, worth_ms=90), warmup=True),
        step_row(1, suspect(0, Phase.ROUTER, worth_ms=50), evidence=Evidence.AMBIGUOUS),
        step_row(2, suspect(0, Phase.ROUTER, worth_ms=20)),
        step_row(3, suspect(0, Phase.ROUTER, worth_ms=10)),
    ]
    assert worst_step(steps).step == 2


def test_a_step_of_few_exchanges_needs_no_closer_look() -> None:
    """A second picture is drawn only where the first is too dense to read."""
    assert costliest_window(lay_out(two_ranks())) is None
