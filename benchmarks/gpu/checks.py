"""Is it right on the device: no sync, the same numbers, the profiler's kernel times, graphs, compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_model import Model, with_tracer
from outcome import Outcome, checked, skipped

from moetrace.errors import ConfigError
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Phase


def no_sync(model: Model, tokens: torch.Tensor) -> Outcome:
    """A sampled step under sync debug mode `error`."""
    if tokens.device.type != "cuda":
        return skipped("no sync in a sampled step", "needs CUDA")
    with torch.no_grad():
        model(tokens)
    torch.cuda.synchronize()

    def run(tracer: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad(), tracer.step():
                model(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    tracer, records = with_tracer(model, run)
    return checked(
        "no sync in a sampled step",
        len(records) == 1 and not tracer.guard.errors,
        f"{len(records)} step recorded, faults {tracer.guard.errors or 'none'}",
    )


def numerics(model: Model, tokens: torch.Tensor) -> Outcome:
    """Outputs and gradients, traced and not, bit for bit."""

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(tokens)
        output.float().square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, traced = step(), []

        def run(tracer: Any) -> None:
            with tracer.step():
                traced.extend(step())

        tracer, records = with_tracer(model, run)
    finally:
        torch.use_deterministic_algorithms(False)
        model.zero_grad()
    equal = len(plain) == len(traced) and all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    backward = {row.layer for step in records for row in step.phases if row.direction == "backward"}
    return checked(
        "outputs and gradients bit for bit, backward by phase",
        equal and len(backward - {-1}) == model.shape.layers and not tracer.guard.errors,
        f"{len(plain)} tensors equal: {equal}; layers with backward rows: {len(backward - {-1})}",
    )


def counts(model: Model, tokens: torch.Tensor) -> Outcome:
    """Every (token, slot) pair is counted, in every layer."""

    def run(tracer: Any) -> None:
        with torch.no_grad(), tracer.step():
            model(tokens)

    _, records = with_tracer(model, run)
    totals = [sum(r.counts) for step in records for r in step.experts if r.kind is CountKind.ROUTED]
    expected = [tokens.shape[0] * model.shape.top_k] * model.shape.layers
    return checked("counts", totals == expected, f"{sum(totals)} of {sum(expected)} pairs")


def kernel_times(model: Model, tokens: torch.Tensor) -> Outcome:
    """Time of every phase by events against its kernels by CUPTI, the host far ahead of the device."""
    name = "event times against CUPTI, by phase"
    if tokens.device.type != "cuda":
        return skipped(name, "needs CUDA")
    traces: list[Any] = []

    def run(tracer: Any) -> None:
        with torch.no_grad():
            with tracer.step():
                model(tokens)
            torch.cuda.synchronize()
            with tracer.kernels() as trace:
                torch.cuda._sleep(200_000_000)  # the host enqueues all of the step meanwhile
                with tracer.step():
                    model(tokens)
            traces.append(trace)

    try:
        _, records = with_tracer(model, run, kernels=True)
    except ConfigError as error:
        return skipped(name, str(error))
    worst, figures = 0.0, {}
    for phase in (Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE):
        rows = [row.duration_ns / 1e3 for row in records[-1].phases if row.phase is phase]
        by_cupti = sum((p.busy_ns + p.idle_ns) / 1e3 for p in traces[0].report.phases if p.phase is phase)
        figures[f"{phase}_event_us"], figures[f"{phase}_kernel_us"] = sum(rows), by_cupti
        worst = max(worst, abs(sum(rows) - by_cupti) / (2.0 * len(rows) + 0.02 * by_cupti))
    said = f"largest difference is {worst:.2f} of the 2 us + 2 % allowed"
    return checked(name, bool(traces[0].report.phases) and worst <= 1, said, **figures)


def event_times(model: Model, tokens: torch.Tensor) -> Outcome:
    """Time of the experts by events against the profiler's kernels, with the host far ahead of the device."""
    name = "event times against kernel times"
    if tokens.device.type != "cuda":
        return skipped(name, "needs CUDA")
    from torch.profiler import ProfilerActivity, profile

    profiled: list[Any] = []

    def run(tracer: Any) -> None:
        with torch.no_grad():
            for _ in range(2):
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                    torch.cuda._sleep(200_000_000)  # the host enqueues all of the step meanwhile
                    with tracer.step():
                        model(tokens)
                    torch.cuda.synchronize()
                profiled.append(profiler)

    _, records = with_tracer(model, run)
    rows = [row for row in records[-1].phases if row.phase is Phase.EXPERT_GEMM]
    by_events = sum(row.duration_ns for row in rows) / 1e3
    kernels = [
        event
        for event in profiled[-1].events()
        if event.device_type.name == "CUDA"
        and any(word in event.name for word in ("gemm", "Gemm", "silu", "cutlass"))
    ]
    dense = model.shape.layers * 2  # the dense projection and the gate are GEMMs as well
    by_kernels = sum(event.device_time for event in kernels)
    allowed = 2.0 * len(rows) + 0.02 * by_kernels
    return checked(
        name,
        by_kernels > 0 and by_events <= by_kernels + allowed,
        f"experts {by_events:.0f} us by events; all {len(kernels)} GEMM and SiLU kernels "
        f"({dense} of them outside the experts) {by_kernels:.0f} us",
        event_us=by_events,
        kernel_us=by_kernels,
    )


