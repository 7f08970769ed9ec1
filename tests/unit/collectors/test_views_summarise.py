"""The summary names what the verdicts bear out, and says what they do not."""

from __future__ import annotations

from moetrace_collectors.views.summarise import summarise
from moetrace_schemas.enums import Cause, Evidence, Phase
from run_view_builders import step_row, suspect


def test_headline_names_rank_phase_layer_share_worth_cause_and_evidence() -> None:
    """A rank that most steps name with clear evidence is the headline, with every figure it rests on."""
    named = [step_row(step, suspect(2, Phase.EXPERT_GEMM, layer=1, worth_ms=29.8)) for step in range(14)]
    calm = [step_row(step) for step in range(14, 15)]
    summary = summarise([*named, *calm])
    assert summary.headline == (
        "Rank 2 in expert_gemm (layer 1) extended 93 % of steps by a median 29.8 ms; cause: device; "
        "evidence clear."
    )
    assert "Rows do not explain the time of rank 2" in summary.next_steps[0]


def test_no_rank_stands_out_says_why() -> None:
    """Without clear evidence no rank is a headline; the mix of evidence is told, and no advice given."""
    ambiguous = [
        step_row(
            step, suspect(1, Phase.OUTSIDE, worth_ms=5), evidence=Evidence.AMBIGUOUS, cause=Cause.OUTSIDE
        )
        for step in range(3)
    ]
    summary = summarise([*ambiguous, *(step_row(step) for step in range(3, 10))])
    assert summary.headline == "No rank stands out: evidence over 10 steps is 7 insufficient, 3 ambiguous."
    assert summary.remark == (
        "Named most often: rank 1 in outside (30 % of steps, median 5.00 ms, evidence ambiguous)."
    )
    assert not summary.outstanding
    assert "Nothing here is sure enough to act on" in summary.next_steps[0]


def test_scattered_clear_steps_are_no_headline() -> None:
    """Clear steps of ever different ranks and phases do not make one of them stand out."""
    steps = [step_row(step, suspect(step, Phase.ROUTER)) for step in range(12)]
    summary = summarise(steps)
    assert summary.headline == (
        "No rank stands out: evidence over 12 steps is 12 clear, but of different ranks and phases."
    )


def test_warmup_steps_are_in_no_figure() -> None:
    """A warm-up step, however slow, changes neither findings nor medians nor shares."""
    counted = [step_row(step, suspect(0, Phase.ROUTER, worth_ms=10), step_ms=100) for step in range(1, 4)]
    slow = step_row(0, suspect(3, Phase.COMBINE, worth_ms=900), step_ms=1000, warmup=True)
    summary = summarise([slow, *counted])
    assert summary.counted_steps == 3
    assert summary.warmup_steps == 1
    assert summary.step_median_ns == 100_000_000
    assert [(finding.rank, finding.steps_share) for finding in summary.findings] == [(0, 1.0)]


def test_insufficient_steps_are_counted_and_never_named() -> None:
    """A suspect of a step with insufficient evidence is not a finding."""
    steps = [step_row(step, suspect(1, Phase.ROUTER), evidence=Evidence.INSUFFICIENT) for step in range(4)]
    summary = summarise(steps)
    assert summary.findings == ()
    assert summary.evidence == {Evidence.CLEAR: 0, Evidence.AMBIGUOUS: 0, Evidence.INSUFFICIENT: 4}


def test_one_fault_under_two_causes_is_one_headline_and_two_findings() -> None:
    """Findings split by cause; the headline counts the rank and phase once, and names both causes."""
    causes = [Cause.DEVICE] * 3 + [Cause.UNKNOWN]
    steps = [
        step_row(step, suspect(2, Phase.EXPERT_GEMM, layer=1), cause=cause)
        for step, cause in enumerate(causes)
    ]
    summary = summarise(steps)
    assert "extended 100 % of steps" in summary.headline
    assert "cause: device in 75 %, unknown in 25 %" in summary.headline
    assert [(finding.cause, finding.steps) for finding in summary.findings] == [
        (Cause.DEVICE, 3),
        (Cause.UNKNOWN, 1),
    ]


def test_layer_is_named_only_where_it_holds_half() -> None:
    """A fault spread over layers is a fault of the rank: no layer is named for it."""
    spread = [step_row(step, suspect(0, Phase.ROUTER, layer=step)) for step in range(4)]
    assert summarise(spread).findings[0].layer is None
    halves = [step_row(step, suspect(0, Phase.ROUTER, layer=step % 2)) for step in range(4)]
    assert summarise(halves).findings[0].layer is None
    held = [step_row(step, suspect(0, Phase.ROUTER, layer=min(step, 1))) for step in range(4)]
    assert summarise(held).findings[0].layer == 1


def test_findings_are_ordered_by_total_worth() -> None:
    """What cost most over the run comes first, not what was named most often."""
    often = [step_row(step, suspect(0, Phase.ROUTER, worth_ms=1)) for step in range(5)]
    costly = [step_row(5, suspect(3, Phase.COMBINE, worth_ms=50))]
    assert [finding.rank for finding in summarise([*often, *costly]).findings] == [3, 0]


def test_two_faults_are_both_told() -> None:
    """A second rank that stands out is in the remark, and ranks of one cause share one advice."""
    steps = [
        step_row(step, suspect(step % 2, Phase.EXPERT_GEMM, worth_ms=10 + step % 2)) for step in range(8)
    ]
    summary = summarise(steps)
    assert summary.headline.startswith("Rank 1 in expert_gemm")
    assert summary.remark == "Also rank 0 in expert_gemm (50 % of steps, median 10.0 ms, evidence clear)."
    assert len(summary.next_steps) == 1
    assert "ranks 1 and 0" in summary.next_steps[0]


def test_a_run_of_warmup_only_says_so() -> None:
    """With nothing to count there is no figure and no division by zero."""
    summary = summarise([step_row(0, suspect(1, Phase.ROUTER), warmup=True)])
    assert summary.headline == "No step outside warm-up has been joined yet."
    assert summary.next_steps == ()
    assert summary.step_p95_ns == 0
