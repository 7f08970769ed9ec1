"""Clocks of ranks against each other, from the exchanges of joined steps. Pure; for drawing only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit, ClockRefused, fit_clock
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_schemas.columns import RowFlag

OTHER_CLOCK_NS = 10 * 10**9
"""Ends of one exchange this far apart were read from two clocks, whatever the host's name says."""
ExchangeKey = tuple[int, ...]
"""(step, ep_group, layer, phase, direction, microbatch, ordinal)."""


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
    ends: dict[int, dict[ExchangeKey, int]] = {}
    for step in joined:
        for one in step.rank_steps:
            ends.setdefault(one.rank, {}).update(_exchange_ends(one))
    if len(ends) < 2 or not any(one.start_unix_ns for step in joined for one in step.rank_steps):
        return {}
    ranks = sorted(ends)
    reference = ranks[0]
    found: dict[int, ClockFit | ClockRefused] = {reference: SAME_CLOCK}
    for rank in ranks[1:]:
        shared = sorted(set(ends[rank]) & set(ends[reference]))
        found[rank] = fit_clock(
            np.array([ends[reference][key] for key in shared], dtype=np.int64),
            np.array([ends[rank][key] for key in shared], dtype=np.int64),
        )
    return found


def _told(rank: int, clock: ClockRefused) -> str:
    return f"the clock of rank {rank} is not aligned: {clock.reason}"


def _exchange_ends(one: RankStep) -> dict[ExchangeKey, int]:
    rows = one.phases
    found: dict[ExchangeKey, int] = {}
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
        found[key] = one.start_unix_ns + int(rows.start_offset_ns[row]) + int(rows.duration_ns[row])
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
    one host still read one clock, unless the exchanges end farther apart than any load explains.
    """
    found: dict[int, RankClock] = {}
    warnings: list[str] = []
    for group in sorted({one.ep_group for step in joined for one in step.rank_steps}):
        steps = [
            replace(step, rank_steps=tuple(one for one in step.rank_steps if one.ep_group == group))
            for step in joined
        ]
        clocks = _compared(steps)
        hosts = {one.rank: one.host_name for step in steps for one in step.rank_steps}
        reference = min(hosts)
        for rank, host in sorted(hosts.items()):
            clock = clocks.get(rank)
            is_here = bool(host and host == hosts[reference])
            if is_here and isinstance(clock, ClockRefused):
                is_here = abs(clock.offset_ns) < OTHER_CLOCK_NS
            known = isinstance(clock, ClockFit) or is_here
            found[rank] = RankClock(
                reference_rank=reference if known else rank,
                fit=clock if isinstance(clock, ClockFit) else SAME_CLOCK,
            )
            if isinstance(clock, ClockRefused) and not known:
                warnings.append(_told(rank, clock))
    return found, warnings
