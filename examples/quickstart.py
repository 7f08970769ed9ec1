"""Trace a MoE model in one process: instrument, run, print one step. No collector, no download.

python examples/quickstart.py
"""

import torch
import transformers

import moetrace
from moetrace.testing import MemoryEmitter

torch.manual_seed(0)
config = transformers.OlmoeConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = transformers.OlmoeForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

emitter = MemoryEmitter()  # a real run leaves this out: records go to the collector
moetrace.init(run_id="quickstart", endpoint="", emitters=[emitter])
print(moetrace.instrument(model))

for _ in range(3):
    tokens = torch.randint(2, 1000, (4, 32))
    with moetrace.step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

record = emitter.wait_for(3)[-1]
print(f"step {record.step}: {record.duration_ns / 1e6:.2f} ms")
for row in record.phases:
    place = f"layer {row.layer}" if row.layer >= 0 else "between"  # -1: no layer's, as the optimizer
    print(f"  {place:<8} {row.direction:<8} {row.phase:<12} {row.duration_ns / 1e3:9.1f} us")
for counts in record.experts:
    print(f"  layer {counts.layer}  {counts.kind} {list(counts.counts)} (token, slot) pairs per expert")
moetrace.shutdown()
