"""transformers 5: a mixture of experts inside a model of another kind, and classes that nothing shows.

Families with experts of their own are in test_transformers_5.py.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers.integrations.moe", reason="transformers 5 is not installed")

import torch

from frameworks import transformers_composites as composites
from frameworks import transformers_models as models
from frameworks.checks import Truth, check, trace
from frameworks.transformers_sources import suspects
from moetrace.adapters.base import LayerMatch
from moetrace.adapters.transformers import TransformersAdapter
from moetrace.adapters.transformers_v4 import TransformersV4Adapter

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]

NO_LANGUAGE = {
    "acoustic_model_config": "sound as codes",
    "acoustic_tokenizer_encoder_config": "sound as codes",
    "audio_config": "hears",
    "audio_encoder": "hears",
    "audio_encoder_config": "hears",
    "backbone_config": "sees",
    "codec_config": "sound as codes",
    "decoder_config": "sound as codes",
    "detector_config": "sees",
    "diarization_config": "hears",
    "dit_config": "moves a robot, densely",
    "encoder_config": "hears",
    "esmc_config": "a model of proteins, dense",
    "fov_model_config": "sees",
    "high_res_vision_config": "sees",
    "image_model_config": "sees",
    "keypoint_detector_config": "sees",
    "patch_model_config": "sees",
    "projector_config": "a few layers between two models",
    "qformer_config": "a few layers between two models",
    "semantic_model_config": "hears",
    "semantic_tokenizer_encoder_config": "hears",
    "tracker_config": "sees",
    "video_config": "sees",
    "vision_config": "sees",
}
"""Parts of configurations that are no model of language, and what they are."""

TAKES_NONE = {
    ("aria", "text_config"): "its own text model only, which has experts: see test_transformers_5.py",
    ("colqwen2", "vlm_config"): "makes a text model of Qwen2-VL of whatever its text part says",
    ("embedding_gemma2", "text_config"): "its own text model only, which is dense",
    ("encoder_decoder", "decoder"): "the decoder attends to the encoder, which none with experts does",
    ("gemma3n", "text_config"): "its own text model only, which is dense",
    ("gemma4", "text_config"): "its own text model only, which has experts: see test_transformers_5.py",
    ("gemma4_assistant", "text_config"): "Gemma 4 only, and without experts",
    ("gemma4_unified", "text_config"): "its own text model only, which is dense",
    ("grounding_dino", "text_config"): "calls its text model with an argument of BERT",
    ("mm_grounding_dino", "text_config"): "calls its text model with an argument of BERT",
    ("musicgen", "text_encoder"): "one of a list of text encoders, of which none has experts",
    ("musicgen_melody", "text_encoder"): "one of a list of text encoders, of which none has experts",
}
"""Parts in which no mixture of experts can be, and why."""

NOT_AROUND = {
    "Florence2ForConditionalGeneration": "needs an encoder and a decoder inside; its base model is built",
}
"""Classes that do not build around a mixture in families that do, and why."""

NEEDS_TIMM = {"fast_vlm", "omdet_turbo", "pe_audio_video", "pe_video", "perception_lm"}
"""Families whose part that sees comes from timm, which wants a torchvision that the development
environment's CPU build of torch does not go with. Where it is not installed they are not built."""

_IMAGES, _SIZES = "wants images beside the text", "sizes of its parts must agree, which small ones do not"
_READS = "its forward reads what configurations of its usual text model have"
_LARGE = "a hundred million parameters and more beside the text model"
_TIMM = "needs timm"
_OTHER = "no class that goes on with a text"
NOT_RUN = {
    "blip_2": _IMAGES,
    "embedding_gemma2": _OTHER,
    "fast_vlm": _TIMM,
    "florence2": "see NOT_AROUND",
    "fun_asr_nano": _SIZES,
    "fuyu": _OTHER,
    "gemma4_assistant": _OTHER,
    "gemma4_unified_assistant": _OTHER,
    "granite_speech": _LARGE,
    "granite_speech_plus": _LARGE,
    "hyperclovax_vision_v2": _READS,
    "instructblip": _IMAGES,
    "instructblipvideo": _IMAGES,
    "janus": _LARGE,
    "jev": _OTHER,
    "mistral_large4": _READS,
    "modernvbert": _OTHER,
    "muse_glimmer": _READS,
    "muse_spark": _SIZES,
    "musicflamingo": "does not take back the configuration that it gives",
    "nemotron3_5_transcribe": _SIZES,
    "nemotron_h_omni": _OTHER,
    "omdet_turbo": _OTHER,
    "pe_audio": _OTHER,
    "pe_audio_video": _OTHER,
    "pe_video": _OTHER,
    "perception_lm": _TIMM,
    "qwen4_exp": _READS,
    "shieldgemma2": _OTHER,
    "ultravbert": _OTHER,
    "vibevoice": _LARGE,
    "vibevoice_asr": _LARGE,
    "vision_text_dual_encoder": _OTHER,
}
"""Families that are matched around a mixture, but of which no step is run, and why."""
RUN = [
    family
    for family, part in composites.pairs()
    if part == "text_config" and family not in NOT_RUN and (family, part) not in TAKES_NONE
]

