"""The drain thread: takes finished buffers, waits for device events, assembles records, fans out.

The only thread that resolves marks. It never holds a lock that the model's thread could want.
"""

from __future__ import annotations

import threading
import time
from queue import Empty
from typing import TYPE_CHECKING, Protocol

from moetrace.guard import Guard
from moetrace.record.assemble import Interval, assemble
from moetrace.record.sites import SiteTable
from moetrace.record.types import PhaseRow, StepRecord, TrafficRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import Direction, DropReason, Phase

if TYPE_CHECKING:
    from moetrace.emit.base import Emitter
    from moetrace.record.buffer import BufferPool, StepBuffer

POLL_S = 0.002
"""How often unfinished device events are asked."""
RESOLVE_TIMEOUT_S = 30.0
"""Device events that have not completed by then are given up; a step is rarely longer."""


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

    def __init__(self, owner: Owner, emitters: list[Emitter]) -> None:
        self._owner = owner
        self.emitters = emitters
        self._pool: BufferPool | None = None
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None

    def start(self, pool: BufferPool) -> None:
        """Start draining a pool."""
        self._pool = pool
        self._thread = threading.Thread(target=self._run, name="moetrace-drain", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drain what was handed over, close the emitters, return within the deadline.

        Returns:
            True when nothing was left behind.
        """
        deadline = time.monotonic() + timeout_s
        self._deadline = deadline
        complete = True
        if self._pool is not None and self._thread is not None:
            self._pool.filled.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
            left = self._pool.filled.qsize()
            if self._thread.is_alive() or left:
                complete = False
                self._owner.metrics.drop(DropReason.SHUTDOWN_DEADLINE, left + self._thread.is_alive())
        for emitter in self.emitters:
            complete = emitter.close(deadline) and complete
        return complete

    def _run(self) -> None:
        assert self._pool is not None
        while True:
            try:
                buffer = self._pool.filled.get(timeout=1.0)
            except Empty:
                continue
            if buffer is None:
                return
            try:
                self._drain_one(buffer)
            except Exception as error:  # noqa: BLE001 - one bad step must not end the thread
                self._owner.guard.caught("drain", error)
                self._owner.metrics.drop(DropReason.INTERNAL_ERROR)
            finally:
                self._pool.release(buffer)

    def _drain_one(self, buffer: StepBuffer) -> None:
        if not self._wait_until_ready(buffer):
            self._owner.metrics.drop(DropReason.EVENTS_UNRESOLVED)
            return
        record = build_record(buffer, self._owner.sites, self._owner.clock_name)
        metrics = self._owner.metrics
        metrics.seen_sites = sum(
            site.per_step
            for number, site in enumerate(self._owner.sites.sites)
            if number in record.seen_sites
        )
        if buffer.overflow:
            metrics.dropped_intervals += buffer.overflow
            metrics.drop(DropReason.BUFFER_FULL)
            return
        for emitter in self.emitters:
            self._owner.guard.run(f"emit.{emitter.name}", emitter.emit, record)

    def _wait_until_ready(self, buffer: StepBuffer) -> bool:
        give_up = time.monotonic() + RESOLVE_TIMEOUT_S
        counter = buffer.counter
        while not (buffer.track.ready() and (counter is None or counter.ready())):
            now = time.monotonic()
            if now > give_up or (self._deadline is not None and now > self._deadline):
                return False
            time.sleep(POLL_S)
        return True


def build_record(buffer: StepBuffer, sites: SiteTable, clock: str) -> StepRecord:
    """A finished buffer as a record. Pure apart from reading the buffer."""
    to_ns = buffer.track.nanoseconds
    start, end = to_ns(buffer.start_mark), to_ns(buffer.end_mark)
    intervals = []
    seen = set()
    for site, first, last, flags in buffer.intervals():
        seen.add(site)
        if first >= 0 and last >= 0:
            intervals.append(Interval(sites.sites[site], to_ns(first), to_ns(last), flags))
    phases = assemble(intervals, start, end, microbatch=buffer.microbatch)
    traffic = tuple(
        TrafficRecord(layer=layer or 0, phase=Phase(phase), row_bytes=row_bytes, rows=tuple(rows))
        for layer, phase, row_bytes, rows in buffer.traffic
    )
    return StepRecord(
        step=buffer.step,
        microbatch=buffer.microbatch,
        forward_mode=buffer.forward_mode,
        cohort=buffer.cohort,
        warmup=buffer.warmup,
        placement_version=buffer.placement_version,
        clock=clock,
        start_unix_ns=buffer.start_unix_ns,
        duration_ns=end - start,
        phases=_with_rows(phases, _summed(traffic), dict(_local_rows(buffer))),
        experts=buffer.counter.rows() if buffer.counter is not None else (),
        traffic=_summed(traffic),
        seen_sites=frozenset(seen),
    )


def _local_rows(buffer: StepBuffer) -> list[tuple[int, int]]:
    totals: dict[int, int] = {}
    for layer, rows in buffer.local_rows:
        totals[layer or 0] = totals.get(layer or 0, 0) + rows
    return list(totals.items())


def _summed(traffic: tuple[TrafficRecord, ...]) -> tuple[TrafficRecord, ...]:
    """One record per (layer, phase): several forwards of one step add up."""
    sums: dict[tuple[int, Phase, int], list[int]] = {}
    for item in traffic:
        key = (item.layer, item.phase, item.row_bytes)
        have = sums.setdefault(key, [0] * len(item.rows))
        sums[key] = [a + b for a, b in zip(have, item.rows, strict=True)]
    return tuple(
        TrafficRecord(layer=layer, phase=phase, row_bytes=row_bytes, rows=tuple(rows))
        for (layer, phase, row_bytes), rows in sums.items()
    )


def _with_rows(
    phases: tuple[PhaseRow, ...], traffic: tuple[TrafficRecord, ...], local_rows: dict[int, int]
) -> tuple[PhaseRow, ...]:
    """Rows and bytes of the payload exchange (the last of a layer's dispatches) and of the GEMM.

    Where a layer ran several times in the step (several forwards), rows cannot be told apart by
    pass here and stay unknown.
    """
    sent = {(item.layer, item.phase): (sum(item.rows), sum(item.rows) * item.row_bytes) for item in traffic}
    last: dict[tuple[int, Phase], int] = {}
    passes: dict[int, int] = {}
    for index, row in enumerate(phases):
        if row.flags & RowFlag.BARRIER and row.direction is Direction.FORWARD:
            last[(row.layer, row.phase)] = index
        if row.phase is Phase.ROUTER:
            passes[row.layer] = passes.get(row.layer, 0) + 1
    gemm_index = {row.layer: i for i, row in enumerate(phases) if row.phase is Phase.EXPERT_GEMM}
    changed: dict[int, tuple[int, int]] = {}
    for key, index in last.items():
        if key in sent and passes.get(key[0], 1) == 1:
            changed[index] = sent[key]
    for layer, index in gemm_index.items():
        if layer in local_rows and passes.get(layer, 1) == 1:
            changed[index] = (local_rows[layer], -1)
    return tuple(
        _replace_rows(row, *changed[index]) if index in changed else row for index, row in enumerate(phases)
    )


def _replace_rows(row: PhaseRow, rows: int, size: int) -> PhaseRow:
    return PhaseRow(
        layer=row.layer,
        phase=row.phase,
        direction=row.direction,
        microbatch=row.microbatch,
        ordinal=row.ordinal,
        stream=row.stream,
        flags=row.flags,
        start_offset_ns=row.start_offset_ns,
        duration_ns=row.duration_ns,
        bytes=size,
        rows=rows,
    )
