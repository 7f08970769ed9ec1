"""OLMo-core's MoE on gloo ranks, forward and backward: dropless, or with a `capacity` that drops pairs.

Its gathers and scatters are GPU kernels; they are replaced by indexing that does the same.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import olmo_core.ops.moe as ops
import torch
import torch.distributed as dist
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from frameworks.checks import Truth, check, compile_layers, report, trace
from moetrace.demo.leave import leave
from moetrace_schemas.enums import CountKind

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 32, 48, 4, 2, 2
CAPACITY_FACTOR, TOKENS = 0.75, 40
PLACES = 16
"""Of each expert and rank, for that many tokens: 0.75 of an even share, to the next multiple of eight."""


def gather(
    rows: torch.Tensor, indices: torch.Tensor, bin_ids: torch.Tensor, bins: torch.Tensor, top_k: int
) -> torch.Tensor:
    """One row per (token, slot) pair, sorted by expert."""
    return rows[indices.long() // top_k]


def scatter(
    rows: torch.Tensor,
    indices: torch.Tensor,
    bin_ids: torch.Tensor,
    weights: torch.Tensor | None,
    bins: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Pairs back in the order of tokens, weighted and summed."""
    at = indices.long()
    if weights is not None:
        rows = rows * weights[at].unsqueeze(1)
    return torch.zeros_like(rows).index_copy(0, at, rows).view(-1, top_k, rows.shape[-1]).sum(1)


def places(bins: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of pairs that are sorted by expert: which got a place, and expert and place of those."""
    sizes = torch.diff(bins, prepend=bins.new_zeros(1)).long()
    expert = torch.repeat_interleave(torch.arange(len(bins)), sizes)
    within = torch.arange(int(bins[-1])) - (bins.long() - sizes)[expert]
    admitted = within < capacity
    return admitted, expert[admitted], within[admitted]


def binned_gather(
    rows: torch.Tensor, indices: torch.Tensor, bins: torch.Tensor, bin_size: int, top_k: int
) -> torch.Tensor:
    """Rows by expert, as many as its capacity, padded to it."""
    admitted, expert, within = places(bins, bin_size)
    padded = rows.new_zeros(len(bins), bin_size, rows.shape[-1])
    return padded.index_put((expert, within), rows[indices.long()[admitted] // top_k])


def binned_scatter(
    rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None, bins: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Pairs that got a place back in the order of tokens, weighted and summed; the others are zero."""
    admitted, expert, within = places(bins, rows.shape[1])
    at, found = indices.long()[admitted], rows[expert, within]
    if weights is not None:
        found = found * weights[at].unsqueeze(1)
    pairs = rows.new_zeros(len(indices), rows.shape[-1])
    return pairs.index_copy(0, at, found).view(-1, top_k, rows.shape[-1]).sum(1)


class Blocks(nn.Module):
    """Two layers with residuals, the second one with a shared expert."""

    def __init__(self, *, capacity: bool) -> None:
        super().__init__()
        configs = [
            MoEConfig(
                name=MoEType.default if capacity else MoEType.dropless,
                capacity_factor=CAPACITY_FACTOR if capacity else None,
                num_experts=EXPERTS,
                hidden_size=WIDTH,
                router=MoERouterConfig(top_k=TOP_K),
                shared_mlp=FeedForwardConfig(hidden_size=WIDTH, bias=False) if number else None,
            )
            for number in range(LAYERS)
        ]
        self.layers = nn.ModuleList(config.build(d_model=HIDDEN, init_device="cpu") for config in configs)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def main() -> None:
    """One configuration on this rank."""
    compiled, capacity = "compiled" in sys.argv[1:], "capacity" in sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ops.gather, ops.scatter = gather, scatter
    ops.binned_gather, ops.binned_scatter = binned_gather, binned_scatter
    model = Blocks(capacity=capacity)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        for layer in model.layers:
            layer.apply_ep(mesh)
    generator = torch.Generator().manual_seed(5 + rank)
    # With a capacity all ranks must have as many tokens.
    hidden = torch.randn(2, TOKENS // 2 if capacity else 5 + rank, HIDDEN, generator=generator)
    truth = Truth()
    hooks = []
    for number, layer in enumerate(model.layers):

        def look(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
            logits = args[0].reshape(-1, HIDDEN) @ module.weight.view(EXPERTS, HIDDEN).t()
            truth.add_ids(number, logits.topk(TOP_K).indices, EXPERTS)

        hooks.append(layer.router.register_forward_pre_hook(look, with_kwargs=True))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        tokens = hidden.clone().requires_grad_()
        out = model(tokens)
        out.pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach().clone(), tokens.grad, *(_local(g).clone() for g in gradients)]

    if compiled:
        compile_layers(model.layers, truth, run, hooks)
    traced = trace(model, run, truth=None if compiled else truth, owners=[dist, dist.Work, ops])
    kinds = [CountKind.ROUTED]
    lost = 0
    if capacity:
        kinds.append(CountKind.DROPPED)
        for number in range(LAYERS):
            chosen = truth.counts[number, CountKind.ROUTED]
            truth.counts[number, CountKind.ROUTED] = chosen.clamp(max=PLACES)
            truth.counts[number, CountKind.DROPPED] = (chosen - PLACES).clamp(min=0)
            lost += int((chosen - PLACES).clamp(min=0).sum())
    elif ranks > 1:
        kinds.append(CountKind.RECEIVED)
        truth.exchange(rank, ranks, EXPERTS)
    check(traced, truth, None, kinds=kinds)
    report(traced, version=version("ai2-olmo-core"), dropped=lost)
    dist.destroy_process_group()


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


if __name__ == "__main__":
    main()
    leave()
