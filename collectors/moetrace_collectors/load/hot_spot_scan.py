"""Runs the hot-spot machines over a recorded series: windows of wall time, per layer and signal. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.load.hot_spot import HotSpot, HotSpotPlace, HotSpotSettings, HotSpotState, Signal
from moetrace_collectors.load.hot_spot_settings import HotSpotRules
from moetrace_collectors.load.series import LoadSeries
from moetrace_collectors.model import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpotFinding:
    """A machine that did not stay calm."""

    spot: HotSpot
    """At the end of the recording."""
    fired_at_s: tuple[float, ...]
    """End of the windows after which it fired, unix time (or seconds since the first step)."""


def scan_hot_spots(
    series: LoadSeries, rank_loads: FloatArray | None, rules: HotSpotRules
) -> tuple[HotSpotFinding, ...] | None:
    """Machines that fired, or are not calm at the end; None where times or ranks are unknown.

    The last window may be cut short by the end of the recording; it counts like any other.
    """
    if series.start_s is None or rank_loads is None:
        return None
    signals = {Signal.COMPUTE: rank_loads}
    if series.received_remote is not None:
        signals[Signal.COMMUNICATION] = series.received_remote
    found: list[HotSpotFinding] = []
    for signal, loads in signals.items():
        settings = rules.settings(series.forward_mode, signal)
        numbers, windows = window_sums(loads, series.start_s, settings.window_s)
        for at, layer in enumerate(series.layers.tolist()):
            place = HotSpotPlace(layer=int(layer), forward_mode=series.forward_mode, signal=signal)
            finding = _scan(place, settings, numbers, windows[:, at])
            if finding.fired_at_s or finding.spot.state is not HotSpotState.CALM:
                found.append(finding)
    return tuple(found)


def window_sums(loads: FloatArray, start_s: FloatArray, window_s: float) -> tuple[IntArray, FloatArray]:
    """[S, L, R] by start time -> numbers [W] of windows that hold a step, ascending, and sums [W, L, R]."""
    number = np.floor(start_s / window_s).astype(np.int64)
    order = np.argsort(number, kind="stable")
    numbers, first = np.unique(number[order], return_index=True)
    sums: FloatArray = np.add.reduceat(loads[order], first, axis=0)
    return numbers, sums


def _scan(
    place: HotSpotPlace, settings: HotSpotSettings, numbers: IntArray, windows: FloatArray
) -> HotSpotFinding:
    """`windows` [W, R]."""
    spot = HotSpot(place=place, settings=settings)
    fired = []
    for number, loads in zip(numbers.tolist(), windows, strict=True):
        mean = float(loads.mean())
        ratio = float(loads.max()) / mean if mean > 0.0 else None
        spot = spot.observe(window=number, ratio=ratio, hottest=int(loads.argmax()))
        if spot.fired_now:
            fired.append((number + 1) * settings.window_s)
    return HotSpotFinding(spot=spot, fired_at_s=tuple(fired))
