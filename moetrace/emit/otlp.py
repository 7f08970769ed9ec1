"""Sends records as OTLP `moe.step` spans through opentelemetry-sdk's exporter, from a thread of its own.

The queue is bounded and drops its oldest record when full. A batch that the collector does not take
is kept and tried again with jittered backoff, so a restart of the collector costs nothing; the model
never waits for any of it. A placement rides in front of the steps that ran under it, and is kept until the
collector has taken it, however many steps are dropped meanwhile.

With a spool a batch goes to disk instead of being dropped, and so does all that comes behind it, until the
disk is empty again: the collector gets everything in order once it is back.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.exporter import LastAnswer, make_exporter, make_session
from moetrace.emit.exporter_logs import exporter_silenced
from moetrace.emit.spool import Sent, Spool
from moetrace.emit.wire import AttributeValue, placement_attributes, span_attributes
from moetrace.guard import Guard
from moetrace.record.placement import PlacementRecord
from moetrace.record.types import StepRecord
from moetrace.self_metrics import SelfMetrics
from moetrace_schemas import SCHEMA_VERSION, spans
from moetrace_schemas.enums import DropReason
from moetrace_schemas.identity import placement_span_id, span_id, trace_id
from moetrace_schemas.wording import count

logger = logging.getLogger("moetrace")
BATCH = 32
"""Records per request."""
ATTEMPTS = 8
"""Tries of one batch before it is dropped: a batch that the collector refuses must not block the rest."""
ATTEMPTS_BEFORE_SPOOL = 2
"""Tries of one batch where it can go to disk instead: there it is safe, and the queue is not held up."""
LINGER_S = 0.25
"""How long a record may wait for others to share its request; the verdict is due within a second."""
PLACEMENTS = 64
"""Placements that wait for a collector; the oldest gives way."""
REFUSALS = 3
"""Times that a request fails with a placement and passes without it, until that placement is given up."""
SCOPE = InstrumentationScope("moetrace", schema_url=None, version=str(SCHEMA_VERSION))
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0


class Identity(Protocol):
    """What a span says about its sender; read at each send, since adapters may refine it."""

    config: Config
    context: RankContext
    guard: Guard

    @property
    def model_name(self) -> str:
        """Model name."""
        ...


class OtlpEmitter:
    """Bounded queue in front of an OTLP span exporter. Every record is exported or dropped, counted once."""

    name = "otlp"

    def __init__(
        self,
        identity: Callable[[], Identity],
        metrics: SelfMetrics,
        config: Config,
        exporter: SpanExporter | None = None,
        spool: Spool | None = None,
    ) -> None:
        self._spool = spool
        self._spool_backoff = FIRST_BACKOFF_S
        self._spool_retry_at = 0.0
        self._with_placements = False
        """Whether the last request from disk carried placements; every other one does."""
        self._identity = identity
        self._metrics = metrics
        self._config = config
        self._answers = LastAnswer()
        self._exporter = exporter or make_exporter(config, make_session(config, self._answers))
        self._queue: deque[StepRecord] = deque()
        self._placements: deque[PlacementRecord] = deque(maxlen=PLACEMENTS)
        self._refusals = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._full = threading.Event()
        self._enough = min(BATCH, max(1, config.queue_steps // 2))
        self._stop = threading.Event()
        self._deadline = float("inf")
        self._in_flight = 0
        self._at_once = BATCH
        """Records of a request: fewer for good, once one was refused for its size."""
        self._batch: list[StepRecord] = []
        """What `_in_flight` counts, where nothing of it was found to be unsendable."""
        self._warned = False
        self._incomplete = False
        self._warned_of_rejection = False
        self._thread = threading.Thread(target=self._run, name="moetrace-export", daemon=True)
        self._thread.start()

    def emit(self, record: StepRecord) -> None:
        """Queue one record; the oldest gives way when the queue is full."""
        with self._lock:
            if len(self._queue) >= self._config.queue_steps:
                self._queue.popleft()
                self._metrics.drop(DropReason.EXPORT_QUEUE_FULL)
            self._queue.append(record)
            self._metrics.queue_steps = len(self._queue)
            if len(self._queue) >= self._enough:
                self._full.set()
        self._wake.set()

    def emit_placement(self, record: PlacementRecord) -> None:
        """Keep one placement until it is delivered."""
        with self._lock:
            self._placements.append(record)
        self._wake.set()

    def close(self, deadline_monotonic_s: float) -> bool:
        """Send what is queued until the deadline; the rest goes to the spool, or is dropped and counted."""
        self._deadline = deadline_monotonic_s
        self._stop.set()
        self._full.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline_monotonic_s - time.monotonic()))
        with self._lock:
            left = len(self._queue) + self._in_flight
            rest = [*(self._batch if self._in_flight else ()), *self._queue]
            self._incomplete |= bool(self._placements)
            self._queue.clear()
            self._in_flight = 0
            self._metrics.queue_steps = 0
        if left and self._answers.advice():
            # The exporter tries again by itself, so that its first failure may not be told yet.
            self._warn_once()
        if left and self._spool is not None:
            self._keep(rest)
            left = 0
        if self._spool is not None and (waiting := len(self._spool)):
            logger.warning(
                "moetrace: %s in %s for this rank of this run to start again",
                count(waiting, "step waits", "steps wait"),
                self._config.spool_dir,
            )
        if left:
            self._metrics.drop(DropReason.SHUTDOWN_DEADLINE, left)
        if not self._thread.is_alive():
            self._exporter.shutdown()
        # Else a request hangs; it is left to its own timeout in the daemon thread.
        return left == 0 and not self._incomplete

    def _run(self) -> None:
        with exporter_silenced():
            while True:
                self._wake.wait(self._pause_s())
                self._wake.clear()
                # A request costs more than what it carries: give the next steps a moment to join it.
                self._full.wait(LINGER_S)
                self._full.clear()
                stopping = self._stop.is_set()
                while batch := self._take():
                    if self._spool is not None and len(self._spool):
                        self._keep_in_flight()
                    else:
                        self._send(batch)
                if self._spool is not None:
                    if stopping:
                        # One more try, whatever the pause: after this process maybe nobody comes for it.
                        self._spool_retry_at = 0.0
                    self._empty(self._spool)
                if self._placements:
                    self._send([])
                self._metrics.background_ns["export"] = time.thread_time_ns()
                if stopping:
                    return

    def _take(self) -> list[StepRecord]:
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(self._at_once, len(self._queue)))]
            self._in_flight = len(batch)
            self._batch = batch
            self._metrics.queue_steps = len(self._queue)
            return batch

    def _send(self, batch: list[StepRecord]) -> None:
        readable = self._encode(batch)
        backoff = FIRST_BACKOFF_S
        attempts = ATTEMPTS if self._spool is None else ATTEMPTS_BEFORE_SPOOL
        for attempt in range(attempts):
            # Every other attempt goes without placements: one that is refused must not block the steps.
            with_placements = attempt % 2 == 0 or not readable
            if self._export_both(readable, with_placements=with_placements):
                self._delivered(self._settle())
                return
            self._warn_once()
            if self._are_too_many(readable, with_placements=with_placements):
                if self._spool is None and len(readable) > 1:
                    self._put_back()
                    return
                break
            pause = backoff * random.uniform(0.5, 1.5)
            if attempt == attempts - 1 or time.monotonic() + pause > self._deadline:
                break
            if self._stop.is_set():
                time.sleep(pause)
            else:
                # Not the wake-up of `emit`: new records must not cut the pause short.
                self._stop.wait(pause)
            backoff = min(backoff * 2, LONGEST_BACKOFF_S)
        if self._spool is not None:
            self._spool_retry_at = time.monotonic() + self._spool_backoff * random.uniform(0.5, 1.5)
            self._keep_in_flight()
            return
        if lost := self._settle():
            stopping = self._stop.is_set()
            self._incomplete |= stopping
            self._metrics.drop(DropReason.SHUTDOWN_DEADLINE if stopping else DropReason.EXPORT_FAILED, lost)

    def _are_too_many(self, steps: list[ReadableSpan], *, with_placements: bool) -> bool:
        """Whether the steps of the last request made it larger than is taken: half as many from now on."""
        if not self._answers.is_too_large or (with_placements and self._placements):
            return False
        self._at_once = max(1, len(steps) // 2)
        return True

    def _put_back(self) -> None:
        """Let the batch in hand be taken again, unless `close` has counted it."""
        with self._lock:
            if self._in_flight:
                self._queue.extendleft(reversed(self._batch))
                self._in_flight = 0
                self._metrics.queue_steps = len(self._queue)

    def _keep_in_flight(self) -> None:
        """Put the batch in hand on disk, unless `close` has."""
        batch = self._batch
        if self._settle():
            self._keep(batch)

    def _keep(self, records: Sequence[StepRecord]) -> None:
        assert self._spool is not None
        identity = self._identity()
        self._spool.append([_sent(record, identity) for record in records])
        self._metrics.spooled_steps = len(self._spool)

    def _empty(self, spool: Spool) -> None:
        """Send from disk, oldest first, until it is empty or the collector does not take it."""
        while len(spool) and self._spool_retry_at <= time.monotonic() < self._deadline:
            found = spool.oldest(self._at_once)
            readable: list[ReadableSpan] = []
            bad: list[Exception] = []
            for one in found:
                try:
                    readable.append(_step_span(one))
                except Exception as error:  # noqa: BLE001 - one bad record must not block those behind it
                    bad.append(error)
            self._with_placements = not self._with_placements
            if not self._export_both(readable, with_placements=self._with_placements):
                self._warn_once()
                if self._are_too_many(readable, with_placements=self._with_placements):
                    if len(found) == 1:
                        # Nothing behind it would ever be sent.
                        spool.sent(1)
                        self._metrics.drop(DropReason.EXPORT_FAILED)
                    continue
                self._spool_backoff = min(self._spool_backoff * 2, LONGEST_BACKOFF_S)
                self._spool_retry_at = time.monotonic() + self._spool_backoff * random.uniform(0.5, 1.5)
                return
            spool.sent(len(found))
            for fault in bad:
                # Only now: while nothing is taken the same ones are read again and again.
                self._metrics.drop(DropReason.INTERNAL_ERROR)
                self._identity().guard.caught("encode", fault)
            self._delivered(len(readable))
            self._metrics.spooled_steps = len(spool)
            self._spool_backoff = FIRST_BACKOFF_S
            # Behind what is on disk, as long as there is anything.
            while len(spool) and self._take():
                self._keep_in_flight()
        self._metrics.spooled_steps = len(spool)

    def _pause_s(self) -> float | None:
        """Longest sleep without a new record; None for any."""
        pause = LONGEST_BACKOFF_S if self._placements else None
        if self._spool is not None and len(self._spool):
            left = max(0.0, self._spool_retry_at - time.monotonic())
            pause = left if pause is None else min(left, pause)
        return pause

    def _delivered(self, num_steps: int) -> None:
        """Count steps of the last request: it was taken, but maybe not all that is in it."""
        num_rejected = self._answers.take_rejected()
        if num_rejected and not self._warned_of_rejection:
            self._warned_of_rejection = True
            logger.warning(
                "moetrace: the collector at %s takes requests and rejects what is in them (%s); the "
                "model is not affected, drops are counted",
                self._config.endpoint,
                self._answers.rejection or "it does not say why",
            )
        # Where placements went along, what was rejected may be one of them: that is no step, but a loss too.
        self._incomplete |= num_rejected > 0
        lost = min(num_rejected, num_steps)
        if lost:
            self._metrics.drop(DropReason.REJECTED, lost)
        self._metrics.exported[self.name] += num_steps - lost

    def _settle(self) -> int:
        """How many records of the batch are this thread's to count: none where `close` has counted them."""
        with self._lock:
            in_flight, self._in_flight = self._in_flight, 0
            return in_flight

    def _encode(self, batch: list[StepRecord]) -> list[ReadableSpan]:
        """Spans of a batch, without the records that the wire cannot hold."""
        identity = self._identity()
        readable = []
        for record in batch:
            try:
                readable.append(to_span(record, identity))
            except Exception as error:  # noqa: BLE001 - one bad record must not end the thread
                with self._lock:
                    counted = self._in_flight > 0
                    self._in_flight -= counted
                    self._batch = [one for one in self._batch if one is not record]
                if counted:
                    self._metrics.drop(DropReason.INTERNAL_ERROR)
                identity.guard.caught("encode", error)
        return readable

    def _export_both(self, steps: list[ReadableSpan], *, with_placements: bool) -> bool:
        """Whether the steps are delivered; placements that went with them are then forgotten."""
        waiting = list(self._placements)
        ahead = self._encode_placements(waiting) if with_placements else []
        if not steps and not ahead:
            return True
        if not self._export([*ahead, *steps]):
            return False
        if waiting and not with_placements:
            self._refusals += 1
            if self._refusals < REFUSALS:
                return True
            logger.warning(
                "moetrace: the collector takes steps and refuses placement %d; given up", waiting[0].version
            )
            waiting = waiting[:1]
        self._refusals = 0
        with self._lock:
            for record in waiting:
                if record in self._placements:
                    self._placements.remove(record)
        return True

    def _encode_placements(self, records: list[PlacementRecord]) -> list[ReadableSpan]:
        identity = self._identity()
        readable = []
        for record in records:
            try:
                readable.append(to_placement_span(record, identity))
            except Exception as error:  # noqa: BLE001 - one bad record must not end the thread
                identity.guard.caught("encode", error)
        return readable

    def _export(self, batch: Sequence[ReadableSpan]) -> bool:
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            # The exporter does not follow a redirection, and calls it a success.
            return taken and not self._answers.is_elsewhere
        except Exception:  # noqa: BLE001 - exporters raise what their transport raises; all of it means "not sent"
            return False

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "moetrace: the collector at %s does not take data%s; %sthe model is not affected, "
                "drops are counted",
                self._config.endpoint,
                self._answers.advice(),
                "" if self._stop.is_set() else "trying again in the background, ",
            )


