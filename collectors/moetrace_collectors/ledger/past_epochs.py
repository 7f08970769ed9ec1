"""What a judge of changes had seen before its process ended, read back from ledger and verdicts.

::

    ledger      applied 1          applied 2            (judged 2?)
    verdicts    steps under 1      steps under 2 so far
                  | before           | now
                  `------------------+--> ChangeJudge.resume: goes on as if it had never stopped
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrace_collectors.ledger import past_queries as queries
from moetrace_collectors.ledger.chain import LedgerRow
from moetrace_collectors.ledger.client_store import ClientLedgerStore
from moetrace_collectors.ledger.judge import CONFIDENCE, MAX_STEPS, SETTLE_STEPS, PastEpoch, Sample
from moetrace_collectors.ledger.transition import part_of
from moetrace_collectors.store_questions import Ask, in_questions

NO_END = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What to resume from."""

    now: PastEpoch
    before: PastEpoch | None
    """None where there was none, or the change to `now` has a verdict."""


def read_past(ledger: ClientLedgerStore, ask: Ask, run_id: str) -> Past | None:
    """The newest epoch of a run with a step that has a verdict, and the one before; None where none has."""
    applied = ledger.last_applied(run_id)
    ends = [NO_END, *(row.step or 0 for row in applied)]
    for number, current in enumerate(applied):
        has_before = number + 1 < len(applied)
        now = _read(ask, run_id, current, end=ends[number], settles=has_before)
        if now is None:
            # It has begun, and the process ended before its first verdict was written.
            continue
        before = None
        if has_before and not _is_judged(ledger, current):
            settles = number + 2 < len(applied)
            before = _read(ask, run_id, applied[number + 1], end=ends[number + 1], settles=settles)
        return Past(now=now, before=before)
    return None


def _is_judged(ledger: ClientLedgerStore, applied: LedgerRow) -> bool:
    """Whether a judge that looks as a change runs has said what it is; people have another confidence."""
    return any(
        row.sequence > applied.sequence and _confidence(row) == CONFIDENCE
        for row in ledger.judged(applied.run_id, applied.version)
    )


def _confidence(judged: LedgerRow) -> object:
    try:
        return part_of(judged, "thresholds").get("confidence")
    except ValueError:
        return None  # changed by somebody, which `moetrace placement verify` says


def _read(ask: Ask, run_id: str, applied: LedgerRow, *, end: int, settles: bool) -> PastEpoch | None:
    """Steps of an epoch.

    Args:
        ask: the store.
        run_id: the run.
        applied: how the epoch began.
        end: the step at which the next one began.
        settles: whether an epoch was before it, so that its first steps are not compared.
    """
    bounds = {"run": run_id, "version": applied.version, "end": end}
    [first] = ask(queries.FIRST, {**bounds, "first": applied.step or 0})
    if not int(first["steps"]):
        return None
    first_step = int(first["first_step"])
    settled = first_step + (SETTLE_STEPS if settles else 0)
    steps = ask(queries.STEPS, {**bounds, "first": settled, "limit": MAX_STEPS})
    counts = _counts(ask, run_id, [int(row["step"]) for row in steps])
    by_mode: dict[str, list[Sample]] = {}
    num_steps: dict[str, int] = {}
    for row in sorted(steps, key=lambda row: int(row["step"])):
        step, mode = int(row["step"]), str(row["mode"])
        by_mode.setdefault(mode, []).append(
            (step, int(row["begun_ns"]), int(row["step_ns"]), *counts.get(step, (0, 0, 0)))
        )
        num_steps[mode] = int(row["steps_of_mode"])
    return PastEpoch(
        version=applied.version,
        first_step=first_step,
        num_steps=sum(num_steps.values()),
        by_mode=by_mode,
    )


def _counts(ask: Ask, run_id: str, steps: list[int]) -> dict[int, tuple[int, int, int]]:
    """Rows that experts worked on, pairs routed, and pairs lost, by step."""
    found: dict[int, tuple[int, int, int]] = {}
    for _, asked in in_questions((run_id, step) for step in steps):
        named = {"run": run_id, "steps": asked}
        worked = {int(row["step"]): int(row["worked_rows"]) for row in ask(queries.WORKED, named)}
        pairs = {
            int(row["step"]): (int(row["pairs"]), int(row["lost_pairs"])) for row in ask(queries.PAIRS, named)
        }
        found |= {step: (worked.get(step, 0), *pairs.get(step, (0, 0))) for step in asked}
    return found
