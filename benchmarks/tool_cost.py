"""What a step costs under moetrace and under what else people use, on several frameworks.

Two measurements. The finer one, of moetrace alone, takes CPU time of steps in pairs (benchmarks/step_pairs.py
says how; pairs without tracing say how far off they are) and is what the aim of 0.5 % at one step in ten is
held against. The other one compares tools: a block of steps with nothing attached, then one with a tool, then
the pair again the other way round, so that a machine that changes speed changes both; quoted are the medians
over pairs of (with the tool / without) for the wall time of the block and the CPU time of the process, so
that work in the background counts too, and the 95 % bootstrap interval of the wall time.

Targets: `eager` and `grouped` (forward steps of an 8-layer OLMoE of transformers), `train` (the same model,
grouped: forward, backward and optimizer), `ep4` (the demo's model on four gloo ranks with all-to-all
exchange; pairs of all ranks, blocks of rank 0), `vllm` (its CPU engine, decoding, in blocks only; run by the
interpreter of an environment that holds vllm: `make test-frameworks FRAMEWORKS=vllm`).

Tools (benchmarks/cost_tools.py): moetrace with one step in ten sampled and with every one, sending to a
server that answers at once; torch.profiler, OpenTelemetry SDK spans, and timers with a barrier.

    python benchmarks/tool_cost.py [--targets eager,grouped,train,ep4] [--steps 600] [--pairs 4] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cost_tools import (
    Tool,
    barrier_timers,
    moetrace_tool,
    nothing,
    profiler_tool,
    spans_tool,
    start_moetrace,
)
from results import write_section
from step_cost import good_server, interval, make_model
from step_pairs import Pairs, measure_pairs, pooled, share, share_tensors

import moetrace

WARM_STEPS = 3
"""At the start of a block, which do not count: threads start, connections open."""
FORWARDS = {"vllm": 8}
"""Forwards per step: one for the prompts and one for each further token."""
NOTES = {
    "ep4": "ep4 runs four ranks on the cores named above.",
    "vllm": f"A step is a call of {FORWARDS['vllm']} forwards of a model of two small layers, each forward a "
    "step of the tracer.",
}
"""What the table needs said, by target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured."""

    targets: str
    steps: int
    """Pairs of steps at one step in ten (half of that on each rank of `ep4`); without tracing half, at
    every step a third."""
    pairs: int
    """Pairs of blocks per tool."""
    block: int
    """Steps of a block; a multiple of ten, so that one in ten is one in ten."""
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What a block took, seconds: by the wall, and CPU time of the process."""

    wall_s: float
    cpu_s: float


# --- steps in pairs --------------------------------------------------------------------------------


