"""The one thread behind the intake: joins, judges, and feeds the sinks. Owns joiner, engine, sinks.

Time in the join window is arrival time: a step is timed out against the arrival that is being handled,
never against a clock that runs on while a backlog waits, so ranks whose data sits in the queue are not
reported missing.

With a write-ahead log the worker also says what need not be kept. It notes how things stand (what has
closed, what is still open) with how much each sink had been given by then; once all sinks have written that
much, all but what was open then is stored.
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
from moetrace_collectors.incarnations import AGAIN_REASON, TWO_JOBS_REASON, ReuseWatch
from moetrace_collectors.intake import Arrival, Intake
from moetrace_collectors.joiner import Duplicate, Joiner, Late, Outcome, WorldSizeMismatch
from moetrace_collectors.ledger.epochs import Epochs
from moetrace_collectors.model import JoinedStep, LayerLoad, PlacementReport, RankStep, StepVerdict
from moetrace_collectors.receipts import GroupViolation, group_violations
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.sinks.background import BackgroundSink
from moetrace_collectors.sinks.base import RetryPolicy, Sink, StepResult, Writer, flush_with_retry
from moetrace_collectors.stateless_joiner import StatelessJoiner, Unjoined
from moetrace_collectors.verdict.no_verdict import TWO_JOBS, no_verdict
from moetrace_schemas.enums import ClosedBy, RejectReason

NS_PER_S = 1e9
NS_PER_MS = 1_000_000
POLL_S = 0.1
"""Longest wait for an arrival; bounds how late a timeout or a flush can be, seconds."""
NOTE_INTERVAL_NS = 1_000_000_000
STUCK_S = 5.0
"""Beyond the shutdown timeout: for a write that has begun to end, seconds."""
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


class StoredLog(Protocol):
    """The write-ahead log, as the worker sees it."""

    def wants_everything(self, before_segment: int) -> bool:
        """Whether `mark_stored` needs all closed steps."""

    def mark_stored(self, closed: bytes | None, *, before_segment: int, everything: bytes | None) -> None:
        """Note closed steps that are stored, and let go of the segments before one."""

    def finish(self, everything: bytes) -> None:
        """All is stored: keep only the closed steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What is stored once every sink has written what it had been given."""

    num_taken: tuple[int, ...]
    """By sink."""
    closed: bytes | None
    before_segment: int
    everything: bytes | None


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
        log: StoredLog | None = None,
        placements: Callable[[PlacementReport], None] | None = None,
        epochs: Epochs | None = None,
        background_sinks: Sequence[BackgroundSink] = (),
        turn: threading.Lock | None = None,
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
            log: told what is stored; None without a write-ahead log.
            placements: told of each placement, before the steps that came with it are joined.
            epochs: numbers counts by logical experts; None leaves them as they came.
            background_sinks: those that write in a thread of their own; they come after `sinks`.
            turn: held while arrays are worked on, shared with `RequestHandler`, which says why.
        """
        self._turn = turn or threading.Lock()
        self._log = log
        self._mark: _Mark | None = None
        self._segment = 0
        self._is_log_behind = False
        self._intake = intake
        self._joiner = joiner
        self._judge = judge
        self._layer_loads = layer_loads
        self._background_sinks = tuple(background_sinks)
        self._sinks: tuple[Sink, ...] = (*sinks, *background_sinks)
        self._dead_letter = dead_letter
        self._metrics = metrics
        self._clocks = clocks
        self._retry = retry
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_runs = on_runs
        self._placements = placements
        self._epochs = epochs
        self._runs: OrderedDict[str, None] = OrderedDict()
        self._reuse = ReuseWatch()
        self._runs_changed = False
        self._runs_noted_ns: int | None = None
        self.wait_between_attempts: Callable[[float], bool] = self._wait
        """Sleeps between attempts of a write, False to give up; tests let time pass here."""
        self._stopping = threading.Event()
        self._deadline_ns = 0
        self._thread = threading.Thread(target=self.run, name="moetrace-worker", daemon=True)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether its threads run."""
        return self._thread.is_alive() and all(sink.is_alive() for sink in self._background_sinks)

    @property
    def is_stuck(self) -> bool:
        """Whether it still writes although `stop` has returned."""
        return self._stopping.is_set() and self._thread.is_alive()

    @property
    def is_log_behind(self) -> bool:
        """Whether it ended with something left in the log for the next start."""
        return self._is_log_behind

    def stop(self) -> None:
        """Take what is queued, close every open step, write everything; returns when done or out of time."""
        self._deadline_ns = self._clocks.monotonic_ns() + int(self._shutdown_timeout_s * NS_PER_S)
        # In this order: once the worker sees the end, nothing can come behind it.
        self._intake.close()
        self._stopping.set()
        if self._thread.is_alive():
            # A store that hangs says neither yes nor no, and nothing can end a write that waits for it.
            self._thread.join(self._shutdown_timeout_s + STUCK_S)
            self._is_log_behind |= self._thread.is_alive() and self._log is not None

    def run(self) -> None:
        """The thread's body."""
        for background in self._background_sinks:
            background.start(self._flush)
        self.note(EventKind.STARTED)
        while self.turn():
            if self._log is not None and self._is_out_of_time():
                # What is in the log is safe there; in memory it would grow.
                self._is_log_behind = True
                for background in self._background_sinks:
                    background.end()
                return
        for joined in self._joiner.flush():
            self._closed(joined)
        self._intake.settle(0, self._joiner.counts)
        self.note(EventKind.STOPPED)
        for sink in self._sinks:
            if sink.finish() if isinstance(sink, BackgroundSink) else self._flush(sink):
                continue
            if self._log is not None:
                self._is_log_behind = True
            else:
                sink.abandon()
        if self._log is not None and not self._is_log_behind:
            self._log.finish(self._joiner.all_closed())

    def turn(self, *, timeout_s: float = POLL_S) -> bool:
        """One arrival, or one tick where none comes in time; False when there will be none any more."""
        arrival = self._intake.take(timeout_s=timeout_s)
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
        if self._log is not None:
            self._mark_stored(self._log)
        return True

    def _mark_stored(self, log: StoredLog) -> None:
        if self._mark is None:
            oldest = self._joiner.oldest_mark
            before_segment = self._segment if oldest is None else oldest
            self._mark = _Mark(
                num_taken=tuple(sink.num_taken for sink in self._sinks),
                closed=self._joiner.take_closed(),
                before_segment=before_segment,
                everything=self._joiner.all_closed() if log.wants_everything(before_segment) else None,
            )
        mark = self._mark
        if all(sink.num_written >= taken for sink, taken in zip(self._sinks, mark.num_taken, strict=True)):
            self._mark = None
            log.mark_stored(mark.closed, before_segment=mark.before_segment, everything=mark.everything)

    def _is_out_of_time(self) -> bool:
        return self._stopping.is_set() and self._clocks.monotonic_ns() >= self._deadline_ns

    def _tick(self, now_ns: int) -> None:
        closed = self._joiner.tick(now_ns=now_ns)
        if closed:
            self._intake.settle(0, self._joiner.counts)
        for joined in closed:
            self._closed(joined)

    def _take(self, arrival: Arrival) -> None:
        if arrival.rank_steps or arrival.placements:
            # Rejections alone may overtake rank steps that wait in the log; time must not.
            self._tick(arrival.arrived_ns)
        for report in arrival.placements:
            if self._epochs is not None:
                self._epochs.learn(report)
            if self._placements is not None:
                self._placements(report)
        outcomes: list[Outcome | Unjoined] = []
        self._segment = max(self._segment, arrival.segment)
        for rank_step in arrival.rank_steps:
            outcomes.extend(self._joiner.add(rank_step, now_ns=arrival.arrived_ns, mark=self._segment))
        self._intake.settle(len(arrival.rank_steps), self._joiner.counts)
        for rejection in arrival.rejections:
            self._rejected(rejection)
        for outcome in outcomes:
            # The store has what is replayed and was stored; a row for each would only fill it.
            if not (arrival.is_replay and isinstance(outcome, Duplicate)):
                self._settle_outcome(outcome)

    def _settle_outcome(self, outcome: Outcome | Unjoined) -> None:
        if isinstance(outcome, JoinedStep):
            self._closed(outcome)
            return
        rank_step = outcome.rank_step
        run_id, step, rank = rank_step.run_id, rank_step.step, rank_step.rank
        if isinstance(outcome, Unjoined):
            self._remember(rank_step)
            rank_step = self._settled(rank_step)
            for sink in self._sinks:
                sink.take_unjoined(rank_step)
        elif isinstance(outcome, Late):
            self._remember(rank_step)
            for sink in self._sinks:
                sink.take_late(rank_step)
            self._event(EventKind.LATE, "step_closed", run_id, step, rank)
        elif isinstance(outcome, Duplicate):
            if not outcome.is_resend:
                self._reuse.repeated(rank_step.sent_run_id or run_id, rank_step.start_unix_ns)
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

    def _settled(self, rank_step: RankStep) -> RankStep:
        if self._epochs is None:
            return rank_step
        try:
            return self._epochs.settled(rank_step)
        except Exception:
            # Also a per-message boundary: rows under other numbers are still worth keeping.
            logger.exception("no logical experts for run %s, step %d", rank_step.run_id, rank_step.step)
            return rank_step

    def _judged(
        self, joined: JoinedStep
    ) -> tuple[JoinedStep, StepVerdict, tuple[LayerLoad, ...], tuple[GroupViolation, ...]]:
        """What is found out about a step, counts by logical experts where they can be told."""
        first = joined.rank_steps[0]
        if self._reuse.is_shared(first.sent_run_id or first.run_id, first.start_unix_ns):
            return joined, no_verdict(joined, TWO_JOBS), (), ()
        try:
            if self._epochs is not None:
                joined = self._epochs.logical(joined)
            with self._turn:
                verdict = self._judge.judge(joined)
                loads = self._layer_loads(joined)
                violations = group_violations(joined)
        except Exception as error:
            # Also a per-message boundary: without a verdict the step's rows are still worth keeping.
            logger.exception("no verdict for run %s, step %d", joined.run_id, joined.step)
            reason = f"The verdict stage failed with {type(error).__name__}; see the collector's log."
            return joined, no_verdict(joined, reason), (), ()
        return joined, verdict, loads, violations

    def _closed(self, joined: JoinedStep) -> None:
        self._remember(joined.rank_steps[0])
        joined, verdict, loads, violations = self._judged(joined)
        self._metrics.step_closed(joined)
        if joined.closed_by is ClosedBy.COMPLETE:
            waited_ns = self._clocks.monotonic_ns() - joined.last_arrival_monotonic_ns
            self._metrics.verdict_latency.observe(waited_ns / NS_PER_S)
        else:
            listed = ", ".join(map(str, joined.missing_ranks[:MAX_LISTED_RANKS]))
            more = len(joined.missing_ranks) - MAX_LISTED_RANKS
            detail = f"missing ranks: {listed}{f' and {more} more' if more > 0 else ''}"
            if not joined.missing_ranks:
                detail = "no rank is missing; the run's steps before had more microbatches"
            self._event(EventKind.PARTIAL, joined.closed_by.value, joined.run_id, joined.step, None, detail)
        result = StepResult(joined=joined, verdict=verdict, loads=loads, violations=violations)
        with self._turn:
            for sink in self._sinks:
                sink.take_step(result)

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

    def note(self, kind: EventKind, *, reason: str = "", detail: str = "") -> None:
        """File something about the collector as a whole; before `start`, or in the worker's thread."""
        self._event(kind, reason, detail=detail)

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

    def _remember(self, rank_step: RankStep) -> None:
        run_id = rank_step.run_id
        if run_id in self._runs:
            return
        if rank_step.sent_run_id:
            self._metrics.reused_run_ids.add()
            detail = (
                f"run id {rank_step.sent_run_id} is used again (rank {rank_step.rank} executed step "
                f"{rank_step.step} again): stored as {run_id}; give each run an id of its own"
            )
            logger.warning("%s", detail)
            self._event(EventKind.RUN_ID_REUSED, AGAIN_REASON, run_id, rank_step.step, rank_step.rank, detail)
            begun_ns = self._joiner.begun_unix_ns(rank_step.sent_run_id, rank_step.start_unix_ns)
            if self._reuse.saw(rank_step.sent_run_id, begun_ns):
                detail = (
                    f"two jobs seem to send under run id {rank_step.sent_run_id} at the same time, or one "
                    "that is started again within a minute: steps cannot be told apart, and nobody is named "
                    "until a minute has passed without it; give each an id of its own"
                )
                logger.warning("%s", detail)
                self._event(
                    EventKind.RUN_ID_REUSED, TWO_JOBS_REASON, run_id, rank_step.step, rank_step.rank, detail
                )
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

    def _flush(self, sink: Writer) -> bool:
        return flush_with_retry(
            sink, policy=self._retry, on_error=self._sink_failed, wait=self.wait_between_attempts
        )

    def _sink_failed(self, sink: Writer, error: SinkError) -> None:
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
