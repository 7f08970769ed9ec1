"""Clocks of ranks against each other, from the exchanges of joined steps. Pure; for drawing only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit, ClockRefused, fit_clock
from moetrace_collectors.model import IntArray, JoinedStep, RankStep
from moetrace_schemas.columns import RowFlag

SAME_CLOCK_SLACK_NS = 20 * 10**6
"""No rank leaves an exchange before all have come: by one clock its ends lie no farther apart than the longer
of it lasted. So much more is a loaded host, which lets a rank note the time late, or a wait begun late; what
lies still farther apart was read from two clocks, whatever the host's name says."""
ExchangeKey = tuple[int, ...]
"""(step, ep_group, layer, phase, direction, microbatch, ordinal)."""
Exchange = tuple[int, int]
"""When a rank left it, in unix ns by the rank's clock, and for how many ns it had been in it."""
END, DURATION = 0, 1


def step_clocks(joined: Sequence[JoinedStep]) -> tuple[dict[int, ClockFit], list[str]]:
    """Every rank against the lowest rank, and what is to be said of those that cannot be aligned.

    Exchanges are paired by their whole key, never by order. Ranks of different expert-parallel groups share
    none and cannot be compared.
    """
    found = _compared(joined)
    return (
        {rank: clock for rank, clock in found.items() if isinstance(clock, ClockFit)},
        [_told(rank, clock) for rank, clock in found.items() if isinstance(clock, ClockRefused)],
    )


def _compared(joined: Sequence[JoinedStep]) -> dict[int, ClockFit | ClockRefused]:
    """By rank, ascending; empty where there is nothing to compare."""
    exchanges = _exchanges_by_rank(joined)
    if len(exchanges) < 2 or not any(one.start_unix_ns for step in joined for one in step.rank_steps):
        return {}
    ranks = sorted(exchanges)
    reference = ranks[0]
    found: dict[int, ClockFit | ClockRefused] = {reference: SAME_CLOCK}
    for rank in ranks[1:]:
        theirs, own = _shared(exchanges[reference], exchanges[rank])
        found[rank] = fit_clock(theirs[:, END], own[:, END])
    return found


def _read_one_clock(reference: Mapping[ExchangeKey, Exchange], other: Mapping[ExchangeKey, Exchange]) -> bool:
    """Whether two ranks' shared exchanges, most of them, end as near each other as they must on one clock."""
    theirs, own = _shared(reference, other)
    if not len(own):
        return True
    apart_ns = np.abs(own[:, END] - theirs[:, END])
    beyond_ns = apart_ns - np.maximum(own[:, DURATION], theirs[:, DURATION])
    return bool(np.median(beyond_ns) <= SAME_CLOCK_SLACK_NS)


def _shared(
    reference: Mapping[ExchangeKey, Exchange], other: Mapping[ExchangeKey, Exchange]
) -> tuple[IntArray, IntArray]:
    """End and duration of every exchange that both have, one per row, in the same order."""
    shared = sorted(set(other) & set(reference))
    theirs = np.array([reference[key] for key in shared], dtype=np.int64).reshape(-1, 2)
    own = np.array([other[key] for key in shared], dtype=np.int64).reshape(-1, 2)
    return theirs, own


def _exchanges_by_rank(joined: Sequence[JoinedStep]) -> dict[int, dict[ExchangeKey, Exchange]]:
    found: dict[int, dict[ExchangeKey, Exchange]] = {}
    for step in joined:
        for one in step.rank_steps:
            found.setdefault(one.rank, {}).update(_exchanges(one))
    return found


def _told(rank: int, clock: ClockRefused) -> str:
    return f"the clock of rank {rank} is not aligned: {clock.reason}"


def _exchanges(one: RankStep) -> dict[ExchangeKey, Exchange]:
    rows = one.phases
    found: dict[ExchangeKey, Exchange] = {}
    for row in np.flatnonzero(rows.flags & int(RowFlag.BARRIER)).tolist():
        key = (
            one.step,
            one.ep_group,
            int(rows.layer[row]),
            int(rows.phase[row]),
            int(rows.direction[row]),
            int(rows.microbatch[row]) or one.microbatch,
            int(rows.ordinal[row]),
        )
        duration_ns = int(rows.duration_ns[row])
        found[key] = (one.start_unix_ns + int(rows.start_offset_ns[row]) + duration_ns, duration_ns)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """By whose clock a rank's times are drawn."""

    reference_rank: int
    """The lowest rank of its expert-parallel group; the rank itself where it could not be aligned."""
    fit: ClockFit


def group_clocks(joined: Sequence[JoinedStep]) -> tuple[dict[int, RankClock], list[str]]:
    """Every rank against the lowest of its group, and warnings; groups share no exchange to compare by.

    Where the exchanges do not tell (a loaded host lets ranks out of one at different times), two ranks of
    one host still read one clock, unless the exchanges end farther apart than they last and load explains.
    """
    found: dict[int, RankClock] = {}
    warnings: list[str] = []
    for group in sorted({one.ep_group for step in joined for one in step.rank_steps}):
        steps = [
            replace(step, rank_steps=tuple(one for one in step.rank_steps if one.ep_group == group))
            for step in joined
        ]
        clocks = _compared(steps)
        exchanges = _exchanges_by_rank(steps)
        hosts = {one.rank: one.host_name for step in steps for one in step.rank_steps}
        reference = min(hosts)
        for rank, host in sorted(hosts.items()):
            clock = clocks.get(rank)
            is_here = bool(host and host == hosts[reference])
            if is_here and isinstance(clock, ClockRefused):
                is_here = _read_one_clock(exchanges[reference], exchanges[rank])
            known = isinstance(clock, ClockFit) or is_here
            found[rank] = RankClock(
                reference_rank=reference if known else rank,
                fit=clock if isinstance(clock, ClockFit) else SAME_CLOCK,
            )
            if isinstance(clock, ClockRefused) and not known:
                warnings.append(_told(rank, clock))
    return found, warnings
