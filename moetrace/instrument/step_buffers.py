"""What steps are recorded into: the pool of buffers, their clock, their counters and backward marks.

Made for the device that the model is on, so not before a model or a wrapped module says which one that is;
with a clock that is known from the start, so are the buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from moetrace.instrument.cost import interval_cost_ns
from moetrace.instrument.patches import Patches
from moetrace.record.buffer import BufferPool, StepBuffer
from moetrace.timing.choice import clock_for
from moetrace.timing.clock import Clock, HostClock

if TYPE_CHECKING:
    from moetrace.instrument.coactivation import CoactivationSampler
    from moetrace.instrument.routing import StepCounter
    from moetrace.record.count_sites import CountSite
    from moetrace.tracer import Tracer


class StepBuffers:
    """The buffers of one tracer."""

    def __init__(self, tracer: Tracer, clock: Clock | None) -> None:
        self._tracer = tracer
        self.clock = clock
        """None until the device is known."""
        self.pool: BufferPool | None = None
        """None until the clock is known."""
        self.counters: list[StepCounter] = []
        """One per buffer, by its number; none where nothing is counted."""
        self.coactivation: CoactivationSampler | None = None
        self.graph_patches = Patches()
        """Wrappers of the device's graph class."""

    @property
    def clock_name(self) -> str:
        """What times the phases: host, cuda or device."""
        return self.clock.name if self.clock is not None else HostClock.name

    def ready(self, device: Any) -> BufferPool:
        """The pool; made, and its drain thread started, at the first call.

        Raises:
            ConfigError: clock="cuda" or "device" where there is no such device.
        """
        if self.pool is None:
            tracer, config = self._tracer, self._tracer.config
            if self.clock is None:
                self.clock = clock_for(config.clock, getattr(device, "type", "cpu"))
                tracer.guard.run("cost", self._calibrate, self.clock)
            self.pool = BufferPool(self.clock, config.buffers, config.max_intervals)
            self._hook_graphs()
            tracer.drain.start(self.pool)
        return self.pool

    def _calibrate(self, clock: Clock) -> None:
        self._tracer.metrics.interval_cost_ns = interval_cost_ns(clock)

    def _hook_graphs(self) -> None:
        device = getattr(self.clock, "device", None)
        if device is None or device.graph_class is None:
            return
        from moetrace.instrument.graphs import GraphMarks

        marks = GraphMarks(self._tracer, device, cast(Any, self.clock).gate)
        marks.hook(self.graph_patches, device.graph_class)

    def count(self, sites: list[CountSite], device: Any) -> None:
        """Count these layers from the next step on; allocates a counter per buffer."""
        from moetrace.instrument.routing import StepCounter

        self.watch_backward(device)
        # Buffers that wait for the drain thread keep the counter they were filled with.
        self.counters = [StepCounter(sites, device) for _ in self.ready(device).all_buffers]
        config = self._tracer.config
        if config.coactivation_steps:
            from moetrace.instrument.coactivation import CoactivationSampler

            self.coactivation = CoactivationSampler(sites, device, layers=config.coactivation_layers)

    def count_nothing(self) -> None:
        """Let go of the counters."""
        self.counters = []
        self.coactivation = None

    def watch_backward(self, device: Any) -> None:
        """Let buffers record backward; from the next step on, where it was not so before."""
        from moetrace.instrument.backward import BackwardMarks

        if not self._tracer.config.backward:
            return
        for buffer in self.ready(device).all_buffers:
            buffer.backward = buffer.backward or BackwardMarks(buffer, self._tracer)

    def begin_counts(self, buffer: StepBuffer, *, checking: bool, coactivation: bool, dummy: bool) -> None:
        """Give the buffer of a step that begins its counter, zeroed, where anything is counted."""
        buffer.counter = self.counters[buffer.number] if self.counters else None
        if buffer.counter is not None:
            sampler = self.coactivation if coactivation else None
            buffer.counter.begin(
                checking=checking,
                dummy=dummy,
                coactivation=sampler.take() if sampler is not None else None,
            )
