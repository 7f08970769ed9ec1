"""transformers 5 with experts spread over gloo ranks: arguments family, all_to_all or all_reduce."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.distributed.expert_parallel as parallel
from torch.distributed.device_mesh import init_device_mesh

from frameworks import transformers_models as models
from frameworks.checks import Truth, check, report, trace
from moetrace.demo.leave import leave
from moetrace_schemas.enums import CountKind

EXPERTS = 4


def main() -> None:
    """One configuration on this rank."""
    family, implementation = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model_class = next(c for c in models.model_classes(family) if c.__name__.endswith("ForCausalLM"))
    model: Any = models.filled(model_class(models.tiny_config(model_class, family)).eval())
    if implementation == "all_reduce":
        # Every rank holds the same batch.
        ep = tp = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    else:
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
        ep, tp = mesh["ep"], mesh["tp"]
    plan = model._expand_parallel_plan(dict(model.ep_plan))
    parallel.apply_expert_parallelism(model, ep, tp, plan, ep_implementation=implementation)
    unequal = rank if implementation == "all_to_all" else 0
    generator = torch.Generator().manual_seed(100 + unequal)
    ids = torch.randint(3, 100, (2, 5 + unequal), generator=generator)

    truth = Truth()
    blocks = [
        m for m in model.modules() if hasattr(m, "experts") and (hasattr(m, "gate") or hasattr(m, "router"))
    ]
    numbers = [int(p.split(".")[2]) for p, m in model.named_modules() if any(m is b for b in blocks)]
    for number, block in zip(numbers, blocks, strict=True):

        def look(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
            truth.add_ids(number, (*args, *kwargs.values())[1], EXPERTS)

        block.experts.register_forward_pre_hook(look, with_kwargs=True)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, use_cache=False).logits
        out.pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach().clone(), *(_local(g).clone() for g in gradients)]

    traced = trace(model, run, truth=truth, owners=[dist, parallel])
    kinds = [CountKind.ROUTED]
    if implementation == "all_to_all":
        kinds.append(CountKind.RECEIVED)
        truth.exchange(rank, ranks, EXPERTS)
    check(traced, truth, None, kinds=kinds)
    report(traced, version=transformers.__version__)
    dist.barrier()
    dist.destroy_process_group()


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


if __name__ == "__main__":
    main()
    leave()
