"""One rank of test_rank_counts: runs demo models untraced and traced, and writes down what both saw.

    python expert_parallel_worker.py RANK WORLD_SIZE RENDEZVOUS OUTPUT ENDPOINT MODEL:MODE ...

Records also go to the collector at ENDPOINT, as the run that carries the case's name.

The router's choices are captured by forward hooks on its module, which know nothing of moetrace.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from moetrace.demo.leave import leave

STEPS = 3


def main() -> None:
    """Run every case; one JSON document."""
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),
    )
    cases = {name: run_case(rank, world_size, *name.split(":")) for name in sys.argv[6:]}
    Path(sys.argv[4]).write_text(json.dumps(cases))
    distributed.destroy_process_group()
    leave()


def run_case(rank: int, world_size: int, name: str, mode: str) -> dict[str, Any]:
    """One model, in one mode: inference, training, or training with activation checkpointing."""
    import moetrace
    from moetrace.demo.models import VOCABULARY, build
    from moetrace.demo.plan import MODELS
    from moetrace.demo.text import Batches
    from moetrace.emit.otlp import OtlpEmitter
    from moetrace.testing import MemoryEmitter

    spec = MODELS[name]
    model = build(spec, world_size)
    if mode == "checkpointed":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = Batches(rank, VOCABULARY, batch=2, length=32)
    chosen: dict[int, list[Any]] = {}
    hooks = [
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda module, args, result, layer=layer: chosen.setdefault(layer, []).append(result[-1].clone())
        )
        for layer in spec.layers
    ]
    plain, choices = [], []
    for step in range(STEPS):
        chosen.clear()
        plain.append(run_step(model, batches.at(step), mode))
        # Checkpointing asks the router again in backward: its first answer is that of the forward.
        choices.append({layer: ids[0] for layer, ids in chosen.items()})
    for hook in hooks:
        hook.remove()
    emitter = MemoryEmitter()
    tracer = moetrace.init(
        run_id=f"{name}:{mode}",
        rank=rank,
        world_size=world_size,
        emitters=[emitter],
        endpoint=sys.argv[5],
        warmup_steps=0,
        check_steps=1,
        coactivation_steps=1,
        coactivation_layers=len(spec.layers),
    )
    tracer.drain.emitters.append(OtlpEmitter(lambda: tracer, tracer.metrics, tracer.config))
    report = moetrace.instrument(model, strict=True)
    traced = []
    for step in range(STEPS):
        with moetrace.step(step):
            traced.append(run_step(model, batches.at(step), mode))
    moetrace.shutdown()
    return {
        "report": str(report),
        "num_experts": spec.num_experts,
        "layers": list(spec.layers),
        "bit_identical": [same(a, b) for a, b in zip(plain, traced, strict=True)],
        "tensors": [len(tensors) for tensors in plain],
        "errors": tracer.guard.errors,
        "sent": tracer.metrics.exported["otlp"],
        "ep": [tracer.context.ep_rank, tracer.context.ep_size, tracer.context.ep_group],
        "coverage": [tracer.metrics.expected_sites, tracer.metrics.seen_sites],
        "steps": [
            {
                "expected": expected(choices[record.step], batches.at(record.step), spec.num_experts),
                "counts": {f"{row.layer} {row.kind}": row.counts for row in record.experts},
                "traffic": {f"{row.layer} {row.phase}": row.rows for row in record.traffic},
                "row_bytes": sorted({row.row_bytes for row in record.traffic}),
                "violations": [[row.layer, row.violation, row.count] for row in record.violations],
                "pairs": pairs(choices[record.step], batches.at(record.step)),
                "duration": record.duration_ns,
                "rows": [
                    [row.layer, row.phase, row.direction, row.flags, row.duration_ns, row.rows, row.bytes]
                    for row in record.phases
                ],
            }
            for record in emitter.records
        ],
    }


def run_step(model: Any, batch: Any, mode: str) -> list[Any]:
    """Logits, and in training loss and every gradient."""
    import torch

    ids, mask = batch.input_ids, batch.attention_mask
    if mode == "inference":
        with torch.no_grad():
            return [model(input_ids=ids, attention_mask=mask, use_cache=False).logits.clone()]
    result = model(
        input_ids=ids, attention_mask=mask, use_cache=False, labels=ids.masked_fill(mask == 0, -100)
    )
    result.loss.backward()
    tensors = [result.logits.detach().clone(), result.loss.detach().clone()]
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "to_local", lambda g=parameter.grad: g)()
            tensors.append(local.clone())
    model.zero_grad()
    return tensors


def same(left: list[Any], right: list[Any]) -> bool:
    """Bit for bit."""
    import torch

    return len(left) == len(right) and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True)
    )


def expected(choices: dict[int, Any], batch: Any, num_experts: int) -> dict[str, list[int]]:
    """The router's own choices as counts, real and padding tokens apart."""
    import torch

    real = batch.attention_mask.bool().flatten()
    counts = {}
    for layer, ids in choices.items():
        for kind, keep in (("routed", real), ("padding", ~real)):
            counts[f"{layer} {kind}"] = torch.bincount(ids[keep].flatten(), minlength=num_experts).tolist()
    return counts


def pairs(choices: dict[int, Any], batch: Any) -> list[list[int]]:
    """[layer, first expert, second expert, tokens] of every pair that a real token holds."""
    from collections import Counter
    from itertools import combinations

    real = batch.attention_mask.bool().flatten()
    found: Counter[tuple[int, int, int]] = Counter()
    for layer, ids in choices.items():
        for row in ids[real].tolist():
            found.update((layer, first, second) for first, second in combinations(sorted(row), 2))
    return [[*pair, tokens] for pair, tokens in sorted(found.items())]


if __name__ == "__main__":
    main()
