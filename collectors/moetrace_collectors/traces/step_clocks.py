"""Clocks of ranks against each other, from the exchanges of joined steps. Pure; for drawing only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetrace_collectors.align import SAME_CLOCK, ClockFit, ClockRefused, fit_clock
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_schemas.columns import RowFlag

ExchangeKey = tuple[int, ...]
"""(step, ep_group, layer, phase, direction, microbatch, ordinal)."""


def step_clocks(joined: Sequence[JoinedStep]) -> tuple[dict[int, ClockFit], list[str]]:
    """Every rank against the lowest rank, and what is to be said of those that cannot be aligned.

    Exchanges are paired by their whole key, never by order. Ranks of different expert-parallel groups share
    none and cannot be compared.
    """
    ends: dict[int, dict[ExchangeKey, int]] = {}
    for step in joined:
        for one in step.rank_steps:
            ends.setdefault(one.rank, {}).update(_exchange_ends(one))
    if len(ends) < 2 or not any(one.start_unix_ns for step in joined for one in step.rank_steps):
        return {}, []
    ranks = sorted(ends)
    reference = ranks[0]
    clocks: dict[int, ClockFit] = {reference: SAME_CLOCK}
    warnings = []
    for rank in ranks[1:]:
        shared = sorted(set(ends[rank]) & set(ends[reference]))
        fit = fit_clock(
            np.array([ends[reference][key] for key in shared], dtype=np.int64),
            np.array([ends[rank][key] for key in shared], dtype=np.int64),
        )
        if isinstance(fit, ClockRefused):
            warnings.append(f"the clock of rank {rank} is not aligned: {fit.reason}")
        else:
            clocks[rank] = fit
    return clocks, warnings


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
    """Every rank against the lowest of its group, and warnings; groups share no exchange to compare by."""
    found: dict[int, RankClock] = {}
    warnings: list[str] = []
    for group in sorted({one.ep_group for step in joined for one in step.rank_steps}):
        steps = [
            replace(step, rank_steps=tuple(one for one in step.rank_steps if one.ep_group == group))
            for step in joined
        ]
        clocks, refused = step_clocks(steps)
        warnings += refused
        ranks = sorted({one.rank for step in steps for one in step.rank_steps})
        for rank in ranks:
            fit = clocks.get(rank)
            found[rank] = RankClock(
                reference_rank=ranks[0] if fit is not None else rank, fit=fit or SAME_CLOCK
            )
    return found, warnings
