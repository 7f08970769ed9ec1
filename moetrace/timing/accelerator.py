"""Timing events of any accelerator that torch knows (XPU, MPS and others), through torch.Event.

The same clock as for CUDA with another device behind it; no graphs, and no hardware queue to mind.
"""

from __future__ import annotations

from typing import Any

from moetrace.timing.cuda_events import CudaClock, DeviceEvent


class AcceleratorDevice:
    """The current accelerator by torch's common interface."""

    one_queue = False
    graph_events = False
    graph_class: Any = None

    def __init__(self, kind: str, torch: Any) -> None:
        """`kind` is torch's name of the device type.

        Raises:
            AttributeError: torch has no common interface of accelerators (older than 2.6).
            RuntimeError: the device takes no timing events.
        """
        self._kind = kind
        self._torch = torch
        self._own: Any = None
        # Better to learn it here than at every mark.
        probe = self.new_event()
        probe.record()
        probe.query()
        self._current = torch.accelerator.current_stream

    def new_event(self) -> DeviceEvent:
        """A timing event."""
        event: DeviceEvent = self._torch.Event(device=self._kind, enable_timing=True)
        return event

    def new_graph_event(self) -> DeviceEvent:
        """Never asked: there are no graphs."""
        raise NotImplementedError

    def anchor_event(self) -> DeviceEvent:
        """A timing event, recorded now on a stream of its own."""
        if self._own is None:
            self._own = self._torch.Stream(device=self._kind)
        event: Any = self.new_event()
        event.record(self._own)
        kept: DeviceEvent = event
        return kept

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def stream(self) -> int:
        """The current stream's id."""
        return int(self._current().stream_id)


class AcceleratorClock(CudaClock):
    """Device time of an accelerator that is not CUDA."""

    name = "device"
