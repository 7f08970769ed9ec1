"""Every MoE model class of the installed transformers, and configurations small enough to build.

Families are found in the sources and configurations of the package and not in a list kept here, so that a
family that a new release adds is tested (or fails) without a change: those whose modeling code holds experts,
and those whose configuration asks for experts, in code of another family or in a model of one inside. What a
family needs beyond the general shrinking stands in OVERRIDES.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

MODELS = Path(transformers.__file__).parent / "models"
_MOE_SOURCE = re.compile(r'use_experts_implementation|"router_logits"|self\.experts *=|ParallelExperts\(')
_EXPERTS_FIELD = re.compile("num_(local_)?experts$|n_routed_experts$|moe_num_experts$")

SMALL = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
}
LAYERS = 4
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "depth")
_NOT_ARGUMENTS = ("model_type", "transformers_version", "architectures", "dtype")

OVERRIDES: dict[str, dict[str, Any]] = {
    # Defaults that no released model has: None, 0 or 1 where a size belongs.
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "dbrx": {"clip_qkv": 8.0},
    "deepseek_ocr2": {"mlp_layer_types": ["sparse"] * LAYERS, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe"] * (LAYERS // 2) + ["moe"] * (LAYERS // 2)},
    "diffusion_gemma": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "per_layer_config": {},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "per_layer_config": {},
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
    # Rotary sections of fixed size ask for heads of some width.
    "ernie4_5_vl_moe": {"hidden_size": 512},
    "glm4v_moe": {"hidden_size": 512},
    "granitemoehybrid": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "hunyuan_v1_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "moe_topk": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "hy_v4": {"indexer_types": ["full"] * LAYERS},
    "hy_v4_vl": {
        "indexer_types": ["full"] * LAYERS,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 1, 1]},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {"moe_layers": None, "interleave_moe_layer_step": 1},
    "mistral4": {"head_dim": 16},
    "mistral_large4": {"kv_source_layers": list(range(LAYERS))},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p7": {"sliding_window": 4},
    "zaya": {"num_experts_per_tok": 1},
    "vitpose_backbone": {"num_experts": 4, "part_features": 8},
}
"""Fields by family, wherever the configuration or one nested in it has them."""

ADDED: dict[str, dict[str, dict[str, Any]]] = {
    "dbrx": {"clip_qkv": {"rope_theta": 10000.0}},
    "qwen3_omni_moe": {
        "decoder_sparse_step": {"shared_expert_intermediate_size": 16},
        "thinker_hidden_size": {"spatial_merge_size": 2},
    },
}
"""Fields that the code of a family reads and its configuration lacks, by a field beside which they belong."""


def families() -> list[str]:
    """Folders of the package whose modeling code or configuration holds a mixture of experts."""
    return sorted(_with_experts_in_code() | set(configured_families()))


@functools.cache
def _with_experts_in_code() -> set[str]:
    return {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if _MOE_SOURCE.search(path.read_text(encoding="utf-8"))
    }


@functools.cache
def configured_families() -> dict[str, Any]:
    """Configuration classes by folder: they ask for experts, of which their own code has none."""
    found, known = {}, _with_experts_in_code()
    for kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
        family = config_class.__module__.split(".")[2]
        has_model = any((MODELS / family).glob("modeling_*.py")) or kind in modeling_auto.MODEL_MAPPING_NAMES
        if family in known or not has_model or family == "deprecated":
            continue
        try:
            values = config_class().to_dict()
        except Exception:  # noqa: BLE001 - has no defaults: a part that others configure
            continue
        if _asks_for_experts(values):
            found[family] = config_class
    return found


def _asks_for_experts(values: dict[Any, Any]) -> bool:
    return any(
        _asks_for_experts(value)
        if isinstance(value, dict)
        else _EXPERTS_FIELD.search(str(name)) and isinstance(value, int) and value > 1
        for name, value in values.items()
    )


def model_classes(family: str) -> Iterator[type[PreTrainedModel]]:
    """Concrete model classes of a family: of its modeling module, else those that it borrows."""
    if not any((MODELS / family).glob("modeling_*.py")):
        kind = configured_families()[family].model_type
        for mapping in (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            yield getattr(transformers, mapping[kind])
    for path in sorted((MODELS / family).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        for _, found in inspect.getmembers(module, inspect.isclass):
            if (
                issubclass(found, PreTrainedModel)
                and found.__module__ == module.__name__
                and not found.__name__.endswith("PreTrainedModel")
                and getattr(found, "config_class", None) is not None
            ):
                yield found


def _added(values: dict[str, Any], family: str) -> dict[str, Any]:
    nested = {
        name: _added(value, family) if isinstance(value, dict) and name.endswith("config") else value
        for name, value in values.items()
    }
    for beside, fields in ADDED.get(family, {}).items():
        if beside in values:
            nested.update(fields)
    return nested


def _shrunk(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    layers = values.get("num_hidden_layers")
    mla = values.get("kv_lora_rank") is not None
    small = {}
    for name, value in values.items():
        if name in _NOT_ARGUMENTS:
            continue
        if name in overrides:
            small[name] = overrides[name]
        elif isinstance(value, dict) and name.endswith("config"):
            small[name] = _shrunk(value, overrides)
        elif name == "num_key_value_heads" and mla:
            small[name] = SMALL["num_attention_heads"]
        elif name in SMALL and isinstance(value, int | float) and value:
            small[name] = SMALL[name]
        elif name in _LAYER_COUNTS and isinstance(value, int):
            small[name] = LAYERS
        elif name == "pad_token_id" and value is not None:
            small[name] = 1
        elif isinstance(value, list | tuple) and isinstance(layers, int) and len(value) == layers > LAYERS:
            small[name] = list(value)[-LAYERS:]
        else:
            small[name] = value
    return small


def _as_default(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _as_default(value, overrides)
        if isinstance(value, dict) and name.endswith("config") and name not in overrides
        else overrides.get(name, 1 if name == "pad_token_id" and value is not None else value)
        for name, value in values.items()
        if name not in _NOT_ARGUMENTS
    }


def _config_class(model_class: type[PreTrainedModel], family: str) -> Any:
    borrowed = not any((MODELS / family).glob("modeling_*.py"))
    return configured_families()[family] if borrowed else model_class.config_class


def tiny_config(model_class: type[PreTrainedModel], family: str) -> Any:
    """A configuration small enough to run."""
    config_class = _config_class(model_class, family)
    values = _shrunk(config_class().to_dict(), OVERRIDES.get(family, {}))
    return config_class(**_added(values, family))


def build(model_class: type[PreTrainedModel], family: str) -> PreTrainedModel:
    """The model without storage: small, else with the sizes that the family defaults to.

    Raises:
        Exception: whatever the family raised, where neither configuration builds.
    """
    config_class = _config_class(model_class, family)
    try:
        config = tiny_config(model_class, family)
        with torch.device("meta"):
            return model_class(config)
    except Exception:  # noqa: BLE001 - families validate in many ways; the second try decides
        values = _as_default(config_class().to_dict(), OVERRIDES.get(family, {}))
        with torch.device("meta"):
            return model_class(config_class(**_added(values, family)))


def expert_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Modules that hold routed experts, by what their class is called or decorated with."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
        or (re.search("Experts$", type(module).__name__) and "Shared" not in type(module).__name__)
    }


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights that do not depend on how the family initialises."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.05 + (parameter.dim() == 1))
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            # Experts by token, which the family's checkpoints hold.
            tokens, slots = (torch.arange(size) for size in table.shape)
            table.copy_((tokens.unsqueeze(1) + slots) % SMALL["num_local_experts"])
    return model
