"""The join window: rank steps in, joined steps out. Pure: no I/O, no clock, no thread; time is passed in.

::

    rank 0, step 7  --+                      every rank of the world, for every microbatch seen
    rank 2, step 7  --+--> open step 7  -->  JoinedStep(complete)
    rank 1, step 7  --+         |
                                +--------->  JoinedStep(watermark | quorum | timeout | evicted | shutdown),
                                             missing ranks listed

Every rank step is counted once, and at any moment

    received == joined + late + duplicate + rejected + pending

A rank step whose identity was seen before is a duplicate, whether its step is still open or closed;
one that comes first after its step has closed is late. A closed step is never opened again: closed steps
are remembered in a bounded memory, and what has been forgotten from it is late too (`closed_memory`).
A step that a run executes again is neither: it belongs to the next run under that id (`incarnations`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from moetrace_collectors.closed_memory import ClosedMemory, ClosedStep, Slot, StepKey
from moetrace_collectors.incarnations import Incarnations, stored_run_id
from moetrace_collectors.model import JoinedStep, RankStep
from moetrace_collectors.watermark import Watermarks
from moetrace_schemas.enums import ClosedBy

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
    watermark_steps: int = 0
    """A step closes once every missing rank has sent so many later steps of the run; 0 = never."""
    quorum: float = 0.0
    """Share of the ranks that closes a step after `quorum_grace_ns`; 0 = only all of them do."""
    quorum_grace_ns: int = 0
    """From a step's first arrival until the quorum counts."""


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
    is_resend: bool = True
    """Whether it may be the very same rows again; else the step was executed again."""


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
    mark: int
    max_start_unix_ns: int = 0
    min_start_unix_ns: int = 0
    size_bytes: int = 0
    rank_steps: dict[Slot, RankStep] = field(default_factory=dict)
    microbatches: set[int] = field(default_factory=lambda: {0})
    awaited_rank: int = 0
    """The first rank that may still come: it has not sent this step, and is not past it."""

    def has_every_slot(self) -> bool:
        # Slots are unique and inside world x microbatches, so counting them is enough.
        return len(self.rank_steps) == self.world_size * len(self.microbatches)

    def has_rank(self, rank: int) -> bool:
        for microbatch in self.microbatches:  # noqa: SIM110 - asked for every rank step, and this is faster
            if (rank, microbatch) not in self.rank_steps:
                return False
        return True

    def has_quorum(self, share: float) -> bool:
        least = share * self.world_size
        # Counting slots first: it rules most steps out at no cost.
        if len(self.rank_steps) < least:
            return False
        return sum(map(self.has_rank, {rank for rank, _ in self.rank_steps})) >= least


