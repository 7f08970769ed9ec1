"""torchtitan's MoE layer on gloo ranks, forward and backward; one rank uses the local dispatcher.

The trainer's own set-up (meshes, sharding) is done by hand for the experts' weights.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import feed_forward, linear, moe, token_dispatcher

from frameworks.checks import Truth, check, compile_layers, report, trace
from moetrace.demo.leave import leave
from moetrace_schemas.enums import CountKind

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 32, 48, 4, 2, 2


def build(ranks: int) -> nn.Module:
    """One layer with weights that do not depend on the rank."""
    kind = token_dispatcher.AllToAllTokenDispatcher if ranks > 1 else token_dispatcher.LocalTokenDispatcher
    up = linear.Linear.Config(in_features=HIDDEN, out_features=WIDTH)
    down = linear.Linear.Config(in_features=WIDTH, out_features=HIDDEN)
    layer: nn.Module = moe.MoE.Config(
        num_experts=EXPERTS,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=WIDTH, num_experts=EXPERTS),
            token_dispatcher=kind.Config(num_experts=EXPERTS, top_k=TOP_K),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            gate=linear.Linear.Config(in_features=HIDDEN, out_features=EXPERTS),
            top_k=TOP_K,
            score_func="softmax",
            route_norm=True,
        ),
        shared_experts=feed_forward.FeedForward.Config(w1=up, w2=down, w3=up),
    ).build()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return layer


class Blocks(nn.Module):
    """Two layers with residuals."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build(ranks) for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def shard(model: Blocks, ranks: int) -> None:
    """Experts in order over the ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    for layer in model.layers:
        experts: Any = layer.routed_experts.inner_experts
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            whole = experts._parameters[name].data
            sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            experts._parameters[name] = nn.Parameter(sharded)
        layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)


def main() -> None:
    """One configuration on this rank."""
    compiled = sys.argv[1:] == ["compiled"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_spmd_backend("default")
    model = Blocks(ranks)
    if ranks > 1:
        shard(model, ranks)
    generator = torch.Generator().manual_seed(5 + rank)
    hidden = torch.randn(2, 5 + rank, HIDDEN, generator=generator)
    truth = Truth()
    hooks = []
    for number, layer in enumerate(model.layers):

        def look(module: Any, args: Any, number: int = number) -> None:
            logits = args[0].reshape(-1, HIDDEN) @ module.gate.weight.t()
            if getattr(module.gate, "bias", None) is not None:
                logits = logits + module.gate.bias
            truth.add_ids(number, logits.topk(TOP_K).indices, EXPERTS)

        hooks.append(layer.router.register_forward_pre_hook(look))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        tokens = hidden.clone().requires_grad_()
        out = model(tokens)
        out.pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach().clone(), tokens.grad, *(_local(g).clone() for g in gradients)]

    if compiled:
        compile_layers(model.layers, truth, run, hooks)
    dispatchers = [layer.routed_experts.token_dispatcher for layer in model.layers]
    owners = [dist, token_dispatcher, *dispatchers]
    traced = trace(model, run, truth=None if compiled else truth, owners=owners)
    kinds = [CountKind.ROUTED]
    if ranks > 1:
        kinds.append(CountKind.RECEIVED)
        truth.exchange(rank, ranks, EXPERTS)
    check(traced, truth, None, kinds=kinds)
    report(traced, version=getattr(torchtitan, "__version__", "0.3.0"))
    dist.destroy_process_group()


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


if __name__ == "__main__":
    main()
    leave()
