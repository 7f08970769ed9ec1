"""A sink whose writes run in threads of their own: while batches are stored, the next is joined.

::

    worker: take_step ... -> buffer --flush--> batch --> a thread that is free: its own sink's flush, retried
                              ^                  |
                              `-- full, and no thread is free: the worker waits

Each thread writes one batch at a time, so the batches in memory are bounded, and a store that is slow or
away still fills the intake and then the log, as if the worker wrote itself. Rows of rank steps, by far the
most, are written in any order; verdicts and events wait until all batches before have theirs, so that who
finds a verdict finds all that came before it::

    thread 0   | rows of batch 1 ............ | verdicts 1 |  rows of batch 3 ....
    thread 1        | rows of batch 2 .... |    waits      | verdicts 2 |

What counts as written is all before the first batch that is not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.model import RankStep
from moetrace_collectors.sinks.base import BatchWriter, StepResult, Writer

MAX_EVENTS = 10_000
"""Events that make a batch, however small they are: each becomes a row."""
EVENT_BYTES = 300
"""About what an event takes in memory without its text."""
CHECK_S = 1.0
"""Between looks at whether the thread still lives, while the worker waits for it."""


_Give = Callable[[BatchWriter], None]
"""Gives one record to a sink."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What one thread writes at once."""

    rows: list[_Give]
    findings: list[_Give]
    """Written when all batches before this one are."""
    num_steps: int
    until: int
    """How many records had been taken when it was handed over."""
    is_written: bool = False


