"""What marks cost a compiled step, per mark and in all: not instrumented, sampled out, recorded.

Per mark: a graph of marks alone against one without, from inductor's code and from the `eager` backend
(whose code calls the op); beside them the floor, an op of nothing that is defined as ours is. In all: a
compiled decoder of small MoE blocks (a graph, six marks and a count per block) against the same one
without instrumentation. What is left besides the marks is guards, which torch.compile checks in front of
a graph in every step, fusion that ends at a mark, and, where a step is recorded, the counts. A recorded step
is taken twice: alone after a pause, when none of its code is in a cache, and as one of many in a row, in CPU
time of the model's thread. One thread, CPU; conditions are interleaved round by round; medians of rounds.

    python benchmarks/compiled_cost.py [--rounds 15] [--blocks 16] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from overhead import Discarding
from results import write_section
from torch import nn

import moetrace
from moetrace.instrument.recorders import key_of
from moetrace.record.sites import Role, Site
from moetrace_schemas.enums import Phase

MARKS = 100


class Router(nn.Module):
    """Top-2 of 8."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, hidden) / 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits, weights, ids)."""
        logits = tokens @ self.weight.t()
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        return logits, weights, ids


class Experts(nn.Module):
    """All experts over all tokens: nothing depends on the data, so that a model is one graph."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.randn(8, hidden, hidden) / 8)
        self.down = nn.Parameter(torch.randn(8, hidden, hidden) / 8)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts."""
        each = torch.einsum("td,edh->eth", tokens, self.up).relu() @ self.down
        share = torch.zeros(len(tokens), 8).scatter(1, ids, weights)
        return torch.einsum("etd,te->td", each, share)


