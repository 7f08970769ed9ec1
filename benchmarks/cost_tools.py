"""Tools that a step can run under: what attaches to a model, and what goes around each step.

moetrace as a user starts it; torch.profiler on every step or on one in ten; an OpenTelemetry SDK span per
MoE block, router and experts call, batched to an exporter that discards; and timers that wait for all ranks
before each stamp, as synchronising timers of training frameworks do.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import moetrace
from moetrace_schemas.identity import is_sampled

Around = Callable[[int], contextlib.AbstractContextManager[Any]]
"""What goes around step number n."""
Tool = Callable[[Any], contextlib.AbstractContextManager[Around]]
"""Attaches to a model."""


def parts(model: Any) -> list[Any]:
    """MoE blocks, routers and experts of a model of transformers or vLLM."""
    blocks = [
        m for m in model.modules() if hasattr(m, "experts") and (hasattr(m, "gate") or hasattr(m, "router"))
    ]
    return [part for block in blocks for part in (block, getattr(block, "gate", None), block.experts) if part]


def start_moetrace(model: Any, sample: str, endpoint: str, run_id: str = "tool-cost") -> moetrace.Tracer:
    """The tracer of this project, as a user starts it."""
    tracer = moetrace.init(run_id=run_id, endpoint=endpoint, sample=sample, forward_mode="prefill")
    moetrace.instrument(model, strict=True)
    return tracer


def run_that_samples(period: int, steps: range) -> str:
    """A run id by whose hash one in `period` of these steps is sampled."""
    wanted = len(steps) // period
    names = (f"tool-cost-{number}" for number in itertools.count())
    return next(name for name in names if sum(is_sampled(name, step, period) for step in steps) == wanted)


def moetrace_tool(period: int, endpoint: str, steps: range) -> Tool:
    """The same as a tool, on one in `period` of the forwards that `steps` numbers, each a step of its own."""
    run_id = run_that_samples(period, steps)

    @contextlib.contextmanager
    def attach(model: Any) -> Iterator[Around]:
        tracer = start_moetrace(model, f"1/{period}", endpoint, run_id)
        try:
            yield lambda step: contextlib.nullcontext()
        finally:
            moetrace.shutdown(timeout_s=5)
            if tracer.metrics.dropped.total():
                raise SystemExit(f"recorded steps were dropped: {tracer.metrics.losses()}; run it again")

    return attach


def profiler_tool(period: int) -> Tool:
    """torch.profiler on one step in `period`; what it found is thrown away."""

    @contextlib.contextmanager
    def attach(model: Any) -> Iterator[Around]:
        def around(step: int) -> Any:
            if step % period:
                return contextlib.nullcontext()
            return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

        yield around

    return attach


class Discard(SpanExporter):
    """Exports nowhere."""

    def export(self, spans: Any) -> SpanExportResult:  # noqa: D102
        return SpanExportResult.SUCCESS


@contextlib.contextmanager
def spans_tool(model: Any) -> Iterator[Around]:
    """OpenTelemetry SDK spans by module hooks, below one span per step."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Discard(), max_queue_size=65536))
    tracer = provider.get_tracer("tool-cost")
    stack: list[Any] = []

    def opened(module: Any, args: Any) -> None:
        span = tracer.start_span(
            type(module).__name__,
            attributes={"step": 1, "rank": 0, "layer": 3, "phase": "router", "mode": "prefill"},
        )
        stack.append(span)

    def closed(module: Any, args: Any, result: Any) -> None:
        stack.pop().end()

    hooks = [
        handle
        for part in parts(model)
        for handle in (part.register_forward_pre_hook(opened), part.register_forward_hook(closed))
    ]
    try:
        yield lambda step: tracer.start_as_current_span("step")
    finally:
        for hook in hooks:
            hook.remove()
        provider.shutdown()


@contextlib.contextmanager
def barrier_timers(model: Any) -> Iterator[Around]:
    """Timers that wait for all ranks before each stamp."""
    times: list[float] = []

    def stamp(*_: Any) -> None:
        torch.distributed.barrier()
        times.append(time.perf_counter())

    hooks = [
        handle
        for part in parts(model)
        for handle in (part.register_forward_pre_hook(stamp), part.register_forward_hook(stamp))
    ]
    try:
        yield lambda step: contextlib.nullcontext()
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def nothing(model: Any) -> Iterator[Around]:
    """No tool."""
    yield lambda step: contextlib.nullcontext()
