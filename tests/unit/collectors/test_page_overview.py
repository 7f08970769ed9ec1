"""Figures of the page's overview: those of the report."""

from __future__ import annotations

from moetrace_collectors.page.documents import overview_document
from moetrace_collectors.views.browse_records import RunCosts, RunEntry
from moetrace_collectors.views.summarise import summarise
from moetrace_schemas.enums import ForwardMode
from run_view_builders import step_row

MS = 1_000_000


def test_steps_without_a_verdict_are_in_no_median() -> None:
    """They have no length, as in the report: a run of them is not said to take no time."""
    steps = (
        *(step_row(number) for number in range(3)),
        *(step_row(number, step_ms=0) for number in (3, 4, 5, 6)),
    )
    entry = RunEntry(
        run_id="r",
        model_name="",
        model_version="",
        ranks=4,
        hosts=1,
        sample_period=1,
        forward_modes=(ForwardMode.PREFILL,),
        steps=len(steps),
        warmup_steps=0,
        last_step=6,
        first_unix_ns=0,
        last_unix_ns=0,
        clear_steps=0,
        ambiguous_steps=0,
        step_median_ns=0,
        step_p95_ns=0,
    )
    costs = RunCosts(entry=entry, steps=steps, by_rank=(), by_layer={}, layer_of_rank={})
    document = overview_document(costs, summarise(steps), notices=(), epochs=(), strip=10)
    [mode] = document["modes"]
    assert (mode["median_ns"], mode["p95_ns"]) == (100 * MS, 100 * MS)
    assert mode["phase_median_ns"] == {"expert_gemm": 100 * MS}
