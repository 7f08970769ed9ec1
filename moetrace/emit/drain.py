"""The drain thread: takes finished buffers, waits for device events, assembles records, fans out.

The only thread that resolves marks. It never holds a lock that the model's thread could want.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from moetrace.emit.base import PlacementEmitter
from moetrace.guard import Guard
from moetrace.record.assembler import Assembler
from moetrace.record.build import build_record
from moetrace.record.sites import SiteTable
from moetrace.record.types import StepRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas.enums import DropReason, SkipReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from moetrace.emit.base import Emitter
    from moetrace.record.buffer import BufferPool, StepBuffer
    from moetrace.record.placement import PlacementRecord

POLL_S = 0.002
"""How often unfinished device events are asked."""
RESOLVE_TIMEOUT_S = 30.0
"""Device events that have not completed by then are given up; a step is rarely longer."""
MAX_PLACEMENTS = 256
"""Placements between two sampled steps; the oldest gives way."""


class Owner(Protocol):
    """What the drain needs of the tracer."""

    metrics: SelfMetrics
    guard: Guard
    sites: SiteTable

    @property
    def clock_name(self) -> str:
        """What times the phases."""
        ...


class Drain:
    """Owns the drain thread and the emitters."""

    def __init__(
        self,
        owner: Owner,
        emitters: list[Emitter],
        on_record: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """`on_record` looks at each record before it is emitted; a failure of it is counted and no more."""
        self._owner = owner
        self._on_record = on_record
        self.emitters = emitters
        self._assembler = Assembler(owner.sites)
        self._pool: BufferPool | None = None
        self._thread: threading.Thread | None = None
        self._deadline = float("inf")
        self._lock = threading.Lock()
        self.placements: deque[PlacementRecord] = deque(maxlen=MAX_PLACEMENTS)
        """Announced on the model's thread, which takes no lock for it; emitted before the next step."""
        self._in_hand = False
        """Whether a step is being drained and nobody has counted it as lost yet."""

    def start(self, pool: BufferPool) -> None:
        """Start draining a pool."""
        self._pool = pool
        self._thread = threading.Thread(target=self._run, args=(pool,), name="moetrace-drain", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drain what was handed over, close the emitters, return within the deadline.

        Returns:
            True when nothing was left behind or dropped on the way.
        """
        end = time.monotonic() + timeout_s
        # Thread and emitters stop a little earlier, so that all of it is over at the deadline.
        self._deadline = end - min(0.1, timeout_s / 10)
        dropped = self._owner.metrics.dropped.total()
        lost = 0
        if self._pool is not None and self._thread is not None:
            self._pool.filled.put(None)
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
            if self._thread.is_alive():
                # All that is queued in front of the stop mark, and the step in hand.
                lost = max(0, self._pool.filled.qsize() - 1) + self._settle()
        if lost:
            self._owner.metrics.drop(DropReason.SHUTDOWN_DEADLINE, lost)
        self._emit_placements()
        closed = [self._close(emitter, end) for emitter in self.emitters]
        return all(closed) and self._owner.metrics.dropped.total() == dropped

    def _close(self, emitter: Emitter, end: float) -> bool:
        """Close one emitter, even one that hangs or fails; returns at `end` at the latest."""
        result: list[bool] = []

        def close() -> None:
            stage = f"close.{emitter.name}"
            self._owner.guard.run(stage, lambda: result.append(emitter.close(self._deadline)))

        thread = threading.Thread(target=close, name="moetrace-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is too far gone to start threads
            close()
        else:
            thread.join(max(0.0, end - time.monotonic()))
        return result == [True]

    def _run(self, pool: BufferPool) -> None:
        while True:
            buffer = pool.filled.get()
            if buffer is None:
                return
            self._emit_placements()
            with self._lock:
                self._in_hand = True
            dropped: DropReason | None = None
            try:
                dropped = self._drain_one(buffer)
            except Exception as error:  # noqa: BLE001 - one bad step must not end the thread
                self._owner.guard.caught("drain", error)
                dropped = DropReason.INTERNAL_ERROR
            finally:
                pool.release(buffer)
            if self._settle() and dropped is not None:
                self._owner.metrics.drop(dropped)
            self._owner.metrics.background_ns["drain"] = time.thread_time_ns()

    def _emit_placements(self) -> None:
        while True:
            try:
                placement = self.placements.popleft()
            except IndexError:
                return
            for emitter in self.emitters:
                if isinstance(emitter, PlacementEmitter):
                    self._owner.guard.run(f"placement.{emitter.name}", emitter.emit_placement, placement)

    def _settle(self) -> bool:
        """Whether the step in hand is the caller's to count; it is counted once only."""
        with self._lock:
            in_hand, self._in_hand = self._in_hand, False
            return in_hand

    def _drain_one(self, buffer: StepBuffer) -> DropReason | None:
        """Emit one step, or say why it is dropped."""
        metrics, guard = self._owner.metrics, self._owner.guard
        if buffer.overflow:
            # What is missing would show as time outside the layers: no record is better than a wrong one.
            metrics.dropped_intervals += buffer.overflow
            return DropReason.BUFFER_FULL
        track = buffer.track
        if track.exhausted:
            return DropReason.EVENT_POOL_EMPTY
        if buffer.start_mark < 0 or buffer.end_mark < 0:
            return DropReason.EVENTS_UNRESOLVED
        skipped: Counter[SkipReason] = Counter()
        record: StepRecord | None = None
        while record is None:
            if not self._wait_until_ready(buffer):
                return DropReason.EVENTS_UNRESOLVED
            skipped.clear()
            # Nothing, where a capture has begun meanwhile.
            record = track.resolve(
                lambda: build_record(
                    buffer,
                    self._assembler,
                    self._owner.clock_name,
                    skipped,
                    interval_cost_ns=metrics.interval_cost_ns,
                )
            )
        if track.stepped_aside:
            skipped[SkipReason.ONE_QUEUE] += track.stepped_aside
        metrics.skipped.update(skipped)
        metrics.model_thread_ns += max(0, record.tracer_ns)
        if record.unstamped_sites:
            metrics.dropped_intervals += sum(start < 0 or end < 0 for _, start, end, _ in buffer.intervals())
        sites = self._owner.sites.sites
        metrics.seen_sites = sum(sites[number].per_step for number in record.seen_sites)
        if self._on_record is not None:
            guard.run("on_record", self._on_record, record)
        taken = [guard.run(f"emit.{emitter.name}", emitter.emit, record) for emitter in self.emitters]
        return None if all(taken) else DropReason.EXPORT_FAILED

    def _wait_until_ready(self, buffer: StepBuffer) -> bool:
        give_up = time.monotonic() + RESOLVE_TIMEOUT_S
        counter = buffer.counter
        while not (buffer.track.ready() and (counter is None or buffer.track.resolve(counter.ready))):
            if time.monotonic() > min(give_up, self._deadline):
                return False
            time.sleep(POLL_S)
        return True
