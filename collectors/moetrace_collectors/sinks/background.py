"""A sink whose writes run in a thread of their own: while one batch is stored, the next is joined.

::

    worker: take_step ... -> buffer --flush--> batch (at most one) --> thread: the sink's own flush, retried
                              ^                    |
                              `-- full, and the batch before is still being written: the worker waits

Two batches at most are in memory, so a store that is slow or away still fills the intake and then the log,
as if the worker wrote itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.joiner import size_bytes
from moetrace_collectors.model import RankStep
from moetrace_collectors.sinks.base import StepResult, Writer

MAX_EVENTS = 10_000
"""Events that make a batch, however small they are: each becomes a row."""
EVENT_BYTES = 300
"""About what an event takes in memory without its text."""
CHECK_S = 1.0
"""Between looks at whether the thread still lives, while the worker waits for it."""


class BackgroundSink:
    """Buffers for one thread, writes in another; the sink within is touched by that other one only."""

    def __init__(
        self,
        sink: Writer,
        *,
        batch_bytes: int,
        batch_interval_ns: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """Take a sink; nothing is written before `start`.

        Args:
            sink: where batches go.
            batch_bytes: size of the buffered rank steps that makes a batch.
            batch_interval_ns: age of the oldest buffered record that makes a batch.
            clock_ns: monotonic clock.
        """
        self.name = sink.name
        self._sink = sink
        self._batch_bytes = batch_bytes
        self._batch_interval_ns = batch_interval_ns
        self._clock_ns = clock_ns
        self._buffer: list[Callable[[], None]] = []
        self._buffered_steps = self._buffered_bytes = self._buffered_events = 0
        self._oldest_ns: int | None = None
        self._condition = threading.Condition()
        self._batch: list[Callable[[], None]] = []
        self._batch_steps = 0
        self._num_taken = self._num_handed_over = self._num_written = 0
        self._gave_up = self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[Writer], bool]) -> None:
        """Begin to write.

        Args:
            write: flushes the sink, trying again as long as it makes sense; False where it gave up.
        """
        self._thread = threading.Thread(
            target=self._run, args=(write,), name=f"moetrace-{self.name}", daemon=True
        )
        self._thread.start()

    @property
    def num_waiting_steps(self) -> int:
        """See Sink."""
        return self._buffered_steps + self._batch_steps

    @property
    def num_taken(self) -> int:
        """See Sink."""
        return self._num_taken

    @property
    def num_written(self) -> int:
        """See Sink."""
        return self._num_written

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def take_step(self, result: StepResult) -> None:
        """See Sink."""
        size = sum(size_bytes(rank_step) for rank_step in result.joined.rank_steps)
        self._take(partial(self._sink.take_step, result), size=size)
        self._buffered_steps += 1

    def take_unjoined(self, rank_step: RankStep) -> None:
        """See Sink."""
        self._take(partial(self._sink.take_unjoined, rank_step), size=size_bytes(rank_step))

    def take_late(self, rank_step: RankStep) -> None:
        """See Sink."""
        self._take(partial(self._sink.take_late, rank_step), size=size_bytes(rank_step))

    def take_event(self, event: CollectorEvent) -> None:
        """See Sink."""
        self._take(partial(self._sink.take_event, event), size=EVENT_BYTES + len(event.detail))
        self._buffered_events += 1

    def is_due(self, now_ns: int) -> bool:
        """See Sink: what is only old waits for the thread, what is full does not."""
        if self._buffered_bytes >= self._batch_bytes or self._buffered_events >= MAX_EVENTS:
            return True
        is_old = self._oldest_ns is not None and now_ns - self._oldest_ns >= self._batch_interval_ns
        return is_old and not self._is_writing

    def flush(self) -> None:
        """See Sink: returns once the thread has the batch; it waits for the one before.

        Raises:
            RuntimeError: the thread has ended by a fault of ours.
        """
        with self._condition:
            while self._is_writing and self._is_working():
                self._condition.wait(CHECK_S)
            if not self._buffer or self._gave_up:
                return
            self._batch, self._buffer = self._buffer, []
            self._batch_steps, self._buffered_steps = self._buffered_steps, 0
            self._buffered_bytes, self._buffered_events, self._oldest_ns = 0, 0, None
            self._num_handed_over = self._num_taken
            self._condition.notify_all()

    def finish(self) -> bool:
        """Write everything and end the thread; False where it gave up."""
        self.flush()
        self.end()
        return self._num_written == self._num_taken

    def end(self) -> None:
        """End the thread once it has written or given up the batch it has."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """See Sink; after `end`."""
        for give in self._buffer:
            give()
        self._buffer = []
        self._sink.abandon()

    @property
    def _is_writing(self) -> bool:
        return self._num_written < self._num_handed_over

    def _is_working(self) -> bool:
        if self._gave_up:
            return False
        if not self.is_alive():
            raise RuntimeError(f"the thread that writes to {self.name} has ended")
        return True

    def _take(self, give: Callable[[], None], *, size: int) -> None:
        self._buffer.append(give)
        self._num_taken += 1
        self._buffered_bytes += size
        if self._oldest_ns is None:
            self._oldest_ns = self._clock_ns()

    def _run(self, write: Callable[[Writer], bool]) -> None:
        while True:
            with self._condition:
                while not self._batch and not self._closing:
                    self._condition.wait()
                batch, self._batch = self._batch[::-1], []
                until = self._num_handed_over
            if not batch:
                return
            while batch:
                # Not kept here: once the sink has made rows of a step, its memory can go.
                batch.pop()()
            is_written = write(self._sink)
            with self._condition:
                self._gave_up = not is_written
                if is_written:
                    self._num_written, self._batch_steps = until, 0
                self._condition.notify_all()
            if not is_written:
                return
