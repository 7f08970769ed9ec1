"""What must never change a verdict: arrival order, rank names, clocks, delays that nobody waited for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moetrace_collectors.model import JoinedStep, RankStep, StepVerdict
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Direction, Evidence, Phase
from verdict_timeline import Row, exchange, joined, rank_step, work

NUM_LAYERS = 2
unhurried = settings(deadline=None)
"""Correctness is under test here, and a busy machine is slow; speed has its own benchmark."""
LOCAL = (Phase.OUTSIDE, Phase.ROUTER, Phase.EXPERT_GEMM, Phase.UNPERMUTE)


def rows_of(
    durations: list[list[list[int]]], transfers: list[int], released_late: list[int]
) -> list[list[Row]]:
    """Rows of every rank, from its local durations [rank][layer][phase]: who is early waits.

    `released_late[rank]` adds to every exchange of the rank: real exchanges do not end at one instant.
    """
    ranks: list[list[Row]] = [[] for _ in durations]
    since_exchange = [0] * len(durations)
    for layer in range(NUM_LAYERS):
        for ordinal, (phases, phase) in enumerate(((LOCAL[:2], Phase.DISPATCH), (LOCAL[2:3], Phase.COMBINE))):
            for rank, rows in enumerate(ranks):
                for local in phases:
                    ns = durations[rank][layer][LOCAL.index(local)]
                    rows.append(work(local, ns, layer))
                    since_exchange[rank] += ns
            for rank, rows in enumerate(ranks):
                wait = max(since_exchange) - since_exchange[rank]
                transfer = transfers[2 * layer + ordinal]
                rows.append(exchange(phase, wait + transfer + released_late[rank], layer))
            since_exchange = [0] * len(durations)
        for rank, rows in enumerate(ranks):
            since_exchange[rank] = durations[rank][layer][3]
            rows.append(work(LOCAL[3], since_exchange[rank], layer))
    return ranks


@st.composite
def steps(draw: st.DrawFn, most_late: int = 300) -> list[list[Row]]:
    """Rows of two to four ranks."""
    num_ranks = draw(st.integers(2, 4))
    # Distinct totals: two ranks that are late by the same nanosecond are told apart by their number alone.
    duration = st.integers(0, 100_000)
    durations = [
        [[draw(duration) * 7 + rank for _ in LOCAL] for _ in range(NUM_LAYERS)] for rank in range(num_ranks)
    ]
    transfers = [draw(st.integers(1, 1000)) for _ in range(2 * NUM_LAYERS)]
    late = [draw(st.integers(0, most_late)) for _ in range(num_ranks)]
    return rows_of(durations, transfers, late)


def records(ranks: list[list[Row]]) -> list[RankStep]:
    """The ranks' records."""
    return [rank_step(rank, rows, ep_size=len(ranks)) for rank, rows in enumerate(ranks)]


def judge(step: JoinedStep) -> StepVerdict:
    """The verdict of a first step."""
    return VerdictEngine().judge(step)


@unhurried
@given(steps())
def test_increments_and_phases_sum_to_the_step(ranks: list[list[Row]]) -> None:
    """Exactly, in integer nanoseconds, whatever the durations are."""
    verdict = judge(joined(*records(ranks)))
    assert sum(b.max_work_ns + b.transfer_ns for b in verdict.barriers) == verdict.step_ns
    assert sum(verdict.phase_ns.values()) == verdict.step_ns
    assert sum(b.extension_ns for b in verdict.barriers) == verdict.extension_ns


@unhurried
@given(steps(most_late=0))
def test_the_frontier_is_no_longer_than_the_slowest_rank(ranks: list[list[Row]]) -> None:
    """Waits are never work: where exchanges end together, the frontier is within the longest rank's step."""
    assert judge(joined(*records(ranks))).step_ns <= max(sum(row.duration for row in rows) for rows in ranks)


