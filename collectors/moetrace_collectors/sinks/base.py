"""What a sink takes, and how a failed write is tried again.

A sink buffers what it is given and writes when told to, in one thread. While a write is being retried
nothing new comes after what is buffered, the queue before the worker fills, and senders are told to come
back. That is the only back-pressure there is, and it needs no further queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moetrace_collectors.errors import SinkError
from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.model import JoinedStep, LayerLoad, RankStep, StepVerdict
from moetrace_collectors.receipts import GroupViolation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A joined step and what was found out about it."""

    joined: JoinedStep
    verdict: StepVerdict
    loads: tuple[LayerLoad, ...]
    violations: tuple[GroupViolation, ...] = ()
    """Contradictions in the routing that show only over whole groups."""


class Writer(Protocol):
    """What writes to one destination when it is told to."""

    name: str
    """Label of moetrace_collector_sink_errors_total."""

    def take_step(self, result: StepResult) -> None:
        """A step has closed."""

    def take_unjoined(self, rank_step: RankStep) -> None:
        """A rank step that this collector does not join: the store does."""

    def take_late(self, rank_step: RankStep) -> None:
        """A rank step came after its step had closed; its rows are still wanted."""

    def take_event(self, event: CollectorEvent) -> None:
        """Something could not be joined or stored as it came."""

    def flush(self) -> None:
        """Write everything buffered; what was written before an error is not written again.

        Raises:
            SinkError: a write failed; what is left stays buffered, unless the error is final.
        """

    def abandon(self) -> None:
        """Give up what is buffered, and count it as lost."""


class BatchWriter(Writer, Protocol):
    """A writer that is given a step in two parts, so that the second goes in when others have theirs."""

    def take_joined(self, rank_step: RankStep) -> None:
        """A rank step of a step that has closed; what was found out about it comes later."""

    def take_verdict(self, result: StepResult) -> None:
        """What was found out about a step of which it was given the rank steps."""


class Sink(Writer, Protocol):
    """One destination, as the worker sees it."""

    @property
    def num_waiting_steps(self) -> int:
        """Joined steps taken and not yet written."""

    @property
    def num_taken(self) -> int:
        """Records that it has been given so far: steps, rank steps and events alike."""

    @property
    def num_written(self) -> int:
        """How many of those, in the order given, are written, finally refused, or need no writing."""

    def is_due(self, now_ns: int) -> bool:
        """Whether enough is buffered, or it has waited long enough, at this monotonic time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait between attempts."""

    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 10.0

    def delays(self) -> Iterator[float]:
        """Seconds before each next attempt, without end."""
        delay = self.first_s
        while True:
            yield delay
            delay = min(delay * self.factor, self.longest_s)


def flush_with_retry(
    sink: Writer,
    *,
    policy: RetryPolicy,
    on_error: Callable[[Writer, SinkError], None],
    wait: Callable[[float], bool],
) -> bool:
    """Flush until it works.

    Args:
        sink: what to flush.
        policy: delays between attempts.
        on_error: told of every failed attempt.
        wait: sleeps for so many seconds; False says to give up.

    Returns:
        Whether everything was written or finally refused; False where `wait` gave up first.
    """
    for delay in policy.delays():
        try:
            sink.flush()
        except SinkError as error:
            on_error(sink, error)
            if error.retryable and not wait(delay):
                return False
            continue
        return True
    raise AssertionError("delays() does not end")
