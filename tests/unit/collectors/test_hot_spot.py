"""Persistent hot spots: the promises of the state machine, and its settings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetrace_collectors.errors import UsageError
from moetrace_collectors.load.hot_spot import HotSpot, HotSpotPlace, HotSpotSettings, HotSpotState, Signal
from moetrace_collectors.load.hot_spot_scan import scan_hot_spots, window_sums
from moetrace_collectors.load.hot_spot_settings import load_rules
from moetrace_collectors.load.series import LoadSeries
from moetrace_schemas.enums import ForwardMode

PLACE = HotSpotPlace(layer=3, forward_mode=ForwardMode.DECODE, signal=Signal.COMPUTE)
SETTINGS = HotSpotSettings()
RATIOS = st.lists(st.one_of(st.none(), st.floats(0.0, 8.0)), max_size=60)


def run(ratios: list[float | None], settings: HotSpotSettings = SETTINGS) -> list[HotSpot]:
    """The machine after each window."""
    spots, spot = [], HotSpot(place=PLACE, settings=settings)
    for window, ratio in enumerate(ratios):
        spot = spot.observe(window=window, ratio=ratio, hottest=1)
        spots.append(spot)
    return spots


def fired(ratios: list[float | None], settings: HotSpotSettings = SETTINGS) -> list[int]:
    """Windows after which it fired."""
    return [window for window, spot in enumerate(run(ratios, settings)) if spot.fired_now]


def test_defaults_are_those_promised() -> None:
    """1.8 over 3 windows of 60 s, 600 s cooldown, for prefill and decode alike, from one file."""
    rules = load_rules()
    for mode in (ForwardMode.PREFILL, ForwardMode.DECODE, None):
        for signal in Signal:
            settings = rules.settings(mode, signal)
            assert (settings.threshold, settings.windows, settings.window_s) == (1.8, 3, 60.0)
            assert settings.cooldown_s == 600.0


def test_a_persistent_hot_spot_fires_once() -> None:
    """After the third hot window, and then not again while it lasts."""
    assert fired([1.0, 2.0, 2.0, 2.0] + [2.0] * 40) == [3]


def test_the_life_of_a_hot_spot() -> None:
    """Calm, rising, hot, still hot inside the band, over, calm again after the cooldown."""
    ratios = [1.2, 1.9, 1.9, 1.9, 1.6, 1.4, *[1.2] * 8]
    states = [spot.state for spot in run(ratios)]
    assert states[:6] == [
        HotSpotState.CALM,
        HotSpotState.RISING,
        HotSpotState.RISING,
        HotSpotState.HOT,
        HotSpotState.HOT,
        HotSpotState.COOLING,
    ]
    assert states[-1] is HotSpotState.CALM
    assert states.index(HotSpotState.CALM, 4) == 3 + 10


@given(RATIOS)
def test_single_peaks_never_fire(ratios: list[float | None]) -> None:
    """Peaks, however high, with a cooler window after each, fire nothing."""
    peaks = [ratio for pair in ratios for ratio in (pair, 1.0)]
    assert fired(peaks) == []


@given(RATIOS, st.integers(2, 5), st.floats(0.0, 1200.0))
def test_it_never_fires_inside_the_cooldown(
    ratios: list[float | None], windows: int, cooldown_s: float
) -> None:
    """Two firings are at least the cooldown apart, and each has N hot windows in a row before it."""
    settings = HotSpotSettings(windows=windows, cooldown_s=cooldown_s)
    times = fired(ratios, settings)
    for first, second in pairwise(times):
        assert (second - first) * settings.window_s >= cooldown_s
    for time in times:
        before = ratios[time - windows + 1 : time + 1]
        assert len(before) == windows
        assert all(ratio is not None and ratio >= settings.threshold for ratio in before)


@given(st.lists(st.floats(1.5, 1.799), min_size=1, max_size=40))
def test_no_flapping_inside_the_band(band: list[float]) -> None:
    """Inside the hysteresis band a hot spot stays hot and a calm one stays calm."""
    hot = run([2.0, 2.0, 2.0, *band])[3:]
    assert {spot.state for spot in hot} == {HotSpotState.HOT}
    assert not any(spot.fired_now for spot in hot)
    assert {spot.state for spot in run([*band])} == {HotSpotState.CALM}


def test_missing_windows_are_no_evidence() -> None:
    """A gap breaks a row of hot windows; a hot spot without data stays what it was."""
    assert fired([2.0, 2.0, None, 2.0, 2.0]) == []
    spot = run([2.0, 2.0])[-1]
    assert not spot.observe(window=7, ratio=2.0).fired_now
    hot = run([2.0, 2.0, 2.0, None, None])[-1]
    assert hot.state is HotSpotState.HOT


def test_a_hot_spot_that_comes_back_fires_after_the_cooldown() -> None:
    """Hot windows inside the cooldown count, so it fires with the first window after it."""
    ratios: list[float | None] = [2.0] * 3 + [1.0] + [2.0] * 20
    assert fired(ratios) == [2, 12]


def test_every_state_explains_itself() -> None:
    """One sentence with place, figure and limit."""
    assert (
        HotSpot(place=PLACE, settings=SETTINGS).sentence()
        == "layer 3 in decode, compute: no window seen yet."
    )
    spots = run([1.2, 2.0, 2.0, 2.0, 1.0])
    assert spots[0].sentence() == "layer 3 in decode, compute: calm, max/mean 1.20 on rank 1, below 1.8."
    assert "rising, max/mean 2.00 on rank 1; 1 of 3 windows" in spots[1].sentence()
    assert "hot, max/mean 2.00 on rank 1; 3 windows of 60 s in a row" in spots[3].sentence()
    assert "does not fire again for 540 s (cooldown)" in spots[4].sentence()


def test_windows_must_ascend_and_ratios_be_numbers() -> None:
    """A caller's mistake is told."""
    spot = run([1.0, 1.0])[-1]
    with pytest.raises(ValueError, match="ascending"):
        spot.observe(window=1, ratio=1.0)
    with pytest.raises(ValueError, match="finite"):
        spot.observe(window=2, ratio=float("nan"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 1.0}, "threshold = 1: above 1 expected"),
        ({"threshold": float("nan")}, "threshold = nan: a finite number expected"),
        ({"clear_below": 1.8}, "clear_below = 1.8: from 1 to below threshold = 1.8 expected"),
        ({"windows": 1}, "windows = 1: a whole number of 2 or more expected"),
        ({"windows": True}, "windows = True"),
        ({"window_s": 0}, "window_s = 0: above 0 expected"),
        ({"cooldown_s": -1.0}, "cooldown_s = -1: 0 or more expected"),
        ({"cooldown_s": "long"}, "cooldown_s = 'long': a finite number expected"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, object], message: str) -> None:
    """Field, value and what is expected."""
    with pytest.raises(UsageError) as caught:
        HotSpotSettings(**fields)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_one_file_sets_modes_and_signals_apart(tmp_path: Path) -> None:
    """The most specific table wins, the rest keeps its default."""
    path = tmp_path / "hot.toml"
    path.write_text(
        "[default]\nwindows = 4\n[decode]\nthreshold = 2.5\n[decode.communication]\nthreshold = 3.0\n"
    )
    rules = load_rules(path)
    assert rules.settings(ForwardMode.PREFILL, Signal.COMPUTE).threshold == 1.8
    assert rules.settings(ForwardMode.DECODE, Signal.COMPUTE).threshold == 2.5
    assert rules.settings(ForwardMode.DECODE, Signal.COMMUNICATION).threshold == 3.0
    assert {rules.settings(mode, signal).windows for mode in ForwardMode for signal in Signal} == {4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[decode]\nlimit = 2\n", "unknown option decode.limit"),
        ("[warm]\n", "unknown option warm"),
        ("threshold = 2\n", "unknown option threshold"),
        ("[decode.compute]\nthreshhold = 2\n", "unknown option decode.threshhold"),
        ("[decode]\nwindows = 0\n", "windows = 0"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """File, option and what is known."""
    path = tmp_path / "hot.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_rules(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def series(start_s: list[float], received_remote: np.ndarray | None = None) -> LoadSeries:
    """Two experts on two ranks, one layer."""
    count = len(start_s)
    return LoadSeries(
        source="made by hand",
        forward_mode=ForwardMode.DECODE,
        cohort=None,
        steps=np.arange(count),
        steps_in_entry=np.ones(count, dtype=np.int64),
        layers=np.array([3]),
        layer_names=("3",),
        loads=np.ones((count, 1, 2)),
        start_s=np.array(start_s),
        received_remote=received_remote,
    )


def test_compute_and_communication_are_watched_apart() -> None:
    """Rows are even, but rank 1 receives nearly all that comes from elsewhere: only communication fires."""
    start = [20.0 * step for step in range(12)]
    even = np.ones((12, 1, 2))
    remote = np.tile([[[1.0, 19.0]]], (12, 1, 1))
    found = scan_hot_spots(series(start, remote), even, load_rules())
    assert found is not None
    assert [(item.spot.place.signal, item.fired_at_s) for item in found] == [(Signal.COMMUNICATION, (180.0,))]


def test_windows_follow_the_clock_and_not_steps() -> None:
    """Steps at 0, 30 and 130 s lie in windows 0 and 2 of a minute."""
    numbers, sums = window_sums(np.ones((3, 1, 2)), np.array([0.0, 30.0, 130.0]), 60.0)
    assert numbers.tolist() == [0, 2]
    assert sums[:, 0, 0].tolist() == [2.0, 1.0]


def test_without_times_nothing_is_claimed() -> None:
    """No times, no windows of seconds: None and not an empty list."""
    assert scan_hot_spots(series([0.0]), None, load_rules()) is None
