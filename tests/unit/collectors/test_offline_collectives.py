"""Collectives are joined by key and ordinal with checks, and never by order alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetrace_collectors.offline.collectives import (
    CollectiveJoin,
    RankCollective,
    join_collectives,
    rank_collectives,
)
from moetrace_collectors.offline.kineto import read_trace
from moetrace_collectors.offline.phases import normal_kind, recognise

DLRM = Path(__file__).parents[2] / "data" / "kineto" / "dlrm_4ranks"
Collectives = dict[int, list[RankCollective]]


@pytest.fixture(scope="module")
def real() -> Collectives:
    """The collectives of four real ranks."""
    found = {}
    for path in sorted(DLRM.glob("*.gz")):
        trace = read_trace(path)
        found[trace.rank] = rank_collectives(trace, recognise(trace))
    return found


def moved(ones: list[RankCollective], clock: Callable[[int], int]) -> list[RankCollective]:
    """The same by another clock."""
    return [replace(one, start_ns=clock(one.start_ns), end_ns=clock(one.end_ns)) for one in ones]


def durations(join: CollectiveJoin) -> list[Mapping[int, int]]:
    """Durations by rank of each collective."""
    return [one.durations_ns for one in join.joined]


def test_real_ranks_have_the_known_figures(real: Collectives) -> None:
    """Kind, durations and least-waiting rank of each collective of a real step."""
    expected = json.loads((DLRM / "expected.json").read_text())["collectives"]
    join = join_collectives(real)
    assert not join.warnings
    for one, known in zip(join.joined, expected, strict=True):
        assert one.index == known["index"]
        assert one.kind == known["kind"]
        assert [one.durations_ns[rank] // 1000 for rank in range(4)] == known["duration_us"]
        assert one.releaser == known["least_waiting_rank"]
        assert one.transfer_ns == min(known["duration_us"]) * 1000
    assert all(abs(clock.offset_ns) < 10_000 for clock in join.clocks.values())


@pytest.mark.parametrize("seed", range(20))
def test_clocks_wrong_by_seconds_and_drifting_come_back(real: Collectives, seed: int) -> None:
    """Up to 3 s of offset with 50 ppm of drift, on real ranks: back to within 10 us, and joined as before."""
    random = np.random.default_rng(seed)
    shifted: Collectives = {}
    for rank, ones in real.items():
        offset = int(random.uniform(-3e9, 3e9)) if rank else 0
        drift = random.choice([-50e-6, 50e-6]) if rank else 0.0
        first = ones[0].start_ns
        shifted[rank] = moved(ones, lambda t, o=offset, d=drift, f=first: t + o + round((t - f) * d))
    join = join_collectives(shifted)
    for rank, ones in real.items():
        back = join.clocks[rank].to_reference(np.array([one.end_ns for one in shifted[rank]], dtype=np.int64))
        assert np.abs(back - [one.end_ns for one in ones]).max() < 10_000
        assert join.clocks[rank].error_ns < 10_000
    assert [list(d) for d in durations(join)] == [list(d) for d in durations(join_collectives(real))]
    assert [one.releaser for one in join.joined] == [one.releaser for one in join_collectives(real).joined]


def test_a_trace_that_begins_later_is_shifted_into_place(real: Collectives) -> None:
    """The one shift that makes kinds agree is taken; what a rank lacks is not joined."""
    whole = durations(join_collectives(real))
    cut = join_collectives({**real, 1: real[1][1:], 2: real[2][:-1]})
    assert durations(cut) == whole[1:-1]


def alike(count: int, *, gap_ns: int = 1_000_000, seed: int = 3) -> list[RankCollective]:
    """Collectives that nothing tells apart, at irregular times."""
    gaps = np.random.default_rng(seed).integers(gap_ns // 2, gap_ns * 2, count)
    starts = 10**18 + np.cumsum(gaps)
    return [
        RankCollective(
            row=i, kind="all_to_all", group=("", ()), group_size=-1, sequence=-1,
            signature=("all_to_all", "", -1), start_ns=int(start), end_ns=int(start) + 50_000,
        )
        for i, start in enumerate(starts)
    ]  # fmt: skip


def test_equal_counts_in_the_wrong_order_are_found_out_by_time() -> None:
    """Rank 1 lacks the first and has one more at the end: the places fit, the ends do not."""
    ones = alike(12)
    join = join_collectives({0: ones[:-1], 1: ones[1:], 2: ones[:-1]})
    assert all(set(one.by_rank) == {0, 2} for one in join.joined)
    assert 1 not in join.clocks
    assert any("rank 1 are left out of the join" in warning for warning in join.warnings)


def test_unequal_counts_that_fit_in_several_places_are_not_joined() -> None:
    """Nothing tells which ones are missing."""
    join = join_collectives({0: alike(12), 1: alike(12)[:-1]})
    assert not join.joined
    assert "does not match (12 and 11 collectives)" in join.warnings[0]


def test_sequence_numbers_tell_what_nothing_else_does() -> None:
    """The same, with numbers in the trace."""
    ones = [replace(one, sequence=100 + i) for i, one in enumerate(alike(12))]
    join = join_collectives({0: ones, 1: ones[3:], 2: ones[:-2]})
    assert [one.by_rank[1].sequence for one in join.joined] == list(range(103, 110))
    assert all(len({c.sequence for c in one.by_rank.values()}) == 1 for one in join.joined)


def test_sizes_that_must_agree_are_compared() -> None:
    """All-reduces of different sizes are different collectives; all-to-alls may send what they have."""
    ones = [
        replace(one, signature=("all_reduce", "Float", size))
        for one, size in zip(alike(4), (1, 2, 3, 4), strict=True)
    ]
    other = [
        replace(one, signature=("all_reduce", "Float", size))
        for one, size in zip(alike(4), (1, 2, 9, 4), strict=True)
    ]
    assert not join_collectives({0: ones, 1: other}).joined
    assert len(join_collectives({0: alike(4), 1: alike(4)}).joined) == 4


def test_groups_are_joined_apart_and_name_their_missing_members() -> None:
    """Two expert-parallel groups; rank 3 of the second is not among the traces."""

    def of(group: tuple[int, ...]) -> list[RankCollective]:
        return [replace(one, group=("ep", group)) for one in alike(4)]

    join = join_collectives({0: of((0, 1)), 1: of((0, 1)), 2: of((2, 3, 4)), 4: of((2, 3, 4))})
    assert {(tuple(one.by_rank), one.missing_ranks) for one in join.joined} == {((0, 1), ()), ((2, 4), (3,))}
    assert [one.index for one in join.joined] == list(range(8))


def test_the_odd_rank_out_may_be_the_lowest() -> None:
    """Rank 0 contradicts all others, which agree among themselves: it is left out and they are not."""
    ones = alike(12)
    join = join_collectives({0: ones[1:], 1: ones[:-1], 2: ones[:-1], 3: ones[:-1]})
    assert {rank for one in join.joined for rank in one.by_rank} == {1, 2, 3}


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("all_to_allv", "all_to_all"),
        ("nccl:_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("alltoall_base", "all_to_all"),
        ("wait", "wait"),
        ("__", "unknown"),
    ],
)
def test_one_name_per_kind(written: str, kind: str) -> None:
    """However a writer spells it."""
    assert normal_kind(written) == kind
