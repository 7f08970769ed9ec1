"""The CPU time that tracing takes of a step, from pairs of steps: one of a traced model, one of its twin.

Two models of one class hold the very same tensors; the tracer is attached to one of them for the whole
run. A pair is a step of each, one right after the other, in random order, so that whatever changes the
machine's speed for longer than two steps changes both. Of each step the CPU time of the model's thread is
taken, which neither other processes nor waits for other ranks are part of.

What the tracer's own threads do falls on steps of either model, so it cannot be seen in the pairs. Their CPU
time (`moetrace_self_background_seconds_total`) is added instead, all of it, until nothing is queued: as if
the model had to wait for it, which is the most that it can cost. ::

    at 1/N    (1 - 1/N) x mean of (traced - plain) over steps that are sampled out
              + 1/N x mean of (traced - plain) over recorded steps
              + 1/N x background / recorded steps

Recorded steps in which routing is checked (one in `check_steps`) are a kind of their own with their own
weight. Means of a kind are trimmed by a tenth at each end; the 95 % interval is a bootstrap over the pairs of
each kind. Trimming also hides a cost that fewer than one step in ten has, so the same without it stands
beside. Shares are of the plain steps' mean.

Functions of a module or a class that a framework's layers share (grouped products, collectives) are wrapped
for both models: what such a wrapper costs while no step is open is on both sides and is not seen.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import moetrace
from moetrace.self_metrics import SelfMetrics

CHECK_STEPS = moetrace.Config().check_steps
TRIM = 0.1
DRAWS = 2000
QUIET_S = 0.8
"""Longer than a record waits for others to share its request, and the request takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One step of each model; CPU ns of the model's thread."""

    plain_ns: int
    traced_ns: int
    recorded: bool
    checked: bool
    """Whether it is a recorded step whose routing was checked."""

    @property
    def more_ns(self) -> int:
        """What the traced step took more."""
        return self.traced_ns - self.plain_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """All pairs of a run, and what the tracer's threads did meanwhile."""

    pairs: tuple[Pair, ...]
    background_ns: float
    """CPU time per recorded step."""
    check_steps: int
    """Of so many recorded steps, one is checked."""
    dropped: int = 0
    """Recorded steps that were not delivered; 0, or the cost is that of something else."""


def share_tensors(model: Any, twin: Any) -> None:
    """Let `twin`, a model of the same class and configuration, hold the tensors of `model`."""
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        other._parameters.update(module._parameters)
        other._buffers.update(module._buffers)


def measure_pairs(
    tracer: moetrace.Tracer | None,
    run_plain: Callable[[], Any],
    run_traced: Callable[[], Any],
    *,
    pairs: int,
    generator: random.Random,
) -> Pairs:
    """Run pairs of steps; the traced model's forward is a step of its own.

    Without a tracer both are plain: what the pairs say then is how far off they are.
    """
    metrics = SelfMetrics() if tracer is None else tracer.metrics
    check_steps = CHECK_STEPS if tracer is None else tracer.config.check_steps
    for _ in range(3):
        run_plain()
        run_traced()
    time.sleep(QUIET_S)
    before, sampled, found = metrics.background_ns.total(), metrics.steps_sampled, []
    for _ in range(pairs):
        so_far, cpu_ns = metrics.steps_sampled, {}
        for run in (run_plain, run_traced) if generator.random() < 0.5 else (run_traced, run_plain):
            start = time.thread_time_ns()
            run()
            cpu_ns[run] = time.thread_time_ns() - start
        recorded = metrics.steps_sampled > so_far
        found.append(
            Pair(
                plain_ns=cpu_ns[run_plain],
                traced_ns=cpu_ns[run_traced],
                recorded=recorded,
                checked=recorded and so_far % check_steps == 0,
            )
        )
    time.sleep(QUIET_S)
    steps = metrics.steps_sampled - sampled
    spent = metrics.background_ns.total() - before
    return Pairs(
        pairs=tuple(found),
        background_ns=spent / steps if steps else 0.0,
        check_steps=check_steps,
        dropped=metrics.dropped.total(),
    )


def pooled(ranks: Sequence[Pairs]) -> Pairs:
    """The pairs of several ranks as those of one: each rank's steps against its own."""
    return Pairs(
        pairs=tuple(pair for one in ranks for pair in one.pairs),
        background_ns=statistics.mean(one.background_ns for one in ranks),
        check_steps=ranks[0].check_steps,
        dropped=sum(one.dropped for one in ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The cost at one rate of sampling, as shares of a plain step; `low` and `high` bound `all`."""

    plain_ms: float
    model_thread: float
    background: float
    low: float
    high: float
    untrimmed: float
    """`all`, with means over all pairs."""
    num_pairs: tuple[int, ...]
    """Of each kind that counts: sampled out, recorded, recorded and checked."""
    recorded_ms: float
    """CPU time that one recorded step takes more, the background's included; 0.0 at a rate of 0."""

    @property
    def all(self) -> float:
        """Both together."""
        return self.model_thread + self.background


def share(run: Pairs, rate: float, draws: int = DRAWS) -> Share:
    """The cost where a share `rate` of all steps is recorded, 0.0 to 1.0.

    Raises:
        ValueError: no pair of a kind that the rate asks for.
    """
    weighed = []
    for name, weight, pairs in (
        ("sampled out", 1 - rate, [pair for pair in run.pairs if not pair.recorded]),
        (
            "recorded",
            rate * (1 - 1 / run.check_steps),
            [pair for pair in run.pairs if pair.recorded and not pair.checked],
        ),
        ("recorded and checked", rate / run.check_steps, [pair for pair in run.pairs if pair.checked]),
    ):
        if weight > 0 and not pairs:
            raise ValueError(f"no pair with a step that is {name}: more pairs expected")
        if weight > 0:
            weighed.append((weight, pairs))
    plain_ns = _mean([pair.plain_ns for pair in run.pairs])
    background = rate * run.background_ns / plain_ns
    generator = random.Random(0)
    drawn = sorted(
        _model_thread([(weight, generator.choices(pairs, k=len(pairs))) for weight, pairs in weighed])
        for _ in range(draws)
    )
    return Share(
        plain_ms=plain_ns / 1e6,
        model_thread=_model_thread(weighed),
        background=background,
        low=drawn[int(draws * 0.025)] + background,
        high=drawn[int(draws * 0.975)] + background,
        untrimmed=_model_thread(weighed, trim=0.0) + background,
        num_pairs=tuple(len(pairs) for _, pairs in weighed),
        recorded_ms=_recorded_ns(run, weighed[1:] if rate < 1 else weighed) / 1e6 if rate > 0 else 0.0,
    )


def _model_thread(weighed: Sequence[tuple[float, Sequence[Pair]]], trim: float = TRIM) -> float:
    """What the traced steps took more, as a share of the plain ones in the same pairs."""
    more_ns = sum(weight * _mean([pair.more_ns for pair in pairs], trim) for weight, pairs in weighed)
    return more_ns / sum(weight * _mean([pair.plain_ns for pair in pairs], trim) for weight, pairs in weighed)


def _recorded_ns(run: Pairs, weighed: Sequence[tuple[float, Sequence[Pair]]]) -> float:
    """What a recorded step took more, of kinds in their proportion, and the background's share of one."""
    weights = sum(weight for weight, _ in weighed)
    more_ns = sum(weight * _mean([pair.more_ns for pair in pairs]) for weight, pairs in weighed)
    return more_ns / weights + run.background_ns


def _mean(values: Sequence[int], trim: float = TRIM) -> float:
    """The mean without a share `trim` of the values at each end."""
    cut = int(len(values) * trim)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
