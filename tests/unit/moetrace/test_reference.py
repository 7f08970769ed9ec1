"""The reference layer is the specification of a MoE layer; its adapter finds every part of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moetrace.adapters.reference import ReferenceAdapter, ReferenceMoE
from moetrace_schemas.enums import Phase


def plainly(layer: ReferenceMoE, hidden: torch.Tensor) -> torch.Tensor:
    """Every token through its experts, one by one."""
    result = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        weights, ids = layer.gate(hidden[token]).softmax(-1).topk(layer.top_k)
        weights = weights / weights.sum()
        for weight, expert in zip(weights, ids.tolist(), strict=True):
            gate, up = (hidden[token] @ layer.up_eHF[expert]).chunk(2)
            result[token] += weight * ((nn.functional.silu(gate) * up) @ layer.down_eFH[expert])
    return result


def test_it_computes_what_a_loop_over_tokens_computes() -> None:
    """Sorting, grouping and un-sorting change nothing."""
    torch.manual_seed(0)
    layer, hidden = ReferenceMoE(8, 16, num_experts=4, top_k=2), torch.randn(7, 8)
    torch.testing.assert_close(layer(hidden), plainly(layer, hidden))


def test_the_shape_of_the_hidden_states_is_kept() -> None:
    """Batch and sequence come back as they went in, also for no tokens at all."""
    layer = ReferenceMoE(8, 16, num_experts=4, top_k=2)
    assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)
    assert layer(torch.randn(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("top_k", [0, 5])
def test_more_slots_than_experts_are_refused(top_k: int) -> None:
    """The message says what is allowed."""
    with pytest.raises(ValueError, match=f"top_k={top_k}: 1 to 4 expected"):
        ReferenceMoE(8, 16, num_experts=4, top_k=top_k)


def test_the_adapter_finds_layers_by_their_methods() -> None:
    """Number, path, experts and phases of each; anything else is none of its own."""
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(8, 8), ReferenceMoE(8, 16, num_experts=4, top_k=2)])}
    )
    (match,) = ReferenceAdapter().match(model).layers
    assert (match.layer, match.path, match.num_experts, match.num_local_experts) == (1, "layers.1", 4, 4)
    assert match.phases == (
        Phase.OUTSIDE,
        Phase.ROUTER,
        Phase.PERMUTE,
        Phase.DISPATCH,
        Phase.EXPERT_GEMM,
        Phase.COMBINE,
        Phase.UNPERMUTE,
    )
    assert match.parallel is None
