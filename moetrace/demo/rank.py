"""One rank of the demo: `python -m moetrace.demo.rank --plan FILE --rank R --rendezvous FILE ...`.

A real process of a real job: gloo, transformers' own expert parallelism, a forward pass over real
text per step, moetrace instrumented as a user would. Progress goes to stdout, one number per step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from moetrace.demo.leave import leave
from moetrace.demo.plan import Injection, ModelSpec, Plan
from moetrace_schemas.enums import Phase

WARMUP_STEPS = 5
"""At most; of a very short run a quarter."""
BATCH = 4
LENGTH = 96


def load_plan(path: Path) -> Plan:
    """A plan written by `moetrace.demo.plan`."""
    data = json.loads(path.read_text())
    model = data["model"]
    return Plan(
        model=ModelSpec(**{**model, "layers": tuple(model["layers"])}),
        ranks=data["ranks"],
        steps=data["steps"],
        injections=tuple(Injection(**{**item, "phase": Phase(item["phase"])}) for item in data["injections"]),
    )


def main() -> int:
    """Run all steps; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="path of a file that does not exist yet")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--sample", default="1/1")
    options = parser.parse_args()
    plan = load_plan(options.plan)
    # Deprecation notes of frameworks are not this demo's to fix, and would hide its output.
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    if plan.ranks > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{options.rendezvous}",
            rank=options.rank,
            world_size=plan.ranks,
            timeout=timedelta(minutes=5),
        )
    run(plan, options)
    if plan.ranks > 1:
        distributed.destroy_process_group()
    return 0


def run(plan: Plan, options: Any) -> None:
    """Build, instrument, and run every step."""
    import torch

    import moetrace
    from moetrace.demo.inject import Injector
    from moetrace.demo.models import VOCABULARY, build
    from moetrace.demo.text import COHORTS, Batches

    model = build(plan.model, plan.ranks)
    injector = Injector(plan.injections, options.rank)
    injector.install(model)
    tracer = moetrace.init(
        run_id=options.run_id,
        endpoint=options.endpoint,
        rank=options.rank,
        world_size=plan.ranks,
        sample=options.sample,
        model_name=plan.model.name,
        model_version="random-0",
        cohorts=COHORTS,
        warmup_steps=min(WARMUP_STEPS, plan.steps // 4),
        forward_mode="prefill",
    )
    report = moetrace.instrument(model, strict=True)
    if options.rank == 0:
        print(report, file=sys.stderr)
    batches = Batches(options.rank, VOCABULARY, BATCH, LENGTH)
    with torch.no_grad():
        for step in range(plan.steps):
            injector.step = step
            with moetrace.step(step, cohort=COHORTS[(options.rank + step) % len(COHORTS)]):
                batch = batches.at(step)
                model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            print(step + 1, flush=True)
    delivered = moetrace.shutdown(timeout_s=20)
    metrics = tracer.metrics
    print(
        json.dumps(
            {
                "rank": options.rank,
                "sampled": metrics.steps_sampled,
                "exported": metrics.exported["otlp"],
                "dropped": {str(reason): count for reason, count in metrics.dropped.items()},
                "errors": tracer.guard.errors,
                "delivered": delivered,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    leave(main())