class BackgroundSink:
    """Buffers for one thread, writes in others; each sink within is touched by its own thread only."""

    def __init__(
        self,
        sinks: Sequence[BatchWriter],
        *,
        batch_bytes: int,
        batch_interval_ns: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """Take sinks of one destination; nothing is written before `start`.

        Args:
            sinks: where batches go, to whichever is free; one at least.
            batch_bytes: size of the buffered rank steps that makes a batch.
            batch_interval_ns: age of the oldest buffered record that makes a batch.
            clock_ns: monotonic clock.
        """
        self.name = sinks[0].name
        self._sinks = tuple(sinks)
        self._batch_bytes = batch_bytes
        self._batch_interval_ns = batch_interval_ns
        self._clock_ns = clock_ns
        self._rows: list[_Give] = []
        self._findings: list[_Give] = []
        self._buffered_steps = self._buffered_bytes = self._buffered_events = 0
        self._oldest_ns: int | None = None
        self._condition = threading.Condition()
        self._waiting: deque[_Batch] = deque()
        """Handed over, and not yet begun by a thread that is free."""
        self._handed_over: deque[_Batch] = deque()
        """In their order; the first is not written."""
        self._num_taken = self._num_written = 0
        self._gave_up = self._closing = self._has_failed = False
        self._threads: tuple[threading.Thread, ...] = ()

    def start(self, write: Callable[[Writer], bool]) -> None:
        """Begin to write.

        Args:
            write: flushes a sink, trying again as long as it makes sense; False where it gave up.
        """
        self._threads = tuple(
            threading.Thread(
                target=self._run, args=(sink, write), name=f"moetrace-{self.name}-{number}", daemon=True
            )
            for number, sink in enumerate(self._sinks)
        )
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting_steps(self) -> int:
        """See Sink."""
        return self._buffered_steps + sum(batch.num_steps for batch in tuple(self._handed_over))

    @property
    def num_taken(self) -> int:
        """See Sink."""
        return self._num_taken

    @property
    def num_written(self) -> int:
        """See Sink."""
        return self._num_written

    def is_alive(self) -> bool:
        """Whether all threads run."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def take_step(self, result: StepResult) -> None:
        """See Sink."""
        rank_steps = result.joined.rank_steps
        self._rows.append(lambda sink: _take_all(sink, rank_steps))
        self._findings.append(lambda sink: sink.take_verdict(result))
        self._taken(sum(map(size_bytes, rank_steps)))
        self._buffered_steps += 1

    def take_unjoined(self, rank_step: RankStep) -> None:
        """See Sink."""
        self._rows.append(lambda sink: sink.take_unjoined(rank_step))
        self._taken(size_bytes(rank_step))

    def take_late(self, rank_step: RankStep) -> None:
        """See Sink."""
        self._rows.append(lambda sink: sink.take_late(rank_step))
        self._taken(size_bytes(rank_step))

    def take_event(self, event: CollectorEvent) -> None:
        """See Sink."""
        self._findings.append(lambda sink: sink.take_event(event))
        self._taken(EVENT_BYTES + len(event.detail))
        self._buffered_events += 1

    def is_due(self, now_ns: int) -> bool:
        """See Sink: what is only old waits until nothing is written, what is full does not."""
        if self._buffered_bytes >= self._batch_bytes or self._buffered_events >= MAX_EVENTS:
            return True
        is_old = self._oldest_ns is not None and now_ns - self._oldest_ns >= self._batch_interval_ns
        return is_old and not self._handed_over

    def flush(self) -> None:
        """See Sink: returns once a thread has the batch; it waits for one that is free.

        Raises:
            RuntimeError: a thread has ended by a fault of ours.
        """
        with self._condition:
            while len(self._handed_over) >= len(self._sinks) and self._is_working():
                self._condition.wait(CHECK_S)
            if self._oldest_ns is None or self._gave_up:
                return
            batch = _Batch(
                rows=self._rows,
                findings=self._findings,
                num_steps=self._buffered_steps,
                until=self._num_taken,
            )
            self._rows, self._findings, self._oldest_ns = [], [], None
            self._buffered_steps = self._buffered_bytes = self._buffered_events = 0
            self._handed_over.append(batch)
            self._waiting.append(batch)
            self._condition.notify_all()

    def finish(self) -> bool:
        """Write everything and end the threads; False where one gave up."""
        self.flush()
        self.end()
        return self._num_written == self._num_taken

    def end(self) -> None:
        """End the threads once they have written or given up the batches they have."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """See Sink; after `end`."""
        first = self._sinks[0]
        for batch in self._waiting:
            _give_all(first, batch.rows)
            _give_all(first, batch.findings)
        _give_all(first, self._rows)
        _give_all(first, self._findings)
        self._waiting.clear()
        for sink in self._sinks:
            sink.abandon()

    def _is_working(self) -> bool:
        if self._has_failed or not (self._gave_up or self.is_alive()):
            raise RuntimeError(f"a thread that writes to {self.name} has ended")
        return not self._gave_up

    def _taken(self, size: int) -> None:
        self._num_taken += 1
        self._buffered_bytes += size
        if self._oldest_ns is None:
            self._oldest_ns = self._clock_ns()

    def _run(self, sink: BatchWriter, write: Callable[[Writer], bool]) -> None:
        try:
            self._write_batches(sink, write)
        except BaseException:
            # Not the same as a thread that has ended because there is nothing more to write.
            with self._condition:
                self._has_failed = True
                self._condition.notify_all()
            raise

    def _write_batches(self, sink: BatchWriter, write: Callable[[Writer], bool]) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closing:
                    self._condition.wait()
                if not self._waiting or self._gave_up:
                    return
                batch = self._waiting.popleft()
            is_written = self._write(batch, sink, write)
            with self._condition:
                batch.is_written = is_written
                self._gave_up = self._gave_up or not is_written
                while self._handed_over and self._handed_over[0].is_written:
                    self._num_written = self._handed_over.popleft().until
                self._condition.notify_all()
            if not is_written:
                return

    def _write(self, batch: _Batch, sink: BatchWriter, write: Callable[[Writer], bool]) -> bool:
        has_rows = bool(batch.rows)
        _give_all(sink, batch.rows)
        is_written = write(sink) if has_rows else True
        with self._condition:
            while is_written and self._waits_for_earlier(batch):
                self._condition.wait(CHECK_S)
            # An earlier batch will not come: what is found in this one must not stand without it.
            is_written = is_written and self._handed_over[0] is batch
        # Also where nothing more is written: the sink then gives up all it has.
        has_findings = bool(batch.findings)
        _give_all(sink, batch.findings)
        return write(sink) if is_written and has_findings else is_written

    def _waits_for_earlier(self, batch: _Batch) -> bool:
        return self._handed_over[0] is not batch and not (self._gave_up or self._has_failed)


def _give_all(sink: BatchWriter, records: list[_Give]) -> None:
    """Give a sink all of them, in order; none is kept, so that its memory can go once it has become rows."""
    records.reverse()
    while records:
        records.pop()(sink)


def _take_all(sink: BatchWriter, rank_steps: Sequence[RankStep]) -> None:
    for rank_step in rank_steps:
        sink.take_joined(rank_step)
