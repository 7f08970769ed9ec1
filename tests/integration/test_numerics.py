"""Tracing changes nothing that the model computes: outputs, loss and gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import moetrace
from moetrace.adapters.reference import ReferenceMoE
from moetrace.testing import MemoryEmitter
from moetrace_schemas.identity import is_sampled
from transformers_there import transformers_or_skip

STEPS = 4
RUN_ID = "numerics"


@pytest.fixture(autouse=True)
def _one_thread_and_no_tracer_left() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    moetrace.shutdown(timeout_s=2)


class ReferenceModel(nn.Module):
    """Two reference layers with a residual and a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(ReferenceMoE(16, 24, num_experts=4, top_k=2) for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        """As a language model: logits and loss."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"logits": logits, "loss": loss}


def transformers_model(family: str, implementation: str) -> nn.Module:
    """A tiny model of a real architecture with random weights."""
    transformers = transformers_or_skip()
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    }
    if family == "olmoe":
        model: Any = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**common, num_experts=4))
    elif family == "qwen3_moe":
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **common, num_experts=4, moe_intermediate_size=24, head_dim=8, decoder_sparse_step=1
            )
        )
    elif family == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**common, num_local_experts=4))
    else:
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **common,
                n_routed_experts=4,
                moe_intermediate_size=24,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=2,
                topk_group=1,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_nope_head_dim=4,
                qk_rope_head_dim=4,
                v_head_dim=8,
            )
        )
    model.set_experts_implementation(implementation)
    result: nn.Module = model.train()
    return result


MODELS: dict[str, Callable[[], nn.Module]] = {"reference": ReferenceModel}
for _family in ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3"):
    for _implementation in ("eager", "grouped_mm"):
        MODELS[f"{_family}-{_implementation}"] = lambda f=_family, i=_implementation: transformers_model(f, i)  # type: ignore[misc]


def training_steps(model: nn.Module, *, traced: bool) -> list[torch.Tensor]:
    """Logits, loss and every gradient of a few optimiser steps on padded batches, and the last weights."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: list[torch.Tensor] = []
    for step in range(STEPS):
        ids = torch.randint(1, 64, (2, 8), generator=generator)
        mask = torch.ones_like(ids)
        mask[step % 2, 5:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        if traced:
            with moetrace.step(step):
                result = model(input_ids=ids, attention_mask=mask, labels=labels)
                result["loss"].backward()
        else:
            result = model(input_ids=ids, attention_mask=mask, labels=labels)
            result["loss"].backward()
        numbers += [result["logits"].detach().clone(), result["loss"].detach().clone()]
        for parameter in model.parameters():
            numbers.append(torch.empty(0) if parameter.grad is None else parameter.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return numbers + [parameter.detach().clone() for parameter in model.parameters()]


def bit_identical(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """The same bits, and NaN equal to NaN."""
    return len(left) == len(right) and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_bit_identical_with_tracing_on_sampled_and_off_again(name: str) -> None:
    """Every output, loss, gradient and weight of a short training run; and something was traced."""
    torch.manual_seed(0)
    model = MODELS[name]()
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def run(*, traced: bool) -> list[torch.Tensor]:
        model.load_state_dict(start)
        return training_steps(model, traced=traced)

    plain = run(traced=False)
    assert any(numbers.abs().sum() > 0 for numbers in plain)
    assert bit_identical(run(traced=False), plain)  # else the comparison would prove nothing
    for sample in ("1/1", "1/2", "0"):
        emitter = MemoryEmitter()
        tracer = moetrace.init(run_id=RUN_ID, sample=sample, emitters=[emitter])
        assert moetrace.instrument(model, strict=True)
        assert bit_identical(run(traced=True), plain), sample
        moetrace.uninstrument(model)
        assert bit_identical(run(traced=True), plain), f"{sample}, after uninstrument"
        moetrace.shutdown()
        sampled = [step for step in range(STEPS) if is_sampled(RUN_ID, step, tracer.config.sample_period)]
        assert [record.step for record in emitter.records] == sampled * 2
        assert all(record.experts for record in emitter.records[: len(sampled)])
        assert tracer.guard.errors == {}
    assert bit_identical(run(traced=False), plain)


@pytest.mark.parametrize("name", ["reference", "olmoe-grouped_mm"])
def test_inference_is_bit_identical_without_a_step_around_it(name: str) -> None:
    """Forwards that are steps of their own, without gradients and in inference mode."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(1, 64, (2, 8))
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(**arguments)["logits"].clone()
        with torch.inference_mode():
            second = model(**arguments)["logits"].clone()
        return [first, second]

    plain = run()
    emitter = MemoryEmitter()
    moetrace.init(run_id=RUN_ID, emitters=[emitter])
    moetrace.instrument(model)
    traced = run()
    moetrace.shutdown()
    assert bit_identical(traced, plain)
    assert len(emitter.records) == 2


def test_generation_gives_the_same_tokens_and_counts_each_forward() -> None:
    """Prefill and each decoded token are steps of their own; left padding is left out of the prompt only."""
    torch.manual_seed(0)
    model: Any = MODELS["olmoe-grouped_mm"]().eval()
    ids = torch.randint(3, 64, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "eos_token_id": 2}
    plain = model.generate(input_ids=ids, attention_mask=mask, **settings)
    emitter = MemoryEmitter()
    tracer = moetrace.init(run_id=RUN_ID, emitters=[emitter], forward_mode="decode", buffers=16)
    moetrace.instrument(model)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, **settings), plain)
    moetrace.shutdown()
    totals = [
        {row.kind.value: sum(row.counts) for row in record.experts if row.layer == 0}
        for record in emitter.records
    ]
    assert totals == [{"routed": 10 * 2, "padding": 2 * 2}, *[{"routed": 2 * 2}] * 3]
    assert tracer.guard.errors == {}
