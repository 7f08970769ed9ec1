"""Between the receivers' threads and the worker: a bounded queue that is also the ledger of rank steps.

Queue and counts change under one lock, so that at every scrape, however threads race,

    received == joined + late + duplicate + rejected + pending

where pending is what waits in this queue and in the join window.

With a write-ahead log the queue has two parts. Requests that find no room in memory stay on disk, and all
that come behind them too, until the worker has read them back: a backlog costs disk and no memory::

    worker <-- in memory (bounded) <-- on disk only, a count and the place of the first <-- receivers
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from moetrace_collectors.events import Rejection
from moetrace_collectors.joiner import JoinCounts
from moetrace_collectors.model import PlacementReport, RankStep
from moetrace_collectors.wal.log import Position
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
    segment: int = 0
    """Segment of the write-ahead log that holds it; 0 without one."""
    is_replay: bool = False
    """Whether an earlier process received it; what of it is stored then comes as duplicates."""
    placements: tuple[PlacementReport, ...] = ()
    """Not rank steps, and so in none of the counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A request that was taken."""

    position: Position | None
    """What must be durable before it is acknowledged; None where nothing needs to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Rank steps by fate, at one moment."""

    received: int
    joined: int
    late: int
    duplicate: int
    rejected: dict[RejectReason, int] = field(default_factory=dict)
    pending: int
    backlog_requests: int = 0
    """Requests that wait on disk only; those of an earlier process are not yet in the other counts."""


class Intake:
    """Bounded by bytes and by requests; a request is taken whole or not at all."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        clock_ns: Callable[[], int],
        num_replayed: int = 0,
        read_log: Callable[[Position | None], Iterator[Arrival]] | None = None,
    ) -> None:
        """Make an empty queue, or one that begins with what an earlier process left.

        Args:
            max_requests: in memory.
            max_bytes: in memory.
            clock_ns: monotonic.
            num_replayed: requests of an earlier process at the log's beginning; they come out first.
            read_log: arrivals of the log from a position on; None without a log.
        """
        self._read_log = read_log
        self._backlog_requests = num_replayed
        self._replay_requests = num_replayed
        self._backlog_rank_steps = 0
        self._backlog_from: Position | None = None
        self._reader: Iterator[Arrival] | None = None
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
        log: Callable[[int], Position] | None = None,
        placements: tuple[PlacementReport, ...] = (),
    ) -> Receipt | None:
        """Take one request; None where there is no room for its rank steps, and then nothing is counted.

        Args:
            rank_steps: decoded.
            rejections: what of the request was turned away.
            size_bytes: of both in memory.
            log: writes the request to the log under the queue's lock, so that both have one order; what it
                raises passes through, and nothing is counted then.
            placements: of the same request; no rank steps, and so in none of the counts.
        """
        with self._condition:
            if self._closed:
                return None
            has_room = not self._backlog_requests and self._has_room(size_bytes)
            holds = bool(rank_steps or placements)
            if holds and not has_room and log is None:
                return None
            arrived_ns = self._clock_ns()
            position = log(arrived_ns) if log is not None and holds else None
            self._received += len(rank_steps) + len(rejections)
            self._queued_rank_steps += len(rank_steps)
            self._rejected.update(rejection.reason for rejection in rejections)
            if position is not None and not has_room:
                self._leave_in_log(position, len(rank_steps))
                return Receipt(position=position)
            if self._waiting_rejections + len(rejections) > MAX_WAITING_REJECTIONS:
                rejections = ()
            if rank_steps or rejections or placements:
                self._waiting_rejections += len(rejections)
                self._bytes += size_bytes
                self._arrivals.append(
                    Arrival(
                        rank_steps=rank_steps,
                        rejections=rejections,
                        arrived_ns=arrived_ns,
                        size_bytes=size_bytes,
                        segment=0 if position is None else position.segment,
                        placements=placements,
                    )
                )
                self._condition.notify()
            return Receipt(position=position)

    def take(self, *, timeout_s: float) -> Arrival | None:
        """The oldest arrival; None where none came in time. Its rank steps stay pending until `settle`."""
        with self._condition:
            if not self._arrivals and not self._backlog_requests and not self._closed:
                self._condition.wait(timeout_s)
            if self._arrivals:
                arrival = self._arrivals.popleft()
                self._bytes -= arrival.size_bytes
                self._waiting_rejections -= len(arrival.rejections)
                return arrival
            if not self._backlog_requests or self._read_log is None:
                return None
            if self._reader is None:
                self._reader = self._read_log(self._backlog_from)
        # Not under the lock: receivers must not wait for a disk that reads.
        return self._took_from_log(next(self._reader, None))

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
                backlog_requests=self._backlog_requests,
            )

    def _has_room(self, size_bytes: int) -> bool:
        # One request larger than the whole budget still passes when it is alone.
        return len(self._arrivals) < self._max_requests and (
            not self._arrivals or self._bytes + size_bytes <= self._max_bytes
        )

    def _leave_in_log(self, position: Position, num_rank_steps: int) -> None:
        if not self._backlog_requests:
            self._backlog_from = position
        self._backlog_requests += 1
        self._backlog_rank_steps += num_rank_steps
        self._condition.notify()

    def _took_from_log(self, arrival: Arrival | None) -> Arrival | None:
        with self._condition:
            if arrival is None:
                # The log ends before its count: the disk has lost what it had taken.
                self._rejected[RejectReason.WAL_DAMAGED] += self._backlog_rank_steps
                self._queued_rank_steps -= self._backlog_rank_steps
                self._backlog_requests = self._replay_requests = self._backlog_rank_steps = 0
                self._reader = None
                return None
            self._backlog_requests -= 1
            if self._replay_requests:
                self._replay_requests -= 1
                # Rejected spans were answered and filed by the process that received them.
                arrival = replace(arrival, rejections=(), is_replay=True)
                self._received += len(arrival.rank_steps)
                self._queued_rank_steps += len(arrival.rank_steps)
            else:
                self._backlog_rank_steps -= len(arrival.rank_steps)
            if not self._backlog_requests:
                self._reader = None
            return arrival
