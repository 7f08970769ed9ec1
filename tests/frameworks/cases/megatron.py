"""Megatron-Core's MoELayer on gloo ranks without a CUDA device: arguments dispatcher, shared expert.

Parts of torch.cuda and two helpers of the package are replaced by ones that work on a CPU, so this
shows wrap points, counts and data flow, and nothing about streams.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from moetrace.demo.leave import leave


class _Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        """All work is done."""

    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, *args: Any) -> _Stream:
        """An event that has happened."""
        return _Stream()


def _replace_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # used as device=... only
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda *args, **kwargs: _Stream()
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()


def _replace_helpers() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    # The package skips tensors that are on the CPU already, which all_to_all_single then refuses.
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.cpu().numpy()
        return tensor.cpu() if torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


HIDDEN, EXPERTS, TOP_K, LAYERS = 32, 4, 2, 2


class Blocks(torch.nn.Module):
    """Two MoE layers with residuals."""

    def __init__(self, dispatcher: str, shared: str, ranks: int) -> None:
        super().__init__()
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import TransformerConfig

        extra = {"moe_shared_expert_intermediate_size": 48} if shared != "none" else {}
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=48,
            moe_ffn_hidden_size=48,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_token_dispatcher_type=dispatcher,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            expert_model_parallel_size=ranks,
            expert_tensor_parallel_size=1,
            moe_shared_expert_overlap=shared == "overlap",
            params_dtype=torch.float32,
            **extra,
        )
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
        groups = get_default_pg_collection()

        def layer(number: int) -> torch.nn.Module:
            if type(spec).__name__ == "partial":
                return spec(config=config, pg_collection=groups, layer_number=number)
            return build_module(spec, config=config, layer_number=number)

        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(layer(number + 1) for number in range(LAYERS))
        for moe in self.layers:
            moe.set_layer_number(moe.layer_number)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


def main() -> None:
    """One configuration on this rank."""
    dispatcher, shared, *rest = sys.argv[1:]
    compiled = rest == ["compiled"]
    _replace_cuda()
    torch.set_num_threads(1)
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import token_dispatcher

    from frameworks.checks import Truth, check, compile_layers, report, trace
    from moetrace_schemas.enums import CountKind

    _replace_helpers()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks, expert_tensor_parallel_size=1)
    model = Blocks(dispatcher, shared, ranks)
    generator = torch.Generator().manual_seed(5 + rank)
    # Ranks of unequal load, where the dispatcher allows it.
    hidden = torch.randn((6 + rank if dispatcher == "alltoall" else 6), 2, HIDDEN, generator=generator)

    truth = Truth()
    hooks = []
    for number, layer in enumerate(model.layers):

        def look(module: Any, args: Any, number: int = number) -> None:
            # The best k of the logits, computed here.
            logits = args[0].reshape(-1, HIDDEN) @ module.weight.t()
            truth.add_ids(number, logits.topk(TOP_K).indices, EXPERTS)

        hooks.append(layer.router.register_forward_pre_hook(look))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        tokens = hidden.clone().requires_grad_()
        out = model(tokens)
        out.pow(2).mean().backward()
        return [
            out.detach().clone(),
            tokens.grad,
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]

    if compiled:
        # Stand-ins for streams cannot be traced: what is compiled is what calls none.
        parts = [part for layer in model.layers for part in (layer.router, layer.experts)]
        compile_layers(parts, truth, run, hooks)
    owners = [dist, token_dispatcher, *(layer.token_dispatcher for layer in model.layers)]
    traced = trace(model, run, truth=None if compiled else truth, owners=owners)
    assert {layer.adapter for layer in traced.report.layers} == {"megatron"}
    kinds = [CountKind.ROUTED]
    if ranks > 1:
        kinds.append(CountKind.RECEIVED)
        truth.exchange(rank, ranks, EXPERTS)
    check(traced, truth, None, kinds=kinds)
    report(traced, version=megatron.core.__version__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
