"""Triton's own autotuner around a kernel that its interpreter runs, inside steps of an instrumented model."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

import moetrace
from moetrace.adapters.reference import ReferenceMoE
from moetrace.testing import MemoryEmitter

TOKENS = (3, 3, 5, 3, 5)


def bench(kernel_call: Any, quantiles: Any) -> list[float]:
    """Run it once: there is no device whose time could be taken."""
    kernel_call()
    return [1.0, 1.0, 1.0]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"], do_bench=bench
)
@triton.jit
def double(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Twice the source."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n) * 2, mask=at < n)


class Model(torch.nn.Module):
    """A layer behind a kernel that is tuned by the number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ReferenceMoE(8, 16, num_experts=4, top_k=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states."""
        doubled = torch.empty_like(hidden)
        n = hidden.numel()
        double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](hidden, doubled, n)
        assert torch.equal(doubled, hidden * 2)
        result: torch.Tensor = self.layer(doubled)
        return result


def main() -> None:
    """Steps with two shapes, the first of each of which is tuned."""
    emitter, model, plain = MemoryEmitter(), Model(), triton.runtime.autotuner.Autotuner.prune_configs
    tracer = moetrace.init(run_id="tuning", emitters=[emitter], endpoint="", buffers=8)
    moetrace.instrument(model)
    for tokens in TOKENS:
        model(torch.randn(tokens, 8))
    moetrace.shutdown()
    assert triton.runtime.autotuner.Autotuner.prune_configs is plain
    print(
        json.dumps(
            {
                "warmup": [record.warmup for record in emitter.records],
                "errors": tracer.guard.errors,
                "tuned": len(double.cache),
                "version": triton.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
