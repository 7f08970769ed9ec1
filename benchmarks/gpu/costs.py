"""What it costs: a pair of marks, steps of decode and prefill (off, sampled out and on), and CUPTI."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from checks import captured
from moe_model import Model, with_tracer
from outcome import Outcome, measured, skipped

from moetrace.errors import ConfigError
from moetrace.timing.clock import HostClock


def mark_pair(tokens: torch.Tensor, rounds: int) -> Outcome:
    """Host time of two marks, and device time between them with nothing in between."""
    on_cuda = tokens.device.type == "cuda"
    if on_cuda:
        from moetrace.timing.cuda_events import CudaClock

        # A host clock that jumps, so that no two marks share an event.
        jumps = iter(range(0, 10**15, 10**6))
        track: Any = CudaClock(now_ns=lambda: next(jumps)).track(2 * rounds + 2)
    else:
        track = HostClock().track(2 * rounds + 2)
    track.mark()
    start = time.perf_counter_ns()
    for _ in range(rounds):
        track.mark()
        track.mark()
    host_ns = (time.perf_counter_ns() - start) / rounds
    if not on_cuda:
        return measured("pair of marks", f"{host_ns:.0f} ns of host time", host_ns=host_ns)
    torch.cuda.synchronize()
    gaps = [track.nanoseconds(2 * at + 2) - track.nanoseconds(2 * at + 1) for at in range(rounds)]
    device_ns = statistics.median(gaps)
    return measured(
        "pair of marks",
        f"{host_ns:.0f} ns of host time; empty pair {device_ns:.0f} ns on the device",
        host_ns=host_ns,
        device_ns=device_ns,
    )


def steps(name: str, model: Model, tokens: torch.Tensor, rounds: int, *, graph: bool = False) -> Outcome:
    """Median step time untraced, sampled out and on, round by round side by side."""
    if graph and tokens.device.type != "cuda":
        return skipped(name, "needs CUDA")
    times: dict[str, list[float]] = {"off": [], "sampled out": [], "on": []}
    for _ in range(3):
        run = _runner(model, tokens, graph)
        times["off"] += _time(run, tokens, rounds)
        for label, sample in (("sampled out", "0"), ("on", "1/1")):

            def traced(tracer: Any, label: str = label) -> None:
                run = _runner(model, tokens, graph)

                def step() -> None:
                    with tracer.step():
                        run()

                times[label] += _time(step, tokens, rounds)

            with_tracer(model, traced, sample=sample)
    medians = {label: statistics.median(values) for label, values in times.items()}
    return measured(
        name,
        f"{medians['off'] * 1e3:.2f} ms off; sampled out {medians['sampled out'] / medians['off']:.3f} x, "
        f"on {medians['on'] / medians['off']:.3f} x",
        **{f"{label.replace(' ', '_')}_s": value for label, value in medians.items()},
    )


def kernels(model: Model, tokens: torch.Tensor, rounds: int) -> Outcome:
    """Median step time inside of a stretch of `tracer.kernels()`, outside of it, and untraced."""
    name = "CUPTI, prefill"
    if tokens.device.type != "cuda":
        return skipped(name, "needs CUDA")
    times: dict[str, list[float]] = {"off": _time(_runner(model, tokens, False), tokens, rounds)}

    def run(tracer: Any) -> None:
        step = _runner(model, tokens, False)
        times["outside"] = _time(step, tokens, rounds)
        with tracer.kernels():
            times["inside"] = _time(step, tokens, rounds)

    try:
        with_tracer(model, run, kernels=True)
    except ConfigError as error:
        return skipped(name, str(error))
    medians = {label: statistics.median(values) for label, values in times.items()}
    return measured(
        name,
        f"{medians['off'] * 1e3:.2f} ms off; wrapped for it {medians['outside'] / medians['off']:.3f} x, in "
        f"a stretch {medians['inside'] / medians['off']:.3f} x",
        **{f"{label}_s": value for label, value in medians.items()},
    )


def _runner(model: Model, tokens: torch.Tensor, graph: bool) -> Callable[[], Any]:
    if graph:
        return captured(model, tokens)[0]

    def run() -> None:
        with torch.no_grad():
            model(tokens)

    return run


def _time(run: Callable[[], Any], tokens: torch.Tensor, rounds: int) -> list[float]:
    """Seconds per step, the device's work included; the first two are warm-up."""
    result = []
    for _ in range(rounds + 2):
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        result.append(time.perf_counter() - start)
    return result[2:]
