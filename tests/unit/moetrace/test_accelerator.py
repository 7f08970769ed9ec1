"""Other accelerators: torch's common events behind the same clock, or the host's clock and a clear word."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetrace.errors import ConfigError
from moetrace.testing import FakeDevice, FakeEvent
from moetrace.timing.accelerator import AcceleratorClock, AcceleratorDevice
from moetrace.timing.choice import clock_for


class Event(FakeEvent):
    """torch.Event's arguments over the fake one."""

    device = FakeDevice()

    def __init__(self, device: str, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("xpu", True)
        super().__init__(self.device)

    def record(self, stream: Any = None) -> None:
        """On the current stream, or on another one."""
        super().record()


def fake_torch(event: Any = Event) -> Any:
    """What is used of torch."""
    return SimpleNamespace(
        Event=event,
        Stream=lambda device: f"stream of {device}",
        accelerator=SimpleNamespace(current_stream=lambda: SimpleNamespace(stream_id=3)),
    )


def test_marks_are_events_of_the_accelerator() -> None:
    """Device time between marks, as on CUDA, under a name of its own."""
    Event.device = device = FakeDevice()
    clock = AcceleratorClock(AcceleratorDevice("xpu", fake_torch()), device.now_ns, device.now_ns)
    track = clock.track(4)
    track.mark()
    device.work(700)
    track.mark()
    device.finish()
    assert track.ready()
    assert (clock.name, track.nanoseconds(1), track.stream(1)) == ("device", 700, 0)
    assert track.placed() is not None


def test_an_accelerator_without_timing_events_is_timed_by_the_host_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not asked for is no error; what the figures then mean is said once."""

    def refuse(device: str, enable_timing: bool) -> Any:
        raise RuntimeError("no timing")

    monkeypatch.setattr(torch, "Event", refuse)
    with caplog.at_level(logging.WARNING):
        assert clock_for("auto", "xpu").name == "host"
    assert "no timing events for xpu (no timing)" in caplog.text
    with pytest.raises(ConfigError, match=r"clock='device': torch has no timing events for xpu here"):
        clock_for("device", "xpu")


def test_a_torch_without_a_common_interface_of_accelerators_is_timed_by_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Learned before the first mark, though its events work."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.delattr(torch, "accelerator", raising=False)
    with caplog.at_level(logging.WARNING):
        assert clock_for("auto", "xpu").name == "host"
    assert "no timing events for xpu (module 'torch' has no attribute 'accelerator')" in caplog.text


def test_without_any_accelerator_the_device_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to set instead."""
    accelerator = SimpleNamespace(current_accelerator=lambda: None)
    monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    with pytest.raises(ConfigError, match="auto or host expected"):
        clock_for("device", "cpu")
    assert clock_for("auto", "cpu").name == "host"
