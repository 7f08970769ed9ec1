"""What a step costs under moetrace and under what else people use, on several frameworks, in pairs.

A block of steps runs with nothing attached, then one with a tool, then the pair again the other way
round, so that a machine that changes speed changes both; the block's whole wall time counts, so work in
the background does too. Quoted: the median over pairs of (time with the tool / time without) and its
95 % bootstrap interval.

Targets: `eager` and `grouped` (an 8-layer OLMoE of transformers), `ep4` (the demo's model on four gloo
ranks with all-to-all exchange), `vllm` (its CPU engine, decoding; run by the interpreter of an
environment that holds vllm: `make test-frameworks FRAMEWORKS=vllm`).

Tools: moetrace with one step in a million sampled, with one in ten and with every one, sending to a
server that answers at once; torch.profiler on every step and on one in ten; an OpenTelemetry SDK span
per MoE block, router and experts call, batched to an exporter that discards; and, where there are
ranks, timers that wait for all ranks before each stamp, as synchronising timers of training
frameworks do.

    python benchmarks/tool_cost.py [--targets eager,grouped,ep4] [--pairs 24] [--steps 15] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from results import write_section
from step_cost import good_server, interval, make_model

import moetrace

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


def moetrace_tool(sample: str, endpoint: str) -> Tool:
    """The tracer of this project, as a user starts it."""

    @contextlib.contextmanager
    def attach(model: Any) -> Iterator[Around]:
        moetrace.init(run_id="tool-cost", endpoint=endpoint, sample=sample, forward_mode="prefill")
        moetrace.instrument(model, strict=True)
        try:
            # Where the engine calls the model, each forward is a step of its own.
            yield lambda step: contextlib.nullcontext()
        finally:
            moetrace.shutdown(timeout_s=5)

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


def tools(target: str, endpoint: str) -> dict[str, Tool]:
    """By name, in the order of the table."""
    result: dict[str, Tool] = {
        "moetrace, sampled out": moetrace_tool("1/1000000", endpoint),
        "moetrace, 1/10": moetrace_tool("1/10", endpoint),
        "moetrace, 1/1": moetrace_tool("1/1", endpoint),
        "torch.profiler, 1/10": profiler_tool(10),
        "torch.profiler, 1/1": profiler_tool(1),
        "OpenTelemetry SDK spans": spans_tool,
    }
    if target == "ep4":
        result["timers with a barrier"] = barrier_timers
    return result


@contextlib.contextmanager
def nothing(model: Any) -> Iterator[Around]:
    """No tool."""
    yield lambda step: contextlib.nullcontext()


def block(tool: Tool, model: Any, run: Callable[[], Any], steps: int) -> float:
    """Seconds of a block, after three steps that do not count (threads start, connections open)."""
    with tool(model) as around:
        start = 0.0
        for step in range(-3, steps):
            if step == 0:
                start = time.perf_counter()
            with around(step):
                run()
        return time.perf_counter() - start


def measure(
    target: str, model: Any, run: Callable[[], Any], *, pairs: int, steps: int, endpoint: str
) -> tuple[float, dict[str, list[float]]]:
    """Seconds per step without a tool (median), and per tool the ratios of its pairs."""
    have = tools(target, endpoint)
    ratios: dict[str, list[float]] = {name: [] for name in have}
    plain = []
    generator = random.Random(3)  # the same order on every rank
    for _ in range(3):
        run()
    for pair in range(pairs):
        names = list(have)
        generator.shuffle(names)
        for name in names:
            order = (nothing, have[name]) if pair % 2 else (have[name], nothing)
            times = [block(tool, model, run, steps) for tool in order]
            without, with_tool = times if pair % 2 else reversed(times)
            plain.append(without / steps)
            ratios[name].append(with_tool / without)
    return statistics.median(plain), ratios


def table(target: str, per_step: float, ratios: dict[str, list[float]]) -> list[str]:
    """Rows of one target."""
    rows = []
    for name, values in ratios.items():
        low, high = interval(values)
        middle = statistics.median(values)
        rows.append(f"| {target} | {per_step * 1e3:.1f} | {name} | {middle:.4f} | {low:.4f} to {high:.4f} |")
    return rows


def transformers_target(name: str, options: argparse.Namespace) -> list[str]:
    """`eager` or `grouped`, in this process."""
    torch.set_num_threads(1)
    model = make_model(8, 32, 128)
    model.set_experts_implementation("eager" if name == "eager" else "grouped_mm")
    tokens = torch.randint(2, 2048, (4, 96))
    with torch.no_grad():
        found = measure(
            name,
            model,
            lambda: model(input_ids=tokens, use_cache=False),
            pairs=options.pairs,
            steps=options.steps,
            endpoint=good_server(),
        )
    return table(name, *found)


def ranks_target(options: argparse.Namespace) -> list[str]:
    """`ep4`: four processes; rank 0's times are quoted."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (4, folder, options.pairs, options.steps, good_server())
        torch.multiprocessing.spawn(one_rank, arguments, nprocs=4)
        return Path(folder, "rows").read_text().splitlines()


def one_rank(rank: int, ranks: int, folder: str, pairs: int, steps: int, endpoint: str) -> None:
    """A rank of `ep4`."""
    import warnings

    from moetrace.demo.leave import leave
    from moetrace.demo.models import VOCABULARY, build
    from moetrace.demo.plan import MODELS
    from moetrace.demo.text import Batches

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    model = build(MODELS["olmoe"], ranks)
    batch = Batches(rank, VOCABULARY, batch=4, length=96).at(0)

    def run() -> None:
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)

    with torch.no_grad():
        found = measure("ep4", model, run, pairs=pairs, steps=steps, endpoint=endpoint)
    if rank == 0:
        Path(folder, "rows").write_text("\n".join(table("ep4", *found)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    leave()


def vllm_target(options: argparse.Namespace) -> list[str]:
    """`vllm`: its engine in this process, prompts and decode steps of one small model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks" / "cases"))
    from vllm import SamplingParams
    from vllm_engine import engine  # sets the engine's environment; before vllm is imported

    llm, models = engine(compiled=False), []
    llm.apply_model(models.append)
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(5, 69))} for _ in range(4)]
    found = measure(
        "vllm",
        models[0],
        lambda: llm.generate(prompts, sampling, use_tqdm=False),
        pairs=options.pairs,
        steps=options.steps,
        endpoint=good_server(),
    )
    return table("vllm", *found)


def main() -> None:
    """Measure the targets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="eager,grouped,ep4")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    rows = []
    for name in options.targets.split(","):
        if name == "ep4":
            rows += ranks_target(options)
        elif name == "vllm":
            rows += vllm_target(options)
        else:
            rows += transformers_target(name, options)
        print("\n".join(rows), flush=True)
    lines = [
        f"`python benchmarks/tool_cost.py --targets {options.targets} --pairs {options.pairs} "
        f"--steps {options.steps}`, torch {torch.__version__}. ep4 runs four ranks on the cores named above.",
        "",
        "| target | ms per step without | tool | step time / without (median of pairs) | 95 % interval |",
        "|---|---|---|---|---|",
        *rows,
    ]
    if options.write:
        key = "tool_cost_vllm" if options.targets == "vllm" else "tool_cost"
        write_section(key, f"A step under each tool ({options.targets})", "\n".join(lines))


if __name__ == "__main__":
    main()
