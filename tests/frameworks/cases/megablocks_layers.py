"""MegaBlocks' MoE on gloo ranks, forward and backward; with `dropless` its dMoE, with grouped experts.

Its kernels and two packages are replaced: sorting, counting, moving rows and grouped products by code that
does the same, the sparse-matrix package by an empty module, since neither layer calls it.
"""

from __future__ import annotations

import sys
import types
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetrace.demo.leave import leave

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 32, 48, 4, 2, 2


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    return module


def gather(rows: torch.Tensor, indices: torch.Tensor, bin_ids: Any, bins: Any, top_k: int) -> torch.Tensor:
    """One row per (token, slot) pair, sorted by expert."""
    return rows[indices.long() // top_k]


def scatter(
    rows: torch.Tensor, indices: torch.Tensor, bin_ids: Any, weights: Any, bins: Any, top_k: int
) -> torch.Tensor:
    """Pairs back in the order of tokens, weighted and summed."""
    at = indices.long()
    if weights is not None:
        rows = rows * weights[at].unsqueeze(1)
    return torch.zeros_like(rows).index_copy(0, at, rows).view(-1, top_k, rows.shape[-1]).sum(1)


def _slots(bins: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.diff(bins, prepend=bins.new_zeros(1)).long()
    expert = torch.repeat_interleave(torch.arange(len(bins)), sizes)
    within = torch.arange(int(bins[-1])) - (bins.long() - sizes)[expert]
    return expert, within


def binned_gather(
    rows: torch.Tensor, indices: torch.Tensor, bins: torch.Tensor, capacity: int, top_k: int
) -> torch.Tensor:
    """Rows by expert, padded to the capacity."""
    expert, within = _slots(bins, capacity)
    padded = rows.new_zeros(len(bins), int(capacity), rows.shape[-1])
    return padded.index_put((expert, within), rows[indices.long() // top_k])


def binned_scatter(
    rows: torch.Tensor, indices: torch.Tensor, weights: Any, bins: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The inverse of `binned_gather`, weighted and summed."""
    return scatter(rows[_slots(bins, rows.shape[1])], indices, None, weights, bins, top_k)


def grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Each expert's rows by its weights."""
    parts = zip(rows.split(sizes.tolist()), weights, strict=True)
    return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in parts])


def replace_kernels() -> None:
    """Stand-ins for what needs a GPU."""
    grouped = _module("grouped_gemm", backend=None)
    grouped.ops = _module("grouped_gemm.ops", gmm=grouped_product)
    stk = _module("stk", Matrix=type("Matrix", (), {}))
    stk.ops = _module("stk.ops")
    stk.backend = _module("stk.backend", triton_kernels=_module("stk.backend.triton_kernels"))
    _module(
        "megablocks.ops",
        sort=lambda ids, end_bit: torch.sort(ids, stable=True),
        histogram=lambda ids, experts: torch.bincount(ids.long(), minlength=int(experts)).int(),
        inclusive_cumsum=lambda counts, dim: torch.cumsum(counts, dim, dtype=torch.int32),
        replicate=lambda ids, bins, size: torch.repeat_interleave(
            ids[0], torch.diff(bins, prepend=bins.new_zeros(1)).long()
        ),
        repeat=lambda rows, tiling: rows if all(n == 1 for n in tiling) else rows.repeat(tiling),
        sum=lambda rows, dim: rows.sum(dim),
        gather=gather,
        scatter=scatter,
        binned_gather=binned_gather,
        binned_scatter=binned_scatter,
    )


class Blocks(nn.Module):
    """Two layers with residuals."""

    def __init__(self, ranks: int, *, dropless: bool) -> None:
        super().__init__()
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE
        from megablocks.layers.moe import MoE

        _module(
            "triton", __version__="3.0.0"
        )  # the arguments' check asks for it; torch must not find it later
        arguments = Arguments(
            hidden_size=HIDDEN,
            ffn_hidden_size=WIDTH,
            moe_num_experts=EXPERTS,
            moe_top_k=TOP_K,
            moe_capacity_factor=0,
            moe_expert_model_parallelism=ranks > 1,
            expert_parallel_group=dist.group.WORLD if ranks > 1 else None,
            device=torch.device("cpu"),
            fp16=False,
            bf16=False,
            return_bias=False,
            moe_loss_weight=0,
            mlp_impl="grouped" if dropless else "sparse",
        )
        del sys.modules["triton"]
        self.layers = nn.ModuleList((dMoE if dropless else MoE)(arguments) for _ in range(LAYERS))
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
    compiled, dropless = "compiled" in sys.argv[1:], "dropless" in sys.argv[1:]
    replace_kernels()
    torch.set_num_threads(1)
    import megablocks.layers.moe as source

    from frameworks.checks import Truth, check, compile_layers, report, trace
    from moetrace_schemas.enums import CountKind

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Blocks(ranks, dropless=dropless)
    generator = torch.Generator().manual_seed(5 + rank)
    hidden = torch.randn(5 + rank, 2, HIDDEN, generator=generator)
    truth, hooks = Truth(), []
    for number, layer in enumerate(model.layers):

        def look(module: Any, args: Any, number: int = number) -> None:
            logits = module.layer(args[0].reshape(-1, HIDDEN))
            truth.add_ids(number, logits.topk(TOP_K).indices, EXPERTS)

        hooks.append(layer.router.register_forward_pre_hook(look))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        tokens = hidden.clone().requires_grad_()
        out = model(tokens)
        out.pow(2).mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [out.detach().clone(), tokens.grad, *gradients]

    if compiled:
        compile_layers(model.layers, truth, run, hooks)
    traced = trace(model, run, truth=None if compiled else truth, owners=[dist, dist.Work, source])
    kinds = [CountKind.ROUTED]
    if ranks > 1:
        kinds.append(CountKind.RECEIVED)
        truth.exchange(rank, ranks, EXPERTS)
    check(traced, truth, None, kinds=kinds)
    report(traced, version=version("megablocks"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
