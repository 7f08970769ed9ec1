"""Tutel against a fake: MOELayer, its module functions and gates as in tutel/impls/moe_layer.py of 2024."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from frameworks.checks import Truth, check, trace

EXPERTS, TOP_K, HIDDEN = 4, 2, 8
SOURCE = "tutel.impls.moe_layer"


def _source() -> Any:
    """The functions that the layer looks up in its module."""
    module: Any = ModuleType(SOURCE)

    def extract_critical(scores: torch.Tensor, top_k: int, **options: Any) -> tuple[Any, torch.Tensor]:
        weights, ids = scores.topk(top_k)
        return (EXPERTS, ids, weights), scores.sum() * 0

    def all_to_all(
        rows: torch.Tensor, input_dim: int, output_dim: int, use_2dh: bool = False, group: Any = None
    ) -> torch.Tensor:
        # Calls itself once, as the package does for tensors without gradients.
        return module.C.all_to_all(rows, input_dim, output_dim, True, group) if not use_2dh else rows

    module.extract_critical = extract_critical
    module.get_dispatch_count = lambda crit: torch.bincount(crit[1].reshape(-1), minlength=crit[0])
    module.fast_encode = lambda rows, crit, is_postscore: rows.unsqueeze(0).expand(EXPERTS, -1, -1)
    module.fast_decode = lambda rows, crit, is_postscore: rows.sum(0)
    module.C = SimpleNamespace(__name__="communicate", all_to_all=all_to_all)

    class MOELayer(nn.Module):
        __module__ = SOURCE

        def __init__(self, group: Any) -> None:
            super().__init__()
            self.group = group
            self.num_global_experts, self.num_local_experts = EXPERTS, EXPERTS // group.size()
            self.gates = nn.ModuleList([nn.Linear(HIDDEN, EXPERTS, bias=False)])
            self.experts = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def expert_local(self, x: torch.Tensor, reserve_shape: Any) -> torch.Tensor:
            return self.experts(x)

        def forward(self, input: torch.Tensor, gate_index: int = 0) -> torch.Tensor:
            scores = self.gates[gate_index](input).softmax(dim=1)
            crit, _ = module.extract_critical(scores, top_k=TOP_K, loss_fn=None)
            self.dispatch_count = module.get_dispatch_count(crit)
            y = module.fast_encode(input, crit, True)
            if self.group.size() > 1:
                y = module.C.all_to_all(y, 1, 0, use_2dh=False, group=self.group)
            y = self.expert_local(y, input.shape[-1:])
            if self.group.size() > 1:
                y = module.C.all_to_all(y, 0, 1, use_2dh=False, group=self.group)
            return module.fast_decode(y, crit, True)

    module.MOELayer = MOELayer
    return module


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_shows_its_functions_and_counts_what_the_gate_chose(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A collective that calls itself is one exchange; pairs are counted as chosen, before the capacity."""
    source = _source()
    monkeypatch.setitem(sys.modules, "tutel", ModuleType("tutel"))
    monkeypatch.setitem(sys.modules, SOURCE, source)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    torch.manual_seed(0)
    model = nn.Sequential(source.MOELayer(group), source.MOELayer(group))
    truth = Truth()
    for number, layer in enumerate(model):
        layer.gates[0].register_forward_hook(
            lambda _, args, logits, n=number: truth.add_ids(n, logits.topk(TOP_K).indices, EXPERTS)
        )
    hidden = torch.randn(5, HIDDEN)
    traced = trace(model, lambda: [model(hidden).detach()], truth=truth, owners=[source, source.C])
    exchanged = (
        "router permute dispatch dispatch! dispatch permute expert_gemm "
        "unpermute combine combine! combine unpermute"
    )
    check(traced, truth, (exchanged if ranks > 1 else "router permute expert_gemm unpermute").split())
    assert {layer.adapter for layer in traced.report.layers} == {"tutel"}
