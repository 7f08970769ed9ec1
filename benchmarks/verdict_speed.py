"""Time to join and judge one step on one core, over ranks.

A step of 61 layers (549 rows per rank with 2 exchanges a layer) in groups of 64 ranks and in one group of all
ranks. Join: `Joiner.add` of every rank's decoded record up to the complete step. Verdict:
`VerdictEngine.judge` with a filled history and a slow rank to explain. CPU time of the process (it has one
thread), so that other work on the machine counts little; medians over repeats.

    python benchmarks/verdict_speed.py [--repeats 15] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from results import write_section

from moetrace_collectors.joiner import Joiner, JoinWindow
from moetrace_collectors.model import JoinedStep
from moetrace_collectors.simulate import Injection, SimulatedRun, simulate
from moetrace_collectors.verdict import VerdictEngine
from moetrace_schemas.enums import Cause, Evidence

LAYERS = 61
RANKS = (64, 128, 256, 512, 1024)
WINDOW = JoinWindow(timeout_ns=10**12, max_steps=8, max_bytes=2**34, max_closed_steps=64)
HISTORY = 12
"""Steps judged before the clock starts, so that every part of the evidence is at work."""


def one_step(ranks: int, group: int) -> JoinedStep:
    run = SimulatedRun(
        num_ranks=ranks,
        ep_size=group,
        num_layers=LAYERS,
        num_experts=max(256, group),
        num_tokens=256,
        top_k=8,
        gemm_ns_per_row=300.0,
        num_steps=1,
        injections=(Injection(cause=Cause.DEVICE, rank=2, extension=0.05),),
    )
    return next(simulate(run)).joined


def repeated(step: JoinedStep, count: int) -> Iterator[JoinedStep]:
    for index in range(count):
        records = tuple(replace(record, step=index) for record in step.rank_steps)
        yield replace(step, step=index, rank_steps=records)


def measure(ranks: int, group: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds of join and of verdict."""
    joiner, engine = Joiner(WINDOW), VerdictEngine()
    joins, verdicts = [], []
    for index, step in enumerate(repeated(one_step(ranks, group), HISTORY + repeats)):
        start = time.process_time()
        outcomes = [outcome for record in step.rank_steps for outcome in joiner.add(record, now_ns=index)]
        middle = time.process_time()
        (joined,) = outcomes
        assert isinstance(joined, JoinedStep)
        verdict = engine.judge(joined)
        end = time.process_time()
        if index >= HISTORY:
            assert verdict.evidence is Evidence.CLEAR, verdict.reason
            joins.append((middle - start) * 1e3)
            verdicts.append((end - middle) * 1e3)
    return statistics.median(joins), statistics.median(verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to join and judge one step.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    arguments = parser.parse_args()
    lines = ["| ranks | groups | join ms | verdict ms | sum ms | us per rank |", "|---|---|---|---|---|---|"]
    print(lines[0])
    for ranks in RANKS:
        for group in dict.fromkeys((64, ranks)):
            join, verdict = measure(ranks, group, arguments.repeats)
            total = join + verdict
            lines.append(
                f"| {ranks} | {ranks // group} of {group} | {join:.1f} | {verdict:.1f} | {total:.1f} | "
                f"{1e3 * total / ranks:.0f} |"
            )
            print(lines[-1], flush=True)
    if arguments.write:
        text = (
            f"One step of {LAYERS} layers, CPU time, one thread; medians of {arguments.repeats}. "
            f"`python benchmarks/verdict_speed.py --repeats {arguments.repeats} --write`.\n\n"
            + "\n".join(lines)
        )
        write_section("verdict_speed", "Join and verdict of one step", text)


if __name__ == "__main__":
    main()