@unhurried
@given(steps(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(ranks: list[list[Row]], random: object) -> None:
    """Records of a step in any order give the same verdict."""
    step = joined(*records(ranks))
    shuffled = list(step.rank_steps)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert judge(replace(step, rank_steps=tuple(shuffled))) == judge(step)


@unhurried
@given(steps(), st.lists(st.integers(-(10**12), 10**12), min_size=4, max_size=4))
def test_a_constant_clock_offset_changes_nothing(ranks: list[list[Row]], offsets: list[int]) -> None:
    """Unix starts are for drawing: seconds of disagreement between hosts leave the verdict as it is."""
    step = joined(*records(ranks))
    moved = tuple(
        replace(record, start_unix_ns=record.start_unix_ns + offset)
        for record, offset in zip(step.rank_steps, offsets, strict=False)
    )
    assert judge(replace(step, rank_steps=moved)) == judge(step)


@unhurried
@given(steps(), st.permutations(range(4)))
def test_relabelling_ranks_changes_labels_only(ranks: list[list[Row]], names: list[int]) -> None:
    """Ranks have no preference: renaming them renames the verdict."""
    used = [name for name in names if name < len(ranks)]
    new_name = dict(enumerate(used))
    before = judge(joined(*records(ranks)))
    renamed = [replace(record, rank=new_name[record.rank]) for record in records(ranks)]
    after = judge(joined(*renamed))
    assert (after.step_ns, after.extension_ns, after.phase_ns) == (
        before.step_ns,
        before.extension_ns,
        before.phase_ns,
    )
    assert [b.extension_ns for b in after.barriers] == [b.extension_ns for b in before.barriers]
    assert after.evidence is before.evidence
    if before.suspect is not None and after.suspect is not None:
        assert after.suspect == replace(before.suspect, rank=new_name[before.suspect.rank])


@unhurried
@given(steps(), st.integers(0, 3), st.integers(0, 2 * NUM_LAYERS - 1), st.floats(0.0, 1.0))
def test_removing_a_delay_that_nobody_waited_for_changes_nothing(
    ranks: list[list[Row]], rank: int, barrier: int, part: float
) -> None:
    """A rank that is not the last to arrive may be faster: it only waits longer.

    ::

        rank 0   |== 40 ==|~~ 30 ~~|10|        |= 15 =|~~~~ 55 ~~~~|10|
        rank 1   |====== 70 =======|10|        |====== 70 =========|10|    same frontier, same releaser
    """
    rank %= len(ranks)
    before = judge(joined(*records(ranks)))
    if before.barriers[barrier].releaser_rank == rank or before.barriers[barrier].ambiguous:
        return
    exchanges = [i for i, row in enumerate(ranks[rank]) if row.exchange]
    local = exchanges[barrier] - 1
    removed = int(part * ranks[rank][local].duration)
    faster = [list(rows) for rows in ranks]
    faster[rank][local] = replace(faster[rank][local], duration=faster[rank][local].duration - removed)
    inside = exchanges[barrier]
    faster[rank][inside] = replace(faster[rank][inside], duration=faster[rank][inside].duration + removed)
    after = judge(joined(*records(faster)))
    assert after.step_ns == before.step_ns
    assert after.phase_ns == before.phase_ns
    assert [b.transfer_ns for b in after.barriers] == [b.transfer_ns for b in before.barriers]
    assert [b.releaser_rank for b in after.barriers if not b.ambiguous] == [
        b.releaser_rank for b, a in zip(before.barriers, after.barriers, strict=True) if not a.ambiguous
    ]


@st.composite
def odd_steps(draw: st.DrawFn) -> JoinedStep:
    """Records that no model sends: any phases, flags, streams, groups and sizes in any order."""
    row = st.builds(
        Row,
        phase=st.sampled_from(Phase),
        duration=st.integers(0, 10**12),
        layer=st.integers(-1, 2),
        exchange=st.booleans(),
        direction=st.sampled_from(Direction),
        microbatch=st.integers(0, 1),
        ordinal=st.integers(0, 1),
        stream=st.integers(0, 2),
        start=st.one_of(st.none(), st.integers(0, 10**12)),
        bytes=st.integers(-1, 10**9),
        rows=st.integers(-1, 10**6),
    )
    records = [
        rank_step(
            rank,
            draw(st.lists(row, max_size=8)),
            ep_size=draw(st.integers(1, 3)),
            ep_group=draw(st.integers(0, 1)),
            microbatch=microbatch,
        )
        for rank in range(draw(st.integers(1, 3)))
        for microbatch in range(draw(st.integers(1, 2)))
    ]
    return joined(*records, missing=draw(st.sampled_from([(), (7,)])))


@unhurried
@given(st.lists(odd_steps(), min_size=1, max_size=3))
def test_any_records_get_a_verdict(odd: list[JoinedStep]) -> None:
    """Whatever arrives, the engine answers, and its figures still add up."""
    engine = VerdictEngine()
    for step in odd * 4:
        verdict = engine.judge(step)
        assert sum(verdict.phase_ns.values()) == verdict.step_ns
        assert all(b.transfer_ns >= 0 and b.extension_ns >= 0 for b in verdict.barriers)
        assert (verdict.suspect is None) == (verdict.evidence is Evidence.INSUFFICIENT)
