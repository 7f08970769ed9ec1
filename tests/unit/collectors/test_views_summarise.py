"""The summary names what the verdicts bear out, and says what they do not."""

from __future__ import annotations

from dataclasses import replace

from moetrace_collectors.model import JoinedStep
from moetrace_collectors.number_format import length_text
from moetrace_collectors.testing import SyntheticRun
from moetrace_collectors.verdict import VerdictEngine
from moetrace_collectors.views.run_records import StepRow
from moetrace_collectors.views.summarise import NO_EXCHANGE_REASON, NO_GROUP_REASON, summarise
from moetrace_schemas.enums import Cause, ClosedBy, Evidence, Phase
from run_view_builders import step_row, suspect


def test_headline_names_rank_phase_layer_share_worth_cause_and_evidence() -> None:
    """A rank that most steps name with clear evidence is the headline, with every figure it rests on."""
    named = [step_row(step, suspect(2, Phase.EXPERT_GEMM, layer=1, worth_ms=29.8)) for step in range(14)]
    calm = [step_row(step) for step in range(14, 15)]
    summary = summarise([*named, *calm])
    assert summary.headline == (
        "Rank 2 in expert_gemm (mostly layer 1) extended 93 % of steps by a median 29.8 ms; cause: device; "
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
    phases = (Phase.ROUTER, Phase.PERMUTE)
    steps = [step_row(step, suspect(step, phases[step % 2])) for step in range(12)]
    summary = summarise(steps)
    assert summary.headline == (
        "No rank stands out: evidence over 12 steps is 12 clear, but of different ranks and phases."
    )


def test_clear_steps_of_one_place_are_said_to_be_too_few() -> None:
    """The headline says what keeps clear steps from standing out: too few, or where they differ."""
    calm = [step_row(step) for step in range(10, 60)]
    same = [step_row(step, suspect(0, Phase.EXPERT_GEMM)) for step in range(3)]
    assert summarise([*same, *calm]).headline.endswith("3 clear, but in too few steps.")
    ranks = [step_row(step, suspect(step, Phase.EXPERT_GEMM)) for step in range(3)]
    assert summarise([*ranks, *calm]).headline.endswith("3 clear, but of different ranks.")
    phases = [step_row(0, suspect(0, Phase.ROUTER)), step_row(1, suspect(0, Phase.EXPERT_GEMM))]
    assert summarise([*phases, *calm]).headline.endswith("2 clear, but of different phases.")


def doubtful(steps: range, rank: int, phase: Phase) -> list[StepRow]:
    """Steps that name this place with ambiguous evidence."""
    return [step_row(step, suspect(rank, phase), evidence=Evidence.AMBIGUOUS) for step in steps]


def test_places_named_often_but_never_surely_are_told_with_the_doubt() -> None:
    """Two faults at once leave every step ambiguous: both are told, each with its cause's advice."""
    steps = [
        *doubtful(range(35), 0, Phase.PERMUTE),
        *doubtful(range(35, 45), 1, Phase.UNPERMUTE),
        *doubtful(range(45, 47), 1, Phase.ROUTER),
        *(step_row(step) for step in range(47, 55)),
    ]
    summary = summarise(steps)
    assert not summary.outstanding
    assert "rank 0 in permute (64 % of steps" in summary.remark
    assert "rank 1 in unpermute (18 % of steps" in summary.remark
    assert [advice.partition(". ")[0] for advice in summary.next_steps] == [
        "Rank 0 in permute is named in 64 % of steps, never surely: rows do not explain the time of rank 0",
        "Rank 1 in unpermute is named in 18 % of steps, never surely: rows do not explain the time of rank 1",
    ]
    once_sure = [step_row(60, suspect(0, Phase.PERMUTE)), *steps]
    assert "of steps, surely only in 1 of 36: " in summarise(once_sure).next_steps[0]


def test_places_named_now_and_then_are_nothing_to_act_on() -> None:
    """Calm steps name one place or another at times: no advice comes of it."""
    steps = [*doubtful(range(10), 0, Phase.ROUTER), *(step_row(step) for step in range(10, 60))]
    assert "Nothing here is sure enough to act on" in summarise(steps).next_steps[0]
    assert "critical path" in summarise(steps).next_steps[0]


def test_intermittent_fault_is_sure_by_the_steps_that_name_it() -> None:
    """Clear in 9 of the 11 steps that name it is sure, however many other steps were calm."""
    calm = [step_row(step) for step in range(20, 60)]
    fault = [step_row(step, suspect(2, Phase.ROUTER)) for step in range(9)]
    summary = summarise([*fault, *doubtful(range(9, 11), 2, Phase.ROUTER), *calm])
    assert summary.outstanding
    assert not any("Less than half" in advice for advice in summary.next_steps)


def test_place_that_is_mostly_doubtful_is_to_be_recorded_longer() -> None:
    """Where most of the steps that name the headline's place are ambiguous, the advice says so."""
    fault = [step_row(step, suspect(2, Phase.ROUTER)) for step in range(4)]
    summary = summarise([*fault, *doubtful(range(4, 20), 2, Phase.ROUTER)])
    assert summary.next_steps[-1].startswith(
        "Less than half of the steps that name rank 2 in router are clear: record more"
    )


def test_one_rank_is_told_that_none_can_be_compared_and_where_time_goes() -> None:
    """With one rank no recording names a slow one: the summary says so, and gives the time by phase."""
    phase_ns = {Phase.OUTSIDE: 28_000_000, Phase.EXPERT_GEMM: 72_000_000}
    summary = summarise([replace(step_row(step), world_size=1, phase_ns=phase_ns) for step in range(3)])
    assert summary.headline == (
        "No rank can be compared with another: the run has one rank, and recording more cannot change that."
    )
    assert summary.remark == "Median time by phase: expert_gemm 72.0 ms, outside 28.0 ms."
    assert len(summary.next_steps) == 1
    assert "cannot name a slow one" in summary.next_steps[0]


def test_run_without_exchanges_is_told_that_none_can_be_compared() -> None:
    """Without an exchange in any step no recording names a slow rank; one exchange is enough to differ."""
    nothing = JoinedStep(
        run_id="run", step=0, world_size=2, rank_steps=(), missing_ranks=(), closed_by=ClosedBy.COMPLETE
    )
    reason = VerdictEngine().judge(nothing).reason
    assert reason.startswith(NO_EXCHANGE_REASON)
    alone = [step_row(step, reason=reason) for step in range(3)]
    summary = summarise(alone)
    assert "no step has an exchange between ranks, and recording more cannot change that" in summary.headline
    assert "expert_gemm 100 ms" in summary.remark
    assert "check that the model's dispatch and combine between ranks are traced" in summary.next_steps[0]
    assert summarise([*alone, step_row(3)]).headline.startswith("No rank stands out")
    partial = [step_row(step, reason=reason, missing_ranks=(1,)) for step in range(3)]
    assert summarise(partial).headline.startswith("Rank 1 missing from 3 of 3 steps. No rank can be named")


def test_run_whose_ranks_do_not_say_their_group_is_told_to_say_it() -> None:
    """Exchanges without a group are no missing exchanges: recording goes on being of use once it is told."""
    alone = tuple(
        replace(one, ep_group=one.rank, ep_rank=0, ep_size=1)
        for one in SyntheticRun(run_id="run", world_size=2, num_layers=1).step(0)
    )
    joined = JoinedStep(
        run_id="run", step=0, world_size=2, rank_steps=alone, missing_ranks=(), closed_by=ClosedBy.COMPLETE
    )
    reason = VerdictEngine().judge(joined).reason
    assert reason.startswith(NO_GROUP_REASON)
    summary = summarise([step_row(step, reason=reason) for step in range(3)])
    assert "there are exchanges, but ranks say that they have no expert-parallel group" in summary.headline
    assert "no step has an exchange" not in summary.headline
    assert summary.next_steps[0].startswith("Say the group: moetrace.init(ep_rank=")


def test_one_step_is_singular() -> None:
    """Counts and their nouns agree."""
    assert summarise([step_row(0)]).headline == (
        "No rank stands out: evidence over 1 step is 1 insufficient."
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
    assert summary.headline == "No step outside warm-up has been joined."
    assert summary.next_steps == ()
    assert summary.step_p95_ns == 0


def test_steps_without_a_verdict_show_the_reason_and_no_length_of_zero() -> None:
    """Where most steps were not judged the headline is why, and recording more is no advice."""
    reason = "Two jobs send under this run id."
    rows = [step_row(step, reason=reason, step_ms=0) for step in range(3)]
    summary = summarise(rows)
    assert summary.headline == f"No rank can be named in 3 of 3 steps: {reason}"
    assert not any("record more" in advice for advice in summary.next_steps)
    assert (length_text(summary.step_median_ns), length_text(1_000_000)) == ("-", "1.00 ms")
    # One step of them was judged: its length is the median of those that have one, as is its time by phase.
    summary = summarise([*rows, step_row(3, step_ms=50)])
    assert (summary.step_median_ns, summary.phase_median_ns) == (50_000_000, {Phase.EXPERT_GEMM: 50_000_000})
    assert "No rank stands out" in summarise([step_row(step) for step in range(3)]).headline


def test_a_dead_rank_leads_the_headline() -> None:
    """Missing from many steps or, while it runs, the newest three; a straggler here and there is none."""
    dead = [step_row(step, missing_ranks=(1,)) for step in range(3)]
    assert summarise(dead).headline.startswith("Rank 1 missing from 3 of 3 steps.")
    assert "Rank 1: see whether the process still runs" in summarise(dead).next_steps[0]
    calm = [step_row(step) for step in range(100)]
    newly = [step_row(step, missing_ranks=(1,)) for step in range(100, 103)]
    said = summarise([*calm, *newly], goes_on=True).headline
    assert said.startswith("Rank 1 missing from 3 of 103 steps.")
    straggler = step_row(50, missing_ranks=(2,))
    assert "missing" not in summarise([*calm[:50], straggler, *calm[51:]]).headline
    slow = [step_row(step, suspect(0, Phase.ROUTER), missing_ranks=(1,)) for step in range(3)]
    assert "Rank 0 in router" in summarise(slow).headline


def test_last_steps_of_a_run_that_may_be_over_are_no_dead_rank() -> None:
    """Three of many are what an exit leaves behind; a rank that was gone for longer has died."""
    calm = [step_row(step) for step in range(1_000)]
    for steps, is_said in ((3, False), (20, True)):
        newly = [step_row(1_000 + step, missing_ranks=(3,)) for step in range(steps)]
        summary = summarise([*calm, *newly])
        assert ("missing" in summary.headline) is is_said
        assert summary.next_steps[-1].startswith("Rank 3: see" if is_said else "Ranks are missing from some")


def test_missing_ranks_that_are_not_listed_are_counted() -> None:
    """Headline and advice say how many more there are, and the least that any of them is missing from."""
    steps = [step_row(step, missing_ranks=tuple(range(20, 52))) for step in range(40)]
    summary = summarise(steps)
    assert summary.headline.startswith(
        "Rank 20 missing from 40 of 40 steps, rank 21 missing from 40 of 40 steps, "
        "rank 22 missing from 40 of 40 steps, 29 more ranks missing from all of them."
    )
    assert summary.next_steps[-1].startswith(
        "Ranks 20, 21, 22, 23, 24, 25, 26, 27 and 24 more (missing from 40 steps or more): see whether"
    )
    # Rank r from 0 is missing from the first 40 - r steps: those missing most are named first.
    falling = [step_row(step, missing_ranks=tuple(range(40 - step))) for step in range(40)]
    summary = summarise(falling)
    assert ", 34 more ranks missing from 4 or more." in summary.headline
    assert "5, 6, 7 and 29 more (missing from 4 steps or more)" in summary.next_steps[-1]
