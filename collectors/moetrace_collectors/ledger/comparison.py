"""Whether a change paid: steps of like size before and after, with confidence intervals, and a verdict. Pure.

A threshold is exceeded only where the whole interval lies above it, and holds only where the whole interval
lies below; everything between is not enough evidence, and so are few steps::

            threshold
                |
     |----|     |                accepted
                |   |-----|      regressed: roll back
           |----|--|             not enough evidence
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetrace_collectors.counted_steps import CountedSteps, counted_steps
from moetrace_collectors.ledger.resampling import (
    Interval,
    difference,
    interval_of,
    relative,
    weighted_quantile,
    weighted_ratio,
)
from moetrace_collectors.ledger.samples import RequestSamples, Side, StepSamples
from moetrace_collectors.model import FloatArray, IntArray
from moetrace_collectors.number_format import count
from moetrace_schemas.enums import ChangeVerdict
from moetrace_schemas.placement import MAX_ERROR_RATE, MAX_SLOWDOWN

MIN_STEPS = 60
"""Steps of like size on each side: three above p95 each."""
MIN_MATCHED = 0.5
"""Part of the steps after the change that must have steps of like size before it."""
SIZE_BAND = 1.1
"""Steps of like size differ by less than this factor in rows."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What still counts as accepted."""

    max_slowdown: float = MAX_SLOWDOWN
    """Rise of p95, as a part of it."""
    max_error_rate: float = MAX_ERROR_RATE
    """Rise of the error rate, absolute."""
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure on both sides."""

    name: str
    unit: str
    before: float
    after: float
    change: Interval
    """after / before - 1 of times and rates; after - before of shares."""
    is_relative: bool
    threshold: float | None = None
    """The most that it may rise; None where it does not decide."""

    @property
    def verdict(self) -> ChangeVerdict | None:
        """What this figure alone says; None where it does not decide."""
        if self.threshold is None:
            return None
        if self.change.low > self.threshold:
            return ChangeVerdict.REGRESSED
        if self.change.high <= self.threshold:
            return ChangeVerdict.ACCEPTED
        return ChangeVerdict.NOT_ENOUGH_EVIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeComparison:
    """One forward mode, or the requests."""

    name: str
    """Forward mode, or "requests"."""
    verdict: ChangeVerdict
    reason: str
    steps_before: int
    steps_after: int
    matched_before: int
    matched_after: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole answer."""

    verdict: ChangeVerdict
    sentence: str
    rollback_version: int | None
    """Where to go back to, if it regressed."""
    before: str
    after: str
    thresholds: Thresholds
    modes: tuple[ModeComparison, ...]
    counted: tuple[tuple[str, CountedSteps], ...] = ()
    """Side and the steps of a forward mode that it has; which of them are of like size, modes say."""
    notes: tuple[str, ...] = ()


