"""Which steps of the store are whole or have waited long enough, in the order in which they closed. Pure.

A collector that joins sees ranks arrive; here only their rows are seen. A step is whole when every rank of
every microbatch has a row; it has waited enough when its first row is older than the timeout, by the store's
clock::

    step 7   rows written at 10.1 10.1 10.2 10.4 (all four ranks)     closes complete at 10.4
    step 8   rows written at 10.3 10.3 10.5                           closes by timeout at 10.3 + timeout

Rows without an arrival are of a collector that joins, or of an older version: their verdict may be on its
way, and is waited for as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_schemas.enums import ClosedBy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedStep:
    """A step to judge."""

    run_id: str
    step: int
    closed_by: ClosedBy
    closed_ms: int
    """Unix time by the store's clock, ms."""
    num_records: int
    """Rank steps that were there when it was found."""


def closed_steps(
    rows: Iterable[Mapping[str, Any]], *, now_ms: int, timeout_ms: int
) -> tuple[ClosedStep, ...]:
    """Closed steps in order of closing, then of run and step number.

    Args:
        rows: of queries.STEPS, with `run_id`, with `first_ms` and `last_ms`: when the first and the last of
            their rows were stored, and with `arrivals`: how many of them the store has noted.
        now_ms: the store's clock.
        timeout_ms: from a step's first row until it is judged without the missing ranks.
    """
    closed = []
    for row in rows:
        whole = int(row["records"]) == int(row["world_size"]) * int(row["num_microbatches"])
        whole = whole and int(row["world_sizes"]) == 1
        timed_out_ms = int(row["first_ms"]) + timeout_ms
        if (whole and int(row["arrivals"])) or timed_out_ms <= now_ms:
            closed.append(
                ClosedStep(
                    run_id=str(row["run_id"]),
                    step=int(row["step"]),
                    closed_by=ClosedBy.COMPLETE if whole else ClosedBy.TIMEOUT,
                    closed_ms=int(row["last_ms"]) if whole else timed_out_ms,
                    num_records=int(row["records"]),
                )
            )
    return tuple(sorted(closed, key=lambda step: (step.closed_ms, step.run_id, step.step)))


def joined_step(closed: ClosedStep, rank_steps: Iterable[RankStep]) -> JoinedStep:
    """The step as the joiner would have closed it.

    Ranks that say another world size than most are left out, as a joiner rejects them.
    """
    records = list(rank_steps)
    sizes = [record.world_size for record in records]
    world_size = max(set(sizes), key=lambda size: (sizes.count(size), size))
    kept = [record for record in records if record.world_size == world_size]
    arrived = {(record.rank, record.microbatch) for record in kept}
    microbatches = {0, *(microbatch for _, microbatch in arrived)}
    missing = tuple(
        rank
        for rank in range(world_size)
        if any((rank, microbatch) not in arrived for microbatch in microbatches)
    )
    return JoinedStep(
        run_id=closed.run_id,
        step=closed.step,
        world_size=world_size,
        rank_steps=tuple(sorted(kept, key=lambda record: (record.rank, record.microbatch))),
        missing_ranks=missing,
        closed_by=closed.closed_by if missing else ClosedBy.COMPLETE,
    )
