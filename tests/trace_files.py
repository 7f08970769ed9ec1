"""PyTorch profiler traces of a small expert-parallel run, made up with known durations and barriers.

Per step and layer, each rank does::

    attention 100   router 20   permute 30   <dispatch 40>   expert_gemm 100   <combine 30>   unpermute 15

(us), and an exchange ends on all ranks `its transfer` after the last of them has come. Kernels carry either
the names of real kernels or no known name at all, under annotations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORK_US = {"attention": 100.0, "router": 20.0, "permute": 30.0, "expert_gemm": 100.0, "unpermute": 15.0}
TRANSFER_US = {"dispatch": 40.0, "combine": 30.0}
ORDER = ("attention", "router", "permute", "dispatch", "expert_gemm", "combine", "unpermute")
REAL_NAMES = {
    "attention": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)",
    "router": "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(float const*, bool const*, float*)",
    "permute": "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int)",
    "dispatch": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "expert_gemm": "fused_moe_kernel",
    "combine": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "unpermute": "void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, int)",
}
LAUNCH_US = 2.0
"""How long before its kernel starts a launch is made."""
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20


def moe_traces(
    *,
    ranks: int = 4,
    steps: int = 6,
    layers: int = 3,
    delays: Mapping[tuple[int, str, int], float] | None = None,
    annotated: bool = False,
    grouped: bool = True,
    world_size: int | None = None,
) -> list[dict[str, Any]]:
    """One trace document per rank.

    Args:
        ranks: Ranks, all of one expert-parallel group.
        steps: Profiler steps.
        layers: MoE layers.
        delays: (rank, phase, layer) -> us more than the others, in every step.
        annotated: Annotations around launches and kernels of no known name, in place of real names.
        grouped: Exchanges tell their process group.
        world_size: Ranks of the job; more than `ranks` where not all are here.
    """
    delays = delays or {}
    now = [1_000.0 + 3 * rank for rank in range(ranks)]
    events: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    correlation = 0
    for step in range(steps):
        begun = [time - 10 for time in now]
        for layer in range(layers):
            for phase in ORDER:
                correlation += 1
                started = list(now)
                if phase in TRANSFER_US:
                    now = [max(started) + TRANSFER_US[phase]] * ranks
                else:
                    # A little of its own per step and rank, as real work has.
                    now = [
                        time
                        + WORK_US[phase]
                        + delays.get((rank, phase, layer), 0.0)
                        + (step * 7 + rank * 5 + layer * 3) % 4 * 0.25
                        for rank, time in enumerate(started)
                    ]
                for rank in range(ranks):
                    events[rank] += _kernel(
                        rank, phase, layer, started[rank], now[rank], correlation, ranks, annotated, grouped
                    )
        for rank in range(ranks):
            events[rank].append(
                _annotation(f"ProfilerStep#{step}", begun[rank], now[rank] - LAUNCH_US - 1, rank)
            )
    return [
        {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size or ranks},
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
            "traceEvents": events[rank],
        }
        for rank in range(ranks)
    ]


def write_traces(directory: Path, traces: list[dict[str, Any]]) -> list[Path]:
    """Write one file per rank; returns their paths."""
    paths = []
    for rank, trace in enumerate(traces):
        path = directory / f"trace_{rank}.json"
        path.write_text(json.dumps(trace))
        paths.append(path)
    return paths


def _kernel(
    rank: int,
    phase: str,
    layer: int,
    start: float,
    end: float,
    correlation: int,
    ranks: int,
    annotated: bool,
    grouped: bool,
) -> list[dict[str, Any]]:
    exchange = phase in TRANSFER_US
    stream = COMMUNICATION_STREAM if exchange else COMPUTE_STREAM
    name = f"kernel_{len(phase)}" if annotated and not exchange else REAL_NAMES[phase]
    args: dict[str, Any] = {"correlation": correlation, "device": rank, "stream": stream}
    if exchange:
        args |= {"Collective name": "all_to_allv", "In msg nelems": 100 + rank, "dtype": "BFloat16"}
        if grouped:
            args |= {
                "Process Group Name": "7",
                "Process Group Ranks": str(list(range(ranks))),
                "Group size": ranks,
            }
    launch = start - LAUNCH_US
    made = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream, "ts": start,
         "dur": end - start, "args": args},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 99, "tid": 1, "ts": launch,
         "dur": 1.0, "args": {"correlation": correlation}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 99, "tid": 1, "ts": launch - 0.5, "dur": 2.0},
    ]  # fmt: skip
    if annotated:
        mark = "attn" if phase == "attention" else phase
        made.append(_annotation(f"layers.{layer}.moe.{mark}", launch - 0.25, launch + 1.5, rank))
    return made


def _annotation(name: str, start: float, end: float, rank: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 99,
        "tid": 1,
        "ts": start,
        "dur": end - start,
    }