NO_MIXTURE = {
    "BailingHybridForgetGate": "a gate of linear attention",
    "Cohere2MoeMLP": "dense layers",
    "DFineGate": "weighs two features of an image",
    "Deimv2Gate": "weighs two features of an image",
    "DogeCDMoE": "looks up rows of an embedding: see NO_LAYERS in test_transformers_5.py",
    "Ernie4_5_VLMoeMLP": "dense layers and shared experts of its text model",
    "Ernie4_5_VLMoeMoeBlock": "sends text and images to a block each, which are covered",
    "Gemma3nTextAltUp": "weighs a few versions of the hidden states",
    "Glm5NextTextForgetGate": "a gate of linear attention",
    "GraniteDoclingDensityRouter": "picks the resolution of an image",
    "GraniteDoclingModel": "holds that router",
    "GraniteMoeHybridDecoderLayer": "holds the block, which is covered",
    "Inkling2LoopMessageGate": "weighs what a loop over layers hands on",
    "JetMoeAttention": "mixture of attention: see NOT_COVERED in test_transformers_5.py",
    "JetMoeMoA": "mixture of attention: see NOT_COVERED in test_transformers_5.py",
    "KimiLinearForgetGate": "a gate of linear attention",
    "Lfm2MoeMLP": "dense layers",
    "MuseSparkResidualGate": "a gate of the residual stream",
    "Qwen3MoeMLP": "dense layers",
    "Qwen3OmniMoeMLP": "shared expert and dense layers",
    "Qwen3OmniMoeTextTopKRouter": "no model holds one: thinker and talker have routers of their own",
    "VitPoseBackboneMoeMLP": "the data set picks the expert: see NO_LAYERS in test_transformers_5.py",
    "VitPoseNaiveMoe": "the data set picks the expert: see NO_LAYERS in test_transformers_5.py",
}
"""Classes that look like a part of a mixture and are none that is instrumented, and why."""


def _matches(model: Any) -> list[LayerMatch]:
    return [
        layer
        for adapter in (TransformersAdapter(), TransformersV4Adapter())
        for layer in adapter.match(model).layers
    ]


def test_every_part_that_is_taken_by_configuration_is_known() -> None:
    """A release that takes a part by a new name is looked at."""
    names = {name for taken in composites.parts().values() for name in taken}
    assert names - set(composites.LANGUAGE) == set(NO_LANGUAGE)
    assert set(TAKES_NONE) <= set(composites.pairs())
    assert set(NOT_RUN) <= {family for family, _ in composites.pairs()}


@pytest.mark.parametrize(("family", "part"), composites.pairs())
def test_a_mixture_inside_another_model_is_covered(family: str, part: str) -> None:
    """In every class that holds the part all blocks with routed experts are found, and nothing else."""
    found = 0
    for model_class in models.model_classes(family):
        if not composites.takes(model_class, part, family):
            continue
        try:
            model = composites.build(model_class, part, family)
        except ImportError:
            assert family in NEEDS_TIMM
            return
        except Exception:
            if (family, part) in TAKES_NONE or model_class.__name__ in NOT_AROUND:
                continue
            raise
        assert model_class.__name__ not in NOT_AROUND
        layers = _matches(model)
        blocks = {path.rpartition(".")[0] for path in models.expert_modules(model)}
        assert {layer.path for layer in layers} == blocks, model_class.__name__
        assert len({layer.layer for layer in layers}) == len(layers), "layer numbers are not unique"
        found += len(layers)
    assert bool(found) == ((family, part) not in TAKES_NONE), TAKES_NONE.get((family, part), "no layer found")


def test_no_class_that_looks_like_a_mixture_is_left_out() -> None:
    """Every class of experts or a router in the package is at work in a covered layer, or listed with why."""
    reached = set()
    for family in models.families():
        for model_class in models.model_classes(family):
            try:
                model = models.build(model_class, family)
            except TypeError:
                continue  # NOT_A_MODEL of test_transformers_5.py
            for layer in _matches(model):
                reached |= {type(module).__name__ for module in model.get_submodule(layer.path).modules()}
    assert set(suspects()) - reached == set(NO_MIXTURE)


@pytest.mark.parametrize("family", RUN)
def test_a_step_through_the_outer_model_shows_the_layers_inside(family: str) -> None:
    """Text alone, through the model of images or sound: the same bits, all phases, exact counts."""
    (model_class,) = (
        found for found in models.model_classes(family) if found.__name__.endswith("ForConditionalGeneration")
    )
    model = models.filled(composites.small(model_class, family).eval())
    truth, inputs = Truth(), torch.randint(2, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    layers = _matches(model)
    for layer in layers:
        model.get_submodule(f"{layer.path}.experts").register_forward_pre_hook(
            lambda _, args, layer=layer: truth.add_ids(layer.layer, args[1], layer.num_experts)
        )

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(input_ids=inputs, use_cache=False)[0].clone()]

    traced = trace(model, run, truth=truth)
    order = ["router", "permute", "expert_gemm", "unpermute"]
    check(traced, truth, {layer.layer: order for layer in layers}, layers=[layer.layer for layer in layers])
