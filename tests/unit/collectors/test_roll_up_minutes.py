"""When a minute is rolled up: once it is quiet, or has waited long enough; and again when more has come."""

from __future__ import annotations

from moetrace_collectors.roll_ups.minutes import MinuteCounts, MinutePlan, MinuteSpan, spans

NOON = ("run", 43_200)
NOTHING = MinuteCounts()


def plan() -> MinutePlan:
    """Quiet for 15 s, 120 s at most."""
    return MinutePlan(settle_s=15, longest_s=120)


def counts(number: int) -> MinuteCounts:
    """So many rank steps."""
    return MinuteCounts(rank_steps=number)


def test_a_minute_is_due_once_it_is_quiet() -> None:
    """Nothing is due while rank steps still come."""
    waiting = plan()
    for now_s, number in ((0, 1), (10, 2), (20, 3), (34, 3)):
        waiting.see(NOON, there=counts(number), rolled_up=NOTHING, now_s=now_s)
        assert waiting.due(now_s=now_s) == ()
    waiting.see(NOON, there=counts(3), rolled_up=NOTHING, now_s=35)
    assert waiting.due(now_s=35) == (NOON,)
    assert waiting.counts(NOON) == counts(3)


def test_a_minute_that_never_is_quiet_is_due_all_the_same() -> None:
    """After the longest time it is rolled up as it is."""
    waiting = plan()
    for now_s in range(0, 120, 5):
        waiting.see(NOON, there=counts(now_s + 1), rolled_up=NOTHING, now_s=now_s)
        assert waiting.due(now_s=now_s) == ()
    waiting.see(NOON, there=counts(500), rolled_up=NOTHING, now_s=120)
    assert waiting.due(now_s=120) == (NOON,)


def test_only_what_has_grown_waits() -> None:
    """Repeats change no count, so nothing is due for them; a late rank makes its minute due again."""
    waiting = plan()
    waiting.see(NOON, there=counts(3), rolled_up=counts(3), now_s=0)
    assert waiting.due(now_s=1000, everything=True) == ()
    waiting.see(NOON, there=counts(4), rolled_up=counts(3), now_s=0)
    assert waiting.due(now_s=0, everything=True) == (NOON,)
    waiting.done(NOON)
    assert (waiting.waiting, waiting.due(now_s=0, everything=True)) == (frozenset(), ())


def test_a_verdict_that_comes_later_counts() -> None:
    """Exchanges are rolled up with verdicts, which moetrace join may write long after the rank rows."""
    waiting = plan()
    judged = MinuteCounts(rank_steps=3, verdicts=1)
    waiting.see(NOON, there=judged, rolled_up=counts(3), now_s=0)
    assert waiting.due(now_s=15) == (NOON,)


def test_somebody_else_may_have_rolled_it_up() -> None:
    """What the store says is rolled up does not wait any more."""
    waiting = plan()
    waiting.see(NOON, there=counts(3), rolled_up=NOTHING, now_s=0)
    waiting.see(NOON, there=counts(3), rolled_up=counts(3), now_s=20)
    assert waiting.due(now_s=20) == ()


def test_minutes_in_a_row_go_together() -> None:
    """A span has no gap, one run, and ten minutes at most."""
    minutes = [("a", 60 * number) for number in (*range(12), 20)] + [("b", 60 * 21)]
    found = spans(reversed(minutes))
    assert found == (
        MinuteSpan(run_id="a", first_s=0, end_s=600),
        MinuteSpan(run_id="a", first_s=600, end_s=720),
        MinuteSpan(run_id="a", first_s=1200, end_s=1260),
        MinuteSpan(run_id="b", first_s=1260, end_s=1320),
    )
    assert [minute for span in found for minute in span.minutes] == sorted(minutes)