def to_span(record: StepRecord, identity: Identity) -> ReadableSpan:
    """One record as a finished span with the derived trace and span ids."""
    return _step_span(_sent(record, identity))


def _sent(record: StepRecord, identity: Identity) -> Sent:
    return Sent(
        record=record,
        context=identity.context,
        sample_period=identity.config.sample_period,
        model_name=identity.model_name,
        model_version=identity.config.model_version,
    )


def _step_span(sent: Sent) -> ReadableSpan:
    record, context = sent.record, sent.context
    trace = trace_id(context.run_id, record.step)
    return _span(
        spans.MOE_STEP,
        context,
        trace=trace,
        span=span_id(trace, context.rank, record.microbatch),
        attributes=span_attributes(
            record,
            context,
            sample_period=sent.sample_period,
            model_name=sent.model_name,
            model_version=sent.model_version,
        ),
        start_ns=record.start_unix_ns,
        duration_ns=record.duration_ns,
    )


def to_placement_span(record: PlacementRecord, identity: Identity) -> ReadableSpan:
    """One placement as a span in the trace of the step that it begins with."""
    context = identity.context
    trace = trace_id(context.run_id, record.step)
    return _span(
        spans.MOE_PLACEMENT,
        context,
        trace=trace,
        span=placement_span_id(trace, record.version, context.rank),
        attributes=placement_attributes(record, context),
        start_ns=record.start_unix_ns,
        duration_ns=0,
    )


class _Resource(Resource):
    """One whose hash is known: the exporter groups spans by it, and each look would write it out as JSON."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        super().__init__(attributes)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@functools.lru_cache(maxsize=8)
def _resource(host_name: str, run_id: str) -> Resource:
    """What all spans of a process have in common."""
    return _Resource(
        {"service.name": "moetrace", "host.name": host_name, "moetrace.run.id": run_id},
    )


def _span(
    name: str,
    context: RankContext,
    *,
    trace: int,
    span: int,
    attributes: dict[str, AttributeValue],
    start_ns: int,
    duration_ns: int,
) -> ReadableSpan:
    return ReadableSpan(
        name=name,
        context=SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(1)),
        resource=_resource(context.host_name, context.run_id),
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        instrumentation_scope=SCOPE,
        start_time=start_ns,
        end_time=start_ns + duration_ns,
    )
