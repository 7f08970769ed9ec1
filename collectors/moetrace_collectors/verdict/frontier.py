"""What every exchange cost: transfer, waits, releaser, extension, and the frontier of the step.

Second stage of the verdict (pure). For exchange k of one EP group, with w[r, k] the local work of rank r
since exchange k - 1 and d[r, k] its time inside exchange k::

    rank 0  |== work 4 ==|~~~ wait 3 ~~~|= transfer 1 =|      d = 4
    rank 1  |=== work 7 (releaser) =====|= transfer 1 =|      d = 1

    transfer[k]  = min over r of d[r, k]                                           = 1
    wait[r, k]   = d[r, k] - transfer[k]                                           = 3, 0
    frontier     F[k] = F[k-1] + max over r of w[r, k] + transfer[k]               + 8
    extension[k] = max over r of w[r, k] - mean over r of w[r, k]                  = 7 - 5.5 = 1.5

The increments F[k] - F[k-1] sum to the step. The extension belongs to the rank with the most work and to the
phase in which it exceeds the mean of the others most. The waits are the witness: if that rank was late, the
others waited for it. How much of its lead they confirm is

    confirmed[k] = (mean of the others' d - its own d) / (its own w - mean of the others' w), cut to [0, 1]

1 where all ranks leave the exchange together and left the one before together. Where ranks were released
apart (carry-over), or work overlapped with something, or an interval is missing, it falls, and the exchange
is ambiguous below one half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moetrace_collectors.model import BarrierResult, FloatArray, IntArray
from moetrace_collectors.verdict.sequence import NUM_PHASES, BoolArray, GroupSequence
from moetrace_schemas.enums import DIRECTION_BY_CODE, PHASE_BY_CODE, Phase

MIN_CONFIRMED = 0.5
"""Below this part of the lead confirmed by waits, an exchange is ambiguous."""

TOLERANCE_OF_WORK = 0.02
TOLERANCE_OF_TRANSFER = 0.1
"""A lead below these parts of an exchange's work and transfer is a tie: nobody is ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFrontier:
    """Costs of one group's step over exchanges K; the tail is the last one."""

    sequence: GroupSequence
    total_work_ns: IntArray
    """[R, K]: work over all phases."""
    transfer_ns: IntArray
    """[K]"""
    wait_ns: IntArray
    """[R, K]"""
    critical: IntArray
    """[K]: index of the rank with the most work (among equals the one that waited least)."""
    least_waiting: IntArray
    """[K]: index of the rank that waited least."""
    max_work_ns: IntArray
    mean_work_ns: IntArray
    extension_ns: IntArray
    """[K]"""
    work_phase: IntArray
    """[K]: code of the phase with the critical rank's largest excess over the mean of the others."""
    confirmed: FloatArray
    """[K]: part of the lead that the waits confirm; 0 for the tail, which has no witness."""
    ambiguous: BoolArray
    """[K]"""
    told: BoolArray
    """[K]: the releaser is among the ranks that reported; all true where no rank of the group is missing."""

    @property
    def increments_ns(self) -> IntArray:
        """[K]: growth of the frontier at each exchange; sums to `step_ns`."""
        return self.max_work_ns + self.transfer_ns

    @property
    def step_ns(self) -> int:
        """Length of the frontier."""
        return int(self.increments_ns.sum())


