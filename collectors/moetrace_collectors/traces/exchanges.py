"""Exchanges of one step across ranks: which rows are one exchange, who released it, what was wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import RankStep
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.views.run_records import ExchangeKey
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import DIRECTION_BY_CODE, PHASE_BY_CODE

_BARRIER = int(RowFlag.BARRIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One rank's row of an exchange."""

    rank_step: RankStep
    row: int
    """Index of its phase row."""
    wait_ns: int
    transfer_ns: int
    """Of this row: wait + transfer is its duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange."""

    key: ExchangeKey
    releaser_rank: int
    """-1 where it cannot be told."""
    participants: Mapping[int, Participant]
    """By rank, ascending."""

    @property
    def releaser(self) -> Participant | None:
        """The releaser's row, where it is known and has come."""
        return self.participants.get(self.releaser_rank)


def exchanges_of(step: TracedStep) -> tuple[Exchange, ...]:
    """Every exchange of a step, in order of its key.

    The transfer is the one of the verdict; where no verdict has it, the shortest duration of the ranks
    that came, and no releaser.
    """
    rows: dict[ExchangeKey, list[tuple[RankStep, int]]] = {}
    for rank_step in step.joined.rank_steps:
        for row in np.flatnonzero(rank_step.phases.flags & _BARRIER).tolist():
            rows.setdefault(exchange_key(rank_step, row), []).append((rank_step, row))
    judged = {barrier.exchange: barrier for barrier in step.barriers}
    found = []
    for key in sorted(rows):
        shortest = min(int(rank_step.phases.duration_ns[row]) for rank_step, row in rows[key])
        barrier = judged.get(key)
        transfer = shortest if barrier is None else barrier.transfer_ns
        found.append(
            Exchange(
                key=key,
                releaser_rank=-1 if barrier is None else barrier.releaser_rank,
                participants={
                    rank_step.rank: _participant(rank_step, row, transfer) for rank_step, row in rows[key]
                },
            )
        )
    return tuple(found)


def exchange_key(rank_step: RankStep, row: int) -> ExchangeKey:
    """What the rows of one exchange have in common."""
    rows = rank_step.phases
    return (
        rank_step.ep_group,
        int(rows.layer[row]),
        PHASE_BY_CODE[int(rows.phase[row])],
        DIRECTION_BY_CODE[int(rows.direction[row])],
        int(rows.microbatch[row]) or rank_step.microbatch,
        int(rows.ordinal[row]),
    )


def _participant(rank_step: RankStep, row: int, transfer_ns: int) -> Participant:
    duration = int(rank_step.phases.duration_ns[row])
    transfer = min(transfer_ns, duration)
    return Participant(rank_step=rank_step, row=row, wait_ns=duration - transfer, transfer_ns=transfer)
