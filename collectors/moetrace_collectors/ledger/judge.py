"""Judges every change of placement as it runs: keeps recent steps, compares at doubling numbers of them.

Each look is another chance to be wrong, so the interval is wider than that of one look: 99 %.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moetrace_collectors.ledger.comparison import MIN_STEPS, Comparison, Thresholds, compare
from moetrace_collectors.ledger.samples import Side, StepSamples
from moetrace_collectors.model import JoinedStep, LayerLoad, StepVerdict
from moetrace_schemas.enums import COUNT_KIND_BY_CODE, PHASE_BY_CODE, ChangeVerdict, CountKind, Phase
from moetrace_schemas.placement import PlacementTerms

MAX_STEPS = 1_000
"""Steps of each forward mode that are kept of an epoch; a look at so many takes a third of a second."""
MAX_RUNS = 64
CONFIDENCE = 0.99
SETTLE_STEPS = 5
_GEMM = next(code for code, phase in PHASE_BY_CODE.items() if phase is Phase.EXPERT_GEMM)
_LOST = tuple(
    code for code, kind in COUNT_KIND_BY_CODE.items() if kind in (CountKind.DROPPED, CountKind.INVALID)
)

Sample = tuple[int, int, int, int, int, int]
"""(step, unix ns, step ns, rows, pairs, lost pairs)"""


@dataclass(slots=True)
class _Epoch:
    version: int
    first_step: int
    by_mode: dict[str, deque[Sample]] = field(default_factory=dict)
    steps: int = 0

    def side(self) -> Side:
        return Side(
            label=f"version {self.version}",
            version=self.version,
            steps={mode: _samples(kept) for mode, kept in self.by_mode.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEpoch:
    """An epoch of which another process has seen steps."""

    version: int
    first_step: int
    num_steps: int
    """Steps that were taken; of them MAX_STEPS of each forward mode were kept."""
    by_mode: Mapping[str, Sequence[Sample]]
    """The newest of them, by step."""

    def kept(self) -> _Epoch:
        """As the process kept it."""
        by_mode = {mode: deque(samples, maxlen=MAX_STEPS) for mode, samples in self.by_mode.items()}
        return _Epoch(version=self.version, first_step=self.first_step, by_mode=by_mode, steps=self.num_steps)


@dataclass(slots=True)
class _Run:
    now: _Epoch
    before: _Epoch | None = None
    next_look: int = MIN_STEPS
    terms: PlacementTerms = field(default_factory=PlacementTerms)


class ChangeJudge:
    """Watches the runs of one collector."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._terms: OrderedDict[tuple[str, int], PlacementTerms] = OrderedDict()

    def announce(self, run_id: str, version: int, terms: PlacementTerms) -> None:
        """The terms of an epoch that will begin."""
        self._terms[(run_id, version)] = terms
        if len(self._terms) > MAX_RUNS:
            self._terms.popitem(last=False)
        run = self._runs.get(run_id)
        if run is not None and run.now.version == version:
            run.terms = terms

    def knows(self, run_id: str) -> bool:
        """Whether a step of this run was taken, or what came before is known otherwise."""
        return run_id in self._runs

    def resume(self, run_id: str, now: PastEpoch, before: PastEpoch | None) -> None:
        """Go on where another process stopped.

        Args:
            run_id: the run.
            now: its current epoch as far as it has come.
            before: the epoch that it is still compared with; None where there is none, or it was judged.
        """
        run = _Run(now=now.kept(), before=None if before is None else before.kept())
        run.terms = self._terms.get((run_id, now.version), run.terms)
        while run.next_look <= run.now.steps:
            run.next_look *= 2
        self._keep(run_id, run)

    def take(
        self, joined: JoinedStep, verdict: StepVerdict, loads: Sequence[LayerLoad], version: int
    ) -> tuple[int, Comparison] | None:
        """A joined step; the judged version and its comparison where there is one to write down.

        An epoch is judged once: when the evidence is enough, or, when another one begins, with what there
        was.
        """
        if verdict.warmup or verdict.missing_ranks or verdict.step_ns <= 0:
            return None
        if any(rank_step.placement_version != version for rank_step in joined.rank_steps):
            return None
        run = self._runs.get(joined.run_id)
        result = None
        if run is None:
            run = self._begin(joined, version, None)
            self._keep(joined.run_id, run)
        elif run.now.version != version:
            if joined.step < run.now.first_step:
                return None  # a straggler of the epoch before
            if run.before is not None:
                result = (run.now.version, self._compare(run))
            self._runs[joined.run_id] = run = self._begin(joined, version, run.now)
        self._runs.move_to_end(joined.run_id)
        if run.before is None or joined.step >= run.now.first_step + SETTLE_STEPS:
            kept = run.now.by_mode.setdefault(verdict.forward_mode.value, deque(maxlen=MAX_STEPS))
            kept.append(_sample(joined, verdict, loads))
            run.now.steps += 1
        if run.before is not None and run.now.steps >= run.next_look:
            run.next_look *= 2
            found = self._compare(run)
            if found.verdict is not ChangeVerdict.NOT_ENOUGH_EVIDENCE:
                run.before = None
                return version, found
        return result

    def _keep(self, run_id: str, run: _Run) -> None:
        self._runs[run_id] = run
        self._runs.move_to_end(run_id)
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)

    def _begin(self, joined: JoinedStep, version: int, before: _Epoch | None) -> _Run:
        terms = self._terms.get((joined.run_id, version))
        return _Run(
            now=_Epoch(version=version, first_step=joined.step),
            before=before,
            terms=PlacementTerms() if terms is None else terms,
        )

    @staticmethod
    def _compare(run: _Run) -> Comparison:
        assert run.before is not None
        limits = Thresholds(
            max_slowdown=run.terms.max_slowdown,
            max_error_rate=run.terms.max_error_rate,
            confidence=CONFIDENCE,
        )
        return compare(run.before.side(), run.now.side(), limits, rollback_version=run.terms.rollback_version)


def _sample(joined: JoinedStep, verdict: StepVerdict, loads: Sequence[LayerLoad]) -> Sample:
    rows = lost = 0
    for rank_step in joined.rank_steps:
        phases = rank_step.phases
        worked = (phases.phase == _GEMM) & (phases.rows > 0)
        rows += int(phases.rows[worked].sum())
        lost += sum(int(entry.counts.sum()) for entry in rank_step.experts if entry.kind in _LOST)
    begun = min(rank_step.start_unix_ns for rank_step in joined.rank_steps)
    return joined.step, begun, verdict.step_ns, rows, sum(load.tokens for load in loads), lost


def _samples(kept: deque[Sample]) -> StepSamples:
    table = np.array(kept, dtype=np.float64).reshape(-1, 6)
    nothing = np.zeros(len(table))
    return StepSamples(
        step=table[:, 0].astype(np.int64),
        time_ns=np.array([sample[1] for sample in kept], dtype=np.int64),
        step_ns=table[:, 2],
        rows=table[:, 3],
        pairs=table[:, 4],
        lost_pairs=table[:, 5],
        sent_rows=nothing,
        cross_rows=nothing,
    )
