"""Models of transformers that take another model inside, of whatever family its configuration names.

Where that is a model of language it may be one with experts, though none is by default: a vision-language
model around a mixture of experts is the commonest case. Which parts are taken so is read from the sources
of the package (`AutoModel.from_config(config.<part>)`), and each is built with a small Qwen3 MoE in it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from frameworks import transformers_models as models

_PART = re.compile(r"Auto\w*\.(?:_?from_config)\(\s*(?:config=)?(?:self\.)?config\.(\w+)")
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


@functools.cache
def parts() -> dict[str, tuple[str, ...]]:
    """Names of the parts that a family takes by configuration, by family."""
    found: dict[str, set[str]] = {}
    for path in models.MODELS.glob("*/modeling_*.py"):
        names = set(_PART.findall(path.read_text(encoding="utf-8")))
        if names and path.parent.name != "deprecated":
            found.setdefault(path.parent.name, set()).update(names)
    return {family: tuple(sorted(names)) for family, names in sorted(found.items())}


def pairs() -> list[tuple[str, str]]:
    """(family, part) of all parts that are a model of language."""
    return [(family, part) for family, names in parts().items() for part in names if part in LANGUAGE]


def mixture(**more: Any) -> PreTrainedConfig:
    """A configuration of a small mixture of experts of two layers."""
    fields = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **more,
    }
    return transformers.Qwen3MoeConfig(**fields)


def config_with(model_class: type[PreTrainedModel], part: str, *, small: bool) -> PreTrainedConfig:
    """The class's configuration with a mixture of experts in one part, or in the text model of that part."""
    config_class = model_class.config_class
    values = config_class().to_dict() if part not in ("encoder", "decoder") else {}
    if small:
        values = models._shrunk(values, {})
    values = {name: value for name, value in values.items() if name not in models._NOT_ARGUMENTS}
    inner = values.get(part)
    if part == "vlm_config" and isinstance(inner, dict):
        text = "text_config" if "text_config" in inner else part
        values[part] = {**inner, text: mixture().to_dict()}
    else:
        values[part] = mixture()
    if part == "decoder":
        values["encoder"] = transformers.BertConfig().to_dict()
    return config_class(**values)


def build(model_class: type[PreTrainedModel], part: str) -> PreTrainedModel:
    """The model without storage."""
    config = config_with(model_class, part, small=False)
    with torch.device("meta"):
        return model_class(config)