def step_pairs(
    plain: Any, traced: Any, run: Callable[[Any], Any], steps: int, endpoint: str
) -> dict[str, Pairs]:
    """Pairs without tracing, which should say 0, at one step in ten, and at every step."""
    found = {}
    for sample, pairs in (("", steps // 2), ("1/10", steps), ("1/1", max(60, steps // 3))):
        tracer = start_moetrace(traced, sample, endpoint) if sample else None
        found[sample] = measure_pairs(
            tracer,
            lambda: run(plain),
            lambda: run(traced),
            pairs=pairs,
            generator=random.Random(5),  # the same order on every rank
        )
        if tracer is not None:
            moetrace.shutdown(timeout_s=5)
    return found


def pair_rows(target: str, found: dict[str, Pairs]) -> list[str]:
    """Rows of one target."""
    rows = []
    for name, sample, rate in (
        ("not traced", "", 0.0),
        ("sampled out", "1/10", 0.0),
        ("1/10", "1/10", 0.1),
        ("1/1", "1/1", 1.0),
    ):
        run = found[sample]
        if run.dropped:
            raise SystemExit(f"{target}, {sample}: {run.dropped} recorded steps were dropped; run it again")
        try:
            told = share(run, rate)
        except ValueError as error:
            raise SystemExit(f"{target}, {sample}: {error} (--steps)") from error
        rows.append(
            f"| {target} | {told.plain_ms:.1f} | {name} | {told.model_thread:.2%} | {told.background:.2%} | "
            f"{told.all:.2%} | {told.low:.2%} to {told.high:.2%} | {told.untrimmed:.2%} | "
            f"{told.recorded_ms:.1f} | {' + '.join(map(str, told.num_pairs))} |"
        )
    return rows


# --- tools in blocks -------------------------------------------------------------------------------


def tools(target: str, options: Options) -> dict[str, Tool]:
    """By name, in the order of the table."""
    forwards = FORWARDS.get(target, 1)
    counted = range(forwards * WARM_STEPS, forwards * (WARM_STEPS + options.block))
    result: dict[str, Tool] = {
        "moetrace, 1/10": moetrace_tool(10, options.endpoint, counted),
        "moetrace, 1/1": moetrace_tool(1, options.endpoint, counted),
        "torch.profiler, 1/10": profiler_tool(10),
        "torch.profiler, 1/1": profiler_tool(1),
        "OpenTelemetry SDK spans": spans_tool,
    }
    if target == "ep4":
        result["timers with a barrier"] = barrier_timers
    return result


def run_block(tool: Tool, model: Any, run: Callable[[Any], Any], steps: int) -> Block:
    """One block."""
    with tool(model) as around:
        wall_s = cpu_s = 0.0
        for step in range(-WARM_STEPS, steps):
            if step == 0:
                wall_s, cpu_s = time.perf_counter(), time.process_time()
            with around(step):
                run(model)
        wall_s = time.perf_counter() - wall_s
    # What a tool has put off is done when it is detached.
    return Block(wall_s=wall_s, cpu_s=time.process_time() - cpu_s)


def block_rows(target: str, model: Any, run: Callable[[Any], Any], options: Options) -> list[str]:
    """Rows of one target."""
    have = tools(target, options) if options.pairs else {}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in have}
    plain = []
    generator = random.Random(3)  # the same order on every rank
    for tool in (nothing, *have.values()):
        # What an engine, or a tool, does once only is no step's cost.
        run_block(tool, model, run, WARM_STEPS)
    for pair in range(options.pairs):
        names = list(have)
        generator.shuffle(names)
        for name in names:
            order = (nothing, have[name]) if pair % 2 else (have[name], nothing)
            blocks = [run_block(tool, model, run, options.block) for tool in order]
            without, with_tool = blocks if pair % 2 else reversed(blocks)
            plain.append(without.wall_s / options.block)
            ratios[name].append((with_tool.wall_s / without.wall_s, with_tool.cpu_s / without.cpu_s))
    rows = []
    for name, values in ratios.items():
        walls = [wall for wall, _ in values]
        low, high = interval(walls)
        cpu = statistics.median(cpu for _, cpu in values)
        rows.append(
            f"| {target} | {statistics.median(plain) * 1e3:.1f} | {name} | {statistics.median(walls):.3f} | "
            f"{low:.3f} to {high:.3f} | {cpu:.3f} |"
        )
    return rows


# --- targets ---------------------------------------------------------------------------------------


def transformers_target(name: str, options: Options) -> tuple[list[str], list[str]]:
    """`eager`, `grouped` or `train`, in this process."""
    torch.set_num_threads(1)
    plain, traced = (make_model(8, 32, 128) for _ in range(2))
    share_tensors(plain, traced)
    for model in (plain, traced):
        model.set_experts_implementation("eager" if name == "eager" else "grouped_mm")
    tokens = torch.randint(2, 2048, (4, 96))
    trains = name == "train"
    optimizer = torch.optim.SGD(traced.parameters(), lr=1e-3)  # of both: they hold the same tensors

    def run(model: Any) -> None:
        if not trains:
            model(input_ids=tokens, use_cache=False)
            return
        with moetrace.step() if model is traced else contextlib.nullcontext():
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()

    # A training step is several times as long: fewer of them, and as much time to go by.
    steps = options.steps // 2 if trains else options.steps
    with torch.set_grad_enabled(trains):
        pairs = pair_rows(name, step_pairs(plain, traced, run, steps, options.endpoint))
        return pairs, block_rows(name, traced, run, options)


def ranks_target(options: Options) -> tuple[list[str], list[str]]:
    """`ep4`: four processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (4, folder, options), nprocs=4)
        return tuple(Path(folder, name).read_text().splitlines() for name in ("pairs", "blocks"))  # type: ignore[return-value]


def one_rank(rank: int, ranks: int, folder: str, options: Options) -> None:
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
    plain, traced = (build(MODELS["olmoe"], ranks) for _ in range(2))
    share_tensors(plain, traced)
    batch = Batches(rank, VOCABULARY, batch=4, length=96).at(0)

    def run(model: Any) -> None:
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)

    with torch.no_grad():
        # Ranks share the cores: fewer steps of each, and as much to go by.
        mine = step_pairs(plain, traced, run, options.steps // 2, options.endpoint)
        of_ranks: list[dict[str, Pairs]] = [mine] * ranks
        torch.distributed.all_gather_object(of_ranks, mine)
        blocks = block_rows("ep4", traced, run, options)
    if rank == 0:
        found = {sample: pooled([one[sample] for one in of_ranks]) for sample in mine}
        Path(folder, "pairs").write_text("\n".join(pair_rows("ep4", found)))
        Path(folder, "blocks").write_text("\n".join(blocks))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    leave()


def vllm_target(options: Options) -> tuple[list[str], list[str]]:
    """`vllm`: its engine in this process, prompts and decode steps of one small model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks" / "cases"))
    from vllm import SamplingParams
    from vllm_engine import engine  # sets the engine's environment; before vllm is imported

    llm, models = engine(compiled=False), []
    llm.apply_model(models.append)
    sampling = SamplingParams(max_tokens=FORWARDS["vllm"], temperature=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(5, 69))} for _ in range(4)]
    return [], block_rows(
        "vllm", models[0], lambda model: llm.generate(prompts, sampling, use_tqdm=False), options
    )


