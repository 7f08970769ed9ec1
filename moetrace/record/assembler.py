"""Assembles a step like an earlier one from the earlier one's plan. Runs in the drain thread only.

Most steps of a model are alike: the same calls, in the same order of starts and ends. `assemble` only
compares times, so its rows are then the same ones between the same events. A plan keeps them as
positions among the step's distinct times, and a step whose events come in the same order is laid out
by it, without nesting anything:

::

    step 7     s0 a0    a1 b0  b1   s1        times in order: s0 a0 a1 b0 b1 s1
    plan       row 0 from 0 to 1, row 1 from 1 to 2, ...
    step 8     s0  a0 a1   b0 b1  s1          the same order: the same rows between other times
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moetrace.record.assemble import assemble
from moetrace.record.buffer import TICKET_SHIFT
from moetrace.record.exchanges import Interval
from moetrace.record.sites import SiteTable
from moetrace.record.types import PhaseRow

PLANS = 64
"""Plans kept, the least recently used one makes room: forward modes, graph variants, ties."""
STREAM_SHIFT = 48
"""Above flags and ticket: the stream."""
_FLAGS = (1 << TICKET_SHIFT) - 1
_TICKET = (1 << (STREAM_SHIFT - TICKET_SHIFT)) - 1

Call = tuple[int, int, int, int]
"""Site number, start ns, end ns, flags with ticket and stream above: an interval of a buffer, resolved."""
_Key = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Site numbers, flags, and the positions of the step's and of the calls' starts and ends among all times."""


class Assembler:
    """`assemble` with a memory of steps that were alike. For one thread."""

    def __init__(self, sites: SiteTable, limit: int = PLANS) -> None:
        self._sites = sites
        self._limit = limit
        self._plans: OrderedDict[_Key, tuple[PhaseRow, ...]] = OrderedDict()
        """Rows whose times are positions."""
        self.planned = 0
        """Steps that had to be assembled anew."""

    def rows(
        self, calls: Sequence[Call], start_ns: int, end_ns: int, *, microbatch: int = 0
    ) -> tuple[PhaseRow, ...]:
        """What `assemble` makes of these calls."""
        starts = [call[1] for call in calls]
        ends = [call[2] for call in calls]
        times = sorted({start_ns, end_ns, *starts, *ends})
        position = {time: at for at, time in enumerate(times)}.__getitem__
        key = (
            tuple([call[0] for call in calls]),
            tuple([call[3] for call in calls]),
            tuple(map(position, [start_ns, end_ns, *starts, *ends])),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key)
        else:
            self._plans.move_to_end(key)
        # Positions in a plan count from that of the step's start.
        origin = key[2][0]
        return tuple(
            [
                PhaseRow(
                    layer,
                    phase,
                    direction,
                    microbatch,
                    ordinal,
                    stream,
                    flags,
                    times[origin + first] - start_ns,
                    times[origin + first + length] - times[origin + first],
                )
                for layer, phase, direction, _, ordinal, stream, flags, first, length, *_ in plan
            ]
        )

    def _plan(self, key: _Key) -> tuple[PhaseRow, ...]:
        """Rows of the step whose times are their positions."""
        numbers, flags, (start, end, *positions) = key
        sites = self._sites.sites
        intervals = [
            Interval(
                sites[number],
                first,
                last,
                flag & _FLAGS,
                flag >> TICKET_SHIFT & _TICKET,
                flag >> STREAM_SHIFT,
            )
            for number, first, last, flag in zip(
                numbers, positions[: len(numbers)], positions[len(numbers) :], flags, strict=True
            )
        ]
        plan = self._plans[key] = assemble(intervals, start, end)
        self.planned += 1
        while len(self._plans) > self._limit:
            self._plans.popitem(last=False)
        return plan