class Joiner:
    """Holds open steps until they close. Not thread-safe: one thread owns it."""

    def __init__(self, window: JoinWindow) -> None:
        self._window = window
        # In order of opening, which is the order of timing out and of eviction.
        self._open: OrderedDict[StepKey, _OpenStep] = OrderedDict()
        self._memory = ClosedMemory(max_steps=window.max_closed_steps)
        self._incarnations = Incarnations()
        self._watermarks = Watermarks(num_steps=window.watermark_steps)
        self._awaiting: dict[tuple[str, int], dict[StepKey, None]] = {}
        """Open steps by (run id, awaited rank), so that a rank's mark is compared only with those."""
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

    @property
    def oldest_mark(self) -> int | None:
        """The mark of the first rank step of the step that has been open longest; None where none is."""
        return next((step.mark for step in self._open.values()), None)

    def begun_unix_ns(self, run_id: str, start_unix_ns: int) -> int:
        """When the run began that a rank step with this id on the wire and this start belongs to.

        0 for the first run under the id.
        """
        return self._incarnations.begun(run_id, start_unix_ns)

    def take_closed(self) -> bytes | None:
        """What the memory of closed steps has learned since the last call, for `remember`."""
        return self._memory.take_changes(self._incarnations.dump())

    def all_closed(self) -> bytes:
        """The whole memory of closed steps, for `remember`."""
        return self._memory.dump(self._incarnations.dump())

    def remember(self, closed: bytes) -> None:
        """Take over what an earlier process knew, before anything is added.

        Raises:
            ValueError: it does not read.
        """
        self._incarnations.load(self._memory.load(closed))

    def add(self, rank_step: RankStep, *, now_ns: int, mark: int = 0) -> tuple[Outcome, ...]:
        """Take one rank step.

        Args:
            rank_step: decoded and validated.
            now_ns: monotonic time of its arrival; never smaller than in an earlier call.
            mark: where it came from, never smaller than in an earlier call; see `oldest_mark`.

        Returns:
            What became of it unless it waits, and every step that closed because of it. A rank step of a
            run id that is used again carries the run id of its incarnation.
        """
        self._received += 1
        rank_step = self._placed(rank_step)
        key, slot = (rank_step.run_id, rank_step.step), (rank_step.rank, rank_step.microbatch)
        step = self._open.get(key)
        if step is None:
            outcome = self._after_close(rank_step, key, slot)
            if outcome is not None:
                return (outcome, *self._past(rank_step))
            step = _OpenStep(
                world_size=rank_step.world_size, opened_ns=now_ns, last_arrival_ns=now_ns, mark=mark
            )
        elif rank_step.world_size != step.world_size:
            self._rejected += 1
            return (WorldSizeMismatch(rank_step=rank_step, expected=step.world_size),)
        elif slot in step.rank_steps:
            self._duplicate += 1
            is_resend = rank_step.start_unix_ns == step.rank_steps[slot].start_unix_ns
            return (Duplicate(rank_step=rank_step, is_resend=is_resend),)
        if key not in self._open:
            self._open[key] = step
            self._awaiting.setdefault((key[0], step.awaited_rank), {})[key] = None
        step.rank_steps[slot] = rank_step
        if rank_step.microbatch not in step.microbatches:
            step.microbatches.add(rank_step.microbatch)
            self._memory.expect_microbatches(rank_step.run_id, len(step.microbatches))
            # Ranks that had sent all of the step are missing again.
            self._await(key, step, 0)
        step.last_arrival_ns = now_ns
        start_unix_ns = rank_step.start_unix_ns
        step.max_start_unix_ns = max(step.max_start_unix_ns, start_unix_ns)
        step.min_start_unix_ns = min(step.min_start_unix_ns or start_unix_ns, start_unix_ns)
        size = size_bytes(rank_step)
        step.size_bytes += size
        self._pending += 1
        self._pending_bytes += size
        if self._is_complete(key, step):
            return (self._close(key, ClosedBy.COMPLETE), *self._past(rank_step))
        return (*self._past(rank_step), *self._evict())

    def tick(self, *, now_ns: int) -> tuple[JoinedStep, ...]:
        """Close the steps whose time is up at `now_ns`, oldest first."""
        window = self._window
        first_ns = min(window.timeout_ns, window.quorum_grace_ns) if window.quorum else window.timeout_ns
        due = []
        for key, step in self._open.items():
            waited_ns = now_ns - step.opened_ns
            if waited_ns < first_ns:
                break
            if waited_ns >= window.timeout_ns:
                due.append((key, ClosedBy.TIMEOUT))
            elif step.has_quorum(window.quorum):
                due.append((key, ClosedBy.QUORUM))
        return tuple(self._close(key, closed_by) for key, closed_by in due)

    def flush(self) -> tuple[JoinedStep, ...]:
        """Close everything that is open, oldest first, because the collector stops."""
        return tuple(self._close(key, ClosedBy.SHUTDOWN) for key in list(self._open))

    def _past(self, rank_step: RankStep) -> tuple[JoinedStep, ...]:
        """Steps that close because this rank is past them now, oldest first."""
        run_id, rank = rank_step.run_id, rank_step.rank
        if not self._window.watermark_steps:
            return ()
        waiting: set[StepKey] = set()
        if self._watermarks.saw(run_id, rank, rank_step.step):
            waiting.update(self._awaiting.get((run_id, rank), ()))
        own = self._open.get((run_id, rank_step.step))
        if own is not None and (own.awaited_rank == rank or len(own.rank_steps) == 1 or own.has_every_slot()):
            # It waited for this rank, has just been opened, or waited for a microbatch that is not expected
            # any more.
            waiting.add((run_id, rank_step.step))
        closed = []
        for key in sorted(waiting):
            step = self._open[key]
            self._await(key, step, step.awaited_rank)
            if step.awaited_rank == step.world_size:
                # Complete where a step before it has just lowered how many microbatches are expected.
                closed_by = ClosedBy.COMPLETE if self._is_complete(key, step) else ClosedBy.WATERMARK
                closed.append(self._close(key, closed_by))
        return tuple(closed)

    def _is_complete(self, key: StepKey, step: _OpenStep) -> bool:
        return step.has_every_slot() and self._has_microbatches(key, step)

    def _has_microbatches(self, key: StepKey, step: _OpenStep) -> bool:
        return len(step.microbatches) >= self._memory.num_microbatches(key[0])

    def _await(self, key: StepKey, step: _OpenStep, first: int) -> None:
        """Find the rank, from `first` on, that the step waits for."""
        self._stop_awaiting(key, step)
        has_microbatches = self._has_microbatches(key, step)
        rank = first
        while rank < step.world_size and (
            (has_microbatches and step.has_rank(rank)) or self._watermarks.mark(key[0], rank) > key[1]
        ):
            rank += 1
        step.awaited_rank = rank
        self._awaiting.setdefault((key[0], rank), {})[key] = None

    def _stop_awaiting(self, key: StepKey, step: _OpenStep) -> None:
        waiting = self._awaiting[key[0], step.awaited_rank]
        del waiting[key]
        if not waiting:
            del self._awaiting[key[0], step.awaited_rank]

    def _placed(self, rank_step: RankStep) -> RankStep:
        """The rank step under the run id of its incarnation."""
        sent, start = rank_step.run_id, rank_step.start_unix_ns
        number = self._incarnations.at(sent, start)
        while self._is_executed_again(stored_run_id(sent, number), rank_step):
            following = self._incarnations.after(sent, number, start)
            if following is None:
                break
            number = following
        if number == 1:
            return rank_step
        return replace(rank_step, run_id=stored_run_id(sent, number), sent_run_id=sent)

    def _is_executed_again(self, run_id: str, rank_step: RankStep) -> bool:
        """Whether this run has had the step before, and this is neither a resend nor a straggler of it."""
        key, slot = (run_id, rank_step.step), (rank_step.rank, rank_step.microbatch)
        start = rank_step.start_unix_ns
        step = self._open.get(key)
        if step is not None:
            return slot in step.rank_steps and start > step.max_start_unix_ns
        last_start = self._memory.last_start_unix_ns(run_id)
        closed = self._memory.find(key)
        if closed is None:
            # Forgotten steps lie far behind the run's newest: no straggler of them starts after it.
            return self._memory.is_forgotten(key) and start > last_start
        if closed.has(slot):
            return start > closed.max_start_unix_ns
        # A rank that was missing. Another microbatch may start as late as it likes.
        return rank_step.microbatch in closed.microbatches and start > last_start + self._window.timeout_ns

    def _after_close(self, rank_step: RankStep, key: StepKey, slot: Slot) -> Late | Duplicate | None:
        """What becomes of a rank step whose step is not open; None where it has never been."""
        closed = self._memory.find(key)
        if closed is not None and closed.has(slot):
            self._duplicate += 1
            start = rank_step.start_unix_ns
            is_resend = closed.min_start_unix_ns <= start <= closed.max_start_unix_ns
            return Duplicate(rank_step=rank_step, is_resend=is_resend)
        if closed is not None:
            self._memory.take_late(key, slot, rank_step.start_unix_ns)
        elif not self._memory.is_forgotten(key):
            return None
        self._late += 1
        return Late(rank_step=rank_step)

    def _evict(self) -> tuple[JoinedStep, ...]:
        evicted = []
        while len(self._open) > self._window.max_steps or self._pending_bytes > self._window.max_bytes:
            evicted.append(self._close(next(iter(self._open)), ClosedBy.EVICTED))
        return tuple(evicted)

    def _close(self, key: StepKey, closed_by: ClosedBy) -> JoinedStep:
        step = self._open.pop(key)
        self._stop_awaiting(key, step)
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
        if not complete and not missing_ranks:
            # Nobody is missing: the step had fewer microbatches than the run's steps before.
            self._memory.expect_microbatches(key[0], len(step.microbatches), at_least=False)
        self._memory.close(
            key,
            ClosedStep(
                full_world_size=0 if missing_ranks else step.world_size,
                microbatches=step.microbatches,
                max_start_unix_ns=step.max_start_unix_ns,
                min_start_unix_ns=step.min_start_unix_ns,
                seen=set(arrived) if missing_ranks else set(),
            ),
        )
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
        + sum(entry.counts.nbytes for entry in (*rank_step.experts, *rank_step.unfolded))
        + sum(entry.rows.nbytes for entry in rank_step.traffic)
        + (0 if rank_step.coactivation is None else 5 * rank_step.coactivation.layer.nbytes)
    )
