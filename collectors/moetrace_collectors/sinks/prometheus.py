"""Joined steps -> the catalogue's metrics, within a hard budget of series.

Per-expert counters exist for every (layer, expert) of a run while they fit the budget of the whole
collector. A run that does not fit shows, per layer, its hottest experts by slot (slot 0 = hottest of
the step; `moetrace_expert_slot_id` says which expert that was) and the rest as slot `other`. Full detail
is in ClickHouse either way. Warm-up steps are left out.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import numpy as np

from moetrace_collectors.events import CollectorEvent
from moetrace_collectors.model import IntArray, RankStep, StepVerdict
from moetrace_collectors.series import EXCHANGE_BUCKETS, SeriesBook
from moetrace_collectors.sinks.base import StepResult
from moetrace_collectors.sinks.exchange_overlap import exchange_time_ns
from moetrace_collectors.sinks.exchange_scope import rows_by_scope
from moetrace_collectors.sinks.group_series import GroupSeries
from moetrace_schemas import metrics
from moetrace_schemas.enums import (
    COUNT_KIND_BY_CODE,
    ROUTING_VIOLATION_BY_CODE,
    CountKind,
    Evidence,
    Phase,
)

NS_PER_S = 1e9
HOT_SLOTS = 8
"""Slots per layer for a run whose experts do not fit the budget."""
OTHER_SLOT = "other"
MAX_RUNS = 16
"""Runs with series at a time; the one that was silent longest is forgotten for a new one."""
NOBODY = "none"
"""Phase label of a verdict that names nobody."""
_EXCHANGES = (Phase.DISPATCH, Phase.COMBINE)
_EXCLUDED = {
    code: kind.value
    for code, kind in COUNT_KIND_BY_CODE.items()
    if kind not in (CountKind.ROUTED, CountKind.RECEIVED, CountKind.EXECUTED, CountKind.PHYSICAL)
}
_ROUTED = next(code for code, kind in COUNT_KIND_BY_CODE.items() if kind is CountKind.ROUTED)

Layer = tuple[str, int]
"""(forward mode, layer)"""


class PrometheusSink:
    """Updates the series at once; nothing is buffered, nothing can fail."""

    name = "prometheus"
    num_waiting_steps = 0
    num_taken = num_written = 0
    """Nothing of it needs writing."""

    def __init__(self, book: SeriesBook, *, series_budget: int) -> None:
        """Make the domain metrics in `book`.

        Args:
            book: of the collector.
            series_budget: label sets of all per-expert metrics together.
        """
        self._book = book
        self._budget = series_budget
        self._used = 0
        self._runs: OrderedDict[str, dict[Layer, int]] = OrderedDict()
        self._step_seconds = book.histogram(metrics.STEP_SECONDS)
        self._critical_path = book.counter(metrics.CRITICAL_PATH_SECONDS_TOTAL)
        self._extension = book.counter(metrics.EXTENSION_SECONDS_TOTAL)
        self._verdicts = book.counter(metrics.VERDICTS_TOTAL)
        self._critical_steps = book.counter(metrics.CRITICAL_STEPS_TOTAL)
        self._worth = book.counter(metrics.WORTH_SECONDS_TOTAL)
        self._transfer = book.counter(metrics.TRANSFER_SECONDS_TOTAL)
        self._wait = book.counter(metrics.WAIT_SECONDS_TOTAL)
        self._expert_tokens = book.counter(metrics.EXPERT_TOKENS_TOTAL)
        self._slot_tokens = book.counter(metrics.EXPERT_SLOT_TOKENS_TOTAL)
        self._slot_id = book.gauge(metrics.EXPERT_SLOT_ID)
        self._expert_imbalance = book.gauge(metrics.EXPERT_LOAD_IMBALANCE_RATIO)
        self._rank_imbalance = book.gauge(metrics.RANK_LOAD_IMBALANCE_RATIO)
        self._excluded = book.counter(metrics.EXCLUDED_PAIRS_TOTAL)
        self._routed = book.counter(metrics.ROUTED_PAIRS_TOTAL)
        self._expert_cv = book.gauge(metrics.EXPERT_LOAD_CV_RATIO)
        self._cause_steps = book.counter(metrics.CRITICAL_CAUSE_STEPS_TOTAL)
        self._missing = book.counter(metrics.MISSING_RANK_STEPS_TOTAL)
        self._exchange_transfer = book.histogram(metrics.EXCHANGE_TRANSFER_SECONDS, EXCHANGE_BUCKETS)
        self._exchange_rows = book.counter(metrics.EXCHANGE_ROWS_TOTAL)
        self._exchange_time = book.counter(metrics.EXCHANGE_RANK_SECONDS_TOTAL)
        self._placement = book.gauge(metrics.PLACEMENT_VERSION)
        self._previous_placement = book.gauge(metrics.PLACEMENT_PREVIOUS_VERSION)
        self._run_info = book.gauge(metrics.RUN_INFO)
        self._groups = GroupSeries(book)
        self._violations = book.counter(metrics.ROUTING_VIOLATIONS_TOTAL)
        self._coverage = book.gauge(metrics.RANK_SITE_COVERAGE_RATIO)
        self._placements: dict[str, int] = {}

    def take_step(self, result: StepResult) -> None:
        """See Sink."""
        verdict = result.verdict
        if verdict.warmup:
            return
        self._keep_run(verdict.run_id)
        self._take_verdict(verdict)
        for load in result.loads:
            labels = (verdict.run_id, str(load.layer), load.forward_mode.value)
            self._expert_imbalance.set(load.max_mean_ratio, labels)
            self._expert_cv.set(load.cv, labels)
            if load.rank_max_mean_ratio > 0:
                self._rank_imbalance.set(load.rank_max_mean_ratio, labels)
        self._take_experts(verdict.run_id, result.joined.rank_steps)
        self._take_run(verdict.run_id, result.joined.rank_steps)
        self._groups.take(result)
        self._take_receipts(result)

    def take_unjoined(self, rank_step: RankStep) -> None:
        """See Sink: nothing is known of its step here, so the metrics of steps are not there."""

    def take_late(self, rank_step: RankStep) -> None:
        """See Sink: a verdict was given without it, so it is not counted into anything."""

    def take_event(self, event: CollectorEvent) -> None:
        """See Sink: the collector's own metrics count events."""

    def is_due(self, now_ns: int) -> bool:
        """See Sink."""
        return False

    def flush(self) -> None:
        """See Sink."""

    def abandon(self) -> None:
        """See Sink."""

    def _keep_run(self, run_id: str) -> None:
        if run_id in self._runs:
            self._runs.move_to_end(run_id)
            return
        if len(self._runs) >= MAX_RUNS:
            oldest, layers = self._runs.popitem(last=False)
            self._used -= sum(layers.values())
            self._placements.pop(oldest, None)
            self._groups.forget_run(oldest)
            self._book.forget_run(oldest)
        self._runs[run_id] = {}

    def _take_verdict(self, verdict: StepVerdict) -> None:
        run_id, mode = verdict.run_id, verdict.forward_mode.value
        self._step_seconds.observe(verdict.step_ns / NS_PER_S, (run_id, mode))
        for phase, duration_ns in verdict.phase_ns.items():
            if duration_ns > 0:
                self._critical_path.add(duration_ns / NS_PER_S, (run_id, phase.value, mode))
        # Summed first: a step has hundreds of exchanges, and every series is found by its labels.
        extension: defaultdict[tuple[int, Phase], int] = defaultdict(int)
        transfer: defaultdict[Phase, int] = defaultdict(int)
        wait: defaultdict[Phase, int] = defaultdict(int)
        for barrier in verdict.barriers:
            if barrier.releaser_rank >= 0 and barrier.extension_ns > 0:
                extension[barrier.releaser_rank, barrier.work_phase] += barrier.extension_ns
            if barrier.phase in _EXCHANGES:
                transfer[barrier.phase] += barrier.transfer_ns
                wait[barrier.phase] += barrier.wait_sum_ns
                labels = (run_id, barrier.phase.value, mode)
                self._exchange_transfer.observe(barrier.transfer_ns / NS_PER_S, labels)
        for (rank, phase), sum_ns in extension.items():
            self._extension.add(sum_ns / NS_PER_S, (run_id, str(rank), phase.value))
        for phase in transfer:
            self._transfer.add(transfer[phase] / NS_PER_S, (run_id, phase.value))
            self._wait.add(wait[phase] / NS_PER_S, (run_id, phase.value))
        for rank in verdict.missing_ranks:
            self._missing.add(labels=(run_id, str(rank)))
        suspect = verdict.suspect
        named = suspect.phase.value if suspect else NOBODY
        self._verdicts.add(labels=(run_id, verdict.evidence.value, verdict.cause.value, named))
        if suspect is not None and verdict.evidence is Evidence.CLEAR:
            labels = (run_id, str(suspect.rank), suspect.phase.value)
            self._critical_steps.add(labels=labels)
            self._worth.add(max(suspect.worth_ns, 0) / NS_PER_S, labels)
            self._cause_steps.add(labels=(*labels, verdict.cause.value))

    def _take_run(self, run_id: str, rank_steps: tuple[RankStep, ...]) -> None:
        for (phase, scope), rows in rows_by_scope(rank_steps).items():
            self._exchange_rows.add(rows, (run_id, phase, scope))
        for (phase, overlap), time_ns in exchange_time_ns(rank_steps).items():
            self._exchange_time.add(time_ns / NS_PER_S, (run_id, phase, overlap))
        first = rank_steps[0]
        self._run_info.set(1, (run_id, first.model_name, first.model_version))
        # Ranks switch within a step of each other; the newest epoch is the one being rolled out.
        version = max(rank_step.placement_version for rank_step in rank_steps)
        before = self._placements.get(run_id)
        if before and before != version:
            self._previous_placement.set(before, (run_id,))
        self._placements[run_id] = version
        self._placement.set(version, (run_id,))

    def _take_receipts(self, result: StepResult) -> None:
        run_id = result.joined.run_id
        for rank_step in result.joined.rank_steps:
            for entry in rank_step.violations:
                self._violations.add(entry.count, (run_id, ROUTING_VIOLATION_BY_CODE[entry.violation].value))
            if rank_step.expected_sites:
                ratio = rank_step.seen_sites / rank_step.expected_sites
                self._coverage.set(ratio, (run_id, str(rank_step.rank)))
        for found in result.violations:
            self._violations.add(found.count, (run_id, found.violation.value))

    def _take_experts(self, run_id: str, rank_steps: tuple[RankStep, ...]) -> None:
        routed: dict[Layer, IntArray] = {}
        excluded: defaultdict[str, int] = defaultdict(int)
        for rank_step in rank_steps:
            for entry in rank_step.experts:
                if entry.kind in _EXCLUDED:
                    excluded[_EXCLUDED[entry.kind]] += int(entry.counts.sum())
                elif entry.kind == _ROUTED:
                    layer = (rank_step.forward_mode.value, entry.layer)
                    self._routed.add(int(entry.counts.sum()), (run_id, rank_step.forward_mode.value))
                    before = routed.get(layer)
                    routed[layer] = entry.counts if before is None else _add(before, entry.counts)
        for reason, pairs in excluded.items():
            self._excluded.add(pairs, (run_id, reason))
        layers = self._runs[run_id]
        fresh = {layer: len(counts) for layer, counts in routed.items() if layer not in layers}
        if fresh:
            self._decide(layers, fresh)
        for layer, counts in routed.items():
            if layers[layer] >= len(counts):
                self._export_experts(run_id, layer, counts)
            else:
                self._export_slots(run_id, layer, counts)

    def _decide(self, layers: dict[Layer, int], fresh: dict[Layer, int]) -> None:
        """Give new layers their budget: all experts of all of them, else slots, else nothing."""
        whole = sum(fresh.values())
        fits = self._used + whole <= self._budget
        for layer, num_experts in fresh.items():
            # A slot is two series (tokens and id), and there is one `other`.
            share = num_experts if fits else min(2 * HOT_SLOTS + 1, num_experts - 1)
            if self._used + share > self._budget:
                share = 0
            layers[layer] = share
            self._used += share

    def _export_experts(self, run_id: str, layer: Layer, counts: IntArray) -> None:
        mode, number = layer
        for expert, pairs in enumerate(counts.tolist()):
            self._expert_tokens.add(pairs, (run_id, str(number), str(expert), mode))

    def _export_slots(self, run_id: str, layer: Layer, counts: IntArray) -> None:
        mode, number = layer
        num_slots = (self._runs[run_id][layer] - 1) // 2
        if num_slots < 1:
            self._book.refuse(metrics.EXPERT_SLOT_TOKENS_TOTAL)
            return
        hottest = np.argsort(-counts, kind="stable")[:num_slots].tolist()
        for slot, expert in enumerate(hottest):
            labels = (run_id, str(number), str(slot), mode)
            self._slot_tokens.add(int(counts[expert]), labels)
            self._slot_id.set(expert, labels)
        rest = int(counts.sum()) - int(counts[hottest].sum())
        self._slot_tokens.add(rest, (run_id, str(number), OTHER_SLOT, mode))


def _add(one: IntArray, other: IntArray) -> IntArray:
    if len(one) == len(other):
        return one + other
    # Ranks should agree on the number of experts; where they do not, the longer one says it.
    total = np.zeros(max(len(one), len(other)), dtype=np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total
