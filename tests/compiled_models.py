"""A small MoE decoder for tests of torch.compile, and what its runs are compared by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

KEEPS_MARKS = torch.__version__ >= (2, 10)  # type: ignore[operator, unused-ignore]
"""By its version and not by what registered: a slip there is a fault and no reason to skip."""
needs_marks = pytest.mark.skipif(
    not KEEPS_MARKS, reason=f"torch {torch.__version__} keeps no marks in compiled graphs"
)


class Ticks:
    """A host clock that moves by 10 ns with every look."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        """The time, ns."""
        self.ns += 10
        return self.ns


class Router(nn.Module):
    """Top-2 of 4, as most routers return it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits, weights, ids)."""
        logits = tokens @ self.weight.t()
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        return logits, weights, ids


class Experts(nn.Module):
    """All experts over all tokens, so that nothing depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 16) / 3)
        self.down = nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum of the chosen experts."""
        each = torch.einsum(
            "eth,ehd->etd", nn.functional.silu(torch.einsum("td,edh->eth", tokens, self.up)), self.down
        )
        share = torch.zeros(len(tokens), 4).scatter_add(1, ids, weights)
        return torch.einsum("etd,te->td", each, share)


class Block(nn.Module):
    """A MoE block as transformers 5 builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        _, weights, ids = self.gate(tokens)
        return self.experts(tokens, ids, weights)


class Decoder(nn.Module):
    """Two blocks with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for layer in self.layers:
            tokens = tokens + layer(self.norm(tokens))
        return tokens


def train(
    model: Callable[[torch.Tensor], torch.Tensor], parameters: Iterator[nn.Parameter]
) -> list[torch.Tensor]:
    """Output and gradients of one forward and backward."""
    torch.manual_seed(1)
    tokens = torch.randn(6, 8, requires_grad=True)
    output = model(tokens)
    output.square().sum().backward()
    assert tokens.grad is not None
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad.clone())
        parameter.grad = None
    return [output.detach(), tokens.grad, *gradients]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
