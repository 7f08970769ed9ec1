"""Which steps a figure is of: the one line that every view says it with."""

from __future__ import annotations

import pytest

from moetrace_collectors.counted_steps import CountedSteps, counted_steps
from moetrace_collectors.views.summarise import summarise
from run_view_builders import step_row


@pytest.mark.parametrize(
    ("counted", "sentence"),
    [
        (counted_steps(range(3, 41)), "steps 3 to 40: 38 recorded of 38, warm-up left out"),
        (
            counted_steps([40, 10, 20, 30], warmup=2),
            "steps 10 to 40: 4 recorded of 31, 2 of warm-up left out",
        ),
        (counted_steps([7], kind="decode"), "step 7: 1 decode step recorded of 1, warm-up left out"),
        (
            counted_steps([2, 4], kind="prefill"),
            "steps 2 to 4: 2 prefill steps recorded of 3, warm-up left out",
        ),
        (counted_steps([], warmup=3), "no step, 3 of warm-up left out"),
        (
            CountedSteps(first=0, last=9_999, counted=10_000, warmup_told=False),
            "steps 0 to 9999: 10,000 recorded of 10,000, warm-up is not told apart",
        ),
    ],
)
def test_a_line_says_which_steps_were_counted(counted: CountedSteps, sentence: str) -> None:
    """First and last, how many of those that lie between them, and what became of warm-up."""
    assert counted.sentence() == sentence


def test_a_summary_counts_steps_outside_of_warm_up() -> None:
    """The line under every headline is of the very steps that the headline is made of."""
    rows = [step_row(step, warmup=step < 2) for step in range(6)]
    assert summarise(rows).counted.sentence() == "steps 2 to 5: 4 recorded of 4, 2 of warm-up left out"
