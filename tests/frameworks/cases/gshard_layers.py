"""MOELayer of fairscale and of DeepSpeed on gloo ranks, forward and backward.

    python gshard_layers.py fairscale
    python gshard_layers.py deepspeed K [engine]

Counts are checked against the rows that arrive at the experts: those that are not padding, by the rank
that sent them.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from frameworks.checks import Truth, check, compile_layers, report, trace
from moetrace.demo.leave import leave
from moetrace_schemas.enums import CountKind

HIDDEN, EXPERTS, LAYERS = 32, 4, 2
Arrived = dict[int, torch.Tensor]


class Expert(nn.Module):
    """A small MLP without bias: padding rows stay zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(48, HIDDEN, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows to rows."""
        result: torch.Tensor = self.down(torch.relu(self.up(rows)))
        return result


class FairscaleBlocks(nn.Module):
    """Two fairscale layers."""

    def __init__(self) -> None:
        super().__init__()
        from fairscale.nn.moe import MOELayer, Top2Gate

        local = EXPERTS // dist.get_world_size()
        self.layers = nn.ModuleList(
            MOELayer(Top2Gate(HIDDEN, EXPERTS), nn.ModuleList(Expert() for _ in range(local)))
            for _ in range(LAYERS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to a loss."""
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.pow(2).mean() + sum(layer.l_aux for layer in self.layers)

    def moe(self, number: int) -> nn.Module:
        """The layer that holds gate and experts."""
        return self.layers[number]


class DeepSpeedBlocks(nn.Module):
    """Two DeepSpeed layers whose capacity drops pairs."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.layers = nn.ModuleList(
            MoE(
                HIDDEN,
                Expert(),
                num_experts=EXPERTS,
                ep_size=dist.get_world_size(),
                k=top_k,
                capacity_factor=0.75,
                min_capacity=2,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            for _ in range(LAYERS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to a loss."""
        loss = 0.0
        for layer in self.layers:
            out, l_aux, _ = layer(hidden)
            hidden, loss = hidden + out, loss + 0.01 * l_aux
        return hidden.pow(2).mean() + loss

    def moe(self, number: int) -> nn.Module:
        """The layer that holds gate and experts."""
        moe: nn.Module = self.layers[number].deepspeed_moe
        return moe


def look_at_arrivals(model: Any, truth: Truth, arrived: Arrived) -> list[Any]:
    """Count rows that are not padding, by source rank and local expert; returns the hooks that do."""
    hooks = []
    for number in range(LAYERS):
        experts = model.moe(number).experts

        def look(at: int, rows: torch.Tensor, number: int = number) -> None:
            if not truth.on:
                return
            have = arrived.setdefault(number, torch.zeros(dist.get_world_size(), 0, dtype=torch.int64))
            counts = (rows != 0).any(-1).sum(-1)
            arrived[number] = torch.cat([have, counts], dim=1)

        if isinstance(experts, nn.ModuleList):
            for at, expert in enumerate(experts):
                hooks.append(
                    expert.register_forward_pre_hook(lambda _, args, at=at, look=look: look(at, args[0]))
                )
        else:
            hooks.append(experts.register_forward_pre_hook(lambda _, args, look=look: look(0, args[0])))
    return hooks


def main() -> None:
    """One configuration on this rank."""
    torch.set_num_threads(1)
    framework, *options = sys.argv[1:]
    if framework == "fairscale":
        import fairscale as package
        import fairscale.nn.moe.moe_layer as source

        dist.init_process_group("gloo")
    else:
        import deepspeed as package
        import deepspeed.moe.sharded_moe as source

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        package.init_distributed("gloo", verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = FairscaleBlocks() if framework == "fairscale" else DeepSpeedBlocks(int(options[0]))
    engine = None
    if "engine" in options:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        parameters = split({"params": list(model.parameters()), "name": "p"})
        engine, *_ = package.initialize(model=model, model_parameters=parameters, config=ENGINE)
    elif framework == "deepspeed":
        for layer in model.layers:
            layer.set_deepspeed_parallelism()
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(2, 6, HIDDEN, generator=generator)
    truth, arrived = Truth(), Arrived()
    hooks = look_at_arrivals(model, truth, arrived)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)  # gates draw noise
        arrived.clear()
        model.zero_grad()
        tokens = hidden.clone().requires_grad_()
        loss = (engine or model)(tokens)
        (engine or loss).backward(*([loss] if engine else []))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [loss.detach().clone(), tokens.grad, *gradients]

    saved: list[Arrived] = []

    def step() -> list[torch.Tensor]:
        return _keep(run(), arrived, truth, saved)

    compiled = "compiled" in options
    if compiled:
        compile_layers(model.layers, truth, step, hooks)
    traced = trace(
        model,
        step,
        truth=None if compiled else truth,
        owners=[dist, source, source._AllToAll],
    )
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, saved[-1])
    kinds = [CountKind.ROUTED]
    for number in range(LAYERS):
        truth.counts[number, CountKind.ROUTED] = torch.cat([theirs[number][rank] for theirs in everyone])
    dropped = {}
    if framework == "deepspeed":
        kinds.append(CountKind.DROPPED)
        for number in range(LAYERS):
            lost = model.moe(number).exp_counts - truth.counts[number, CountKind.ROUTED]
            truth.counts[number, CountKind.DROPPED], dropped[number] = lost, lost.tolist()
    check(traced, truth, None, kinds=kinds)
    report(traced, version=package.__version__, dropped=dropped)
    dist.barrier()
    dist.destroy_process_group()


def _keep(results: list[torch.Tensor], arrived: Arrived, truth: Truth, saved: list[Arrived]) -> Any:
    if truth.on:
        saved.append(dict(arrived))
    return results


ENGINE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}


if __name__ == "__main__":
    main()
    leave()
