"""Between the receivers' threads and the worker: a bounded queue that is also the ledger of rank steps.

Queue and counts change under one lock, so that at every scrape, however threads race,

    received == joined + late + duplicate + rejected + pending

where pending is what waits in this queue and in the join window.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moetrace_collectors.events import Rejection
from moetrace_collectors.joiner import JoinCounts
from moetrace_collectors.model import PlacementReport, RankStep
from moetrace_schemas.enums import RejectReason

MAX_WAITING_REJECTIONS = 2_000
"""Rejections whose dead letter is still to be written; beyond it they are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one request brought."""

    rank_steps: tuple[RankStep, ...]
    rejections: tuple[Rejection, ...]
    arrived_ns: int
    """Monotonic; arrivals leave the queue in this order."""
    size_bytes: int
    placements: tuple[PlacementReport, ...] = ()
    """Not rank steps, and so in none of the counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Rank steps by fate, at one moment."""

    received: int
    joined: int
    late: int
    duplicate: int
    rejected: dict[RejectReason, int] = field(default_factory=dict)
    pending: int


class Intake:
    """Bounded by bytes and by requests; a request is taken whole or not at all."""

    def __init__(self, *, max_requests: int, max_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._clock_ns = clock_ns
        self._condition = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._bytes = 0
        self._waiting_rejections = 0
        self._closed = False
        self._received = 0
        self._queued_rank_steps = 0
        self._rejected: Counter[RejectReason] = Counter()
        self._join_counts = JoinCounts()

    def offer(
        self,
        rank_steps: tuple[RankStep, ...],
        rejections: tuple[Rejection, ...],
        *,
        size_bytes: int,
        placements: tuple[PlacementReport, ...] = (),
    ) -> bool:
        """Take one request; False where there is no room for its rank steps, and then nothing is counted."""
        with self._condition:
            if self._closed:
                return False
            if (rank_steps or placements) and (
                len(self._arrivals) >= self._max_requests
                # One request larger than the whole budget still passes when it is alone.
                or (self._arrivals and self._bytes + size_bytes > self._max_bytes)
            ):
                return False
            self._received += len(rank_steps) + len(rejections)
            self._queued_rank_steps += len(rank_steps)
            self._rejected.update(rejection.reason for rejection in rejections)
            if self._waiting_rejections + len(rejections) > MAX_WAITING_REJECTIONS:
                rejections = ()
            if rank_steps or rejections or placements:
                self._waiting_rejections += len(rejections)
                self._bytes += size_bytes
                self._arrivals.append(
                    Arrival(
                        rank_steps=rank_steps,
                        rejections=rejections,
                        arrived_ns=self._clock_ns(),
                        size_bytes=size_bytes,
                        placements=placements,
                    )
                )
                self._condition.notify()
            return True

    def take(self, *, timeout_s: float) -> Arrival | None:
        """The oldest arrival; None where none came in time. Its rank steps stay pending until `settle`."""
        with self._condition:
            if not self._arrivals and not self._closed:
                self._condition.wait(timeout_s)
            if not self._arrivals:
                return None
            arrival = self._arrivals.popleft()
            self._bytes -= arrival.size_bytes
            self._waiting_rejections -= len(arrival.rejections)
            return arrival

    def settle(self, num_rank_steps: int, join_counts: JoinCounts) -> None:
        """The worker has given so many rank steps to the joiner, whose counts now are these."""
        with self._condition:
            self._queued_rank_steps -= num_rank_steps
            self._join_counts = join_counts

    def close(self) -> None:
        """Take nothing more; what is queued can still be taken out."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def snapshot(self) -> LedgerSnapshot:
        """All counts at one moment."""
        with self._condition:
            counts = self._join_counts
            rejected = dict(self._rejected)
            if counts.rejected:
                # The only reason the joiner has: ranks that disagree on the world size.
                mismatch = RejectReason.IDENTITY_MISMATCH
                rejected[mismatch] = rejected.get(mismatch, 0) + counts.rejected
            return LedgerSnapshot(
                received=self._received,
                joined=counts.joined,
                late=counts.late,
                duplicate=counts.duplicate,
                rejected=rejected,
                pending=self._queued_rank_steps + counts.pending,
            )
