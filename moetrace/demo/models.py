"""Small random-weight models of real architectures, sharded over expert-parallel ranks."""

from __future__ import annotations

from typing import Any

from moetrace.demo.plan import ModelSpec

VOCABULARY = 4096


def build(spec: ModelSpec, ranks: int) -> Any:
    """The causal language model of a spec; every rank draws the same weights and keeps its experts.

    With more than one rank, torch.distributed must be initialised: the experts are then spread by
    transformers' own expert parallelism with all-to-all exchange.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    torch.manual_seed(0)
    config, kind = _config(spec, transformers)
    # Random weights stand in for trained ones; wider routers make routing as uneven as trained ones are.
    model = kind(config).eval()
    model.set_experts_implementation("grouped_mm")
    if ranks > 1:
        _spread(model, ranks)
    return model


def _config(spec: ModelSpec, transformers: Any) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    if spec.name == "olmoe":
        return (
            transformers.OlmoeConfig(
                **common,
                intermediate_size=spec.expert_width,
                num_experts=spec.num_experts,
                num_experts_per_tok=spec.top_k,
            ),
            transformers.OlmoeForCausalLM,
        )
    if spec.name == "qwen3":
        return (
            transformers.Qwen3MoeConfig(
                **common,
                intermediate_size=spec.expert_width,
                moe_intermediate_size=spec.expert_width,
                num_experts=spec.num_experts,
                num_experts_per_tok=spec.top_k,
                head_dim=32,
                decoder_sparse_step=1,
            ),
            transformers.Qwen3MoeForCausalLM,
        )
    if spec.name == "mixtral":
        return (
            transformers.MixtralConfig(
                **common,
                intermediate_size=spec.expert_width,
                num_local_experts=spec.num_experts,
                num_experts_per_tok=spec.top_k,
            ),
            transformers.MixtralForCausalLM,
        )
    return (
        transformers.DeepseekV3Config(
            **common,
            intermediate_size=4 * spec.expert_width,
            moe_intermediate_size=spec.expert_width,
            n_routed_experts=spec.num_experts,
            num_experts_per_tok=spec.top_k,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=4,
            topk_group=2,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        transformers.DeepseekV3ForCausalLM,
    )


def _spread(model: Any, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import expert_parallel

    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(dict(model.ep_plan))
    expert_parallel.apply_expert_parallelism(
        model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all"
    )
