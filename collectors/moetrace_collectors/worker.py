"""The one thread behind the intake: joins, judges, and feeds the sinks. Owns joiner, engine, sinks.

Time in the join window is arrival time: a step is timed out against the arrival that is being handled,
never against a clock that runs on while a backlog waits, so ranks whose data sits in the queue are not
reported missing.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moetrace_collectors.dead_letter import DeadLetter
from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent, EventKind, Rejection
from moetrace_collectors.intake import Arrival, Intake
from moetrace_collectors.joiner import Duplicate, Joiner, Late, Outcome, WorldSizeMismatch
from moetrace_collectors.model import JoinedStep, LayerLoad, StepVerdict
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.sinks.base import RetryPolicy, Sink, StepResult, flush_with_retry
from moetrace_collectors.stateless_joiner import StatelessJoiner, Unjoined
from moetrace_schemas.enums import Cause, ClosedBy, Evidence, RejectReason

NS_PER_S = 1e9
NS_PER_MS = 1_000_000
POLL_S = 0.1
"""Longest wait for an arrival; bounds how late a timeout or a flush can be, seconds."""
NOTE_INTERVAL_NS = 1_000_000_000
MAX_LISTED_RANKS = 20
MAX_REMEMBERED_RUNS = 100

logger = logging.getLogger(__name__)


class Judge(Protocol):
    """The verdict engine, as the worker sees it."""

    def judge(self, joined: JoinedStep) -> StepVerdict:
        """The verdict of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where time comes from; tests put their own in."""

    monotonic_ns: Callable[[], int]
    unix_ns: Callable[[], int]
    sleep: Callable[[float], None]


class Worker:
    """Runs until the intake is closed and empty."""

    def __init__(
        self,
        *,
        intake: Intake,
        joiner: Joiner | StatelessJoiner,
        judge: Judge,
        layer_loads: Callable[[JoinedStep], tuple[LayerLoad, ...]],
        sinks: Sequence[Sink],
        dead_letter: DeadLetter,
        metrics: SelfMetrics,
        clocks: Clocks,
        retry: RetryPolicy,
        shutdown_timeout_s: float,
        on_runs: Callable[[Sequence[str]], None],
    ) -> None:
        """Take the stages.

        Args:
            intake: where arrivals come from.
            joiner: the join window.
            judge: gives verdicts.
            layer_loads: gives expert loads.
            sinks: where results go; closed by the caller.
            dead_letter: where rejections are written.
            metrics: the collector's own.
            clocks: time.
            retry: delays between attempts of a failed write.
            shutdown_timeout_s: how long the last writes are retried after `stop`.
            on_runs: told the run ids seen so far, the newest last, whenever there is a new one.
        """
        self._intake = intake
        self._joiner = joiner
        self._judge = judge
        self._layer_loads = layer_loads
        self._sinks = tuple(sinks)
        self._dead_letter = dead_letter
        self._metrics = metrics
        self._clocks = clocks
        self._retry = retry
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_runs = on_runs
        self._runs: OrderedDict[str, None] = OrderedDict()
        self._runs_changed = False
        self._runs_noted_ns: int | None = None
        self._stopping = threading.Event()
        self._deadline_ns = 0
        self._thread = threading.Thread(target=self.run, name="moetrace-worker", daemon=True)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Take what is queued, close every open step, write everything; returns when done or out of time."""
        self._deadline_ns = self._clocks.monotonic_ns() + int(self._shutdown_timeout_s * NS_PER_S)
        # In this order: once the worker sees the end, nothing can come behind it.
        self._intake.close()
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def run(self) -> None:
        """The thread's body."""
        self._event(EventKind.STARTED)
        while self._turn():
            pass
        for joined in self._joiner.flush():
            self._closed(joined)
        self._intake.settle(0, self._joiner.counts)
        self._event(EventKind.STOPPED)
        for sink in self._sinks:
            if not self._flush(sink):
                sink.abandon()

    def _turn(self) -> bool:
        """One arrival, or one tick; False when there will be none any more."""
        arrival = self._intake.take(timeout_s=POLL_S)
        if arrival is None and self._stopping.is_set():
            return False
        try:
            if arrival is None:
                self._tick(self._clocks.monotonic_ns())
            else:
                self._take(arrival)
        except Exception:
            # The per-message boundary: a fault of ours in one message must not end the service.
            logger.exception("a message could not be handled")
        now_ns = self._clocks.monotonic_ns()
        self._note_runs(now_ns)
        for sink in self._sinks:
            if sink.is_due(now_ns):
                self._flush(sink)
        self._metrics.sink_queue_steps.set(sum(sink.num_waiting_steps for sink in self._sinks))
        return True

    def _tick(self, now_ns: int) -> None:
        closed = self._joiner.tick(now_ns=now_ns)
        if closed:
            self._intake.settle(0, self._joiner.counts)
        for joined in closed:
            self._closed(joined)

    def _take(self, arrival: Arrival) -> None:
        self._tick(arrival.arrived_ns)
        outcomes: list[Outcome | Unjoined] = []
        for rank_step in arrival.rank_steps:
            self._remember(rank_step.run_id)
            outcomes.extend(self._joiner.add(rank_step, now_ns=arrival.arrived_ns))
        self._intake.settle(len(arrival.rank_steps), self._joiner.counts)
        for rejection in arrival.rejections:
            self._rejected(rejection)
        for outcome in outcomes:
            self._settle_outcome(outcome)

    def _settle_outcome(self, outcome: Outcome | Unjoined) -> None:
        if isinstance(outcome, JoinedStep):
            self._closed(outcome)
            return
        rank_step = outcome.rank_step
        run_id, step, rank = rank_step.run_id, rank_step.step, rank_step.rank
        if isinstance(outcome, Unjoined):
            for sink in self._sinks:
                sink.take_unjoined(rank_step)
        elif isinstance(outcome, Late):
            for sink in self._sinks:
                sink.take_late(rank_step)
            self._event(EventKind.LATE, "step_closed", run_id, step, rank)
        elif isinstance(outcome, Duplicate):
            self._event(EventKind.DUPLICATE, "same_rank_and_microbatch", run_id, step, rank)
        elif isinstance(outcome, WorldSizeMismatch):
            self._rejected(
                Rejection(
                    reason=RejectReason.IDENTITY_MISMATCH,
                    detail=f"world size {rank_step.world_size}, "
                    f"other ranks of the step say {outcome.expected}",
                    run_id=run_id,
                    step=step,
                    rank=rank,
                )
            )

    def _closed(self, joined: JoinedStep) -> None:
        try:
            verdict = self._judge.judge(joined)
            loads = self._layer_loads(joined)
        except Exception as error:
            # Also a per-message boundary: without a verdict the step's rows are still worth keeping.
            logger.exception("no verdict for run %s, step %d", joined.run_id, joined.step)
            verdict, loads = _no_verdict(joined, error), ()
        self._metrics.step_closed(joined)
        if joined.closed_by is ClosedBy.COMPLETE:
            waited_ns = self._clocks.monotonic_ns() - joined.last_arrival_monotonic_ns
            self._metrics.verdict_latency.observe(waited_ns / NS_PER_S)
        else:
            listed = ", ".join(map(str, joined.missing_ranks[:MAX_LISTED_RANKS]))
            more = len(joined.missing_ranks) - MAX_LISTED_RANKS
            detail = f"missing ranks: {listed}{f' and {more} more' if more > 0 else ''}"
            self._event(EventKind.PARTIAL, joined.closed_by.value, joined.run_id, joined.step, None, detail)
        for sink in self._sinks:
            sink.take_step(StepResult(joined=joined, verdict=verdict, loads=loads))

    def _rejected(self, rejection: Rejection) -> None:
        now_ms = self._clocks.unix_ns() // NS_PER_MS
        try:
            self._dead_letter.write(rejection, time_unix_ms=now_ms)
        except OSError as error:
            self._metrics.sink_failed("dead_letter")
            logger.warning("dead letter: %s", error)
        self._event(
            EventKind.REJECTED,
            rejection.reason.value,
            rejection.run_id,
            rejection.step,
            rejection.rank,
            rejection.detail,
        )

    def _event(
        self,
        kind: EventKind,
        reason: str = "",
        run_id: str = "",
        step: int | None = None,
        rank: int | None = None,
        detail: str = "",
    ) -> None:
        event = CollectorEvent(
            time_unix_ms=self._clocks.unix_ns() // NS_PER_MS,
            kind=kind,
            reason=reason,
            run_id=run_id,
            step=step,
            rank=rank,
            detail=detail,
        )
        for sink in self._sinks:
            sink.take_event(event)

    def _remember(self, run_id: str) -> None:
        if run_id in self._runs:
            return
        self._runs[run_id] = None
        self._runs_changed = True
        while len(self._runs) > MAX_REMEMBERED_RUNS:
            self._runs.popitem(last=False)

    def _note_runs(self, now_ns: int) -> None:
        if not self._runs_changed:
            return
        # A sender that makes up run ids must not make us write a file for each.
        if self._runs_noted_ns is not None and now_ns - self._runs_noted_ns < NOTE_INTERVAL_NS:
            return
        self._runs_changed, self._runs_noted_ns = False, now_ns
        try:
            self._on_runs(tuple(self._runs))
        except OSError as error:
            logger.warning("cannot note the runs: %s", error)

    def _flush(self, sink: Sink) -> bool:
        return flush_with_retry(sink, policy=self._retry, on_error=self._sink_failed, wait=self._wait)

    def _sink_failed(self, sink: Sink, error: SinkError) -> None:
        self._metrics.sink_failed(sink.name)
        logger.warning("%s: %s; %s", sink.name, error, "trying again" if error.retryable else "rows given up")

    def _wait(self, delay_s: float) -> bool:
        """Sleep between attempts; False once the shutdown deadline has passed."""
        if not self._stopping.wait(delay_s):
            return True
        left_s = (self._deadline_ns - self._clocks.monotonic_ns()) / NS_PER_S
        if left_s <= 0:
            return False
        self._clocks.sleep(min(delay_s, left_s))
        return True


def _no_verdict(joined: JoinedStep, error: Exception) -> StepVerdict:
    first = joined.rank_steps[0]
    return StepVerdict(
        run_id=joined.run_id,
        step=joined.step,
        forward_mode=first.forward_mode,
        evidence=Evidence.INSUFFICIENT,
        reason=f"The verdict stage failed with {type(error).__name__}; see the collector's log.",
        suspect=None,
        cause=Cause.UNKNOWN,
        runner_up=None,
        step_ns=0,
        extension_ns=0,
        missing_ranks=joined.missing_ranks,
        partial=bool(joined.missing_ranks),
        warmup=any(rank_step.warmup for rank_step in joined.rank_steps),
    )