def compare(
    before: Side,
    after: Side,
    thresholds: Thresholds | None = None,
    *,
    rollback_version: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Before against after, per forward mode, prefill and decode never mixed.

    Args:
        before: the side to go back to.
        after: the side to judge.
        thresholds: default: p95 +10 %, error rate +2 points.
        rollback_version: where to go back to; default the version of `before`.
        seed: of the resampling.
    """
    limits = thresholds or Thresholds()
    modes = [
        _mode(mode, before.steps.get(mode), after.steps.get(mode), limits, seed)
        for mode in sorted(set(before.steps) | set(after.steps))
    ]
    if before.requests is not None and after.requests is not None:
        modes.append(_requests(before.requests, after.requests, limits, seed))
    verdict = _overall(modes)
    target = before.version if rollback_version is None else rollback_version
    return Comparison(
        verdict=verdict,
        sentence=_sentence(verdict, modes, before.label, after.label, target),
        rollback_version=target if verdict is ChangeVerdict.REGRESSED else None,
        before=before.label,
        after=after.label,
        thresholds=limits,
        modes=tuple(modes),
        counted=tuple(
            (side.label, counted_steps(samples.step.tolist(), kind=mode))
            for side in (before, after)
            for mode, samples in sorted(side.steps.items())
        ),
        notes=(*before.notes, *after.notes),
    )


def match_sizes(before: FloatArray, after: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Weights of the steps on both sides that make the mix of sizes before that of after; 0 = no like step.

    Sizes fall into bands of SIZE_BAND; where no size is known all steps are alike.
    """
    bands = [_bands(rows) for rows in (before, after)]
    low = min(int(band.min()) for band in bands)
    counts_before, counts_after = (
        np.bincount(band - low, minlength=max(int(b.max()) for b in bands) - low + 1) for band in bands
    )
    shared = (counts_before > 0) & (counts_after > 0)
    factor = np.divide(counts_after, counts_before, out=np.zeros(len(shared)), where=shared)
    return factor[bands[0] - low], shared[bands[1] - low].astype(np.float64)


def _bands(rows: FloatArray) -> IntArray:
    # Steps of unknown size are alike among themselves and like no other.
    sizes = np.log(np.maximum(rows, 1.0)) / math.log(SIZE_BAND)
    band: IntArray = np.where(rows > 0, np.floor(sizes), -1).astype(np.int64)
    return band


def _mode(
    mode: str, before: StepSamples | None, after: StepSamples | None, limits: Thresholds, seed: int
) -> ModeComparison:
    counts = (0 if before is None else len(before), 0 if after is None else len(after))
    if before is None or after is None or min(counts) < 1:
        side = "before" if not counts[0] else "after"
        return _undecided(mode, f"no step {side} the change in {mode}", counts, (0, 0))
    weights_before, weights_after = match_sizes(before.rows, after.rows)
    matched = (int((weights_before > 0).sum()), int((weights_after > 0).sum()))
    if min(matched) < MIN_STEPS:
        return _undecided(
            mode,
            f"{count(matched[0], 'step')} before and {matched[1]:,} after are of like size, {MIN_STEPS} of "
            "each needed",
            counts,
            matched,
        )
    if matched[1] < MIN_MATCHED * counts[1]:
        return _undecided(
            mode,
            f"only {matched[1]:,} of {count(counts[1], 'step')} after the change have like ones before it: "
            "the traffic has changed too",
            counts,
            matched,
        )
    # Steps without a like one go, so that blocks are drawn of what is compared.
    before, after = before.select(weights_before > 0), after.select(weights_after > 0)
    weights = (weights_before[weights_before > 0], weights_after[weights_after > 0])
    figures = _step_figures(before, after, weights, limits, seed)
    return _decided(mode, figures, counts, matched)


def _step_figures(
    before: StepSamples,
    after: StepSamples,
    weights: tuple[FloatArray, FloatArray],
    limits: Thresholds,
    seed: int,
) -> list[Figure]:
    sides = (before, after)
    figures = [
        _quantile(
            f"step_p{round(quantile * 100)}",
            "ms",
            (before.step_ns / 1e6, after.step_ns / 1e6),
            quantile,
            weights,
            limits,
            seed,
            threshold=limits.max_slowdown if quantile == 0.95 else None,
        )
        for quantile in (0.5, 0.95, 0.99)
    ]
    if all(bool((side.rows > 0).all()) for side in sides):
        figures.append(
            _ratio(
                "throughput",
                "rows/s",
                [(side.rows, side.step_ns / 1e9) for side in sides],
                weights,
                limits,
                seed,
                is_relative=True,
            )
        )
    if all(side.sent_rows.sum() > 0 for side in sides):
        parts = [(side.cross_rows, side.sent_rows) for side in sides]
        figures.append(_ratio("cross_node_share", "share", parts, weights, limits, seed))
    if all(side.pairs.sum() > 0 for side in sides):
        parts = [(side.lost_pairs, side.pairs + side.lost_pairs) for side in sides]
        figures.append(
            _ratio("error_rate", "share", parts, weights, limits, seed, threshold=limits.max_error_rate)
        )
    return figures


def _requests(before: RequestSamples, after: RequestSamples, limits: Thresholds, seed: int) -> ModeComparison:
    counts = (len(before), len(after))
    if min(counts) < MIN_STEPS:
        return _undecided(
            "requests",
            f"{count(counts[0], 'request')} before and {counts[1]} after, {MIN_STEPS} of each are needed",
            counts,
            counts,
        )
    figures: list[Figure] = []
    for name in ("ttft", "tpot"):
        told = [getattr(side, f"{name}_ms") for side in (before, after)]
        values = [times[np.isfinite(times)] for times in told]
        if min(len(times) for times in values) >= MIN_STEPS:
            ones = (np.ones(len(values[0])), np.ones(len(values[1])))
            figures += [
                _quantile(
                    f"{name}_p{round(quantile * 100)}",
                    "ms",
                    (values[0], values[1]),
                    quantile,
                    ones,
                    limits,
                    seed,
                    threshold=limits.max_slowdown if quantile == 0.95 else None,
                )
                for quantile in (0.5, 0.95)
            ]
    ones = (np.ones(counts[0]), np.ones(counts[1]))
    parts = [(side.failed, np.ones(len(side))) for side in (before, after)]
    figures.append(_ratio("error_rate", "share", parts, ones, limits, seed, threshold=limits.max_error_rate))
    return _decided("requests", figures, counts, counts)


def _quantile(
    name: str,
    unit: str,
    values: tuple[FloatArray, FloatArray],
    quantile: float,
    weights: tuple[FloatArray, FloatArray],
    limits: Thresholds,
    seed: int,
    *,
    threshold: float | None,
) -> Figure:
    statistics = [weighted_quantile(side, quantile) for side in values]
    change = interval_of(
        statistics[0],
        statistics[1],
        weights_before=weights[0],
        weights_after=weights[1],
        combine=relative,
        confidence=limits.confidence,
        seed=seed,
    )
    sides = [float(s(w[np.newaxis])[0]) for s, w in zip(statistics, weights, strict=True)]
    return Figure(
        name=name,
        unit=unit,
        before=sides[0],
        after=sides[1],
        change=change,
        is_relative=True,
        threshold=threshold,
    )


def _ratio(
    name: str,
    unit: str,
    parts: Sequence[tuple[FloatArray, FloatArray]],
    weights: tuple[FloatArray, FloatArray],
    limits: Thresholds,
    seed: int,
    *,
    threshold: float | None = None,
    is_relative: bool = False,
) -> Figure:
    statistics = [weighted_ratio(part, whole) for part, whole in parts]
    change = interval_of(
        statistics[0],
        statistics[1],
        weights_before=weights[0],
        weights_after=weights[1],
        combine=relative if is_relative else difference,
        confidence=limits.confidence,
        seed=seed,
    )
    sides = [float(s(w[np.newaxis])[0]) for s, w in zip(statistics, weights, strict=True)]
    return Figure(
        name=name,
        unit=unit,
        before=sides[0],
        after=sides[1],
        change=change,
        is_relative=is_relative,
        threshold=threshold,
    )


def _undecided(name: str, reason: str, counts: tuple[int, int], matched: tuple[int, int]) -> ModeComparison:
    return ModeComparison(
        name=name,
        verdict=ChangeVerdict.NOT_ENOUGH_EVIDENCE,
        reason=reason,
        steps_before=counts[0],
        steps_after=counts[1],
        matched_before=matched[0],
        matched_after=matched[1],
        figures=(),
    )


def _decided(
    name: str, figures: Sequence[Figure], counts: tuple[int, int], matched: tuple[int, int]
) -> ModeComparison:
    told = [(figure, figure.verdict) for figure in figures if figure.verdict is not None]
    verdict = _worst([each for _, each in told])
    deciding = next(figure for figure, each in told if each is verdict)
    return ModeComparison(
        name=name,
        verdict=verdict,
        reason=_reason(deciding, verdict),
        steps_before=counts[0],
        steps_after=counts[1],
        matched_before=matched[0],
        matched_after=matched[1],
        figures=tuple(figures),
    )


def _worst(verdicts: Sequence[ChangeVerdict]) -> ChangeVerdict:
    for verdict in (ChangeVerdict.REGRESSED, ChangeVerdict.NOT_ENOUGH_EVIDENCE):
        if verdict in verdicts:
            return verdict
    return ChangeVerdict.ACCEPTED if verdicts else ChangeVerdict.NOT_ENOUGH_EVIDENCE


def _overall(modes: Sequence[ModeComparison]) -> ChangeVerdict:
    return _worst([mode.verdict for mode in modes])


def _reason(figure: Figure, verdict: ChangeVerdict) -> str:
    low, high = _percent(figure, figure.change.low), _percent(figure, figure.change.high)
    place = {
        ChangeVerdict.REGRESSED: "all of it above",
        ChangeVerdict.ACCEPTED: "all of it within",
        ChangeVerdict.NOT_ENOUGH_EVIDENCE: "on both sides of",
    }[verdict]
    assert figure.threshold is not None
    return (
        f"{figure.name} changed by {_percent(figure, figure.change.estimate)} (interval {low} to {high}), "
        f"{place} the threshold of {_percent(figure, figure.threshold)}"
    )


def _percent(figure: Figure, part: float) -> str:
    return f"{part * 100:+.1f} {'%' if figure.is_relative else 'points'}"


def _sentence(
    verdict: ChangeVerdict, modes: Sequence[ModeComparison], before: str, after: str, target: int | None
) -> str:
    if not modes:
        return f"not enough evidence: no step of {before} or of {after} is recorded"
    said = next(mode for mode in modes if mode.verdict is verdict)
    where = f"{said.name}: {said.reason}"
    if verdict is ChangeVerdict.ACCEPTED:
        return f"accepted: {after} against {before}; {where}"
    if verdict is ChangeVerdict.REGRESSED:
        to = f"version {target}" if target is not None else before
        return f"regressed -> roll back to {to}; {where}"
    return f"not enough evidence: {where}"
