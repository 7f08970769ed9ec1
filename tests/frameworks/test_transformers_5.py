"""transformers 5 as installed: every MoE model class is found, and all but a few families are run.

What a family's experts are called with is looked at by a hook of the test's own, so that counts are
checked against the arguments of the experts and not against the router that the library reads.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers.integrations.moe", reason="transformers 5 is not installed")

import torch
from transformers import PreTrainedModel

import moetrace
from frameworks import transformers_models as models
from frameworks.checks import Traced, Truth, check, sequence, trace
from moetrace.adapters.base import LayerMatch
from moetrace.adapters.transformers import TransformersAdapter
from moetrace.adapters.transformers_v4 import TransformersV4Adapter
from moetrace.instrument.coverage import CoverageReport
from moetrace.testing import MemoryEmitter
from moetrace_schemas.enums import Phase

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]

NO_LAYERS = {
    "doge": "product keys look up rows of an embedding for each token: there are no routed experts to time",
    "vitpose_backbone": "the data set's number picks the expert for a whole image: there is no router",
}
"""Families of which nothing is instrumented, and why."""

NOT_COVERED = {
    "JetMoeMoA": "mixture of attention: attention runs between its two halves",
}
"""Classes of blocks that are left alone in families that are covered otherwise."""

NOT_RUN = {
    "dots3_note": "its layers must agree on sizes that a small configuration cannot keep; matched only",
    "nemotron3_5_transcribe": "builds with its own sizes only, which are not small; matched only",
    "nemotron_h_omni": "its one class embeds images and sound beside the text; see nemotron_h; matched only",
}
"""Families of which no step is run, and why."""

NO_EXPERTS = {
    "Vision": "sees images: the experts are in the model of text beside it",
    "Audio": "hears: the experts are in the model of text beside it",
    "WordTimestamp": "hears, like Audio",
    "Code2Wav": "makes sound of codes, densely",
    "TalkerCodePredictor": "predicts codes, densely",
    "PreTrainedModelForConditionalGeneration": "a base of others, without layers",
}
"""Parts of names of model classes that have no experts in families that have, and why."""

EXPERTS_THAT_SEE = {"Dots3NoteVisionModel"}
"""Classes that have experts in spite of such a name."""

NOT_A_MODEL = {
    "Qwen3OmniMoeCode2WavDecoderBlock": "a part that its model builds with a layer number; no experts in it",
}
"""Classes that cannot be built from a configuration, and why."""

SPLIT = ["router", "permute", "expert_gemm", "unpermute"]
ONE_CALL = ["router", "fused"]
SHARED_FIRST = ["shared_expert", "permute", *SPLIT]
SHARED_LAST = [*SPLIT, "shared_expert"]
LINEARS = ["fused", "router", "fused", "expert_gemm", "fused", "expert_gemm", "fused"]
SEQUENCES: dict[str, list[str]] = {
    "afmoe": ["router", "permute", "shared_expert", "permute", "expert_gemm", "unpermute"],
    "dbrx": ONE_CALL,
    "jetmoe": LINEARS,
    "llama4": ["router", "fused", "shared_expert"],
    "longcat_flash": ONE_CALL,
    "nllb_moe": ONE_CALL,
    "openai_privacy_filter": ONE_CALL,
    "step3p7": ["shared_expert", "fused", "router", "fused"],
    "switch_transformers": ONE_CALL,
}
"""Families whose experts run in one loop, or whose shared expert runs between; all others as in ORDERS."""
ORDERS = (SPLIT, SHARED_FIRST, SHARED_LAST, ["shared_expert", *SPLIT])


def _matches(model: Any) -> list[LayerMatch]:
    adapters = (TransformersAdapter(), TransformersV4Adapter())
    return [layer for adapter in adapters for layer in adapter.match(model).layers]


@pytest.mark.parametrize("family", models.families())
def test_every_model_class_with_routed_experts_is_covered(family: str) -> None:
    """In each class all blocks with routed experts are found, and nothing else is taken for one."""
    found = 0
    for model_class in models.model_classes(family):
        if model_class.__name__ in NOT_A_MODEL:
            continue
        model = models.build(model_class, family)
        layers = _matches(model)
        blocks = {
            path.rpartition(".")[0]
            for path in models.expert_modules(model)
            if type(model.get_submodule(path.rpartition(".")[0])).__name__ not in NOT_COVERED
        }
        assert {layer.path for layer in layers} == blocks, model_class.__name__
        assert len({layer.layer for layer in layers}) == len(layers), "layer numbers are not unique"
        assert all(layer.num_experts > 1 for layer in layers)
        assert all(Phase.ROUTER in layer.phases for layer in layers)
        name = model_class.__name__
        dense = name not in EXPERTS_THAT_SEE and any(part in name for part in NO_EXPERTS)
        assert bool(layers) != (dense or family in NO_LAYERS), f"{name}: {len(layers)} layers"
        found += len(layers)
    assert bool(found) == (family not in NO_LAYERS), NO_LAYERS.get(family, "no layer found")


def _runnable(family: str) -> PreTrainedModel:
    classes = list(models.model_classes(family))
    for ending in ("ForCausalLM", "TextModel", "ForConditionalGeneration", "ForTokenClassification"):
        for model_class in classes:
            if model_class.__name__.endswith(ending):
                return models.filled(model_class(models.tiny_config(model_class, family)).eval())
    raise AssertionError(f"{family}: no model class to run")


def _look_at_experts(model: Any, layer: LayerMatch, truth: Truth) -> None:
    block, experts_total = model.get_submodule(layer.path), layer.num_experts

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = [*args[1:], *kwargs.values()]
        ids = next((t for t in rest if isinstance(t, torch.Tensor) and not t.dtype.is_floating_point), None)
        if ids is None:
            # Every expert gets all tokens, zeroed where it was not chosen.
            rows = args[0].view(experts_total, -1, args[0].shape[-1])
            truth.add(layer.layer, (rows != 0).any(-1).sum(1))
        elif ids.shape[-1] == experts_total:
            truth.add(layer.layer, ids.reshape(-1, experts_total).sum(0))
        else:
            truth.add_ids(layer.layer, ids, experts_total)

    if hasattr(block, "experts"):
        block.experts.register_forward_pre_hook(look, with_kwargs=True)
    else:
        block.input_linear.register_forward_pre_hook(
            lambda _, args: truth.add(layer.layer, torch.tensor(list(args[1])))
        )


@pytest.mark.parametrize("family", sorted(set(models.families()) - set(NO_LAYERS) - set(NOT_RUN)))
def test_a_step_shows_all_phases_and_counts_and_changes_nothing(family: str) -> None:
    """Outputs are the same bits traced or not, counts equal what the experts were called with."""
    model = _runnable(family)
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(2, 100, (2, 7), generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, 100, (2, 5), generator=generator)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**inputs, use_cache=False)[0].clone()]

    truth = Truth()
    for layer in _matches(model):
        _look_at_experts(model, layer, truth)
    traced = trace(model, run, truth=truth)
    _check(family, traced, truth)


def _check(family: str, traced: Traced, truth: Truth) -> None:
    report: CoverageReport = traced.report
    # Blocks of another modality (vision experts) see no token in a step of text.
    used = [layer for layer in report.layers if (layer.layer, "routed") in truth.counts]
    assert used
    if family in SEQUENCES:
        order = SEQUENCES[family]
    else:
        order = sequence(traced.records[0], used[0].layer)
        assert order in ORDERS
    check(traced, truth, {layer.layer: order for layer in used}, layers=[layer.layer for layer in used])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "jamba", "granitemoehybrid", "lfm2_moe"])
def test_generation_is_a_prefill_and_then_decodes(family: str) -> None:
    """`generate` hands caches on under the name of its release: of keys, of states, and of both."""
    model = _runnable(family)
    emitter = MemoryEmitter()
    moetrace.init(run_id="generation", emitters=[emitter], endpoint="", max_intervals=1024, buffers=6)
    try:
        moetrace.instrument(model, strict=True)
        with torch.no_grad():
            made = model.generate(  # type: ignore[operator]
                torch.randint(2, 20, (2, 6)), max_new_tokens=4, min_new_tokens=4, do_sample=False
            )
        assert made.shape == (2, 10)
        records = emitter.wait_for(4)
    finally:
        moetrace.shutdown()
    assert [record.forward_mode.value for record in records] == ["prefill", "decode", "decode", "decode"]
