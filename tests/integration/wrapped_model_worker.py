"""One rank of test_wrapped_models: a model under DDP or FSDP2, instrumented before or after it is wrapped.

    python wrapped_model_worker.py RANK WORLD_SIZE RENDEZVOUS OUTPUT CASE ...

A case is `ddp` or `fsdp2`, a colon, and `before` or `after`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 2


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
    found = {case: run_case(rank, world_size, *case.split(":")) for case in sys.argv[5:]}
    Path(sys.argv[4]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def run_case(rank: int, world_size: int, kind: str, order: str) -> dict[str, Any]:
    """Train plainly and traced from the same weights; what both gave."""
    import torch

    import moetrace
    from moetrace.instrument.patches import mark_of
    from moetrace.testing import MemoryEmitter

    plain = train(wrapped(build(), kind, world_size), rank)
    emitter = MemoryEmitter()
    tracer = moetrace.init(
        run_id=f"{kind}:{order}", rank=rank, world_size=world_size, emitters=[emitter], endpoint=""
    )
    model = build()
    if order == "before":
        report = moetrace.instrument(model, strict=True)
        outer = wrapped(model, kind, world_size)
    else:
        outer = wrapped(model, kind, world_size)
        report = moetrace.instrument(outer, strict=True)
    traced = train(outer, rank)
    records = emitter.wait_for(STEPS)
    coverage = tracer.coverage()
    moetrace.shutdown()
    return {
        "layers": [layer.layer for layer in report.layers],
        "same": len(plain) == len(traced)
        and all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True)),
        "tensors": len(plain),
        "silent": [site.name for site in coverage.silent],
        "errors": tracer.guard.errors,
        "violations": sum(len(record.violations) for record in records),
        "counts": [
            {f"{row.layer} {row.kind}": sum(row.counts) for row in record.experts} for record in records
        ],
        "left": [
            name
            for name, module in outer.named_modules()
            if any(mark_of(value) for value in vars(module).values())
        ],
    }


def build() -> Any:
    """A tiny Qwen3 MoE, the same on every rank."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    )


def wrapped(model: Any, kind: str, world_size: int) -> Any:
    """The model as data-parallel training wraps it."""
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, find_unused_parameters=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, rank: int) -> list[Any]:
    """Losses, and the gradients of the last step as this rank holds them."""
    import torch

    import moetrace

    tensors = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * rank + step)
        tokens = torch.randint(0, 64, (2, 6), generator=generator)
        with moetrace.step(step):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
        tensors.append(loss.detach().clone())
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "to_local", lambda g=parameter.grad: g)()
            tensors.append(local.clone())
    return tensors


if __name__ == "__main__":
    main()
