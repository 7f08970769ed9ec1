"""Persistent hot spots: a state machine per (layer, signal) over windows of time. Pure, reads no clock.

::

            ratio >= threshold            N windows in a row
    calm  ---------------------> rising ---------------------> hot   (fires once)
      ^                            |                            |
      |    ratio < threshold       |                            | ratio < clear_below
      +----------------------------+                            v
      |            cooldown has passed since it fired
      +---------------------------------------------------- cooling

Between `clear_below` and `threshold` (the hysteresis band) a hot spot stays hot and a calm one stays calm. A
window without data, or a gap between windows, is no evidence: it breaks a row of hot windows and clears
nothing. Windows above the threshold count during the cooldown, so one that came back fires as soon as it may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from moetrace_collectors.errors import UsageError
from moetrace_schemas.enums import ForwardMode


class Signal(StrEnum):
    """What is compared over ranks."""

    COMPUTE = "compute"
    """Rows that the ranks' experts work on."""
    COMMUNICATION = "communication"
    """Rows that ranks receive from other ranks."""


class HotSpotState(StrEnum):
    """Where the machine stands after a window."""

    CALM = "calm"
    RISING = "rising"
    HOT = "hot"
    COOLING = "cooling"


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpotSettings:
    """When a hot spot is one; separate for each forward mode and signal."""

    threshold: float = 1.8
    """max / mean from which a window counts as hot."""
    clear_below: float = 1.5
    """max / mean below which a hot spot is over; between the two nothing changes."""
    windows: int = 3
    """Hot windows in a row until it fires; at least 2, so that a single peak never does."""
    window_s: float = 60.0
    """Length of a window, seconds."""
    cooldown_s: float = 600.0
    """After it fired, this long it does not fire again, seconds."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: names the field, its value and what is expected.
        """
        for name in ("threshold", "clear_below", "window_s", "cooldown_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise UsageError(f"{name} = {value!r}: a finite number expected")
        if isinstance(self.windows, bool) or not isinstance(self.windows, int) or self.windows < 2:
            raise UsageError(f"windows = {self.windows!r}: a whole number of 2 or more expected")
        if self.threshold <= 1.0:
            raise UsageError(f"threshold = {self.threshold:g}: above 1 expected (1 is perfectly even)")
        if not 1.0 <= self.clear_below < self.threshold:
            raise UsageError(
                f"clear_below = {self.clear_below:g}: from 1 to below threshold = {self.threshold:g} expected"
            )
        if self.window_s <= 0.0:
            raise UsageError(f"window_s = {self.window_s:g}: above 0 expected")
        if self.cooldown_s < 0.0:
            raise UsageError(f"cooldown_s = {self.cooldown_s:g}: 0 or more expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpotPlace:
    """What a machine watches."""

    layer: int
    forward_mode: ForwardMode | None
    signal: Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpot:
    """The machine after some windows; `observe` returns the next one."""

    place: HotSpotPlace
    settings: HotSpotSettings
    state: HotSpotState = HotSpotState.CALM
    in_a_row: int = 0
    """Hot windows in a row up to now."""
    window: int = -1
    """Number of the last window seen; window w covers [w, w + 1) x window_s seconds."""
    ratio: float = 0.0
    """max / mean in the last window that had data."""
    peak: float = 0.0
    """Largest max / mean since the row of hot windows began."""
    hottest: int = -1
    """Rank with the most in the last window that had data."""
    fired_window: int | None = None
    """Window after which it last fired."""
    fired_now: bool = False
    """Whether the last window made it fire."""

    def observe(self, *, window: int, ratio: float | None, hottest: int = -1) -> HotSpot:
        """The machine after one more window.

        Args:
            window: its number; larger than the last one.
            ratio: max / mean in it, None where nothing was counted.
            hottest: rank with the most.

        Raises:
            ValueError: windows out of order, or a ratio that is none.
        """
        if window <= self.window:
            raise ValueError(f"window {window} after window {self.window}: ascending windows expected")
        if ratio is None:
            rested = HotSpotState.CALM if self.state is HotSpotState.RISING else self.state
            unseen = replace(self, state=rested, window=window, in_a_row=0, fired_now=False)
            return unseen._cooled(window)
        if not math.isfinite(ratio) or ratio < 0.0:
            raise ValueError(f"ratio {ratio}: a finite number of 0 or more expected")
        settings = self.settings
        follows = window == self.window + 1
        is_hot = ratio >= settings.threshold
        in_a_row = (self.in_a_row if follows else 0) + 1 if is_hot else 0
        seen = replace(
            self,
            window=window,
            ratio=ratio,
            hottest=hottest,
            in_a_row=in_a_row,
            peak=max(ratio, self.peak if follows else 0.0) if in_a_row else self.peak,
            fired_now=False,
        )
        if self.state is HotSpotState.HOT:
            # Hysteresis: nothing but a ratio below clear_below ends it, and while it lasts it has fired.
            if ratio >= settings.clear_below:
                return seen
            return replace(seen, state=HotSpotState.COOLING)._cooled(window)
        cooled = seen._cooled(window)
        if in_a_row >= settings.windows and not self._in_cooldown(window):
            return replace(cooled, state=HotSpotState.HOT, fired_window=window, fired_now=True)
        if cooled.state is HotSpotState.COOLING:
            return cooled
        return replace(cooled, state=HotSpotState.RISING if in_a_row else HotSpotState.CALM)

    def _in_cooldown(self, window: int) -> bool:
        if self.fired_window is None:
            return False
        return (window - self.fired_window) * self.settings.window_s < self.settings.cooldown_s

    def _cooled(self, window: int) -> HotSpot:
        if self.state is HotSpotState.COOLING and not self._in_cooldown(window):
            return replace(self, state=HotSpotState.CALM)
        return self

    def sentence(self) -> str:
        """The state in one sentence, for people."""
        mode = f" in {self.place.forward_mode}" if self.place.forward_mode else ""
        where = f"layer {self.place.layer}{mode}, {self.place.signal}"
        settings = self.settings
        if self.window < 0:
            return f"{where}: no window seen yet."
        rank = f" on rank {self.hottest}" if self.hottest >= 0 else ""
        now = f"max/mean {self.ratio:.2f}{rank}"
        if self.state is HotSpotState.HOT:
            return (
                f"{where}: hot, {now}; {settings.windows} windows of {settings.window_s:g} s in a row were "
                f"at or above {settings.threshold:g}, and it stays hot until one is below "
                f"{settings.clear_below:g}."
            )
        if self.state is HotSpotState.COOLING:
            assert self.fired_window is not None  # only a spot that fired cools
            left = settings.cooldown_s - (self.window - self.fired_window) * settings.window_s
            return f"{where}: over, {now}; it does not fire again for {max(left, 0.0):g} s (cooldown)."
        if self.state is HotSpotState.RISING:
            return (
                f"{where}: rising, {now}; {self.in_a_row} of {settings.windows} windows of "
                f"{settings.window_s:g} s in a row at or above {settings.threshold:g}."
            )
        return f"{where}: calm, {now}, below {settings.threshold:g}."
