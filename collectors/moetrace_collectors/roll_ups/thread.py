"""The thread that rolls up beside a collector or `moetrace join`; a store that is away only delays it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from moetrace_collectors.errors import UsageError
from moetrace_collectors.roll_ups.minutes import MINUTE_S, Minute
from moetrace_collectors.roll_ups.roll_up import RollUp
from moetrace_collectors.store import first_line

INTERVAL_S = 5.0
GRACE_S = 1.0
NS_PER_S = 1_000_000_000

logger = logging.getLogger(__name__)


class RollUpThread:
    """Turn after turn until stopped, and a last one over everything."""

    def __init__(
        self,
        roll_up: RollUp,
        *,
        on_failed: Callable[[], None] = lambda: None,
        interval_s: float = INTERVAL_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what rolls up, and who is told of a turn that failed."""
        from clickhouse_connect.driver.exceptions import ClickHouseError

        self._error: type[Exception] = ClickHouseError
        self._roll_up = roll_up
        self._on_failed = on_failed
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._stop = threading.Event()
        self._deadline_s = 0.0
        self._lock = threading.Lock()
        self._touched: set[Minute] = set()
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="moetrace-roll-ups", daemon=True)

    def start(self) -> None:
        """Run."""
        self._thread.start()

    def touch(self, steps: Iterable[tuple[str, int]]) -> None:
        """Something of steps, as (run id, start in unix ns), was written outside the usual; any thread."""
        with self._lock:
            self._touched |= {(run, start // NS_PER_S // MINUTE_S * MINUTE_S) for run, start in steps}

    def take_touched(self) -> frozenset[Minute]:
        """What was touched and not rolled up since, now left to the caller."""
        with self._lock:
            touched, self._touched = frozenset(self._touched), set()
        return touched

    def stop(self, *, timeout_s: float) -> None:
        """Roll up what there is, or as much as the time allows; the rest is done by the next start."""
        self._deadline_s = self._clock_s() + timeout_s
        self._stop.set()
        if self._thread.is_alive():
            # A server that does not answer must not hold up the stop; closing an embedded store waits for
            # the statement that runs.
            self._thread.join(timeout=timeout_s + GRACE_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._turn(everything=False, go_on=lambda: not self._stop.is_set())
        if self._clock_s() < self._deadline_s:
            self._turn(everything=True, go_on=lambda: self._clock_s() < self._deadline_s)

    def _turn(self, *, everything: bool, go_on: Callable[[], bool]) -> None:
        touched = self.take_touched()
        try:
            self._roll_up.turn(touched=touched, everything=everything, go_on=go_on)
        except (self._error, OSError, UsageError) as error:
            self._failed(touched)
            if not self._has_warned:
                logger.warning("roll-ups by minute wait: %s", first_line(error))
            self._has_warned = True
        except Exception:
            # The thread's boundary: a fault of ours in one turn must not end them all.
            logger.exception("minutes could not be rolled up")
            self._failed(touched)
        else:
            self._has_warned = False

    def _failed(self, touched: frozenset[Minute]) -> None:
        with self._lock:
            self._touched |= touched
        self._on_failed()
