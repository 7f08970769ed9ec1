"""The join window: rank steps in, joined steps out. Pure: no I/O, no clock, no thread; time is passed in.

::

    rank 0, step 7  --+                      every rank of the world, for every microbatch seen
    rank 2, step 7  --+--> open step 7  -->  JoinedStep(complete)
    rank 1, step 7  --+         |
                                +--------->  JoinedStep(timeout | evicted | shutdown), missing ranks listed

Every rank step is counted once, and at any moment

    received == joined + late + duplicate + rejected + pending

A rank step whose identity was seen before is a duplicate, whether its step is still open or closed;
one that comes first after its step has closed is late. Closed steps are remembered in a bounded
memory: beyond it a straggler opens its step again and closes it by timeout.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_schemas.enums import ClosedBy

StepKey = tuple[str, int]
"""(run id, step)"""
Slot = tuple[int, int]
"""(rank, microbatch)"""

_OBJECT_BYTES = 200
"""About what a small Python record and its array headers take; keeps empty records from being free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWindow:
    """Bounds of the window."""

    timeout_ns: int
    """From a step's first arrival until it is closed without its missing ranks."""
    max_steps: int
    """Open steps at most; the oldest is closed early beyond it."""
    max_bytes: int
    """Size of all pending rank steps at most; the oldest steps are closed early beyond it."""
    max_closed_steps: int
    """Closed steps remembered, to tell late and duplicate rank steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCounts:
    """Rank steps by fate. `received` is the sum of the others."""

    received: int = 0
    joined: int = 0
    late: int = 0
    duplicate: int = 0
    rejected: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Came after its step had closed; its rows are still worth storing."""

    rank_step: RankStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Was received before."""

    rank_step: RankStep


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSizeMismatch:
    """Says another world size than the ranks of its step that came before."""

    rank_step: RankStep
    expected: int


Outcome = JoinedStep | Late | Duplicate | WorldSizeMismatch
"""What became of a rank step, or which steps closed."""


@dataclass(slots=True)
class _OpenStep:
    world_size: int
    opened_ns: int
    last_arrival_ns: int
    size_bytes: int = 0
    rank_steps: dict[Slot, RankStep] = field(default_factory=dict)
    microbatches: set[int] = field(default_factory=lambda: {0})

    def is_complete(self) -> bool:
        # Slots are unique and inside world x microbatches, so counting them is enough.
        return len(self.rank_steps) == self.world_size * len(self.microbatches)


@dataclass(slots=True)
class _ClosedStep:
    full_world_size: int
    """World size where every slot of `microbatches` had arrived; 0 where some were missing."""
    microbatches: set[int]
    seen: set[Slot]
    """Slots that arrived, where the step did not close complete, and all that arrived since.

    Holds what came and not what is missing: what is missing is as large as a forged world size.
    """

    def take(self, slot: Slot) -> bool:
        """Whether this slot had not arrived yet; from now on it has."""
        rank, microbatch = slot
        if slot in self.seen or (rank < self.full_world_size and microbatch in self.microbatches):
            return False
        self.seen.add(slot)
        return True


class Joiner:
    """Holds open steps until they close. Not thread-safe: one thread owns it."""

    def __init__(self, window: JoinWindow) -> None:
        self._window = window
        # In order of opening, which is the order of timing out and of eviction.
        self._open: OrderedDict[StepKey, _OpenStep] = OrderedDict()
        self._closed: OrderedDict[StepKey, _ClosedStep] = OrderedDict()
        self._pending_bytes = 0
        self._received = self._joined = self._late = self._duplicate = self._rejected = self._pending = 0

    @property
    def counts(self) -> JoinCounts:
        """Counts so far; a snapshot."""
        return JoinCounts(
            received=self._received,
            joined=self._joined,
            late=self._late,
            duplicate=self._duplicate,
            rejected=self._rejected,
            pending=self._pending,
        )

    @property
    def num_open_steps(self) -> int:
        """Steps in the window."""
        return len(self._open)

    def add(self, rank_step: RankStep, *, now_ns: int) -> tuple[Outcome, ...]:
        """Take one rank step.

        Args:
            rank_step: decoded and validated.
            now_ns: monotonic time of its arrival; never smaller than in an earlier call.

        Returns:
            What became of it unless it waits, and every step that closed because of it.
        """
        self._received += 1
        key, slot = (rank_step.run_id, rank_step.step), (rank_step.rank, rank_step.microbatch)
        closed = self._closed.get(key)
        if closed is not None:
            if closed.take(slot):
                self._late += 1
                return (Late(rank_step=rank_step),)
            self._duplicate += 1
            return (Duplicate(rank_step=rank_step),)
        step = self._open.get(key)
        if step is None:
            step = _OpenStep(world_size=rank_step.world_size, opened_ns=now_ns, last_arrival_ns=now_ns)
        elif rank_step.world_size != step.world_size:
            self._rejected += 1
            return (WorldSizeMismatch(rank_step=rank_step, expected=step.world_size),)
        elif slot in step.rank_steps:
            self._duplicate += 1
            return (Duplicate(rank_step=rank_step),)
        self._open[key] = step
        step.rank_steps[slot] = rank_step
        step.microbatches.add(rank_step.microbatch)
        step.last_arrival_ns = now_ns
        size = size_bytes(rank_step)
        step.size_bytes += size
        self._pending += 1
        self._pending_bytes += size
        if step.is_complete():
            return (self._close(key, ClosedBy.COMPLETE),)
        return self._evict()

    def tick(self, *, now_ns: int) -> tuple[JoinedStep, ...]:
        """Close the steps whose time is up at `now_ns`, oldest first."""
        due = []
        for key, step in self._open.items():
            if now_ns - step.opened_ns < self._window.timeout_ns:
                break
            due.append(key)
        return tuple(self._close(key, ClosedBy.TIMEOUT) for key in due)

    def flush(self) -> tuple[JoinedStep, ...]:
        """Close everything that is open, oldest first, because the collector stops."""
        return tuple(self._close(key, ClosedBy.SHUTDOWN) for key in list(self._open))

    def _evict(self) -> tuple[JoinedStep, ...]:
        evicted = []
        while len(self._open) > self._window.max_steps or self._pending_bytes > self._window.max_bytes:
            evicted.append(self._close(next(iter(self._open)), ClosedBy.EVICTED))
        return tuple(evicted)

    def _close(self, key: StepKey, closed_by: ClosedBy) -> JoinedStep:
        step = self._open.pop(key)
        arrived = step.rank_steps
        complete = closed_by is ClosedBy.COMPLETE
        missing_ranks = (
            ()
            if complete
            else tuple(
                rank
                for rank in range(step.world_size)
                if any((rank, microbatch) not in arrived for microbatch in step.microbatches)
            )
        )
        self._closed[key] = _ClosedStep(
            full_world_size=step.world_size if complete else 0,
            microbatches=step.microbatches,
            seen=set() if complete else set(arrived),
        )
        while len(self._closed) > self._window.max_closed_steps:
            self._closed.popitem(last=False)
        self._pending -= len(arrived)
        self._pending_bytes -= step.size_bytes
        self._joined += len(arrived)
        return JoinedStep(
            run_id=key[0],
            step=key[1],
            world_size=step.world_size,
            rank_steps=tuple(arrived[slot] for slot in sorted(arrived)),
            missing_ranks=missing_ranks,
            closed_by=closed_by,
            last_arrival_monotonic_ns=step.last_arrival_ns,
        )


def size_bytes(rank_step: RankStep) -> int:
    """About what a rank step takes in memory."""
    phases = rank_step.phases
    return (
        _OBJECT_BYTES * (2 + len(rank_step.experts) + len(rank_step.traffic) + len(rank_step.violations))
        + 11 * phases.layer.nbytes
        + sum(entry.counts.nbytes for entry in rank_step.experts)
        + sum(entry.rows.nbytes for entry in rank_step.traffic)
        + (0 if rank_step.coactivation is None else 5 * rank_step.coactivation.layer.nbytes)
    )
