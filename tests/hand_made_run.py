"""A small run with known answers, written into the embedded engine by `python -m hand_made_run STORE_PATH`.

The engine serves one path per process, so tests write and read stores in processes of their own.

::

    3 ranks, 2 MoE layers, 4 experts, steps 0 to 6, names full of markup
    step 0          warm-up; its counts are huge, and must be in no figure
    steps 1 to 4    rank 2, expert_gemm, layer 1, clear; worth 30, 20, 40, 30 ms of 50;
                    cause device, in step 4 unknown
    step 5          decode; rank 0, outside, ambiguous; worth 10 ms
    step 6          rank 1 missing, insufficient

    step 3 in detail: clocks of ranks 1 and 2 are wrong by +5 ms and -7 ms
    layer 1         rank 0  |gemm 10|~~ wait 30 ~~|2|     combine of 32 ms
                    rank 1  |gemm 12 |~ wait 28 ~~|2|                30 ms
                    rank 2  |======= gemm 40 =====|2|                 2 ms

    layer 0 is even (10 pairs per expert, rank and step); in layer 1 expert 3 gets 70 and the others 10
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

RUN_ID = "run <script>alert(1)</script> & 'quotes\" \\ tab"
MODEL_NAME = "model</style><img src=x onerror=alert(2)>"
HOST_NAME = "host</script><b>"
NUM_RANKS, NUM_LAYERS, NUM_EXPERTS = 3, 2, 4
MS = 1_000_000
WORST_STEP = 3
WORTH_MS = {1: 30, 2: 20, 3: 40, 4: 30, 5: 10}
CLOCK_ERROR_NS = (0, 5 * MS, -7 * MS)
GEMM_MS = (10, 12, 40)


def main(path: str) -> None:
    """Migrate the store at `path` and fill it."""
    from moetrace_collectors.migrate import migrate
    from moetrace_collectors.store import embedded_dsn, open_client, parse_store

    client = open_client(parse_store(embedded_dsn(Path(path))))
    migrate(client, database="moetrace")
    start = time.time_ns() - 3_600 * 10**9
    for table, rows in tables(start).items():
        names = list(rows[0])
        client.insert(f"moetrace.{table}", [list(row.values()) for row in rows], column_names=names)
    # Delivery is at least once: the same verdict again, as a second insert.
    again = tables(start)["step_verdicts"][1]
    client.insert("moetrace.step_verdicts", [list(again.values())], column_names=list(again))
    client.close()


def tables(start: int) -> dict[str, list[dict[str, Any]]]:
    """Rows by table; `start` is the unix time of step 0 in ns."""
    return {
        "rank_steps": [row for step in range(7) for row in _rank_steps(step, start)],
        "step_verdicts": [_verdict(step, start) for step in range(7)],
        "expert_loads": [row for step in range(7) for row in _expert_loads(step, start)],
        "rank_traffic": [row for step in range(1, 7) for row in _traffic(step, start)],
        "phase_spans": _phase_spans(start),
        "step_barriers": _barriers(start),
        "collector_events": _events(),
    }


def _ranks(step: int) -> list[int]:
    return [0, 2] if step == 6 else [0, 1, 2]


def _mode(step: int) -> str:
    return "decode" if step == 5 else "prefill"


def _cohort(step: int) -> str:
    return "prose" if step % 2 else "code"


def _time(step: int, start: int) -> int:
    return start + step * 100 * MS


def _rank_steps(step: int, start: int) -> list[dict[str, Any]]:
    return [
        {
            "run_id": RUN_ID,
            "step": step,
            "rank": rank,
            "microbatch": 0,
            "trace_id": "a" * 32,
            "world_size": NUM_RANKS,
            "ep_group": 0,
            "ep_rank": rank,
            "ep_size": NUM_RANKS,
            "forward_mode": _mode(step),
            "cohort": _cohort(step),
            "model_name": MODEL_NAME,
            "model_version": "7",
            "host_name": HOST_NAME,
            "clock": "host",
            "sample_period": 1,
            "placement_version": 0,
            "warmup": int(step == 0),
            "late": 0,
            "start_time": _time(step, start) + CLOCK_ERROR_NS[rank],
            "duration_ns": 100 * MS,
        }
        for rank in _ranks(step)
    ]


def _verdict(step: int, start: int) -> dict[str, Any]:
    named = step in WORTH_MS
    fault = 1 <= step <= 4
    worth = WORTH_MS.get(step, 0) * MS
    return {
        "run_id": RUN_ID,
        "step": step,
        "step_time": _time(step, start),
        "forward_mode": _mode(step),
        "evidence": "clear" if fault else "ambiguous" if named else "insufficient",
        "reason": f"reason of step {step}",
        "rank": (2 if fault else 0) if named else None,
        "layer": 1 if fault else None,
        "phase": ("expert_gemm" if fault else "outside") if named else None,
        "cause": {4: "unknown", 5: "outside"}.get(step, "device" if fault else "unknown"),
        "worth_ns": worth,
        "share": worth / (50 * MS),
        "runner_up_rank": 1 if named else None,
        "runner_up_layer": None,
        "runner_up_phase": "permute" if named else None,
        "runner_up_worth_ns": 5 * MS if named else 0,
        "step_ns": (100 + step) * MS,
        "extension_ns": 50 * MS,
        "phase_ns": {"expert_gemm": 60 * MS, "outside": (40 + step) * MS},
        "world_size": NUM_RANKS,
        "missing_ranks": [1] if step == 6 else [],
        "closed_by": "timeout" if step == 6 else "complete",
        "warmup": int(step == 0),
    }


def _expert_loads(step: int, start: int) -> list[dict[str, Any]]:
    rows = []
    for rank in _ranks(step):
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                pairs = 1000 * (expert == 0) if step == 0 else 70 if (layer, expert) == (1, 3) else 10
                received = 30 * (expert == rank) if step else 0
                for kind, count in (("routed", pairs), ("padding", 1), ("received", received)):
                    rows.append(
                        {
                            "run_id": RUN_ID,
                            "step": step,
                            "layer": layer,
                            "count_kind": kind,
                            "forward_mode": _mode(step),
                            "cohort": _cohort(step),
                            "rank": rank,
                            "microbatch": 0,
                            "expert": expert,
                            "count": count,
                            "placement_version": 0,
                            "step_time": _time(step, start) // MS,
                        }
                    )
    return rows


def _traffic(step: int, start: int) -> list[dict[str, Any]]:
    return [
        {
            "run_id": RUN_ID,
            "step": step,
            "layer": 0,
            "phase": "dispatch",
            "forward_mode": _mode(step),
            "source_rank": source,
            "destination_ep_rank": destination,
            "microbatch": 0,
            "rows": 1 + destination,
            "bytes": 8 * (1 + destination),
            "source_host": HOST_NAME,
            "step_time": _time(step, start) // MS,
        }
        for source in _ranks(step)
        for destination in range(NUM_RANKS)
    ]


def _phase_spans(start: int) -> list[dict[str, Any]]:
    """Step 3: per layer router (1 ms), dispatch (2 ms), expert_gemm, combine; then 3 ms outside."""
    rows = []
    for rank in range(NUM_RANKS):
        now = _time(WORST_STEP, start) + CLOCK_ERROR_NS[rank]
        for layer in range(NUM_LAYERS):
            gemm = GEMM_MS[rank] if layer == 1 else 10
            combine = 2 + (max(GEMM_MS) if layer == 1 else 10) - gemm
            for phase, barrier, duration in (
                ("router", 0, 1),
                ("dispatch", 1, 2),
                ("expert_gemm", 0, gemm),
                ("combine", 1, combine),
            ):
                rows.append(_span(rank, layer, phase, barrier, now, duration * MS))
                now += duration * MS
        rows.append(_span(rank, -1, "outside", 0, now, 3 * MS))
    return rows


def _span(rank: int, layer: int, phase: str, barrier: int, start: int, duration: int) -> dict[str, Any]:
    return {
        "run_id": RUN_ID,
        "step": WORST_STEP,
        "layer": layer,
        "phase": phase,
        "direction": "forward",
        "microbatch": 0,
        "ordinal": 0,
        "rank": rank,
        "is_barrier": barrier,
        "ep_group": 0,
        "ep_rank": rank,
        "forward_mode": "prefill",
        "cohort": "prose",
        "stream": 0,
        "flags": barrier,
        "start_time": start,
        "duration_ns": duration,
        "bytes": -1,
        "rows": 120 if phase == "expert_gemm" else -1,
    }


def _barriers(start: int) -> list[dict[str, Any]]:
    rows = []
    for index, (layer, phase, releaser, work_phase, extension) in enumerate(
        (
            (0, "dispatch", 0, "router", 0),
            (0, "combine", 1, "expert_gemm", 0),
            (1, "dispatch", 0, "router", 0),
            (1, "combine", 2, "expert_gemm", 20),
            (-1, "outside", 2, "outside", 1),
        )
    ):
        rows.append(
            {
                "run_id": RUN_ID,
                "step": WORST_STEP,
                "step_time": _time(WORST_STEP, start),
                "ep_group": 0,
                "barrier": index,
                "layer": layer,
                "phase": phase,
                "direction": "forward",
                "microbatch": 0,
                "ordinal": 0,
                "releaser_rank": releaser,
                "work_phase": work_phase,
                "transfer_ns": 0 if layer < 0 else 2 * MS,
                "max_work_ns": 40 * MS,
                "mean_work_ns": 20 * MS,
                "extension_ns": extension * MS,
                "wait_sum_ns": 0,
                "ambiguous": 0,
            }
        )
    return rows


def _events() -> list[dict[str, Any]]:
    rejected = {"kind": "rejected", "reason": "malformed_request", "step": None, "rank": None, "detail": "x"}
    return [
        {"run_id": RUN_ID, "kind": "duplicate", "reason": "open", "step": 1, "rank": 0, "detail": "x"},
        {"run_id": RUN_ID, "kind": "partial", "reason": "timeout", "step": 6, "rank": None, "detail": "x"},
        {"run_id": "", **rejected},
        {"run_id": "another run", **rejected},
    ]


if __name__ == "__main__":
    main(sys.argv[1])
