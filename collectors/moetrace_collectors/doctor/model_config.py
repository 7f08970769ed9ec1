"""What a model's own config.json says of its experts: the shape that counts are checked against. I/O only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetrace_collectors.errors import UsageError
from moetrace_collectors.offline.source import read_json

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_router_topk", "top_k")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size",)
"""Models that have one shared expert and tell its width only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the config says; None where it does not."""

    top_k: int | None = None
    experts: int | None = None
    shared_experts: int | None = None


def read_model_config(path: Path) -> ModelShape:
    """The shape in a config.json as Hugging Face models ship it.

    Raises:
        UsageError: not JSON, no object, or it names no experts.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a JSON object expected, as config.json of a model is")
    # Multimodal models keep their language model's config one level down.
    for config in (document, document.get("text_config")):
        if isinstance(config, Mapping):
            top_k, experts = _first(config, TOP_K), _first(config, EXPERTS)
            if top_k is not None and experts is not None:
                shared = _first(config, SHARED)
                if shared is None:
                    shared = 1 if _first(config, SHARED_WIDTH) else 0
                return ModelShape(top_k=top_k, experts=experts, shared_experts=shared)
    raise UsageError(
        f"{path} names no experts: one of {', '.join(EXPERTS)} and one of {', '.join(TOP_K)} expected; give "
        "--top-k and --experts instead"
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value >= 0:
            return value
    return None
