"""DeepSpeed's AutoEP on gloo ranks: blocks of a transformers model, replaced by its engine.

    python deepspeed_autoep.py

Counts are checked against the ids that the replaced routers return.
"""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

from frameworks.checks import Truth, check, report, trace
from moetrace.demo.leave import leave
from moetrace_schemas.enums import CountKind

EXPERTS = 4
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


def let_the_versions_meet() -> None:
    """DeepSpeed 0.19 asks transformers' registry by name with a default; that of 5.24 takes neither."""
    from transformers.utils import output_capturing

    have = output_capturing._CAN_RECORD_REGISTRY

    class Registry(type(have)):  # type: ignore[misc]
        def get(self, model: Any, *default: Any) -> Any:
            return dict.get(self, model, *default) if isinstance(model, str) else super().get(model)

    output_capturing._CAN_RECORD_REGISTRY = Registry(have)


def engine_settings(ranks: int) -> dict[str, Any]:
    """Settings of the engine."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "expert_parallel": {
            "enabled": True,
            "autoep_size": ranks,
            "preset_model": "qwen3_moe",
            "load_balance_coeff": None,
        },
    }


def main() -> None:
    """One configuration on this rank."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    let_the_versions_meet()
    torch.manual_seed(0)
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=engine_settings(ranks)
    )
    import deepspeed.module_inject.auto_ep_layer as source

    ids = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(rank))
    truth = Truth()
    for number, layer in enumerate(model.model.layers):

        def look(module: Any, args: Any, result: Any, number: int = number) -> None:
            truth.add_ids(number, result[1], EXPERTS)

        layer.mlp.router.register_forward_hook(look)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach().clone(), *gradients]

    traced = trace(model, run, truth=truth, owners=[dist, deepspeed.comm, source, source._AllToAllV])
    check(traced, truth, None, kinds=[CountKind.ROUTED])
    report(
        traced,
        version=deepspeed.__version__,
        blocks=[type(layer.mlp).__name__ for layer in model.model.layers],
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
