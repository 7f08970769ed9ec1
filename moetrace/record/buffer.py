"""The bounded buffers between the model thread and the drain thread.

A buffer belongs to the model thread from `acquire` until `hand_over`, then to the drain thread until
it is released; nobody ever waits for the other. When all buffers are in use a sampled step is
dropped and counted.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from moetrace.timing.clock import Clock
from moetrace_schemas.enums import ForwardMode

if TYPE_CHECKING:
    from moetrace.record.replays import Replay

WIDTH = 4
"""Numbers per interval: site, start mark, end mark, flags."""
TICKET_SHIFT = 16
"""Above the row flags: the number that a launch and its wait have in common, 0 for all else."""
UNDIVIDED = -2
"""The mark of a call inside a layer that is recorded as one call (captured graphs); below 0, as all marks
without a time."""


def no_mark() -> int:
    """Marks nothing."""
    return UNDIVIDED


class StepBuffer:
    """One sampled step while it is being recorded. Allocated once, reused."""

    __slots__ = (
        "arrivals",
        "backward",
        "behind_payload",
        "capacity",
        "cohort",
        "compiled_graphs",
        "counter",
        "counting_ns",
        "end_mark",
        "ended",
        "expected_sites",
        "forward_mode",
        "in_flight",
        "launches",
        "length",
        "local_rows",
        "mark",
        "microbatch",
        "mode_noted",
        "mode_told",
        "number",
        "open_marks",
        "overflow",
        "placement_version",
        "replays",
        "slots",
        "start_mark",
        "start_unix_ns",
        "step",
        "track",
        "traffic",
        "undivided",
        "warmup",
    )

    def __init__(self, clock: Clock, max_intervals: int, number: int = 0) -> None:
        self.number = number
        self.capacity = max_intervals * WIDTH
        self.slots = array("q", bytes(8 * self.capacity))
        self.track = clock.track(max_intervals * 2 + 2)
        self.mark: Callable[[], int] = self.track.mark
        # A moetrace.instrument.routing.StepCounter; Any keeps torch out of this module.
        self.counter: Any = None
        # A moetrace.instrument.backward.BackwardMarks, or None where backward is not recorded.
        self.backward: Any = None
        self.traffic: list[tuple[int | None, str, int, list[int]]] = []
        self.behind_payload: dict[tuple[int, str], int] = {}
        """(layer, phase) -> exchanges of its calls that come behind that of the rows."""
        self.local_rows: list[tuple[int | None, int]] = []
        self.in_flight: dict[int, int] = {}
        """Handle of a launched exchange -> its ticket, oldest first."""
        self.ended: set[int] = set()
        """Handles that were waited for."""
        self.arrivals: dict[int, Callable[[Any], None]] = {}
        """Handle of an exchange in flight -> what counts its rows, given the result of the wait."""
        self.replays: list[Replay] = []
        self.open_marks: list[tuple[int, int]] = []
        """(site, start mark) of calls that began inside a compiled graph, innermost last."""
        self.undivided: frozenset[int] = frozenset()
        """Sites whose calls are one interval, without what is called inside; in captures only."""
        self.begin(0)

    def begin(
        self,
        step: int,
        *,
        microbatch: int = 0,
        forward_mode: ForwardMode = ForwardMode.TRAIN,
        mode_told: bool = True,
        cohort: str = "",
        warmup: bool = False,
        placement_version: int = 0,
        start_unix_ns: int = 0,
        expected_sites: frozenset[int] = frozenset(),
    ) -> None:
        """Start recording a step into this buffer."""
        self.step = step
        self.microbatch = microbatch
        self.forward_mode = forward_mode
        self.mode_told = mode_told
        """Whether the mode is settled; else calls inside the step note theirs."""
        self.mode_noted = False
        self.cohort = cohort
        self.warmup = warmup
        self.placement_version = placement_version
        self.start_unix_ns = start_unix_ns
        self.expected_sites = expected_sites
        self.compiled_graphs = 0
        """Graphs that torch.compile had made when the step began."""
        self.length = 0
        self.overflow = 0
        self.launches = 0
        self.counting_ns = 0
        self.in_flight.clear()
        self.ended.clear()
        self.arrivals.clear()
        self.open_marks.clear()
        self.replays.clear()
        if self.backward is not None:
            self.backward.clear()
        self.start_mark = -1
        self.end_mark = -1
        self.traffic.clear()
        self.behind_payload.clear()
        self.local_rows.clear()

    def note_mode(self, mode: ForwardMode) -> None:
        """Let a forward say what the step is for; several that differ are train if one is, else mixed."""
        if self.mode_told:
            return
        if self.mode_noted and mode is not self.forward_mode:
            trains = ForwardMode.TRAIN in (mode, self.forward_mode)
            mode = ForwardMode.TRAIN if trains else ForwardMode.MIXED
        self.forward_mode, self.mode_noted = mode, True

    def add(self, site: int, start: int, end: int, flags: int = 0) -> None:
        """Keep one interval. Never raises; beyond the capacity it only counts."""
        position = self.length
        if position >= self.capacity:
            self.overflow += 1
            return
        slots = self.slots
        slots[position] = site
        slots[position + 1] = start
        slots[position + 2] = end
        slots[position + 3] = flags
        self.length = position + WIDTH

    @contextlib.contextmanager
    def undivided_call(self) -> Iterator[None]:
        """Inside, calls are noted and have no marks. A capture's only: nothing there is the hot path."""
        before, self.mark = self.mark, no_mark
        try:
            yield
        finally:
            self.mark = before

    def launch(self, handle: int) -> int:
        """Note an exchange in flight; returns its ticket."""
        self.launches += 1
        self.in_flight[handle] = self.launches
        self.ended.discard(handle)
        return self.launches

    def landed(self, handles: tuple[int, ...], *, guess: bool) -> int:
        """The ticket of the exchange that a wait ends, 0 for none.

        With `guess`, a wait for something that was never seen ends the oldest exchange in flight that
        may go by another name (handle above 0).
        """
        known = next((handle for handle in handles if handle in self.in_flight), 0)
        if not known and guess and not any(handle in self.ended for handle in handles):
            known = next((handle for handle in self.in_flight if handle > 0), 0)
        if not known:
            return 0
        self.ended.update(handles)
        return self.in_flight.pop(known)

    def intervals(self) -> list[tuple[int, int, int, int]]:
        """All intervals as (site, start mark, end mark, flags), in order of their end."""
        slots = self.slots
        return [(slots[i], slots[i + 1], slots[i + 2], slots[i + 3]) for i in range(0, self.length, WIDTH)]


class BufferPool:
    """A fixed number of buffers, and the queue of those that wait for the drain thread."""

    def __init__(self, clock: Clock, count: int, max_intervals: int) -> None:
        self.all_buffers = tuple(StepBuffer(clock, max_intervals, number) for number in range(count))
        self._free = deque(self.all_buffers)
        # SimpleQueue.put never blocks and takes no Python-level lock; the pool bounds its length.
        self.filled: SimpleQueue[StepBuffer | None] = SimpleQueue()

    def acquire(self) -> StepBuffer | None:
        """A free buffer, or None when all are in use. Never waits."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def hand_over(self, buffer: StepBuffer) -> None:
        """Give a finished step to the drain thread."""
        buffer.arrivals.clear()
        self.filled.put(buffer)

    def release(self, buffer: StepBuffer) -> None:
        """Make a drained buffer, or one whose step was dropped, available again."""
        buffer.arrivals.clear()
        buffer.track.reset()
        self._free.append(buffer)
