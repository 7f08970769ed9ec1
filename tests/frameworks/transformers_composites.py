"""Models of transformers that take another model inside, of whatever family its configuration names.

Where that is a model of language it may be one with experts, though none is by default: a vision-language
model around a mixture of experts is the commonest case. Which parts are taken so is read from the sources
of the package (`AutoModel.from_config(config.<part>)`), and each is built with a small mixture in it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from frameworks import transformers_models as models

_PART = re.compile(r"Auto\w+\.(?:_?from_config)\(\s*(?:config=)?(?:self\.)?(?:config\.)?(\w+)")
LANGUAGE = (
    "text_config",
    "decoder",
    "encoder",
    "generator",
    "question_encoder",
    "text_encoder",
    "vlm_config",
)
"""Parts that are a model of language, or hold one."""
NO_DEFAULT = ("encoder", "decoder", "generator", "question_encoder", "text_encoder")
"""Parts of configurations that have no values by themselves."""
WHOLE = "config"
"""Instead of a part: all of the configuration goes to another family's model."""


@functools.cache
def parts() -> dict[str, tuple[str, ...]]:
    """Names of the parts that a family takes by configuration, by family."""
    found: dict[str, set[str]] = {}
    for path in models.MODELS.glob("*/modeling_*.py"):
        code = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if ">>>" not in line)
        names = {"text_config" if name == WHOLE else name for name in _PART.findall(code)}
        if names and path.parent.name not in ("auto", "deprecated"):
            found.setdefault(path.parent.name, set()).update(names)
    return {family: tuple(sorted(names)) for family, names in sorted(found.items())}


def pairs() -> list[tuple[str, str]]:
    """(family, part) of all parts that are a model of language."""
    return [(family, part) for family, names in parts().items() for part in names if part in LANGUAGE]


def mixture(part: str, family: str, hidden_size: int) -> PreTrainedConfig:
    """A configuration of a small mixture of experts of two layers.

    Some models around it read what configurations of their usual inside have.
    """
    if family == "gemma4_unified_assistant":
        # Takes Gemma 4 only.
        return transformers.Gemma4TextConfig(
            enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16,
            hidden_size=hidden_size, num_hidden_layers=2, num_kv_shared_layers=2,
            hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
    if part == "generator":
        return transformers.NllbMoeConfig(
            d_model=32, encoder_layers=2, decoder_layers=2, num_experts=4, encoder_sparse_step=1,
            decoder_sparse_step=1, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=128,
            encoder_ffn_dim=32, decoder_ffn_dim=32,
        )  # fmt: skip
    return transformers.Qwen3MoeConfig(
        hidden_size=hidden_size, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        use_bidirectional_attention=False, logit_scale=1.0, final_logit_softcapping=None,
        classifier_bias=False, decoder_bias=False, classifier_activation="gelu", classifier_dropout=0.0,
        prediction_head_size=32, num_nextn_predict_layers=0, norm_eps=1e-6, norm_bias=False,
    )  # fmt: skip


def takes(model_class: type[PreTrainedModel], part: str, family: str) -> bool:
    """Whether the class's configuration has the part."""
    config_class: Any = model_class.config_class
    if part in NO_DEFAULT:
        return bool(config_class.model_type.replace("-", "_") == family)
    return part in (config_class.sub_configs or {}) or part in _values(config_class)


def _values(config_class: Any) -> dict[str, Any]:
    try:
        values = config_class().to_dict()
    except Exception:  # noqa: BLE001 - its defaults are none that it takes
        return {}
    return {name: value for name, value in values.items() if name not in models._NOT_ARGUMENTS}


def build(model_class: type[PreTrainedModel], part: str, family: str) -> PreTrainedModel:
    """The model around a mixture, without storage.

    Raises:
        Exception: whatever the family raised, where it takes none.
    """
    config_class: Any = model_class.config_class
    values = {} if part in NO_DEFAULT else _values(config_class)
    inner = values.get(part)
    if part == "vlm_config" and isinstance(inner, dict) and "text_config" in inner:
        size = inner["text_config"].get("hidden_size", 32)
        values[part] = {**inner, "text_config": mixture(part, family, size).to_dict()}
    else:
        size = inner.get("hidden_size", 32) if isinstance(inner, dict) else 32
        values[part] = mixture(part, family, size)
    for other, kind in _BESIDE.get(part, {}).items():
        values[other] = getattr(transformers, kind)()
    for other, fields in _OTHERS.get(family, {}).items():
        values[other] = {**values[other], **fields}
    with torch.device("meta"):
        return model_class(config_class(**values))


def small(model_class: type[PreTrainedModel], family: str) -> PreTrainedModel:
    """A model of language with experts inside one that sees or hears, small enough to run."""
    config_class: Any = model_class.config_class
    values = models._shrunk(_values(config_class), {"encoder_attention_heads": 4})
    return model_class(config_class(**{**values, "text_config": mixture("text_config", family, 32)}))


_OTHERS = {"aya_vision": {"vision_config": {"num_attention_heads": 16}}}
"""Fields of other parts, by family, whose defaults do not fit each other."""
_BESIDE = {
    "decoder": {"encoder": "BertConfig"},
    "encoder": {"decoder": "BertConfig"},
    "generator": {"question_encoder": "DPRConfig"},
    "question_encoder": {"generator": "BartConfig"},
    "text_encoder": {"audio_encoder": "EncodecConfig", "decoder": "MusicgenDecoderConfig"},
}
"""What such configurations must have besides."""