class Block(nn.Module):
    """A MoE block as transformers builds it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(hidden), Experts(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        _, weights, ids = self.gate(tokens)
        return self.experts(tokens, ids, weights)


class Decoder(nn.Module):
    """Blocks with residuals."""

    def __init__(self, blocks: int, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            tokens = tokens + layer(tokens)
        return tokens


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Of a call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def median_cpu_us(call: Callable[[], Any], calls: int, between: Callable[[], Any]) -> float:
    """CPU time of this thread in a call, with something after every fourth that does not count."""
    times = []
    for at in range(calls):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
        if at % 4 == 3:
            between()
    return statistics.median(times) / 1e3


def define_floor() -> Any:
    """An op of nothing, defined as ours are; what the dispatcher and Python cost at least."""
    library: Any = torch.library.Library("moetrace_floor", "FRAGMENT")
    library.define("nothing(Tensor[] reads, int key, int site) -> ()")
    library.impl("nothing", lambda reads, key, site: None, "CompositeExplicitAutograd")
    return library


def marks_alone(key: int, site: int) -> dict[str, Callable[[], Any]]:
    """Calls of graphs with marks, and of the same without."""
    tokens = torch.randn(4, 4)

    def marked(x: torch.Tensor) -> torch.Tensor:
        for _ in range(MARKS // 2):
            torch.ops.moetrace.begin([x], key, site)
            torch.ops.moetrace.end([x], key, site)
        return x + 1

    calls: dict[str, Callable[[], Any]] = {}
    for backend in ("inductor", "eager"):
        for name, function in (("bare", lambda x: x + 1), (backend, marked)):
            run = torch.compile(function, backend=backend, fullgraph=True)
            run(tokens)
            calls[f"{backend}/{name}"] = lambda run=run: run(tokens)
    nothing = torch.ops.moetrace_floor.nothing.default
    calls["floor"] = lambda: [nothing([tokens], key, site) for _ in range(MARKS)]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    library = define_floor()
    plain, model = Decoder(options.blocks), Decoder(options.blocks)
    tracer = moetrace.init(run_id="compiled", endpoint="", emitters=[Discarding()], sample="1/1")
    moetrace.instrument(model)
    site = tracer.sites.add(Site(Role.PHASE, Phase.ROUTER, 0, "benchmark"))
    alone = marks_alone(key_of(tracer), site)
    tokens = torch.randn(64, 32)
    run_plain, run = (torch.compile(m, fullgraph=True) for m in (plain, model))
    run_plain(tokens)
    full, quiet = tracer.config, moetrace.Config.load({"sample": "0", "run_id": "compiled"})

    def step() -> None:
        with tracer.step():
            run(tokens)

    def wait_for_drain() -> None:
        while tracer._buffers.pool is not None and len(tracer._buffers.pool._free) < full.buffers:
            time.sleep(0.001)

    step()
    rows: dict[str, list[float]] = {}
    for _ in range(options.rounds + 1):
        tracer.config = quiet
        figures = {name: median_us(call, options.calls) for name, call in alone.items()}
        figures["step, not instrumented"] = median_us(lambda: run_plain(tokens), options.calls)
        figures["step, sampled out"] = median_us(step, options.calls)
        tracer.config = full
        with tracer.step():
            figures["inductor/on"] = median_us(alone["inductor/inductor"], 20)
        wait_for_drain()
        # One at a time: the drain thread shares the interpreter's lock with a tight loop. Whatever has
        # slept is slower at first, so that the other side of the comparison sleeps as well.
        pairs = []
        for _ in range(20):
            time.sleep(0.002)
            alone_us = median_us(lambda: run_plain(tokens), 1)
            wait_for_drain()
            time.sleep(0.002)
            pairs.append((alone_us, median_us(step, 1)))
        figures["step after a pause"] = statistics.median(one for one, _ in pairs)
        figures["step, recorded"] = statistics.median(other for _, other in pairs)
        wait_for_drain()
        figures["step of many, recorded"] = median_cpu_us(step, options.calls, wait_for_drain)
        figures["step of many"] = median_cpu_us(
            lambda: run_plain(tokens), options.calls, lambda: time.sleep(0.002)
        )
        for name, value in figures.items():
            rows.setdefault(name, []).append(value)
    moetrace.shutdown()
    del library
    rows = {name: values[1:] for name, values in rows.items()}

    def median_of(one: str, other: str | None, share: float) -> float:
        base = rows[other] if other is not None else [0.0] * len(rows[one])
        return statistics.median((a - b) / share for a, b in zip(rows[one], base, strict=True))

    boundaries = 6 * options.blocks
    code_out = median_of("inductor/inductor", "inductor/bare", MARKS)
    code_on = median_of("inductor/on", "inductor/bare", MARKS)
    op_out = median_of("eager/eager", "eager/bare", MARKS)
    lines = [
        f"`python benchmarks/compiled_cost.py --rounds {options.rounds} --blocks {options.blocks}`, torch "
        f"{torch.__version__}, one thread; compiled step of {options.blocks} small blocks, not instrumented: "
        f"{statistics.median(rows['step, not instrumented']):.0f} us",
        "",
        "| what | us (median of rounds) |",
        "|---|---|",
        f"| mark in inductor's code, sampled out | {code_out:.3f} |",
        f"| mark in inductor's code, recorded | {code_on:.3f} |",
        f"| mark called as an op (backend eager), sampled out | {op_out:.3f} |",
        f"| an op of nothing, for comparison | {median_of('floor', None, MARKS):.3f} |",
        "| whole step, sampled out, per boundary | "
        f"{median_of('step, sampled out', 'step, not instrumented', boundaries):.3f} |",
        "| whole step, recorded, one of many in a row, per boundary | "
        f"{median_of('step of many, recorded', 'step of many', boundaries):.3f} |",
        "| whole step, recorded, alone after a pause, per boundary | "
        f"{median_of('step, recorded', 'step after a pause', boundaries):.3f} |",
    ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_section("compiled_cost", "What marks cost a compiled step", text)


if __name__ == "__main__":
    main()
