"""A MoE of the shape that people serve, on one device: static shapes and no host sync, fit for capture.

Shapes: T tokens, H hidden, E experts, K experts per token, F expert width, N = T * K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import moetrace
from moetrace.tracer import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the model and of its two kinds of step."""

    layers: int
    hidden: int
    width: int
    experts: int
    top_k: int
    decode_tokens: int
    prefill_tokens: int


FULL = Shape(layers=61, hidden=1024, width=512, experts=64, top_k=8, decode_tokens=64, prefill_tokens=4096)
QUICK = Shape(layers=3, hidden=32, width=16, experts=4, top_k=2, decode_tokens=8, prefill_tokens=64)


class Block(nn.Module):
    """Attention stands in as one dense projection; the MoE is router, permute, experts, unpermute."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k, self.num_experts = shape.top_k, shape.experts
        self.dense = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.up_EHF = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.width) / shape.hidden**0.5)
        self.down_EFH = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) / shape.width**0.5)
        self.parts: Any = None
        self.untraced()

    def untraced(self) -> None:
        """Call the parts as they are."""
        self.route_, self.permute_, self.experts_, self.unpermute_ = (
            self.route,
            self.permute,
            self.compute,
            self.unpermute,
        )

    def traced(self, tracer: Tracer, layer: int) -> None:
        """Call the wrapped parts."""
        self.untraced()
        parts = tracer.wrap(
            layer=layer,
            num_experts=self.num_experts,
            router=self.route,
            permute=self.permute,
            experts=self.compute,
            unpermute=self.unpermute,
        )
        self.route_, self.permute_ = parts.router, parts.permute
        self.experts_, self.unpermute_ = parts.experts, parts.unpermute

    def route(self, tokens_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids."""
        return self.gate(tokens_TH).float().softmax(-1).topk(self.top_k, dim=-1)

    def permute(self, tokens_TH: torch.Tensor, ids_TK: torch.Tensor) -> Any:
        """Rows by expert, where each expert's end, and the way back."""
        flat_N = ids_TK.reshape(-1)
        order_N = torch.argsort(flat_N, stable=True)
        experts_E = torch.arange(self.num_experts, device=flat_N.device)
        ends_E = torch.searchsorted(flat_N[order_N], experts_E, right=True).to(torch.int32)
        return tokens_TH[order_N // self.top_k], ends_E, torch.argsort(order_N)

    def compute(self, rows_NH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Every expert over its rows."""
        inner = nn.functional.silu(nn.functional.grouped_mm(rows_NH, self.up_EHF, offs=ends_E))
        return nn.functional.grouped_mm(inner, self.down_EFH, offs=ends_E)

    def unpermute(
        self, rows_NH: torch.Tensor, back_N: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Token order, weighted and summed."""
        slots = rows_NH[back_N].view(*weights_TK.shape, rows_NH.shape[-1])
        return (slots * weights_TK.unsqueeze(-1).to(slots.dtype)).sum(1)

    def forward(self, tokens_TH: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        tokens_TH = tokens_TH + self.dense(tokens_TH)
        weights_TK, ids_TK = self.route_(tokens_TH)
        rows_NH, ends_E, back_N = self.permute_(tokens_TH, ids_TK)
        result = self.unpermute_(self.experts_(rows_NH, ends_E), back_N, weights_TK)
        return nn.functional.rms_norm(tokens_TH + result, (tokens_TH.shape[-1],))


class Model(nn.Module):
    """Blocks, one behind the other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))

    def forward(self, tokens_TH: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        for block in self.blocks:
            tokens_TH = block(tokens_TH)
        return tokens_TH

    def traced(self, tracer: Tracer | None) -> None:
        """Wrap every block's parts, or unwrap them."""
        for layer, block in enumerate(self.blocks):
            if tracer is None:
                block.untraced()
            else:
                block.traced(tracer, layer)


class Keep:
    """An emitter that keeps the records of one tracer."""

    name = "keep"

    def __init__(self) -> None:
        self.records: list[Any] = []

    def emit(self, record: Any) -> None:
        """Keep it."""
        self.records.append(record)

    def close(self, deadline_monotonic_s: float) -> bool:
        """Nothing is queued."""
        return True


def with_tracer(model: Model, run: Callable[[Tracer], None], **settings: Any) -> tuple[Tracer, list[Any]]:
    """Run with every block traced; the tracer and the records of the run. Leaves the model untraced."""
    keep = Keep()
    tracer = moetrace.init(
        run_id="gpu-kit", endpoint="", emitters=[keep], max_intervals=64 + 16 * model.shape.layers, **settings
    )
    try:
        model.traced(tracer)
        run(tracer)
    finally:
        moetrace.shutdown(30)
        model.traced(None)
    return tracer, keep.records
