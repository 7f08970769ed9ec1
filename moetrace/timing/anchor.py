"""Unix time of device events: anchors that tie a device event to the host clock, renewed as they age.

An anchor is an event on a stream of its own, so that it completes at once: its unix time lies between
the host's looks before it was recorded and after it was seen done. Elapsed times between events are
32-bit floats of milliseconds, good to a microsecond for some ten seconds only; so a step is placed from
the latest anchor. Two anchors give the drift of the device's clock against the host's.

For drawing timelines, never for the verdict. Runs in the drain thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RENEW_AFTER_NS = 5_000_000_000
GIVE_UP_AFTER_NS = 2_000_000
"""A device that has not reached an event on an empty stream by then is full; the last anchor stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A device event whose unix time is known."""

    event: Any
    unix_ns: int
    error_ns: int
    """How far off `unix_ns` may be, either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where an event lies in unix time."""

    unix_ns: int
    error_ns: int


class Anchors:
    """The latest anchor of a run, and the drift between the last two."""

    def __init__(self, record: Callable[[], Any], unix_ns: Callable[[], int]) -> None:
        """`record` records a new event on a stream of its own."""
        self._record = record
        self._unix_ns = unix_ns
        self.latest: Anchor | None = None
        self.drift_ppm = 0.0
        """How much faster the device's clock runs than the host's, parts per million."""

    def renew(self) -> None:
        """Take an anchor where there is none, or the latest has aged. Waits GIVE_UP_AFTER_NS at most."""
        now = self._unix_ns()
        last = self.latest
        if last is not None and now - last.unix_ns < RENEW_AFTER_NS:
            return
        before = self._unix_ns()
        event = self._record()
        after = self._unix_ns()
        while not event.query():
            after = self._unix_ns()
            if after - before > GIVE_UP_AFTER_NS:
                return
        after = self._unix_ns()
        anchor = Anchor(event=event, unix_ns=(before + after) // 2, error_ns=(after - before + 1) // 2)
        if last is not None:
            host_ns = anchor.unix_ns - last.unix_ns
            device_ns = last.event.elapsed_time(event) * 1e6
            self.drift_ppm = (device_ns - host_ns) / host_ns * 1e6 if host_ns > 0 else 0.0
        self.latest = anchor

    def place(self, event: Any) -> Placed | None:
        """Unix time of a completed event; None where no anchor could be taken."""
        anchor = self.latest
        if anchor is None:
            return None
        device_ns = anchor.event.elapsed_time(event) * 1e6
        host_ns = device_ns / (1 + self.drift_ppm / 1e6)
        # One part in 2^24 is what a 32-bit float holds.
        rounding = abs(device_ns) / 2**24
        return Placed(unix_ns=anchor.unix_ns + round(host_ns), error_ns=anchor.error_ns + round(rounding))