def compiled(model: Model, tokens: torch.Tensor) -> Outcome:
    """One block compiled as a full graph, traced and not."""
    block, backend = model.blocks[0], "inductor" if tokens.device.type == "cuda" else "aot_eager"

    def once() -> torch.Tensor:
        torch._dynamo.reset()
        with torch.no_grad():
            return torch.compile(block, backend=backend, fullgraph=True)(tokens)  # type: ignore[no-any-return]

    plain, traced = once(), []

    def run(tracer: Any) -> None:
        with tracer.step():
            traced.append(once())

    _, records = with_tracer(model, run)
    torch._dynamo.reset()
    phases = {row.phase for step in records for row in step.phases}
    wanted = {Phase.ROUTER, Phase.PERMUTE, Phase.EXPERT_GEMM, Phase.UNPERMUTE}
    difference = (plain - traced[0]).abs().max().item()
    return checked(
        f"compile ({backend}): one graph, phases, numbers",
        wanted <= phases and difference == 0,
        f"phases {', '.join(sorted(phases))}; largest difference {difference:g}",
        largest_difference=difference,
    )


def graphs(model: Model, tokens: torch.Tensor) -> Outcome:
    """A captured step: rows of the replay, counts of the replay, the same output."""
    name = "CUDA graph: phases and counts of a replay"
    if tokens.device.type != "cuda":
        return skipped(name, "needs CUDA")
    expected = model(tokens).detach().clone()
    seen: list[torch.Tensor] = []

    def run(tracer: Any) -> None:
        replay, output = captured(model, tokens)
        replay()
        for _ in range(3):
            with tracer.step():
                replay()
            torch.cuda.synchronize()
            _wait(tracer)
        seen.append(output.clone())

    tracer, records = with_tracer(model, run)
    rows = [row for row in records[-1].phases if row.flags & RowFlag.CAPTURED]
    layers = {row.layer for row in rows}
    pairs = sum(sum(row.counts) for row in records[-1].experts if row.kind is CountKind.ROUTED)
    right = pairs == tokens.shape[0] * model.shape.top_k * model.shape.layers
    return checked(
        name,
        len(layers - {-1}) == model.shape.layers and right and torch.equal(expected, seen[0]),
        f"{len(layers - {-1})} layers, {pairs} pairs, output equal: {torch.equal(expected, seen[0])}, "
        f"skipped {dict(tracer.metrics.skipped) or 'none'}, faults {tracer.guard.errors or 'none'}",
    )


def captured(model: Model, tokens: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
    """A graph of one forward: its replay, and where its output is."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        model(tokens)
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(tokens)
    return graph.replay, output


def _wait(tracer: Any) -> None:
    """Until the drain thread has taken the step."""
    import time

    give_up = time.monotonic() + 10
    while len(tracer._buffers.pool._free) < tracer.config.buffers and time.monotonic() < give_up:
        time.sleep(0.001)
