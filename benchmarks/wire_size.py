"""Bytes on the wire per rank and step, and what compressing them costs at each level.

Spans of steps with the phases of an expert-parallel layer and counts drawn from a skewed distribution,
encoded by the exporter that ranks use; 32 steps to a request, as the emitter sends a backlog, and one.

    python benchmarks/wire_size.py [--write]
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from isal import isal_zlib
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from results import write_section

from moetrace.config import Config
from moetrace.context import RankContext
from moetrace.emit.otlp import to_span
from moetrace.record.types import ExpertRow, PhaseRow, StepRecord, TrafficRecord
from moetrace_schemas.columns import RowFlag
from moetrace_schemas.enums import CountKind, Direction, ForwardMode, Phase

SHAPES = ((8, 32, 4), (24, 64, 8), (61, 256, 32))
"""(MoE layers, experts, ranks of the group)."""
PHASES = (
    Phase.OUTSIDE, Phase.ROUTER, Phase.PERMUTE, Phase.DISPATCH, Phase.EXPERT_GEMM, Phase.COMBINE,
    Phase.UNPERMUTE,
)  # fmt: skip
BARRIERS = (Phase.DISPATCH, Phase.COMBINE)
TOKENS, TOP_K = 4096, 8


def record(step: int, layers: int, experts: int, ranks: int, draw: random.Random) -> StepRecord:
    """A step of one rank."""
    rows, counts, traffic, at = [], [], [], 0
    for layer in range(layers):
        for phase in PHASES:
            duration = int(draw.lognormvariate(11, 0.5))
            rows.append(
                PhaseRow(
                    layer=layer,
                    phase=phase,
                    direction=Direction.FORWARD,
                    microbatch=0,
                    ordinal=0,
                    stream=0,
                    flags=int(RowFlag.BARRIER) if phase in BARRIERS else 0,
                    start_offset_ns=at,
                    duration_ns=duration,
                )
            )
            at += duration
        weights = [draw.lognormvariate(0, 0.8) for _ in range(experts)]
        share = TOKENS * TOP_K / sum(weights)
        counts.append(
            ExpertRow(layer=layer, kind=CountKind.ROUTED, counts=tuple(int(w * share) for w in weights))
        )
        sent = tuple(int(draw.gauss(TOKENS * TOP_K / ranks, 200)) for _ in range(ranks))
        traffic += [TrafficRecord(layer=layer, phase=phase, row_bytes=14336, rows=sent) for phase in BARRIERS]
    return StepRecord(
        step=step,
        microbatch=0,
        forward_mode=ForwardMode.TRAIN,
        cohort="",
        warmup=False,
        placement_version=1,
        clock="cuda",
        start_unix_ns=1_900_000_000_000_000_000 + step * at,
        duration_ns=at,
        phases=tuple(rows),
        experts=tuple(counts),
        traffic=tuple(traffic),
    )


def compressed(bodies: list[bytes], pack: Callable[[bytes], bytes]) -> tuple[int, float]:
    """Bytes in all, and the median of three times in us."""
    times, size = [], 0
    for _ in range(3):
        start = time.thread_time_ns()
        size = sum(len(pack(body)) for body in bodies)
        times.append((time.thread_time_ns() - start) / 1e3)
    return size, statistics.median(times)


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    lines = [
        "`python benchmarks/wire_size.py`; counts of "
        f"{TOKENS} tokens with top {TOP_K}. The library sends at level 1, by isal where it is installed and "
        "by zlib where it is not; 9 is what the exporter of opentelemetry does by itself. Times: CPU.",
        "",
        "| layers x experts, ranks | steps per request | bytes per step | gzip 1 | gzip 1 by isal | gzip 9 "
        "| per phase row, gzip 1 | time of gzip 9 / gzip 1 | time of isal / gzip 1 | gzip 1, us per step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    draw = random.Random(5)
    for layers, experts, ranks in SHAPES:
        identity: Any = SimpleNamespace(
            config=Config.load({"model_version": "r1"}),
            context=RankContext(
                run_id="wire",
                rank=3,
                world_size=ranks,
                ep_rank=3,
                ep_size=ranks,
                ep_group=0,
                host_name="node-1",
            ),
            model_name="model",
        )
        spans = [to_span(record(step, layers, experts, ranks, draw), identity) for step in range(32)]
        for per_request in (1, 32):
            bodies = [
                encode_spans(spans[at : at + per_request]).SerializeToString()
                for at in range(0, 32, per_request)
            ]
            raw = sum(map(len, bodies))
            quick, quick_us = compressed(bodies, partial(gzip.compress, compresslevel=1))
            isal, isal_us = compressed(bodies, partial(isal_zlib.compress, level=1, wbits=31))
            best, best_us = compressed(bodies, partial(gzip.compress, compresslevel=9))
            lines.append(
                f"| {layers} x {experts}, {ranks} | {per_request} | {raw / 32:,.0f} | {quick / 32:,.0f} "
                f"| {isal / 32:,.0f} | {best / 32:,.0f} | {quick / 32 / (layers * len(PHASES)):.1f} "
                f"| {best_us / quick_us:.1f} | {isal_us / quick_us:.2f} | {quick_us / 32:.0f} |"
            )
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_section("wire_size", "Bytes on the wire", text)


if __name__ == "__main__":
    main()