def report(options: Options, pairs: list[str], blocks: list[str]) -> str:
    """The section's text."""
    command = (
        f"python benchmarks/tool_cost.py --targets {options.targets} --steps {options.steps} "
        f"--pairs {options.pairs} --block {options.block}"
    )
    said = f"`{command}`, torch {torch.__version__}."
    for name, note in NOTES.items():
        said += f" {note}" if name in options.targets.split(",") else ""
    lines = [said]
    if pairs:
        lines += [
            "",
            "CPU time that moetrace takes of a step, from steps in pairs; the background's counted as if the "
            "model waited for it:",
            "",
            "| target | ms of CPU per step without | sampled | model's thread | background | together | "
            "95 % interval | untrimmed | ms per recorded step | pairs |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *pairs,
        ]
    if blocks:
        lines += [
            "",
            "Tools, in blocks of steps; with the tool / without, medians of pairs of blocks:",
            "",
            "| target | ms per step without | tool | wall time | 95 % interval | CPU time |",
            "|---|---|---|---|---|---|",
            *blocks,
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure the targets that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="eager,grouped,train,ep4")
    parser.add_argument("--steps", type=int, default=600, help="pairs of steps at one step in ten")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of blocks per tool; 0 leaves them out")
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    given = parser.parse_args()
    options = Options(
        targets=given.targets,
        steps=given.steps,
        pairs=given.pairs,
        block=given.block,
        endpoint=good_server(),
    )
    pairs: list[str] = []
    blocks: list[str] = []
    for name in options.targets.split(","):
        if name == "ep4":
            found = ranks_target(options)
        elif name == "vllm":
            found = vllm_target(options)
        else:
            found = transformers_target(name, options)
        pairs += found[0]
        blocks += found[1]
        print("\n".join((*found[0], *found[1])), flush=True)
    text = report(options, pairs, blocks)
    if given.write:
        key = "tool_cost_vllm" if options.targets == "vllm" else "tool_cost"
        write_section(key, f"A step under each tool ({options.targets})", text)


if __name__ == "__main__":
    main()
