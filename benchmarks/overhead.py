"""Host cost of one wrapped call, side by side in one run.

Rows: the bare call, and the same call under an instance-forward wrapper of moetrace (off: nothing is
wrapped, as with enabled=False or after uninstrument; idle: wrapped, no step open; sampled out: inside a
step that is not sampled; on: inside a sampled step), a module-hook pair that does nothing,
`torch.profiler.record_function` with the profiler off, and an OpenTelemetry SDK span with five
attributes.

All rows are interleaved round by round, so that a machine that changes speed changes it for all; per
row the median over rounds is quoted, net of the bare call of the same round, and ratios are medians of
per-round ratios. One thread, CPU.

    python benchmarks/overhead.py [--rounds 40] [--calls 2000] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from results import write_section

import moetrace
from moetrace.instrument.wrap import timed
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import Phase


class Nothing(torch.nn.Module):
    """A module whose forward costs as little as a module call can."""

    def forward(self, x: Any) -> Any:  # noqa: D102
        return x


class Discard(SpanExporter):
    """Exports nowhere."""

    def export(self, spans: Any) -> SpanExportResult:  # noqa: D102
        return SpanExportResult.SUCCESS


class Discarding:
    """An emitter that keeps nothing."""

    name = "discard"

    def emit(self, record: Any) -> None:  # noqa: D102
        return None

    def close(self, deadline_monotonic_s: float) -> bool:  # noqa: D102
        return True


def time_calls(call: Callable[[Any], Any], calls: int) -> float:
    """Ns per call over a tight loop."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call(0)
    return (time.perf_counter_ns() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)

    tracer = moetrace.init(
        run_id="overhead",
        endpoint="",
        emitters=[Discarding()],
        max_intervals=options.calls + 16,
    )
    wrapped = Nothing()
    site = tracer.sites.add(Site(Role.PHASE, Phase.ROUTER, 0, "benchmark"))
    wrapped.forward = timed(wrapped.forward, tracer, site)  # type: ignore[method-assign]
    bare, untouched, hooked = Nothing(), Nothing(), Nothing()
    hooked.register_forward_pre_hook(lambda module, args: None)
    hooked.register_forward_hook(lambda module, args, output: None)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Discard(), max_queue_size=1 << 16))
    otel = provider.get_tracer("overhead")
    attributes = {"layer": 3, "phase": "dispatch", "rank": 7, "step": 12345, "rows": 4096}

    def under_profiler(x: Any) -> Any:
        with torch.profiler.record_function("router"):
            return bare(x)

    def under_span(x: Any) -> Any:
        span = otel.start_span("router", attributes=attributes)
        result = bare(x)
        span.end()
        return result

    def sampled_out(calls: int) -> float:
        with tracer.step(1):  # the step is not sampled below
            return time_calls(wrapped, calls)

    def on(calls: int) -> float:
        with tracer.step(1):
            return time_calls(wrapped, calls)

    rows: dict[str, list[float]] = {}
    quiet = moetrace.Config.load({"sample": "0", "run_id": "overhead"})
    full = tracer.config
    for _ in range(options.rounds + 2):
        figures = {
            "bare": time_calls(bare, options.calls),
            "moetrace off (uninstrumented)": time_calls(untouched, options.calls),
            "moetrace idle (no step open)": time_calls(wrapped, options.calls),
        }
        tracer.config = quiet
        figures["moetrace sampled out"] = sampled_out(options.calls)
        tracer.config = full
        figures["moetrace on"] = on(options.calls)
        while tracer._buffers.pool is not None and len(tracer._buffers.pool._free) < full.buffers:
            time.sleep(0.001)  # let the drain thread finish before the next row is timed
        figures["module-hook pair"] = time_calls(hooked, options.calls)
        figures["record_function, profiler off"] = time_calls(under_profiler, options.calls)
        figures["OpenTelemetry SDK span"] = time_calls(under_span, options.calls // 10)
        provider.force_flush()
        for name, value in figures.items():
            rows.setdefault(name, []).append(value)
    rows = {name: values[2:] for name, values in rows.items()}

    def net(name: str) -> list[float]:
        return [value - base for value, base in zip(rows[name], rows["bare"], strict=True)]

    span = net("OpenTelemetry SDK span")
    lines = [
        f"`python benchmarks/overhead.py --rounds {options.rounds} --calls {options.calls}`, "
        f"torch {torch.__version__}",
        "",
        "| wrapper | ns per call, net (median) | best round | share of an SDK span (median of rounds) |",
        "|---|---|---|---|",
    ]
    for name in rows:
        if name == "bare":
            continue
        values = net(name)
        ratio = statistics.median(v / s for v, s in zip(values, span, strict=True))
        lines.append(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {ratio:.3f} |")
    lines += [
        "",
        f"Bare module call: {statistics.median(rows['bare']):.0f} ns (median). moetrace on / hook pair: "
        f"{_ratio(net('moetrace on'), net('module-hook pair')):.2f} (median of rounds).",
    ]
    text = "\n".join(lines)
    print(text)
    moetrace.shutdown()
    provider.shutdown()
    if options.write:
        write_section("overhead", "Host cost of one wrapped call", text)


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


if __name__ == "__main__":
    main()
