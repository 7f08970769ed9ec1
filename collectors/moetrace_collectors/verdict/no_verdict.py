"""The verdict of a step about which nothing can be said, and the sentences that say why."""

from __future__ import annotations

from moetrace_collectors.model import JoinedStep, StepVerdict
from moetrace_schemas.enums import Cause, Evidence

TWO_JOBS = (
    "Two jobs send under this run id, or one that was started again within a minute, so that the step may be "
    "of both; give each an id of its own."
)
EXECUTED_AGAIN = (
    "The step was executed again under this run id, so that its rows may be of both times; give each run an "
    "id of its own."
)


def no_verdict(joined: JoinedStep, reason: str) -> StepVerdict:
    """Evidence insufficient, for this reason."""
    first = joined.rank_steps[0]
    return StepVerdict(
        run_id=joined.run_id,
        step=joined.step,
        forward_mode=first.forward_mode,
        evidence=Evidence.INSUFFICIENT,
        reason=reason,
        suspect=None,
        cause=Cause.UNKNOWN,
        runner_up=None,
        step_ns=0,
        extension_ns=0,
        missing_ranks=joined.missing_ranks,
        partial=bool(joined.missing_ranks),
        warmup=any(rank_step.warmup for rank_step in joined.rank_steps),
    )
