"""One request from either receiver: decoded, queued, made durable. Runs in the receivers' threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from moetrace_collectors.decode import Decoded, decode
from moetrace_collectors.events import MAX_PAYLOAD_BYTES, Rejection
from moetrace_collectors.intake import Intake
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.journal import Journal
from moetrace_collectors.model import PlacementReport
from moetrace_collectors.phase_shapes import PhaseShapes
from moetrace_collectors.receivers.handler import Accepted, NotDurableError, OverloadedError, Wire
from moetrace_collectors.refusals import DiskRefusals
from moetrace_collectors.self_metrics import SelfMetrics
from moetrace_collectors.wal.log import Position, WalFullError, WalUnavailableError
from moetrace_schemas.enums import RejectReason

RETRY_AFTER_S = 1
UNAVAILABLE_RETRY_AFTER_S = 5

logger = logging.getLogger(__name__)


class RequestHandler:
    """Behind both receivers."""

    def __init__(
        self,
        *,
        intake: Intake,
        metrics: SelfMetrics,
        max_world_size: int,
        journal: Journal | None = None,
        turn: threading.Lock | None = None,
        disk: DiskRefusals | None = None,
    ) -> None:
        """Take what is behind it.

        Args:
            intake: takes what is decoded.
            metrics: the collector's own.
            max_world_size: as for `decode`.
            journal: makes it durable; None without a write-ahead log.
            turn: held while a request is decoded, shared with all that work on small arrays in threads of
                this process: numpy lets go of the interpreter in each operation on more than 500 numbers,
                and two threads that do so spend as long on handing it to and fro as on their work.
            disk: told whether the journal's disk takes what it gets; None without a write-ahead log.
        """
        self._intake = intake
        self._metrics = metrics
        self._max_world_size = max_world_size
        self._journal = journal
        self._disk = disk
        self._turn = turn or threading.Lock()
        self._shapes = PhaseShapes()

    def take(self, request: ExportTraceServiceRequest, wire: Wire | None = None) -> Accepted:
        """See TraceHandler."""
        decoded = self._decode(request)
        size = sum(size_bytes(step) for step in decoded.rank_steps)
        size += sum(len(rejection.payload) for rejection in decoded.rejected)
        size += sum(placement_bytes(report) for report in decoded.placements)
        log = None if self._journal is None else _appender(self._journal, request, wire)
        try:
            receipt = self._intake.offer(
                decoded.rank_steps,
                decoded.rejected,
                size_bytes=size,
                log=log,
                placements=decoded.placements,
            )
            if receipt is not None and receipt.position is not None and self._journal is not None:
                self._journal.commit(receipt.position)
                if self._disk is not None:
                    self._disk.took()
        except WalFullError as error:
            self._metrics.throttled.add()
            raise OverloadedError(f"{error}: the store is behind", retry_after_s=RETRY_AFTER_S) from error
        except WalUnavailableError as error:
            self._metrics.unavailable.add()
            if self._disk is not None:
                self._disk.refused(error)
            raise NotDurableError(str(error), retry_after_s=UNAVAILABLE_RETRY_AFTER_S) from error
        if receipt is None:
            self._metrics.throttled.add()
            raise OverloadedError("the collector's queue is full", retry_after_s=RETRY_AFTER_S)
        self._metrics.foreign_spans.add(decoded.num_foreign_spans)
        if not decoded.rejected:
            return Accepted(rejected_spans=0, message="")
        first = decoded.rejected[0]
        return Accepted(
            rejected_spans=len(decoded.rejected), message=f"first: {first.reason.value}: {first.detail}"
        )

    def refuse(self, reason: RejectReason, detail: str, payload: bytes) -> None:
        """See TraceHandler."""
        rejection = Rejection(reason=reason, detail=detail, payload=payload[:MAX_PAYLOAD_BYTES])
        self._intake.offer((), (rejection,), size_bytes=len(rejection.payload))

    def _decode(self, request: ExportTraceServiceRequest) -> Decoded:
        try:
            with self._turn:
                return decode(request, max_world_size=self._max_world_size, shapes=self._shapes)
        except Exception as error:
            # The per-message boundary: whatever a request holds, its sender gets an answer.
            logger.exception("a request could not be decoded")
            rejection = Rejection(
                reason=RejectReason.MALFORMED_REQUEST,
                detail=f"the decoder failed with {type(error).__name__}",
                payload=request.SerializeToString()[:MAX_PAYLOAD_BYTES],
            )
            return Decoded(rank_steps=(), rejected=(rejection,), num_foreign_spans=0)


def _appender(
    journal: Journal, request: ExportTraceServiceRequest, wire: Wire | None
) -> Callable[[int], Position]:
    # Made before the queue's lock is taken: serialising can take long.
    kept = wire if wire is not None else Wire(body=request.SerializeToString())
    return lambda arrived_ns: journal.append(kept, arrived_ns=arrived_ns)


def placement_bytes(report: PlacementReport) -> int:
    """Memory of a placement in the queue: a tuple's slot and a small integer per expert slot."""
    return 16 * len(report.mapping.layers) * report.mapping.num_slots
