"""The CPU time that tracing takes of a step, from pairs of steps: one of a traced model, one of its twin.

Two models of one class hold the very same tensors; the tracer is attached to one of them for the whole
run. A pair is a step of each, one right after the other, in random order, so that whatever changes the
machine's speed for longer than two steps changes both. Of each step the CPU time of the model's thread is
taken, which neither other processes nor waits for other ranks are part of.

What the tracer's own threads do falls on steps of either model, so it cannot be seen in the pairs. Their CPU
time (`moetrace_self_background_seconds_total`) is added instead, all of it, until nothing is queued: as if
the model had to wait for it, which is the most that it can cost. ::

    cost of a recorded step      mean of (traced - plain) over recorded steps + background / recorded steps
    cost of another step         mean of (traced - plain) over steps that are sampled out
    cost at 1/N                  (1 - 1/N) x the latter + 1/N x the former

Means are trimmed by a tenth at each end; the 95 % interval is a bootstrap over pairs, those with recorded
steps and the others drawn apart. Shares are of the plain steps' mean.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import moetrace

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
    dropped: int = 0
    """Recorded steps that were not delivered; 0, or the cost is that of something else."""


def share_tensors(model: Any, twin: Any) -> None:
    """Let `twin`, a model of the same class and configuration, hold the tensors of `model`."""
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        other._parameters.update(module._parameters)
        other._buffers.update(module._buffers)


def measure_pairs(
    tracer: moetrace.Tracer,
    run_plain: Callable[[], Any],
    run_traced: Callable[[], Any],
    *,
    pairs: int,
    generator: random.Random,
) -> Pairs:
    """Run pairs of steps; the traced model's forward is a step of its own."""
    metrics = tracer.metrics
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
        found.append(
            Pair(
                plain_ns=cpu_ns[run_plain],
                traced_ns=cpu_ns[run_traced],
                recorded=metrics.steps_sampled > so_far,
            )
        )
    time.sleep(QUIET_S)
    recorded = metrics.steps_sampled - sampled
    spent = metrics.background_ns.total() - before
    return Pairs(
        pairs=tuple(found),
        background_ns=spent / recorded if recorded else 0.0,
        dropped=metrics.dropped.total(),
    )


def pooled(ranks: Sequence[Pairs]) -> Pairs:
    """The pairs of several ranks as those of one: each rank's steps against its own."""
    return Pairs(
        pairs=tuple(pair for one in ranks for pair in one.pairs),
        background_ns=statistics.mean(one.background_ns for one in ranks),
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

    @property
    def all(self) -> float:
        """Both together."""
        return self.model_thread + self.background


def share(run: Pairs, rate: float, draws: int = DRAWS) -> Share:
    """The cost where a share `rate` of all steps is recorded, 0.0 to 1.0.

    Raises:
        ValueError: no pair of a kind that the rate asks for.
    """
    recorded = [pair for pair in run.pairs if pair.recorded]
    others = [pair for pair in run.pairs if not pair.recorded]
    if (rate > 0 and not recorded) or (rate < 1 and not others):
        raise ValueError(f"{len(recorded)} recorded steps and {len(others)} others: more pairs expected")
    told = _share(recorded, others, run.background_ns, rate)
    generator = random.Random(0)
    drawn = sorted(
        _share(
            generator.choices(recorded, k=len(recorded)) if recorded else [],
            generator.choices(others, k=len(others)) if others else [],
            run.background_ns,
            rate,
        ).all
        for _ in range(draws)
    )
    return replace(told, low=drawn[int(draws * 0.025)], high=drawn[int(draws * 0.975)])


def _share(recorded: list[Pair], others: list[Pair], background_ns: float, rate: float) -> Share:
    plain_ns = _mean([pair.plain_ns for pair in (*recorded, *others)])
    more_ns = 0.0
    if rate > 0:
        more_ns += rate * _mean([pair.more_ns for pair in recorded])
    if rate < 1:
        more_ns += (1 - rate) * _mean([pair.more_ns for pair in others])
    thread, background = more_ns / plain_ns, rate * background_ns / plain_ns
    return Share(plain_ms=plain_ns / 1e6, model_thread=thread, background=background, low=0.0, high=0.0)


def _mean(values: list[int]) -> float:
    """The mean without a tenth of the values at each end."""
    cut = int(len(values) * TRIM)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
