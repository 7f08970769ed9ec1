"""One rank of test_idle_ranks: one real MoE layer over gloo; its batches are those of PLAN.

    python idle_rank_worker.py RANK RENDEZVOUS OUTPUT ENDPOINT

What the router chose is taken from its projection by a forward hook, which knows nothing of moetrace.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from moetrace.demo.leave import leave

RUN = "idle-rank"
EXPERTS, TOP_K, RANKS = 4, 2, 2
REAL, DUMMY = False, True
PLAN = (
    ([(REAL, 6)], [(REAL, 5)]),
    ([(REAL, 6)], [(DUMMY, 1)]),
    ([(REAL, 6)], [(DUMMY, 0)]),
    ([(REAL, 6), (REAL, 4)], [(REAL, 5), (DUMMY, 1)]),
)
"""By step and rank: batches, real or dummy, and their tokens. The last step is open around two of them."""


def main() -> None:
    """All steps; one JSON document."""
    rank = int(sys.argv[1])
    import torch
    import torch.distributed as distributed

    import moetrace
    from moetrace.adapters.base import EngineCall, StepFacts
    from moetrace.adapters.reference import ReferenceMoE
    from moetrace.emit.otlp import OtlpEmitter
    from moetrace.instrument.step_kind import engine_step
    from moetrace.testing import MemoryEmitter
    from moetrace_schemas.enums import ForwardMode

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=2),
    )
    layer = ReferenceMoE(8, 16, num_experts=EXPERTS, top_k=TOP_K)
    chosen: list[list[int]] = []

    def look(module: Any, args: Any, logits: Any) -> None:
        ids = logits.topk(TOP_K, dim=-1).indices
        chosen.append(torch.bincount(ids.reshape(-1), minlength=EXPERTS).tolist())

    layer.gate.register_forward_hook(look)
    emitter = MemoryEmitter()
    tracer = moetrace.init(
        run_id=RUN,
        rank=rank,
        world_size=RANKS,
        emitters=[emitter],
        endpoint=sys.argv[4],
        warmup_steps=0,
        check_steps=1,
        forward_mode="decode",
    )
    tracer.drain.emitters.append(OtlpEmitter(lambda: tracer, tracer.metrics, tracer.config))
    moetrace.instrument(layer, strict=True)
    tokens = torch.Generator().manual_seed(1 + rank)

    def run(batch: tuple[bool, int]) -> None:
        with torch.no_grad():
            layer(torch.randn(batch[1], 8, generator=tokens))

    def facts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepFacts:
        return StepFacts(forward_mode=ForwardMode.DECODE, dummy=args[0][0])

    engine_run = engine_step(run, tracer, EngineCall(owner=0, attribute="run", read=facts))
    for step, of_ranks in enumerate(PLAN):
        batches = of_ranks[rank]
        with moetrace.step(step, dummy=len(batches) == 1 and batches[0][0] is DUMMY):
            for batch in batches:
                (run if len(batches) == 1 else engine_run)(batch)
    moetrace.shutdown()
    document = {
        "chosen": chosen,
        "errors": tracer.guard.errors,
        "sent": tracer.metrics.exported["otlp"],
        "steps": [
            {
                "counts": {row.kind: row.counts for row in record.experts},
                "sent": {row.phase: row.rows for row in record.traffic},
                "violations": [[row.violation, row.count] for row in record.violations],
            }
            for record in emitter.records
        ],
    }
    Path(sys.argv[3]).write_text(json.dumps(document))
    distributed.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
