"""The estimate of benchmarks/step_pairs.py: what pairs of steps say of the cost at a rate of sampling."""

from __future__ import annotations

import pytest

from benchmarks.step_pairs import Pair, Pairs, pooled, share

PLAIN_NS = 50_000_000


def pairs(number: int, more_ns: int, *, recorded: bool = False, checked: bool = False) -> list[Pair]:
    """Pairs whose traced step took so much more, at two speeds of the machine."""
    return [
        Pair(plain_ns=plain_ns, traced_ns=plain_ns + more_ns, recorded=recorded, checked=checked)
        for plain_ns in (PLAIN_NS, 3 * PLAIN_NS)
        for _ in range(number // 2)
    ]


RUN = Pairs(
    pairs=(
        *pairs(180, 10_000),
        *pairs(18, 1_000_000, recorded=True),
        *pairs(2, 3_000_000, recorded=True, checked=True),
    ),
    background_ns=2_000_000.0,
    check_steps=20,
)


def test_each_kind_of_step_counts_as_often_as_it_occurs() -> None:
    """At 1/10: nine tenths sampled out, one in twenty of the rest checked, a tenth of the background."""
    found = share(RUN, 0.1)
    thread_ns = 0.9 * 10_000 + 0.095 * 1_000_000 + 0.005 * 3_000_000
    assert found.plain_ms == pytest.approx(2 * PLAIN_NS / 1e6)
    assert found.model_thread == pytest.approx(thread_ns / (2 * PLAIN_NS))
    assert found.background == pytest.approx(0.1 * 2_000_000 / (2 * PLAIN_NS))
    assert found.low <= found.all <= found.high


def test_sampled_out_steps_bear_no_background() -> None:
    """At a rate of 0 only steps that are sampled out count."""
    found = share(RUN, 0.0)
    assert (found.model_thread, found.background) == (pytest.approx(10_000 / (2 * PLAIN_NS)), 0.0)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_recorded_step_costs_the_same_at_every_rate(rate: float) -> None:
    """One in twenty is checked, and each bears its own background, whatever the steps between cost."""
    assert share(RUN, rate).recorded_ms == pytest.approx(0.95 * 1.0 + 0.05 * 3.0 + 2.0)
    assert share(RUN, 0.0).recorded_ms == 0.0


def test_what_few_steps_cost_is_seen_untrimmed() -> None:
    """A cost of one recorded step in twenty falls to the trimming, and stands beside; pairs by kind."""
    usual, dear = pairs(38, 0, recorded=True), pairs(2, 20_000_000, recorded=True)
    checked = pairs(2, 0, recorded=True, checked=True)
    run = Pairs(pairs=(*usual, *dear, *checked), background_ns=0.0, check_steps=20)
    found = share(run, 1.0)
    assert found.all == 0.0
    assert found.untrimmed == pytest.approx(0.95 * 1_000_000 / (2 * PLAIN_NS))
    assert found.num_pairs == (40, 2)


def test_a_kind_that_never_occurred_is_said() -> None:
    """Where every step is to count and none was recorded, there is no estimate."""
    run = Pairs(pairs=tuple(pairs(20, 10_000)), background_ns=0.0, check_steps=20)
    with pytest.raises(ValueError, match="no pair with a step that is recorded"):
        share(run, 1.0)


def test_ranks_are_pooled_pair_by_pair() -> None:
    """Pairs of all ranks are one sample; the background is that of a rank, and drops add up."""
    other = Pairs(pairs=RUN.pairs[:4], background_ns=4_000_000.0, check_steps=20, dropped=3)
    found = pooled([RUN, other])
    assert (len(found.pairs), found.background_ns, found.dropped) == (204, 3_000_000.0, 3)
