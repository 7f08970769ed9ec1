"""Steps that are laid out by the plan of an earlier one come out as if each were assembled anew."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from moetrace.record.assemble import assemble
from moetrace.record.assembler import Assembler, Call
from moetrace.record.buffer import TICKET_SHIFT
from moetrace.record.exchanges import Interval
from moetrace.record.sites import Site, SiteTable

from .intervals import block, call, lines, messy, nested, phase


class Table:
    """Sites by number, so that intervals can be given as a buffer holds them."""

    def __init__(self) -> None:
        self.sites = SiteTable()
        self._numbers: dict[Site, int] = {}

    def calls(self, intervals: Sequence[Interval]) -> list[Call]:
        """Intervals as calls."""
        for interval in intervals:
            if interval.site not in self._numbers:
                self._numbers[interval.site] = self.sites.add(interval.site)
        return [
            (self._numbers[i.site], i.start_ns, i.end_ns, i.flags | i.ticket << TICKET_SHIFT)
            for i in intervals
        ]


@given(st.one_of(nested(), messy()), st.data())
def test_a_plan_gives_what_assembling_gives(
    step: tuple[list[Interval], int, int], data: st.DataObject
) -> None:
    """A step, and one with the same order of events at other times, give the rows that `assemble` gives."""
    intervals, start, end = step
    table = Table()
    calls = table.calls(intervals)
    assembler = Assembler(table.sites)
    assert assembler.rows(calls, start, end, microbatch=3) == assemble(intervals, start, end, microbatch=3)
    times = sorted({start, end, *(t for i in intervals for t in (i.start_ns, i.end_ns))})
    moved, cursor = {}, data.draw(st.integers(-50, 50))
    for time in times:
        moved[time] = cursor
        cursor += data.draw(st.integers(1, 40))
    later = [i._replace(start_ns=moved[i.start_ns], end_ns=moved[i.end_ns]) for i in intervals]
    assert assembler.rows(table.calls(later), moved[start], moved[end]) == assemble(
        later, moved[start], moved[end]
    )
    assert assembler.planned == 1


@given(st.lists(st.one_of(nested(), messy()), min_size=2, max_size=8))
def test_steps_that_differ_never_share_a_plan(steps: list[tuple[list[Interval], int, int]]) -> None:
    """One assembler that sees many kinds of steps, with room for two, answers for each as if it were new."""
    table = Table()
    assembler = Assembler(table.sites, limit=2)
    for intervals, start, end in [*steps, *steps]:
        assert assembler.rows(table.calls(intervals), start, end) == assemble(intervals, start, end)


def test_another_order_of_events_is_another_plan() -> None:
    """The same calls nested and one after the other are two plans; a third step like the first is none."""
    table = Table()
    assembler = Assembler(table.sites)
    router, layer = phase("router", 0), block(0)
    inside = [call(router, 20, 40), call(layer, 10, 90)]
    before = [call(router, 5, 8), call(layer, 10, 90)]
    assert lines(assembler.rows(table.calls(inside), 0, 100))[1] == "0 router 20-40"
    assert lines(assembler.rows(table.calls(before), 0, 100))[1] == "0 router 5-8"
    assert assembler.planned == 2
    again = [call(router, 30, 35), call(layer, 11, 80)]
    assert lines(assembler.rows(table.calls(again), 0, 100))[1] == "0 router 30-35"
    assert assembler.planned == 2


def test_plans_are_bounded_and_the_oldest_unused_one_goes() -> None:
    """A plan beyond the limit takes the place of the one that was not used for longest."""
    table = Table()
    assembler = Assembler(table.sites, limit=2)
    shapes = [[call(phase("router", layer), 10, 20)] for layer in range(3)]
    for which, planned in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        assembler.rows(table.calls(shapes[which]), 0, 100)
        assert assembler.planned == planned