def group_frontier(sequence: GroupSequence) -> GroupFrontier:
    """Judge every exchange of one group. `sequence` has at least one rank."""
    work, exchange = sequence.work_ns, sequence.exchange_ns
    num_ranks, num_barriers = exchange.shape
    at = np.arange(num_barriers)
    total = work.sum(axis=2)
    max_work = total.max(axis=0)
    work_sum = total.sum(axis=0)
    mean_work = work_sum // num_ranks
    transfer = exchange.min(axis=0)
    wait = exchange - transfer
    critical = np.where(total == max_work, -exchange, np.iinfo(np.int64).min).argmax(axis=0)
    least_waiting = exchange.argmin(axis=0)

    phase_excess = work[critical, at] - _mean_of_others(work, critical)
    work_phase = phase_excess.argmax(axis=1)

    lead = max_work - _mean_of_others(total[:, :, None], critical)[:, 0]
    lead_by_wait = _mean_of_others(exchange[:, :, None], critical)[:, 0] - exchange[critical, at]
    confirmed = np.clip(lead_by_wait / np.maximum(lead, 1.0), 0.0, 1.0)
    confirmed[-1] = 0.0
    tolerance = TOLERANCE_OF_TRANSFER * transfer + TOLERANCE_OF_WORK * max_work
    # Waits beyond the spread of the work: somebody was released late, or worked where nothing was recorded.
    unexplained = wait.max(axis=0) - (max_work - total.min(axis=0))
    carried = unexplained > np.maximum(tolerance, transfer / 2)
    ambiguous = np.where(lead > tolerance, confirmed < MIN_CONFIRMED, carried)
    ambiguous[-1] = bool(lead[-1] > tolerance[-1])
    ambiguous |= sequence.unmatched
    return GroupFrontier(
        sequence=sequence,
        total_work_ns=total,
        transfer_ns=transfer,
        wait_ns=wait,
        critical=critical,
        least_waiting=least_waiting,
        max_work_ns=max_work,
        mean_work_ns=mean_work,
        extension_ns=max_work - mean_work if num_ranks > 1 else np.zeros_like(max_work),
        work_phase=work_phase,
        confirmed=confirmed,
        ambiguous=ambiguous,
        told=np.ones(num_barriers, dtype=np.bool_),
    )


def _mean_of_others(values: IntArray, chosen: IntArray) -> FloatArray:
    """[R, K, P] -> [K, P]: mean over the ranks other than `chosen[k]`; its own values if it is alone."""
    num_ranks, num_barriers, _ = values.shape
    own = values[chosen, np.arange(num_barriers)]
    if num_ranks == 1:
        return own.astype(np.float64)
    others: FloatArray = (values.sum(axis=0) - own) / (num_ranks - 1)
    return others


def frontier_by_phase(frontier: GroupFrontier) -> dict[Phase, int]:
    """The frontier split by phase, ns: the critical ranks' work, and transfers under the exchange's phase.

    Sums to `frontier.step_ns` exactly.
    """
    sequence = frontier.sequence
    by_phase = sequence.work_ns[frontier.critical, np.arange(len(sequence.keys))].sum(axis=0)
    by_phase += np.bincount(sequence.keys[:, 1], frontier.transfer_ns, NUM_PHASES).astype(np.int64)
    return {PHASE_BY_CODE[code]: int(value) for code, value in enumerate(by_phase.tolist()) if value}


def barrier_results(frontier: GroupFrontier) -> tuple[BarrierResult, ...]:
    """The group's exchanges as records, the tail last."""
    sequence = frontier.sequence
    alone = len(sequence.ranks) < 2
    releaser = np.where(frontier.ambiguous, frontier.least_waiting, frontier.critical)
    releaser[-1] = frontier.critical[-1]
    releasers = np.where(frontier.told, sequence.ranks[releaser], -1)
    figures = zip(
        sequence.keys.tolist(),
        releasers.tolist(),
        frontier.work_phase.tolist(),
        frontier.transfer_ns.tolist(),
        frontier.max_work_ns.tolist(),
        frontier.mean_work_ns.tolist(),
        frontier.extension_ns.tolist(),
        frontier.wait_ns.sum(axis=0).tolist(),
        (frontier.ambiguous | ~frontier.told).tolist(),
        strict=True,
    )
    return tuple(
        BarrierResult(
            ep_group=sequence.ep_group,
            index=k,
            layer=layer,
            phase=PHASE_BY_CODE[phase],
            direction=DIRECTION_BY_CODE[direction],
            microbatch=microbatch,
            ordinal=ordinal,
            releaser_rank=-1 if alone else releaser_rank,
            work_phase=PHASE_BY_CODE[work_phase],
            transfer_ns=transfer,
            max_work_ns=max_work,
            mean_work_ns=mean_work,
            extension_ns=extension,
            wait_sum_ns=wait_sum,
            ambiguous=ambiguous,
        )
        for k, (
            (layer, phase, direction, microbatch, ordinal),
            releaser_rank,
            work_phase,
            transfer,
            max_work,
            mean_work,
            extension,
            wait_sum,
            ambiguous,
        ) in enumerate(figures)
    )
