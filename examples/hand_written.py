"""Trace MoE code that no framework wrote: wrap its callables, or name its phases.

python examples/hand_written.py
"""

import torch

import moetrace
from moetrace.testing import MemoryEmitter

EXPERTS, TOP_K, HIDDEN = 4, 2, 32
weights = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
gate = torch.randn(HIDDEN, EXPERTS)


def route(tokens):
    """Weights and expert ids, [T, K] each."""
    return (tokens @ gate).softmax(-1).topk(TOP_K, dim=-1)


def run_experts(tokens, scores, ids):
    """Every token through its experts, weighted."""
    out = torch.zeros_like(tokens)
    for expert in range(EXPERTS):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        out.index_add_(0, token, tokens[token] @ weights[expert] * scores[token, slot, None])
    return out


emitter = MemoryEmitter()
moetrace.init(run_id="hand-written", endpoint="", emitters=[emitter])
moe = moetrace.wrap(layer=0, num_experts=EXPERTS, router=route, experts=run_experts)

hidden = torch.randn(64, HIDDEN)
with moetrace.step(forward_mode="prefill"):
    scores, ids = moe.router(hidden)
    hidden = moe.experts(hidden, scores, ids)
    with moetrace.phase("shared_expert", layer=0):
        hidden = hidden + hidden @ weights[0]

record = emitter.wait_for(1)[0]
for row in record.phases:
    place = f"layer {row.layer}" if row.layer >= 0 else "between"  # -1: no layer's
    print(f"{place:<8} {row.phase:<13} {row.duration_ns / 1e3:8.1f} us")
print(list(record.experts[0].counts), "tokens per expert")
moetrace.shutdown()
