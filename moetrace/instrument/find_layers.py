"""Which MoE layers a model has: asks the adapters, and settles who of them takes which layer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from moetrace.adapters.base import Adapter, EngineCall, LayerMatch
from moetrace.instrument.patches import mark_of

ADAPTERS = (
    ("moetrace.adapters.megatron", "MegatronAdapter", "megatron.core"),
    ("moetrace.adapters.deepspeed", "DeepSpeedAdapter", "deepspeed"),
    ("moetrace.adapters.fairscale", "FairscaleAdapter", "fairscale"),
    ("moetrace.adapters.torchtitan", "TorchtitanAdapter", "torchtitan"),
    ("moetrace.adapters.olmo_core", "OlmoCoreAdapter", "olmo_core"),
    ("moetrace.adapters.megablocks", "MegaBlocksAdapter", "megablocks"),
    ("moetrace.adapters.tutel", "TutelAdapter", "tutel"),
    ("moetrace.adapters.vllm", "VllmAdapter", "vllm"),
    ("moetrace.adapters.sglang", "SGLangAdapter", "sglang"),
    ("moetrace.adapters.transformers", "TransformersAdapter", ""),
    ("moetrace.adapters.transformers_v4", "TransformersV4Adapter", ""),
    ("moetrace.adapters.reference", "ReferenceAdapter", ""),
)
"""(module, class, framework), in order of preference: the first that finds a layer wins it. An adapter
with a framework is loaded only where that was imported already: a model of it cannot exist otherwise."""


@dataclass(slots=True)
class Found:
    """What adapters say about a model."""

    layers: list[LayerMatch] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    engine_calls: list[EngineCall] = field(default_factory=list)
    looked_for: tuple[str, ...] = ()


def find_layers(model: Any) -> Found:
    """MoE layers of a model that are not instrumented yet, each by one adapter."""
    adapters = [_load(module, name) for module, name, framework in ADAPTERS if _imported(framework)]
    result = Found(looked_for=tuple(adapter.looks_for for adapter in adapters))
    matches: dict[str, LayerMatch] = {}
    for adapter in adapters:
        found = adapter.match(model)
        taken = list(matches)
        for match in found.layers:
            # One adapter may know a block, and another one its experts.
            if not any(_overlap(match.path, path) for path in taken):
                matches[match.path] = match
        result.skipped.extend(found.skipped)
        result.engine_calls += found.engine_calls
    for match in matches.values():
        if _is_installed(match):
            result.skipped.append((match.path, "already instrumented, as part of another model"))
        else:
            result.layers.append(match)
    return result


def numbered_apart(found: list[LayerMatch], taken: Iterable[int]) -> list[LayerMatch]:
    """Layers of one model, behind those of the models before it where they would share numbers.

    A draft model beside the one that it drafts for would else add to the same layers.
    """
    taken = set(taken)
    if not any(match.layer in taken for match in found):
        return found
    first = max(taken) + 1
    note = f"another instrumented model has the same layer numbers: these layers count from {first}"
    return [_with_number(match, first + match.layer, note) for match in found]


def _with_number(match: LayerMatch, layer: int, note: str) -> LayerMatch:
    targets = (t if t.layer is None else replace(t, layer=layer) for t in match.targets)
    return replace(match, layer=layer, targets=tuple(targets), notes=(*match.notes, note))


def _is_installed(match: LayerMatch) -> bool:
    return any(
        mark_of(vars(target.owner).get(target.attribute)) for target in match.targets if not target.shared
    )


def _overlap(one: str, other: str) -> bool:
    """Whether one module path is the other, or lies within it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or not (one and other)


def _imported(framework: str) -> bool:
    return not framework or framework in sys.modules


def _load(module: str, name: str) -> Adapter:
    adapter: Adapter = getattr(importlib.import_module(module), name)()
    return adapter
