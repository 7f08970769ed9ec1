"""Exchanges of one step across ranks: which rows are one exchange, who released it, what was wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moetrace_collectors.model import RankStep
from moetrace_collectors.traces.rows import PhaseRow, rows_of
from moetrace_collectors.traces.step_records import TracedStep
from moetrace_collectors.views.run_records import ExchangeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """One rank's row of an exchange."""

    rank_step: RankStep
    row: PhaseRow
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
    rows: dict[ExchangeKey, list[tuple[RankStep, PhaseRow]]] = {}
    for rank_step in step.joined.rank_steps:
        for row in rows_of(rank_step):
            if row.is_barrier:
                rows.setdefault(exchange_key(rank_step, row), []).append((rank_step, row))
    judged = {barrier.exchange: barrier for barrier in step.barriers}
    found = []
    for key in sorted(rows):
        barrier = judged.get(key)
        transfer = min(row.duration_ns for _, row in rows[key]) if barrier is None else barrier.transfer_ns
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


def exchange_key(rank_step: RankStep, row: PhaseRow) -> ExchangeKey:
    """What the rows of one exchange have in common."""
    return (
        rank_step.ep_group,
        row.layer,
        row.phase,
        row.direction,
        row.microbatch or rank_step.microbatch,
        row.ordinal,
    )


def _participant(rank_step: RankStep, row: PhaseRow, transfer_ns: int) -> Participant:
    transfer = min(transfer_ns, row.duration_ns)
    return Participant(rank_step=rank_step, row=row, wait_ns=row.duration_ns - transfer, transfer_ns=transfer)
