"""The GPU kit: checks, then costs; prints a table, writes JSON, exits 1 where a check failed.

    benchmarks/gpu/run_all.sh [--device cuda|cpu] [--quick] [--output FILE]

With `--device cpu --quick` the kit itself is tried where there is no GPU; what needs one says `skipped`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import checks
import costs
import torch
from moe_model import FULL, QUICK, Model
from outcome import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "run_all: torch sees no CUDA device here; --device cpu --quick tries the kit without one",
            file=sys.stderr,
        )
        return 2
    shape, rounds = (QUICK, 5) if options.quick else (FULL, 30)
    started = time.monotonic()
    device = torch.device(options.device)
    dtype = torch.bfloat16
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = Model(shape).to(device, dtype)
    decode = torch.randn(shape.decode_tokens, shape.hidden, device=device, dtype=dtype)
    prefill = torch.randn(shape.prefill_tokens, shape.hidden, device=device, dtype=dtype)
    outcomes: list[Outcome] = []
    for run in (
        lambda: checks.no_sync(model, decode),
        lambda: checks.numerics(model, decode),
        lambda: checks.counts(model, prefill),
        lambda: checks.event_times(model, prefill),
        lambda: checks.kernel_times(model, prefill),
        lambda: checks.compiled(model, decode),
        lambda: checks.graphs(model, decode),
        lambda: costs.mark_pair(decode, 100 if options.quick else 2000),
        lambda: costs.steps("decode, eager", model, decode, rounds),
        lambda: costs.steps("decode, CUDA graph", model, decode, rounds, graph=True),
        lambda: costs.steps("prefill, eager", model, prefill, rounds),
        lambda: costs.kernels(model, prefill, rounds),
    ):
        outcomes.append(_guarded(run))
        print(f"{outcomes[-1].state:9}{outcomes[-1].name}: {outcomes[-1].said}", flush=True)
    options.output.write_text(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                "torch": torch.__version__,
                "quick": options.quick,
                "seconds": round(time.monotonic() - started, 1),
                "outcomes": [asdict(outcome) for outcome in outcomes],
            },
            indent=1,
        )
        + "\n"
    )
    return 1 if any(outcome.state == "fail" for outcome in outcomes) else 0


def _guarded(run: Callable[[], Outcome]) -> Outcome:
    """One check that breaks must not cost the answers of the others."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - reported as a failed check
        traceback.print_exc()
        return Outcome(name="broken check", state="fail", said=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
